//! The model's state, and the way of a command through it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bson::{Binary, Bson, DateTime, Document, Timestamp, doc, oid::ObjectId, spec::BinarySubtype};
use denormd_model::clock;
use denormd_mql::Collections;
use rand::{Rng, SeedableRng, rngs::StdRng};
use tokio::{
    sync::{Notify, futures::Notified, watch},
    time::Instant,
};

use crate::{
    faults::Faults,
    oplog::Entry,
    read::{is_set, time_limit},
    record::Record,
    replication::{Connection, Held, Topology, is_majority, wants_majority},
    replies::{CLOSES, Failure, Result, TOO_LONG, UNKNOWN},
    stream::Stream,
    transaction::Transaction,
};

/// Time that an empty batch of a change stream waits for events unless the command has a limit.
const AWAIT: i64 = 1000;

/// A collection without its documents.
#[derive(Debug, Clone)]
pub struct Meta {
    pub uuid: Bson,
    pub options: Document,
    pub indexes: Vec<Document>,
}

impl Meta {
    pub fn keeps_pre_images(&self) -> bool {
        let images = self.options.get_document("changeStreamPreAndPostImages");
        images.is_ok_and(|images| is_set(images, "enabled"))
    }
}

/// An open cursor.
#[derive(Debug)]
pub enum Cursor {
    Rows(String, VecDeque<Document>),
    Stream(Box<Stream>),
}

pub struct State {
    /// The documents of each collection in the order of their insertion.
    pub data: Collections,
    pub collections: BTreeMap<String, Meta>,
    pub oplog: Vec<Entry>,
    /// Changes before this time are no longer in the oplog.
    pub first: Timestamp,
    /// The time of the last oplog entry.
    pub last: Timestamp,
    /// The last time that was given to an entry, those that were rolled back included.
    pub time: Timestamp,
    /// The state of the majority, while replication is held back.
    pub held: Option<Box<Held>>,
    pub cursors: HashMap<i64, Cursor>,
    pub transactions: HashMap<Vec<u8>, Transaction>,
    /// The entries of the transaction whose command is running.
    pub buffered: Option<Vec<Entry>>,
    /// The last transaction that each session has committed: a commit is sent again if its answer was lost.
    pub committed: HashMap<Vec<u8>, i64>,
    pub random: StdRng,
    /// The addresses of the members.
    pub members: Vec<String>,
    pub primary: Option<usize>,
    pub process: ObjectId,
    pub election: ObjectId,
    pub term: i64,
    pub topology: watch::Sender<Topology>,
    /// Milliseconds by which the primary's clock is ahead of this machine's.
    pub skew: i64,
    /// The prefix of the names of programs whose commands faults strike, and their frequencies.
    pub faults: (String, Faults),
    /// The longest delay of a command or an answer.
    pub latency: Duration,
    /// The database with large collections.
    pub large_collections: Option<String>,
    /// The database with large events, and true if some of them close the connection.
    pub large_events: Option<(String, bool)>,
    /// The program whose command is running.
    pub program: String,
    /// The recorded writes of chosen programs.
    pub record: Option<Record>,
    /// The names of all programs that have connected.
    pub programs: BTreeSet<String>,
    /// The programs whose commands are ignored.
    pub ignored: BTreeSet<String>,
    /// The programs whose commands and answers are held back.
    pub disconnected: BTreeSet<String>,
    pub struck: BTreeMap<&'static str, u32>,
    pub draws: StdRng,
    unknown: BTreeSet<String>,
}

/// The result of an attempt to run a command.
pub enum Progress {
    Done(Document),
    /// Waits for further oplog entries, at most for these milliseconds.
    Wait(i64),
    /// Closes the connection.
    Closed,
}

/// A MongoDB in memory. Clones share it.
#[derive(Clone)]
pub struct Model(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// Wakes up the streams that wait for changes.
    changed: Notify,
}

