//! The only definition of the config's keys, for the readers, the JSON Schema, and the reference under `docs/`. Sections
//! whose settings are independent of each other have theirs in [`super::declared`].

pub use super::declared::{ADVISE, LEASE, LIMITS, STATE, UNDO};
pub use super::key::{Form, Key, has, names};
use super::key::{key, must};

/// The keys of the whole config.
pub const ROOT: &[Key] = &[
    key(
        "name",
        Form::Name,
        "default",
        "The deployment's name. It keys all state, so that two teams share a cluster without sharing a leader.",
    ),
    key("mongodb", Form::Keys(MONGODB), "", "The connection to the cluster."),
    must("rules", Form::List(RULE), "The rules. Rules of several files are joined; names are unique over all files."),
    key("http", Form::Keys(HTTP), "", "The daemon's HTTP server: metrics, health, status, the page."),
    key("state", Form::Keys(STATE), "", "The place of denormd's own state."),
    key("log", Form::Keys(LOG), "", "The daemon's log."),
    key("limits", Form::Keys(LIMITS), "", "Bounds on what the daemon does at once."),
    key("lease", Form::Keys(LEASE), "", "The lease by which instances of one deployment elect their leader."),
    key("undo", Form::Keys(UNDO), "", "Keeps the values that first backfills overwrite or remove, for `denormd undo`."),
    key("advise", Form::Keys(ADVISE), "", "The thresholds and bounds of `denormd advise`."),
];

/// The keys of `mongodb`.
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
        "The database of collections that are named without one. By default, the connection string's.",
    ),
    key(
        "allow_sharded",
        Form::Choice(&[
            ("never", "a sharded cluster is refused"),
            ("experimental", "the routers of a sharded cluster are used, although denormd has never run on one"),
        ]),
        "never",
        "Permission to run on a sharded cluster.",
    ),
];

/// The keys of `http`.
pub const HTTP: &[Key] = &[
    key("listen", Form::Address, "127.0.0.1:9464", "The address to listen on."),
    key(
        "token",
        Form::Text,
        "",
        "The token that requests for a change must carry: at least 16 characters. A separate file (`token_file`) is safer.",
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
            (
                "everything",
                "all requests but `/livez` and `/readyz`; a browser asks for the token as the password of any user",
            ),
        ]),
        "changes",
        "The requests that need the token.",
    ),
    key(
        "allowed_hosts",
        Form::Words,
        "",
        "Host names that clients may use in their URLs, in addition to `localhost` and IP addresses. Requests with another name \
         are refused with 421, as a protection against DNS rebinding.",
    ),
    key(
        "tls_cert_file",
        Form::Text,
        "",
        "A PEM file with the server's certificate and its chain: the server then accepts HTTPS only. It is read again when it \
         changes. A relative path starts at the config file's directory.",
    ),
    key(
        "tls_key_file",
        Form::Text,
        "",
        "A PEM file with the certificate's private key. Without it, the key is in `tls_cert_file`.",
    ),
];

/// The keys of `log`.
pub const LOG: &[Key] = &[
    key(
        "filter",
        Form::Text,
        "info",
        "A filter in the syntax of RUST_LOG: `info`, or `info,denormd=debug`. The levels are `off`, `error`, `warn`, `info`, `debug` and `trace`. The variable RUST_LOG itself is not read.",
    ),
    key(
        "format",
        Form::Choice(&[
            ("auto", "text on a terminal, JSON otherwise"),
            ("text", "always text"),
            ("json", "one JSON object a line"),
        ]),
        "auto",
        "The format of log lines.",
    ),
    key(
        "otlp",
        Form::Text,
        "",
        "The OpenTelemetry collector that gets a span for each batch, by OTLP over HTTP: `http://127.0.0.1:4318`.",
    ),
];

/// The keys of one of `rules`.
pub const RULE: &[Key] = &[
    must("name", Form::Name, "The rule's name, unique over all files. Metrics, logs and commands use it."),
    key(
        "copy",
        Form::Keys(COPY),
        "",
        "Copies values of one source document into the targets that refer to it, or that it refers to. A rule has one of `copy`, `collect`, `aggregate`.",
    ),
    key("collect", Form::Keys(COLLECT), "", "Collects many source documents into an array of one target."),
    key(
        "aggregate",
        Form::Keys(AGGREGATE),
        "",
        "Aggregates many source documents into accumulated values of one target.",
    ),
    key(
        "backfill",
        Form::Choice(&[
            ("auto", "a new or changed rule brings existing data up to date by itself"),
            ("manual", "only `denormd backfill` does so"),
        ]),
        "auto",
        "The way existing data is brought up to date.",
    ),
    key(
        "guard",
        Form::Choice(&[
            ("audit", "by the continuous audit, once in each of its rounds"),
            ("watch", "at once, by the change stream, which costs an event for each of denormd's own writes"),
            ("off", "not at all"),
        ]),
        "audit",
        "The way other clients' writes to a copied field are noticed.",
    ),
    key(
        "on_drift",
        Form::Choice(&[("repair", "the right value is written"), ("report", "it is counted and logged")]),
        "repair",
        "The reaction to such a write.",
    ),
    key(
        "allow_scan",
        Form::Flag,
        "false",
        "Accepts lookups without an index: each change then reads the whole collection.",
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
        "Agrees beforehand that the first backfill may remove and overwrite existing values, and delete documents and elements, beyond \
         the removal limit too. Otherwise such a rule is blocked until `denormd unblock`.",
    ),
];

