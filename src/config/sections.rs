//! The sections of a config, one struct each. Structs that hold secrets are not `Serialize` on purpose.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use bson::{Bson, Document};
use secrecy::SecretString;

use super::certificate::Certificate;

/// A whole config, layered and checked for its form, not yet for its meaning.
#[derive(Debug, Clone)]
pub struct Config {
    /// The deployment's name. It keys all state, so that two teams share a cluster without sharing a leader.
    pub name: String,
    /// How to reach the cluster.
    pub mongodb: Mongodb,
    /// The rules, in the order of the files and of their lists.
    pub rules: Vec<Rule>,
    /// The daemon's HTTP server.
    pub http: Http,
    /// Where denormd keeps its own state.
    pub state: State,
    /// The daemon's log.
    pub log: Log,
    /// Bounds on what the daemon does at once.
    pub limits: Limits,
    /// How instances of one deployment agree on their leader.
    pub lease: Lease,
    /// The thresholds and bounds of `denormd advise`.
    pub advise: Advise,
}

/// `mongodb`: how to reach the cluster.
#[derive(Debug, Clone)]
pub struct Mongodb {
    /// The connection string (`uri`, or the trimmed content of the file named by `uri_file`).
    pub uri: SecretString,
    /// The file that it was read from, if it was.
    pub uri_file: Option<PathBuf>,
    /// The database of collections named without one. Falls back to the connection string's default database.
    pub database: Option<String>,
}

/// `http`: the daemon's HTTP server.
#[derive(Debug, Clone)]
pub struct Http {
    /// Where it listens. Loopback unless told otherwise.
    pub listen: SocketAddr,
    /// What a request that changes something has to bring (`token`, or the trimmed content of `token_file`). Without one
    /// nothing can be changed over HTTP.
    pub token: Option<SecretString>,
    /// The file that it was read from, if it was.
    pub token_file: Option<PathBuf>,
    /// Whether requests that only read need the token as well (`require_token: everything`).
    pub token_for_reads: bool,
    /// Names by which the server may be asked, beside `localhost` and addresses (`allowed_hosts`).
    pub allowed_hosts: Vec<String>,
    /// The certificate for HTTPS (`tls_cert_file`, `tls_key_file`). Without one the server speaks plain HTTP.
    pub certificate: Option<Certificate>,
    /// The files that it was read from.
    pub certificate_files: Vec<PathBuf>,
}

impl Http {
    /// The default of `listen`.
    pub const DEFAULT_LISTEN: &str = "127.0.0.1:9464";
    /// A shorter token could be guessed.
    pub const SHORTEST_TOKEN: usize = 16;
}

/// `state`: where denormd keeps its own state.
#[derive(Debug, Clone)]
pub struct State {
    /// The database for positions, fingerprints, backfill progress and dead letters.
    pub database: String,
}

impl State {
    /// The default of `database`.
    pub const DEFAULT_DATABASE: &str = "denormd";
}

/// `log`: the daemon's log.
#[derive(Debug, Clone)]
pub struct Log {
    /// A `tracing` filter: `info`, `denormd=debug`.
    pub filter: String,
    /// How lines look.
    pub format: LogFormat,
    /// The OpenTelemetry collector that gets a span for each batch, by OTLP over HTTP: `http://127.0.0.1:4318`.
    pub otlp: Option<String>,
}

/// `log.format`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// Text on a terminal, JSON otherwise.
    #[default]
    Auto,
    /// Always text.
    Text,
    /// Always one JSON object a line.
    Json,
}

