//! Raw commands: majority reads no older than an event, and bulk updates that a late server does not run.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use bson::{Bson, DateTime, Document, RawArrayBuf, RawBson, RawDocumentBuf, cstr, doc, raw::CStr, rawdoc};
use futures_util::StreamExt;
use mongodb::{Client, Collection, Database, options::CursorType, raw_batch_cursor::RawBatch};
use tokio::sync::RwLock;

use crate::{
    error::{Error, Kind, Result},
    mongo::{
        classify::{kind_of_code, named},
        fence::{Fence, Window},
        primary::Primary,
    },
    position::ClusterTime,
};

/// How long one read may run on the server.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// How old the measured difference to the server's clock may be.
const CLOCK_AGE: Duration = Duration::from_secs(5);
/// How long the primary may take to say who it is.
const HELLO: Duration = Duration::from_secs(15);
/// What `$range` says to a step of zero, which is what [`in_time`] makes of a deadline that has passed.
const TOO_LATE: i32 = 34449;
/// A command document may be 16 MiB and a little; statements are cut well below it.
const COMMAND_BYTES: usize = 8 << 20;

/// A connection to the cluster, with the primary's clock.
#[derive(Debug)]
pub struct Server {
    client: Client,
    clock: RwLock<Option<Clock>>,
    fence: Option<Arc<Fence>>,
    /// Where a command's deadline is checked, once the server has been asked.
    checked: RwLock<Option<Checked>>,
}

/// Where a server checks the deadline of a bulk write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Checked {
    /// By a statement of its own that goes first and ends an ordered command. Costs nothing a statement.
    First,
    /// By the command's `let`, which is computed for each statement (16 µs on MongoDB 6.0.5).
    Each,
}

#[derive(Debug, Clone, Copy)]
struct Clock {
    /// The server's clock, in milliseconds since 1970, at `at`; not later than the true value.
    server_millis: i64,
    at: Instant,
}

/// What reads must not be older than.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reads {
    /// The event's cluster time.
    pub after: ClusterTime,
}

impl Reads {
    fn concern(self) -> Document {
        if self.after == ClusterTime::default() {
            doc! {"level": "majority"}
        } else {
            doc! {"level": "majority", "afterClusterTime": bson::Timestamp::from(self.after)}
        }
    }
}

/// The batches of a cursor on the primary. A primary that is no more ends it with an error.
pub struct Batches {
    cursor: mongodb::raw_batch_cursor::RawBatchCursor,
    primary: Primary,
}

impl Batches {
    /// The next batch; None after the last one.
    pub async fn next(&mut self) -> Result<Option<RawBatch>> {
        Ok(self.primary.attend(self.cursor.next()).await?.transpose()?)
    }
}

/// The documents of a cursor, a batch at a time.
pub struct Pages(Batches);

impl Pages {
    /// The documents of the next batch, which may be none; None after the last batch.
    pub async fn next(&mut self) -> Result<Option<Vec<RawDocumentBuf>>> {
        self.0.next().await?.as_ref().map(documents).transpose()
    }
}

/// The documents of one batch.
pub fn documents(batch: &RawBatch) -> Result<Vec<RawDocumentBuf>> {
    let mut out = Vec::new();
    for doc in batch.doc_slices()? {
        let doc = doc.map_err(Error::from)?;
        let doc = doc.as_document().ok_or_else(|| Error::internal("a batch holds something other than documents"))?;
        out.push(doc.to_owned());
    }
    Ok(out)
}

/// What one bulk command did.
#[derive(Debug, Default)]
pub struct Written {
    /// Documents that a statement matched.
    pub matched: u64,
    /// Documents that a statement changed.
    pub modified: u64,
    /// Statements that the server refused: index into the command's statements, and why.
    pub refused: Vec<(usize, Error)>,
}

