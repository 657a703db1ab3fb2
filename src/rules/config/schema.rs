//! The config's JSON Schema and its reference in Markdown, both generated from [`super::keys`].

use serde_json::{Map, Value, json};

use super::{
    keys::{DATE_TRUNC, Form, Key, ROOT, SIDE},
    matrix,
};

/// The URI of the schema's draft.
const DRAFT: &str = "http://json-schema.org/draft-07/schema#";

/// The JSON Schema of a config file. Each of several layered files conforms to it, because only keys within a rule are
/// required.
#[must_use]
pub fn schema() -> Value {
    let mut root = mapping(ROOT, &["rules"]);
    root["$schema"] = DRAFT.into();
    root["title"] = "denormd config".into();
    // These keys are for anchors and editors.
    root["patternProperties"] = json!({"^x-": {}});
    root["properties"]["$schema"] = json!({"type": "string"});
    let rule = &mut root["properties"]["rules"]["items"];
    rule["oneOf"] = json!([{"required": ["copy"]}, {"required": ["collect"]}, {"required": ["aggregate"]}]);
    let copy = &mut rule["properties"]["copy"];
    copy["oneOf"] = json!([{"required": ["set"]}, {"required": ["into", "element"]}]);
    root
}

fn mapping(keys: &[Key], optional: &[&str]) -> Value {
    let properties: Map<String, Value> = keys.iter().map(|key| (key.name.to_owned(), property(key))).collect();
    let required: Vec<&str> =
        keys.iter().filter(|key| key.required && !optional.contains(&key.name)).map(|key| key.name).collect();
    let mut mapping = json!({"type": "object", "properties": properties, "additionalProperties": false});
    if !required.is_empty() {
        mapping["required"] = json!(required);
    }
    mapping
}

fn property(key: &Key) -> Value {
    let mut value = form(&key.form);
    let mut about = key.about.to_owned();
    if let Form::Choice(words) = key.form {
        for (word, meaning) in words {
            about.push_str(&format!("\n- {word}: {meaning}"));
        }
    }
    value["description"] = about.into();
    if !key.default.is_empty() {
        // A numeric default is written as a number, and a boolean one as a boolean.
        let default = key.default;
        value["default"] = default
            .parse::<i64>()
            .map(Value::from)
            .or_else(|_| default.parse::<bool>().map(Value::from))
            .unwrap_or_else(|_| default.into());
    }
    value
}

