//! Rocket.Chat: rooms, their members and a year of messages.

use bson::{Document, doc};
use rand::{Rng, rngs::StdRng};

use super::{Change, Data, START, Size, YEAR, at, later, skewed};
use crate::support::cases::{Write, delete, insert, update};

pub const CHANGES: &[(&str, Change)] = &[
    ("a message in a channel", |size, nth, random| send(size, nth, random, "c", doc! {})),
    ("a message in a direct room", |size, nth, random| send(size, nth, random, "d", doc! {})),
    ("a message that mentions a member", |size, nth, random| {
        let mentions = vec![doc! {"_id": user(skewed(size.users(), random)), "username": "old"}];
        send(size, nth, random, "c", doc! {"mentions": mentions})
    }),
    ("a reply in a thread", |size, nth, random| {
        let thread = format!("m{}", random.random_range(0..size.messages()));
        send(size, nth, random, "c", doc! {"tmid": thread})
    }),
    ("a message is deleted", |size, nth, _| delete("rocketchat_message", format!("m{}", nth % size.messages()))),
    ("a message is marked as deleted", |size, _, random| {
        let id = format!("m{}", random.random_range(0..size.messages()));
        update("rocketchat_message", id, doc! {"$set": {"t": "rm", "msg": ""}})
    }),
    ("a member reads a room", |size, nth, random| {
        let (room, member) = member(size, random);
        update("rocketchat_subscription", format!("s{room}-{member}"), doc! {"$set": {"ls": later(nth)}})
    }),
    ("a member joins a channel", |size, nth, random| {
        let room = room(size, random, "c");
        insert("rocketchat_subscription", subscription(format!("j{nth}"), room, size.users() + nth, later(nth)))
    }),
    ("a member leaves", |size, _, random| {
        let (room, member) = member(size, random);
        delete("rocketchat_subscription", format!("s{room}-{member}"))
    }),
    ("a room is renamed", |size, nth, random| {
        let name = format!("renamed-{nth}");
        let room = format!("r{}", room(size, random, "p"));
        update("rocketchat_room", room, doc! {"$set": {"name": &name, "fname": &name}})
    }),
    ("a user is renamed", |size, nth, random| {
        let id = user(random.random_range(0..size.users()));
        update("users", id, doc! {"$set": {"username": format!("new{nth}"), "name": format!("New {nth}")}})
    }),
];

pub fn data(size: Size, random: &mut StdRng) -> Data {
    let people =
        (0..size.users()).map(|n| doc! {"_id": user(n), "username": format!("user{n}"), "name": format!("User {n}")});
    let rooms = (0..size.rooms()).map(|n| {
        let mut room = doc! {"_id": format!("r{n}"), "t": kind(n), "u": {"_id": user(person(size, n, 0))}};
        if kind(n) == "d" {
            room.insert("uids", vec![user(person(size, n, 0)), user(person(size, n, 1))]);
        } else {
            room.extend(doc! {"name": format!("room-{n}"), "fname": format!("Room {n}")});
        }
        room
    });
    let mut subscriptions = Vec::new();
    for room in 0..size.rooms() {
        for member in 0..members(size, room) {
            let ls = at(START + YEAR - random.random_range(0..3 * 86_400_000));
            subscriptions.push(subscription(format!("s{room}-{member}"), room, person(size, room, member), ls));
        }
    }
    vec![
        ("users", people.collect()),
        ("rocketchat_room", rooms.collect()),
        ("rocketchat_subscription", subscriptions),
        ("rocketchat_message", messages(size, random)),
    ]
}

fn messages(size: Size, random: &mut StdRng) -> Vec<Document> {
    // The last message of each room, which a reply refers to.
    let mut last = vec![None; usize::try_from(size.rooms()).unwrap()];
    let message = |n: i64| {
        let room = skewed(size.rooms(), random);
        let author = person(size, room, random.random_range(0..members(size, room)));
        let thread = last[usize::try_from(room).unwrap()].replace(n);
        let more = match random.random_range(0..100) {
            0 => doc! {"t": "rm"},
            1 => doc! {"_hidden": true},
            2..4 => doc! {"t": "uj"},
            4..16 => thread.map(|thread| doc! {"tmid": format!("m{thread}")}).unwrap_or_default(),
            16 => thread.map(|thread| doc! {"tmid": format!("m{thread}"), "tshow": true}).unwrap_or_default(),
            17..21 => {
                doc! {"mentions": [{"_id": user(person(size, room, random.random_range(0..members(size, room))))}]}
            }
            21 => doc! {"mentions": [{"_id": "all", "username": "all"}]},
            22 => doc! {"editedBy": {"_id": user(author)}},
            23 => doc! {"drid": format!("r{}", skewed(size.rooms(), random))},
            _ => doc! {},
        };
        let mut message = message(format!("m{n}"), room, author, at(START + YEAR / size.messages() * n));
        message.extend(more);
        message
    };
    (0..size.messages()).map(message).collect()
}

fn message(id: String, room: i64, author: i64, ts: bson::DateTime) -> Document {
    doc! {"_id": id, "rid": format!("r{room}"), "u": {"_id": user(author)}, "msg": "hello, everybody", "ts": ts}
}

fn subscription(id: String, room: i64, member: i64, ls: bson::DateTime) -> Document {
    doc! {"_id": id, "rid": format!("r{room}"), "t": kind(room), "u": {"_id": user(member)}, "ls": ls}
}

/// A message of a member of some room of this kind.
fn send(size: Size, nth: i64, random: &mut StdRng, kind: &str, more: Document) -> Write {
    let room = room(size, random, kind);
    let author = person(size, room, random.random_range(0..members(size, room)));
    let mut message = message(format!("n{nth}"), room, author, later(nth));
    message.extend(more);
    insert("rocketchat_message", message)
}

/// A room of this kind; some have most of the messages.
fn room(size: Size, random: &mut StdRng, wanted: &str) -> i64 {
    loop {
        let room = skewed(size.rooms(), random);
        if kind(room) == wanted {
            return room;
        }
    }
}

fn member(size: Size, random: &mut StdRng) -> (i64, i64) {
    let room = skewed(size.rooms(), random);
    (room, random.random_range(0..members(size, room)))
}

fn kind(room: i64) -> &'static str {
    match room % 5 {
        0..=2 => "c",
        3 => "p",
        _ => "d",
    }
}

/// Number of members: 5 to 95, in the mean 50.
fn members(size: Size, room: i64) -> i64 {
    if kind(room) == "d" { 2 } else { (5 + room * 37 % 91).min(size.users()) }
}

/// The nth member of a room.
fn person(size: Size, room: i64, nth: i64) -> i64 {
    (room * 31 + nth) % size.users()
}

fn user(n: i64) -> String {
    format!("u{n}")
}