impl Server {
    /// Wraps a connected client.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client, clock: RwLock::new(None), fence: None, checked: RwLock::new(None) }
    }

    /// The same cluster for a leader, whose writes end with its lease.
    #[must_use]
    pub fn under(&self, fence: Arc<Fence>) -> Self {
        Self { fence: Some(fence), ..Self::new(self.client.clone()) }
    }

    /// The same cluster without a leadership.
    #[must_use]
    pub fn unfenced(&self) -> Self {
        Self::new(self.client.clone())
    }

    /// The term of the leadership that this writes under; 0 without one.
    #[must_use]
    pub fn term(&self) -> i64 {
        self.fence.as_ref().map_or(0, |fence| fence.term())
    }

    /// The driver's client.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// A database.
    #[must_use]
    pub fn database(&self, name: &str) -> Database {
        self.client.database(name)
    }

    /// A collection of plain documents whose writes wait for a majority.
    #[must_use]
    pub fn collection(&self, database: &str, name: &str) -> Collection<Document> {
        let options = mongodb::options::CollectionOptions::builder()
            .write_concern(mongodb::options::WriteConcern::majority())
            .read_concern(mongodb::options::ReadConcern::majority())
            .build();
        self.client.database(database).collection_with_options(name, options)
    }

    /// Whether a collection exists.
    pub async fn has_collection(&self, database: &str, collection: &str) -> Result<bool> {
        let command = doc! {"listCollections": 1, "filter": {"name": collection}, "nameOnly": true};
        let reply = self.database(database).run_command(command).await?;
        let batch = reply.get_document("cursor").and_then(|cursor| cursor.get_array("firstBatch"));
        Ok(batch.is_ok_and(|batch| !batch.is_empty()))
    }

    /// What the primary says of itself.
    pub async fn hello(&self) -> Result<Document> {
        Primary::of(&self.client).hello(HELLO).await
    }

    /// The cluster's present operation time.
    pub async fn operation_time(&self) -> Result<ClusterTime> {
        let reply = Primary::of(&self.client).hello(HELLO).await?;
        reply
            .get_timestamp("operationTime")
            .map(ClusterTime::from)
            .map_err(|_| Error::new(Kind::Topology, "the server reports no operation time"))
    }

    /// Runs a majority read of the primary to its end: `aggregate` or `find` with everything but its concern and limits.
    pub async fn read(&self, database: &str, command: Document, reads: Reads) -> Result<Vec<RawDocumentBuf>> {
        let mut pages = self.pages(database, command, reads).await?;
        let mut out = Vec::new();
        while let Some(mut page) = pages.next().await? {
            out.append(&mut page);
        }
        Ok(out)
    }

    /// As [`Server::read`], one batch of the cursor at a time. A command that says how long it may take keeps that.
    pub async fn pages(&self, database: &str, mut command: Document, reads: Reads) -> Result<Pages> {
        command.insert("readConcern", reads.concern());
        if !command.contains_key("maxTimeMS") {
            command.insert("maxTimeMS", millis(READ_TIMEOUT));
        }
        let primary = Primary::of(&self.client);
        let database = self.database(database);
        let opened = database.run_cursor_command(command).selection_criteria(primary.criteria()).batch();
        let cursor = primary.attend(opened).await??;
        Ok(Pages(Batches { cursor, primary }))
    }

    /// Follows a cursor that never ends: its batches may be empty, and then come after `wait` at the latest.
    pub async fn follow(&self, database: &str, command: Document, batch: u32, wait: Duration) -> Result<Batches> {
        let primary = Primary::of(&self.client);
        let database = self.database(database);
        let opened = database
            .run_cursor_command(command)
            .selection_criteria(primary.criteria())
            .cursor_type(CursorType::TailableAwait)
            .batch_size(batch)
            .max_time(wait)
            .batch();
        let cursor = primary.attend(opened).await??;
        Ok(Batches { cursor, primary })
    }

    /// Runs update statements, each on its own account, acknowledged by a majority.
    ///
    /// The server checks the deadline by its own clock when it starts the command, and `maxTimeMS` bounds what started in
    /// time. A command that is delayed past its deadline writes nothing and says so. One whose answer is lost is waited out:
    /// when this returns it does not run any more.
    pub async fn update(
        &self,
        database: &str,
        collection: &str,
        statements: &[RawDocumentBuf],
        timeout: Duration,
    ) -> Result<Written> {
        self.bulk(database, &Verb::update(), collection, statements, timeout).await
    }

    /// Runs delete statements, in the way of [`Server::update`].
    pub async fn delete(
        &self,
        database: &str,
        collection: &str,
        statements: &[RawDocumentBuf],
        timeout: Duration,
    ) -> Result<Written> {
        self.bulk(database, &Verb::delete(), collection, statements, timeout).await
    }

    async fn bulk(
        &self,
        database: &str,
        verb: &Verb,
        collection: &str,
        statements: &[RawDocumentBuf],
        timeout: Duration,
    ) -> Result<Written> {
        let mut written = Written::default();
        let mut checked = self.checked(database, verb, collection, timeout).await?;
        let mut start = 0;
        while start < statements.len() {
            let mut bytes = 0;
            let fits = |statement: &&RawDocumentBuf| {
                bytes += statement.as_bytes().len() + 16;
                bytes <= COMMAND_BYTES
            };
            let count = statements[start..].iter().take_while(fits).count().max(1);
            let chunk = &statements[start..start + count];
            let window = self.window(timeout).await?;
            let reply = self.fenced(database, verb.command(collection, chunk, window, checked), window).await?;
            let refused = written.refused.len();
            take_reply(&reply, start, usize::from(checked == Checked::First), &mut written)?;
            start = match written.refused.get(refused) {
                // It ended there. Where one is refused others may be: what follows goes without an order.
                Some((index, _)) if checked == Checked::First => {
                    checked = Checked::Each;
                    index + 1
                }
                _ => start + count,
            };
        }
        Ok(written)
    }

    /// Where the server checks a deadline. It is asked, not assumed, by a command that is too late: only what refuses that
    /// one can be trusted. A mongos sends a command's statements to different shards, and only some get the first.
    async fn checked(&self, database: &str, verb: &Verb, collection: &str, timeout: Duration) -> Result<Checked> {
        if let Some(known) = *self.checked.read().await {
            return Ok(known);
        }
        let hello = Primary::of(&self.client).hello(HELLO).await?;
        let mut checked = Checked::Each;
        if hello.get_str("msg").ok() != Some("isdbgrid") {
            let window = Window { deadline: 0, ..self.window(timeout).await? };
            let late = self.fenced(database, verb.command(collection, &[], window, Checked::First), window).await?;
            match take_reply(&late, 0, 1, &mut Written::default()) {
                Err(error) if error.kind == Kind::Unavailable => checked = Checked::First,
                Err(error) => return Err(error),
                Ok(()) => {}
            }
        }
        *self.checked.write().await = Some(checked);
        Ok(checked)
    }

    /// When a command that is sent now may run.
    async fn window(&self, timeout: Duration) -> Result<Window> {
        let now = self.server_now().await?;
        Window::new(self.fence.as_deref(), now, timeout, Instant::now())
    }

    /// Sends a write with its deadline, and stays until it cannot run any more.
    async fn fenced(&self, database: &str, command: RawDocumentBuf, window: Window) -> Result<Document> {
        let primary = Primary::of(&self.client);
        let database = self.database(database);
        let answer = primary.attend(database.run_raw_command(command).selection_criteria(primary.criteria()));
        let result = match tokio::time::timeout_at(window.over.into(), answer).await {
            Ok(Ok(answer)) => answer.map_err(Error::from),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(Error::new(Kind::Connection, "no answer in time")),
        };
        if let Err(error) = &result {
            // Another server, with another clock, may have become the primary, or another release.
            *self.clock.write().await = None;
            *self.checked.write().await = None;
            if error.kind == Kind::Connection && primary.address().is_some() {
                primary.wait_out(window.over).await;
            }
        }
        result.map_err(|error| if error.code == Some(TOO_LATE) { too_late() } else { error })
    }

    /// The primary's clock, in milliseconds since 1970, never later than it really is.
    async fn server_now(&self) -> Result<i64> {
        let known = *self.clock.read().await;
        if let Some(clock) = known.filter(|clock| clock.at.elapsed() < CLOCK_AGE) {
            return Ok(clock
                .server_millis
                .saturating_add(i64::try_from(clock.at.elapsed().as_millis()).unwrap_or(i64::MAX)));
        }
        let reply = Primary::of(&self.client).hello(HELLO).await?;
        let at = Instant::now();
        let server_millis = reply
            .get_datetime("localTime")
            .map_err(|_| Error::internal("the server reports no local time"))?
            .timestamp_millis();
        *self.clock.write().await = Some(Clock { server_millis, at });
        Ok(server_millis)
    }
}

