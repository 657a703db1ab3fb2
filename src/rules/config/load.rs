//! Loads a [`Config`] from files and the environment, or reports all mistakes in it at once.

use std::{
    collections::HashMap,
    env, fs, io,
    path::{Path, PathBuf},
};

use serde::Serialize;

use super::{
    diagnose::{ConfigPath, Mistake},
    file,
    format::Format,
    keys::{self, Key},
    layer,
    reader::{Reader, suggestion},
    sections::{Config, Rule},
    sources::{LocatedMistake, Source, Sources, entries},
    tree::{Fault, Node, Value},
};

/// A config with the origins of its parts.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// The config, checked for its form.
    pub config: Config,
    sources: Sources,
}

impl Loaded {
    /// Adds the places to mistakes that were found later, in the meaning of the config.
    #[must_use]
    pub fn report(&self, mistakes: &[Mistake]) -> ConfigError {
        located(&self.sources, mistakes, Vec::new())
    }

    /// Like [`Loaded::report`], for warnings.
    #[must_use]
    pub fn located(&self, mistakes: &[Mistake]) -> Vec<LocatedMistake> {
        self.report(mistakes).mistakes().to_vec()
    }

    /// Every setting in force and the names of the rules, each with its origin. Settings without a value and a default
    /// are omitted.
    #[must_use]
    pub fn effective(&self) -> Vec<Effective> {
        let Ok(root) = layer::settings(&self.sources) else { return Vec::new() };
        let mut out = Vec::new();
        for (setting, key) in keys::settings() {
            let at = layer::path(&setting);
            let (value, from) = match given(&root, &setting) {
                Some(value) => (without_secrets(key, &value), self.sources.origin(&at)),
                None if key.default.is_empty() => continue,
                None => (key.default.to_owned(), "default".to_owned()),
            };
            out.push(Effective { setting: at.to_string(), value, from });
        }
        for (index, rule) in self.config.rules.iter().enumerate() {
            let at = ConfigPath::rule(index);
            let from = self.sources.origin(&at);
            out.push(Effective { setting: at.to_string(), value: rule.name.clone(), from });
        }
        out
    }

    /// The settings with other values in `new`. The rules are not compared.
    #[must_use]
    pub fn changed_settings(&self, new: &Self) -> Vec<ChangedSetting> {
        let (Ok(old), Ok(new)) = (layer::settings(&self.sources), layer::settings(&new.sources)) else {
            return Vec::new();
        };
        let mut changed = Vec::new();
        for (setting, key) in keys::settings() {
            let default = Some(key.default.to_owned()).filter(|default| !default.is_empty());
            let value = |root: &Node| given(root, &setting).or_else(|| default.clone());
            let (old, new) = (value(&old), value(&new));
            if old != new {
                let shown = |value: Option<String>| value.map(|value| without_secrets(key, &value));
                changed.push(ChangedSetting { setting, old: shown(old), new: shown(new) });
            }
        }
        changed
    }
}

/// A setting that differs between two configs. None stands for no value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChangedSetting {
    /// `http.listen`.
    pub setting: String,
    /// The old value, without any password.
    pub old: Option<String>,
    /// The new value, without any password.
    pub new: Option<String>,
}

/// A setting in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Effective {
    /// `http.listen`, or `rules[0]` with a rule's name.
    pub setting: String,
    /// The value, without any password.
    pub value: String,
    /// `file:line`, `environment variable …`, or `default`.
    pub from: String,
}

/// The text of a setting that a file or the environment gives.
fn given(root: &Node, setting: &str) -> Option<String> {
    let found = setting.split('.').try_fold(root, |node, name| node.get(name));
    found.and_then(|node| node.value.as_text())
}

fn without_secrets(key: &Key, value: &str) -> String {
    match key.name {
        "token" => "***".to_owned(),
        "uri" => super::uri::shown(value),
        _ => super::excerpt::redact(value),
    }
}

/// The reasons for not loading a config. The text never contains a connection string's password.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file or a directory cannot be read.
    #[error("cannot read {}: {error}\n   hint: {hint}", path.display())]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// The error of the file system.
        error: io::Error,
        /// A suggestion for the fix.
        hint: &'static str,
    },
    /// The extension of a file does not indicate a known format.
    #[error("{}: the format of this file is unknown\n   hint: name it .yaml, .yml, .toml or .json", .0.display())]
    UnknownFormat(PathBuf),
    /// No config file exists.
    #[error("no config: {0}")]
    Nothing(String),
    /// Mistakes in the files' text or in the environment, in the order of the files and of their lines.
    #[error("{}", shown(.0))]
    Mistakes(Vec<LocatedMistake>),
}

impl ConfigError {
    /// The mistakes with their places; empty if the files could not be read.
    #[must_use]
    pub fn mistakes(&self) -> &[LocatedMistake] {
        match self {
            Self::Mistakes(mistakes) => mistakes,
            Self::Read { .. } | Self::UnknownFormat(_) | Self::Nothing(_) => &[],
        }
    }
}

