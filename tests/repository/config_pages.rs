//! The schema, the reference and the examples, compared with the program's parser.

use std::{
    fs,
    path::{Path, PathBuf},
};

use denormd_rules::config::{
    Format,
    keys::{Form, Key, ROOT},
    load_str,
    schema::{reference, schema},
};
use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

/// Every example under `config/`, as parsed by the program.
fn examples() -> Vec<(String, Value)> {
    let folders = [root().join("config"), root().join("config/apps")];
    let files = folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()));
    let mut files: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|e| e == "yaml")).collect();
    files.sort();
    assert!(files.len() > 17);
    let one = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap();
        load_str(&text, Format::Yaml).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        (path.strip_prefix(root().join("config")).unwrap().to_string_lossy().into_owned(), yaml(&text))
    };
    files.into_iter().map(one).collect()
}

/// Parses YAML by another parser than the program's own.
fn yaml(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap()
}

#[test]
fn every_example_fits_the_schema() {
    let validator = jsonschema::validator_for(&schema()).unwrap();
    for (name, example) in examples() {
        let errors: Vec<String> =
            validator.iter_errors(&example).map(|e| format!("{}: {e}", e.instance_path())).collect();
        assert_eq!(errors, Vec::<String>::new(), "{name}");
    }
    for wrong in [
        "rules: [{ name: a }]",
        "rules: [{ name: a, copy: { source: s, target: t, match: { r: _id } } }]",
        "rules: [{ name: a, copy: { sorce: s, target: t, match: { r: _id }, set: { v: $v } } }]",
        "rules: [{ name: a, guard: maybe, copy: { source: s, target: t, match: { r: _id }, set: { v: $v } } }]",
        "limits: { batches: 0 }",
        "unknown: 1",
    ] {
        assert!(!validator.is_valid(&yaml(wrong)), "{wrong}");
    }
}

#[test]
fn every_example_names_its_schema_for_editors() {
    for (name, _) in examples() {
        let up = "../".repeat(name.matches('/').count());
        let modeline = format!("# yaml-language-server: $schema={up}denormd.schema.json");
        let text = fs::read_to_string(root().join("config").join(&name)).unwrap();
        assert_eq!(text.lines().next(), Some(modeline.as_str()), "{name}");
    }
}

/// Kustomize reads no file above its own folder, so the rules are there a second time.
#[test]
fn the_example_of_kubernetes_has_the_rules_of_the_shop() {
    let rules = |path: &str| {
        let text = fs::read_to_string(root().join(path)).unwrap();
        text.lines().filter(|line| !line.starts_with("# yaml-language-server:")).collect::<Vec<_>>().join("\n")
    };
    assert_eq!(rules("deploy/kubernetes/example/shop/shop.yaml"), rules("config/shop.yaml"), "copy config/shop.yaml");
}

#[test]
fn the_pages_made_from_the_keys_are_up_to_date() {
    let written = |path: &str| fs::read_to_string(root().join(path)).unwrap_or_default();
    let again = "write it anew: make pages";
    assert_eq!(written("docs/reference.md"), reference(), "docs/reference.md: {again}");
    assert_eq!(
        written("config/denormd.schema.json"),
        format!("{:#}\n", schema()),
        "config/denormd.schema.json: {again}"
    );
}

