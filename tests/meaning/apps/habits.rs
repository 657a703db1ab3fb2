//! Habitica: users in guilds, parties and challenges, and their tasks.

use bson::{Document, doc};
use rand::{Rng, rngs::StdRng};

use super::{Change, Data, Size, skewed};
use crate::support::cases::{delete, insert, update};

pub const CHANGES: &[(&str, Change)] = &[
    ("a user joins a guild", |size, _, random| {
        update("users", user(size, random), doc! {"$addToSet": {"guilds": guild(size, random)}})
    }),
    ("a user leaves a guild", |size, _, random| {
        update("users", user(size, random), doc! {"$pull": {"guilds": guild(size, random)}})
    }),
    ("a user changes the party", |size, nth, random| {
        update("users", user(size, random), doc! {"$set": {"party": {"_id": format!("p{}", nth % size.rooms())}}})
    }),
    ("a user joins a challenge", |size, _, random| {
        update("users", user(size, random), doc! {"$addToSet": {"challenges": challenge(size, random)}})
    }),
    ("an account is deleted", |size, nth, _| delete("users", format!("u{}", nth % size.users()))),
    ("a challenge is renamed", |size, nth, random| {
        update("challenges", challenge(size, random), doc! {"$set": {"shortName": format!("name {nth}")}})
    }),
    ("a challenge begins", |size, nth, random| {
        insert("challenges", doc! {"_id": format!("n{nth}"), "group": guild(size, random), "shortName": "new"})
    }),
    ("a challenge's task changes", |size, nth, random| {
        let task = format!("t{}", random.random_range(0..size.rooms()));
        update("tasks", task, doc! {"$set": {"text": format!("task {nth}"), "priority": 2}})
    }),
];

pub fn data(size: Size, random: &mut StdRng) -> Data {
    let users = (0..size.users()).map(|n| {
        let (one, other, challenge) = (guild(size, random), guild(size, random), challenge(size, random));
        let tag = doc! {"id": &challenge, "challenge": true};
        doc! {"_id": format!("u{n}"), "guilds": [one, other], "party": {"_id": format!("p{}", n / 4)}, "challenges": [challenge],
        "tags": [tag, {"id": format!("own{n}"), "name": "Garden"}]}
    });
    let users = users.collect();
    let guilds = (0..size.rooms()).map(|n| doc! {"_id": format!("g{n}"), "type": "guild"});
    let parties = (0..size.users() / 4).map(|n| doc! {"_id": format!("p{n}"), "type": "party"});
    let challenges = (0..size.rooms())
        .map(|n| doc! {"_id": format!("c{n}"), "group": format!("g{}", n / 2), "shortName": format!("walk {n}")});
    let mut tasks: Vec<Document> = (0..size.rooms()).map(original).collect();
    tasks.extend((0..size.messages() / 4).map(|n| {
        let original = skewed(size.rooms(), random);
        let mut task =
            doc! {"_id": format!("o{n}"), "type": kind(original), "userId": format!("u{}", n % size.users())};
        match n % 4 {
            0 => task.insert("challenge", doc! {"id": format!("c{original}"), "taskId": format!("t{original}")}),
            _ => task.insert("text", "Garden"),
        };
        task
    }));
    vec![
        ("users", users),
        ("groups", guilds.chain(parties).collect()),
        ("challenges", challenges.collect()),
        ("tasks", tasks),
    ]
}

/// The task of a challenge that its members' tasks follow.
fn original(n: i64) -> Document {
    let mut task = doc! {"_id": format!("t{n}"), "type": kind(n), "text": format!("Walk {n} miles"), "priority": 1, "challenge": {"id": format!("c{n}")}};
    match kind(n) {
        "reward" => task.insert("value", n),
        _ => task.insert("frequency", "weekly"),
    };
    task
}

fn kind(n: i64) -> &'static str {
    if n % 5 == 0 { "reward" } else { "daily" }
}

fn user(size: Size, random: &mut StdRng) -> String {
    format!("u{}", random.random_range(0..size.users()))
}

fn guild(size: Size, random: &mut StdRng) -> String {
    format!("g{}", skewed(size.rooms(), random))
}

fn challenge(size: Size, random: &mut StdRng) -> String {
    format!("c{}", skewed(size.rooms(), random))
}
