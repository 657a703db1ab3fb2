//! Performs operations on a server, whatever bytes they contain, and reads back the result.

use bson::{Document, RawDocumentBuf, Timestamp, doc};
use denormd_oracle::{NOT_UTF8, Op, World};
use futures_util::TryStreamExt;
use mongodb::{Database, error::Result};

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
        Op::Insert { .. } | Op::Update { .. } | Op::Replace { .. } | Op::Delete { .. } => {
            command(db, of_document(&op).expect("a command")).await;
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

/// The command of an operation on a document; None for one on a collection.
fn of_document(op: &Op) -> Option<Document> {
    match op {
        Op::Insert { coll, doc } => Some(doc! {"insert": coll, "documents": [doc]}),
        Op::Update { coll, filter, update: to } | Op::Replace { coll, filter, doc: to } => {
            Some(doc! {"update": coll, "updates": [{"q": filter, "u": to}]})
        }
        Op::Delete { coll, filter } => Some(doc! {"delete": coll, "deletes": [{"q": filter, "limit": 1}]}),
        Op::Drop { .. } | Op::Restore { .. } | Op::Rename { .. } | Op::PreImages { .. } => None,
    }
}

/// Performs operations on documents in one transaction, without those on collections. Returns its time.
pub async fn together(db: &Database, ops: &[Op]) -> Result<Option<Timestamp>> {
    in_transaction(db, ops.iter().filter_map(of_document).collect()).await
}

/// Runs commands in one transaction. Returns its time. After an error, it may be committed or not.
pub async fn in_transaction(db: &Database, commands: Vec<Document>) -> Result<Option<Timestamp>> {
    let mut session = db.client().start_session().await?;
    session.start_transaction().await?;
    for command in commands {
        db.run_raw_command(sent(&command)).session(&mut session).await?;
    }
    session.commit_transaction().await?;
    Ok(session.operation_time())
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
    db.run_raw_command(sent(&command)).await.ok();
}

/// A command with the bytes that stand for [`NOT_UTF8`].
fn sent(command: &Document) -> RawDocumentBuf {
    let raw = RawDocumentBuf::try_from(command).unwrap();
    swapped(raw, NOT_UTF8.to_string().as_bytes(), &BYTES)
}

/// The existing ones of these collections, with all their documents. An election may interrupt a read.
pub async fn world(db: &Database, collections: &[String]) -> World {
    until("the collections can be read", async || read(db, collections).await.ok()).await
}

async fn read(db: &Database, collections: &[String]) -> Result<World> {
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
