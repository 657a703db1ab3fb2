//! `denormd diff`: the meaning of a change of the config.

use std::{
    collections::BTreeSet,
    io::Write,
    process::{Command, Stdio},
};

use bson::doc;
use serde_json::Value;

use crate::support::{
    daemon::{config, until},
    process::{Printed, Program},
};

const OLD: &str = "
mongodb: { uri: 'mongodb://u:secret@db', database: shop }
limits: { batches: 2 }
rules:
  - { name: part-names, copy: { source: parts, target: products, match: { 'parts.$[].id': _id }, set: { 'parts.$[].name': $name, 'parts.$[].price': $price } } }
  - { name: host, guard: audit, copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip } } }
  - { name: counts, aggregate: { source: reviews, target: products, match: { _id: product }, set: { reviews: { $sum: 1 } } } }
  - { name: labels, shadow: true, copy: { source: hosts, target: logs, match: { host: _id }, set: { label: $label } } }
  - { name: same, copy: { source: hosts, target: logs, match: { host: _id }, set: { rack: $rack } } }
";

const NEW: &str = "
# The same in other words.
rules:
  - name: same
    copy: { target: logs, source: { collection: shop.hosts }, match: { host: _id }, on_missing: unset, set: { rack: $rack } }
  - name: host-address
    guard: watch
    copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip } }
  - name: part-names
    copy:
      source: { collection: parts, where: { hidden: { $ne: true } } }
      target: products
      match: { 'parts.$[].id': _id }
      set: { 'parts.$[].name': { $ifNull: [$title, $name] } }
      on_missing: 'null'
  - name: prices
    backfill: manual
    copy: { source: prices, target: products, match: { 'parts.$[].id': part }, set: { 'parts.$[].price': $price } }
  - { name: newest, collect: { source: reviews, target: products, match: { _id: product }, into: newest, element: { id: $_id, text: $text }, sort: { at: -1 }, slice: 10 } }
mongodb: { uri: 'mongodb://u:other@db', database: shop }
limits: { batches: 5 }
http: { listen: '127.0.0.1:9999' }
";

const TEXT: &str = r#"2 rules added, 1 changed, 1 renamed, 2 retired; 4 backfills; 4 new commands; 3 changed settings

rules
  renamed `host` to `host-address`: `shop.hosts` to `shop.logs`
    `guard`: `audit` becomes `watch`
  changed `part-names`: `shop.parts` to `shop.products`
    `source.where`: now `{"hidden":{"$ne":true}}`
    `on_missing`: `unset` becomes `null`
    `set."parts.$[].name"`: `$name` becomes `{"$ifNull":["$title","$name"]}`
    `set."parts.$[].price"`: no longer `$price`
    no longer owns `parts.$[].price` of `shop.products`: `prices` owns it, so `denormd prune` leaves it alone
  added `prices`: `shop.prices` to `shop.products`
    owns `parts.$[].price`, which `part-names` owned
  added `newest`: `shop.reviews` to `shop.products`
    owns `newest`
  retired `counts`: `shop.reviews` to `shop.products`
    no longer owns `reviews` of `shop.products`: its values stay until `denormd prune counts`
  retired `labels`: `shop.hosts` to `shop.logs` (in shadow: writes nothing)
    no longer owns `label` of `shop.logs`: it wrote nothing there

backfills
  `host-address`: the daemon knows a rule by its name
  `part-names`: its definition has changed: `source.where`, `on_missing`, `set."parts.$[].name"`, `set."parts.$[].price"`
  `prices`: the rule is new, and waits for `denormd backfill --rule prices`
  `newest`: the rule is new

needed first, unless it is there: `denormd plan --apply` runs these commands
  db.getSiblingDB("shop").runCommand({ collMod: "prices", changeStreamPreAndPostImages: { enabled: true } })
  db.getSiblingDB("shop").getCollection("prices").createIndex({ "part": 1 })
  db.getSiblingDB("shop").getCollection("reviews").createIndex({ "product": 1, "at": -1, "_id": 1 })
  db.getSiblingDB("shop").getCollection("products").createIndex({ "newest.id": 1 })

