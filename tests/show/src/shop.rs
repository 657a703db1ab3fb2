//! A small shop: parts, products that list them, hosts and their log messages.

use bson::{Bson, Document, doc};
use mongodb::Database;

/// The database of `config/shop.yaml`.
pub const DATABASE: &str = "shop";
/// Number of parts.
pub const PARTS: i32 = 200;
/// Number of products.
pub const PRODUCTS: i32 = 1_000;
/// Number of hosts: one moves with every tenth part.
pub const HOSTS: i32 = PARTS / 10;
/// Number of log messages.
pub const MESSAGES: i32 = 20_000;

/// Loads the shop.
pub async fn load(database: &Database) {
    let names = ["Spoke", "Rim", "Hub", "Chain", "Saddle", "Pedal", "Brake", "Tyre", "Bell", "Lamp"];
    let name = |id: i32| format!("{} {}", names[usize::try_from(id).unwrap_or_default() % names.len()], 100 + id);
    let parts = (1..=PARTS).map(|id| doc! {"_id": id, "name": name(id), "price": f64::from(id * 7 % 90) + 0.5});
    let products = (1..=PRODUCTS).map(|id| {
        let part = |nth: i32| (id * nth * 3) % PARTS + 1;
        let parts: Vec<Bson> = (1..=3).map(|nth| Bson::Document(doc! {"id": part(nth), "quantity": nth * 2})).collect();
        doc! {"_id": id, "name": format!("Bicycle {id}"), "parts": parts, "spares": [part(3), part(4)]}
    });
    let hosts = (1..=HOSTS).map(|id| doc! {"_id": id, "name": format!("web-{id}"), "ipaddr": format!("10.0.0.{id}")});
    let messages = (1..=MESSAGES)
        .map(|id| doc! {"_id": id, "host": id % HOSTS + 1, "message": format!("GET /bicycles/{}", id % PRODUCTS + 1)});
    insert(database, "parts", parts).await;
    insert(database, "products", products).await;
    insert(database, "hosts", hosts).await;
    insert(database, "logmsg", messages).await;
}

async fn insert(database: &Database, collection: &str, documents: impl Iterator<Item = Document>) {
    let documents: Vec<Document> = documents.collect();
    database.collection::<Document>(collection).insert_many(documents).await.expect("an insert");
}
