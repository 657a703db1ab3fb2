//! The keys of a rule with their values, and the keys in which two forms of a rule differ.

use bson::{Bson, Document};
use serde::Serialize;

use denormd_model::text::shown;
use denormd_rules::{
    config::ConfigPath,
    plan::{Rule, Values},
};

/// A key of a rule with another value. None stands for no value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct KeyChange {
    /// `set."parts.$[].name"`
    pub key: String,
    /// The old value.
    pub old: Option<String>,
    /// The new value.
    pub new: Option<String>,
}

impl KeyChange {
    /// The change of a rule whose keys look the same: they come in another order, as in `match`, or a number has another type.
    pub fn order() -> Self {
        Self { key: "the order of its keys, or the type of a number".to_owned(), old: None, new: None }
    }
}

/// The keys with other values, in the order of the new form.
pub(super) fn changed_keys(old: &[(String, String)], new: &[(String, String)]) -> Vec<KeyChange> {
    let value = |form: &[(String, String)], key: &str| {
        form.iter().find(|(known, _)| known == key).map(|(_, value)| value.clone())
    };
    let gone = old.iter().filter(|(key, _)| value(new, key).is_none());
    let changes = new.iter().chain(gone).map(|(key, _)| KeyChange {
        key: key.clone(),
        old: value(old, key),
        new: value(new, key),
    });
    changes.filter(|change| change.old != change.new).collect()
}

/// The keys of a definition (see `plan::compile`), and its kind. A mapping that is stored as a list of pairs has a key
/// for each pair.
pub(super) fn defined(definition: &Document) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (name, value) in definition {
        match value {
            Bson::Document(section) if name == "values" => {
                let kinds = [("collect", "collect"), ("aggregate", "aggregate"), ("groups", "aggregate")];
                let kind = kinds.into_iter().find(|(values, _)| section.contains_key(values));
                found.push(("kind".to_owned(), kind.map_or("copy", |(_, kind)| kind).to_owned()));
                for (key, value) in section {
                    let key = match key.as_str() {
                        "collect" | "groups" => "into",
                        "aggregate" => "set",
                        key => key,
                    };
                    entries(key, value, &mut found);
                }
            }
            Bson::Document(section) => {
                section.iter().for_each(|(key, value)| entries(&format!("{name}.{key}"), value, &mut found));
            }
            value => entries(name, value, &mut found),
        }
    }
    found
}

fn entries(key: &str, value: &Bson, found: &mut Vec<(String, String)>) {
    let list = value.as_array().filter(|_| matches!(key, "match" | "sort" | "set" | "by"));
    let pairs = list.and_then(|items| items.iter().map(pair).collect::<Option<Vec<_>>>());
    match (value, pairs) {
        (Bson::Null, _) => {}
        (_, Some(pairs)) => {
            let at = |name: &str| format!("{key}.{}", ConfigPath::default().key(name));
            found.extend(pairs.into_iter().map(|(name, value)| (at(name), typed(value))));
        }
        // The stored names of `on_missing` and `key_type` are those of the config, but for the first letter.
        (Bson::String(text), None) if matches!(key, "on_missing" | "key_type") => {
            let (first, rest) = text.split_at(text.chars().next().map_or(0, char::len_utf8));
            found.push((key.to_owned(), format!("{}{rest}", first.to_lowercase())));
        }
        (value, None) => found.push((key.to_owned(), typed(value))),
    }
}

/// A document with two fields as a name and a value.
fn pair(item: &Bson) -> Option<(&str, &Bson)> {
    let mut fields = item.as_document().filter(|item| item.len() == 2)?.iter();
    Some((fields.next()?.1.as_str()?, fields.next()?.1))
}

/// A value as one types it in YAML: a string without quotes, unless it would be something else then.
fn typed(value: &Bson) -> String {
    match value {
        Bson::String(text) if serde_json::from_str::<serde_json::Value>(text).is_err() => text.clone(),
        value => shown(value),
    }
}

/// The keys of a rule that do not affect the values it writes.
pub(super) fn settings(rule: &Rule) -> Vec<(String, String)> {
    let Rule { backfill, guard, on_drift, allow_scan, adopt, max_lag, .. } = rule;
    let mut keys = serde_json::json!({
        "backfill": backfill, "guard": guard, "on_drift": on_drift, "allow_scan": allow_scan, "adopt": adopt,
        "max_lag": format!("{}s", max_lag.as_secs()),
    });
    if let Values::Collect { max_elements, max_bytes, .. } = &rule.values {
        keys["max_elements"] = serde_json::json!(max_elements);
        keys["max_bytes"] = serde_json::json!(max_bytes);
    }
    let keys = keys.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    keys.map(|(key, value)| (key.clone(), value.as_str().map_or_else(|| value.to_string(), str::to_owned))).collect()
}