fn form(form: &Form) -> Value {
    let paths = |value: Value| json!({"type": "object", "minProperties": 1, "additionalProperties": value});
    match form {
        Form::Text | Form::Path => json!({"type": "string", "minLength": 1}),
        Form::Words => {
            json!({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string", "minLength": 1}}]})
        }
        Form::Name => json!({"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9_.-]*$"}),
        Form::Flag => json!({"type": "boolean"}),
        Form::Count => json!({"type": "integer", "minimum": 1}),
        Form::Seconds(least) => json!({"type": "integer", "minimum": least, "maximum": 86_400}),
        Form::Span => {
            json!({"anyOf": [{"type": "string", "pattern": "^[0-9]+[smhd]?$"}, {"type": "integer", "minimum": 1}]})
        }
        Form::Address => json!({"type": "string", "pattern": "^.+:[0-9]+$"}),
        Form::Choice(words) => {
            let mut words: Vec<Value> = words.iter().map(|(word, _)| (*word).into()).collect();
            // `on_missing: null` and `guard: off` are valid, although YAML does not read them as strings.
            if words.contains(&"null".into()) {
                words.push(Value::Null);
            }
            if words.contains(&"off".into()) {
                words.push(false.into());
            }
            json!({"enum": words})
        }
        Form::Side => json!({"anyOf": [{"type": "string", "minLength": 1}, mapping(SIDE, &[])]}),
        Form::Match => paths(json!({"type": "string", "minLength": 1})),
        Form::MatchWithBuckets => {
            let path = json!({"type": "string", "minLength": 1});
            let bucket = json!({
                "type": "object", "properties": {"$dateTrunc": mapping(DATE_TRUNC, &[])}, "required": ["$dateTrunc"],
                "additionalProperties": false,
            });
            paths(json!({"anyOf": [path, bucket]}))
        }
        Form::Set => paths(json!({})),
        Form::Accumulators => paths(
            json!({"anyOf": [{"type": "object", "minProperties": 1}, {"type": "string", "pattern": "^\\$\\$[a-z]"}]}),
        ),
        Form::Variables => {
            let mut variables = paths(json!({"type": "object", "minProperties": 1, "maxProperties": 1}));
            variables["propertyNames"] = json!({"pattern": "^[a-z][A-Za-z0-9_]*$"});
            variables
        }
        Form::Sort => paths(json!({"enum": [1, -1]})),
        Form::Expression => json!({}),
        Form::Filter => json!({"type": "object"}),
        Form::Slice => json!({"type": "integer", "not": {"const": 0}}),
        Form::Keys(keys) => mapping(keys, &[]),
        Form::List(keys) => json!({"type": ["array", "null"], "items": mapping(keys, &[])}),
    }
}

/// The reference of all keys, which is a page under `docs/`.
#[must_use]
pub fn reference() -> String {
    let mut out = String::from(
        "# Config reference\n\n\
         `denormd schema --reference` writes this page. Required keys are **bold**.\n\n\
         Several files or directories are layered in the order of `--config` (repeated, or separated by commas). A directory stands for its `*.yaml`, `*.yml`, `*.toml` and `*.json` files by name. A setting of a later file replaces that of an earlier one; `rules` are joined. An environment variable replaces both: `DENORMD__LIMITS__PENDING` is `limits.pending`; a list is separated by commas. Rules cannot come from variables. Top-level keys that begin with `x-` are ignored, for YAML anchors.\n\n",
    );
    let deeper = table(&mut out, ROOT);
    for (name, keys) in deeper {
        section(&mut out, name, keys);
    }
    out.push_str("\n## `source` and `target`\n\nA collection's name, or a mapping:\n\n");
    table(&mut out, SIDE);
    out.push_str(
        "\n## `$dateTrunc` in `match`\n\nWith `create: true`, an entry of `match` may be an interval of time:\n\n",
    );
    table(&mut out, DATE_TRUNC);
    out.push_str(
        "\n## What combines\n\n\
         This table shows which constructs a rule of each kind may have, and which of them can be combined. Keys that are not in the table can be combined with all of them; \
         backfill, live changes, guard, audit, `check`, `explain`, `plan`, `test`, `prune`, partitions, fan-out jobs and dead letters do too. \
         The removal limit covers the rules that lose a value or a document when a source goes: `copy`, and `aggregate` with `create`. \
         *Paths in the target's elements* are those with the `$[]` of `match`; with *arrays on both sides*, the paths lie beside the target's array.\n\n",
    );
    out.push_str(&matrix::table());
    out
}

fn section(out: &mut String, name: &str, keys: &'static [Key]) {
    let title = if name == "rules" { "one of `rules`".to_owned() } else { format!("`{name}`") };
    out.push_str(&format!("\n## {title}\n\n"));
    for (name, keys) in table(out, keys) {
        section(out, name, keys);
    }
}

/// Writes a table of keys. Returns the keys whose values are mappings with keys of their own.
fn table(out: &mut String, keys: &'static [Key]) -> Vec<(&'static str, &'static [Key])> {
    out.push_str("| key | value | default | meaning |\n|---|---|---|---|\n");
    let mut deeper = Vec::new();
    for key in keys {
        if let Form::Keys(below) | Form::List(below) = key.form {
            deeper.push((key.name, below));
        }
        let name = if key.required { format!("**`{}`**", key.name) } else { format!("`{}`", key.name) };
        let default = if key.default.is_empty() { String::new() } else { format!("`{}`", key.default) };
        let words = match key.form {
            Form::Choice(words) => {
                let words: Vec<String> = words.iter().map(|(word, meaning)| format!("`{word}`: {meaning}")).collect();
                format!(" {}.", words.join("; "))
            }
            _ => String::new(),
        };
        out.push_str(&format!("| {name} | {} | {default} | {}{words} |\n", value(&key.form), key.about));
    }
    deeper
}

/// A short description of a key's value.
fn value(form: &Form) -> &'static str {
    match form {
        Form::Text => "text",
        Form::Words => "list of texts",
        Form::Name => "name",
        Form::Flag => "true or false",
        Form::Count => "integer from 1",
        Form::Seconds(_) => "seconds",
        Form::Span => "as `5s`, `2m`, `1h`, `7d`, or a number of seconds; at most 30 days",
        Form::Address => "address:port",
        Form::Choice(_) => "one of",
        Form::Side => "collection, or a mapping",
        Form::Match => "target path: source path",
        Form::MatchWithBuckets => "target path: source path, or an interval",
        Form::Set => "target path: expression",
        Form::Accumulators => "target path: accumulator",
        Form::Variables => "name: accumulator",
        Form::Sort => "source path: 1 or -1",
        Form::Path => "path",
        Form::Expression => "expression",
        Form::Filter => "query document",
        Form::Slice => "integer",
        Form::Keys(_) => "mapping, see below",
        Form::List(_) => "list, see below",
    }
}
