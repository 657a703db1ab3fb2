//! Raw commands: majority reads that are at least as new as an event, and bulk writes that a slow server does not run
//! after their deadline.

use std::{borrow::Cow, sync::Arc, time::Duration};

use bson::{
    Bson, DateTime, Document, RawBson, RawDocument, RawDocumentBuf, Timestamp, cstr, doc, raw::CStr, rawdoc,
    spec::ElementType,
};
use futures_util::{StreamExt, TryStreamExt};
use mongodb::{Client, Collection, Database, error::ErrorKind, options::CursorType, raw_batch_cursor::RawBatch};
use parking_lot::Mutex;
use serde::{Deserialize, de::IgnoredAny};
use tokio::{
    sync::{OnceCell, RwLock},
    time::Instant,
};

use crate::{
    classify::kind_of_code,
    code::{self, named},
    error::{Error, Kind, Result},
    fence::{Fence, Window},
    primary::{self, CHECK_INTERVAL, MOVED, Primary, bounded},
    text,
};
use denormd_model::{
    clock::millis, distribution::number, key::whole_number, namespace::Namespace, position::ClusterTime,
};

/// Time limit for one read on the server.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum age of the measured difference to the server's clock.
const CLOCK_AGE: Duration = Duration::from_secs(5);
/// Time limit for the primary's answer to `hello`.
const HELLO: Duration = Duration::from_secs(15);
/// Time limit for counting documents.
const COUNTING: Duration = Duration::from_secs(2);
/// A command document may be slightly larger than 16 MiB; statements are split well below that.
const COMMAND_BYTES: usize = 8 << 20;
/// Room for the fields that the driver adds to a command.
const SLACK: usize = 1 << 10;
/// The largest command that the server takes: 16 KiB more than a document. If a command exceeds 48 MB, the server closes the
/// connection, which would look like an outage.
const LARGEST: usize = (16 << 20) + (16 << 10) - SLACK;

/// A connection to the cluster, with the primary's clock.
#[derive(Debug)]
pub struct Server {
    client: Client,
    clock: RwLock<Option<Clock>>,
    fence: Option<Arc<Fence>>,
    /// Place of the deadline check; none until the server was probed.
    checked: RwLock<Option<Checked>>,
    /// The operation time of the newest write that a majority has acknowledged to us.
    acknowledged: Mutex<ClusterTime>,
    /// True behind a router of a sharded cluster; unset until it was asked for.
    router: Arc<OnceCell<bool>>,
}

/// The place where the server checks the deadline of a bulk write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Checked {
    /// In an extra first statement, whose failure ends an ordered command. No cost for the other statements.
    First,
    /// In the command's `let`, which is computed for each statement (16 µs on MongoDB 6.0.5).
    Each,
}

#[derive(Debug, Clone, Copy)]
struct Clock {
    /// The server's clock, in milliseconds since 1970, at `at`; not ahead of the true value.
    server_millis: i64,
    at: Instant,
}

/// The batches of a cursor on the primary. Ends with an error if that server is no longer the primary.
pub struct Batches {
    cursor: mongodb::raw_batch_cursor::RawBatchCursor,
    primary: Primary,
    /// Time of the last check whether the primary has changed.
    checked: Instant,
    /// Time limit for each answer; none for a stream, whose reader has its own.
    limit: Option<Duration>,
}

impl Batches {
    fn new(cursor: mongodb::raw_batch_cursor::RawBatchCursor, primary: Primary, limit: Option<Duration>) -> Self {
        Self { cursor, primary, checked: Instant::now(), limit }
    }

    /// The next batch; None after the last one.
    pub async fn next(&mut self) -> Result<Option<RawBatch>> {
        // A cursor survives a step-down, and a member that no longer reaches the others still answers, without their changes.
        if self.checked.elapsed() >= CHECK_INTERVAL {
            if self.primary.has_moved().await {
                return Err(Error::new(Kind::Connection, MOVED));
            }
            self.checked = Instant::now();
        }
        Ok(answered(self.limit, self.primary.attend(self.cursor.next())).await?.transpose()?)
    }
}

