//! The source collections that have existed.

use std::collections::HashMap;

use bson::Bson;
use parking_lot::Mutex;

use denormd_model::namespace::Namespace;

/// The UUIDs of source collections that have existed: one that is missing, or has another UUID, was dropped.
#[derive(Debug, Default)]
pub struct KnownSources(Mutex<HashMap<Namespace, Bson>>);

impl KnownSources {
    /// The UUID of a source collection that is known to have existed.
    #[must_use]
    pub fn uuid(&self, source: &Namespace) -> Option<Bson> {
        self.0.lock().get(source).cloned()
    }

    /// Remembers the UUID of a source collection, or forgets it.
    pub fn saw(&self, source: &Namespace, uuid: Option<Bson>) {
        let mut sources = self.0.lock();
        match uuid {
            Some(uuid) => drop(sources.insert(source.clone(), uuid)),
            None => drop(sources.remove(source)),
        }
    }
}