no longer needed by these rules; denormd removes no index, and others may use it
  db.getSiblingDB("shop").runCommand({ collMod: "reviews", changeStreamPreAndPostImages: { enabled: true } })

further privileges: `denormd role` prints the whole role
  { resource: { db: "shop", collection: "prices" }, actions: ["listIndexes"] }

settings
  `mongodb.uri`: another value, which is hidden
  `http.listen`: `127.0.0.1:9464` becomes `127.0.0.1:9999`, from the next start of the daemon
  `limits.batches`: `2` becomes `5`

If `mongodb.uri` leads to another cluster, every rule is new there.

A renamed rule is a new rule: the pause of the old name ends, and its dead letters are deleted.

Before the first write of each of these rules, the daemon compares it with existing data. It blocks a rule that would remove a value that denormd did not write, begin to delete documents or array elements, overwrite more than 1% of such values, or remove a value from more than 1% of the targets that hold one. `denormd plan` with a server says what the rules would do.
"#;

/// A folder with configs to compare.
struct Files(tempfile::TempDir);

impl Files {
    fn new(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        Self(folder)
    }

    fn diff(&self, arguments: &[&str]) -> Printed {
        self.diff_with("", arguments)
    }

    fn diff_with(&self, input: &str, arguments: &[&str]) -> Printed {
        let mut command = Command::new(env!("CARGO_BIN_EXE_denormd"));
        command.arg("diff").args(arguments).current_dir(self.0.path());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Printed { code: output.status.code().unwrap(), out: text(output.stdout), err: text(output.stderr), peak: 0 }
    }

    /// The difference between two lists of rules.
    fn rules(old: &str, new: &str) -> Value {
        let whole = |rules: &str| format!("mongodb: {{ uri: mongodb://db, database: shop }}\nrules:\n{rules}\n");
        let files = Self::new(&[("old.yaml", &whole(old)), ("new.yaml", &whole(new))]);
        files.diff(&["old.yaml", "new.yaml", "--output", "json"]).exits(0).json()
    }
}

#[test]
fn a_change_is_told_by_what_it_means() {
    let files = Files::new(&[("old.yaml", OLD), ("new.yaml", NEW)]);
    let told = files.diff(&["old.yaml", "new.yaml"]).exits(0);
    assert_eq!(told.out, TEXT);
    assert_eq!(told.err, "");
}

#[test]
fn another_text_of_the_same_config_is_no_change() {
    let rules = |config: &str| config.split_once("rules:").unwrap().1.to_owned();
    let other =
        "mongodb: { database: shop, uri: 'mongodb://u:secret@db' }\nlimits:\n  batches: 2\n  pending: 100000\nrules:";
    let files = Files::new(&[("old.yaml", OLD), ("new.yaml", &format!("{other}{}", rules(OLD)))]);
    assert_eq!(files.diff(&["old.yaml", "new.yaml"]).exits(0).out, "both configs mean the same\n");
    let json = files.diff(&["old.yaml", "new.yaml", "--output", "json"]).exits(0).json();
    assert_eq!(json["changed"], false);
}

