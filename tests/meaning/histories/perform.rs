//! Performs operations on a server, whatever bytes they contain, and reads back the result.

use bson::{Document, RawDocumentBuf, doc};
use denormd_oracle::{NOT_UTF8, Op, World};
use futures_util::TryStreamExt;
use mongodb::Database;

use crate::support::daemon::until;

/// The bytes sent in place of [`NOT_UTF8`], with the same length.
const BYTES: [u8; 3] = [0xF5, 0xC1, 0xF5];

/// The options of a new collection.
#[derive(Debug, Clone, Default)]
pub struct Form {
    pub pre_images: bool,
    pub collation: Option<Document>,
}

/// Performs an operation. A refusal by the server is part of the history.
pub async fn perform(db: &Database, op: Op, form: impl Fn(&str) -> Form) {
    let name = op.coll().to_owned();
    match op {
        Op::Insert { doc, .. } => {
            command(db, doc! {"insert": &name, "documents": [doc]}).await;
        }
        Op::Update { filter, update, .. } => {
            command(db, doc! {"update": &name, "updates": [{"q": filter, "u": update}]}).await;
        }
        Op::Replace { filter, doc, .. } => {
            command(db, doc! {"update": &name, "updates": [{"q": filter, "u": doc}]}).await;
        }
        Op::Delete { filter, .. } => {
            command(db, doc! {"delete": &name, "deletes": [{"q": filter, "limit": 1}]}).await;
        }
        Op::Drop { .. } => command(db, doc! {"drop": &name}).await,
        Op::Restore { docs, .. } => {
            command(db, doc! {"drop": &name}).await;
            create(db, &name, &form(&name)).await;
            for doc in docs {
                command(db, doc! {"insert": &name, "documents": [doc]}).await;
            }
        }
        Op::Rename { from, .. } => {
            let [from, to] = [from, name].map(|name| format!("{}.{name}", db.name()));
            let rename = doc! {"renameCollection": from, "to": to, "dropTarget": true};
            command(&db.client().database("admin"), rename).await;
        }
        Op::PreImages { on, .. } => {
            command(db, doc! {"collMod": &name, "changeStreamPreAndPostImages": {"enabled": on}}).await;
        }
    }
}

pub async fn create(db: &Database, name: &str, form: &Form) {
    let mut create = doc! {"create": name};
    if form.pre_images {
        create.insert("changeStreamPreAndPostImages", doc! {"enabled": true});
    }
    create.extend(form.collation.clone().map(|collation| ("collation".to_owned(), collation.into())));
    command(db, create).await;
}

async fn command(db: &Database, command: Document) {
    let raw = RawDocumentBuf::try_from(&command).unwrap();
    let raw = swapped(raw, NOT_UTF8.to_string().as_bytes(), &BYTES);
    db.run_raw_command(raw).await.ok();
}

/// The existing ones of these collections, with all their documents. An election may interrupt a read.
pub async fn world(db: &Database, collections: &[String]) -> World {
    until("the collections can be read", async || read(db, collections).await.ok()).await
}

async fn read(db: &Database, collections: &[String]) -> mongodb::error::Result<World> {
    let wanted = doc! {"name": {"$in": collections.to_vec()}};
    let there = db.list_collection_names().filter(wanted).await?;
    let mut world = World::new();
    for name in there {
        let rows: Vec<RawDocumentBuf> =
            db.collection::<RawDocumentBuf>(&name).find(doc! {}).await?.try_collect().await?;
        let documents = rows.into_iter().map(|row| {
            let row = swapped(row, &BYTES, NOT_UTF8.to_string().as_bytes());
            Document::try_from(row.as_ref()).unwrap()
        });
        world.insert(name, documents.collect());
    }
    Ok(world)
}

/// The document with some bytes replaced by others of the same number.
fn swapped(document: RawDocumentBuf, from: &[u8], to: &[u8]) -> RawDocumentBuf {
    let mut bytes = document.into_bytes();
    let mut at = 0;
    while let Some(found) = bytes[at..].windows(from.len()).position(|window| window == from) {
        bytes[at + found..at + found + from.len()].copy_from_slice(to);
        at += found + from.len();
    }
    RawDocumentBuf::from_bytes(bytes).unwrap()
}
