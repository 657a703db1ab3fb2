//! Reads typed values from a tree. Collects every mistake instead of stopping at the first.

use std::time::Duration;

use super::{
    diagnose::{ConfigPath, Mistake},
    tree::{Entry, Node, Value},
};

const SPAN: &str = "1 second to 30 days: a number and s, m, h or d, as in 5s, 2m or 7d";
/// Maximum duration. A longer one is probably a typing error.
const LONGEST_SPAN: Duration = Duration::from_secs(30 * 86_400);

/// Parses a duration: `30m`, `2h`, `7d`, or a number of seconds.
#[must_use]
pub fn span(text: &str) -> Option<Duration> {
    let (number, unit) = match text.char_indices().last() {
        Some((at, unit)) if unit.is_ascii_alphabetic() => (&text[..at], unit),
        _ => (text, 's'),
    };
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 86_400,
        _ => return None,
    };
    let number: u64 = number.parse().ok()?;
    number.checked_mul(seconds).filter(|seconds| *seconds < 1 << 32).map(Duration::from_secs)
}

/// Collects mistakes. An unreadable value is omitted or takes its default, so that reading continues; a single mistake
/// is enough to reject the config at the end.
#[derive(Debug, Default)]
pub(super) struct Reader {
    pub mistakes: Vec<Mistake>,
}

/// A mapping with a fixed set of keys.
#[derive(Clone)]
pub(super) struct Fields<'a> {
    pub at: ConfigPath,
    entries: &'a [Entry],
}

/// A value with its path.
#[derive(Clone)]
pub(super) struct Field<'a> {
    pub at: ConfigPath,
    pub node: &'a Node,
}

impl<'a> Field<'a> {
    /// The entries of a mapping, or the items of a list.
    pub fn parts(&self) -> impl Iterator<Item = Self> + use<'a> {
        let (list, mapping) = (self.at.clone(), self.at.clone());
        let (items, entries): (&[Node], &[Entry]) = match &self.node.value {
            Value::Sequence(items) => (items, &[]),
            Value::Mapping(entries) => (&[], entries),
            _ => (&[], &[]),
        };
        let items = items.iter().enumerate().map(move |(nth, node)| Self { at: list.index(nth), node });
        items.chain(entries.iter().map(move |entry| Self { at: mapping.key(&entry.key), node: &entry.node }))
    }
}

impl<'a> Fields<'a> {
    /// The value under `key`, which may be null.
    pub fn raw(&self, key: &str) -> Option<Field<'a>> {
        let entry = self.entries.iter().find(|entry| entry.key == key)?;
        Some(Field { at: self.at.key(key), node: &entry.node })
    }

    /// The value under `key`. A key without a value (`limits:` with every line commented out) counts as missing.
    pub fn get(&self, key: &str) -> Option<Field<'a>> {
        self.raw(key).filter(|field| field.node.value != Value::Null)
    }
}

impl Reader {
    pub fn mistake(&mut self, mistake: Mistake) {
        self.mistakes.push(mistake);
    }

    fn wrong_type<T>(&mut self, field: &Field<'_>, expected: &str) -> Option<T> {
        let message = format!("expected {expected}, found {}", field.node.kind());
        self.mistake(Mistake::new(field.at.clone(), message));
        None
    }