/// `limits`: bounds on what the daemon does at once.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Keys in one read and one write command (`batch_keys`).
    pub batch_keys: usize,
    /// Bytes that one batch reads before it writes (`batch_bytes`). A key that needs more is done alone.
    pub batch_bytes: usize,
    /// Batches with disjoint keys in flight at once (`batches`).
    pub batches: usize,
    /// Reconcile requests held in memory before the stream is left waiting (`pending`).
    pub pending: usize,
    /// How long one read of a batch may run on the server (`read_timeout_seconds`).
    pub read_timeout: Duration,
    /// How long one write command may run on the server (`write_timeout_seconds`).
    pub write_timeout: Duration,
    /// How long `remove` and `delete` wait before they read again and destroy (`destroy_grace_seconds`).
    pub destroy_grace: Duration,
    /// Targets of one rule that may lose a value in an hour, because no source answers their reference any more, before the rule
    /// is blocked (`destroy_per_hour`). None: the larger of 1,000 and a tenth of the rule's targets.
    pub destroy_per_hour: Option<usize>,
    /// Targets that the continuous audit of `guard: audit` compares a second (`audit_per_second`).
    pub audit_per_second: usize,
    /// Targets that all backfills together go through a second, at most (`backfill_per_second`). None without a bound.
    pub backfill_per_second: Option<usize>,
}

impl Limits {
    /// Default of `batch_keys`.
    pub const DEFAULT_BATCH_KEYS: usize = 1000;
    /// Default of `batch_bytes`.
    pub const DEFAULT_BATCH_BYTES: usize = 4 << 20;
    /// Default of `batches`.
    pub const DEFAULT_BATCHES: usize = 3;
    /// Default of `pending`.
    pub const DEFAULT_PENDING: usize = 100_000;
    /// Default of `read_timeout_seconds`.
    pub const DEFAULT_READ_TIMEOUT: Duration = Duration::from_secs(60);
    /// Default of `write_timeout_seconds`.
    pub const DEFAULT_WRITE_TIMEOUT: Duration = Duration::from_secs(5);
    /// Default of `audit_per_second`.
    pub const DEFAULT_AUDIT_PER_SECOND: usize = 200;
    /// Default of `destroy_grace_seconds`.
    pub const DEFAULT_DESTROY_GRACE: Duration = Duration::from_secs(10);
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            batch_keys: Self::DEFAULT_BATCH_KEYS,
            batch_bytes: Self::DEFAULT_BATCH_BYTES,
            batches: Self::DEFAULT_BATCHES,
            pending: Self::DEFAULT_PENDING,
            read_timeout: Self::DEFAULT_READ_TIMEOUT,
            write_timeout: Self::DEFAULT_WRITE_TIMEOUT,
            destroy_grace: Self::DEFAULT_DESTROY_GRACE,
            destroy_per_hour: None,
            audit_per_second: Self::DEFAULT_AUDIT_PER_SECOND,
            backfill_per_second: None,
        }
    }
}

/// `lease`: how instances of one deployment agree on their leader.
#[derive(Debug, Clone)]
pub struct Lease {
    /// How long a leader that says nothing stays the leader (`ttl_seconds`). It renews three times as often. A write
    /// command may run for half of it at most.
    pub ttl: Duration,
    /// How many shares of the keys there are, each with a leader of its own (`partitions`).
    pub partitions: u32,
}

impl Lease {
    /// Default of `ttl_seconds`.
    pub const DEFAULT_TTL: Duration = Duration::from_secs(10);
}

impl Default for Lease {
    fn default() -> Self {
        Self { ttl: Self::DEFAULT_TTL, partitions: 1 }
    }
}

