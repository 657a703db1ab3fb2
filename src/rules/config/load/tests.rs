use std::{collections::BTreeMap, fs, path::PathBuf, time::Duration};

use bson::{Bson, DateTime, bson, doc};
use proptest::prelude::*;
use secrecy::ExposeSecret;

use super::*;
use crate::config::{
    BackfillMode, Copy, Guard, Http, LogFormat, OnDrift, OnEmpty, OnMissing, Pattern, Relation, Side, diagnose::Step,
};

mod messages;

const YAML: &str = r#"
$schema: https://example.org/denormd.json
x-part: &part { source: parts, target: products }
mongodb:
  uri: mongodb://u:hunter2@localhost:27017/?replicaSet=rs0
  database: shop
rules:
  - name: part-names
    copy:
      <<: *part
      match: { "parts.$[].id": _id, "Parts.$[].Z": a.b, host: H }
      sort: { zeta: 1, Alpha: -1, mid.dle: 1 }
      set: { ipaddr: $ipaddr, "parts.$[].Name": { $cond: { if: $z, then: 1, else: 1.0 } }, a: null, On: yes }
      on_missing: null
    guard: off
  - name: latest
    collect:
      source: { collection: reviews, where: { name: { $regex: "^a", $options: i }, at: { $gte: { $date: "1970-01-01T00:00:00Z" } } } }
      target: products
      match: { _id: product_id }
      into: reviews
      element: $_id
      sort: { at: -1 }
      slice: -10
      on_empty: unset
      max_elements: 5
      max_bytes: 6
      key_type: objectId
    backfill: manual
    on_drift: report
    allow_scan: true
"#;

const TOML: &str = r#"
"$schema" = "https://example.org/denormd.json"
x-part = 1

[mongodb]
uri = "mongodb://u:hunter2@localhost:27017/?replicaSet=rs0"
database = "shop"

[[rules]]
name = "part-names"
guard = "off"
[rules.copy]
source = "parts"
target = "products"
match = { "parts.$[].id" = "_id", "Parts.$[].Z" = "a.b", host = "H" }
sort = { zeta = 1, Alpha = -1, "mid.dle" = 1 }
on_missing = "null"
[rules.copy.set]
ipaddr = "$ipaddr"
"parts.$[].Name" = { "$cond" = { if = "$z", then = 1, else = 1.0 } }
a = { "$literal" = 0 }
On = "yes"

[[rules]]
name = "latest"
backfill = "manual"
on_drift = "report"
allow_scan = true
[rules.collect]
source = { collection = "reviews", where = { name = { "$regex" = "^a", "$options" = "i" }, at = { "$gte" = 1970-01-01T00:00:00Z } } }
target = "products"
match = { _id = "product_id" }
into = "reviews"
element = "$_id"
sort = { at = -1 }
slice = -10
on_empty = "unset"
max_elements = 5
max_bytes = 6
key_type = "objectId"
"#;

const JSON: &str = r#"{
	"$schema": "https:\/\/example.org/denormd.json", "x-part": [{}, []],
	"mongodb": { "uri": "mongodb://u:hunter2@localhost:27017/?replicaSet=rs0", "database": "shop" },
	"rules": [
		{
			"name": "part-names",
			"guard": "off",
			"copy": {
				"source": "parts",
				"target": "products",
				"match": { "parts.$[].id": "_id", "Parts.$[].Z": "a.b", "host": "H" },
				"sort": { "zeta": 1, "Alpha": -1, "mid.dle": 1 },
				"set": { "ipaddr": "$ipaddr", "parts.$[].Name": { "$cond": { "if": "$z", "then": 1, "else": 1.0 } }, "a": null, "On": "yes" },
				"on_missing": null
			}
		},
		{
			"name": "latest",
			"collect": {
				"source": { "collection": "reviews", "where": { "name": { "$regex": "^a", "$options": "i" }, "at": { "$gte": { "$date": { "$numberLong": "0" } } } } },
				"target": "products",
				"match": { "_id": "product_id" },
				"into": "reviews", "element": "$_id", "sort": { "at": -1 }, "slice": -10, "on_empty": "unset",
				"max_elements": 5, "max_bytes": 6, "key_type": "objectId"
			},
			"backfill": "manual", "on_drift": "report", "allow_scan": true
		}
	]
}"#;

