//! Each message as the user reads it: `messages.txt` holds a config (its format in the heading), then the full text.

use super::*;

/// `=== toml: what it is about`, the config, `>>>`, the message.
const CASES: &str = include_str!("messages.txt");

fn shown(format: Format, text: &str) -> String {
    load_str(text, format).map_or_else(|error| error.to_string(), |_| "no mistake".to_owned())
}

#[test]
fn every_mistake_is_shown_with_its_place_and_what_to_do() {
    let mut wrong = Vec::new();
    for case in CASES.split("\n=== ").skip(1) {
        let (title, rest) = case.split_once('\n').unwrap();
        let (text, expected) = rest.split_once("\n>>>\n").unwrap();
        let format =
            Format::of(title.split(':').next().map(|name| PathBuf::from(format!("x.{name}"))).unwrap().as_path());
        let shown = shown(format.unwrap(), &format!("{text}\n"));
        if shown != expected.trim_end_matches('\n') {
            wrong.push(format!("=== {title}\n{text}\n>>>\n{shown}\n"));
        }
    }
    assert!(wrong.is_empty(), "these read otherwise:\n\n{}\n<end>", wrong.join("\n"));
}

#[test]
fn a_variable_of_the_environment_is_a_place_too() {
    let dir = Dir::new(&[("a.yaml", "mongodb: { uri: mongodb://a }\nrules: []")]);
    for (name, text, expected) in [
        (
            "DENORMD__MONGODB__URL",
            "mongodb://u:hunter2@h",
            "environment variable DENORMD__MONGODB__URL: the variable stands for no setting\n   \
             hint: did you mean `DENORMD__MONGODB__URI`?",
        ),
        (
            "DENORMD__RULES__0__NAME",
            "x",
            "environment variable DENORMD__RULES__0__NAME: the variable stands for no setting\n   \
             hint: rules come from files; the environment gives single settings",
        ),
        (
            "DENORMD__LIMITS__BATCHES",
            "many",
            "environment variable DENORMD__LIMITS__BATCHES: expected an integer, found a string",
        ),
        (
            "DENORMD__LIMITS__BATCHES",
            "-1",
            "environment variable DENORMD__LIMITS__BATCHES: expected an integer of at least 1, found -1",
        ),
        (
            "DENORMD__STATE__DATABASE",
            "",
            "environment variable DENORMD__STATE__DATABASE: expected text, found an empty string",
        ),
        (
            "DENORMD__STATE__DATABASE",
            "local",
            "environment variable DENORMD__STATE__DATABASE: `local` is a database of the server's own\n   hint: write another \
             name, such as denormd",
        ),
        (
            "DENORMD__LOG__FILTER",
            "warning",
            "environment variable DENORMD__LOG__FILTER: `warning` is not a level of the log: `off`, `error`, `warn`, `info`, \
             `debug`, `trace`\n   hint: did you mean `warn`?",
        ),
        (
            "DENORMD__LOG__FILTER",
            "4, denormd=Debug, Err,",
            "environment variable DENORMD__LOG__FILTER: `Err` is not a level of the log: `off`, `error`, `warn`, `info`, \
             `debug`, `trace`\n   hint: write LEVEL, or TARGET=LEVEL for a part of the log, as in `info,mongodb=debug`",
        ),
        (
            "DENORMD__LOG__FILTER",
            "info,mongodb",
            "environment variable DENORMD__LOG__FILTER: `mongodb` is not a level of the log: `off`, `error`, `warn`, `info`, \
             `debug`, `trace`\n   hint: write LEVEL, or TARGET=LEVEL for a part of the log, as in `info,mongodb=debug`",
        ),
        (
            "DENORMD__MONGODB",
            "mongodb://u:hunter2@h",
            "environment variable DENORMD__MONGODB: the variable stands for no setting\n   hint: known variables: \
             `DENORMD__NAME`, `DENORMD__MONGODB__URI`, `DENORMD__MONGODB__URI_FILE`, `DENORMD__MONGODB__DATABASE`, \
             `DENORMD__MONGODB__ALLOW_SHARDED`, `DENORMD__HTTP__LISTEN`, `DENORMD__HTTP__TOKEN`, `DENORMD__HTTP__TOKEN_FILE`, `DENORMD__HTTP__REQUIRE_TOKEN`, `DENORMD__HTTP__ALLOWED_HOSTS`, `DENORMD__HTTP__TLS_CERT_FILE`, `DENORMD__HTTP__TLS_KEY_FILE`, `DENORMD__STATE__DATABASE`, `DENORMD__LOG__FILTER`, `DENORMD__LOG__FORMAT`, \
             `DENORMD__LOG__OTLP`, `DENORMD__LIMITS__BATCH_KEYS`, `DENORMD__LIMITS__BATCH_BYTES`, `DENORMD__LIMITS__BATCHES`, `DENORMD__LIMITS__PENDING`, \
             `DENORMD__LIMITS__READ_TIMEOUT_SECONDS`, `DENORMD__LIMITS__WRITE_TIMEOUT_SECONDS`, `DENORMD__LIMITS__DESTROY_GRACE_SECONDS`, `DENORMD__LIMITS__DESTROY_PER_HOUR`, \
             `DENORMD__LIMITS__AUDIT_PER_SECOND`, `DENORMD__LIMITS__BACKFILL_PER_SECOND`, `DENORMD__LEASE__TTL_SECONDS`, `DENORMD__LEASE__PARTITIONS`, `DENORMD__UNDO__MODE`, `DENORMD__UNDO__KEEP`, `DENORMD__UNDO__MAX_BYTES`, `DENORMD__ADVISE__SAMPLE`, `DENORMD__ADVISE__SCAN_DOCUMENTS`, `DENORMD__ADVISE__HISTORY_EVENTS`, `DENORMD__ADVISE__HISTORY_SECONDS`, `DENORMD__ADVISE__EMBED_ELEMENTS`, `DENORMD__ADVISE__REFERENCES_WARN`, `DENORMD__ADVISE__REFERENCES_STOP`, `DENORMD__ADVISE__DOCUMENT_WARN_BYTES`, `DENORMD__ADVISE__DOCUMENT_BAD_BYTES`, `DENORMD__ADVISE__COPY_RATIO`, `DENORMD__ADVISE__NO_COPY_RATIO`, `DENORMD__ADVISE__SUBSET`, `DENORMD__ADVISE__INDEXES`, `DENORMD__ADVISE__LOOKUP_PERCENT`, `DENORMD__ADVISE__COLLECTIONS`",
        ),
    ] {
        assert_eq!(dir.load(&["a.yaml"], &[(name, text)]).unwrap_err(), expected);
    }
}

#[test]
fn a_name_given_in_two_files_points_to_both() {
    let dir = Dir::new(&[
        ("a.yaml", &format!("mongodb: {{ uri: mongodb://a }}\nrules: [{}]", rule("r1"))),
        ("b.yaml", "rules:\n  - name: r1\n    copy: { source: a, target: b, match: { x: _id }, set: { z: $z } }"),
    ]);
    assert_eq!(
        dir.load(&["a.yaml", "b.yaml"], &[]).unwrap_err(),
        "b.yaml:2:11: a rule named `r1` exists already
   2 |   - name: r1
     |           ^^
   a.yaml:2:17: the first is here
      2 | rules: [{ name: r1, copy: { source: a, target: b, match: { x: _id }, set: { y: $y } } }]
        |                 ^^"
    );
}