/// The documents of a cursor, a batch at a time.
pub struct Pages(Batches);

impl Pages {
    /// The next batch as it was received; None after the last one.
    pub async fn batch(&mut self) -> Result<Option<RawBatch>> {
        self.0.next().await.map_err(read_too_long)
    }

    /// Reads until the documents reach `bytes`. Returns them, and true if there are no more.
    pub async fn up_to(&mut self, bytes: usize) -> Result<(Vec<RawDocumentBuf>, bool)> {
        let (mut out, mut read) = (Vec::new(), 0);
        while let Some(batch) = self.batch().await? {
            for row in rows_of(&batch)? {
                let row = row?;
                read += row.as_bytes().len();
                out.push(row.into_owned());
            }
            if read > bytes {
                return Ok((out, false));
            }
        }
        Ok((out, true))
    }

    /// The documents of the next batch, possibly none; None after the last batch.
    pub async fn next(&mut self) -> Result<Option<Vec<RawDocumentBuf>>> {
        let Some(batch) = self.batch().await? else { return Ok(None) };
        let rows: Result<Vec<RawDocumentBuf>> = rows_of(&batch)?.map(|row| Ok(row?.into_owned())).collect();
        rows.map(Some)
    }
}

/// The read concern of a majority read whose snapshot is at least as new as `after`.
fn concern(after: ClusterTime) -> Document {
    if after == ClusterTime::default() {
        doc! {"level": "majority"}
    } else {
        doc! {"level": "majority", "afterClusterTime": Timestamp::from(after)}
    }
}

/// Waits for an answer, within the limit. A connection may be dead although the server is well and still the primary: a gateway
/// that has forgotten the connection drops what is sent on it.
async fn answered<T>(limit: Option<Duration>, answer: impl Future<Output = Result<T>>) -> Result<T> {
    let Some(limit) = limit else { return answer.await };
    let answer = tokio::time::timeout(limit, answer).await;
    answer.unwrap_or_else(|_| Err(Error::new(Kind::Connection, "no answer in time")))
}

fn read_too_long(error: Error) -> Error {
    if error.kind == Kind::TimedOut { Error { kind: Kind::ReadTimedOut, ..error } } else { error }
}

/// The same command with a time limit, unless it has one.
#[must_use]
pub fn limited(mut command: Document, limit: Duration) -> Document {
    command.entry("maxTimeMS".to_owned()).or_insert_with(|| millis(limit).into());
    command
}

/// The rows of a read as documents.
pub fn decoded(rows: &[RawDocumentBuf]) -> Result<Vec<Document>> {
    rows.iter().map(|row| Document::try_from(row.as_ref()).map_err(Error::from)).collect()
}

/// Documents as the rows of a read.
pub fn encoded(documents: &[Document]) -> Result<Vec<RawDocumentBuf>> {
    documents.iter().map(|document| RawDocumentBuf::try_from(document).map_err(Error::from)).collect()
}

/// The documents of one batch, borrowed where possible.
pub fn rows_of(batch: &RawBatch) -> Result<impl Iterator<Item = Result<Cow<'_, RawDocument>>>> {
    Ok(batch.doc_slices()?.into_iter().map(|row| {
        let row = row?.as_document();
        row.map(text::escaped).ok_or_else(|| Error::internal("a batch holds something other than documents"))
    }))
}

/// Result of one bulk command.
#[derive(Debug, Default)]
pub struct Written {
    /// Documents that a statement matched.
    pub matched: u64,
    /// Documents that a statement changed.
    pub modified: u64,
    /// Statements that the server refused: index into the command's statements, and the error.
    pub refused: Vec<(usize, Error)>,
    /// True if statements may have taken effect that are not counted.
    pub is_uncertain: bool,
}

