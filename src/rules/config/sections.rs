//! The sections of a config, one struct each. Structs with secrets deliberately do not implement `Serialize`.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use bson::{Bson, Document};
use secrecy::SecretString;
use serde::Serialize;

use super::certificate::Certificate;

/// A whole config, layered and checked for its form, but not for its meaning.
#[derive(Debug, Clone)]
pub struct Config {
    /// The deployment's name. All state is keyed by it, so two teams can share a cluster without sharing a leader.
    pub name: String,
    /// The connection to the cluster.
    pub mongodb: Mongodb,
    /// The rules, in the order of the files and of their lists.
    pub rules: Vec<Rule>,
    /// The daemon's HTTP server.
    pub http: Http,
    /// The location of denormd's own state.
    pub state: State,
    /// The daemon's log.
    pub log: Log,
    /// Limits on concurrent work, memory and rates.
    pub limits: Limits,
    /// The election of a leader among the instances of a deployment.
    pub lease: Lease,
    /// The values that first backfills overwrite or remove.
    pub undo: Undo,
    /// The thresholds and limits of `denormd advise`.
    pub advise: Advise,
}

/// `mongodb`: the connection to the cluster.
#[derive(Debug, Clone)]
pub struct Mongodb {
    /// The connection string (`uri`, or the trimmed content of the file named by `uri_file`).
    pub uri: SecretString,
    /// The file that the connection string was read from, if any.
    pub uri_file: Option<PathBuf>,
    /// The database of collections named without one. Falls back to the connection string's default database.
    pub database: Option<String>,
    /// True if the cluster may be a sharded one (`allow_sharded: experimental`).
    pub allow_sharded: bool,
}

/// `http`: the daemon's HTTP server.
#[derive(Debug, Clone)]
pub struct Http {
    /// The address to listen on; by default a loopback address.
    pub listen: SocketAddr,
    /// The token required by requests that change something (`token`, or the trimmed content of `token_file`). Without
    /// one, nothing can be changed over HTTP.
    pub token: Option<SecretString>,
    /// The file that the token was read from, if any.
    pub token_file: Option<PathBuf>,
    /// True if requests that only read also need the token (`require_token: everything`).
    pub token_for_reads: bool,
    /// Host names that requests may use, in addition to `localhost` and addresses (`allowed_hosts`).
    pub allowed_hosts: Vec<String>,
    /// The certificate for HTTPS (`tls_cert_file`, `tls_key_file`). Without one, the server uses plain HTTP.
    pub certificate: Option<Certificate>,
    /// The files that the certificate was read from.
    pub certificate_files: Vec<PathBuf>,
}

impl Http {
    /// The default of `listen`.
    pub const DEFAULT_LISTEN: &str = "127.0.0.1:9464";
    /// Minimum length of a token, in bytes. A shorter one could be guessed.
    pub const SHORTEST_TOKEN: usize = 16;
}

/// `state`: the location of denormd's own state.
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
    /// Format of the log lines.
    pub format: LogFormat,
    /// The OpenTelemetry collector that receives a span for each batch, through OTLP over HTTP:
    /// `http://127.0.0.1:4318`.
    pub otlp: Option<String>,
}

/// `log.format`: the format of the log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// Text on a terminal, otherwise JSON.
    #[default]
    Auto,
    /// Always text.
    Text,
    /// Always one JSON object per line.
    Json,
}

