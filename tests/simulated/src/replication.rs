//! Members, elections, and writes that are not majority-committed yet.
//!
//! One store serves every member, and only the primary runs commands on it. While replication is held back, a snapshot of the
//! store is what a majority has: majority reads and change streams see that, and writes with a majority write concern wait.
//! An election makes the later writes disappear, as a rollback would. The commit point of a new primary may also be older than
//! that of the former one: then majority reads and change streams see an older snapshot for a time, and no write disappears.
//! Not modelled: a former primary that still takes writes, and reads on a secondary.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use bson::{Bson, Document, Timestamp, doc, oid::ObjectId};
use denormd_mql::Collections;
use tokio::time::Instant;

use crate::{
    read::{number, time_limit},
    replies::{Failure, Result},
    state::{Meta, Model, State},
};

/// The time limit of a command that has none.
const LONG: i64 = 600_000;

/// Counters of changes that clients are told about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Topology {
    /// The `counter` of `topologyVersion`.
    pub version: i64,
    /// Each of them closes the connections.
    pub step_downs: u64,
}

/// The state of the majority while replication is held back, as the primary knows it.
#[derive(Clone)]
pub struct Held {
    /// True if the next election rolls back all later writes.
    rolls_back: bool,
    data: Collections,
    collections: BTreeMap<String, Meta>,
    length: usize,
    last: Timestamp,
    committed: HashMap<Vec<u8>, i64>,
}

/// A client's connection to a member.
#[derive(Debug, Clone, Default)]
pub struct Connection {
    /// The member; None for the primary, whichever it is.
    pub member: Option<usize>,
    /// The name of the client's program.
    pub program: String,
    /// The number of elections before it was opened.
    step_downs: u64,
}

impl Model {
    /// Holds replication back: from now on, no write is majority-committed.
    pub fn hold_back(&self) {
        let mut state = self.state();
        if state.held.is_none() {
            state.held = Some(Box::new(state.majority(true)));
        }
    }

    /// The state that a majority has, for [`Model::fall_behind`].
    #[must_use]
    pub fn majority(&self) -> Held {
        let state = self.state();
        state.held.as_deref().cloned().unwrap_or_else(|| state.majority(false))
    }

    /// Sets the primary's commit point back to this state, until [`Model::replicate`].
    pub fn fall_behind(&self, known: Held) {
        self.state().held = Some(Box::new(known));
    }

    /// True if the primary's commit point is older than the majority's.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.state().held.as_ref().is_some_and(|held| !held.rolls_back)
    }

    /// Lets replication continue: everything is majority-committed.
    pub fn replicate(&self) {
        self.state().held = None;
        self.wake();
    }

    /// Ends the primary, and closes all connections. Writes that are not majority-committed are rolled back.
    pub fn step_down(&self) {
        let mut state = self.state();
        state.primary = None;
        state.cursors.clear();
        state.transactions.clear();
        if let Some(held) = state.held.take().filter(|held| held.rolls_back) {
            let Held { data, collections, length, last, committed, .. } = *held;
            (state.data, state.collections, state.last, state.committed) = (data, collections, last, committed);
            state.oplog.truncate(length);
        }
        state.topology.send_modify(|topology| {
            topology.version += 1;
            topology.step_downs += 1;
        });
    }

    /// Makes a member the primary, whose clock is so many milliseconds ahead of this machine's.
    pub fn elect(&self, member: usize, skew: i64) {
        let mut state = self.state();
        (state.primary, state.skew, state.election) = (Some(member), skew, ObjectId::new());
        state.term += 1;
        state.noop();
        state.topology.send_modify(|topology| topology.version += 1);
        drop(state);
        self.wake();
    }

    /// A connection that is opened now.
    #[must_use]
    pub fn connection(&self, member: Option<usize>) -> Connection {
        Connection { member, program: String::new(), step_downs: self.state().topology.borrow().step_downs }
    }

    /// Waits until an election closes the connection.
    pub(crate) async fn closed(&self, connection: &Connection) {
        let mut topology = self.state().topology.subscribe();
        // The sender is a part of the model.
        topology.wait_for(|now| now.step_downs != connection.step_downs).await.ok();
    }

    /// Waits for news of the set if a `hello` asks for it.
    pub(crate) async fn await_news(&self, command: &Document) {
        let limit = command.get("maxAwaitTimeMS").and_then(number);
        let known = command.get_document("topologyVersion").ok().and_then(|version| number(version.get("counter")?));
        let (Some(limit), Some(known)) = (limit, known) else { return };
        let mut topology = self.state().topology.subscribe();
        let news = topology.wait_for(|now| now.version != known);
        tokio::time::timeout(Duration::from_millis(limit.unsigned_abs()), news).await.ok();
    }

    /// Waits until a write is majority-committed. Returns the error if that takes too long.
    pub(crate) async fn await_majority(&self, command: &Document, time: Timestamp) -> Option<Document> {
        let concern = command.get_document("writeConcern").ok();
        let limits = [command.get("maxTimeMS"), concern.and_then(|concern| concern.get("wtimeout"))];
        let limit = limits.into_iter().flatten().filter_map(number).filter(|limit| *limit > 0).min().unwrap_or(LONG);
        let deadline = Instant::now() + Duration::from_millis(limit.unsigned_abs());
        loop {
            let changed = self.changed();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.state().committed_time() >= time {
                return None;
            }
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                return Some(
                    doc! {"code": 64, "codeName": "WriteConcernFailed", "errmsg": "waiting for replication timed out"},
                );
            }
        }
    }
}

impl State {
    fn majority(&self, rolls_back: bool) -> Held {
        Held {
            rolls_back,
            data: self.data.clone(),
            collections: self.collections.clone(),
            length: self.oplog.len(),
            last: self.last,
            committed: self.committed.clone(),
        }
    }