fn shown(mistakes: &[LocatedMistake]) -> String {
    let lines: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
    lines.join("\n")
}

/// The variables of this process that [`load`] may use, including those with a mistyped prefix. In text that is not
/// Unicode, invalid parts are replaced, so that it is rejected rather than ignored.
#[must_use]
pub fn process_environment() -> Vec<(String, String)> {
    env::vars_os()
        .map(|(name, text)| (name.to_string_lossy().into_owned(), text.to_string_lossy().into_owned()))
        .filter(|(name, _)| layer::may_be_meant(name))
        .collect()
}

/// Loads files and directories in order. Later settings replace earlier ones, and `rules` are concatenated.
/// `DENORMD__…` variables in `environment` (pairs of name and text) replace settings in files. A directory stands for
/// its `*.yaml`, `*.yml`, `*.toml` and `*.json` files in order of name, without hidden files and subdirectories.
pub fn load(paths: &[PathBuf], environment: &[(String, String)]) -> Result<Loaded, ConfigError> {
    let texts = read_all(paths)?;
    if texts.is_empty() {
        let places: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
        return Err(ConfigError::Nothing(if places.is_empty() {
            "no file is named".to_owned()
        } else {
            format!("no *.yaml, *.yml, *.toml or *.json in {}", places.join(", "))
        }));
    }
    assemble(texts, environment)
}

/// Like [`load`], with an optional config file. Without one, all settings come from the environment, and there are no
/// rules.
pub fn load_if_any(paths: &[PathBuf], environment: &[(String, String)]) -> Result<Loaded, ConfigError> {
    if paths.iter().any(|path| path.exists()) {
        return load(paths, environment);
    }
    assemble(vec![("the defaults".to_owned(), Format::Yaml, "rules: []\n".to_owned())], environment)
}

/// The texts that [`load`] would read, to detect changes; None while they cannot be read.
#[must_use]
pub fn snapshot(paths: &[PathBuf]) -> Option<Vec<String>> {
    Some(read_all(paths).ok()?.into_iter().map(|(name, _, text)| format!("{name}\n{text}")).collect())
}

fn read_all(paths: &[PathBuf]) -> Result<Vec<(String, Format, String)>, ConfigError> {
    let mut files = Vec::new();
    for path in paths {
        let at_path = |error| read_error(path, error);
        if fs::metadata(path).map_err(at_path)?.is_dir() {
            files.extend(files_of(path).map_err(at_path)?);
        } else {
            files.push(path.clone());
        }
    }
    let (mut texts, mut bytes) = (Vec::new(), 0);
    for path in files {
        let read: (_, _, String) = read(&path)?;
        bytes += read.2.len();
        if bytes > file::CONFIGS {
            let why = format!("with it, the config is larger than {} MiB", file::CONFIGS >> 20);
            return Err(read_error(&path, io::Error::new(io::ErrorKind::FileTooLarge, why)));
        }
        texts.push(read);
    }
    Ok(texts)
}

/// Loads one text, without the environment. Messages call it `config.yaml`, or the equivalent for its format.
pub fn load_str(text: &str, format: Format) -> Result<Loaded, ConfigError> {
    let name = match format {
        Format::Yaml => "config.yaml",
        Format::Toml => "config.toml",
        Format::Json => "config.json",
    };
    assemble(vec![(name.to_owned(), format, text.to_owned())], &[])
}

/// Loads one text with the environment. Messages call it `name`.
pub fn load_text(
    name: &str,
    text: &str,
    format: Format,
    environment: &[(String, String)],
) -> Result<Loaded, ConfigError> {
    assemble(vec![(name.to_owned(), format, text.to_owned())], environment)
}

fn read_error(path: &Path, error: io::Error) -> ConfigError {
    let hint = match error.kind() {
        io::ErrorKind::NotFound => {
            "check the path; --config names a file or a directory. Start with `denormd init`, or copy config/shop.yaml"
        }
        io::ErrorKind::PermissionDenied => "let the user that runs denormd read it",
        io::ErrorKind::InvalidData => "save it as UTF-8",
        io::ErrorKind::FileTooLarge => "is it a config file?",
        _ => "--config names a file or a directory",
    };
    ConfigError::Read { path: path.to_owned(), error, hint }
}

pub(super) fn read(path: &Path) -> Result<(String, Format, String), ConfigError> {
    let format = Format::of(path).ok_or_else(|| ConfigError::UnknownFormat(path.to_owned()))?;
    let text = file::read(path, file::CONFIG).map_err(|error| read_error(path, error))?;
    Ok((path.display().to_string(), format, text))
}