/// `limits`: limits on concurrent work, memory and rates.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Maximum number of keys in one read and one write command (`batch_keys`).
    pub batch_keys: usize,
    /// Maximum number of bytes that one batch reads before it writes (`batch_bytes`). A key that needs more is
    /// processed alone.
    pub batch_bytes: usize,
    /// Maximum number of concurrent batches with disjoint keys (`batches`).
    pub batches: usize,
    /// Maximum number of reconcile requests in memory before reading of the stream pauses (`pending`).
    pub pending: usize,
    /// Server-side time limit of one read of a batch (`read_timeout_seconds`).
    pub read_timeout: Duration,
    /// Server-side time limit of one write command (`write_timeout_seconds`).
    pub write_timeout: Duration,
    /// Delay before `remove` and `delete` read again and then remove (`destroy_grace_seconds`).
    pub destroy_grace: Duration,
    /// The removal limit: number of targets of one rule that may lose a value per hour because their reference has no
    /// source any more, before the rule is blocked (`destroy_per_hour`). None: the larger of 1,000 and a tenth of the
    /// rule's targets.
    pub destroy_per_hour: Option<usize>,
    /// Targets per second that the continuous audit of `guard: audit` compares (`audit_per_second`).
    pub audit_per_second: usize,
    /// Maximum number of targets per second for all backfills together (`backfill_per_second`). None for no limit.
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

/// `lease`: the election of a leader among the instances of a deployment.
#[derive(Debug, Clone)]
pub struct Lease {
    /// Time after which a leader that does not renew its lease loses it (`ttl_seconds`). It renews three times within
    /// this time. A write command may run for at most half of it.
    pub ttl: Duration,
    /// Number of partitions of the keys, each with its own leader (`partitions`).
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

/// `undo`: the values that first backfills overwrite or remove, kept for `denormd undo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Undo {
    /// False if nothing is kept (`mode: off`).
    pub enabled: bool,
    /// Time for which a value is kept.
    pub keep: Duration,
    /// Maximum number of bytes of kept values, all rules together (`max_bytes`).
    pub max_bytes: u64,
}

impl Default for Undo {
    fn default() -> Self {
        Self { enabled: true, keep: Duration::from_secs(7 * 86_400), max_bytes: 256 << 20 }
    }
}

/// `advise`: the thresholds of the advice, and the limits on reading. "Rules of thumb" are those of MongoDB's blog
/// series "6 Rules of Thumb for MongoDB Schema Design". Values without a source are denormd's own.
#[derive(Debug, Clone, PartialEq)]
pub struct Advise {
    /// Number of documents to sample from each collection (`sample`).
    pub sample: u64,
    /// Maximum number of documents in a collection without an index that is read whole; a larger one is sampled
    /// (`scan_documents`).
    pub scan_documents: u64,
    /// Maximum number of events to read from the oplog (`history_events`).
    pub history_events: u64,
    /// Maximum time to read events from the oplog (`history_seconds`).
    pub history: Duration,
    /// The 99th percentile below which to embed: "a couple of hundred", rule of thumb 3 (`embed_elements`).
    pub embed_elements: u64,
    /// Length of an array of references at which to warn: "a few thousand", rule of thumb 3 (`references_warn`).
    pub references_warn: u64,
    /// Length of an array of references at which to advise against it: "a few thousand", rule of thumb 3
    /// (`references_stop`).
    pub references_stop: u64,
    /// Size in bytes of a document at which to warn: a sixteenth of the server's limit of 16 MB
    /// (`document_warn_bytes`).
    pub document_warn: u64,
    /// Size in bytes of a document that counts as bad: the rest up to 16 MB leaves time to act (`document_bad_bytes`).
    pub document_bad: u64,
    /// Minimum ratio of reads to copied writes for copying a field: "mostly read and only seldom updated", rule of
    /// thumb 5 (`copy_ratio`).
    pub copy_ratio: u64,
    /// Maximum ratio of reads to copied writes for advice against copying a field (`no_copy_ratio`).
    pub no_copy_ratio: u64,
    /// Number of children that a parent shows, if no limit of the application was observed: the ten reviews of
    /// MongoDB's "Building with Patterns: The Subset Pattern" (`subset`).
    pub subset: u64,
    /// Maximum number of indexes on one collection (`indexes`): each adds a write to every write.
    pub indexes: u64,
    /// Maximum share of reads that are `$lookup`, in percent (`lookup_percent`).
    pub lookup_percent: u64,
    /// Maximum number of collections: MongoDB's manual, "Reduce the Number of Collections" (`collections`).
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
    /// The name, unique over all files: `[A-Za-z0-9][A-Za-z0-9_.-]*`.
    pub name: String,
    /// The kind of rule, with its definition.
    pub pattern: Pattern,
    /// The trigger of the backfill for a new or changed rule.
    pub backfill: BackfillMode,
    /// The way to detect other writers' changes to owned fields.
    pub guard: Guard,
    /// The reaction to such changes.
    pub on_drift: OnDrift,
    /// True if lookups without an index are accepted.
    pub allow_scan: bool,
    /// The lag that the rule should not exceed for long.
    pub max_lag: Duration,
    /// True if the rule computes, compares and counts without writing anything.
    pub shadow: bool,
    /// True if the rule may remove and overwrite existing values.
    pub adopt: bool,
}