/// A bulk write command.
struct Verb {
    name: &'static CStr,
    list: &'static CStr,
    /// What follows `q` in a statement that changes nothing.
    nothing: (&'static CStr, RawBson),
}

impl Verb {
    fn update() -> Self {
        let nothing = RawBson::Document(rawdoc! {"$set": {}});
        Self { name: cstr!("update"), list: cstr!("updates"), nothing: (cstr!("u"), nothing) }
    }

    fn delete() -> Self {
        Self { name: cstr!("delete"), list: cstr!("deletes"), nothing: (cstr!("limit"), RawBson::Int32(1)) }
    }

    fn command(
        &self,
        collection: &str,
        statements: &[RawDocumentBuf],
        window: Window,
        checked: Checked,
    ) -> RawDocumentBuf {
        let mut array = RawArrayBuf::new();
        if checked == Checked::First {
            // `$range` of nothing is never more than an array of one.
            let never = rawdoc! {"$gt": [in_time(window), [0, 0]]};
            let mut first = rawdoc! {"q": {"_id": null, "$expr": never}};
            let (name, nothing) = &self.nothing;
            first.append(*name, nothing.clone());
            array.push(first);
        }
        for statement in statements {
            array.push(statement.as_ref());
        }
        let mut command = RawDocumentBuf::new();
        command.append(self.name, collection);
        command.append(self.list, array);
        if checked == Checked::Each {
            command.append(cstr!("let"), rawdoc! {"ok": in_time(window)});
        }
        command.append(cstr!("ordered"), checked == Checked::First);
        command.append(cstr!("writeConcern"), rawdoc! {"w": "majority"});
        command.append(cstr!("maxTimeMS"), millis(window.run));
        command
    }
}

/// `[0]`, or an error of its own kind when it is too late: that nothing matched would look like success.
fn in_time(window: Window) -> RawDocumentBuf {
    let in_time = rawdoc! {"$lt": ["$$NOW", DateTime::from_millis(window.deadline)]};
    rawdoc! {"$range": [0, 1, {"$cond": [in_time, 1, 0]}]}
}

fn too_late() -> Error {
    Error::new(Kind::Unavailable, "the command reached the server after its deadline")
}

/// Adds what a reply says of statements from `offset` on; `before` of its statements were none of theirs.
fn take_reply(reply: &Document, offset: usize, before: usize, written: &mut Written) -> Result<()> {
    let count = |name: &str| match reply.get(name) {
        Some(Bson::Int32(n)) => u64::try_from(*n).unwrap_or_default(),
        Some(Bson::Int64(n)) => u64::try_from(*n).unwrap_or_default(),
        _ => 0,
    };
    written.matched += count("n");
    written.modified += count("nModified");
    if let Ok(errors) = reply.get_array("writeErrors") {
        for error in errors.iter().filter_map(Bson::as_document) {
            let index = error.get_i32("index").ok().and_then(|i| usize::try_from(i).ok()).unwrap_or_default();
            let code = error.get_i32("code").unwrap_or_default();
            if code == TOO_LATE {
                return Err(too_late());
            }
            let kind = kind_of_code(code);
            let name = error.get_str("codeName").unwrap_or_default();
            let error = Error { code: Some(code), ..Error::new(kind, named(code, name)) };
            // What refuses the first of all, which changes nothing, refuses the command.
            let Some(index) = index.checked_sub(before) else { return Err(error) };
            written.refused.push((offset + index, error));
        }
    }
    if let Ok(concern) = reply.get_document("writeConcernError") {
        let code = concern.get_i32("code").unwrap_or_default();
        return Err(Error {
            code: Some(code),
            ..Error::new(Kind::NotReplicated, format!("the write has not reached a majority (code {code})"))
        });
    }
    Ok(())
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
