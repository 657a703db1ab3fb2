//! `touch` in random histories: a time is set together with a value that changes, never alone.

use bson::{DateTime, Document, doc};
use denormd_fixture::TestDb;

/// Where an entry of the oplog has the times of [`denormd_oracle::TOUCHED`]: `u` and `i` set fields, `sname` goes deeper.
const PLACES: [&str; 6] = ["u.stamp", "i.stamp", "i.seen.at", "u.seen.at", "sseen.u.at", "sseen.i.at"];

/// Number of updates of the test's documents that have set nothing but a time.
async fn alone(test: &TestDb) -> u64 {
    let only = |place: &str| {
        let mut levels = vec!["$o.diff".to_owned()];
        for name in place.split('.').take(place.matches('.').count()) {
            levels.push(format!("{}.{name}", levels.last().unwrap()));
        }
        let single = |level: &String| doc! {"$eq": [{"$size": {"$objectToArray": level}}, 1]};
        let all: Vec<Document> = levels.iter().map(single).collect();
        // The server computes the second condition for documents that fulfil the first.
        let is_there = doc! {"$eq": [{"$type": format!("$o.diff.{place}")}, "date"]};
        doc! {"$expr": {"$cond": [is_there, {"$and": all}, false]}}
    };
    let name =
        bson::Regex { pattern: format!("^{}\\.", test.name).try_into().unwrap(), options: "".try_into().unwrap() };
    let filter = doc! {"op": "u", "ns": name, "$or": PLACES.map(only).to_vec()};
    test.client.database("local").collection::<Document>("oplog.rs").count_documents(filter).await.unwrap()
}

/// Looks through all updates of the test's documents.
///
/// # Panics
///
/// Panics if one of them has set nothing but a time.
pub async fn assert_with_a_value(test: &TestDb) {
    let found = alone(test).await;
    assert_eq!(found, 0, "updates of nothing but the time");
}

#[tokio::test]
async fn a_time_alone_is_told_from_a_time_with_a_value() {
    let test = denormd_fixture::database().await;
    let documents = test.database().collection::<Document>("t");
    documents
        .insert_many((0..6).map(|id| doc! {"_id": id, "stamp": 0, "text": "long enough for an update of a part"}))
        .await
        .unwrap();
    let time = DateTime::from_millis(1);
    let mut expected = 0;
    for (id, set, is_alone) in [
        (0, doc! {"stamp": time}, 1),
        (1, doc! {"stamp": time, "name": 1}, 0),
        (2, doc! {"seen.at": time}, 1),
        (2, doc! {"seen.at": DateTime::from_millis(2)}, 1),
        (3, doc! {"seen.at": time, "seen.name": 1}, 0),
        (3, doc! {"seen.at": DateTime::from_millis(2), "seen.name": 2}, 0),
        (4, doc! {"name": 1}, 0),
    ] {
        documents.update_one(doc! {"_id": id}, doc! {"$set": set}).await.unwrap();
        expected += is_alone;
        assert_eq!(alone(&test).await, expected, "document {id}");
    }
}
