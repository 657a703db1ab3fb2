//! Differences between a document and a test's expectation, path by path. The documents are the test's own, so values
//! are shown.

use bson::{Bson, Document, RawDocumentBuf, doc};

use denormd_model::{shape::type_name, text::shown_or_nothing};

/// A path that differs.
#[derive(Debug, Clone, PartialEq)]
pub struct Differs {
    /// `parts[0].name`; empty for the whole document.
    pub path: String,
    /// The value that the test expects; None where there should be none.
    pub expected: Option<Bson>,
    /// The value that the document has.
    pub found: Option<Bson>,
}

/// Every path that differs in value or type. The order of fields does not matter, that of elements does.
#[must_use]
pub fn between(expected: Option<&Document>, found: Option<&Document>) -> Vec<Differs> {
    let mut out = Vec::new();
    match (expected, found) {
        (Some(expected), Some(found)) => documents("", expected, found, &mut out),
        (expected, found) => {
            let value = |doc: Option<&Document>| doc.cloned().map(Bson::Document);
            values("", value(expected).as_ref(), value(found).as_ref(), &mut out);
        }
    }
    out
}

fn documents(path: &str, expected: &Document, found: &Document, out: &mut Vec<Differs>) {
    let added = found.keys().filter(|name| !expected.contains_key(*name));
    for name in expected.keys().chain(added) {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        values(&path, expected.get(name), found.get(name), out);
    }
}

fn values(path: &str, expected: Option<&Bson>, found: Option<&Bson>, out: &mut Vec<Differs>) {
    match (expected, found) {
        (Some(Bson::Document(expected)), Some(Bson::Document(found))) => documents(path, expected, found, out),
        (Some(Bson::Array(expected)), Some(Bson::Array(found))) => {
            for nth in 0..expected.len().max(found.len()) {
                values(&format!("{path}[{nth}]"), expected.get(nth), found.get(nth), out);
            }
        }
        (None, None) => {}
        (Some(expected), Some(found)) if identical(expected, found) => {}
        _ => out.push(Differs { path: path.to_owned(), expected: expected.cloned(), found: found.cloned() }),
    }
}

/// True if two values are equal to the last bit: 1 is not 1.0, and NaN is NaN.
fn identical(a: &Bson, b: &Bson) -> bool {
    if let (Bson::Double(a), Bson::Double(b)) = (a, b)
        && a.is_nan()
    {
        return b.is_nan();
    }
    let bytes = |value: &Bson| RawDocumentBuf::try_from(&doc! {"v": value}).map(RawDocumentBuf::into_bytes);
    matches!((bytes(a), bytes(b)), (Ok(a), Ok(b)) if a == b)
}

impl Differs {
    /// The expected and the found value as text, with their types if these differ.
    #[must_use]
    pub fn shown(&self) -> (String, String) {
        let (expected, found) = (shown_or_nothing(self.expected.as_ref()), shown_or_nothing(self.found.as_ref()));
        let kinds = (self.expected.as_ref().map(type_name), self.found.as_ref().map(type_name));
        match kinds {
            (Some(left), Some(right)) if left != right => {
                (format!("{expected} ({left})"), format!("{found} ({right})"))
            }
            _ => (expected, found),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(expected: &Document, found: &Document) -> Vec<String> {
        let one = |differs: &Differs| {
            let (expected, found) = differs.shown();
            format!("{}: {expected} / {found}", differs.path)
        };
        between(Some(expected), Some(found)).iter().map(one).collect()
    }

    #[test]
    fn each_path_that_differs_is_named() {
        assert_eq!(lines(&doc! {"a": 1, "b": 2}, &doc! {"b": 2, "a": 1}), [""; 0]);
        assert_eq!(lines(&doc! {"a": 1}, &doc! {"a": 1.0}), ["a: 1 (int) / 1.0 (double)"]);
        assert_eq!(
            lines(&doc! {"p": [{"id": 1, "name": "x"}]}, &doc! {"p": [{"id": 1}, 5], "extra": null}),
            ["p[0].name: \"x\" / nothing", "p[1]: nothing / 5", "extra: nothing / null"]
        );
        assert_eq!(lines(&doc! {"a": {"b": 1}}, &doc! {"a": []}), ["a: {\"b\":1} (object) / [] (array)"]);
        assert_eq!(lines(&doc! {"a": f64::NAN}, &doc! {"a": f64::NAN}), [""; 0]);
    }

    #[test]
    fn a_whole_document_can_be_missing_or_too_many() {
        assert_eq!(between(Some(&doc! {"_id": 1}), None)[0].shown(), ("{\"_id\":1}".to_owned(), "nothing".to_owned()));
        assert_eq!(between(None, None), []);
    }
}