/// `advise`: the thresholds of its advice, and the bounds of what it reads. "Rules of thumb" are those of MongoDB's blog
/// series "6 Rules of Thumb for MongoDB Schema Design"; what names no source is denormd's own.
#[derive(Debug, Clone, PartialEq)]
pub struct Advise {
    /// Documents that are sampled from each collection (`sample`).
    pub sample: u64,
    /// Without an index a collection is read whole only up to this many documents, beyond it is sampled
    /// (`scan_documents`).
    pub scan_documents: u64,
    /// Events that are read from the oplog, at most (`history_events`).
    pub history_events: u64,
    /// How long events are read from the oplog, at most (`history_seconds`).
    pub history: Duration,
    /// Embed while the 99th percentile is below this: "a couple of hundred", rule of thumb 3 (`embed_elements`).
    pub embed_elements: u64,
    /// From here an array of references is warned about: "a few thousand", rule of thumb 3 (`references_warn`).
    pub references_warn: u64,
    /// From here an array of references is advised against: "a few thousand", rule of thumb 3 (`references_stop`).
    pub references_stop: u64,
    /// Bytes of a document that are warned about: a sixteenth of the server's limit of 16 MB (`document_warn_bytes`).
    pub document_warn: u64,
    /// Bytes of a document that are bad: what is left up to 16 MB is the time to act (`document_bad_bytes`).
    pub document_bad: u64,
    /// Reads for each copied write from which a field is copied: "mostly read and only seldom updated", rule of thumb 5
    /// (`copy_ratio`).
    pub copy_ratio: u64,
    /// Reads for each copied write up to which a field is not copied (`no_copy_ratio`).
    pub no_copy_ratio: u64,
    /// Children that a parent shows where the application's own limit was not seen: the ten reviews of MongoDB's "Building
    /// with Patterns: The Subset Pattern" (`subset`).
    pub subset: u64,
    /// Indexes on one collection, at most (`indexes`): each is one more write for every write.
    pub indexes: u64,
    /// Share of reads that may be `$lookup`, in percent (`lookup_percent`).
    pub lookup_percent: u64,
    /// Collections, at most: MongoDB's manual, "Reduce the Number of Collections" (`collections`).
    pub collections: u64,
}

impl Default for Advise {
    fn default() -> Self {
        Self {
            sample: 1000,
            scan_documents: 500_000,
            history_events: 1_000_000,
            history: Duration::from_secs(30),
            embed_elements: 250,
            references_warn: 2000,
            references_stop: 5000,
            document_warn: 1 << 20,
            document_bad: 10 << 20,
            copy_ratio: 10,
            no_copy_ratio: 1,
            subset: 10,
            indexes: 10,
            lookup_percent: 10,
            collections: 10_000,
        }
    }
}

/// One entry of `rules`.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    /// Unique over all files: `[A-Za-z0-9][A-Za-z0-9_.-]*`.
    pub name: String,
    /// What is copied.
    pub pattern: Pattern,
    /// Whether a new or changed rule brings existing data up to date by itself.
    pub backfill: BackfillMode,
    /// How somebody else's write to an owned field is noticed.
    pub guard: Guard,
    /// What is done about it.
    pub on_drift: OnDrift,
    /// Whether lookups without an index are accepted.
    pub allow_scan: bool,
    /// The lag that it should not have for long.
    pub max_lag: Duration,
    /// Whether it computes, compares and counts, and writes nothing.
    pub shadow: bool,
    /// Whether it may remove and overwrite values that are already there.
    pub adopt: bool,
}

impl Rule {
    /// Default of `max_lag`.
    pub const DEFAULT_MAX_LAG: Duration = Duration::from_secs(60);
}

/// The three kinds of rule.
#[derive(Debug, Clone, PartialEq)]
pub enum Pattern {
    /// One source document's values into the targets that refer to it, or that it refers to.
    Copy(Copy),
    /// Many source documents into an array of one target.
    Collect(Collect),
    /// Many source documents into accumulated values of one target.
    Aggregate(Aggregate),
}

/// One side of a rule: written as a collection's name, or as `{ collection, where }`.
#[derive(Debug, Clone, PartialEq)]
pub struct Side {
    /// `parts`, or `other.parts` to name another database.
    pub collection: String,
    /// A query document that a document must match to take part (`where`).
    pub filter: Option<Document>,
}

/// `copy`
#[derive(Debug, Clone, PartialEq)]
pub struct Copy {
    /// Where values come from.
    pub source: Side,
    /// Where they go.
    pub target: Side,
    /// `(target path, source path)` pairs, in order (`match`).
    pub on: Vec<(String, String)>,
    /// `(source path, 1 or -1)`: which source wins where several match.
    pub sort: Vec<(String, i32)>,
    /// `(target path, expression)` pairs, in order. Empty when `into` is given.
    pub set: Vec<(String, Bson)>,
    /// The target's array that gets one `element` per reference.
    pub into: Option<String>,
    /// The expression of one element of `into`.
    pub element: Option<Bson>,
    /// What a reference does that no source document answers.
    pub on_missing: OnMissing,
    /// The type that the target's value is converted to before matching.
    pub key_type: Option<KeyType>,
    /// Fill a target that has no value yet, and never change it again.
    pub once: bool,
}