impl Rule {
    /// Default of `max_lag`.
    pub const DEFAULT_MAX_LAG: Duration = Duration::from_secs(60);
    /// Default of `max_depth`.
    pub const DEFAULT_MAX_DEPTH: usize = 64;
    /// Largest `max_depth`.
    pub const DEEPEST: usize = 256;
}

/// The three kinds of rule.
#[derive(Debug, Clone, PartialEq)]
pub enum Pattern {
    /// Copies the values of one source document to the targets that reference it or that it references.
    Copy(Copy),
    /// Collects many source documents into an array of one target.
    Collect(Collect),
    /// Accumulates many source documents into values of one target.
    Aggregate(Aggregate),
}

/// One side of a rule, written as a collection's name or as `{ collection, where }`.
#[derive(Debug, Clone, PartialEq)]
pub struct Side {
    /// `parts`, or `other.parts` to name another database.
    pub collection: String,
    /// A query that selects the documents of this side (`where`).
    pub filter: Option<Document>,
    /// True for a target whose documents the rule inserts and deletes (`create`).
    pub create: bool,
}

/// `copy`: a rule that copies the values of one source document.
#[derive(Debug, Clone, PartialEq)]
pub struct Copy {
    /// The documents to copy from.
    pub source: Side,
    /// The documents to copy to.
    pub target: Side,
    /// `(target path, source path)` pairs, in order (`match`).
    pub on: Vec<(String, String)>,
    /// `(source path, 1 or -1)`: the order that determines the source if several match.
    pub sort: Vec<(String, i32)>,
    /// `(target path, expression)` pairs, in order. Empty if `into` is given.
    pub set: Vec<(String, Bson)>,
    /// The target's array that receives one `element` per reference.
    pub into: Option<String>,
    /// The expression of one element of `into`.
    pub element: Option<Bson>,
    /// The effect of a reference without a matching source document.
    pub on_missing: OnMissing,
    /// `(target path, expression)` pairs: values of paths in `set` for a target, or an element, without a source.
    pub otherwise: Vec<(String, Bson)>,
    /// The type that the target's value is converted to before matching.
    pub key_type: Option<KeyType>,
    /// True to fill only targets without a value, and never change it again.
    pub once: bool,
    /// The greatest number of ancestors in a tree, if the rule reads its own output (`recursive`, `max_depth`).
    pub tree: Option<usize>,
    /// The target's path that gets the server's time with each change of the target (`touch`).
    pub touch: Option<String>,
}

/// `collect`: a rule that collects source documents into an array.
#[derive(Debug, Clone, PartialEq)]
pub struct Collect {
    /// The documents that become elements.
    pub source: Side,
    /// The documents that contain the array.
    pub target: Side,
    /// `(target path, source path)` pairs, in order (`match`).
    pub on: Vec<(String, String)>,
    /// The target's array.
    pub into: String,
    /// The expression of one element.
    pub element: Bson,
    /// `(source path, 1 or -1)`: the order of the elements, with ties broken by ascending `_id`.
    pub sort: Vec<(String, i32)>,
    /// A limit as in `$push`: the first N elements, or the last N if negative.
    pub slice: Option<i64>,
    /// The value of a target without sources, or in `collect` without elements.
    pub on_empty: OnEmpty,
    /// Maximum number of elements in a target.
    pub max_elements: Option<u64>,
    /// Maximum size of the array in bytes of BSON.
    pub max_bytes: Option<u64>,
    /// The type that the target's value is converted to before matching.
    pub key_type: Option<KeyType>,
    /// The target's path that gets the server's time with each change of the target (`touch`).
    pub touch: Option<String>,
}