const SOURCE: Key = must("source", Form::Side, "The collection that values come from.");
const TARGET: Key = must("target", Form::Side, "The collection that they are written to.");
const MATCH: Key = must(
    "match",
    Form::Match,
    "Target path: source path. `target.x` equals `source.y`; `$[]` stands for the elements of an array.",
);
const MATCH_WITH_BUCKETS: Key = must(
    "match",
    Form::MatchWithBuckets,
    "Target path: source path. `target.x` equals `source.y`; `$[]` stands for the elements of an array. With `create`, the fields of the target's `_id`, in their order; \
     `{ $dateTrunc: { date: $at, unit: day } }` is the interval that a date of the source falls into.",
);
const SORT: Key = key(
    "sort",
    Form::Sort,
    "{ _id: 1 }",
    "The order of the sources, ties by _id ascending. It decides which one wins, and the order of an array.",
);
const KEY_TYPE: Key = key(
    "key_type",
    Form::Choice(&[
        ("objectId", "24 hexadecimal digits become an ObjectId"),
        ("string", "an ObjectId or an integer becomes its digits"),
    ]),
    "",
    "The type that the target's values are converted to before matching, in every entry of `match`.",
);
const RECURSIVE: Key = key(
    "recursive",
    Form::Flag,
    "false",
    "The documents of one collection form a tree, and the rule reads the paths that it writes: a `copy` from the parent (`match: { parent: _id }`), an `aggregate` over the children (`match: { _id: parent }`).",
);
const MAX_DEPTH: Key = key(
    "max_depth",
    Form::Count,
    "64",
    "With `recursive`: the most ancestors of a document, at most 256. A document with more becomes a dead letter and keeps its values.",
);
const ON_EMPTY: Key = key(
    "on_empty",
    Form::Choice(&[("value", "[], 0 or null, by the kind of result"), ("unset", "the fields are removed")]),
    "value",
    "The value of a target without a source, or in `collect` without an element.",
);

const ON_EMPTY_OF_AGGREGATE: Key = key(
    "on_empty",
    Form::Choice(&[
        ("value", "[], 0 or null, by the kind of result"),
        ("unset", "the fields are removed"),
        ("keep", "with `create`: as `value`, and the document is never deleted"),
    ]),
    "value",
    "The value of a target without a source. With `create`, such a document is deleted; if it also holds fields that the rule does not own, it stays and gets these values.",
);

const TOUCH: Key = key(
    "touch",
    Form::Path,
    "",
    "A path of the target that denormd sets to the server's time whenever this rule changes the target, and never to an earlier time than it holds. A value there that is not a date is left unchanged. Rules may share it. It is not compared or repaired, and no rule may read it.",
);

/// The keys of `copy`.
pub const COPY: &[Key] = &[
    SOURCE,
    TARGET,
    MATCH,
    SORT,
    key(
        "set",
        Form::Set,
        "",
        "Target path: aggregation expression over the source document. A path with the match's `$[]` is set in the element that matched. No field of a path begins or ends with a space.",
    ),
    key(
        "into",
        Form::Path,
        "",
        "Instead of `set`: an array of the target, with one `element` for each reference, in their order.",
    ),
    key("element", Form::Expression, "", "The expression of one element of `into`."),
    key(
        "on_missing",
        Form::Choice(&[
            ("unset", "the fields are removed; `into` leaves the element out"),
            ("null", "the fields become null; `into` has a null element"),
            ("keep", "the fields keep their values"),
            ("remove", "the array element that holds the reference is removed"),
            ("delete", "the target document is deleted"),
        ]),
        "unset",
        "The effect of a reference that finds no source. A null or missing reference removes the fields in any case. `remove` and `delete` wait for limits.destroy_grace_seconds. Every loss of a value counts towards limits.destroy_per_hour, whichever of these is chosen.",
    ),
    key(
        "otherwise",
        Form::Set,
        "",
        "Instead of `on_missing`: target path: expression over `$$target` and `$$targetElement` alone, for a target, or an element, whose reference is null, missing or an array, or finds no source. Paths of `set` that it leaves out are removed.",
    ),
    KEY_TYPE,
    key(
        "once",
        Form::Flag,
        "false",
        "Fills a target that has no value yet, and never changes it again: the price at the time of the order.",
    ),
    RECURSIVE,
    MAX_DEPTH,
    TOUCH,
];

