//! A file for `denormd test`: cases of documents before, and the documents expected afterwards.

use std::{collections::BTreeSet, io, path::Path};

use bson::{Bson, Document};

use super::{
    ConfigError,
    diagnose::{ConfigPath, Mistake},
    format::Format,
    literal::{to_bson, to_document},
    load::{located, read},
    reader::{Field, Reader},
    sources::{LocatedMistake, Source, Sources},
    tree::Value,
};
use denormd_model::key::Key;

/// A file of test cases.
#[derive(Debug, Clone)]
pub struct TestFile {
    /// Path of the file.
    pub name: String,
    /// The cases, in the order of the file.
    pub cases: Vec<TestCase>,
    sources: Sources,
}

/// One case: documents before, and documents expected afterwards.
#[derive(Debug, Clone, Default)]
pub struct TestCase {
    /// Name of the case, for the report.
    pub name: String,
    /// The documents before the rules run.
    pub given: Vec<Documents>,
    /// The expected documents, as far as the case states them.
    pub expect: Vec<Documents>,
    /// The `_id`s of documents that should no longer exist, by collection.
    pub gone: Vec<(String, ConfigPath, Vec<Bson>)>,
}

/// Documents of one collection.
#[derive(Debug, Clone)]
pub struct Documents {
    /// Name of the collection, as written in the file.
    pub collection: String,
    /// Place in the file.
    pub at: ConfigPath,
    /// Documents as written in the file.
    pub documents: Vec<Document>,
}

const KEYS: [&str; 4] = ["name", "given", "expect", "gone"];

impl TestFile {
    /// Reads a file; the extension decides the format.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let (name, format, text) = read(path).map_err(|error| match error {
            ConfigError::Read { path, error, .. } if error.kind() == io::ErrorKind::NotFound => {
                let hint = "check the path; FILE holds cases, see `denormd test --help`";
                ConfigError::Read { path, error, hint }
            }
            other => other,
        })?;
        Self::parse(&name, &text, format)
    }

    fn parse(name: &str, text: &str, format: Format) -> Result<Self, ConfigError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let (tree, faults) = format.parse(text);
        let source = Source::new(name.to_owned(), text.to_owned(), tree);
        let faults: Vec<LocatedMistake> = faults.iter().map(|fault| source.locate_fault(fault)).collect();
        let mut reader = Reader::default();
        let mut cases = Vec::new();
        if let Some(node) = &source.tree {
            let root = Field { at: ConfigPath::default(), node };
            cases = reader.test_file(&root);
        } else if faults.is_empty() {
            reader.mistake(Mistake::new(ConfigPath::default(), "the file is empty").hint(HINT));
        }
        let sources = Sources { files: vec![source], ..Sources::default() };
        if reader.mistakes.is_empty() && faults.is_empty() {
            Ok(Self { name: name.to_owned(), cases, sources })
        } else {
            Err(located(&sources, &reader.mistakes, faults))
        }
    }

    /// Errors found after parsing, with their places in the file.
    #[must_use]
    pub fn report(&self, mistakes: &[Mistake]) -> ConfigError {
        located(&self.sources, mistakes, Vec::new())
    }
}

const HINT: &str = "write `cases:` with a list of { name, given: { parts: [...] }, expect: { products: [...] } }";

impl Reader {
    fn test_file(&mut self, root: &Field<'_>) -> Vec<TestCase> {
        let Some(fields) = self.fields(root, &["cases", "$schema"], |_| None) else { return Vec::new() };
        let Some(cases) = self.required(&fields, "cases", HINT) else { return Vec::new() };
        let Value::Sequence(items) = &cases.node.value else {
            let message = format!("expected a list of cases, found {}", cases.node.kind());
            self.mistake(Mistake::new(cases.at, message).hint("a case begins with a dash: `- name: …`"));
            return Vec::new();
        };
        if items.is_empty() {
            self.mistake(Mistake::new(cases.at.clone(), "the list of cases is empty").hint(HINT));
        }
        let mut names = BTreeSet::new();
        let mut out = Vec::new();
        for (nth, node) in items.iter().enumerate() {
            let field = Field { at: cases.at.index(nth), node };
            let Some(case) = self.test_case(&field) else { continue };
            if !names.insert(case.name.clone()) {
                let message = format!("a case named `{}` exists already", case.name);
                self.mistake(Mistake::new(field.at.key("name"), message));
            }
            out.push(case);
        }
        out
    }

    fn test_case(&mut self, field: &Field<'_>) -> Option<TestCase> {
        let fields = self.fields(field, &KEYS, |_| None)?;
        let name = self.required(&fields, "name", "say in a few words what the case shows");
        let name = name.and_then(|name| self.text(&name)).unwrap_or_default();
        let given = self.required(&fields, "given", "the documents before: { parts: [{ _id: 1, name: bolt }] }");
        let given = given.map(|given| self.collections(&given)).unwrap_or_default();
        let expect = fields.get("expect").map(|expect| self.collections(&expect)).unwrap_or_default();
        for Documents { collection, at, .. } in expect.iter().filter(|expected| expected.documents.is_empty()) {
            let message = format!("no document of `{collection}` is expected, so nothing is compared");
            let hint = "name the documents that should be there; `gone` names the `_id`s of those that should not";
            self.mistake(Mistake::new(at.clone(), message).on_key().hint(hint));
        }
        let gone = fields.get("gone").map(|gone| self.gone(&gone)).unwrap_or_default();
        for (collection, at, _) in gone.iter().filter(|(.., ids)| ids.is_empty()) {
            let message = format!("no `_id` of `{collection}` is named, so nothing is compared");
            self.mistake(Mistake::new(at.clone(), message).on_key());
        }
        if expect.is_empty() && gone.is_empty() {
            let hint = "what should be afterwards: { products: [{ _id: 10, name: bolt }] }";
            self.mistake(Mistake::new(field.at.clone(), "the case expects nothing").hint(hint));
        }
        Some(TestCase { name, given, expect, gone })
    }

