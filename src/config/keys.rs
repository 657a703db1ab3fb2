//! The keys of a config, once: what the readers know, what the JSON Schema says, and the reference under `docs/`.

/// One key of a mapping.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// As it is written.
    pub name: &'static str,
    /// What stands behind it.
    pub form: Form,
    /// Whether it must be there.
    pub required: bool,
    /// What holds without it, as one would write it; empty where nothing does.
    pub default: &'static str,
    /// What it means.
    pub about: &'static str,
}

/// What a value may be.
#[derive(Debug, Clone, Copy)]
pub enum Form {
    /// Text that is not empty.
    Text,
    /// A list of texts, or one text with commas.
    Words,
    /// Letters, digits, `_`, `.` and `-`; a letter or a digit first.
    Name,
    /// true or false.
    Flag,
    /// An integer from 1.
    Count,
    /// A number of seconds, from this one to a day.
    Seconds(i64),
    /// A number with s, m, h or d behind it, up to 30 days.
    Span,
    /// `address:port`
    Address,
    /// One of these words, each with its meaning.
    Choice(&'static [(&'static str, &'static str)]),
    /// A collection's name, or `{ collection, where }`.
    Side,
    /// Target path: source path.
    Match,
    /// Target path: aggregation expression.
    Set,
    /// Target path: `{ $accumulator: expression }`.
    Accumulators,
    /// Source path: 1 or -1.
    Sort,
    /// A path.
    Path,
    /// An aggregation expression.
    Expression,
    /// A query document.
    Filter,
    /// An integer that is not 0.
    Slice,
    /// A mapping with these keys.
    Keys(&'static [Key]),
    /// A list of mappings with these keys.
    List(&'static [Key]),
}

const fn key(name: &'static str, form: Form, default: &'static str, about: &'static str) -> Key {
    Key { name, form, required: false, default, about }
}

const fn must(name: &'static str, form: Form, about: &'static str) -> Key {
    Key { name, form, required: true, default: "", about }
}

/// The whole config.
pub const ROOT: &[Key] = &[
    key(
        "name",
        Form::Name,
        "default",
        "The deployment's name. It keys all state, so that two teams share a cluster without sharing a leader.",
    ),
    key("mongodb", Form::Keys(MONGODB), "", "How to reach the cluster."),
    must("rules", Form::List(RULE), "The rules. Those of several files are joined; a name is one rule's."),
    key("http", Form::Keys(HTTP), "", "The daemon's HTTP server: metrics, health, status, the page."),
    key("state", Form::Keys(STATE), "", "Where denormd keeps its own state."),
    key("log", Form::Keys(LOG), "", "The daemon's log."),
    key("limits", Form::Keys(LIMITS), "", "Bounds on what the daemon does at once."),
    key("lease", Form::Keys(LEASE), "", "How instances of one deployment agree on their leader."),
    key("advise", Form::Keys(ADVISE), "", "The thresholds and bounds of `denormd advise`."),
];

/// `mongodb`
pub const MONGODB: &[Key] = &[
    key(
        "uri",
        Form::Text,
        "",
        "The connection string: mongodb://host:27017/?replicaSet=rs0. Given here, by `uri_file`, or by DENORMD__MONGODB__URI.",
    ),
    key(
        "uri_file",
        Form::Text,
        "",
        "A file that holds the connection string; a relative path starts at the config file's directory.",
    ),
    key(
        "database",
        Form::Text,
        "",
        "The database of collections named without one. Without it, the connection string's.",
    ),
];

/// `http`
pub const HTTP: &[Key] = &[
    key("listen", Form::Address, "127.0.0.1:9464", "Where it listens. Loopback unless told otherwise."),
    key(
        "token",
        Form::Text,
        "",
        "The token that requests for a change must carry, of 16 characters at least. A file of its own (`token_file`) is safer.",
    ),
    key(
        "token_file",
        Form::Text,
        "",
        "A file that holds the token; a relative path starts at the config file's directory.",
    ),
    key(
        "require_token",
        Form::Choice(&[
            ("changes", "requests that change something"),
            ("everything", "all but `/livez` and `/readyz`; a browser asks for it as the password of any user"),
        ]),
        "changes",
        "Which requests need the token.",
    ),
    key(
        "allowed_hosts",
        Form::Words,
        "",
        "Names by which clients may ask, beside `localhost` and IP addresses: what a browser or Prometheus has in its URL. Another \
         name is refused with 421, against DNS rebinding.",
    ),
    key(
        "tls_cert_file",
        Form::Text,
        "",
        "A PEM file with the server's certificate and its chain: the server then speaks HTTPS alone. It is read again when it \
         changes. A relative path starts at the config file's directory.",
    ),
    key(
        "tls_key_file",
        Form::Text,
        "",
        "A PEM file with the certificate's private key. Without it, the key is in `tls_cert_file`.",
    ),
];

/// `state`
pub const STATE: &[Key] = &[key(
    "database",
    Form::Text,
    "denormd",
    "The database for positions, rule states, backfill progress and dead letters.",
)];

/// `log`
pub const LOG: &[Key] = &[
    key("filter", Form::Text, "info", "A filter as of RUST_LOG: `info`, `denormd=debug`."),
    key(
        "format",
        Form::Choice(&[
            ("auto", "text on a terminal, JSON otherwise"),
            ("text", "always text"),
            ("json", "one JSON object a line"),
        ]),
        "auto",
        "How lines look.",
    ),
    key(
        "otlp",
        Form::Text,
        "",
        "The OpenTelemetry collector that gets a span for each batch, by OTLP over HTTP: `http://127.0.0.1:4318`.",
    ),
];

/// `limits`
pub const LIMITS: &[Key] = &[
    key("batch_keys", Form::Count, "1000", "Keys in one read and one write command."),
    key(
        "batch_bytes",
        Form::Count,
        "4194304",
        "Bytes of values, or of what a look-up finds, that one batch reads before it writes; larger ones are done a few keys at a time, and a single key that needs more has this memory to itself.",
    ),
    key("batches", Form::Count, "3", "Batches with disjoint keys in flight at once."),
    key("pending", Form::Count, "100000", "Reconcile requests held in memory before the streams are left waiting."),
    key(
        "read_timeout_seconds",
        Form::Seconds(1),
        "60",
        "How long one read of a batch may run on the server. A batch that takes longer is done in eighths; of fewer than 16 keys each is done alone, one at a time; such a key is given twice as long each time, up to ten times this limit, and then becomes a dead letter.",
    ),
    key("write_timeout_seconds", Form::Seconds(1), "5", "How long one write command may run on the server."),
    key(
        "destroy_grace_seconds",
        Form::Seconds(0),
        "10",
        "How long `on_missing: remove` and `delete` wait before they read again and destroy.",
    ),
    key(
        "destroy_per_hour",
        Form::Count,
        "",
        "The removal limit: targets of one rule that may lose a value in an hour, because no source answers their reference any more, before the rule is blocked. By default the larger of 1,000 and a tenth of the rule's targets.",
    ),
    key(
        "audit_per_second",
        Form::Count,
        "200",
        "Targets that the continuous audit of `guard: audit` compares a second.",
    ),
    key(
        "backfill_per_second",
        Form::Count,
        "",
        "Targets that backfills go through a second, at most; without it as fast as the replica set keeps up.",
    ),
];

/// `lease`
pub const LEASE: &[Key] = &[
    key(
        "ttl_seconds",
        Form::Seconds(2),
        "10",
        "How long a leader that says nothing stays the leader. A write command may run for half of it at most.",
    ),
    key(
        "partitions",
        Form::Count,
        "1",
        "Shares of the keys, each with a leader of its own, that instances divide among themselves; at most 64. The same for all.",
    ),
];

/// `advise`
pub const ADVISE: &[Key] = &[
    key("sample", Form::Count, "1000", "Documents that are sampled from each collection."),
    key(
        "scan_documents",
        Form::Count,
        "500000",
        "Without an index a collection is read whole only up to this many documents, beyond it is sampled.",
    ),
    key("history_events", Form::Count, "1000000", "Events that are read from the oplog, at most."),
    key("history_seconds", Form::Seconds(1), "30", "How long events are read from the oplog, at most."),
    key("embed_elements", Form::Count, "250", "Embed while the 99th percentile is below this."),
    key("references_warn", Form::Count, "2000", "From here an array of references is warned about."),
    key("references_stop", Form::Count, "5000", "From here an array of references is advised against."),
    key("document_warn_bytes", Form::Count, "1048576", "Bytes of a document that are warned about."),
    key("document_bad_bytes", Form::Count, "10485760", "Bytes of a document that are bad."),
    key("copy_ratio", Form::Count, "10", "Reads for each copied write from which a field is copied."),
    key("no_copy_ratio", Form::Count, "1", "Reads for each copied write up to which a field is not copied."),
    key("subset", Form::Count, "10", "Children that a parent shows where the application's own limit was not seen."),
    key("indexes", Form::Count, "10", "Indexes on one collection, at most."),
    key("lookup_percent", Form::Count, "10", "Share of reads that may be `$lookup`, in percent."),
    key("collections", Form::Count, "10000", "Collections, at most."),
];

/// One of `rules`
pub const RULE: &[Key] = &[
    must("name", Form::Name, "The rule's name, unique over all files. It is in metrics, logs and commands."),
    key(
        "copy",
        Form::Keys(COPY),
        "",
        "One source document's values into the targets that refer to it, or that it refers to. A rule has one of `copy`, `collect`, `aggregate`.",
    ),
    key("collect", Form::Keys(COLLECT), "", "Many source documents into an array of one target."),
    key("aggregate", Form::Keys(AGGREGATE), "", "Many source documents into accumulated values of one target."),
    key(
        "backfill",
        Form::Choice(&[
            ("auto", "a new or changed rule brings existing data up to date by itself"),
            ("manual", "only `denormd backfill` does"),
        ]),
        "auto",
        "Whether existing data is brought up to date.",
    ),
    key(
        "guard",
        Form::Choice(&[
            ("audit", "the continuous audit notices in its round"),
            ("watch", "the change stream notices at once, which costs an event for each write of denormd's own"),
            ("off", "nobody does"),
        ]),
        "audit",
        "How somebody else's write to a copied field is noticed.",
    ),
    key(
        "on_drift",
        Form::Choice(&[("repair", "the right value is written"), ("report", "it is counted and logged")]),
        "repair",
        "What is done about it.",
    ),
    key(
        "allow_scan",
        Form::Flag,
        "false",
        "Whether lookups without an index are accepted: each change then reads the whole collection.",
    ),
    key(
        "max_lag",
        Form::Span,
        "60s",
        "The rule's objective: the alert DenormdBehind fires when its lag stays above this (`denormd_rule_max_lag_seconds`).",
    ),
    key(
        "shadow",
        Form::Flag,
        "false",
        "Computes, compares and counts (denormd_shadow_differing_total), and writes nothing.",
    ),
    key(
        "adopt",
        Form::Flag,
        "false",
        "Whether it may remove and overwrite values that are already there, in its first backfill beyond the removal limit. Otherwise such \
         a rule is blocked until `denormd unblock`.",
    ),
];

const SOURCE: Key = must("source", Form::Side, "Where values come from.");
const TARGET: Key = must("target", Form::Side, "Where they go.");
const MATCH: Key = must(
    "match",
    Form::Match,
    "Target path: source path. `target.x` equals `source.y`; `$[]` stands for the elements of an array.",
);
const SORT: Key = key(
    "sort",
    Form::Sort,
    "{ _id: 1 }",
    "The order of the sources, ties by _id ascending: which one wins, and the order of an array.",
);
const KEY_TYPE: Key = key(
    "key_type",
    Form::Choice(&[
        ("objectId", "24 hexadecimal digits become an ObjectId"),
        ("string", "an ObjectId or an integer becomes its digits"),
    ]),
    "",
    "What the target's value is converted to before matching.",
);
const ON_EMPTY: Key = key(
    "on_empty",
    Form::Choice(&[("value", "[], 0 or null, by the kind of result"), ("unset", "the fields are taken away")]),
    "value",
    "What a target without any source gets, or in `collect` one without any element.",
);

/// `copy`
pub const COPY: &[Key] = &[
    SOURCE,
    TARGET,
    MATCH,
    SORT,
    key(
        "set",
        Form::Set,
        "",
        "Target path: aggregation expression over the source document. A path with the match's `$[]` is set in the element that matched.",
    ),
    key(
        "into",
        Form::Path,
        "",
        "Instead of `set`: an array of the target that gets one `element` for each reference, in their order.",
    ),
    key("element", Form::Expression, "", "The expression of one element of `into`."),
    key(
        "on_missing",
        Form::Choice(&[
            ("unset", "the fields are taken away; `into` leaves the element out"),
            ("null", "they become null; `into` puts null"),
            ("keep", "they keep what they have"),
            ("remove", "the array element that holds the reference is pulled"),
            ("delete", "the target document is deleted"),
        ]),
        "unset",
        "What a reference does that no source answers. `remove` and `delete` wait limits.destroy_grace_seconds, and stop at limits.destroy_per_hour.",
    ),
    KEY_TYPE,
    key(
        "once",
        Form::Flag,
        "false",
        "Fills a target that has no value yet, and never changes it again: the price at the time of the order.",
    ),
];

/// `collect`
pub const COLLECT: &[Key] = &[
    SOURCE,
    TARGET,
    MATCH,
    must("into", Form::Path, "The target's array."),
    must(
        "element",
        Form::Expression,
        "What is put into it for each source. With `$_id` in it, no pre-images are needed.",
    ),
    SORT,
    key("slice", Form::Slice, "", "As in `$push`: the first N, or the last N when negative."),
    ON_EMPTY,
    key(
        "max_elements",
        Form::Count,
        "",
        "The most elements that a target may be given; one that would get more becomes a dead letter.",
    ),
    key("max_bytes", Form::Count, "", "The most bytes of BSON that the array may be given."),
    KEY_TYPE,
];

/// `aggregate`
pub const AGGREGATE: &[Key] = &[
    SOURCE,
    TARGET,
    MATCH,
    must("set", Form::Accumulators, "Target path: { $accumulator: expression }, as in `$group`."),
    SORT,
    ON_EMPTY,
    KEY_TYPE,
];

/// `source` and `target`, written out.
pub const SIDE: &[Key] = &[
    must("collection", Form::Text, "The collection's name; `other.parts` names another database."),
    key("where", Form::Filter, "", "A query document that a document must match to take part."),
];

/// The names of some keys, in their order.
#[must_use]
pub fn names(keys: &[Key]) -> Vec<&'static str> {
    keys.iter().map(|key| key.name).collect()
}

/// Whether a key of this name is among some.
#[must_use]
pub fn has(keys: &[Key], name: &str) -> bool {
    keys.iter().any(|key| key.name == name)
}
