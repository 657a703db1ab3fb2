//! Read-only queries to the server, each with a time limit. A query that lacks a privilege or takes too long yields
//! "not known".

use std::time::Duration;

use tokio::time::Instant;

use bson::{Bson, Document, doc};
use futures_util::TryStreamExt;
use mongodb::Client;

use denormd_model::{clock::millis, namespace::Namespace};
use denormd_mongo::error::{Error, Kind, Result};

use denormd_model::distribution::{Known, Unknown};

/// Server-side time limit of one query.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Sends queries to one cluster, or to one of its members.
#[derive(Debug, Clone)]
pub struct Ask {
    client: Client,
}

impl Ask {
    /// Uses this client for every query.
    #[must_use]
    pub fn new(client: &Client) -> Self {
        Self { client: client.clone() }
    }

    /// The driver's client, for queries that this type does not offer.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Runs an aggregation and collects all results. `needs` names the privilege that it requires.
    pub async fn aggregate(
        &self,
        ns: &Namespace,
        pipeline: Vec<Document>,
        needs: &str,
    ) -> Result<Known<Vec<Document>>> {
        self.hinted(ns, pipeline, None, needs).await
    }

    /// Like [`Ask::aggregate`], with a hint for the index with these keys.
    pub async fn hinted(
        &self,
        ns: &Namespace,
        pipeline: Vec<Document>,
        hint: Option<Document>,
        needs: &str,
    ) -> Result<Known<Vec<Document>>> {
        let collection = self.client.database(&ns.database).collection::<Document>(&ns.collection);
        let started = Instant::now();
        let answer = async {
            let mut asked = collection.aggregate(pipeline).max_time(TIMEOUT).batch_size(5000);
            if let Some(keys) = hint {
                asked = asked.hint(mongodb::options::Hint::Keys(keys));
            }
            asked.await?.try_collect::<Vec<Document>>().await
        };
        known(Box::pin(answer).await.map_err(Error::from), needs, &ns.to_string(), started)
    }

    /// Runs a command that returns one document.
    pub async fn command(&self, database: &str, mut command: Document, needs: &str) -> Result<Known<Document>> {
        command.insert("maxTimeMS", Bson::Int64(millis(TIMEOUT)));
        let started = Instant::now();
        let answer = Box::pin(self.client.database(database).run_command(command).into_future()).await;
        known(answer.map_err(Error::from), needs, database, started)
    }

    /// Lists the collections of a database.
    pub async fn collections(&self, database: &str) -> Result<Vec<Document>> {
        let command = doc! {"listCollections": 1, "authorizedCollections": false};
        Ok(self.client.database(database).run_cursor_command(command).await?.try_collect().await?)
    }
}

/// Turns a refusal or a timeout into "not known"; a lost connection stays an error.
fn known<T>(answer: Result<T>, needs: &str, about: &str, started: Instant) -> Result<Known<T>> {
    let error = match answer {
        Ok(answer) => return Ok(Ok(answer)),
        Err(error) => error,
    };
    Ok(Err(Unknown(match error.kind {
        Kind::Privilege => format!("needs the privilege {needs}"),
        Kind::TimedOut | Kind::ReadTimedOut => {
            format!("{about} gave no answer within {} s", started.elapsed().as_secs())
        }
        Kind::Refused | Kind::TooLarge | Kind::Internal | Kind::HistoryLost => {
            format!("{about} refuses: {}", error.message)
        }
        Kind::Connection
        | Kind::Unavailable
        | Kind::NotReplicated
        | Kind::Config
        | Kind::Topology
        | Kind::State
        | Kind::Machine => return Err(error),
    })))
}
