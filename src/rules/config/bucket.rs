//! Reads the entries of `match` that name an interval of time: `{ $dateTrunc: { date: $at, unit: day } }`.

use bson::Document;

use super::{
    diagnose::Mistake,
    keys::{self, Form},
    literal::to_bson,
    reader::{Field, Fields, Reader},
    rule::MATCH_HINT,
    tree::Value,
};

/// Target paths with source paths, and target paths with the arguments of `$dateTrunc`.
type Entries = (Vec<(String, String)>, Vec<(String, Document)>);

const HINT: &str = "write a path, _id.item: item, or an interval: _id.day: { $dateTrunc: { date: $at, unit: day } }";

impl Reader {
    /// Reads a `match` whose entries may be intervals.
    pub(super) fn matches_with_buckets(&mut self, fields: &Fields<'_>) -> Option<Entries> {
        let field = self.required(fields, "match", MATCH_HINT)?;
        let (mut on, mut buckets) = (Vec::new(), Vec::new());
        for (key, entry) in self.filled(&field, MATCH_HINT)? {
            let interval = match &entry.node.value {
                Value::Mapping(inside) => inside.iter().find(|inside| inside.key == "$dateTrunc"),
                _ => None,
            };
            let Some(interval) = interval else {
                on.extend(self.source_path(&entry).map(|path| (key, path)));
                continue;
            };
            let Some(alone) = self.fields(&entry, &["$dateTrunc"], |_| Some(HINT.to_owned())) else { continue };
            let field = Field { at: alone.at.key("$dateTrunc"), node: &interval.node };
            if let Some((path, arguments)) = self.bucket(&field) {
                on.push((key.clone(), path));
                buckets.push((key, arguments));
            }
        }
        Some((on, buckets))
    }

    /// The source path of an interval, and its other arguments.
    fn bucket(&mut self, field: &Field<'_>) -> Option<(String, Document)> {
        let fields = self.fields(field, &keys::names(keys::DATE_TRUNC), |_| None)?;
        let date = self.required(&fields, "date", "the date is a path of the source: date: $at");
        let path = date.and_then(|date| self.date_path(&date));
        self.required(&fields, "unit", "write a constant: unit: day");
        let mut arguments = Document::new();
        let mut is_right = true;
        for key in keys::DATE_TRUNC.iter().filter(|key| key.name != "date") {
            let Some(field) = fields.get(key.name) else { continue };
            let taken = match key.form {
                Form::Choice(words) => {
                    let words: Vec<(&str, ())> = words.iter().map(|(word, _)| (*word, ())).collect();
                    self.choice(&field, &words).is_some()
                }
                Form::Count => self.count(&field).is_some(),
                _ => self.constant(&field),
            };
            is_right &= taken;
            arguments.insert(key.name, to_bson(field.node));
        }
        Some((path?, arguments)).filter(|(_, arguments)| is_right && arguments.contains_key("unit"))
    }

    fn date_path(&mut self, field: &Field<'_>) -> Option<String> {
        let text = self.text(field)?;
        if let Some(path) = text.strip_prefix('$').filter(|path| !path.starts_with('$')) {
            return Some(path.to_owned());
        }
        let message = format!("`{text}` is not a path of the source");
        self.mistake(Mistake::new(field.at.clone(), message).hint("write a path with its `$`: date: $at"));
        None
    }

    /// True for a text that is not read from a document.
    fn constant(&mut self, field: &Field<'_>) -> bool {
        let Some(text) = self.text(field) else { return false };
        if !text.starts_with('$') {
            return true;
        }
        let message = format!("`{text}` is read from the document, and an interval is the same for all of them");
        self.mistake(Mistake::new(field.at.clone(), message).hint("write a constant: timezone: Europe/Paris"));
        false
    }
}
