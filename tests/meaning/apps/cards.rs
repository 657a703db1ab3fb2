//! Wekan: cards on boards, with comments, checklists and attachments.

use bson::doc;
use rand::{Rng, rngs::StdRng};

use super::{Change, Data, Size, skewed};
use crate::support::cases::{delete, insert, update};

pub const CHANGES: &[(&str, Change)] = &[
    ("a card moves to another board", |size, nth, random| {
        let place = doc! {"boardId": format!("b{}", nth % size.rooms()), "listId": format!("l{nth}")};
        update("cards", card(size, random), doc! {"$set": place})
    }),
    ("a comment", |size, nth, random| {
        insert("card_comments", doc! {"_id": format!("n{nth}"), "cardId": card(size, random), "text": "done"})
    }),
    ("a reaction to a comment", |size, nth, random| {
        let comment = format!("c{}", random.random_range(0..size.messages() / 5));
        insert("card_comment_reactions", doc! {"_id": format!("n{nth}"), "cardCommentId": comment, "reactions": []})
    }),
    ("a checklist moves to another card", |size, _, random| {
        let checklist = format!("h{}", random.random_range(0..size.messages() / 50));
        update("checklists", checklist, doc! {"$set": {"cardId": card(size, random)}})
    }),
    ("an item of a checklist", |size, nth, random| {
        let checklist = format!("h{}", random.random_range(0..size.messages() / 50));
        insert("checklistItems", doc! {"_id": format!("n{nth}"), "checklistId": checklist, "isFinished": false})
    }),
    ("a subtask moves, with those below it", |size, nth, random| {
        // To a card with a lower number, so that no circle arises.
        let card = 1 + nth % (size.messages() / 20 - 1);
        update("cards", format!("k{card}"), doc! {"$set": {"parentId": format!("k{}", random.random_range(0..card))}})
    }),
    ("a card is deleted", |size, nth, _| delete("cards", format!("k{}", nth % (size.messages() / 20)))),
];

pub fn data(size: Size, random: &mut StdRng) -> Data {
    let cards = (0..size.messages() / 20).map(|n| {
        let board = n % size.rooms();
        let parent = if n % 5 == 4 { format!("k{}", random.random_range(0..n)) } else { String::new() };
        doc! {"_id": format!("k{n}"), "boardId": format!("b{board}"), "listId": format!("l{board}"), "swimlaneId": format!("s{board}"), "parentId": parent}
    });
    let cards = cards.collect();
    let comments =
        (0..size.messages() / 5).map(|n| doc! {"_id": format!("c{n}"), "cardId": card(size, random), "text": "ok"});
    let comments = comments.collect();
    let reaction = |n: i64| doc! {"_id": format!("x{n}"), "cardCommentId": format!("c{}", n * 7), "reactions": []};
    let checklists = (0..size.messages() / 50).map(|n| doc! {"_id": format!("h{n}"), "cardId": card(size, random)});
    let checklists = checklists.collect();
    let item = |n: i64| doc! {"_id": format!("i{n}"), "checklistId": format!("h{}", n / 5), "isFinished": n % 3 == 0};
    let attachments = (0..size.messages() / 50).map(|n| match n % 20 {
        0 => doc! {"_id": format!("a{n}"), "meta": {"boardId": "b0"}},
        _ => doc! {"_id": format!("a{n}"), "meta": {"cardId": card(size, random)}},
    });
    let attachments = attachments.collect();
    vec![
        ("cards", cards),
        ("card_comments", comments),
        ("card_comment_reactions", (0..size.messages() / 40).map(reaction).collect()),
        ("checklists", checklists),
        ("checklistItems", (0..size.messages() / 10).map(item).collect()),
        ("attachments", attachments),
    ]
}

fn card(size: Size, random: &mut StdRng) -> String {
    format!("k{}", skewed(size.messages() / 20, random))
}
