//! The term in each document of the state, which only a leader with that term or a later one may change.

use bson::{Document, doc};
use mongodb::Collection;

use denormd_mongo::{
    Server, bounded, code,
    error::{Error, Kind, Result},
};

/// A filter for the document with this `_id`, unless a later leader has marked it. An upsert then fails with a
/// duplicate key.
pub(super) fn mine(server: &Server, id: Document) -> Document {
    doc! {"_id": id, "term": {"$not": {"$gt": server.term()}}}
}

/// The error for a refused upsert: a later leader may have marked the document with this `_id`.
pub(super) async fn refused_upsert(
    server: &Server,
    documents: &Collection<Document>,
    id: Document,
    error: Error,
) -> Error {
    if error.code != Some(code::DUPLICATE_KEY) {
        return error;
    }
    match not_superseded(server, documents, id).await {
        Ok(()) => Error::new(Kind::Unavailable, "the state was changed in the meantime"),
        Err(error) => error,
    }
}

/// An error if a later leader has marked the document with this `_id`: a write that found nothing may have been refused for that.
pub(super) async fn not_superseded(server: &Server, documents: &Collection<Document>, id: Document) -> Result<()> {
    let later = doc! {"_id": id, "term": {"$gt": server.term()}};
    if bounded(documents.find_one(later)).await?.is_some() {
        return Err(superseded(server));
    }
    Ok(())
}

/// The state has the mark of a later leader: the leadership is over.
pub(super) fn superseded(server: &Server) -> Error {
    server.supersede();
    Error::new(Kind::Unavailable, "another instance has become the leader")
}
