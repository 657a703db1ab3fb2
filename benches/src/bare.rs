//! The bare path: a loop with its own change stream and one write for each batch of events, as one would write it by hand for one rule.

use bson::{Bson, Document, Timestamp, doc};
use mongodb::Database;
use tokio::task::JoinHandle;

/// A copy of the field `n`.
#[derive(Debug, Clone, Copy)]
pub struct Copy {
    /// The collection that `n` is copied from.
    pub source: &'static str,
    /// The collection that it is copied to.
    pub target: &'static str,
    /// The field of a target that contains the `_id` of its source.
    pub reference: &'static str,
}

/// Starts a loop that keeps this copy up to date. One command writes all changes that arrive together.
pub async fn follow(database: &Database, copy: Copy) -> JoinHandle<()> {
    let database = database.clone();
    let hello = database.run_command(doc! {"hello": 1}).await.expect("hello");
    let now: Timestamp = hello.get_timestamp("operationTime").expect("an operation time");
    tokio::spawn(async move {
        let pipeline = vec![
            doc! {"$changeStream": {"startAtOperationTime": now}},
            doc! {"$match": {"operationType": "update"}},
            doc! {"$project": {"documentKey": 1, "n": "$updateDescription.updatedFields.n"}},
        ];
        // A cursor must be read in the session that opened it.
        let mut session = database.client().start_session().await.expect("a session");
        let mut open = database
            .run_command(doc! {"aggregate": copy.source, "pipeline": pipeline, "cursor": {}})
            .session(&mut session)
            .await
            .expect("a stream");
        let mut batch = "firstBatch";
        loop {
            let cursor = open.get_document("cursor").expect("a cursor");
            let id = cursor.get_i64("id").expect("a cursor's id");
            let events = cursor.get_array(batch).expect("a batch").iter().filter_map(Bson::as_document);
            let updates: Vec<Document> = events
                .map(|event| {
                    let key = event.get_document("documentKey").expect("a key").get("_id").expect("an _id").clone();
                    doc! {"q": {copy.reference: key}, "u": {"$set": {"n": event.get("n")}}, "multi": true}
                })
                .collect();
            if !updates.is_empty() {
                let write = doc! {"update": copy.target, "updates": updates, "ordered": false, "writeConcern": {"w": "majority"}};
                database.run_command(write).await.expect("an update");
            }
            batch = "nextBatch";
            open = database
                .run_command(doc! {"getMore": id, "collection": copy.source, "maxTimeMS": 1000, "batchSize": 5000})
                .session(&mut session)
                .await
                .expect("the next events");
        }
    })
}
