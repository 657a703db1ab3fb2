//! Constants that were probably meant to be a field: `firstName` for `$firstName`.

use bson::Bson;

use denormd_model::shape::Shape;
use denormd_rules::{
    config::{ConfigPath, Mistake},
    plan::Rule,
};

/// Operators whose texts are names and units, not values.
const NAMES: &[&str] = &["$literal", "$getField", "$setField", "$unsetField", "$meta"];
/// The named arguments that are values.
const ARGUMENTS: &[&str] =
    &["input", "in", "if", "then", "else", "case", "default", "value", "initialValue", "date", "output", "branches"];

/// The constants of a rule that equal a field of its source.
pub fn suspicions(rule: &Rule, source: &Shape) -> Vec<Mistake> {
    let is_field = |text: &str| source.fields.iter().any(|field| field.path.query() == text);
    let mut found = Vec::new();
    for (place, value, _) in rule.values_at() {
        let mut constants = Vec::new();
        texts(&place, value, &mut constants);
        for (place, text) in constants.into_iter().filter(|(_, text)| !text.starts_with('$') && is_field(text)) {
            let message = format!("`{text}` is a constant text, and a field of `{}`", rule.source.namespace.collection);
            let hint = format!("did you mean `${text}`? if the text itself is meant: {{ $literal: {text} }}");
            found.push(Mistake::new(place, message).hint(hint));
        }
    }
    found
}

/// The texts of an expression that are values or paths, with their places.
pub fn texts<'a>(at: &ConfigPath, value: &'a Bson, out: &mut Vec<(ConfigPath, &'a str)>) {
    match value {
        Bson::String(text) => out.push((at.clone(), text)),
        Bson::Array(items) => {
            items.iter().enumerate().for_each(|(nth, item)| texts(&at.index(nth), item, out));
        }
        Bson::Document(document) => {
            for (name, value) in document {
                let at = at.key(name);
                if NAMES.contains(&name.as_str()) {
                    continue;
                }
                match value {
                    Bson::Document(arguments)
                        if name.starts_with('$') && !arguments.keys().any(|key| key.starts_with('$')) =>
                    {
                        for (argument, value) in arguments.iter().filter(|(key, _)| ARGUMENTS.contains(&key.as_str())) {
                            texts(&at.key(argument), value, out);
                        }
                    }
                    value => texts(&at, value, out),
                }
            }
        }
        _ => {}
    }
}
