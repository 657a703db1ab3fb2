//! The floor: the same values written by a plain writer that already knows every one of them.

use std::time::Duration;

use bson::{Bson, Document, RawDocumentBuf, doc};
use futures_util::{StreamExt, stream};
use mongodb::Client;
use tokio::time::Instant;

use super::{
    DATABASE,
    expected::{Rule, Sources},
};

/// Statements in one command.
const STATEMENTS: usize = 1000;
/// Commands at once.
const WRITERS: usize = 2;

/// `update` commands, ready to be sent.
#[derive(Default)]
pub struct Floor {
    commands: Vec<RawDocumentBuf>,
    open: Vec<Document>,
    /// Statements in all of them, one a flight.
    pub statements: usize,
}

impl Floor {
    /// One statement for a flight, with all that these rules copy into it.
    pub fn add(&mut self, sources: &Sources, flight: &Document, rules: impl Iterator<Item = Rule>) {
        let (mut set, mut unset) = (Document::new(), Document::new());
        for (path, value) in rules.flat_map(|rule| sources.expected(rule, flight)) {
            match value {
                Some(value) => set.insert(path, value),
                None => unset.insert(path, ""),
            };
        }
        let update: Document = [("$set", set), ("$unset", unset)]
            .into_iter()
            .filter(|(_, paths)| !paths.is_empty())
            .map(|(operator, paths)| (operator.to_owned(), Bson::Document(paths)))
            .collect();
        if update.is_empty() {
            return;
        }
        self.open.push(doc! {"q": {"_id": flight.get("_id").cloned()}, "u": update});
        self.statements += 1;
        if self.open.len() == STATEMENTS {
            self.close();
        }
    }

    fn close(&mut self) {
        let command = doc! {"update": "flights", "updates": std::mem::take(&mut self.open), "ordered": false, "writeConcern": {"w": "majority"}};
        self.commands.push(RawDocumentBuf::try_from(&command).expect("a command"));
    }

    /// Sends them; how long that took.
    pub async fn write(mut self, client: &Client) -> Duration {
        if !self.open.is_empty() {
            self.close();
        }
        let database = client.database(DATABASE);
        let started = Instant::now();
        stream::iter(self.commands)
            .for_each_concurrent(WRITERS, |command| {
                let database = database.clone();
                async move {
                    let reply = database.run_raw_command(command).await.expect("an update");
                    assert!(reply.get("writeErrors").is_none(), "{reply}");
                }
            })
            .await;
        started.elapsed()
    }
}

/// Takes every copied field away, as if there had been no daemon.
pub async fn reset(client: &Client) {
    let paths = doc! {"airline_name": "", "origin_airport": "", "dest_airport": "", "plane": ""};
    client
        .database(DATABASE)
        .collection::<Document>("flights")
        .update_many(doc! {}, doc! {"$unset": paths})
        .await
        .expect("an update");
}
