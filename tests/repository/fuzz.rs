//! Any config file, field path or change event is read or refused, never with a panic, and a value that is read is
//! written back unchanged. Drawn by proptest, which shrinks failures; `DENORMD_FUZZ=100000` draws that many of each.

use bson::{Bson, Document, RawDocument, RawDocumentBuf, doc, oid::ObjectId};
use denormd_engine::change::ChangeEvent;
use denormd_model::{field_path::FieldPath, key::Key};
use denormd_rules::{
    config::{Format, load_str},
    plan,
};
use proptest::{collection::vec, prelude::*, sample::Index};

/// The example configs, which contain every key and every form of rule.
fn examples() -> Vec<String> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("config");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.filter(|path| path.extension().is_some_and(|e| e == "yaml")).collect();
    files.sort();
    files.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect()
}

/// Edits by a person or by accident.
#[derive(Debug, Clone)]
enum Edit {
    Insert(Index, String),
    DeleteLine(Index),
    DoubleLine(Index),
    Cut(Index, Index),
    SwapWords(Index, Index),
}

fn edit() -> impl Strategy<Value = Edit> {
    let piece = prop_oneof![
        Just("$[]".to_owned()),
        Just(": ".to_owned()),
        Just("\n  - ".to_owned()),
        Just("{ a: [".to_owned()),
        Just("&a *a".to_owned()),
        Just("$literal".to_owned()),
        Just("null".to_owned()),
        Just("-9223372036854775809".to_owned()),
        "\\PC{0,6}",
    ];
    prop_oneof![
        (any::<Index>(), piece).prop_map(|(at, text)| Edit::Insert(at, text)),
        any::<Index>().prop_map(Edit::DeleteLine),
        any::<Index>().prop_map(Edit::DoubleLine),
        (any::<Index>(), any::<Index>()).prop_map(|(from, to)| Edit::Cut(from, to)),
        (any::<Index>(), any::<Index>()).prop_map(|(a, b)| Edit::SwapWords(a, b)),
    ]
}

fn edited(text: &str, edits: &[Edit]) -> String {
    let mut text = text.to_owned();
    for edit in edits {
        if text.is_empty() {
            break;
        }
        let boundary = |index: &Index, text: &str| {
            let mut at = index.index(text.len() + 1);
            while !text.is_char_boundary(at) {
                at -= 1;
            }
            at
        };
        let lines = || text.lines().map(ToOwned::to_owned).collect::<Vec<String>>();
        text = match edit {
            Edit::Insert(at, piece) => {
                let at = boundary(at, &text);
                format!("{}{piece}{}", &text[..at], &text[at..])
            }
            Edit::DeleteLine(at) => {
                let mut lines = lines();
                lines.remove(at.index(lines.len()));
                lines.join("\n")
            }
            Edit::DoubleLine(at) => {
                let mut lines = lines();
                let nth = at.index(lines.len());
                lines.insert(nth, lines[nth].clone());
                lines.join("\n")
            }
            Edit::Cut(a, b) => {
                let (a, b) = (boundary(a, &text), boundary(b, &text));
                let (from, to) = (a.min(b), a.max(b).min(a.min(b) + 40));
                let to = (to..=text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len());
                format!("{}{}", &text[..from], &text[to..])
            }
            Edit::SwapWords(a, b) => {
                let mut words: Vec<&str> = text.split_inclusive(' ').collect();
                let (a, b) = (a.index(words.len()), b.index(words.len()));
                words.swap(a, b);
                words.concat()
            }
        };
    }
    text
}

fn value() -> impl Strategy<Value = Bson> {
    let leaf = prop_oneof![
        Just(Bson::Null),
        any::<i32>().prop_map(Bson::Int32),
        any::<i64>().prop_map(Bson::Int64),
        any::<f64>().prop_map(Bson::Double),
        any::<bool>().prop_map(Bson::Boolean),
        "\\PC{0,8}".prop_map(Bson::String),
        any::<[u8; 12]>().prop_map(|bytes| Bson::ObjectId(ObjectId::from_bytes(bytes))),
        any::<i64>().prop_map(|millis| Bson::DateTime(bson::DateTime::from_millis(millis))),
        any::<(u32, u32)>().prop_map(|(time, increment)| Bson::Timestamp(bson::Timestamp { time, increment })),
        any::<[u8; 16]>().prop_map(|bytes| Bson::Decimal128(bson::Decimal128::from_bytes(bytes))),
        Just(Bson::MinKey),
        Just(Bson::MaxKey),
        Just(Bson::Undefined),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(Bson::Array),
            vec(("[a-z$._0-9]{0,6}", inner), 0..4).prop_map(|pairs| Bson::Document(pairs.into_iter().collect())),
        ]
    })
}

fn cases() -> u32 {
    std::env::var("DENORMD_FUZZ").map_or(400, |text| text.parse().expect("DENORMD_FUZZ is a number"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_edited_config_is_read_or_refused(which: Index, edits in vec(edit(), 1..6)) {
        let examples = examples();
        let text = edited(&examples[which.index(examples.len())], &edits);
        match load_str(&text, Format::Yaml) {
            Ok(loaded) => match plan::compile(&loaded.config, None) {
                Ok(plan) => prop_assert_eq!(plan.rules.len(), loaded.config.rules.len()),
                Err(mistakes) => prop_assert!(!loaded.report(&mistakes).to_string().is_empty()),
            },
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn any_text_is_refused_as_a_config_of_every_format(text in "\\PC{0,200}") {
        for format in [Format::Yaml, Format::Toml, Format::Json] {
            prop_assert!(load_str(&text, format).is_err());
        }
    }

    #[test]
    fn a_field_path_that_is_read_is_written_back(text in "[a-c$.\\[\\]0-9]{0,14}") {
        if let Ok(path) = FieldPath::parse(&text) {
            prop_assert_eq!(path.to_string(), text);
        }
    }

    #[test]
    fn any_document_is_a_change_event_or_an_error(
        operation in "(insert|update|replace|delete|drop|rename|dropDatabase|[a-z]{0,5})",
        fields in vec(("(ns|to|documentKey|fullDocument|fullDocumentBeforeChange|changed|clusterTime|wallTime|_id)", value()), 0..8),
    ) {
        let mut event = doc! {"operationType": operation};
        event.extend(fields);
        let raw = RawDocumentBuf::try_from(&event).unwrap();
        if let Ok(decoded) = ChangeEvent::decode(&raw) {
            prop_assert_eq!(ChangeEvent::decode(&raw).unwrap().id, decoded.id);
        }
    }

    #[test]
    fn any_bytes_are_a_change_event_or_an_error(mut bytes in vec(any::<u8>(), 5..200)) {
        let length = u32::try_from(bytes.len()).unwrap().to_le_bytes();
        bytes[..4].copy_from_slice(&length);
        *bytes.last_mut().unwrap() = 0;
        if let Ok(raw) = RawDocument::from_bytes(&bytes) {
            // A panic fails the test.
            let decoded = ChangeEvent::decode(raw);
            prop_assert!(decoded.is_ok() || Document::try_from(raw).is_err());
        }
    }

    #[test]
    fn a_key_equals_itself_whatever_it_holds(value in value()) {
        prop_assert_eq!(Key::one(value.clone()), Key::one(value));
    }
}
