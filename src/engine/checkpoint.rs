//! The recorded progress of streams, rules and jobs, and its storage.

pub mod adoption;
pub mod earlier;
pub mod fan_out;
pub mod format;
pub mod kept;
pub mod progress;
pub mod requests;
pub mod rule_record;
pub mod store;
mod term;
pub mod watermark;

use std::fmt::Display;

use bson::{Bson, Document};
use denormd_mongo::error::{Error, Result};
use serde::de::DeserializeOwned;

/// The error for a document of the state database that cannot be read.
pub(crate) fn unreadable(collection: &str, document: &Document, why: &(impl Display + ?Sized)) -> Error {
    let id = document.get("_id").cloned().unwrap_or(Bson::Null).into_relaxed_extjson();
    Error::internal(format!("`_id` {id} in the state collection `{collection}` cannot be read: {why}"))
        .hint("was it written by another version, or by hand?")
}

/// Reads a document of the state database.
pub(crate) fn read<T: DeserializeOwned>(collection: &str, document: &Document) -> Result<T> {
    bson::deserialize_from_document(document.clone()).map_err(|error| unreadable(collection, document, &error))
}