#[test]
fn markdown_is_for_a_comment_and_has_nothing_of_the_configs_own() {
    let files = Files::new(&[("old.yaml", OLD), ("new.yaml", NEW)]);
    let told = files.diff(&["old.yaml", "new.yaml", "--markdown"]).exits(0).out;
    for part in [
        "### denormd: 2 rules added, ",
        "\n**rules**\n\n- renamed `host` to `host-address`: `shop.hosts` to `shop.logs`\n  - `guard`: `audit` becomes `watch`\n",
        "`denormd plan --apply` runs these commands**\n\n```js\ndb.getSiblingDB(\"shop\").runCommand(",
        "\"newest.id\": 1 })\n```\n",
    ] {
        assert!(told.contains(part), "{part}: {told}");
    }
    // Backquotes and line ends of the config stay in their code span.
    let rule = |value: &str| {
        format!(
            "mongodb: {{ uri: mongodb://db, database: shop }}\nrules:\n  - {{ name: r, copy: {{ source: s, target: t, match: {{ r: _id }}, set: {{ v: {value} }} }} }}\n"
        )
    };
    let files = Files::new(&[("old.yaml", &rule("$v")), ("new.yaml", &rule(r#"{ $literal: "``@all\n# x" }"#))]);
    let told = files.diff(&["old.yaml", "new.yaml", "--markdown"]).exits(0).out;
    assert!(told.contains(r#"`set.v`: `$v` becomes ```{"$literal":"``@all\n# x"}```"#), "{told}");
    let both = files.diff(&["old.yaml", "new.yaml", "--markdown", "--output", "json"]).exits(2);
    assert!(both.err.contains("cannot be used with"), "{}", both.err);
}

const RULE: &str = "  - { name: r, copy: { source: s, target: t, match: { r: _id }, set: { v: $v } } }";

#[test]
fn what_affects_the_values_is_told_from_what_does_not() {
    for (was, is, key, backfills) in [
        ("{ r: _id }", "{ r: _id, q: p }", "match.q", true),
        ("set:", "sort: { n: -1 }, set:", "sort.n", true),
        ("set:", "once: true, set:", "once", true),
        ("set:", "key_type: objectId, set:", "key_type", true),
        ("target: t", "target: { collection: t, where: { a: 1 } }", "target.where", true),
        ("source: s", "source: u", "source.collection", true),
        ("{ v: $v }", "{ v: $w }", "set.v", true),
        ("copy:", "shadow: true, copy:", "shadow", true),
        ("copy:", "adopt: true, copy:", "adopt", false),
        ("copy:", "allow_scan: true, copy:", "allow_scan", false),
        ("copy:", "max_lag: 5m, copy:", "max_lag", false),
        ("copy:", "on_drift: report, copy:", "on_drift", false),
        ("copy:", "backfill: manual, copy:", "backfill", false),
    ] {
        let told = Files::rules(RULE, &RULE.replace(was, is));
        let change = &told["rules"][0];
        assert_eq!((&change["change"], &change["keys"][0]["key"]), (&"changed".into(), &key.into()), "{told:#}");
        assert_eq!(told["backfills"].as_array().unwrap().len(), usize::from(backfills), "{told:#}");
    }
    // The order of the entries of `match` is a part of the definition.
    let two = RULE.replace("{ r: _id }", "{ r: _id, q: p }");
    let told = Files::rules(&two, &RULE.replace("{ r: _id }", "{ q: p, r: _id }"));
    assert_eq!(told["rules"][0]["keys"][0]["key"], "the order of its keys, or the type of a number", "{told:#}");
    assert_eq!(told["backfills"].as_array().unwrap().len(), 1, "{told:#}");
    // An aggregate in place of a copy.
    let sum = "  - { name: r, aggregate: { source: s, target: t, match: { r: p }, set: { v: { $sum: 1 } } } }";
    let told = Files::rules(RULE, sum);
    let kind = told["rules"][0]["keys"].as_array().unwrap().iter().find(|key| key["key"] == "kind").unwrap();
    assert_eq!((&kind["old"], &kind["new"]), (&"copy".into(), &"aggregate".into()));
}

#[test]
fn paths_that_a_rule_leaves_have_a_fate() {
    let fate = |old: &str, new: &str| Files::rules(old, new)["rules"][0]["leaves"][0].clone();
    let moved = RULE.replace("target: t", "target: u");
    assert_eq!(fate(RULE, &moved), serde_json::json!({"collection": "shop.t", "path": "v", "values": "stay"}));
    // A part of the path has another owner: `prune` would not remove it.
    let below = "  - { name: q, copy: { source: s, target: t, match: { q: _id }, set: { v.w: $w } } }";
    let taken = serde_json::json!({"collection": "shop.t", "path": "v", "values": "taken_over", "by": "q"});
    let told = Files::rules(RULE, below);
    assert_eq!(told["rules"][1]["leaves"][0], taken, "{told:#}");
    // Not the fields of the groups, which the application may have beside them.
    let groups = "  - { name: g, aggregate: { source: s, target: t, match: { _id: r }, by: { emoji: $emoji }, into: reactions, set: { count: { $sum: 1 } } } }";
    let told = Files::rules(&format!("{RULE}\n{groups}"), RULE);
    let stay = serde_json::json!([{"collection": "shop.t", "path": "reactions", "values": "stay"}]);
    assert_eq!(told["rules"][0]["leaves"], stay, "{told:#}");
    let once = RULE.replace("{ v: $v }", "{ v: $v }, once: true");
    assert_eq!(fate(&once, &RULE.replace("{ v: $v }", "{ w: $v }"))["values"], "left_to_the_application");
    // Another rule that writes the path in other documents takes nothing over.
    let of = |name: &str| {
        RULE.replace("name: r,", &format!("name: {name},"))
            .replace("target: t", &format!("target: {{ collection: t, where: {{ kind: {name} }} }}"))
    };
    let told = Files::rules(&format!("{}\n{}", of("post"), of("page")), &of("page"));
    let left = told["rules"].as_array().unwrap().iter().find(|rule| rule["rule"] == "post").unwrap();
    assert_eq!(left["leaves"][0]["values"], "stay", "{told:#}");
    let shadow = RULE.replace("copy:", "shadow: true, copy:");
    let told = fate(&shadow, &RULE.replace("{ v: $v }", "{ w: $v }"));
    assert_eq!(told["values"], "not_written");
}

/// An index that another one begins with is not asked for, whichever config needs that one.
#[test]
fn only_indexes_that_no_earlier_one_serves_are_new() {
    let newest = "  - { name: newest, collect: { source: c, target: p, match: { _id: p }, into: newest, element: { id: $_id }, sort: { at: -1 }, slice: 3 } }";
    let count = "  - { name: n, aggregate: { source: c, target: p, match: { _id: p }, set: { n: { $sum: 1 } } } }";
    let needs = |old: &str, new: &str| {
        let told = Files::rules(old, new);
        told["needs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|need| need["command"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let images =
        "db.getSiblingDB(\"shop\").runCommand({ collMod: \"c\", changeStreamPreAndPostImages: { enabled: true } })";
    assert_eq!(needs(newest, &format!("{newest}\n{count}")), [images]);
    let longer = "db.getSiblingDB(\"shop\").getCollection(\"c\").createIndex({ \"p\": 1, \"at\": -1, \"_id\": 1 })";
    assert_eq!(needs(count, &format!("{newest}\n{count}"))[0], longer);
}

#[test]
fn another_name_is_another_deployment() {
    let whole = |more: &str| format!("mongodb: {{ uri: mongodb://db, database: shop }}\n{more}\nrules:\n{RULE}\n");
    let files = Files::new(&[("old.yaml", &whole("")), ("new.yaml", &whole("name: other"))]);
    let told = files.diff(&["old.yaml", "new.yaml"]).exits(0).out;
    for part in [
        "no rule changes; 1 backfill; 1 changed setting\n",
        "  `r`: the deployment has no state yet\n",
        "  `name`: `default` becomes `other`\n",
        "A running daemon refuses this config until it is restarted",
        "Under another one the daemon knows none of these rules",
    ] {
        assert!(told.contains(part), "{part}: {told}");
    }
}

#[test]
fn a_config_comes_from_files_folders_or_standard_input() {
    let [first, second] = ["part-names", "host"].map(|name| {
        let line = OLD.lines().find(|line| line.contains(&format!("name: {name},"))).unwrap();
        format!("rules:\n{line}\n")
    });
    let settings = "mongodb: { uri: 'mongodb://db', database: shop }\nrules: []\n";
    let files = Files::new(&[("settings.yaml", settings), ("first.yaml", &first), ("second.yaml", &second)]);
    let told = files.diff(&["settings.yaml,first.yaml", "settings.yaml,second.yaml"]).exits(0).out;
    assert!(told.starts_with("1 rule added, 1 retired; 1 backfill; "), "{told}");
    assert_eq!(files.diff(&[".", "settings.yaml,first.yaml,second.yaml"]).exits(0).out, "both configs mean the same\n");
    let whole = format!("{}{}", settings.replace("rules: []\n", ""), first);
    let told = files.diff_with(&whole, &["-", "settings.yaml,first.yaml"]).exits(0);
    assert_eq!(told.out, "both configs mean the same\n");
    // No config yet, as of `git show` of a file that is not there.
    let told = files.diff_with("", &["-", "settings.yaml,first.yaml"]).exits(0);
    assert!(told.out.starts_with("1 rule added; 1 backfill; 1 new command\n"), "{}", told.out);
    let toml = "rules = []\n[mongodb]\nuri = \"mongodb://db\"\ndatabase = \"shop\"\n";
    std::fs::write(files.0.path().join("new.toml"), toml).unwrap();
    assert_eq!(files.diff_with(toml, &["-", "new.toml"]).exits(0).out, "both configs mean the same\n");
}

#[test]
fn a_config_that_cannot_be_used_is_named_with_its_place() {
    let wrong = OLD.replace("part-names, copy", "part-names, cpy");
    let circle = "mongodb: { uri: mongodb://db, database: shop }\nrules:\n\
                  \x20 - { name: a, copy: { source: x, target: y, match: { r: _id }, set: { v: $w } } }\n\
                  \x20 - { name: b, copy: { source: y, target: x, match: { r: _id }, set: { w: $v } } }\n";
    let files = Files::new(&[("good.yaml", NEW), ("wrong.yaml", &wrong), ("circle.yaml", circle)]);
    let told = files.diff(&["wrong.yaml", "good.yaml"]).exits(2);
    for part in ["the old config cannot be used", "wrong.yaml:5:25: unknown key `cpy`", "did you mean `copy`?"] {
        assert!(told.err.contains(part), "{part}: {}", told.err);
    }
    let told = files.diff(&["good.yaml", "circle.yaml"]).exits(2);
    for part in ["the new config cannot be used", "a writes y.v, which b reads"] {
        assert!(told.err.contains(part), "{part}: {}", told.err);
    }
    let told = files.diff(&["wrong.yaml", "circle.yaml"]).exits(2);
    for part in ["unknown key `cpy`", "a writes y.v, which b reads"] {
        assert!(told.err.contains(part), "{part}: {}", told.err);
    }
    let told = files.diff_with(&wrong, &["-", "good.yaml"]).exits(2);
    assert!(told.err.contains("standard input:5:25: unknown key `cpy`"), "{}", told.err);
    let told = files.diff(&["absent.yaml", "good.yaml"]).exits(2);
    assert!(told.err.contains("cannot read absent.yaml"), "{}", told.err);
    let told = files.diff(&["-", "-"]).exits(2);
    assert!(told.err.contains("OLD and NEW are both standard input"), "{}", told.err);
    assert!(!told.out.contains("secret") && !told.err.contains("secret"), "{told:?}");
}

/// The daemon decides the same from its state, which holds what `diff` reads from the old config.
#[tokio::test(flavor = "multi_thread")]
async fn the_daemon_backfills_the_rules_that_diff_names() {
    let test = denormd_fixture::database().await;
    let db = test.database();
    db.collection("hosts").insert_one(doc! {"_id": 1, "ip": "10.0.0.1", "name": "a", "rack": 3}).await.unwrap();
    db.collection("logs").insert_one(doc! {"_id": 1, "host": 1}).await.unwrap();
    let rule = |name: &str, set: &str, more: &str| {
        format!(
            "  - {{ name: {name}, allow_scan: true, {more} copy: {{ source: hosts, target: logs, match: {{ host: _id }}, set: {{ {set} }} }} }}\n"
        )
    };
    let old = config(
        &test,
        &[
            rule("kept", "a: $ip", ""),
            rule("changed", "b: $ip", ""),
            rule("was", "c: $ip", ""),
            rule("gone", "d: $ip", ""),
            rule("beside", "e: $ip", ""),
        ]
        .concat(),
    );
    let new = config(
        &test,
        &[
            rule("beside", "e: $ip", "guard: watch, max_lag: 2m,"),
            rule("kept", "a: $ip", ""),
            rule("changed", "b: $name", ""),
            rule("is", "c: $ip", ""),
            rule("added", "f: $rack", ""),
        ]
        .concat(),
    );
    let program = Program::new(&old);
    let daemon = program.daemon();
    program.backfilled(&test, 5).await;
    daemon.stop().await;
    let files = Files::new(&[("old.yaml", &old), ("new.yaml", &new)]);
    let told = files.diff(&["old.yaml", "new.yaml", "--output", "json"]).exits(0).json();
    let named: BTreeSet<String> =
        told["backfills"].as_array().unwrap().iter().map(|one| one["rule"].as_str().unwrap().to_owned()).collect();
    let before = program.log().len();
    program.write(&new);
    let daemon = program.daemon();
    let begun = || program.log()[before..].contains("following changes").then_some(());
    until("the new rules run", async || begun()).await;
    // The decisions are logged before that.
    let log = program.log();
    let lines = log[before..].lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let decided = lines.filter(|line| line["state"] == "backfilling");
    let decided: BTreeSet<String> = decided.map(|line| line["rule"].as_str().unwrap().to_owned()).collect();
    assert_eq!(decided, named);
    assert_eq!(named.iter().collect::<Vec<_>>(), ["added", "changed", "is"]);
    daemon.stop().await;
}

/// The example of the page.
#[test]
fn the_page_has_what_is_printed() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let old = std::fs::read_to_string(root.join("config/shop.yaml")).unwrap();
    let counts = "
  - name: messages
    aggregate: { source: logmsg, target: hosts, match: { _id: host }, set: { messages: { $sum: 1 } } }
";
    let new = old.replace(", price: $price }", " }").replace(", hostname: $name }", " }") + counts;
    let files = Files::new(&[("shop.yaml", &new)]);
    let told = files.diff_with(&old, &["-", "shop.yaml"]).exits(0).out;
    let page = std::fs::read_to_string(root.join("docs/commands.md")).unwrap();
    assert!(page.contains(&format!("$ git show main:shop.yaml | denormd diff - shop.yaml\n{told}```\n")), "{told}");
}

/// `prune` and the check of existing data have only the definition that was recorded.
#[test]
fn a_definition_names_the_paths_that_its_rule_owns() {
    let groups = "aggregate: { source: s, target: t, match: { _id: r }, by: { emoji: $emoji }, into: reactions, set: { count: { $sum: 1 } } }";
    for (rule, paths) in [
        (
            "copy: { source: s, target: t, match: { 'a.$[].r': _id }, set: { 'a.$[].v': $v, 'a.$[].w': $w } }",
            "a.$[].v a.$[].w",
        ),
        ("copy: { source: s, target: t, match: { 'a.$[]': _id }, into: b, element: $v }", "b"),
        ("collect: { source: s, target: t, match: { _id: r }, into: c, element: $v }", "c"),
        ("aggregate: { source: s, target: t, match: { _id: r }, set: { n: { $sum: 1 } } }", "n"),
        (groups, "reactions"),
        (&*groups.replace("into:", "as: object, into:"), "reactions"),
    ] {
        let text = format!("mongodb: {{ uri: mongodb://db, database: d }}\nrules:\n  - {{ name: r, {rule} }}\n");
        let config = denormd_rules::config::load_str(&text, denormd_rules::config::Format::Yaml).unwrap().config;
        let plan = denormd_rules::plan::compile(&config, None).unwrap();
        let of = |paths: Vec<String>| paths.join(" ");
        assert_eq!(of(plan.rules[0].owned().into_iter().map(ToString::to_string).collect()), paths);
        let named = denormd_rules::plan::owned_paths(&plan.rules[0].definition);
        assert_eq!(of(named.iter().map(ToString::to_string).collect()), paths, "{rule}");
    }
}
