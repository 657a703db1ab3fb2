//! Reaction Commerce: products with variants and options, their stock, and orders.

use bson::{Document, doc};
use rand::{Rng, rngs::StdRng};

use super::{Change, Data, Size, skewed};
use crate::support::cases::{delete, insert, update};

pub const CHANGES: &[(&str, Change)] = &[
    ("an order", |size, nth, random| insert("Orders", order(format!("n{nth}"), size, random, "new", "created"))),
    ("an order is paid", |size, _, random| {
        update("Orders", some(size, random), doc! {"$set": {"payments": [{"status": "approved"}]}})
    }),
    ("an order is cancelled", |size, _, random| {
        update("Orders", some(size, random), doc! {"$set": {"workflow.status": "coreOrderWorkflow/canceled"}})
    }),
    ("goods arrive", |size, nth, random| {
        let id = format!("i{}", skewed(size.users(), random));
        update("SimpleInventory", id, doc! {"$set": {"inventoryInStock": nth % 9}})
    }),
    ("stock is no longer tracked", |size, nth, _| delete("SimpleInventory", format!("i{}", nth % size.users()))),
    ("a tag moves, with those below it", |size, nth, random| {
        let tag = 1 + nth % (size.rooms() - 1);
        let above = format!("t{}", random.random_range(0..tag));
        update("Tags", above, doc! {"$addToSet": {"relatedTagIds": format!("t{tag}")}})
    }),
    ("a product is published again", |size, nth, random| {
        let id = format!("p{}", random.random_range(0..size.users() / 3));
        update("Catalog", id, doc! {"$set": {"product.title": format!("title {nth}")}})
    }),
];

pub fn data(size: Size, random: &mut StdRng) -> Data {
    let stock = (0..size.users()).map(|n| {
        doc! {"_id": format!("i{n}"), "productConfiguration": {"productId": format!("p{}", n / 3), "productVariantId": format!("v{n}")},
        "inventoryInStock": n % 50, "isEnabled": n % 20 > 0}
    });
    let product = |n: i64| {
        let options =
            vec![doc! {"variantId": format!("v{}", n * 3 + 1)}, doc! {"variantId": format!("v{}", n * 3 + 2)}];
        let variants = vec![
            doc! {"variantId": format!("v{}", n * 3)},
            doc! {"variantId": format!("parent{n}"), "options": options},
        ];
        doc! {"_id": format!("p{n}"), "product": {"productId": format!("p{n}"), "title": "Chair", "variants": variants}}
    };
    let orders = (0..size.messages() / 5).map(|n| match n % 10 {
        0 => order(format!("o{n}"), size, random, "new", "created"),
        1 => order(format!("o{n}"), size, random, "coreOrderWorkflow/processing", "created"),
        2 => order(format!("o{n}"), size, random, "coreOrderWorkflow/canceled", "created"),
        _ => order(format!("o{n}"), size, random, "coreOrderWorkflow/completed", "completed"),
    });
    let orders = orders.collect();
    vec![
        ("SimpleInventory", stock.collect()),
        ("Tags", (0..size.rooms()).map(tag).collect()),
        ("Catalog", (0..size.users() / 3).map(product).collect()),
        ("Orders", orders),
    ]
}

/// A tag with the two below it: a binary tree.
fn tag(n: i64) -> Document {
    doc! {"_id": format!("t{n}"), "slug": format!("tag-{n}"), "relatedTagIds": [format!("t{}", n * 2 + 1), format!("t{}", n * 2 + 2)]}
}

fn order(id: String, size: Size, random: &mut StdRng, status: &str, payment: &str) -> Document {
    let mut item =
        || doc! {"variantId": format!("v{}", skewed(size.users(), random)), "quantity": random.random_range(1..4)};
    let groups = vec![doc! {"items": [item(), item()]}, doc! {"items": [item()]}];
    doc! {"_id": id, "workflow": {"status": status}, "payments": [{"status": payment}], "shipping": groups}
}

fn some(size: Size, random: &mut StdRng) -> String {
    format!("o{}", random.random_range(0..size.messages() / 5))
}