/// The config files in a directory. Hidden entries are skipped, because Kubernetes mounts a ConfigMap as links into a
/// hidden directory (`..data`).
fn files_of(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let hidden = path.file_name().is_none_or(|name| name.to_string_lossy().starts_with('.'));
        if !hidden && Format::of(&path).is_some() && !path.is_dir() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn assemble(texts: Vec<(String, Format, String)>, environment: &[(String, String)]) -> Result<Loaded, ConfigError> {
    let mut sources = Sources::default();
    let mut faults = Vec::new();
    let mut broken = false;
    for (index, (name, format, text)) in texts.into_iter().enumerate() {
        // Some editors write a byte-order mark first, which would count as a column.
        let text = text.strip_prefix('\u{feff}').map_or(text.clone(), str::to_owned);
        let (tree, mut found) = format.parse(&text);
        broken |= tree.is_none() && !found.is_empty();
        if let Some(tree) = &tree {
            let rules = root_faults(tree, &mut found);
            broken |= entries(Some(tree)).is_none();
            sources.rules.extend((0..rules).map(|rule| (index, rule)));
        }
        let source = Source::new(name, text, tree);
        faults.extend(found.iter().map(|fault| source.locate_fault(fault)));
        sources.files.push(source);
    }
    if broken {
        // Values of an unreadable file are not reported as missing.
        return Err(located(&sources, &[], faults));
    }
    check(sources, environment, faults)
}

fn check(
    mut sources: Sources,
    environment: &[(String, String)],
    faults: Vec<LocatedMistake>,
) -> Result<Loaded, ConfigError> {
    let mut reader = Reader { mistakes: layer::variables(environment, &mut sources) };
    let settings = match layer::settings(&sources) {
        Ok(settings) => settings,
        Err(error) => return Err(ConfigError::Nothing(super::excerpt::redact(&error.to_string()))),
    };
    let settings = reader.settings(&settings, &sources);
    let rules = rules(&mut reader, &sources);
    match settings {
        Some(settings) if reader.mistakes.is_empty() && faults.is_empty() => {
            Ok(Loaded { config: Config { rules, ..settings }, sources })
        }
        _ => Err(located(&sources, &reader.mistakes, faults)),
    }
}

/// Collects the mistakes at a file's root. Returns the number of its rules.
fn root_faults(tree: &Node, faults: &mut Vec<Fault>) -> usize {
    let Some(entries) = entries(Some(tree)) else {
        let message = format!("expected a mapping with `mongodb` and `rules`, found {}", tree.kind());
        faults.push(Fault::new(tree.span.clone(), message));
        return 0;
    };
    let known: Vec<_> = keys::sections().into_iter().chain(["rules"]).collect();
    let mut rules = 0;
    for entry in entries {
        let span = entry.key_span.clone();
        match (&*entry.key, &entry.node.value) {
            ("rules", Value::Sequence(items)) => rules = items.len(),
            ("rules", Value::Null) => {}
            ("rules", _) => {
                let message = format!("expected a list of rules, found {}", entry.node.kind());
                faults.push(Fault::new(span, message).hint("a rule begins with a dash: `- name: part-names`"));
            }
            // These keys are for anchors and editors.
            (key, _) if key.starts_with("x-") || key == "$schema" || known.contains(&key) => {}
            (key, _) => {
                faults.push(Fault::new(span, format!("unknown key `{key}`")).hint(suggestion(key, &known)));
            }
        }
    }
    rules
}

/// The rules of all files, in order. Their names must be unique.
fn rules(reader: &mut Reader, sources: &Sources) -> Vec<Rule> {
    if sources.files.iter().all(|file| file.tree.as_ref().and_then(|tree| tree.get("rules")).is_none()) {
        let hint = "write `rules:` with a list, or `rules: []` for none";
        reader.mistake(Mistake::new(ConfigPath::default(), "the key `rules` is missing").hint(hint));
    }
    let mut rules = Vec::new();
    let mut names: HashMap<String, ConfigPath> = HashMap::new();
    for (index, (file, local)) in sources.rules.iter().enumerate() {
        let items = sources.files.get(*file).and_then(|file| file.tree.as_ref()?.get("rules"));
        let Some(Value::Sequence(items)) = items.map(|items| &items.value) else { continue };
        let Some(node) = items.get(*local) else { continue };
        let at = ConfigPath::rule(index);
        if let Some(Value::String(name)) = node.get("name").map(|name| &name.value) {
            let at = at.key("name");
            if let Some(first) = names.get(name) {
                let message = format!("a rule named `{name}` exists already");
                reader.mistake(Mistake::new(at, message).related(first.clone(), "the first is here"));
            } else {
                names.insert(name.clone(), at);
            }
        }
        rules.extend(reader.rule(node, at));
    }
    rules
}

pub(super) fn located(sources: &Sources, mistakes: &[Mistake], mut all: Vec<LocatedMistake>) -> ConfigError {
    all.extend(mistakes.iter().map(|mistake| sources.locate(mistake)));
    let file = |name: &str| sources.files.iter().position(|file| file.name == name).map_or(0, |file| file + 1);
    all.sort_by_key(|mistake| (file(&mistake.place.file), mistake.place.line, mistake.place.column));
    ConfigError::Mistakes(all)
}

#[cfg(test)]
mod tests;
