//! The server holds back the updates that no rule reads, by a pattern that must mean what the router means.

use std::collections::BTreeSet;

use bson::doc;
use denormd::{field_path::FieldPath, watch::pattern};
use futures_util::TryStreamExt;
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};

#[tokio::test]
async fn the_servers_pattern_and_the_router_agree() {
    let test = denormd_fixture::database().await;
    let updates = test.database().collection::<bson::Document>("updates");
    let seed = rand::rng().random();
    let mut draw = StdRng::seed_from_u64(seed);
    let words = ["a", "b", "ab", "a+", "$id", "0", "12", "", "\n", "é", "(", "\\E"];
    let mut changed: Vec<String> = (0..2000)
        .map(|_| (0..draw.random_range(1..6)).map(|_| *words.choose(&mut draw).unwrap()).collect::<Vec<_>>().join("."))
        .collect();
    changed.sort();
    changed.dedup();
    updates.insert_many(changed.iter().map(|path| doc! {"_id": path, "changed": ["nothing", path]})).await.unwrap();
    let segments = ["a", "b", "ab", "a+", "$id", "é", "(", "\\E", "$[]"];
    let mut paths = BTreeSet::new();
    while paths.len() < 150 {
        let text: Vec<&str> = (0..draw.random_range(1..5)).map(|_| *segments.choose(&mut draw).unwrap()).collect();
        paths.extend(FieldPath::parse(&text.join(".")));
    }
    for path in paths {
        let query = doc! {"changed": {"$regex": pattern(&path), "$options": "s"}};
        let found: Vec<bson::Document> = updates.find(query).await.unwrap().try_collect().await.unwrap();
        let found: BTreeSet<&str> = found.iter().map(|doc| doc.get_str("_id").unwrap()).collect();
        let expected: BTreeSet<&str> =
            changed.iter().map(String::as_str).filter(|text| path.touched_by(text)).collect();
        let wrong: Vec<&&str> = found.symmetric_difference(&expected).collect();
        assert!(wrong.is_empty(), "{path}: {wrong:?} (seed {seed})");
    }
}