fn pairs<T: Clone>(pairs: &[(&str, T)]) -> Vec<(String, T)> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect()
}

fn side(collection: &str) -> Side {
    Side { collection: collection.to_owned(), filter: None, create: false }
}

fn expected_rules(a: Bson) -> Vec<Rule> {
    let strings = |given: &[(&str, &str)]| -> Vec<(String, String)> {
        given.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    };
    let of_copy = Relation {
        source: side("parts"),
        target: side("products"),
        on: strings(&[("parts.$[].id", "_id"), ("Parts.$[].Z", "a.b"), ("host", "H")]),
        buckets: Vec::new(),
        sort: pairs(&[("zeta", 1), ("Alpha", -1), ("mid.dle", 1)]),
        key_type: None,
        tree: None,
        touch: None,
    };
    let copy = Copy {
        set: pairs(&[
            ("ipaddr", bson!("$ipaddr")),
            ("parts.$[].Name", bson!({ "$cond": { "if": "$z", "then": 1_i32, "else": 1.0 } })),
            ("a", a),
            ("On", bson!("yes")),
        ]),
        into: None,
        element: None,
        on_missing: OnMissing::Null,
        otherwise: Vec::new(),
        once: false,
    };
    let of_collect = Relation {
        source: Side {
            collection: "reviews".to_owned(),
            filter: Some(doc! {
                "name": { "$regex": "^a", "$options": "i" },
                "at": { "$gte": DateTime::from_millis(0) },
            }),
            create: false,
        },
        target: side("products"),
        on: strings(&[("_id", "product_id")]),
        buckets: Vec::new(),
        sort: pairs(&[("at", -1)]),
        key_type: Some(crate::config::KeyType::ObjectId),
        tree: None,
        touch: None,
    };
    let collect = crate::config::Collect {
        into: "reviews".to_owned(),
        element: bson!("$_id"),
        slice: Some(-10),
        on_empty: OnEmpty::Unset,
        max_elements: Some(5),
        max_bytes: Some(6),
    };
    vec![
        Rule {
            name: "part-names".to_owned(),
            relation: of_copy,
            pattern: Pattern::Copy(copy),
            backfill: BackfillMode::Auto,
            guard: Guard::Off,
            on_drift: OnDrift::Repair,
            allow_scan: false,
            max_lag: Rule::DEFAULT_MAX_LAG,
            shadow: false,
            adopt: false,
        },
        Rule {
            name: "latest".to_owned(),
            relation: of_collect,
            pattern: Pattern::Collect(collect),
            backfill: BackfillMode::Manual,
            guard: Guard::Audit,
            on_drift: OnDrift::Report,
            allow_scan: true,
            max_lag: Rule::DEFAULT_MAX_LAG,
            shadow: false,
            adopt: false,
        },
    ]
}

#[test]
fn case_order_dots_and_types_survive_in_every_format() {
    let literal = bson!({ "$literal": 0_i32 }); // TOML has no null
    for (format, text, a) in
        [(Format::Yaml, YAML, Bson::Null), (Format::Toml, TOML, literal), (Format::Json, JSON, Bson::Null)]
    {
        let Loaded { config, .. } = load_str(text, format).unwrap_or_else(|error| panic!("{format:?}: {error}"));
        assert_eq!(config.rules, expected_rules(a), "{format:?}");
        assert_eq!(config.mongodb.uri.expose_secret(), "mongodb://u:hunter2@localhost:27017/?replicaSet=rs0");
        assert_eq!(config.mongodb.database.as_deref(), Some("shop"));
        assert_eq!(
            (config.name.as_str(), config.state.database.as_str(), config.log.filter.as_str(), config.log.format),
            ("default", "denormd", "info", LogFormat::Auto)
        );
        assert_eq!(config.http.listen.to_string(), Http::DEFAULT_LISTEN);
    }
}

