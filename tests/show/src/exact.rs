//! The figures of `denormd advise` against exact counts: one `$group` for each relationship in its report.

use std::collections::BTreeSet;

use bson::{Bson, Document, doc};
use futures_util::TryStreamExt;
use mongodb::{Client, Collection};
use serde_json::{Value, json};

/// Recomputes the figures of each relationship in a report; returns a line for each, and the number of those that
/// differ.
pub async fn compare(client: &Client, report: &Value) -> (Vec<String>, usize) {
    let (mut lines, mut wrong) = (Vec::new(), 0);
    for found in report["relationships"].as_array().expect("a list") {
        let (holder, array) = (side(client, &found["holder"]), &found["lengths"]);
        let (held, key) = side(client, &found["held"]);
        let (holder, path) = holder;
        let exact = count(&holder, &path, (&held, &key)).await;
        let types = found["types"].as_array().expect("a list").iter();
        let resolved: u64 = types.filter_map(|of| of["resolved"].as_u64()).sum();
        let said = json!({
            "references": found["references"], "resolved": resolved, "mean": found["mean"], "fan_out": found["fan_out"],
        });
        let (mut same, mut says, mut counted) = (said == exact, said.to_string(), exact.to_string());
        if let Some((before, _)) = path.rsplit_once(".$[]").filter(|_| !array.is_null()) {
            let exact = lengths(&holder, before).await;
            same &= *array == exact;
            (says, counted) = (format!("{says}, lengths {array}"), format!("{counted}, lengths {exact}"));
        }
        let what = format!("{}.{path} -> {}.{key}", holder.name(), held.name());
        let line = if same {
            format!("{what}: the same: {counted}")
        } else {
            format!("{what}: {says}, but counted {counted}")
        };
        wrong += usize::from(!same);
        lines.push(line);
    }
    (lines, wrong)
}

fn side(client: &Client, side: &Value) -> (Collection<Document>, String) {
    let text = |name: &str| side[name].as_str().expect("a name").to_owned();
    let collection = text("collection");
    let (database, collection) = collection.split_once('.').expect("a database and a collection");
    (client.database(database).collection(collection), text("path"))
}

/// The values at a path, with their counts.
async fn group(collection: &Collection<Document>, path: &str) -> Vec<(Bson, u64)> {
    let mut stages = Vec::new();
    let mut name = String::from("$");
    for part in path.split('.') {
        if part == "$[]" {
            stages.push(doc! {"$unwind": &name});
        } else {
            let dot = if name == "$" { "" } else { "." };
            name = format!("{name}{dot}{part}");
        }
    }
    stages.push(doc! {"$group": {"_id": name, "n": {"$sum": 1_i64}}});
    let found = collection.aggregate(stages).allow_disk_use(true).await.expect("an aggregation");
    let found: Vec<Document> = found.try_collect().await.expect("rows");
    let row = |mut row: Document| {
        let times = u64::try_from(row.get_i64("n").expect("a number")).expect("a count");
        (row.remove("_id").unwrap_or(Bson::Null), times)
    };
    found.into_iter().map(row).filter(|(value, _)| !matches!(value, Bson::Null)).collect()
}

async fn count(holder: &Collection<Document>, path: &str, (held, key): (&Collection<Document>, &str)) -> Value {
    let there: BTreeSet<String> = group(held, key).await.into_iter().map(|(value, _)| value.to_string()).collect();
    let rows = group(holder, path).await;
    let references: u64 = rows.iter().map(|(_, times)| times).sum();
    let fans = rows.into_iter().filter(|(value, _)| there.contains(&value.to_string())).map(|(_, times)| times);
    let fans: Vec<u64> = fans.collect();
    let (documents, resolved) = (held.count_documents(doc! {}).await.expect("a count"), fans.iter().sum::<u64>());
    json!({
        "references": references, "resolved": resolved, "mean": ratio(resolved, documents), "fan_out": fan_out(fans),
    })
}

async fn lengths(collection: &Collection<Document>, array: &str) -> Value {
    let array = format!("${array}");
    let stages = vec![
        doc! {"$match": {"$expr": {"$isArray": &array}}},
        doc! {"$project": {"_id": 0, "n": {"$toLong": {"$size": &array}}}},
    ];
    let found = collection.aggregate(stages).await.expect("an aggregation");
    let found: Vec<Document> = found.try_collect().await.expect("rows");
    let number = |row: &Document| u64::try_from(row.get_i64("n").expect("a number")).expect("a length");
    fan_out(found.iter().map(number).collect())
}

/// Percentiles by nearest rank.
fn fan_out(mut numbers: Vec<u64>) -> Value {
    numbers.sort_unstable();
    let at = |percent: usize| numbers[(numbers.len() * percent).div_ceil(100).max(1) - 1];
    if numbers.is_empty() {
        return Value::Null;
    }
    let mean = ratio(numbers.iter().sum(), numbers.len() as u64);
    json!({"count": numbers.len(), "mean": mean, "median": at(50), "p99": at(99), "max": at(100), "exact": true})
}

#[allow(clippy::cast_precision_loss, reason = "the counts are small")]
fn ratio(over: u64, under: u64) -> f64 {
    if under == 0 { 0.0 } else { over as f64 / under as f64 }
}
