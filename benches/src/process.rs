//! A program that is measured beside denormd.

use std::{
    process::{Child, Command},
    time::{Duration, Instant},
};

use bson::Document;
use denormd_show::host;
use mongodb::Database;

/// Limit of a start, and of the work on a backlog.
const PATIENCE: Duration = Duration::from_mins(15);
/// The longest time between two looks.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// A child process. It ends with this.
pub struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

impl Process {
    /// Starts the program.
    pub fn start(command: &mut Command) -> Self {
        Self(command.spawn().expect("the program starts"))
    }

    /// The id of the process.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Sends a signal: `STOP` suspends it, `CONT` resumes it.
    pub fn signal(&self, name: &str) {
        host::signal(self.pid(), name);
    }

    /// Waits for an event. Looks again after `pause`, and later after 2% of the time so far: looking costs the server CPU.
    pub async fn until(&mut self, event: &str, pause: Duration, mut reached: impl AsyncFnMut() -> bool) {
        let begin = Instant::now();
        while !reached().await {
            let ended = self.0.try_wait().expect("its status");
            assert!(
                ended.is_none() && begin.elapsed() < PATIENCE,
                "timed out, or the program ended ({ended:?}), before this: {event}"
            );
            tokio::time::sleep((begin.elapsed() / 50).clamp(pause, LONGEST_PAUSE)).await;
        }
    }

    /// Waits until no document of the collection matches this filter of stale ones.
    pub async fn applied(&mut self, database: &Database, (collection, stale): (&str, Document), pause: Duration) {
        let collection = database.collection::<Document>(collection);
        let fresh = async || collection.find_one(stale.clone()).await.expect("a look").is_none();
        self.until("the backlog is applied", pause, fresh).await;
    }
}
