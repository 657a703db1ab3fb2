//! The sections of a config, one struct each. Structs with secrets deliberately do not implement `Serialize`.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use bson::{Bson, Document};
use secrecy::SecretString;
use serde::Serialize;

pub use super::declared::{Advise, Lease, Limits, State, Undo};

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

/// One entry of `rules`.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    /// The name, unique over all files: `[A-Za-z0-9][A-Za-z0-9_.-]*`.
    pub name: String,
    /// The documents of both sides, and what relates them.
    pub relation: Relation,
    /// The kind of rule, with the keys that only this kind has.
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

impl Pattern {
    /// The key in the rule.
    #[must_use]
    pub fn key(&self) -> &'static str {
        match self {
            Self::Copy(_) => "copy",
            Self::Collect(_) => "collect",
            Self::Aggregate(_) => "aggregate",
        }
    }

    /// The reaction to a missing source.
    #[must_use]
    pub fn on_missing(&self) -> OnMissing {
        match self {
            Self::Copy(copy) => copy.on_missing,
            Self::Collect(_) | Self::Aggregate(_) => OnMissing::Unset,
        }
    }
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

/// The keys that `copy`, `collect` and `aggregate` have in common, with the defaults of those that one of them lacks.
#[derive(Debug, Clone, PartialEq)]
pub struct Relation {
    /// The documents to read.
    pub source: Side,
    /// The documents that receive the values.
    pub target: Side,
    /// `(target path, source path)` pairs, in order (`match`).
    pub on: Vec<(String, String)>,
    /// `(target path, arguments of $dateTrunc without date)` pairs: entries of `match` by the interval that a date of the
    /// source falls into.
    pub buckets: Vec<(String, Document)>,
    /// `(source path, 1 or -1)`, with ties broken by ascending `_id`. The order of the sources: the first one of a `copy`,
    /// the elements of a `collect`, the input of accumulators. With `by`, the order of the groups by their own fields.
    pub sort: Vec<(String, i32)>,
    /// The type that the target's value is converted to before matching.
    pub key_type: Option<KeyType>,
    /// The greatest number of ancestors in a tree, if the rule reads its own output (`recursive`, `max_depth`).
    pub tree: Option<usize>,
    /// The target's path that gets the server's time with each change of the target (`touch`).
    pub touch: Option<String>,
}

/// `copy`: a rule that copies the values of one source document.
#[derive(Debug, Clone, PartialEq)]
pub struct Copy {
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
    /// True to fill only targets without a value, and never change it again.
    pub once: bool,
}

/// `collect`: a rule that collects source documents into an array.
#[derive(Debug, Clone, PartialEq)]
pub struct Collect {
    /// The target's array.
    pub into: String,
    /// The expression of one element.
    pub element: Bson,
    /// A limit as in `$push`: the first N elements, or the last N if negative.
    pub slice: Option<i64>,
    /// The value of a target without sources, or in `collect` without elements.
    pub on_empty: OnEmpty,
    /// Maximum number of elements in a target.
    pub max_elements: Option<u64>,
    /// Maximum size of the array in bytes of BSON.
    pub max_bytes: Option<u64>,
}

/// `aggregate`: a rule that accumulates the values of source documents.
#[derive(Debug, Clone, PartialEq)]
pub struct Aggregate {
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
    /// With `by`, a limit as in `$push`: the first N groups, or the last N if negative.
    pub slice: Option<i64>,
    /// The value of a target without sources.
    pub on_empty: OnEmpty,
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
    /// The name in the config, which is also that of the BSON type.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ObjectId => "objectId",
            Self::String => "string",
        }
    }

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
