//! A second, independent definition of the meaning of denormd's rules: an in-memory oracle that computes the state of
//! the database once denormd has converged, and a generator of random rules and histories for comparisons.
//!
//! The oracle shares no code with denormd, processes whole collections, and never connects to a server. It takes the
//! documents as they are stored and recomputes every owned path from the user-owned rest, rule after rule in dependency
//! order:
//!
//! ```
//! use bson::doc;
//! use denormd_oracle::{World, differences, expected};
//!
//! let rules = [doc! {
//!     "name": "part-names",
//!     "copy": {
//!         "source": "parts",
//!         "target": "products",
//!         "match": { "parts.$[].id": "_id" },
//!         "set": { "parts.$[].name": "$name" },
//!     },
//! }];
//! let stored = World::from([
//!     ("parts".into(), vec![doc! { "_id": 1, "name": "bolt" }]),
//!     ("products".into(), vec![doc! { "_id": 7, "parts": [{ "id": 1.0 }, { "id": 2, "name": "stale" }] }]),
//! ]);
//! let expectation = expected(&rules, "shop", &stored).unwrap();
//! assert_eq!(expectation.world["products"], [doc! { "_id": 7, "parts": [{ "id": 1.0, "name": "bolt" }, { "id": 2 }] }]);
//! assert_eq!(differences(&expectation, &stored).len(), 2);
//! ```
//!
//! If the current value depends on the past (`keep`, `once`, a target outside `target.where`, a write that the server
//! refuses, a circle in a tree), the oracle expects the stored value: it cannot tell a value that was kept correctly from one that was not.
//! It checks `remove` and `delete` by documents that should be gone, not by documents that should still exist. Some of both
//! follow from the world at an earlier comparison: [`Oracle::staying`]. The oracle takes fields that no rule
//! owns from the stored documents; [`may_write`] detects writes that change them.

mod accumulate;
mod differences;
mod expected;
mod expression;
mod generate;
mod op;
mod ownership;
mod path;
mod query;
mod rule;
mod tree;
mod value;

use std::collections::BTreeMap;

use bson::Document;

pub use differences::differences;
pub use expected::{Expectation, Oracle, Staying, expected};
pub use generate::{Generator, NOT_UTF8, Odd, Options, TOUCHED};
pub use op::Op;
pub use ownership::may_write;
pub use query::matches;
pub use rule::Rule;
pub use value::{compare, equal, identical};

/// Collections by the names that rules use, each with all its documents. A collection that does not exist has no entry.
pub type World = BTreeMap<String, Vec<Document>>;