impl Written {
    fn add(&mut self, Self { matched, modified, refused, is_uncertain }: Self) {
        self.matched += matched;
        self.modified += modified;
        self.refused.extend(refused);
        self.is_uncertain |= is_uncertain;
    }
}

impl Server {
    /// Wraps a connected client.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self {
            client,
            clock: RwLock::new(None),
            fence: None,
            checked: RwLock::new(None),
            acknowledged: Mutex::default(),
            router: Arc::default(),
        }
    }

    /// The same cluster for a leader, whose writes end with its lease.
    #[must_use]
    pub fn under(&self, fence: Arc<Fence>) -> Self {
        Self { fence: Some(fence), ..self.unfenced() }
    }

    /// The same cluster without a lease.
    #[must_use]
    pub fn unfenced(&self) -> Self {
        Self { router: self.router.clone(), ..Self::new(self.client.clone()) }
    }

    /// The term of the lease that writes are bound to; 0 without one.
    #[must_use]
    pub fn term(&self) -> i64 {
        self.fence.as_ref().map_or(0, |fence| fence.term())
    }

    /// Ends the leadership, if there is one: the state has the mark of a later leader.
    pub fn supersede(&self) {
        if let Some(fence) = &self.fence {
            fence.supersede();
        }
    }

    /// Time since the lease was granted or renewed; None without a lease.
    #[must_use]
    pub fn since_renewal(&self) -> Option<Duration> {
        self.fence.as_ref().map(|fence| fence.since_renewal())
    }

    /// The driver's client.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The names of the databases that the user may see; empty if the server refuses the list.
    pub async fn databases(&self) -> Vec<String> {
        let command = doc! {"listDatabases": 1, "nameOnly": true, "authorizedDatabases": true};
        let reply = self.database("admin").run_command(command).await.unwrap_or_default();
        let databases = reply.get_array("databases").map(Vec::as_slice).unwrap_or_default();
        let name = |database: &Bson| database.as_document()?.get_str("name").ok().map(ToOwned::to_owned);
        databases.iter().filter_map(name).collect()
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

    /// The collections of a database as `listCollections` reports them, with these options.
    pub async fn listed(&self, database: &str, options: Document) -> Result<Vec<Document>> {
        let mut command = doc! {"listCollections": 1};
        command.extend(options);
        let (primary, database) = (Primary::of(&self.client), self.database(database));
        let listed = async {
            let found = database.run_cursor_command(command).selection_criteria(primary.criteria()).await?;
            found.try_collect::<Vec<Document>>().await
        };
        // A list of many collections may take long.
        Ok(answered(Some(READ_TIMEOUT + HELLO), primary.attend(listed)).await??)
    }

    /// The names of a database's collections.
    pub async fn collections(&self, database: &str) -> Result<Vec<String>> {
        let listed = self.listed(database, doc! {"nameOnly": true}).await?;
        Ok(listed.iter().filter_map(|found| found.get_str("name").ok().map(ToOwned::to_owned)).collect())
    }

    /// The UUIDs of those of these collections that exist.
    pub async fn collection_uuids(
        &self,
        database: &str,
        names: &[&str],
    ) -> Result<std::collections::HashMap<String, Bson>> {
        let filter = doc! {"name": {"$in": names.to_vec()}, "type": "collection"};
        // All in one batch: each entry is a few hundred bytes.
        let command = doc! {"listCollections": 1, "filter": filter, "cursor": {"batchSize": i32::MAX}};
        // A list that never came would hide that a source is gone.
        let reply = bounded(self.database(database).run_command(command)).await?;
        let unreadable = || Error::internal(format!("the list of collections of `{database}` cannot be read"));
        let batch = reply.get_document("cursor").and_then(|cursor| cursor.get_array("firstBatch"));
        let uuid = |found: &Bson| {
            let found = found.as_document()?;
            Some((found.get_str("name").ok()?.to_owned(), found.get_document("info").ok()?.get("uuid")?.clone()))
        };
        // A collection that is left out would count as dropped.
        batch.map_err(|_| unreadable())?.iter().map(|found| uuid(found).ok_or_else(unreadable)).collect()
    }

    /// True if the collection has a collation of its own: its `_id`s are in that order.
    pub async fn has_own_collation(&self, database: &str, collection: &str) -> Result<bool> {
        let filter = doc! {"name": collection, "options.collation": {"$exists": true}};
        Ok(!self.listed(database, doc! {"filter": filter}).await?.is_empty())
    }

    /// True if the collection exists.
    pub async fn has_collection(&self, database: &str, collection: &str) -> Result<bool> {
        Ok(!self.listed(database, doc! {"filter": {"name": collection}, "nameOnly": true}).await?.is_empty())
    }

    /// The number of documents that match a filter by the simple collation. A count that takes two seconds fails.
    pub async fn count(&self, namespace: &Namespace, filter: Document) -> Result<u64> {
        let command = doc! {"count": &namespace.collection, "query": filter, "collation": {"locale": "simple"}};
        let (primary, database) = (Primary::of(&self.client), self.database(&namespace.database));
        let counted = database.run_command(limited(command, COUNTING)).selection_criteria(primary.criteria());
        Ok(answered(Some(COUNTING + HELLO), primary.attend(counted)).await??.get("n").map_or(0, number))
    }

    /// Waits until writes under its fence whose wait was cancelled can no longer run.
    pub async fn abandoned_writes_are_over(&self) {
        if let Some(fence) = &self.fence {
            fence.abandoned_writes_are_over().await;
        }
    }

    /// The primary's reply to `hello`.
    pub async fn hello(&self) -> Result<Document> {
        Primary::of(&self.client).hello(HELLO).await
    }

    /// True if a router of a sharded cluster answers, and not the primary of a replica set.
    pub async fn is_router(&self) -> Result<bool> {
        let ask = || async { Ok::<_, Error>(primary::is_router(&self.hello().await?)) };
        self.router.get_or_try_init(ask).await.copied()
    }

    /// The cluster's present operation time.
    pub async fn operation_time(&self) -> Result<ClusterTime> {
        let reply = Primary::of(&self.client).hello(HELLO).await?;
        reply
            .get_timestamp("operationTime")
            .map(ClusterTime::from)
            // Shortly after its start, a server with authentication lacks the keys to sign cluster times, and reports none.
            .map_err(|_| Error::new(Kind::Unavailable, "the server reports no operation time yet"))
    }

    /// Runs a majority read on the primary to its end: an `aggregate` or `find` command without read concern and
    /// limits. Its snapshot is at least as new as `after`.
    pub async fn read(&self, database: &str, command: Document, after: ClusterTime) -> Result<Vec<RawDocumentBuf>> {
        Ok(self.pages(database, command, after).await?.up_to(usize::MAX).await?.0)
    }

    /// Like [`Server::read`], of documents of the state, whose strings are not converted (see [`crate::text`]).
    pub async fn read_state(&self, database: &str, command: Document, after: ClusterTime) -> Result<Vec<Document>> {
        let command = Document::try_from(text::escaped(&RawDocumentBuf::try_from(&command)?).as_ref())?;
        let rows = match self.read(database, command.clone(), after).await {
            // Once more, as the driver does for a `find`.
            Err(error) if matches!(error.kind, Kind::Connection | Kind::Unavailable) => {
                self.read(database, command, after).await?
            }
            rows => rows?,
        };
        rows.into_iter().map(|row| Ok(Document::try_from(text::unescaped(row).as_ref())?)).collect()
    }

    /// Like [`Server::read`], one batch of the cursor at a time. A time limit in the command takes precedence.
    ///
    /// The read is at least as new as any write acknowledged to this process. Shortly after a failover, a majority read
    /// of the new primary may be older, and miss a write of our own.
    pub async fn pages(&self, database: &str, command: Document, after: ClusterTime) -> Result<Pages> {
        let after = after.max(*self.acknowledged.lock());
        let mut command = limited(command, READ_TIMEOUT);
        command.insert("readConcern", concern(after));
        // The server ends the read at its own limit; 0 is none.
        let limit = command.get("maxTimeMS").and_then(whole_number).and_then(|millis| u64::try_from(millis).ok());
        let limit = limit.filter(|millis| *millis > 0).map(|millis| Duration::from_millis(millis) + HELLO);
        let primary = Primary::of(&self.client);
        let database = self.database(database);
        let command = text::unescaped(RawDocumentBuf::try_from(&command)?);
        if command.as_bytes().len() > LARGEST {
            return Err(Error::new(Kind::TooLarge, "the read does not fit into one command"));
        }
        let opened = database.run_raw_cursor_command(command).selection_criteria(primary.criteria()).batch();
        let cursor = answered(limit, primary.attend(opened)).await?.map_err(|error| read_too_long(error.into()))?;
        Ok(Pages(Batches::new(cursor, primary, limit)))
    }

    /// Follows a cursor that never ends. A batch arrives as soon as there are events, and an empty one after `wait`; much later if the
    /// server has many other events to pass over.
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
        Ok(Batches::new(cursor, primary, None))
    }

    /// Runs independent update statements, acknowledged by a majority.
    ///
    /// The server checks the deadline by its own clock when it starts the command, and `maxTimeMS` bounds a command
    /// that started in time. A command that is delayed past its deadline writes nothing and fails. If an answer is
    /// lost, this waits until the command can no longer run.
    pub async fn update(
        &self,
        database: &str,
        collection: &str,
        statements: &[RawDocumentBuf],
        timeout: Duration,
    ) -> Result<Written> {
        self.bulk(database, &Verb::update(), collection, statements, timeout).await
    }

    /// Runs delete statements, like [`Server::update`].
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
        let known = self.checked(database, verb, collection, timeout).await?;
        let (mut checked, mut start) = (known, 0);
        // The end of the statements that are sent one by one.
        let mut singly = 0;
        while start < statements.len() {
            let mut bytes = 0;
            let fits = |statement: &&RawDocumentBuf| {
                bytes += statement.as_bytes().len() + 16;
                bytes <= COMMAND_BYTES
            };
            let most = if start < singly { 1 } else { usize::MAX };
            let count = statements[start..].iter().take(most).take_while(fits).count().max(1);
            let chunk = &statements[start..start + count];
            let window = self.window(timeout).await?;
            let command = verb.command(collection, chunk, window, checked)?;
            let Some(reply) = self.fenced(database, command, window).await? else {
                // A statement was refused. Sent one by one, they show which.
                if count == 1 {
                    written.refused.push((start, unreadable_reply()));
                    start += 1;
                } else {
                    written.is_uncertain = true;
                    singly = start + count;
                }
                continue;
            };
            let refused = written.refused.len();
            let time = reply.get_timestamp("operationTime").ok();
            let mut taken = Written::default();
            match take_reply(reply, start, usize::from(checked == Checked::First), &mut taken) {
                // An expression in `target.where` may fail with the same code. Sending the chunk again with the check in its
                // first statement tells them apart.
                Err(error) if error.code == Some(code::TOO_LATE) && checked != known => {
                    checked = known;
                    continue;
                }
                result => result?,
            }
            // An error that the reply contains may be that a majority has not acknowledged it: reads would wait for that.
            if let Some(time) = time {
                let mut acknowledged = self.acknowledged.lock();
                *acknowledged = (*acknowledged).max(time.into());
            }
            written.add(taken);
            // A router that has lost a shard's answer says so of each statement that it sent there: that shard may
            // still run them.
            if written.refused[refused..].iter().any(|(_, error)| error.kind == Kind::Connection) {
                tokio::time::sleep_until(window.over).await;
            }
            start = match written.refused.get(refused) {
                // The command ended at this statement. After one refusal more are likely: the rest is sent unordered.
                Some((index, _)) if checked == Checked::First => {
                    checked = Checked::Each;
                    index + 1
                }
                _ => start + count,
            };
        }
        Ok(written)
    }

    /// Finds out where the server checks a deadline, by a command that is too late: only a check that refuses it can be
    /// relied on. A router sends a command's statements to different shards, and only some of them get the first one.
    ///
    /// Behind a router, the deadline is checked by the router alone, when it takes the command: it computes `let` and
    /// `$$NOW` once, and sends the shards the results. A shard that runs its part late does not notice
    /// (docs/compatibility.md, "Sharded clusters").
    async fn checked(&self, database: &str, verb: &Verb, collection: &str, timeout: Duration) -> Result<Checked> {
        if let Some(known) = *self.checked.read().await {
            return Ok(known);
        }
        let mut checked = Checked::Each;
        if !self.is_router().await? {
            let window = Window { deadline: 0, ..self.window(timeout).await? };
            let late = self.fenced(database, verb.command(collection, &[], window, Checked::First)?, window).await?;
            let late = late.ok_or_else(unreadable_reply)?;
            match take_reply(late, 0, 1, &mut Written::default()) {
                Err(error) if error.kind == Kind::Unavailable => checked = Checked::First,
                Err(error) => return Err(error),
                Ok(()) => {}
            }
        }
        *self.checked.write().await = Some(checked);
        Ok(checked)
    }

    /// The window in which a command that is sent now may run.
    async fn window(&self, timeout: Duration) -> Result<Window> {
        let now = self.server_now().await?;
        Window::new(self.fence.as_deref(), now, timeout, Instant::now())
    }

    /// Sends a write with its deadline, and does not return while it can still run. None if the driver cannot decode the reply: the
    /// server's text about a refused statement may quote a document, and end within a character.
    async fn fenced(&self, database: &str, command: RawDocumentBuf, window: Window) -> Result<Option<Document>> {
        let primary = Primary::of(&self.client);
        let database = self.database(database);
        let command = text::unescaped(command);
        let sent = window.sent(self.fence.as_deref());
        let answer = primary.attend(database.run_raw_command(command).selection_criteria(primary.criteria()));
        let result = match tokio::time::timeout_at(window.over, answer).await {
            Ok(Ok(Err(error))) if matches!(*error.kind, ErrorKind::Bson(_)) => Ok(None),
            Ok(Ok(answer)) => answer.map(Some).map_err(Error::from),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(Error::new(Kind::Connection, "no answer in time")),
        };
        if let Err(error) = &result {
            // Another server, with another clock or another version, may have become the primary.
            *self.clock.write().await = None;
            *self.checked.write().await = None;
            if error.kind == Kind::Connection && primary.address().is_some() {
                primary.wait_out(window.over).await;
            }
        }
        sent.ended();
        result.map_err(|error| if error.code == Some(code::TOO_LATE) { too_late() } else { error })
    }

    /// The primary's clock, in milliseconds since 1970, never ahead of its true value.
    async fn server_now(&self) -> Result<i64> {
        let known = *self.clock.read().await;
        if let Some(clock) = known.filter(|clock| clock.at.elapsed() < CLOCK_AGE) {
            return Ok(clock.server_millis.saturating_add(millis(clock.at.elapsed())));
        }
        let reply = Primary::of(&self.client).hello(HELLO).await?;
        let at = Instant::now();
        // The server may have stepped down since it was selected.
        if !reply.get_bool("isWritablePrimary").unwrap_or_default() {
            return Err(Error::new(Kind::Unavailable, "the server is no longer the primary"));
        }
        let server_millis = reply
            .get_datetime("localTime")
            .map_err(|_| Error::internal("the server reports no local time"))?
            .timestamp_millis();
        *self.clock.write().await = Some(Clock { server_millis, at });
        Ok(server_millis)
    }
}