    /// The entries of a mapping whose keys the user chooses.
    pub fn entries<'a>(&mut self, field: &Field<'a>) -> Option<&'a [Entry]> {
        match &field.node.value {
            Value::Mapping(entries) => Some(entries),
            _ => self.wrong_type(field, "a mapping"),
        }
    }

    /// Reads a mapping with these keys and no others. `elsewhere` gives the correct place of a key that is known
    /// elsewhere.
    pub fn fields<'a>(
        &mut self,
        field: &Field<'a>,
        known: &[&str],
        elsewhere: fn(&str) -> Option<String>,
    ) -> Option<Fields<'a>> {
        let entries = self.entries(field)?;
        for entry in entries.iter().filter(|entry| !known.contains(&entry.key.as_str())) {
            let hint = elsewhere(&entry.key).unwrap_or_else(|| suggestion(&entry.key, known));
            let message = format!("unknown key `{}`", entry.key);
            self.mistake(Mistake::new(field.at.key(&entry.key), message).on_key().hint(hint));
        }
        Some(Fields { at: field.at.clone(), entries })
    }

    /// The value under `key`. If it is missing, adds a mistake with this hint.
    pub fn required<'a>(&mut self, fields: &Fields<'a>, key: &str, hint: &str) -> Option<Field<'a>> {
        let found = fields.get(key);
        if found.is_none() {
            let mistake = match fields.raw(key) {
                Some(empty) => Mistake::new(empty.at, format!("`{key}` has no value")),
                None => Mistake::new(fields.at.clone(), format!("the key `{key}` is missing")),
            };
            self.mistake(mistake.hint(hint));
        }
        found
    }

    /// Reads a string that is not empty.
    pub fn text(&mut self, field: &Field<'_>) -> Option<String> {
        match &field.node.value {
            Value::String(text) if text.is_empty() => {
                self.mistake(Mistake::new(field.at.clone(), "expected text, found an empty string"));
                None
            }
            Value::String(text) => Some(text.clone()),
            _ => self.wrong_type(field, "a string"),
        }
    }

    /// Reads a list of strings, or one string with commas, as in the environment.
    pub fn words(&mut self, field: &Field<'_>) -> Option<Vec<String>> {
        match &field.node.value {
            Value::String(text) => {
                Some(text.split(',').map(|word| word.trim().to_owned()).filter(|word| !word.is_empty()).collect())
            }
            Value::Sequence(items) => {
                let items = items.iter().enumerate();
                items.map(|(at, node)| self.text(&Field { at: field.at.index(at), node })).collect()
            }
            _ => self.wrong_type(field, "a list of strings"),
        }
    }

    pub fn flag(&mut self, field: &Field<'_>) -> Option<bool> {
        match field.node.value {
            Value::Bool(flag) => return Some(flag),
            Value::String(ref text) => {
                let meant = match text.to_ascii_lowercase().as_str() {
                    "yes" | "on" | "y" | "true" => "true",
                    "no" | "off" | "n" | "false" => "false",
                    _ => return self.wrong_type(field, "true or false"),
                };
                let message = format!("expected true or false, found the text `{text}`");
                self.mistake(Mistake::new(field.at.clone(), message).hint(format!("write `{meant}`")));
            }
            _ => return self.wrong_type(field, "true or false"),
        }
        None
    }

    pub fn integer(&mut self, field: &Field<'_>) -> Option<i64> {
        match field.node.value {
            Value::Int(number) => Some(number),
            _ => self.wrong_type(field, "an integer"),
        }
    }

    /// Reads a duration of at least a second: `5s`, `2m`, `1h`, or a number of seconds.
    pub fn span(&mut self, field: &Field<'_>) -> Option<Duration> {
        let found = match &field.node.value {
            Value::Int(number) => u64::try_from(*number).ok().map(Duration::from_secs),
            Value::String(text) => span(text),
            _ => return self.wrong_type(field, SPAN),
        };
        let found = found.filter(|span| (Duration::from_secs(1)..=LONGEST_SPAN).contains(span));
        if found.is_none() {
            self.mistake(Mistake::new(field.at.clone(), format!("expected {SPAN}")));
        }
        found
    }

    /// Reads an integer of at least 1.
    pub fn count(&mut self, field: &Field<'_>) -> Option<u64> {
        let number = self.integer(field)?;
        let count = u64::try_from(number).ok().filter(|count| *count > 0);
        if count.is_none() {
            self.mistake(Mistake::new(field.at.clone(), format!("expected an integer of at least 1, found {number}")));
        }
        count
    }

    /// Reads one of a few words.
    pub fn choice<T: Copy>(&mut self, field: &Field<'_>, words: &[(&str, T)]) -> Option<T> {
        let names: Vec<_> = words.iter().map(|(name, _)| *name).collect();
        let Value::String(text) = &field.node.value else {
            return self.wrong_type(field, &format!("one of {}", list(&names)));
        };
        let found = words.iter().find(|(name, _)| name == text).map(|(_, value)| *value);
        if found.is_none() {
            let message = format!("`{text}` is not one of {}", list(&names));
            let mistake = Mistake::new(field.at.clone(), message);
            self.mistake(match nearest(text, &names) {
                Some(near) => mistake.hint(format!("did you mean `{near}`?")),
                None => mistake,
            });
        }
        found
    }

    /// Reads the name of a rule or of the deployment, which becomes a label and part of ids.
    pub fn name(&mut self, field: &Field<'_>) -> Option<String> {
        let name = self.text(field)?;
        let starts = name.starts_with(|c: char| c.is_ascii_alphanumeric());
        if starts && name.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c)) {
            return Some(name);
        }
        self.mistake(
            Mistake::new(field.at.clone(), format!("`{name}` cannot be a name"))
                .hint("a name consists of letters, digits, `_`, `.` and `-`, and begins with a letter or a digit"),
        );
        None
    }
}

/// A hint: "did you mean …?", or the list of all known words.
pub(super) fn suggestion(word: &str, known: &[&str]) -> String {
    nearest(word, known)
        .map_or_else(|| format!("known keys: {}", list(known)), |near| format!("did you mean `{near}`?"))
}

/// The known name that a word probably stands for, if one is similar enough.
#[must_use]
pub fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let word = word.to_ascii_lowercase();
    let distance = |name: &str| strsim::damerau_levenshtein(&word, &name.to_ascii_lowercase());
    let (near, distance) = known.iter().map(|name| (*name, distance(name))).min_by_key(|(_, distance)| *distance)?;
    let longer = || known.iter().copied().find(|name| name.len() > 3 && word.starts_with(*name));
    if distance <= (near.len() / 3).max(1) { Some(near) } else { longer() }
}

pub(super) fn list(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}
