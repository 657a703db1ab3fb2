//! The version of the state's format, which determines the programs that may use the state.

use bson::{Bson, doc};

use super::unreadable;
use denormd_model::clock;

use denormd_mongo::{
    Server, bounded, code,
    error::{Error, Kind, Result},
    unless,
};

/// The collection of formats: one document per deployment.
pub const COLLECTION: &str = "formats";
/// The newest version that this program reads and writes. It increases when an older program would misread newer state;
/// additional fields that an older program ignores do not count.
///
/// 1: the first version with a number. State without one comes from an earlier daemon and is read as it is: everything
/// it lacks (terms, generations, retired definitions) has a defined default.
///
/// 2: the state of a deployment with several partitions. An unpartitioned one still has version 1.
pub const VERSION: i32 = 2;
/// The version of an unpartitioned deployment's state.
pub const UNDIVIDED: i32 = 1;

/// Refuses the state of a newer program before writing to it, and marks the state of an older one with a version.
/// Returns the number of partitions of the deployment.
pub async fn check(server: &Server, database: &str, deployment: &str) -> Result<u32> {
    let formats = server.collection(database, COLLECTION);
    let found = bounded(formats.find_one(doc! {"_id": deployment})).await?.unwrap_or_default();
    let no_number = |what: &str| unreadable(COLLECTION, &found, &format!("its {what} is no number"));
    let version =
        found.get("version").map(|version| version.as_i32().ok_or_else(|| no_number("version"))).transpose()?;
    match version {
        Some(version) if version > VERSION => Err(newer(version, written_by(&found))),
        Some(VERSION) => partitions(&found).ok_or_else(|| no_number("number of partitions")),
        Some(UNDIVIDED) => Ok(1),
        _ => {
            let state = doc! {"version": UNDIVIDED, "program": env!("CARGO_PKG_VERSION"), "since": clock::now()};
            // The filter excludes a document that a newer program has marked meanwhile, and the upsert then fails with
            // a duplicate key.
            let older = doc! {"_id": deployment, "version": {"$not": {"$gt": UNDIVIDED}}};
            let marked = bounded(formats.update_one(older, doc! {"$set": state}).upsert(true)).await;
            let marked = unless(code::DUPLICATE_KEY, marked)?.map(|_| 1);
            marked.ok_or_else(|| Error::new(Kind::Unavailable, "another instance has just changed the state's format"))
        }
    }
}

/// The filter for the format of a deployment with this number of partitions.
#[must_use]
pub fn of_number(deployment: &str, partitions: i32) -> bson::Document {
    let partitions = if partitions > 1 { partitions.into() } else { Bson::Null };
    doc! {"_id": deployment, "partitions": partitions}
}

/// The update that sets this number of partitions, and the version that it needs.
#[must_use]
pub fn divided(partitions: i32) -> bson::Document {
    let (version, unset) = if partitions > 1 { (VERSION, "") } else { (UNDIVIDED, "partitions") };
    let mut state = doc! {"version": version, "program": env!("CARGO_PKG_VERSION"), "since": clock::now()};
    if unset.is_empty() {
        state.insert("partitions", partitions);
        return doc! {"$set": state};
    }
    doc! {"$set": state, "$unset": {unset: ""}}
}

/// The number of partitions of a deployment, from its format.
fn partitions(found: &bson::Document) -> Option<u32> {
    u32::try_from(found.get_i32("partitions").ok()?).ok()
}

fn written_by(found: &bson::Document) -> Option<String> {
    found.get_str("program").ok().map(ToOwned::to_owned)
}

fn newer(version: i32, program: Option<String>) -> Error {
    let by = program.map(|program| format!(" by denormd {program}")).unwrap_or_default();
    let message = format!("the state has format {version}, written{by}; this denormd knows formats up to {VERSION}");
    Error::new(Kind::Topology, message).hint(
        "run that version or a newer one. To go back anyway, stop every instance and drop the state database: every \
         rule then counts as new, and pauses, agreements, dead letters and values kept for `undo` are lost",
    )
}