/// The error of a refused statement that the reply cannot name.
fn unreadable_reply() -> Error {
    Error::new(Kind::Refused, "the server's reply cannot be read")
}

/// Kind of bulk write command.
struct Verb {
    name: &'static CStr,
    list: &'static CStr,
    /// The field after `q` in a statement that changes nothing.
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
    ) -> Result<RawDocumentBuf> {
        let mut first = None;
        if checked == Checked::First {
            // A comparison in `$expr` that is never true: `$range` returns at most one element.
            let never = rawdoc! {"$gt": [in_time(window), [0, 0]]};
            let (name, nothing) = &self.nothing;
            let first = first.insert(rawdoc! {"q": {"_id": null, "$expr": never}});
            first.append(*name, nothing.clone());
        }
        let mut command = RawDocumentBuf::new();
        command.append(self.name, collection);
        if checked == Checked::Each {
            command.append(cstr!("let"), rawdoc! {"ok": in_time(window)});
        }
        command.append(cstr!("ordered"), checked == Checked::First);
        command.append(cstr!("writeConcern"), rawdoc! {"w": "majority"});
        command.append(cstr!("maxTimeMS"), millis(window.run));
        with_list(command, self.list, || first.iter().chain(statements))
    }
}

/// Appends an array of documents. Each is copied only once, into its final place: they may be as large as a whole
/// command.
fn with_list<'a, I: Iterator<Item = &'a RawDocumentBuf>>(
    command: RawDocumentBuf,
    name: &CStr,
    list: impl Fn() -> I,
) -> Result<RawDocumentBuf> {
    let element = |nth: usize| nth.to_string();
    let body: usize = list().enumerate().map(|(nth, doc)| element(nth).len() + 2 + doc.as_bytes().len()).sum();
    let array = 4 + body + 1;
    let mut bytes = command.into_bytes();
    bytes.pop();
    bytes.reserve_exact(1 + name.as_str().len() + 1 + array + 1 + SLACK);
    bytes.push(ElementType::Array as u8);
    bytes.extend(name.as_str().as_bytes());
    bytes.push(0);
    bytes.extend(length(array)?);
    for (nth, doc) in list().enumerate() {
        bytes.push(ElementType::EmbeddedDocument as u8);
        bytes.extend(element(nth).as_bytes());
        bytes.push(0);
        bytes.extend(doc.as_bytes());
    }
    bytes.extend([0, 0]);
    let whole = length(bytes.len())?;
    bytes[..4].copy_from_slice(&whole);
    Ok(RawDocumentBuf::from_bytes(bytes)?)
}

