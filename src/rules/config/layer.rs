//! Merges the settings (everything but `rules`) of several files and of the environment with the `config` crate.
//!
//! Files are parsed here and passed to that crate as sources. Its own readers keep no line numbers, and they differ
//! between formats: for a duplicate key in JSON, the first is dropped silently; YAML's merge key `<<` is an ordinary
//! key; and an integer beyond 64 bits becomes a float (an error in TOML). `rules` are not merged by it, because a later
//! file's list would replace an earlier one's, and TOML's dates would become strings.

use std::sync::LazyLock;

use config::{Environment, Map, Value as Layer, ValueKind};

use super::{
    diagnose::{ConfigPath, Mistake},
    keys::{Form, Key, sections, settings as settings_keys},
    reader::{list, nearest},
    sources::{Sources, entries},
    tree::{Entry, Node, Value},
};

/// The prefix of denormd's environment variables.
pub(super) const PREFIX: &str = "DENORMD";

/// The settings, by their paths. Each can be given by a variable.
static SETTINGS: LazyLock<Vec<(String, &'static Key)>> = LazyLock::new(|| settings_keys().collect());

pub(super) fn path(setting: &str) -> ConfigPath {
    setting.split('.').fold(ConfigPath::default(), |path, key| path.key(key))
}

/// Adds denormd's variables in `environment` to the sources. Returns a mistake for each unknown one.
pub(super) fn variables(environment: &[(String, String)], sources: &mut Sources) -> Vec<Mistake> {
    let prefix = format!("{}__", PREFIX.to_lowercase());
    let mut mistakes = Vec::new();
    for (name, text) in environment {
        let lower = name.to_lowercase();
        let Some(setting) = lower.strip_prefix(&prefix).map(|rest| rest.replace("__", ".")) else {
            if let Some(meant) = near_miss(name) {
                let at = ConfigPath::default().key(name);
                let mistake = Mistake::new(at.clone(), "the variable is not read");
                mistakes.push(mistake.hint(format!("did you mean `{meant}`?")));
                sources.variables.push((at, name.clone(), text.clone()));
            }
            continue;
        };
        if SETTINGS.iter().all(|(known, _)| *known != setting) {
            mistakes.push(unknown(&setting));
        }
        sources.variables.push((path(&setting), name.clone(), text.clone()));
    }
    mistakes
}

/// True if a variable may be one of denormd's with a mistyped prefix. Kubernetes creates variables such as
/// `DENORMD_SERVICE_HOST` for a Service.
pub(super) fn may_be_meant(name: &str) -> bool {
    name.to_lowercase().starts_with("denor")
}

/// The variable that the user probably meant with other underscores (`DENORMD_MONGODB__URI`) or another prefix
/// (`DENORM__MONGODB__URI`).
fn near_miss(name: &str) -> Option<String> {
    let plain =
        |name: &str| name.split('_').filter(|part| !part.is_empty()).collect::<Vec<_>>().join("_").to_uppercase();
    let given = plain(name);
    let near = |known: &str| {
        let known = plain(known);
        known == given || (name.contains("__") && strsim::damerau_levenshtein(&known, &given) <= 2)
    };
    if !may_be_meant(name) {
        return None;
    }
    SETTINGS.iter().map(|(setting, _)| variable(setting)).find(|known| near(known))
}

/// The name of a setting's variable.
fn variable(setting: &str) -> String {
    format!("{PREFIX}__{}", setting.replace('.', "__").to_uppercase())
}

fn unknown(setting: &str) -> Mistake {
    let known: Vec<&str> = SETTINGS.iter().map(|(known, _)| known.as_str()).collect();
    let names: Vec<String> = known.iter().map(|known| variable(known)).collect();
    let hint = if setting.split('.').next() == Some("rules") {
        "rules come from files; the environment gives single settings".to_owned()
    } else {
        let near = nearest(setting, &known).and_then(|near| known.iter().position(|known| *known == near));
        match near.and_then(|index| names.get(index)) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("known variables: {}", list(&names.iter().map(String::as_str).collect::<Vec<_>>())),
        }
    };
    Mistake::new(path(setting), "the variable stands for no setting").hint(hint)
}

