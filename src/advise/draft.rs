//! A rule for denormd in the syntax of a config file. Pure.

use serde_json::{Map, Value, json};

use denormd_model::{field_path::FieldPath, namespace::Namespace};

use super::names::looks_personal;

/// A suggested rule, not yet compiled.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    /// The name, reduced to letters, digits and hyphens.
    pub name: String,
    /// The kind of rule: `copy` or `collect`.
    pub kind: &'static str,
    /// The keys below the kind, in order.
    pub body: Map<String, Value>,
    /// A remark for the user.
    pub comment: String,
}

impl Draft {
    /// A rule with this `source` and `target`.
    #[must_use]
    pub fn new(name: &str, kind: &'static str, source: String, target: String) -> Self {
        let mut body = Map::new();
        body.insert("source".to_owned(), Value::String(source));
        body.insert("target".to_owned(), Value::String(target));
        let safe = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' };
        let name: String = name.chars().map(safe).collect();
        Self { name: name.trim_matches('-').to_owned(), kind, body, comment: String::new() }
    }

    /// Adds one key.
    #[must_use]
    pub fn with(mut self, key: &str, value: Value) -> Self {
        self.body.insert(key.to_owned(), value);
        self
    }

    /// A warning if the rule copies fields that look personal or secret.
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

    /// The rule as an entry of `rules`, in YAML.
    #[must_use]
    pub fn yaml(&self) -> String {
        let mut out = format!("- name: {}\n  {}:\n", scalar(&self.name), self.kind);
        for (key, value) in &self.body {
            out.push_str(&format!("    {key}: {}\n", flow(value)));
        }
        out
    }

    /// The rule as JSON, for programs.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({"name": self.name, self.kind: self.body})
    }
}

/// Collects the fields that an expression reads.
fn read<'a>(value: &'a Value, out: &mut Vec<&'a str>) {
    match value {
        Value::String(text) => out.extend(text.strip_prefix('$')),
        Value::Array(items) => items.iter().for_each(|item| read(item, out)),
        Value::Object(entries) => entries.values().for_each(|item| read(item, out)),
        _ => {}
    }
}

/// The name of a collection in a rule: without the database if it is the config's default.
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

/// An unquoted scalar where every YAML parser reads it as text, otherwise a quoted one.
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