/// The keys of `collect`.
pub const COLLECT: &[Key] = &[
    SOURCE,
    TARGET,
    MATCH,
    must("into", Form::Path, "The target's array."),
    must(
        "element",
        Form::Expression,
        "The expression of the element for each source. With `$_id` in it, no pre-images are needed.",
    ),
    SORT,
    key("slice", Form::Slice, "", "As in `$push`: the first N, or the last N when negative."),
    ON_EMPTY,
    key(
        "max_elements",
        Form::Count,
        "",
        "The most elements of a target's array. A target that would get more becomes a dead letter.",
    ),
    key("max_bytes", Form::Count, "", "The most bytes of BSON of the array."),
    KEY_TYPE,
    TOUCH,
];

/// The keys of `aggregate`.
pub const AGGREGATE: &[Key] = &[
    SOURCE,
    TARGET,
    MATCH_WITH_BUCKETS,
    key(
        "let",
        Form::Variables,
        "",
        "Variables for the expressions in `set`: name: { $accumulator: expression }. `$$name` is the accumulated value.",
    ),
    key(
        "by",
        Form::Set,
        "",
        "Name: expression over the source document. Sources with equal values form a group, and `into` gets one element for each group.",
    ),
    key(
        "into",
        Form::Path,
        "",
        "With `by`: the target's array of groups. An element has the fields of `by`, then those of `set`.",
    ),
    key(
        "as",
        Form::Choice(&[
            ("array", "an array with one element for each group"),
            ("object", "an object with one field for each group, named by the value of `by`"),
        ]),
        "array",
        "With `by`: the form of the groups. Names are strings as they are, ObjectIds in hexadecimal, integers as digits; any other value makes the target a dead letter.",
    ),
    must(
        "set",
        Form::Accumulators,
        "Target path: { $accumulator: expression }, as in `$group`, or an expression over the variables of `let`. With `by`, a field of the group instead of a path.",
    ),
    key(
        "sort",
        Form::Sort,
        "{ _id: 1 }",
        "The order in which accumulators read the sources, ties by _id ascending. With `by`, the order of the groups by their own fields, ties by the fields of `by`.",
    ),
    key("slice", Form::Slice, "", "With `by`, as in `$push`: the first N groups, or the last N when negative."),
    ON_EMPTY_OF_AGGREGATE,
    KEY_TYPE,
    RECURSIVE,
    MAX_DEPTH,
    TOUCH,
];

/// The keys of `source` and `target` in their long form.
pub const SIDE: &[Key] = &[
    must("collection", Form::Text, "The collection's name; `other.parts` names another database."),
    key(
        "where",
        Form::Filter,
        "",
        "A query document that a document must match to take part. In a source's, an `$expr` at the top may use `$$target.path` and `$$targetElement.path`, and `$$element` in a source's array.",
    ),
    key(
        "create",
        Form::Flag,
        "false",
        "In the target of an `aggregate`: inserts a document for each key that has sources, with an `_id` from `match`, and deletes it when the last source is gone.",
    ),
];

/// The keys of `$dateTrunc` in `match`.
pub const DATE_TRUNC: &[Key] = &[
    must("date", Form::Expression, "The path of a date in the source, with its `$`: $at."),
    must(
        "unit",
        Form::Choice(&[
            ("second", "a second"),
            ("minute", "a minute"),
            ("hour", "an hour"),
            ("day", "a day"),
            ("week", "a week"),
            ("month", "a month"),
            ("quarter", "a quarter of a year"),
            ("year", "a year"),
        ]),
        "The length of an interval.",
    ),
    key("binSize", Form::Count, "1", "The number of units in an interval."),
    key("timezone", Form::Text, "UTC", "The time zone of days and longer units: Europe/Paris, or +02:00."),
    key(
        "startOfWeek",
        Form::Choice(&[
            ("monday", "Monday"),
            ("tuesday", "Tuesday"),
            ("wednesday", "Wednesday"),
            ("thursday", "Thursday"),
            ("friday", "Friday"),
            ("saturday", "Saturday"),
            ("sunday", "Sunday"),
        ]),
        "sunday",
        "The first day of a week.",
    ),
];

/// The settings beside the rules, each with its path, such as `limits.pending`.
pub fn settings() -> impl Iterator<Item = (String, &'static Key)> {
    ROOT.iter().flat_map(|root| -> Vec<(String, &'static Key)> {
        match root.form {
            Form::Keys(below) => below.iter().map(|key| (format!("{}.{}", root.name, key.name), key)).collect(),
            Form::List(_) => Vec::new(),
            _ => vec![(root.name.to_owned(), root)],
        }
    })
}

/// The keys of the root that contain settings.
#[must_use]
pub fn sections() -> Vec<&'static str> {
    ROOT.iter().filter(|root| !matches!(root.form, Form::List(_))).map(|root| root.name).collect()
}
