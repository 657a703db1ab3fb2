//! The floor: the same values written by a plain writer that already knows every one of them.

use std::{collections::BTreeMap, time::Duration};

use bson::{Document, RawDocumentBuf, doc};
use futures_util::{StreamExt, stream};
use mongodb::Client;
use tokio::time::Instant;

use super::{
    DATABASE,
    expected::{Rule, Values},
};

/// Statements in one command.
const STATEMENTS: usize = 1000;
/// Concurrent commands.
const WRITERS: usize = 2;

/// `update` commands, ready to be sent.
#[derive(Default)]
pub struct Floor {
    commands: Vec<RawDocumentBuf>,
    /// Statements of incomplete commands, by collection.
    open: BTreeMap<&'static str, Vec<Document>>,
    /// Number of statements in all commands.
    pub statements: usize,
}

impl Floor {
    /// Adds one statement for a document, with everything that these rules, which write to one collection, copy into
    /// it. Without copied values there is nothing to do: the floor starts from documents without a copied field.
    pub fn add<'a>(&mut self, document: &Document, rules: impl Iterator<Item = &'a (Rule, Values)>) {
        let mut target = None;
        let mut set = Document::new();
        for (rule, values) in rules {
            target = Some(rule.target());
            let there = values.iter().filter_map(|(path, value)| Some(((*path).to_owned(), value.clone()?)));
            set.extend(there);
        }
        let Some(target) = target.filter(|_| !set.is_empty()) else { return };
        let open = self.open.entry(target).or_default();
        open.push(doc! {"q": {"_id": document.get("_id").cloned()}, "u": {"$set": set}});
        self.statements += 1;
        if open.len() == STATEMENTS {
            let full = std::mem::take(open);
            self.commands.push(command(target, full));
        }
    }

    /// Sends the commands; returns the time that took.
    pub async fn write(mut self, client: &Client) -> Duration {
        let rest = std::mem::take(&mut self.open).into_iter().filter(|(_, open)| !open.is_empty());
        self.commands.extend(rest.map(|(target, open)| command(target, open)));
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

fn command(target: &str, statements: Vec<Document>) -> RawDocumentBuf {
    let command = doc! {"update": target, "updates": statements, "ordered": false, "writeConcern": {"w": "majority"}};
    RawDocumentBuf::try_from(&command).expect("a command")
}

/// Removes every copied field, as if there had been no daemon.
pub async fn reset(client: &Client) {
    for (collection, paths) in [
        ("flights", ["airline_name", "origin_airport", "dest_airport", "plane"].as_slice()),
        ("planes", &["last_flights", "flights", "mean_delay"]),
        ("airports", &["departures", "arrivals"]),
    ] {
        let paths: Document = paths.iter().map(|path| ((*path).to_owned(), "".into())).collect();
        let documents = client.database(DATABASE).collection::<Document>(collection);
        documents.update_many(doc! {}, doc! {"$unset": paths}).await.expect("an update");
    }
}