    /// True if an election has not closed the connection.
    pub fn is_open(&self, connection: &Connection) -> bool {
        self.topology.borrow().step_downs == connection.step_downs
    }

    /// The time of the last majority-committed entry.
    pub fn committed_time(&self) -> Timestamp {
        self.held.as_ref().map_or(self.last, |held| held.last)
    }

    /// The number of majority-committed entries.
    pub fn committed_length(&self) -> usize {
        self.held.as_ref().map_or(self.oplog.len(), |held| held.length)
    }

    /// The limit in milliseconds for which a read must wait for its `afterClusterTime`; None if it need not wait.
    pub fn waits_for_time(&mut self, command: &Document) -> Option<i64> {
        let concern = command.get_document("readConcern").ok()?;
        let after = concern.get_timestamp("afterClusterTime").ok()?;
        if after > self.last {
            // A primary appends an entry, as a server does.
            self.time = self.time.max(after);
            self.noop();
        }
        let waits = is_majority(command) && self.committed_time() < after;
        waits.then(|| time_limit(command).unwrap_or(LONG))
    }

    /// Runs something on the data that a majority has, if replication is held back.
    pub fn with_committed<T>(&mut self, run: impl FnOnce(&mut Self) -> T) -> T {
        self.swap_committed();
        let result = run(self);
        self.swap_committed();
        result
    }

    fn swap_committed(&mut self) {
        if let Some(held) = &mut self.held {
            std::mem::swap(&mut self.data, &mut held.data);
            std::mem::swap(&mut self.collections, &mut held.collections);
        }
    }

    /// The reason why a member does not run this command, if it is not the primary.
    pub fn check_primary(&self, member: Option<usize>, command: &Document) -> Result<()> {
        const ANYWHERE: [&str; 10] = [
            "hello",
            "isMaster",
            "ismaster",
            "ping",
            "buildInfo",
            "buildinfo",
            "replSetGetStatus",
            "endSessions",
            "connectionStatus",
            "killSessions",
        ];
        let name = command.keys().next().map(String::as_str).unwrap_or_default();
        if (member.is_some() && member == self.primary)
            || (member.is_none() && self.primary.is_some())
            || ANYWHERE.contains(&name)
        {
            return Ok(());
        }
        Err(Failure::new(10107, "not primary").with("topologyVersion", self.topology_version()))
    }

    pub fn topology_version(&self) -> Document {
        doc! {"processId": self.process, "counter": self.topology.borrow().version}
    }

    /// The reply of a member to `hello`.
    pub fn hello(&self, member: usize) -> Document {
        let date = self.now();
        let optime = |time: Timestamp| doc! {"ts": time, "t": self.term};
        let is_primary = self.primary == Some(member);
        let mut reply = doc! {
            "isWritablePrimary": is_primary, "ismaster": is_primary, "secondary": !is_primary, "helloOk": true,
            "setName": "rs0", "setVersion": 1, "hosts": self.members.clone(), "me": &self.members[member],
            "lastWrite": {
                "opTime": optime(self.last), "lastWriteDate": date, "majorityOpTime": optime(self.committed_time()),
                "majorityWriteDate": self.committed_date(),
            },
            "maxBsonObjectSize": 16 << 20, "maxMessageSizeBytes": 48_000_000, "maxWriteBatchSize": 100_000,
            "localTime": date, "logicalSessionTimeoutMinutes": 30, "minWireVersion": 0, "maxWireVersion": 17,
            "readOnly": false, "topologyVersion": self.topology_version(),
        };
        if let Some(primary) = self.primary {
            reply.insert("primary", &self.members[primary]);
        }
        if is_primary {
            reply.insert("electionId", self.election);
        }
        reply
    }

    fn committed_date(&self) -> Bson {
        match &self.held {
            None => self.now().into(),
            Some(held) => bson::DateTime::from_millis(i64::from(held.last.time) * 1000).into(),
        }
    }

    /// The reply to `replSetGetStatus`.
    pub fn status(&self, member: usize) -> Document {
        let members = self.members.iter().enumerate().map(|(nth, name)| {
            let (state, text) = if self.primary == Some(nth) { (1, "PRIMARY") } else { (2, "SECONDARY") };
            doc! {
                "_id": i32::try_from(nth).unwrap_or_default(), "name": name, "health": 1.0, "state": state, "stateStr": text,
                "self": nth == member, "optime": {"ts": self.last, "t": self.term}, "optimeDate": self.now(),
            }
        });
        let state = if self.primary == Some(member) { 1 } else { 2 };
        doc! {"set": "rs0", "date": self.now(), "myState": state, "term": self.term, "members": members.collect::<Vec<_>>()}
    }
}

/// True for a read that sees only what a majority has.
pub fn is_majority(command: &Document) -> bool {
    let level = command.get_document("readConcern").ok().and_then(|concern| concern.get_str("level").ok());
    level.is_some_and(|level| level == "majority" || level == "linearizable")
}

/// True for a write that is answered when a majority has it, as is the default.
pub fn wants_majority(command: &Document) -> bool {
    const WRITES: [&str; 12] = [
        "insert",
        "update",
        "delete",
        "findAndModify",
        "create",
        "drop",
        "dropDatabase",
        "renameCollection",
        "collMod",
        "createIndexes",
        "dropIndexes",
        "commitTransaction",
    ];
    let Some(name) = command.keys().next().map(String::as_str) else { return false };
    let in_transaction = command.contains_key("autocommit") && name != "commitTransaction";
    let w = command.get_document("writeConcern").ok().and_then(|concern| concern.get("w"));
    WRITES.contains(&name) && !in_transaction && w.and_then(number).is_none()
}
