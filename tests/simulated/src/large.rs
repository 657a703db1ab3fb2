//! Large collections, whose commands exceed their time limits, and large events, which cannot be sent.
//!
//! The name alone decides whether a collection is large, and the time alone whether an event is. So a repeated command or event
//! has the same outcome.

use std::hash::{DefaultHasher, Hash, Hasher};

use bson::Document;

use crate::{
    oplog::{Change, Entry},
    read::time_limit,
    replies::{CLOSES, Failure},
    state::{Model, State},
};

/// The number of documents that a read in the order of `_id` may go through.
pub const READ: usize = 4;
/// The number of documents that a read may sort.
pub const SORTED: usize = 2;
/// The number of documents that an update statement may match.
pub const MATCHED: usize = 2;
/// One of this number of collections is large.
const COLLECTIONS: u64 = 2;
/// One of this number of events is large.
const EVENTS: u64 = 100;

impl Model {
    /// Makes some collections of a database large from now on: a command with a time limit exceeds it if it is about more than a
    /// few documents of theirs.
    pub fn set_large_collections(&self, database: &str) {
        self.state().large_collections = Some(database.to_owned());
    }

    /// Makes some inserts, updates and replacements in a database too large for a change stream from now on. If `closes` is true,
    /// a half of them closes the connection instead of being an error.
    pub fn set_large_events(&self, database: &str, closes: bool) {
        self.state().large_events = Some((database.to_owned(), closes));
    }
}

impl State {
    /// True if the command has a time limit, and is about a large collection.
    pub fn is_limited(&self, namespace: &str, command: &Document) -> bool {
        let database = namespace.split_once('.').map(|(database, _)| database);
        database.is_some_and(|database| self.large_collections.as_deref() == Some(database))
            && digest(namespace).is_multiple_of(COLLECTIONS)
            && time_limit(command).is_some()
    }

    /// The failure of a stream that is to send the event of this entry; None if the event is not too large.
    pub fn too_large(&self, entry: &Entry) -> Option<Failure> {
        let (database, closes) = self.large_events.as_ref()?;
        let number = digest((entry.time.time, entry.time.increment, entry.nth));
        let has_document = matches!(entry.change, Change::Insert(_) | Change::Replace { .. } | Change::Update { .. });
        if entry.database != *database || !has_document || !number.is_multiple_of(EVENTS) {
            return None;
        }
        let code = if *closes && (number / EVENTS).is_multiple_of(2) { CLOSES } else { 10334 };
        Some(Failure::new(code, "the event is too large to be sent"))
    }
}

fn digest(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails panics")]
mod tests {
    use bson::doc;

    use super::*;

    /// A model with a large collection of eight documents, and the collection's name.
    async fn large() -> (Model, String) {
        let model = Model::new(1);
        model.set_large_collections("d");
        let mut names = (0..).map(|nth| format!("c{nth}"));
        let limited = doc! {"maxTimeMS": 1};
        let name = names.find(|name| model.state().is_limited(&format!("d.{name}"), &limited)).unwrap();
        let documents: Vec<Document> = (0..8).map(|id| doc! {"_id": id}).collect();
        model.run(doc! {"insert": &name, "documents": documents, "$db": "d"}).await;
        (model, name)
    }

    #[tokio::test]
    async fn a_read_of_many_documents_of_a_large_collection_exceeds_its_time_limit() {
        let (model, name) = large().await;
        let page = doc! {"hint": {"_id": 1}, "maxTimeMS": 1};
        for (base, more, expected) in [
            (&page, doc! {}, Some(50)),
            (&page, doc! {"limit": 4}, None),
            (&page, doc! {"min": {"_id": 1}, "max": {"_id": 5}}, None),
            (&page, doc! {"min": {"_id": 1}, "max": {"_id": 6}}, Some(50)),
            (&page, doc! {"skip": 6, "limit": 1}, None),
            (&page, doc! {"maxTimeMS": 0}, None),
            (&doc! {"maxTimeMS": 1}, doc! {}, None),
            (&doc! {"maxTimeMS": 1}, doc! {"sort": {"_id": 1}}, Some(50)),
            (&doc! {"maxTimeMS": 1}, doc! {"sort": {"_id": 1}, "filter": {"_id": {"$lt": 2}}}, None),
        ] {
            let mut find = doc! {"find": &name, "$db": "d"};
            find.extend(base.clone());
            find.extend(more);
            assert_eq!(model.run(find.clone()).await.get_i32("code").ok(), expected, "{find}");
        }
    }

    #[tokio::test]
    async fn what_an_update_has_written_within_its_time_limit_stays() {
        let (model, name) = large().await;
        let update = doc! {"q": {}, "u": {"$set": {"n": 1}}, "multi": true};
        let reply = model.run(doc! {"update": &name, "updates": [update], "maxTimeMS": 1, "$db": "d"}).await;
        assert_eq!(reply.get_i32("code").unwrap(), 50);
        let written = model.run(doc! {"count": &name, "query": {"n": 1}, "$db": "d"}).await;
        assert_eq!(written.get_i32("n").unwrap(), 2);
    }

    #[tokio::test]
    async fn a_large_event_is_sent_only_without_its_document() {
        let model = Model::new(1);
        model.set_large_events("d", true);
        let start = model.run(doc! {"ping": 1, "$db": "d"}).await.get_timestamp("operationTime").unwrap();
        model.run(doc! {"insert": "c", "documents": [{"_id": 1}], "$db": "d"}).await;
        let updates: Vec<Document> = (0..4000).map(|n| doc! {"q": {"_id": 1}, "u": {"$set": {"n": n}}}).collect();
        model.run(doc! {"update": "c", "updates": updates, "$db": "d"}).await;
        let failures: Vec<i32> = {
            let state = model.state();
            state.oplog.iter().filter_map(|entry| state.too_large(entry)).map(|failure| failure.code).collect()
        };
        assert!(failures.contains(&10334) && failures.contains(&CLOSES), "{failures:?}");
        for (projection, passes) in [(doc! {"ns": 1}, false), (doc! {"unread": {"$literal": true}}, true)] {
            let stages = vec![doc! {"$changeStream": {"startAtOperationTime": start}}, doc! {"$project": projection}];
            let opened = model.run(doc! {"aggregate": 1, "pipeline": stages, "cursor": {}, "$db": "d"}).await;
            let id = opened.get_document("cursor").unwrap().get_i64("id").unwrap();
            let more = doc! {"getMore": id, "collection": "$cmd.aggregate", "maxTimeMS": 1, "$db": "d"};
            assert_eq!(model.run(more).await.contains_key("cursor"), passes);
        }
    }
}