fn length(bytes: usize) -> Result<[u8; 4]> {
    let bytes = i32::try_from(bytes).map_err(|_| Error::internal("a command of 2 GB"))?;
    Ok(bytes.to_le_bytes())
}

/// `[0]`, or a distinct error when it is too late: a filter that matches nothing would look like success.
fn in_time(window: Window) -> RawDocumentBuf {
    let by_clock = rawdoc! {"$lt": ["$$NOW", DateTime::from_millis(window.deadline)]};
    let end = Timestamp { time: window.cluster_end, increment: 0 };
    let in_time = rawdoc! {"$and": [by_clock, {"$lt": ["$$CLUSTER_TIME", end]}]};
    rawdoc! {"$range": [0, 1, {"$cond": [in_time, 1, 0]}]}
}

fn too_late() -> Error {
    let error = Error::new(Kind::Unavailable, "the command reached the server after its deadline");
    Error { code: Some(code::TOO_LATE), ..error }
}

/// The server's reply to a bulk write.
#[derive(Debug, Deserialize)]
struct Reply {
    n: u64,
    /// Not in the reply to deletions.
    #[serde(rename = "nModified", default)]
    modified: u64,
    #[serde(default)]
    upserted: Vec<IgnoredAny>,
    #[serde(rename = "writeErrors", default)]
    errors: Vec<WriteError>,
    #[serde(rename = "writeConcernError", default)]
    concern: Option<ConcernError>,
}

