//! Values of one target: each member of a room has a number of its own of messages not read yet.

use bson::{Document, doc};

use super::{Change, Floor, Workload, size};

const ROOMS: i32 = 500;
/// Members of a room.
const MEMBERS: i32 = 10;
/// New messages of a room in one round.
const NEW: i32 = 20;
/// Rounds from one look of a member to the next.
const TURNS: i32 = 5;

/// The time at which a member last looked: each looks every fifth round, before the round's messages.
fn seen(version: i32, member: i32) -> i32 {
    version - 1 - (version + member).rem_euclid(TURNS)
}

fn messages(version: i32) -> impl Iterator<Item = Document> {
    let message = move |nth: i32| doc! {"_id": version * ROOMS * NEW + nth, "rid": nth % ROOMS, "ts": version, "msg": "a message"};
    (0..ROOMS * NEW).map(message)
}

pub(super) fn unread() -> Workload {
    Workload {
        name: "unread",
        what: "10,000 new messages in 500 rooms, counted for each of 5,000 members since that one last looked, while 1,000 of them look",
        rules: "  - name: unread\n    aggregate: { source: { collection: messages, where: { $expr: { $gt: [$ts, $$target.ls] } } }, target: subscriptions, match: { rid: rid }, set: { unread: { $sum: 1 } } }\n",
        changes: size(ROOMS * NEW + ROOMS * MEMBERS / TURNS),
        load: || {
            let member = |id: i32| doc! {"_id": id, "rid": id % ROOMS, "ls": seen(1, id / ROOMS)};
            vec![
                ("subscriptions", (0..ROOMS * MEMBERS).map(member).collect()),
                ("messages", (-4..=1).flat_map(messages).collect()),
            ]
        },
        index: None,
        change: |version| {
            let looking = (0..ROOMS * MEMBERS).filter(|id| seen(version, id / ROOMS) == version - 1);
            let look = |id: i32| doc! {"q": {"_id": id}, "u": {"$set": {"ls": version - 1}}};
            vec![
                Change::Update("subscriptions", looking.map(look).collect()),
                Change::Insert("messages", messages(version).collect()),
            ]
        },
        floors: |version| {
            let known = |id: i32| {
                let unread = NEW * (version - seen(version, id / ROOMS));
                doc! {"q": {"_id": id}, "u": {"$set": {"unread": unread}}}
            };
            let inc = |nth: i32| doc! {"q": {"rid": nth % ROOMS}, "u": {"$inc": {"counted": 1}}, "multi": true};
            Floor::and(
                "blind $inc",
                (0..ROOMS * NEW).map(inc).collect(),
                Floor::new("known", "subscriptions", (0..ROOMS * MEMBERS).map(known).collect()),
            )
        },
        stale: |version| {
            let right = doc! {"$multiply": [NEW, {"$subtract": [version, "$ls"]}]};
            ("subscriptions", doc! {"$expr": {"$ne": ["$unread", right]}})
        },
    }
}
