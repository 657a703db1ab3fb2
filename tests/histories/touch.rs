//! `touch` in random histories: a time is set together with a value that changes, never alone.

use bson::{Bson, Document, Timestamp};
use denormd_fixture::TestDb;
use denormd_oracle::TOUCHED;

use crate::cases::oplog;

/// Looks through all updates of the test's documents.
///
/// # Panics
///
/// Panics if one of them has set nothing but a time.
pub async fn assert_with_a_value(test: &TestDb) {
    let entries = oplog(test, Timestamp { time: 0, increment: 0 }).await;
    let alone = |entry: &&Document| {
        let diff = entry.get_document("o").and_then(|update| update.get_document("diff"));
        diff.is_ok_and(|diff| {
            let paths = changed(diff, "");
            !paths.is_empty() && paths.iter().all(|path| TOUCHED.contains(&path.as_str()))
        })
    };
    let found: Vec<&Document> = entries.iter().filter(alone).collect();
    assert!(found.is_empty(), "{} updates of nothing but the time, the first: {}", found.len(), found[0]);
}

/// The paths that an entry of the oplog changes: `u` and `i` set fields, `d` removes them, `sname` goes deeper.
fn changed(diff: &Document, above: &str) -> Vec<String> {
    let mut out = Vec::new();
    for (name, value) in diff {
        match (name.as_str(), value) {
            ("u" | "i" | "d", Bson::Document(fields)) => {
                for (field, value) in fields {
                    match value {
                        Bson::Document(inside) if name == "i" && inside.len() == 1 => {
                            out.extend(inside.keys().map(|inside| format!("{above}{field}.{inside}")));
                        }
                        _ => out.push(format!("{above}{field}")),
                    }
                }
            }
            (name, Bson::Document(inside)) if name.starts_with('s') => {
                out.extend(changed(inside, &format!("{above}{}.", &name[1..])));
            }
            (name, _) => out.push(format!("{above}{name}")),
        }
    }
    out
}

#[test]
fn a_time_alone_is_told_from_a_time_with_a_value() {
    let date = bson::DateTime::from_millis(0);
    let paths = |diff: Document| changed(&diff, "");
    assert_eq!(paths(bson::doc! {"u": {"stamp": date}}), ["stamp"]);
    assert_eq!(paths(bson::doc! {"i": {"seen": {"at": date}}}), ["seen.at"]);
    assert_eq!(paths(bson::doc! {"sseen": {"u": {"at": date}}}), ["seen.at"]);
    assert_eq!(paths(bson::doc! {"u": {"stamp": date}, "d": {"name": false}}), ["stamp", "name"]);
}