impl Model {
    /// An empty cluster.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let now = clock::wall_millis();
        let start = Timestamp { time: u32::try_from(now / 1000).unwrap_or_default(), increment: 1 };
        let state = State {
            data: Collections::new(),
            collections: BTreeMap::new(),
            oplog: vec![Entry::start(start, now)],
            first: start,
            last: start,
            time: start,
            held: None,
            cursors: HashMap::new(),
            transactions: HashMap::new(),
            buffered: None,
            committed: HashMap::new(),
            random: StdRng::seed_from_u64(seed),
            members: vec![String::new()],
            primary: Some(0),
            process: ObjectId::new(),
            election: ObjectId::new(),
            term: 1,
            topology: watch::channel(Topology::default()).0,
            skew: 0,
            faults: (String::new(), Faults::default()),
            latency: Duration::ZERO,
            large_collections: None,
            large_events: None,
            program: String::new(),
            record: None,
            programs: BTreeSet::new(),
            ignored: BTreeSet::new(),
            disconnected: BTreeSet::new(),
            struck: BTreeMap::new(),
            draws: StdRng::seed_from_u64(seed ^ 0x6661_756c),
            unknown: BTreeSet::new(),
        };
        Self(Arc::new(Shared { state: Mutex::new(state), changed: Notify::new() }))
    }

    /// Everything that commands asked for and the model does not know.
    #[must_use]
    pub fn unknown(&self) -> BTreeSet<String> {
        self.state().unknown.clone()
    }

    /// Shortens the oplog: no stream can resume before now.
    pub fn shorten_oplog(&self) {
        let mut state = self.state();
        state.first = state.committed_time();
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The end of the next wait for a change.
    pub(crate) fn changed(&self) -> Notified<'_> {
        self.0.changed.notified()
    }

    pub(crate) fn wake(&self) {
        self.0.changed.notify_waiters();
    }

    /// Runs a command on the primary.
    pub async fn run(&self, command: Document) -> Document {
        self.answer(&self.connection(None), &command).await.unwrap_or_default()
    }

    /// The answer to a command; None if an election closes the connection.
    pub(crate) async fn answer(&self, connection: &Connection, command: &Document) -> Option<Document> {
        self.await_news(command).await;
        let (mut reply, time) = tokio::select! {
            answered = self.attempts(connection, command) => answered?,
            () = self.closed(connection), if !is_hello(command) => return None,
        };
        if wants_majority(command) && reply.get_f64("ok").is_ok_and(|ok| ok > 0.0) {
            let failed = tokio::select! {
                failed = self.await_majority(command, time) => failed,
                () = self.closed(connection) => return None,
            };
            reply.extend(failed.map(|error| ("writeConcernError".to_owned(), Bson::from(error))));
        }
        Some(reply)
    }

    /// The result of a command, and the time of the last entry after it; None if the connection is closed.
    async fn attempts(&self, connection: &Connection, command: &Document) -> Option<(Document, Timestamp)> {
        let (mut waited, mut deadline) = (false, None);
        loop {
            let changed = self.changed();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let (progress, last) = {
                let mut state = self.state();
                if !is_hello(command) && !state.is_open(connection) {
                    return None;
                }
                state.program.clone_from(&connection.program);
                let before = state.last;
                let progress = state.run(connection.member, command, waited);
                if state.last != before {
                    self.wake();
                }
                (progress, state.last)
            };
            let wait = match progress {
                Progress::Done(reply) => {
                    // The time limit passes before the answer, unless the command has waited that long already.
                    let takes_long = !waited && reply.get_i32("code").is_ok_and(|code| code == TOO_LONG);
                    if let Some(limit) = time_limit(command).filter(|_| takes_long) {
                        tokio::time::sleep(Duration::from_millis(limit.unsigned_abs())).await;
                    }
                    return Some((reply, last));
                }
                Progress::Wait(millis) => millis,
                Progress::Closed => return None,
            };
            // Another change than those that the stream selects does not end the wait.
            let limit = Duration::from_millis(u64::try_from(wait).unwrap_or_default());
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + limit);
            waited = tokio::time::timeout_at(deadline, changed).await.is_err();
        }
    }
}

/// True for the command by which drivers watch a member.
pub fn is_hello(command: &Document) -> bool {
    command.keys().next().is_some_and(|name| ["hello", "isMaster", "ismaster"].contains(&name.as_str()))
}

impl State {
    /// Runs a command; `waited` if it must answer now.
    pub fn run(&mut self, member: Option<usize>, command: &Document, waited: bool) -> Progress {
        self.keep_alive();
        let result = self.attempt(member, command, waited);
        let mut reply = match result {
            Ok(Progress::Done(reply)) => reply,
            Ok(other) => return other,
            Err(failure) if failure.code == CLOSES => return Progress::Closed,
            Err(failure) => {
                if failure.code == UNKNOWN && self.unknown.insert(failure.message().to_owned()) {
                    eprintln!("{} in {command}", failure.message());
                }
                failure.reply()
            }
        };
        if !reply.contains_key("ok") {
            reply.insert("ok", 1.0);
        }
        Progress::Done(self.signed(reply))
    }

    fn attempt(&mut self, member: Option<usize>, command: &Document, waited: bool) -> Result<Progress> {
        match command.keys().next().map(String::as_str) {
            Some("hello" | "isMaster" | "ismaster") => {
                return Ok(Progress::Done(self.hello(member.or(self.primary).unwrap_or(0))));
            }
            Some("replSetGetStatus") => return Ok(Progress::Done(self.status(member.or(self.primary).unwrap_or(0)))),
            _ => self.check_primary(member, command)?,
        }
        match self.waits_for_time(command) {
            Some(_) if waited => return Err(Failure::too_long()),
            Some(limit) => return Ok(Progress::Wait(limit)),
            None => {}
        }
        if self.held.is_some() && is_majority(command) && !command.contains_key("autocommit") {
            return self.with_committed(|state| state.in_session(command, waited));
        }
        self.in_session(command, waited)
    }

