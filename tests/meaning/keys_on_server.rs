//! Keys are equal exactly when the server calls them equal.

use bson::{Bson, Document, bson, doc};
use denormd_model::key::Key;

fn values() -> Vec<Bson> {
    let decimal = |text: &str| Bson::Decimal128(text.parse().unwrap());
    let mut values = vec![
        bson!(0),
        bson!(-0.0),
        bson!(1),
        bson!(1.0),
        Bson::Int64(1),
        decimal("1"),
        decimal("1.0"),
        decimal("1E0"),
        decimal("0"),
        decimal("-0E+3"),
        bson!(0.1),
        decimal("0.1"),
        bson!(0.5),
        decimal("0.5"),
        bson!(1e22),
        decimal("1E22"),
        bson!(1e23),
        decimal("1E23"),
        Bson::Int64(i64::MAX),
        Bson::Int64(i64::MIN),
        bson!(9_223_372_036_854_775_807.0),
        bson!(-9_223_372_036_854_775_808.0),
        decimal("9223372036854775807"),
        decimal("-9223372036854775808"),
        bson!(f64::NAN),
        decimal("NaN"),
        bson!(f64::INFINITY),
        decimal("-Infinity"),
        bson!(f64::NEG_INFINITY),
        bson!(5e-324),
        decimal("5E-324"),
        bson!("1"),
        bson!("a"),
        bson!("A"),
        Bson::Symbol("a".to_owned()),
        bson!(true),
        bson!(false),
        Bson::MinKey,
        Bson::MaxKey,
        bson!({}),
        bson!({"a": 1}),
        bson!({"a": 1.0}),
        bson!({"a": 1, "b": 2}),
        bson!({"b": 2, "a": 1}),
        bson!({"a": [1, {"b": 2.0}]}),
        bson!({"a": [1.0, {"b": 2}]}),
        Bson::DateTime(bson::DateTime::from_millis(1)),
        Bson::Timestamp(bson::Timestamp { time: 1, increment: 2 }),
        Bson::Binary(bson::Binary { subtype: bson::spec::BinarySubtype::Generic, bytes: vec![1] }),
        Bson::Binary(bson::Binary { subtype: bson::spec::BinarySubtype::UserDefined(128), bytes: vec![1] }),
        Bson::RegularExpression(bson::Regex { pattern: "a".try_into().unwrap(), options: "i".try_into().unwrap() }),
        Bson::RegularExpression(bson::Regex { pattern: "a".try_into().unwrap(), options: "".try_into().unwrap() }),
        bson!("\u{e9}"),
        bson!("e\u{301}"),
        bson!("$name"),
    ];
    values.extend((-3..3).map(|n| Bson::Int32(n * 1000)));
    values.extend((-3..3).map(|n| Bson::Double(f64::from(n * 1000))));
    values
}

#[tokio::test]
async fn keys_are_equal_when_the_server_says_so() {
    let test = denormd_fixture::database().await;
    let collection = test.database().collection::<Document>("values");
    let values = values();
    let docs = values.iter().enumerate().map(|(n, value)| doc! {"_id": i32::try_from(n).unwrap(), "v": value.clone()});
    collection.insert_many(docs).await.unwrap();
    for (n, value) in values.iter().enumerate() {
        let mut found = collection.find(doc! {"v": {"$eq": value.clone()}}).await.unwrap();
        let mut equal = Vec::new();
        while found.advance().await.unwrap() {
            let doc = Document::try_from(found.current()).unwrap();
            equal.push(usize::try_from(doc.get_i32("_id").unwrap()).unwrap());
        }
        equal.sort_unstable();
        let ours: Vec<usize> =
            (0..values.len()).filter(|m| Key::one(values[*m].clone()) == Key::one(value.clone())).collect();
        assert_eq!(ours, equal, "value {n}: {value:?}");
    }
}
