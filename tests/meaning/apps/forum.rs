//! Open edX's forum: threads and comments in one collection, and their authors.

use bson::{Document, doc};
use rand::{Rng, rngs::StdRng};

use super::{Change, Data, START, Size, YEAR, at, later, skewed};
use crate::support::cases::{delete, insert, update};

pub const CHANGES: &[(&str, Change)] = &[
    ("a thread", |size, nth, random| insert("contents", content(format!("n{nth}"), size, random, nth, later(nth)))),
    ("a response", |size, nth, random| {
        let mut comment = content(format!("n{nth}"), size, random, nth, later(nth));
        comment.extend(doc! {"_type": "Comment", "comment_thread_id": thread(size, random)});
        insert("contents", comment)
    }),
    ("a reply", |size, nth, random| {
        let mut comment = content(format!("n{nth}"), size, random, nth, later(nth));
        let parent = format!("c{}", random.random_range(0..size.messages() / 2));
        comment.extend(doc! {"_type": "Comment", "comment_thread_id": thread(size, random), "parent_id": parent});
        insert("contents", comment)
    }),
    ("a comment is deleted", |size, nth, _| delete("contents", format!("c{}", nth % (size.messages() / 2)))),
    ("a comment is flagged", |size, nth, random| {
        let id = format!("c{}", random.random_range(0..size.messages() / 2));
        update("contents", id, doc! {"$set": {"updated_at": later(nth)}, "$addToSet": {"abuse_flaggers": "7"}})
    }),
    ("a comment moves, with the replies to it", |size, nth, random| {
        // To a comment with a lower number, so that no circle arises.
        let comment = 1 + nth % (size.messages() / 2 - 1);
        let parent = format!("c{}", random.random_range(0..comment));
        update("contents", format!("c{comment}"), doc! {"$set": {"parent_id": parent}})
    }),
    ("a user is renamed", |size, nth, random| {
        update("users", author(size, random), doc! {"$set": {"username": format!("new{nth}")}})
    }),
];

pub fn data(size: Size, random: &mut StdRng) -> Data {
    let users = (0..size.users())
        .map(|n| doc! {"_id": n.to_string(), "external_id": n.to_string(), "username": format!("user{n}")});
    let time = |n: i64| at(START + YEAR / size.messages() * n);
    let mut contents: Vec<Document> =
        (0..size.messages() / 20).map(|n| content(format!("t{n}"), size, random, n, time(n))).collect();
    contents.extend((0..size.messages() / 2).map(|n| {
        let mut comment = content(format!("c{n}"), size, random, n, time(n));
        comment.extend(doc! {"_type": "Comment", "comment_thread_id": thread(size, random)});
        if n % 3 == 0 && n > 0 {
            comment.insert("parent_id", format!("c{}", random.random_range(0..n)));
        }
        comment
    }));
    vec![("users", users.collect()), ("contents", contents)]
}

/// A thread, from which a comment differs by a few fields.
fn content(id: String, size: Size, random: &mut StdRng, nth: i64, time: bson::DateTime) -> Document {
    doc! {"_id": id, "_type": "CommentThread", "course_id": format!("course{}", nth % 3), "author_id": author(size, random),
    "anonymous": nth % 50 == 0, "anonymous_to_peers": false, "created_at": time, "updated_at": time}
}

fn author(size: Size, random: &mut StdRng) -> String {
    skewed(size.users(), random).to_string()
}

fn thread(size: Size, random: &mut StdRng) -> String {
    format!("t{}", skewed(size.messages() / 20, random))
}