#[derive(Debug, Deserialize)]
struct WriteError {
    index: usize,
    code: i32,
    #[serde(rename = "codeName", default)]
    name: String,
    #[serde(rename = "keyPattern", default)]
    keys: Document,
}

#[derive(Debug, Deserialize)]
struct ConcernError {
    code: i32,
}

/// Adds the results in a reply for the statements from `offset` on; the first `before` statements of the command are
/// not counted. A reply of another form is an error: a refusal that is not understood would count as a write.
fn take_reply(reply: Document, offset: usize, before: usize, written: &mut Written) -> Result<()> {
    let reply: Reply = bson::deserialize_from_document(reply)
        .map_err(|error| Error::from(error).context("the server's reply to a write cannot be read"))?;
    written.matched += reply.n;
    written.modified += reply.modified + reply.upserted.len() as u64;
    for WriteError { index, code, name, keys } in reply.errors {
        // A later statement has passed the check in the first one: an expression of the rule has failed.
        if code == code::TOO_LATE && (before == 0 || index < before) {
            return Err(too_late());
        }
        // Two insertions of one document met: the next attempt finds it.
        let met = code == code::DUPLICATE_KEY && keys.contains_key("_id");
        let kind = if met { Kind::Unavailable } else { kind_of_code(code) };
        let error = Error { code: Some(code), ..Error::new(kind, named(code, &name)) };
        // An error of the first statement, which changes nothing, applies to the whole command.
        let Some(index) = index.checked_sub(before) else { return Err(error) };
        written.refused.push((offset + index, error));
    }
    if let Some(ConcernError { code }) = reply.concern {
        return Err(Error {
            code: Some(code),
            ..Error::new(Kind::NotReplicated, format!("the write has not reached a majority (code {code})"))
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One document on which `target.where` failed made its batch be retried forever.
    #[test]
    fn an_expression_that_fails_like_the_check_of_the_deadline_is_no_deadline() {
        let take = |index: i32, before: usize| {
            let mut written = Written::default();
            let refused = doc! {"index": index, "code": code::TOO_LATE};
            take_reply(doc! {"n": 0, "writeErrors": [refused], "ok": 1.0}, 10, before, &mut written).map(|()| written)
        };
        let refused = take(2, 1).unwrap().refused;
        assert_eq!((refused[0].0, refused[0].1.kind), (11, Kind::Refused));
        assert_eq!(take(0, 1).unwrap_err().kind, Kind::Unavailable);
        assert_eq!(take(0, 0).unwrap_err().kind, Kind::Unavailable);
    }

    /// A refusal without its index was taken for one of the first statement, and a count of another form for 0.
    #[test]
    fn a_reply_that_cannot_be_read_is_an_error() {
        let take = |reply: Document| {
            let mut written = Written::default();
            take_reply(reply, 10, 1, &mut written).map(|()| written)
        };
        let refused = doc! {"index": 3, "code": 121, "codeName": "X"};
        let written = take(doc! {"n": 2, "nModified": 1, "writeErrors": [refused], "ok": 1.0}).unwrap();
        assert_eq!((written.matched, written.modified, written.refused[0].0), (2, 1, 12));
        assert_eq!(take(doc! {"n": 7_i64}).unwrap().matched, 7);
        let unread = [
            doc! {"nModified": 1},
            doc! {"n": 1, "writeErrors": [{"index": 3}]},
            doc! {"n": 1, "writeErrors": [{"code": 121}]},
            doc! {"n": 1, "writeConcernError": {"errmsg": "secret"}},
        ];
        for reply in unread {
            let error = take(reply).unwrap_err();
            assert!(error.message.starts_with("the server's reply to a write cannot be read"), "{error}");
        }
    }
}