/// A config with one key set to a value, and all required keys.
fn config_with(way: &[&str], value: &str) -> String {
    let copy = "source: s, target: t, match: { r: _id }";
    let pattern = |kind: &str, more: &str| match kind {
        "copy" if way.last() == Some(&"into") => format!("copy: {{ {copy}, element: $v, {more} }}"),
        "copy" if way.last() == Some(&"element") => format!("copy: {{ {copy}, into: a, {more} }}"),
        "copy" if way.last() == Some(&"set") => format!("copy: {{ {copy}, {more} }}"),
        "copy" => format!("copy: {{ {copy}, set: {{ v: $v }}, {more} }}"),
        "collect" => format!("collect: {{ {copy}, into: a, element: $_id, {more} }}"),
        _ if ["as", "slice"].contains(way.last().unwrap_or(&"")) => {
            format!("aggregate: {{ {copy}, by: {{ v: $v }}, into: a, set: {{ n: {{ $sum: 1 }} }}, {more} }}")
        }
        _ => format!("aggregate: {{ {copy}, set: {{ n: {{ $sum: 1 }} }}, {more} }}"),
    };
    let uri = "uri: mongodb://localhost";
    match way {
        ["rules", kind @ ("copy" | "collect" | "aggregate"), key] => {
            // The depth of a tree needs one.
            let tree = if *key == "max_depth" { ", recursive: true" } else { "" };
            let rule = pattern(kind, &format!("{key}: {value}{tree}"));
            // Otherwise a required key would occur twice.
            let rule = rule.replacen(
                &format!("{key}: "),
                "x-first: ",
                usize::from(rule.matches(&format!("{key}: ")).count() > 1),
            );
            format!("mongodb: {{ {uri} }}\nrules:\n  - {{ name: a, {rule} }}\n")
        }
        ["rules", key] => {
            format!(
                "mongodb: {{ {uri} }}\nrules:\n  - {{ name: a, {key}: {value}, {} }}\n",
                pattern("copy", "once: false")
            )
        }
        ["mongodb", key] => format!("mongodb: {{ {uri}, {key}: {value} }}\nrules: []\n"),
        // Requests can only need a token that exists.
        ["http", "require_token"] => {
            let token = "0123456789abcdef0123456789abcdef";
            format!("mongodb: {{ {uri} }}\nrules: []\nhttp: {{ require_token: {value}, token: {token} }}\n")
        }
        [section, key] => format!("mongodb: {{ {uri} }}\nrules: []\n{section}: {{ {key}: {value} }}\n"),
        _ => format!("mongodb: {{ {uri} }}\nrules: []\n{}: {value}\n", way.join(".")),
    }
}

/// The parser accepts the words and bounds in the schema: each is tried, and one beyond.
#[test]
fn words_and_bounds_of_the_schema_are_the_readers() {
    let mut tried = 0;
    let mut look = |way: &[&str], key: &Key| {
        let (right, wrong): (Vec<String>, Vec<String>) = match key.form {
            Form::Choice(words) => {
                let quoted = words.iter().map(|(word, _)| format!("\"{word}\""));
                (quoted.collect(), vec!["\"surely not\"".to_owned(), "5".to_owned()])
            }
            Form::Flag => (vec!["true".to_owned(), "false".to_owned()], vec!["\"yes\"".to_owned()]),
            Form::Count => (vec!["1".to_owned()], vec!["0".to_owned(), "-1".to_owned(), "x".to_owned()]),
            Form::Seconds(least) => {
                let beyond = vec![(least - 1).to_string(), "86401".to_owned()];
                (vec![least.to_string(), "86400".to_owned()], beyond)
            }
            Form::Slice => (vec!["-5".to_owned(), "5".to_owned()], vec!["0".to_owned()]),
            _ => return,
        };
        for value in &right {
            let text = config_with(way, value);
            load_str(&text, Format::Yaml).unwrap_or_else(|error| panic!("{way:?} {value}: {error}\n{text}"));
        }
        for value in &wrong {
            assert!(load_str(&config_with(way, value), Format::Yaml).is_err(), "{way:?} {value}");
        }
        if !key.default.is_empty() {
            load_str(&config_with(way, key.default), Format::Yaml).unwrap();
        }
        tried += 1;
    };
    every(&mut Vec::new(), ROOT, &mut look);
    assert!(tried > 20, "{tried}");
}

fn every(way: &mut Vec<&'static str>, keys: &'static [Key], look: &mut dyn FnMut(&[&str], &Key)) {
    for key in keys {
        way.push(key.name);
        match key.form {
            Form::Keys(below) | Form::List(below) => every(way, below, look),
            _ => look(way, key),
        }
        way.pop();
    }
}
