//! The version of the state's format: who may read and write it.

use bson::{Bson, DateTime, doc};

use crate::{
    error::{Error, Kind, Result},
    mongo::{Server, bounded},
};

/// The collection of formats: one document a deployment.
pub const COLLECTION: &str = "formats";
/// What this program reads and writes. It grows when an older program would misread what a newer one has written; fields
/// that an older one passes over do not count.
///
/// 1: the first with a version. State without one is of a daemon from before, and is read as it is: what it lacks (terms,
/// generations, retired definitions) has a meaning when missing.
///
/// 2: the state of a deployment that is divided into partitions. One that is not divided is still 1.
pub const VERSION: i32 = 2;
/// What the state of a deployment that is not divided has.
pub const UNDIVIDED: i32 = 1;
/// DuplicateKey: another instance has written it at the same moment.
const DUPLICATE_KEY: i32 = 11000;

/// Refuses the state of a newer program before anything is written to it; marks that of an older one as this program's.
/// Returns how many partitions the deployment is divided into.
pub async fn check(server: &Server, database: &str, deployment: &str) -> Result<u32> {
    let formats = server.collection(database, COLLECTION);
    let found = bounded(formats.find_one(doc! {"_id": deployment})).await?;
    let version = found.as_ref().and_then(|found| found.get_i32("version").ok());
    match version {
        Some(version) if version > VERSION => Err(newer(version, found.and_then(|found| written_by(&found)))),
        Some(VERSION | UNDIVIDED) => Ok(found.and_then(|found| partitions(&found)).unwrap_or(1)),
        _ => {
            let state = doc! {"version": UNDIVIDED, "program": env!("CARGO_PKG_VERSION"), "since": DateTime::now()};
            // One that a newer program has marked meanwhile is not found, and cannot be inserted a second time.
            let older = doc! {"_id": deployment, "version": {"$not": {"$gt": UNDIVIDED}}};
            let marked = bounded(formats.update_one(older, doc! {"$set": state}).upsert(true)).await;
            match marked {
                Err(error) if error.code == Some(DUPLICATE_KEY) => {
                    Err(Error::new(Kind::Unavailable, "another instance has just changed the state's format"))
                }
                marked => marked.map(|_| 1),
            }
        }
    }
}

/// The format of a deployment that is divided into so many partitions.
#[must_use]
pub fn of_number(deployment: &str, partitions: i32) -> bson::Document {
    let partitions = if partitions > 1 { partitions.into() } else { Bson::Null };
    doc! {"_id": deployment, "partitions": partitions}
}

/// The update that makes it the state of a deployment that is divided into so many partitions.
#[must_use]
pub fn divided(partitions: i32) -> bson::Document {
    let (version, unset) = if partitions > 1 { (VERSION, "") } else { (UNDIVIDED, "partitions") };
    let mut state = doc! {"version": version, "program": env!("CARGO_PKG_VERSION"), "since": DateTime::now()};
    if unset.is_empty() {
        state.insert("partitions", partitions);
        return doc! {"$set": state};
    }
    doc! {"$set": state, "$unset": {unset: ""}}
}

/// How many partitions a deployment is divided into, by its format.
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
        "run that version or a newer one. To go back all the same, stop every instance and drop the state database: \
         everything is backfilled then",
    )
}