#[test]
fn aggregates_and_arrays_of_their_own_are_read() {
    let text = r"
mongodb: { uri: mongodb+srv://x }
rules:
  - name: stats
    aggregate:
      source: reviews
      target: products
      match: { _id: product_id }
      set: { count: { $sum: 1 }, rating.avg: { $avg: $rating } }
  - name: info
    copy: { source: parts, target: products, match: { 'parts.$[]': _id }, into: part_info, element: { id: $_id } }
    guard: false
";
    let rules = load_str(text, Format::Yaml).unwrap().config.rules;
    let Pattern::Aggregate(aggregate) = &rules[0].pattern else { panic!() };
    assert_eq!(
        aggregate.set,
        pairs(&[("count", bson!({ "$sum": 1_i32 })), ("rating.avg", bson!({ "$avg": "$rating" }))])
    );
    let Pattern::Copy(copy) = &rules[1].pattern else { panic!() };
    assert_eq!((copy.into.as_deref(), copy.element.clone()), (Some("part_info"), Some(bson!({ "id": "$_id" }))));
    assert!(!copy.once && copy.set.is_empty() && rules[1].guard == Guard::Off);
}

/// One rule for each relationship pattern, as the documentation shows them.
#[test]
fn every_pattern_loads() {
    let config = load_str(include_str!("tests/patterns.yaml"), Format::Yaml).unwrap().config;
    let kinds: Vec<_> = config.rules.iter().map(|rule| (rule.name.as_str(), rule.pattern.key())).collect();
    assert_eq!(
        kinds,
        [
            ("part-names", "copy"),
            ("part-info", "copy"),
            ("product-on-parts", "copy"),
            ("host-address", "copy"),
            ("host-log", "collect"),
            ("latest-reviews", "collect"),
            ("review-stats", "aggregate"),
            ("person-tasks", "collect"),
            ("publisher-in-book", "copy"),
        ]
    );
}

#[test]
fn columns_count_characters_whatever_the_line_ends_and_marks() {
    let error = load_str("\u{feff}x-é: 1\r\nhttp: { é: 1, listen: 5 }\r\nrules: []\r\n", Format::Yaml).unwrap_err();
    let expected = "config.yaml:2:23: expected a string, found an integer\n   2 | http: { é: ***, listen: 5 }\n     |                         ^";
    assert!(error.to_string().ends_with(expected), "{error}");
}

struct Dir(tempfile::TempDir);

impl Dir {
    fn new(files: &[(&str, &str)]) -> Self {
        let dir = Self(tempfile::tempdir().unwrap());
        for (name, text) in files {
            let path = dir.path(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn load(&self, paths: &[&str], environment: &[(&str, &str)]) -> Result<Loaded, String> {
        let paths: Vec<_> = paths.iter().map(|name| self.path(name)).collect();
        let environment: Vec<_> =
            environment.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        load(&paths, &environment)
            .map_err(|error| error.to_string().replace(&format!("{}/", self.0.path().display()), ""))
    }
}

fn rule(name: &str) -> String {
    format!("{{ name: {name}, copy: {{ source: a, target: b, match: {{ x: _id }}, set: {{ y: $y }} }} }}")
}

#[test]
fn files_and_directories_are_layered_in_order() {
    let base =
        format!("mongodb: {{ uri: mongodb://a, database: one }}\nlimits: {{ batches: 7 }}\nrules: [{}]", rule("r1"));
    let second = format!("mongodb: {{ database: two }}\nlimits:\n  # all commented out\nrules: [{}]", rule("r2"));
    let dir = Dir::new(&[
        ("base.yaml", &base),
        ("d/20.json", r#"{"log": {"format": "json"}}"#),
        ("d/10.yml", &second),
        ("d/.hidden.yaml", "no: config"),
        ("d/notes.txt", "no: config"),
        ("d/sub/30.yaml", "no: config"),
        ("d/30.toml", "[http]\nlisten = \"[::1]:1\""),
    ]);
    let config = dir.load(&["base.yaml", "d"], &[("DENORMD__LIMITS__PENDING", "9"), ("PATH", "x")]).unwrap().config;
    let names: Vec<_> = config.rules.iter().map(|rule| rule.name.as_str()).collect();
    assert_eq!(names, ["r1", "r2"]);
    assert_eq!(config.mongodb.database.as_deref(), Some("two"));
    assert_eq!(config.mongodb.uri.expose_secret(), "mongodb://a");
    assert_eq!((config.limits.batches, config.limits.pending, config.limits.batch_keys), (7, 9, 1000));
    assert_eq!((config.http.listen.to_string().as_str(), config.log.format), ("[::1]:1", LogFormat::Json));
}

#[cfg(unix)]
#[test]
fn a_mounted_config_map_is_read_once() {
    let text = format!("mongodb: {{ uri: mongodb://a }}\nrules: [{}]", rule("r1"));
    let dir = Dir::new(&[("..2026/rules.yaml", &text)]);
    std::os::unix::fs::symlink(dir.path("..2026"), dir.path("..data")).unwrap();
    std::os::unix::fs::symlink(dir.path("..data/rules.yaml"), dir.path("rules.yaml")).unwrap();
    assert_eq!(dir.load(&[""], &[]).unwrap().config.rules.len(), 1);
}

#[test]
fn the_environment_gives_single_settings_and_text_stays_text() {
    let dir = Dir::new(&[("a.yaml", "name: from-file\nrules: []")]);
    let environment = [
        ("DENORMD__MONGODB__URI", "mongodb://env"),
        ("DENORMD__MONGODB__DATABASE", "007"),
        ("DENORMD__NAME", "true"),
        ("DENORMD__LIMITS__WRITE_TIMEOUT_SECONDS", "12"),
        ("DENORMD_CONFIG", "not ours"),
    ];
    let config = dir.load(&["a.yaml"], &environment).unwrap().config;
    assert_eq!(config.mongodb.uri.expose_secret(), "mongodb://env");
    assert_eq!((config.name.as_str(), config.mongodb.database.as_deref()), ("true", Some("007")));
    assert_eq!(config.limits.write_timeout, Duration::from_secs(12));
}

#[test]
fn the_uri_comes_from_a_file_beside_the_one_that_names_it() {
    let dir = Dir::new(&[
        ("etc/a.yaml", "mongodb: { uri_file: secret }\nrules: []"),
        ("etc/secret", "  mongodb://u:hunter2@h\n"),
        ("etc/wrong", "u:hunter2@h\n"),
    ]);
    assert_eq!(dir.load(&["etc/a.yaml"], &[]).unwrap().config.mongodb.uri.expose_secret(), "mongodb://u:hunter2@h");
    let secret = dir.path("etc/wrong");
    let error = dir.load(&["etc/a.yaml"], &[("DENORMD__MONGODB__URI_FILE", secret.to_str().unwrap())]).unwrap_err();
    assert_eq!(
        error,
        "environment variable DENORMD__MONGODB__URI_FILE: this is not a MongoDB connection string\n   \
         hint: it begins with mongodb:// or mongodb+srv://"
    );
}

#[test]
fn what_cannot_be_read_says_what_to_do() {
    let dir = Dir::new(&[("a.conf", ""), ("empty/x", ""), ("sub/a.yaml", "")]);
    fs::write(dir.path("latin.yaml"), b"name: \xe4").unwrap();
    for (path, expected) in [
        (
            "none.yaml",
            "cannot read none.yaml: No such file or directory (os error 2)\n   hint: check the path; --config names a file or a directory. Start with `denormd init`, or copy config/shop.yaml",
        ),
        ("latin.yaml", "cannot read latin.yaml: it is not UTF-8\n   hint: save it as UTF-8"),
        ("a.conf", "a.conf: the format of this file is unknown\n   hint: name it .yaml, .yml, .toml or .json"),
        ("empty", "no config: no *.yaml, *.yml, *.toml or *.json in empty"),
    ] {
        assert_eq!(dir.load(&[path], &[]).unwrap_err(), expected);
    }
}

#[test]
fn mistakes_found_later_are_shown_at_their_place_in_the_right_file() {
    let dir = Dir::new(&[
        ("a.yaml", &format!("mongodb: {{ uri: mongodb://a }}\nrules:\n  - {}\n", rule("r1"))),
        ("b.yaml", &format!("rules:\n  - {}\n", rule("r2"))),
    ]);
    let loaded = dir.load(&["a.yaml", "b.yaml"], &[]).unwrap();
    let set = |rule| ConfigPath::rule(rule).key("copy").key("set");
    let error = loaded.report(&[Mistake::new(set(1).key("y"), "two rules own `y`")
        .on_key()
        .related(set(0), "the other is here")
        .hint("choose another path")]);
    let shown = error.to_string().replace(&format!("{}/", dir.0.path().display()), "");
    assert_eq!(
        shown,
        "b.yaml:2:73: two rules own `y`
   2 |   - { name: r2, copy: { source: a, target: b, match: { x: _id }, set: { y: $y } } }
     |                                                                         ^
   a.yaml:3:66: the other is here
      3 |   - { name: r1, copy: { source: a, target: b, match: { x: _id }, set: { y: $y } } }
        |                                                                  ^^^
   hint: choose another path"
    );
    let mistake = &error.mistakes()[0];
    assert_eq!((mistake.place.line, mistake.path.as_str()), (Some(2), "rules[1].copy.set.y"));
    let json = serde_json::to_value(mistake).unwrap();
    assert_eq!((&json["line"], &json["column"], &json["hint"]), (&2.into(), &73.into(), &"choose another path".into()));
    assert_eq!(ConfigPath(vec![Step::Key("a".to_owned()), Step::Index(3)]).to_string(), "a[3]");
}

/// Without a tree, a secret may be on another line than its key, or under a mistyped one.
#[test]
fn no_message_about_a_broken_file_holds_a_token() {
    let cases = [
        (Format::Yaml, "http:\n  token:\n    @s3cret\nrules: []\n"),
        (Format::Yaml, "http:\n  tokn: s3cret: x\nrules: []\n"),
        (Format::Yaml, "http:\n  token: \"abc\n    s3cret\\q\"\nrules: []\n"),
        (Format::Toml, "[http]\ntoken = \"\"\"\ns3cret\\q\"\"\"\n"),
        (Format::Json, "{\"rules\": [], \"http\": {\"token\": \"abc\ns3cret\"}}"),
    ];
    for (format, text) in cases {
        let error = load_str(text, format).unwrap_err().to_string();
        assert!(!error.contains("s3cret"), "{text}\n{error}");
        assert!(error.contains("***") || !error.contains(" | "), "nothing is tested: {error}");
    }
    let rule = load_str("http: {}\nrules:\n  - name: x: y\n", Format::Yaml).unwrap_err().to_string();
    assert!(rule.contains("- name: x: y"), "{rule}");
}

/// A secret may stand on the offending line, in a key, in the part of the file that cannot be parsed.
#[test]
fn no_message_holds_the_password() {
    for (format, text) in [
        (Format::Yaml, "mongodb: mongodb://u:hunter2@h\nrules: []"),
        (Format::Yaml, "mongodb: { uri: 'mongodb://u:hunter2@h', databse: x }\nrules: []"),
        (Format::Yaml, "mongodb: { uri: u:hunter2@h }\nrules: []"),
        (Format::Yaml, "mongodb: { uri: hunter2 }\nrules: []"),
        (Format::Yaml, "mongodb: { url: mongodb://u:hunter2@h }\nrules: []"),
        (Format::Yaml, "mongodb: { url: [u:hunter2@h] }\nrules: []"),
        (Format::Yaml, "mongodb: { mongodb://u:hunter2@h: 1 }\nrules: []"),
        (Format::Yaml, "mongodb:\n  uri: >\n    mongodb://u:x\n    hunter2@h\n  uri_file: x\nrules: []"),
        (Format::Yaml, "mongodb:\n  uri: \"mongodb://u:hun\"ter2hunter2@h\"\nrules: []"),
        (Format::Yaml, "name: mongodb://u:hunter2@h\nrules: []"),
        (Format::Yaml, "log: { format: mongodb://u:hunter2@h }\nrules: []"),
        (Format::Yaml, "http: { listen: mongodb://u:hunter2@h }\nrules: []"),
        (Format::Yaml, "uri: mongodb://u:hunter2@h"),
        (Format::Yaml, "mongodb: {uri: mongodb://u:hunter2@h"),
        (Format::Yaml, "mongodb: { uri: 'mongodb://u:hun?ter2hunter2@h', x: 1 }\nrules: []"),
        (Format::Yaml, "mongodb: { uri: 'mongodb://u:hunter2', x: 1 }\nrules: []"),
        (Format::Yaml, "mongodb: { uri: 'mongodb://h/?tlsCertificateKeyFilePassword=hunter2', x: 1 }\nrules: []"),
        (Format::Yaml, "mongodb:\n  uri: mongodb:/user:x #hunter2@h\nrules: []"),
        (Format::Yaml, "http: { token: hunter2 }\nrules: []"),
        (Format::Yaml, "http: { tokn: hunter2hunter2hunter2 }\nrules: []"),
        (Format::Yaml, "http: { tls: { key: hunter2 } }\nrules: []"),
        (Format::Yaml, "htp: { token: hunter2hunter2hunter2 }\nrules: []"),
        (Format::Yaml, "http:\n  token: \"hunter2\n"),
        (Format::Yaml, "mongodb: { password: hunter2, uri: mongodb://h"),
        (Format::Yaml, "mongodb:\n  uri: \"mongodb:/u:hunter2@h\nrules"),
        (Format::Toml, "[http]\ntoken = hunter2"),
        (Format::Toml, "mongodb.uri = mongodb://u:hunter2@h"),
        (Format::Toml, "mongodb = \"mongodb://u:hunter2@h\""),
        (Format::Toml, "mongodb = { uri = \"mongodb://u:hunter2@h\", uri = 1 }"),
        (Format::Json, r#"{"mongodb": {"uri": "mongodb:\/\/u:hunter2@h", "x": 1}}"#),
        (Format::Json, r#"{"mongodb": {"uri": "mongodb:\/\/u:hunter2@h" "x": 1}}"#),
        (Format::Json, r#"{"mongodb": {"uri": "mongodb:\u002f\u002fu:hunter2@h", "x": 1}}"#),
        (Format::Json, r#"{"uri": "mongodb:\u002f\u002fu:hunter2\u0040h"}"#),
    ] {
        let error = load_str(text, format).unwrap_err();
        assert!(!error.mistakes().is_empty(), "{text}");
        for shown in [error.to_string(), format!("{error:?}"), serde_json::to_string(error.mistakes()).unwrap()] {
            assert!(!shown.contains("hunter2"), "{text}\n{shown}");
        }
    }
    let loaded = load_str(YAML, Format::Yaml).unwrap();
    assert!(!format!("{loaded:?}").contains("hunter2"));
    let at = ConfigPath::default().key("mongodb").key("uri");
    assert!(!loaded.report(&[Mistake::new(at, "no answer")]).to_string().contains("hunter2"));
}

/// A config from the quick start has `uri`, and what deploys it sets `DENORMD__MONGODB__URI_FILE`.
#[test]
fn of_two_settings_that_say_the_same_the_later_layer_holds() {
    let dir = Dir::new(&[
        ("a.yaml", "mongodb: { uri: mongodb://a }\nhttp: { token: 0123456789abcdef }\nrules: []"),
        ("b.yaml", "mongodb: { uri_file: secret }\nrules: []"),
        ("secret", "mongodb://secret\n"),
        ("token", "another token of some length"),
    ]);
    let uri = |files: &[&str], environment: &[(&str, &str)]| {
        dir.load(files, environment).map(|loaded| loaded.config.mongodb.uri.expose_secret().to_owned())
    };
    let secret = dir.path("secret").display().to_string();
    let by_file = [("DENORMD__MONGODB__URI_FILE", secret.as_str())];
    assert_eq!(uri(&["a.yaml"], &by_file).unwrap(), "mongodb://secret", "the environment beats the file");
    assert_eq!(uri(&["b.yaml"], &[("DENORMD__MONGODB__URI", "mongodb://e")]).unwrap(), "mongodb://e");
    assert_eq!(uri(&["a.yaml", "b.yaml"], &[]).unwrap(), "mongodb://secret", "the later file beats the earlier");
    assert_eq!(uri(&["b.yaml", "a.yaml"], &[]).unwrap(), "mongodb://a");
    let both = [by_file[0], ("DENORMD__MONGODB__URI", "mongodb://e")];
    assert!(uri(&["a.yaml"], &both).unwrap_err().contains("both given"), "one layer says one thing");
    let token = dir.path("token").display().to_string();
    let loaded = dir.load(&["a.yaml"], &[("DENORMD__HTTP__TOKEN_FILE", &token)]).unwrap();
    assert_eq!(
        loaded.config.http.token.as_ref().map(ExposeSecret::expose_secret),
        Some("another token of some length")
    );
    let effective = loaded.effective();
    assert!(effective.iter().all(|it| it.setting != "http.token"), "{effective:?}");
}

#[test]
fn a_variable_whose_prefix_is_mistyped_is_reported() {
    let dir = Dir::new(&[("a.yaml", "mongodb: { uri: mongodb://a }\nrules: []")]);
    for (name, meant) in [
        ("DENORMD_MONGODB__URI", "DENORMD__MONGODB__URI"),
        ("DENORMD_MONGODB_URI_FILE", "DENORMD__MONGODB__URI_FILE"),
        ("DENORM__MONGODB__URI", "DENORMD__MONGODB__URI"),
        ("denormd_http__listen", "DENORMD__HTTP__LISTEN"),
    ] {
        let error = dir.load(&["a.yaml"], &[(name, "mongodb://u:hunter2@h")]).unwrap_err();
        assert!(error.contains(name) && error.contains(&format!("did you mean `{meant}`?")), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
    }
    // Variables that Kubernetes creates for a Service, and those with a meaning elsewhere.
    for name in ["DENORMD_SERVICE_HOST", "DENORMD_PORT", "DENORMD_PORT_9464_TCP", "DENORMD_CONFIG", "DENORMD_VERSION"] {
        assert!(dir.load(&["a.yaml"], &[(name, "x")]).is_ok(), "{name}");
    }
}

/// One text of 1 MB, a hundred times by alias, would be 100 MB in each place that keeps the tree.
#[test]
fn aliases_copy_a_bounded_amount_of_text() {
    let long = "x".repeat(1 << 20);
    let list = |aliases: usize| {
        format!("x-a: &a {long}\nx-b: [{}]\nmongodb: {{ uri: mongodb://h }}\nrules: []\n", "*a, ".repeat(aliases))
    };
    assert!(load_str(&list(10), Format::Yaml).is_ok());
    let error = load_str(&list(100), Format::Yaml).unwrap_err();
    assert!(error.to_string().contains("anchors and aliases copy too much text"), "{}", error.mistakes()[0].message);
    let anchors = (0..60).map(|depth| format!("&a{depth} [")).collect::<Vec<_>>().concat();
    let deep = format!("x-a: {anchors}{long}{}\nmongodb: {{ uri: mongodb://h }}\nrules: []\n", "]".repeat(60));
    assert!(load_str(&deep, Format::Yaml).is_err(), "each anchor keeps what is below it");
}

#[cfg(unix)]
#[test]
fn an_endless_file_is_not_read_for_ever() {
    let dir = Dir::new(&[("a.yaml", "mongodb: { uri_file: endless }\nrules: []")]);
    for name in ["endless", "endless.yaml"] {
        std::os::unix::fs::symlink("/dev/zero", dir.path(name)).unwrap();
    }
    for file in ["a.yaml", "endless.yaml"] {
        let error = dir.load(&[file], &[]).unwrap_err();
        assert!(error.contains("it is larger than"), "{error}");
    }
}

fn formats() -> impl Strategy<Value = (Format, &'static str)> {
    prop::sample::select(vec![(Format::Yaml, YAML), (Format::Toml, TOML), (Format::Json, JSON)])
}

proptest! {
    #[test]
    fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200), (format, _) in formats()) {
        let text = String::from_utf8_lossy(&bytes);
        prop_assert!(load_str(&text, format).map_err(|error| error.to_string()).is_err());
    }

    #[test]
    fn likely_garbage_never_panics(
        tokens in prop::collection::vec(prop::sample::select(vec![
            "{", "}", "[", "]", ":", ",", "\n", " ", "  ", "- ", "\"", "'", "a", "rules", "=", "&a ", "*a", "<<", "|", ">", "\t",
            "!!str ", "!x ", "#", "---\n", "?", "1", "1e999", "-", "é", "\u{1F600}", "\r\n", "null", "\\", "://", "@", "$oid", "[[rules]]\n",
        ]), 0..60),
        (format, _) in formats(),
    ) {
        let shown = load_str(&tokens.concat(), format).map_err(|error| error.to_string());
        prop_assert!(shown.is_err());
    }

    /// Characters deleted, doubled or replaced in a valid config.
    #[test]
    fn a_mutated_config_never_panics(
        (format, text) in formats(),
        mutations in prop::collection::vec((any::<prop::sample::Index>(), 0..3_u8, any::<char>()), 1..8),
    ) {
        let mut chars: Vec<char> = text.chars().collect();
        for (index, kind, char) in mutations {
            let at = index.index(chars.len());
            match kind {
                0 => { chars.remove(at); }
                1 => chars.insert(at, char),
                _ => chars[at] = char,
            }
        }
        let text: String = chars.into_iter().collect();
        if let Err(error) = load_str(&text, format) {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}

#[test]
fn deep_nesting_and_alias_bombs_are_refused() {
    let bomb: Vec<_> = (1..40).map(|n| format!("x-{n}: &a{n} [*a{0}, *a{0}, *a{0}]", n - 1)).collect();
    for (format, text) in [
        (Format::Yaml, "[".repeat(100_000)),
        (Format::Yaml, "- ".repeat(5_000)),
        (Format::Yaml, format!("x-0: &a0 [1, 2]\n{}", bomb.join("\n"))),
        (Format::Yaml, "x-a: &a [*a]".to_owned()),
        (Format::Json, "[".repeat(100_000)),
        (Format::Json, format!("{}{}", "[".repeat(120), "]".repeat(120))),
        (Format::Toml, format!("a = {}{}", "[".repeat(100_000), "]".repeat(100_000))),
    ] {
        assert!(!load_str(&text, format).unwrap_err().to_string().is_empty());
    }
}

/// Sections with readers of their own could have other defaults than the table of keys, which is what the documentation says.
#[test]
fn a_default_that_is_given_changes_nothing() {
    let config = |settings: &str| {
        let text = format!(
            "mongodb: {{ uri: mongodb://h, database: d }}\nrules: [{{ name: r, copy: {{ source: a, target: b, match: {{ a: _id }}, set: {{ x: $x }} }} }}]\n{settings}"
        );
        load_str(&text, Format::Yaml).unwrap().config
    };
    let all = |config: &Config| {
        let Config { name, mongodb, rules: _, http, state, log, limits, lease, undo, advise } = config;
        format!(
            "{name:?} {:?} {http:?} {state:?} {log:?} {limits:?} {lease:?} {undo:?} {advise:?}",
            mongodb.allow_sharded
        )
    };
    let mut sections: BTreeMap<&str, String> = BTreeMap::new();
    let settings: Vec<_> = crate::config::keys::settings().collect();
    let given = settings.iter().filter(|(setting, key)| !key.default.is_empty() && !setting.starts_with("mongodb."));
    for (setting, key) in given {
        match setting.split_once('.') {
            Some((section, _)) => {
                sections.entry(section).or_default().push_str(&format!("  {}: {}\n", key.name, key.default));
            }
            None => drop(sections.insert("name", String::new())),
        }
    }
    assert!(sections.len() > 6, "{sections:?}");
    let text = sections.iter().map(|(section, keys)| match *section {
        "name" => "name: default\n".to_owned(),
        section => format!("{section}:\n{keys}"),
    });
    assert_eq!(all(&config(&text.collect::<String>())), all(&config("")));
}

#[test]
fn an_objective_is_a_span_and_anything_else_is_refused() {
    let with = |max_lag: &str| {
        let rule = format!(
            "mongodb: {{ uri: mongodb://h, database: d }}\nrules:\n  - {{ name: r, max_lag: {max_lag}, copy: {{ source: a, target: b, match: {{ a: _id }}, set: {{ x: $x }} }} }}\n"
        );
        load_str(&rule, Format::Yaml).map(|loaded| loaded.config.rules[0].max_lag)
    };
    for (text, seconds) in [("5s", 5), ("2m", 120), ("1h", 3600), ("\"7\"", 7), ("9", 9)] {
        assert_eq!(with(text).unwrap(), std::time::Duration::from_secs(seconds), "{text}");
    }
    for wrong in ["0s", "soon", "5 s", "-1", "1.5s", "400d", "true"] {
        let error = with(wrong).unwrap_err().to_string();
        assert!(error.contains("a number and s, m, h or d"), "{wrong}: {error}");
    }
}