/// `collect`
#[derive(Debug, Clone, PartialEq)]
pub struct Collect {
    /// Where elements come from.
    pub source: Side,
    /// Where they go.
    pub target: Side,
    /// `(target path, source path)` pairs, in order (`match`).
    pub on: Vec<(String, String)>,
    /// The target's array.
    pub into: String,
    /// The expression of one element.
    pub element: Bson,
    /// `(source path, 1 or -1)`, ties by `_id` ascending.
    pub sort: Vec<(String, i32)>,
    /// As in `$push`: the first N, or the last N when negative.
    pub slice: Option<i64>,
    /// What a target without any source gets, or in `collect` one without any element.
    pub on_empty: OnEmpty,
    /// The most elements that a target may be given.
    pub max_elements: Option<u64>,
    /// The most bytes of BSON that the array may be given.
    pub max_bytes: Option<u64>,
    /// The type that the target's value is converted to before matching.
    pub key_type: Option<KeyType>,
}

/// `aggregate`
#[derive(Debug, Clone, PartialEq)]
pub struct Aggregate {
    /// Where input comes from.
    pub source: Side,
    /// Where results go.
    pub target: Side,
    /// `(target path, source path)` pairs, in order (`match`).
    pub on: Vec<(String, String)>,
    /// `(target path, { $accumulator: expression })` pairs, in order.
    pub set: Vec<(String, Bson)>,
    /// The order in which accumulators read their input; `_id` ascending by default.
    pub sort: Vec<(String, i32)>,
    /// What a target without any source gets, or in `collect` one without any element.
    pub on_empty: OnEmpty,
    /// The type that the target's value is converted to before matching.
    pub key_type: Option<KeyType>,
}

/// `on_missing`: what a reference does that no source document answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnMissing {
    /// Owned paths are unset; `into` leaves the element out.
    #[default]
    Unset,
    /// Owned paths become null; `into` puts null.
    Null,
    /// Owned paths keep what they have.
    Keep,
    /// The array element that holds the reference is pulled.
    Remove,
    /// The target document is deleted.
    Delete,
}

impl OnMissing {
    /// Its name in a stored definition, which never changes: with another one, every rule would count as changed.
    #[must_use]
    pub fn stored(self) -> &'static str {
        match self {
            Self::Unset => "Unset",
            Self::Null => "Null",
            Self::Keep => "Keep",
            Self::Remove => "Remove",
            Self::Delete => "Delete",
        }
    }
}

/// `on_empty`: what a target of `collect` or `aggregate` without any source gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnEmpty {
    /// `[]`, 0 or null, by the kind of result.
    #[default]
    Value,
    /// Owned paths are unset.
    Unset,
}

/// `key_type`: the type that the target's value is converted to before matching.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyType {
    /// `objectId`: 24 hexadecimal digits become an ObjectId.
    ObjectId,
    /// `string`: an ObjectId becomes its 24 hexadecimal digits, an integer its decimal digits.
    String,
}

impl KeyType {
    /// Its name in a stored definition, which never changes: with another one, every rule would count as changed.
    #[must_use]
    pub fn stored(self) -> &'static str {
        match self {
            Self::ObjectId => "ObjectId",
            Self::String => "String",
        }
    }
}

/// `backfill`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BackfillMode {
    /// A new or changed rule backfills itself.
    #[default]
    Auto,
    /// Only `denormd backfill` does.
    Manual,
}

/// `guard`: how somebody else's write to an owned field is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Guard {
    /// Through the change stream, at once; costs an event for each write of ours.
    Watch,
    /// By the continuous audit.
    #[default]
    Audit,
    /// Not at all.
    Off,
}

/// `on_drift`: what is done about somebody else's write to an owned field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnDrift {
    /// Write the right value.
    #[default]
    Repair,
    /// Count and log it.
    Report,
}
