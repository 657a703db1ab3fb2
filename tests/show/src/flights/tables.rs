//! Loads the CSV files, with types, gaps as missing fields, and `_id`s that nothing refers to.

use std::path::Path;

use bson::{Bson, DateTime, Document};
use futures_util::{StreamExt, stream};
use mongodb::{Client, Database};

use super::DATABASE;

/// Documents in one insert.
const BATCH: usize = 2000;

/// The columns that are not text.
const INTEGERS: &[&str] = &[
    "year",
    "month",
    "day",
    "dep_time",
    "sched_dep_time",
    "dep_delay",
    "arr_time",
    "sched_arr_time",
    "arr_delay",
    "flight",
    "air_time",
    "distance",
    "hour",
    "minute",
    "alt",
    "tz",
    "engines",
    "seats",
    "speed",
];
const DOUBLES: &[&str] = &["lat", "lon"];
const TIMES: &[&str] = &["time_hour"];

/// Numbers of loaded documents.
#[derive(Debug, Clone, Copy)]
pub struct Loaded {
    /// 16
    pub airlines: usize,
    /// 1,458
    pub airports: usize,
    /// 3,322
    pub planes: usize,
    /// 336,776
    pub flights: usize,
}

/// Loads every table of a folder; of the flights at most this number.
pub async fn load(client: &Client, folder: &Path, flights: usize) -> Loaded {
    let database = client.database(DATABASE);
    Loaded {
        airlines: table(&database, folder, "airlines", usize::MAX).await,
        airports: table(&database, folder, "airports", usize::MAX).await,
        planes: table(&database, folder, "planes", usize::MAX).await,
        flights: table(&database, folder, "flights", flights).await,
    }
}

async fn table(database: &Database, folder: &Path, name: &str, most: usize) -> usize {
    let path = folder.join(format!("{name}.csv"));
    let mut reader = csv::Reader::from_path(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let columns: Vec<String> = reader.headers().expect("a header").iter().map(str::to_owned).collect();
    let mut rows = reader.records().take(most).map(|row| document(&columns, &row.expect("a row of CSV")));
    let batches =
        std::iter::from_fn(|| Some(rows.by_ref().take(BATCH).collect::<Vec<_>>()).filter(|batch| !batch.is_empty()));
    let collection = database.collection::<Document>(name);
    let insert = |batch: Vec<Document>| {
        let collection = collection.clone();
        async move { collection.insert_many(&batch).await.expect("an insert").inserted_ids.len() }
    };
    stream::iter(batches).map(insert).buffer_unordered(2).fold(0, async |sum, count| sum + count).await
}

fn document(columns: &[String], row: &csv::StringRecord) -> Document {
    columns.iter().zip(row).filter_map(|(column, text)| Some((column.clone(), value(column, text)?))).collect()
}

/// The value of a cell; None for `NA` and empty cells.
fn value(column: &str, text: &str) -> Option<Bson> {
    if matches!(text, "" | "NA") {
        return None;
    }
    let wrong = |kind: &str| -> ! { panic!("{column}: {text:?} is not {kind}") };
    Some(if INTEGERS.contains(&column) {
        Bson::Int32(text.parse().unwrap_or_else(|_| wrong("an integer")))
    } else if DOUBLES.contains(&column) {
        Bson::Double(text.parse().unwrap_or_else(|_| wrong("a number")))
    } else if TIMES.contains(&column) {
        Bson::DateTime(DateTime::parse_rfc3339_str(text).unwrap_or_else(|_| wrong("a time")))
    } else {
        Bson::String(text.to_owned())
    })
}