    /// A reply with the times that every reply has.
    pub fn signed(&self, mut reply: Document) -> Document {
        let signature = Binary { subtype: BinarySubtype::Generic, bytes: vec![0; 20] };
        let signature = doc! {"hash": signature, "keyId": 0_i64};
        reply.insert("$clusterTime", doc! {"clusterTime": self.time, "signature": signature});
        reply.insert("operationTime", self.last);
        reply
    }

    /// The primary's clock, in milliseconds since 1970.
    pub fn millis(&self) -> i64 {
        clock::wall_millis() + self.skew
    }

    /// A no-op entry every ten seconds, as on a server.
    fn keep_alive(&mut self) {
        if self.primary.is_some() && self.millis() / 1000 >= i64::from(self.last.time) + 10 {
            self.noop();
        }
    }

    pub fn dispatch(&mut self, command: &Document, waited: bool) -> Result<Progress> {
        let Some((name, argument)) = command.iter().next() else { return Err(Failure::new(9, "an empty command")) };
        let database = command.get_str("$db").unwrap_or("admin").to_owned();
        let database = database.as_str();
        if name == "getMore" {
            let limit = command.get("maxTimeMS").and_then(crate::read::number).unwrap_or(AWAIT);
            return self.get_more(command, waited, limit);
        }
        let reply = match name.as_str() {
            "find" => self.find(database, command),
            "aggregate" => self.aggregate(database, command),
            "count" => self.count(database, command),
            "distinct" => self.distinct(database, command),
            "killCursors" => {
                for id in command.get_array("cursors").into_iter().flatten().filter_map(Bson::as_i64) {
                    self.cursors.remove(&id);
                }
                Ok(doc! {})
            }
            "insert" => self.insert(database, command),
            "update" => self.update(database, command),
            "delete" => self.delete(database, command),
            "findAndModify" | "findandmodify" => self.find_and_modify(database, command),
            _ => self.administer(name, argument, database, command),
        };
        reply.map(Progress::Done)
    }

    pub fn now(&self) -> DateTime {
        DateTime::from_millis(self.millis())
    }

    pub fn uuid(&mut self) -> Bson {
        let mut bytes: [u8; 16] = self.random.random();
        bytes[6] = (bytes[6] & 0x0f) | 0x40;
        bytes[8] = (bytes[8] & 0x3f) | 0x80;
        Binary { subtype: BinarySubtype::Uuid, bytes: bytes.to_vec() }.into()
    }

    /// An `_id` that a server would have generated.
    pub fn object_id(&mut self) -> ObjectId {
        let mut bytes: [u8; 12] = self.random.random();
        bytes[..4].copy_from_slice(&self.last.time.to_be_bytes());
        ObjectId::from_bytes(bytes)
    }

    /// The variables of a command's expressions, with their values: those of the server, and those of its `let`.
    pub fn variables(&self, command: &Document) -> Result<Document> {
        let mut variables = doc! {"NOW": self.now(), "CLUSTER_TIME": self.last};
        let given = command.get_document("let").cloned().unwrap_or_default();
        for (name, expression) in given {
            let bound = bind(&expression, &variables);
            if let Some(value) = denormd_mql::expression(&bound, &Document::new())? {
                variables.insert(name, value);
            }
        }
        Ok(variables)
    }
}

/// An expression with the values of these variables.
pub fn bind(expression: &Bson, variables: &Document) -> Bson {
    let names: Vec<&str> = variables.keys().map(String::as_str).collect();
    denormd_mql::bind_expression(expression, &names, variables)
}

/// A filter with the values of these variables.
pub fn bind_filter(filter: &Document, variables: &Document) -> Document {
    let names: Vec<&str> = variables.keys().map(String::as_str).collect();
    match denormd_mql::bind_query(&Bson::Document(filter.clone()), &names, variables) {
        Bson::Document(filter) => filter,
        _ => Document::new(),
    }
}

/// The collection that a command names.
pub fn target(database: &str, command: &Document) -> Result<String> {
    match command.values().next() {
        Some(Bson::String(name)) => Ok(format!("{database}.{name}")),
        _ => Err(Failure::new(73, "a collection's name is a string")),
    }
}

/// Refuses options other than these, and a collation other than the simple one.
pub fn check_options(of: &str, options: &Document, known: &[&str]) -> Result<()> {
    const EVERYWHERE: &[&str] = &[
        "$db",
        "lsid",
        "$clusterTime",
        "$readPreference",
        "readConcern",
        "writeConcern",
        "maxTimeMS",
        "txnNumber",
        "autocommit",
        "startTransaction",
        "comment",
    ];
    for (name, value) in options {
        let name = name.as_str();
        if name == "collation" {
            if value.as_document().is_none_or(|collation| *collation != doc! {"locale": "simple"}) {
                return Err(Failure::unknown(format_args!("the collation {value}")));
            }
        } else if name != of && !known.contains(&name) && !EVERYWHERE.contains(&name) {
            return Err(Failure::unknown(format_args!("`{name}` of `{of}`")));
        }
    }
    Ok(())
}