    fn collections(&mut self, field: &Field<'_>) -> Vec<Documents> {
        let mut out = Vec::new();
        for entry in self.entries(field).unwrap_or_default() {
            let field = Field { at: field.at.key(&entry.key), node: &entry.node };
            let documents = self.documents(&field);
            out.push(Documents { collection: entry.key.clone(), at: field.at, documents });
        }
        out
    }

    fn documents(&mut self, field: &Field<'_>) -> Vec<Document> {
        let Value::Sequence(items) = &field.node.value else {
            let message = format!("expected a list of documents, found {}", field.node.kind());
            self.mistake(Mistake::new(field.at.clone(), message));
            return Vec::new();
        };
        let mut ids: BTreeSet<Key> = BTreeSet::new();
        let mut out = Vec::new();
        for (nth, node) in items.iter().enumerate() {
            let at = field.at.index(nth);
            let Value::Mapping(_) = &node.value else {
                let message = format!("expected a document, found {}", node.kind());
                self.mistake(Mistake::new(at, message));
                continue;
            };
            let document = self.document(&Field { at: at.clone(), node });
            match document.get("_id") {
                None => {
                    let mistake = Mistake::new(at, "the document has no `_id`");
                    self.mistake(mistake.hint("documents before and afterwards are matched by their `_id`"));
                }
                Some(id) if !ids.insert(Key::one(id.clone())) => {
                    self.mistake(Mistake::new(at.key("_id"), "an `_id` is given twice in this collection"));
                }
                Some(_) => {}
            }
            out.push(document);
        }
        out
    }

    /// Reads a document of the data. A malformed literal would silently become another value.
    fn document(&mut self, field: &Field<'_>) -> Document {
        self.dates(field);
        field.parts().for_each(|part| self.literals(&part));
        to_document(field.node)
    }

    fn gone(&mut self, field: &Field<'_>) -> Vec<(String, ConfigPath, Vec<Bson>)> {
        let mut out = Vec::new();
        for entry in self.entries(field).unwrap_or_default() {
            let at = field.at.key(&entry.key);
            match &entry.node.value {
                Value::Sequence(items) => {
                    let ids = Field { at: at.clone(), node: &entry.node };
                    self.dates(&ids);
                    self.literals(&ids);
                    out.push((entry.key.clone(), at, items.iter().map(to_bson).collect()));
                }
                _ => {
                    let message = format!("expected a list of `_id`s, found {}", entry.node.kind());
                    self.mistake(Mistake::new(at, message));
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(text: &str) -> String {
        TestFile::parse("t.yaml", text, Format::Yaml).unwrap_err().to_string()
    }

    #[test]
    fn a_file_has_cases_with_values_in_extended_json() {
        let text = "cases:\n- name: one\n  given: { a: [{ _id: { $numberLong: \"1\" } }] }\n  expect: { b: [{ _id: 2 }] }\n  \
                    gone: { a: [1] }\n";
        let file = TestFile::parse("t.yaml", text, Format::Yaml).unwrap();
        let [case] = file.cases.as_slice() else { panic!() };
        assert_eq!(case.given[0].documents, [bson::doc! {"_id": 1_i64}]);
        assert_eq!(case.expect[0].collection, "b");
        assert_eq!(case.gone[0].2, [Bson::Int32(1)]);
    }

    #[test]
    fn mistakes_come_with_their_places() {
        assert_eq!(
            wrong("cases:\n- name: one\n  givn: {}\n  expect: { a: [{}] }\n"),
            "t.yaml:2:3: the key `given` is missing\n   2 | - name: one\n     |   ^^^^\n   hint: the documents before: { \
             parts: [{ _id: 1, name: bolt }] }\n\
             t.yaml:3:3: unknown key `givn`\n   3 |   givn: {}\n     |   ^^^^\n   hint: did you mean `given`?\n\
             t.yaml:4:17: the document has no `_id`\n   4 |   expect: { a: [{}] }\n     |                 ^^\n   hint: \
             documents before and afterwards are matched by their `_id`"
        );
        for (text, message) in [
            ("", "the file is empty"),
            ("cases: {}", "expected a list of cases, found a mapping"),
            ("cases: []", "the list of cases is empty"),
            ("cases:\n- name: a\n  given: { a: [] }\n", "the case expects nothing"),
            ("cases:\n- { name: a, given: {}, expect: { a: [] } }", "no document of `a` is expected"),
            ("cases:\n- { name: a, given: {}, gone: { a: [] } }", "no `_id` of `a` is named"),
            ("cases:\n- name: a\n  given: { a: [{ _id: 1 }, { _id: 1.0 }] }\n  gone: { a: [1] }", "given twice"),
            (
                "cases:\n- { name: a, given: { a: [{ _id: { $oid: x } }] }, gone: { a: [1] } }",
                "the value of `$oid` is malformed",
            ),
            (
                "cases:\n- { name: a, given: {}, gone: { a: [{ $numberLong: 1 }] } }",
                "the value of `$numberLong` is malformed",
            ),
            ("cases:\n- name: a\n  given: { a: 5 }\n  gone: { a: 1 }", "expected a list of `_id`s, found an integer"),
            (
                "cases:\n- { name: a, given: {}, gone: {a: [1]} }\n- { name: a, given: {}, gone: {a: [1]} }",
                "exists already",
            ),
        ] {
            assert!(wrong(text).contains(message), "{text}: {}", wrong(text));
        }
    }
}
