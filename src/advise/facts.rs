//! The input of the advice: one relationship with all its figures. Plain data.

use denormd_model::{field_path::FieldPath, namespace::Namespace};

use super::{fan_out::FanOut, relationships::Link};
use denormd_model::distribution::{Distribution, How, Known, ratio};

/// A number of events and the period in which they happened.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// Number of events.
    pub times: u64,
    /// Length of the period, in seconds.
    pub seconds: f64,
}

impl Rate {
    /// Events per day.
    #[must_use]
    pub fn per_day(&self) -> f64 {
        if self.seconds > 0.0 { ratio(self.times, 1) / self.seconds * 86_400.0 } else { 0.0 }
    }
}

/// The form of the references in a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// One id.
    One,
    /// An array of ids.
    Ids,
    /// An array of subdocuments with an id in each.
    Subdocuments,
}

/// One relationship with its figures.
#[derive(Debug, Clone, PartialEq)]
pub struct Relationship {
    /// The fields of both ends.
    pub link: Link,
    /// The form of the references.
    pub form: Form,
    /// The bytes that each reference spends on being a DBRef; None for other references.
    pub db_ref: Option<u64>,
    /// References per referenced document, and the number that resolve.
    pub fan_out: FanOut,
    /// References per referring document, if they are in an array.
    pub lengths: Option<Distribution>,
    /// The number of key values that several documents share.
    pub duplicates: Known<u64>,
    /// The referring side.
    pub holder: Side,
    /// The referenced side.
    pub held: Side,
    /// The field of the referenced documents that refers back.
    pub back: Option<FieldPath>,
    /// Number of other fields that refer to the referring documents.
    pub others: usize,
    /// True if a rule of the config already collects the referring documents.
    pub collected: bool,
    /// Other collections in which the referring documents might be embedded.
    pub parents: Vec<String>,
    /// The limit and order with which the application reads the referring documents of one referenced document.
    pub shown: Option<Shown>,
    /// Joins seen in the log, and the number of them that fetch whole documents.
    pub joins: (u64, u64),
    /// The fields that might be copied.
    pub fields: Vec<Candidate>,
}

/// One end of a relationship.
#[derive(Debug, Clone, PartialEq)]
pub struct Side {
    /// The collection of this side.
    pub namespace: Namespace,
    /// Number of documents.
    pub count: u64,
    /// The distribution of the document sizes, in bytes.
    pub size: Option<Distribution>,
    /// Reads of the collection, by any query.
    pub reads: Option<Rate>,
    /// Number of reads that used an index on the field of the relationship.
    pub by_reference: Option<u64>,
    /// Inserts, updates, replacements and deletes.
    pub changes: Option<Rate>,
    /// Documents created per day, derived from their ids.
    pub made_per_day: Option<f64>,
    /// True if an index begins with the field of the relationship.
    pub indexed: bool,
    /// The names of the top-level fields.
    pub names: Vec<String>,
    /// A top-level field that holds a date.
    pub time: Option<String>,
}

/// The limit and order of the application's own queries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// Number of documents requested.
    pub limit: u64,
    /// The sort keys with their directions.
    pub sort: Vec<(String, i64)>,
}

/// A field that might be copied.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The path in the referenced documents.
    pub path: FieldPath,
    /// The updates of the field; None if the oplog could not be read.
    pub updates: Option<Rate>,
    /// The place in the referring documents of the existing or future copy.
    pub place: FieldPath,
    /// The current content of that place.
    pub held: Place,
}

/// The content of the place in the referring documents where a copy would go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// No value.
    Free,
    /// The same values as the source, at least in part.
    Copy {
        /// Number of places compared.
        compared: u64,
        /// Number of places that differ.
        stale: u64,
    },
    /// Other values.
    Taken,
}

impl Relationship {
    /// Number of referring documents without a resolving reference (null, missing or dangling), and of all referring
    /// documents.
    #[must_use]
    pub fn homeless(&self) -> (u64, u64) {
        let found: u64 = self.fan_out.types.iter().map(|of| of.resolved + of.converted).sum();
        let of = match self.fan_out.how {
            How::Exact => self.holder.count,
            How::Sample(drawn) => drawn,
        };
        (of.saturating_sub(found), of)
    }

    /// Number of reads of the referring documents that do not use the reference, and of all reads; None if that is not
    /// known.
    #[must_use]
    pub fn holder_read_alone(&self) -> Option<(u64, u64)> {
        let reads = self.holder.reads?.times;
        Some((reads.saturating_sub(self.holder.by_reference?), reads))
    }
}