/// The merged settings of all sources in one tree, without places. Places are looked up in the sources.
pub(super) fn settings(sources: &Sources) -> Result<Node, config::ConfigError> {
    let mut builder = config::Config::builder();
    for file in &sources.files {
        let settings = entries(file.tree.as_ref()).unwrap_or_default();
        let settings = settings.iter().filter(|entry| sections().contains(&entry.key.as_str()));
        builder = builder.add_source(Layered(settings.filter_map(layer_entry).collect()));
    }
    let known = sources.variables.iter().filter(|(at, ..)| SETTINGS.iter().any(|(known, _)| path(known) == *at));
    let variables: Map<_, _> = known.map(|(_, name, text)| (name.clone(), text.clone())).collect();
    let environment = Environment::with_prefix(PREFIX).prefix_separator("__").separator("__").try_parsing(true);
    let layered = builder.add_source(environment.source(Some(variables))).build()?;
    let mut root = from_layer(layered.cache);
    let is_number = |key: &Key| matches!(key.form, Form::Count | Form::Seconds(_));
    for (setting, _) in SETTINGS.iter().filter(|(_, key)| !is_number(key)) {
        if let Some((.., text)) = sources.variables.iter().rev().find(|(at, ..)| *at == path(setting)) {
            restore(&mut root, setting, text);
        }
    }
    for (one, other) in ALTERNATIVES {
        // Both in one layer are a mistake, reported later.
        let (first, second) = (last_layer(sources, one), last_layer(sources, other));
        if first != second {
            remove(&mut root, if first < second { one } else { other });
        }
    }
    Ok(root)
}

/// Alternative forms of one setting. The one in the later layer applies.
const ALTERNATIVES: [(&str, &str); 2] = [("mongodb.uri", "mongodb.uri_file"), ("http.token", "http.token_file")];

/// The last layer that contains a setting: a file's number, or the environment, which comes after the files.
fn last_layer(sources: &Sources, setting: &str) -> Option<usize> {
    if sources.variables.iter().any(|(at, ..)| *at == path(setting)) {
        return Some(sources.files.len());
    }
    sources.files.iter().rposition(|file| {
        let found = setting.split('.').try_fold(file.tree.as_ref(), |node, key| Some(node?.get(key)));
        found.flatten().is_some_and(|node| node.value != Value::Null)
    })
}

fn remove(root: &mut Node, setting: &str) {
    let Some((section, key)) = setting.split_once('.') else { return };
    let Value::Mapping(sections) = &mut root.value else { return };
    let section = sections.iter_mut().find(|entry| entry.key == section);
    if let Some(Value::Mapping(entries)) = section.map(|section| &mut section.node.value) {
        entries.retain(|entry| entry.key != key);
    }
}

/// Restores the text of a variable that was parsed as a number or a boolean, such as a database named `007`.
fn restore(root: &mut Node, setting: &str, text: &str) {
    let mut node = root;
    for key in setting.split('.') {
        let Value::Mapping(entries) = &mut node.value else { return };
        let Some(entry) = entries.iter_mut().find(|entry| entry.key == key) else { return };
        node = &mut entry.node;
    }
    node.value = Value::String(text.to_owned());
}

/// The settings of one file.
#[derive(Debug, Clone)]
struct Layered(Map<String, Layer>);

impl config::Source for Layered {
    fn clone_into_box(&self) -> Box<dyn config::Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Map<String, Layer>, config::ConfigError> {
        Ok(self.0.clone())
    }
}

/// Omits keys without a value. Otherwise `limits:` with all its lines commented out would erase an earlier file's
/// limits.
fn layer_entry(entry: &Entry) -> Option<(String, Layer)> {
    Some((entry.key.clone(), layer(&entry.node)?))
}

fn layer(node: &Node) -> Option<Layer> {
    let kind = match &node.value {
        Value::Null => return None,
        Value::Mapping(entries) => ValueKind::Table(entries.iter().filter_map(layer_entry).collect()),
        Value::Sequence(items) => ValueKind::Array(items.iter().filter_map(layer).collect()),
        Value::Bool(flag) => ValueKind::Boolean(*flag),
        Value::Int(number) => ValueKind::I64(*number),
        Value::Float(number) => ValueKind::Float(*number),
        Value::String(text) | Value::Date(text) => ValueKind::String(text.clone()),
    };
    Some(Layer::new(None, kind))
}

fn from_layer(layer: Layer) -> Node {
    let value = match layer.kind {
        ValueKind::Table(table) => {
            let entries = table.into_iter().map(|(key, value)| Entry { key, key_span: 0..0, node: from_layer(value) });
            Value::Mapping(entries.collect())
        }
        ValueKind::Array(items) => Value::Sequence(items.into_iter().map(from_layer).collect()),
        ValueKind::Boolean(flag) => Value::Bool(flag),
        ValueKind::I64(number) => Value::Int(number),
        ValueKind::Float(number) => Value::Float(number),
        ValueKind::String(text) => Value::String(text),
        // None of the sources above produces these.
        ValueKind::Nil | ValueKind::I128(_) | ValueKind::U64(_) | ValueKind::U128(_) => Value::Null,
    };
    Node::new(value, 0..0)
}
