//! Growi: a tree of pages, with revisions, comments and tags.

use bson::doc;
use rand::{Rng, rngs::StdRng};

use super::{Change, Data, Size, skewed};
use crate::support::cases::{Write, delete, insert, update};

pub const CHANGES: &[(&str, Change)] = &[
    ("a comment", |size, nth, random| {
        insert("comments", doc! {"_id": size.messages() + nth, "page": page(size, random)})
    }),
    ("a comment is deleted", |size, nth, _| delete("comments", nth % (size.messages() / 5))),
    ("a page is edited", |size, nth, random| {
        let revision = size.messages() + nth;
        Write::Burst(vec![
            insert("revisions", doc! {"_id": revision, "body": "text ".repeat(usize::try_from(nth % 50).unwrap())}),
            update("pages", page(size, random), doc! {"$set": {"revision": revision}}),
        ])
    }),
    ("a page goes into the trash", |size, _, random| {
        update("pages", page(size, random), doc! {"$set": {"status": "deleted"}})
    }),
    ("a page comes back", |size, _, random| {
        update("pages", page(size, random), doc! {"$set": {"status": "published"}})
    }),
    ("a page", |size, nth, random| {
        insert(
            "pages",
            doc! {"_id": size.messages() + nth, "parent": page(size, random), "isEmpty": false, "status": "published"},
        )
    }),
    ("a page moves, with what is below it", |size, nth, random| {
        // To a page with a lower number, so that no circle arises.
        let page = 1 + nth % (size.messages() / 10 - 1);
        update("pages", page, doc! {"$set": {"parent": random.random_range(0..page)}})
    }),
];

pub fn data(size: Size, random: &mut StdRng) -> Data {
    let pages = (0..size.messages() / 10).map(|n| {
        let status = if n % 40 == 39 { "deleted" } else { "published" };
        let mut page =
            doc! {"_id": n, "path": format!("/{n}"), "isEmpty": n % 10 == 9, "status": status, "revision": n * 2};
        if n > 0 {
            page.insert("parent", random.random_range(n / 8..n));
        }
        page
    });
    let pages = pages.collect();
    let comments =
        (0..size.messages() / 5).map(|n| doc! {"_id": n, "page": page(size, random), "comment": "ok"}).collect();
    let revision = |n: i64| doc! {"_id": n, "body": "word ".repeat(usize::try_from(n % 40).unwrap())};
    let relation = |n: i64| doc! {"_id": n, "relatedPage": n, "relatedTag": n % 20};
    vec![
        ("pages", pages),
        ("comments", comments),
        ("revisions", (0..size.messages() / 5).map(revision).collect()),
        ("pagetagrelations", (0..size.messages() / 20).map(relation).collect()),
    ]
}

fn page(size: Size, random: &mut StdRng) -> i64 {
    skewed(size.messages() / 10, random)
}
