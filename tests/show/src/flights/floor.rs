//! The floor: the same values written by a plain writer that already knows every one of them.

use std::time::Duration;

use bson::{Document, RawDocumentBuf, doc};
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
    /// Statements in all of them.
    pub statements: usize,
}

impl Floor {
    /// One statement for a flight, with all that these rules copy into it. Where they copy nothing there is nothing to do:
    /// the floor starts from flights without a copied field.
    pub fn add(&mut self, sources: &Sources, flight: &Document, rules: impl Iterator<Item = Rule>) {
        let values = rules.flat_map(|rule| sources.expected(rule, flight));
        let set: Document = values.filter_map(|(path, value)| Some((path.to_owned(), value?))).collect();
        if set.is_empty() {
            return;
        }
        self.open.push(doc! {"q": {"_id": flight.get("_id").cloned()}, "u": {"$set": set}});
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
