//! LibreChat: conversations with messages, tags and projects.

use bson::{doc, oid::ObjectId};
use rand::{Rng, rngs::StdRng};

use super::{Change, Data, START, Size, YEAR, at, later, skewed};
use crate::support::cases::{delete, insert, update};

const TAGS: [&str; 5] = ["work", "home", "garden", "later", "fun"];

pub const CHANGES: &[(&str, Change)] = &[
    ("a message", |size, nth, random| {
        let conversation = conversation(size, random);
        insert("messages", message(ObjectId::new(), conversation, size, later(nth)))
    }),
    ("a message is deleted", |size, nth, _| delete("messages", id(nth % (size.messages() / 2)))),
    ("a conversation is tagged", |size, nth, random| {
        let tag = TAGS[usize::try_from(nth).unwrap() % TAGS.len()];
        update("conversations", conversation(size, random), doc! {"$addToSet": {"tags": tag}})
    }),
    ("a conversation is forked", |size, nth, random| {
        let user = owner(size, conversation(size, random));
        let tags = vec![TAGS[0], TAGS[1]];
        insert(
            "conversations",
            doc! {"_id": -1 - nth, "conversationId": format!("fork{nth}"), "user": user, "tags": tags, "updatedAt": later(nth)},
        )
    }),
    ("a conversation moves to a project", |size, nth, random| {
        let conversation = conversation(size, random);
        let set = doc! {"chatProjectId": project(size, conversation).to_string(), "updatedAt": later(nth)};
        update("conversations", conversation, doc! {"$set": set})
    }),
    ("a conversation is archived", |size, _, random| {
        update("conversations", conversation(size, random), doc! {"$set": {"isArchived": true}})
    }),
    ("a conversation is deleted", |size, nth, _| delete("conversations", nth % (size.messages() / 10))),
];

pub fn data(size: Size, random: &mut StdRng) -> Data {
    let conversations = (0..size.messages() / 10).map(|n| {
        let tags: Vec<&str> = TAGS.into_iter().filter(|_| random.random_range(0..4) == 0).collect();
        let mut conversation = doc! {"_id": n, "conversationId": format!("c{n}"), "user": owner(size, n), "tags": tags, "updatedAt": at(START + YEAR / size.messages() * n)};
        if n % 3 == 0 {
            conversation.insert("chatProjectId", project(size, n).to_string());
        }
        conversation
    });
    let conversations = conversations.collect();
    let messages = (0..size.messages() / 2).map(|n| {
        let time = at(START + YEAR / size.messages() * n);
        message(id(n), skewed(size.messages() / 10, random), size, time)
    });
    let messages = messages.collect();
    let users = size.users() / 5;
    let tag = |n: i64| {
        let tag = TAGS[usize::try_from(n).unwrap() % TAGS.len()];
        doc! {"_id": n, "user": format!("u{}", n / 5), "tag": tag, "position": n % 5}
    };
    let project = |n: i64| doc! {"_id": id(n), "user": format!("u{n}"), "name": "Garden"};
    vec![
        ("conversations", conversations),
        ("messages", messages),
        ("conversationtags", (0..users * 5).map(tag).collect()),
        ("chatprojects", (0..users).map(project).collect()),
    ]
}

fn message(id: ObjectId, conversation: i64, size: Size, time: bson::DateTime) -> bson::Document {
    doc! {"_id": id, "conversationId": format!("c{conversation}"), "user": owner(size, conversation), "text": "yes", "createdAt": time}
}

fn conversation(size: Size, random: &mut StdRng) -> i64 {
    skewed(size.messages() / 10, random)
}

fn owner(size: Size, conversation: i64) -> String {
    format!("u{}", conversation % (size.users() / 5))
}

/// The project of the conversation's owner.
fn project(size: Size, conversation: i64) -> ObjectId {
    id(conversation % (size.users() / 5))
}

fn id(n: i64) -> ObjectId {
    let mut bytes = [0x65; 12];
    bytes[4..].copy_from_slice(&n.to_be_bytes());
    ObjectId::from_bytes(bytes)
}
