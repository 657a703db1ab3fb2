//! A rule for denormd, written as one writes it in a config file. Pure.

use serde_json::{Map, Value, json};

use crate::{change::Namespace, field_path::FieldPath};

use super::names::looks_personal;

/// A rule that has not been compiled.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    /// Its name.
    pub name: String,
    /// `copy` or `collect`.
    pub kind: &'static str,
    /// What is below that, in order.
    pub body: Map<String, Value>,
    /// What to know of it.
    pub comment: String,
}

impl Draft {
    /// A rule whose `source` and `target` are these.
    #[must_use]
    pub fn new(name: &str, kind: &'static str, source: String, target: String) -> Self {
        let mut body = Map::new();
        body.insert("source".to_owned(), Value::String(source));
        body.insert("target".to_owned(), Value::String(target));
        let safe = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' };
        let name: String = name.chars().map(safe).collect();
        Self { name: name.trim_matches('-').to_owned(), kind, body, comment: String::new() }
    }

    /// With one more key.
    #[must_use]
    pub fn with(mut self, key: &str, value: Value) -> Self {
        self.body.insert(key.to_owned(), value);
        self
    }

    /// A warning, where it copies fields that look personal.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        let mut fields = Vec::new();
        for value in ["set", "element"].iter().filter_map(|key| self.body.get(*key)) {
            read(value, &mut fields);
        }
        fields.retain(|field| FieldPath::parse(field).is_ok_and(|path| looks_personal(&path)));
        fields.dedup();
        let named: Vec<String> = fields.iter().map(|field| format!("`{field}`")).collect();
        (!named.is_empty()).then(|| {
            format!(
                "warning: {} looks personal or secret: each copy is one more place to protect, and to erase it from",
                named.join(", ")
            )
        })
    }

    /// As an entry of `rules`, in YAML.
    #[must_use]
    pub fn yaml(&self) -> String {
        let mut out = format!("- name: {}\n  {}:\n", scalar(&self.name), self.kind);
        for (key, value) in &self.body {
            out.push_str(&format!("    {key}: {}\n", flow(value)));
        }
        out
    }

    /// For programs.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({"name": self.name, self.kind: self.body})
    }
}

/// The fields that an expression names.
fn read<'a>(value: &'a Value, out: &mut Vec<&'a str>) {
    match value {
        Value::String(text) => out.extend(text.strip_prefix('$')),
        Value::Array(items) => items.iter().for_each(|item| read(item, out)),
        Value::Object(entries) => entries.values().for_each(|item| read(item, out)),
        _ => {}
    }
}

/// A collection as a rule names it: bare in the config's database.
#[must_use]
pub fn collection(namespace: &Namespace, default: Option<&str>) -> String {
    if default == Some(namespace.database.as_str()) && !namespace.collection.contains('.') {
        namespace.collection.clone()
    } else {
        namespace.to_string()
    }
}

fn flow(value: &Value) -> String {
    match value {
        Value::Object(entries) if entries.is_empty() => "{}".to_owned(),
        Value::Object(entries) => {
            let entries: Vec<String> =
                entries.iter().map(|(key, value)| format!("{}: {}", scalar(key), flow(value))).collect();
            format!("{{ {} }}", entries.join(", "))
        }
        Value::Array(items) => format!("[{}]", items.iter().map(flow).collect::<Vec<_>>().join(", ")),
        Value::String(text) => scalar(text),
        other => other.to_string(),
    }
}

/// Plain where no reader of YAML can take it for anything but text.
fn scalar(text: &str) -> String {
    const WORDS: [&str; 9] = ["null", "true", "false", "yes", "no", "on", "off", "y", "n"];
    let begins = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_' || c == '$');
    let plain = text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '.' | '-'));
    if begins && plain && !WORDS.contains(&text.to_lowercase().as_str()) {
        text.to_owned()
    } else {
        Value::String(text.to_owned()).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_one_writes_it() {
        let draft = Draft::new("parts in products", "copy", "parts".to_owned(), "products".to_owned())
            .with("match", json!({"parts.$[].id": "_id"}))
            .with("set", json!({"parts.$[].name": "$name", "n": "$on"}));
        assert_eq!(
            draft.yaml(),
            "- name: parts-in-products\n  copy:\n    source: parts\n    target: products\n    \
             match: { \"parts.$[].id\": _id }\n    set: { \"parts.$[].name\": $name, \"n\": $on }\n"
        );
    }

    #[test]
    fn a_personal_field_carries_a_warning() {
        let draft = |set: Value| Draft::new("r", "copy", "users".to_owned(), "orders".to_owned()).with("set", set);
        assert_eq!(draft(json!({"user_name": "$name"})).warning(), None);
        let warning = draft(json!({"user_name": "$name", "user_email": "$email", "t": "$apiToken"})).warning().unwrap();
        assert!(warning.contains("`email`, `apiToken`"), "{warning}");
    }

    #[test]
    fn a_name_with_a_dot_is_never_bare() {
        let namespace = |collection: &str| Namespace { database: "shop".to_owned(), collection: collection.to_owned() };
        assert_eq!(collection(&namespace("parts"), Some("shop")), "parts");
        assert_eq!(collection(&namespace("parts.old"), Some("shop")), "shop.parts.old");
        assert_eq!(collection(&namespace("parts"), Some("other")), "shop.parts");
    }
}