/// `aggregate`: a rule that accumulates the values of source documents.
#[derive(Debug, Clone, PartialEq)]
pub struct Aggregate {
    /// The documents to accumulate.
    pub source: Side,
    /// The documents that receive the results.
    pub target: Side,
    /// `(target path, source path)` pairs, in order (`match`).
    pub on: Vec<(String, String)>,
    /// `(target path, arguments of $dateTrunc without date)` pairs: entries of `match` by the interval that a date of the
    /// source falls into.
    pub buckets: Vec<(String, Document)>,
    /// `(name, { $accumulator: expression })` pairs, in order: variables for the expressions of `set` (`let`).
    pub variables: Vec<(String, Bson)>,
    /// `(name, expression)` pairs, in order: source documents with equal values form a group of their own (`by`).
    pub by: Vec<(String, Bson)>,
    /// With `by`, the target's path that receives the groups.
    pub into: Option<String>,
    /// With `by`, the form of the groups in the target (`as`).
    pub form: GroupForm,
    /// `(target path, value)` pairs, in order; with `by`, `(field of a group, value)`. A value is
    /// `{ $accumulator: expression }`, or an expression over the variables of `let`.
    pub set: Vec<(String, Bson)>,
    /// The order in which accumulators read their input, ascending `_id` by default; with `by`, the order of the groups
    /// by their own fields.
    pub sort: Vec<(String, i32)>,
    /// With `by`, a limit as in `$push`: the first N groups, or the last N if negative.
    pub slice: Option<i64>,
    /// The value of a target without sources.
    pub on_empty: OnEmpty,
    /// The type that the target's value is converted to before matching.
    pub key_type: Option<KeyType>,
    /// The greatest number of ancestors in a tree, if the rule reads its own output (`recursive`, `max_depth`).
    pub tree: Option<usize>,
    /// The target's path that gets the server's time with each change of the target (`touch`).
    pub touch: Option<String>,
}

/// `as`: the form of the groups of an `aggregate` in its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GroupForm {
    /// An array with one element for each group.
    #[default]
    Array,
    /// An object with one field for each group, named by the value of `by`.
    Object,
}

/// `on_missing`: the effect of a reference without a matching source document.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnMissing {
    /// Owned paths are unset; `into` omits the element.
    #[default]
    Unset,
    /// Owned paths become null; `into` contains null.
    Null,
    /// Owned paths keep their values.
    Keep,
    /// The array element that holds the reference is pulled.
    Remove,
    /// The target document is deleted.
    Delete,
}

impl OnMissing {
    /// The name in a stored definition, which never changes: otherwise every rule would count as changed.
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

/// `on_empty`: the value of a target of `collect` or `aggregate` without sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnEmpty {
    /// `[]`, 0 or null, depending on the kind of result.
    #[default]
    Value,
    /// Owned paths are unset.
    Unset,
    /// With `create`: as `value`, and the document is never deleted.
    Keep,
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
    /// The name in a stored definition, which never changes: otherwise every rule would count as changed.
    #[must_use]
    pub fn stored(self) -> &'static str {
        match self {
            Self::ObjectId => "ObjectId",
            Self::String => "String",
        }
    }
}

/// `backfill`: the trigger of the backfill for a new or changed rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BackfillMode {
    /// A new or changed rule is backfilled automatically.
    #[default]
    Auto,
    /// A rule is backfilled only by `denormd backfill`.
    Manual,
}

/// `guard`: the way to detect other writers' changes to owned fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Guard {
    /// Through the change stream, at once; costs an event for each of denormd's own writes.
    Watch,
    /// By the continuous audit, after some time.
    #[default]
    Audit,
    /// No detection.
    Off,
}

/// `on_drift`: the reaction to another writer's change of an owned field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OnDrift {
    /// Write the correct value.
    #[default]
    Repair,
    /// Count and log the drift.
    Report,
}
