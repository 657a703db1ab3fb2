//! A collection, named with its database.

use std::{collections::BTreeMap, fmt};

/// A collection and its database.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Namespace {
    /// The name of the database.
    pub database: String,
    /// The name of the collection.
    pub collection: String,
}

impl Namespace {
    /// The names of the collections of each database, in the order in which they are given.
    #[must_use]
    pub fn by_database<'a>(all: impl IntoIterator<Item = &'a Self>) -> BTreeMap<&'a str, Vec<&'a str>> {
        let mut names: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for Self { database, collection } in all {
            names.entry(database).or_default().push(collection);
        }
        names
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.database, self.collection)
    }
}
