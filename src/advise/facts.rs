//! What the advice is decided from: one relationship with all its figures. Plain data.

use crate::{change::Namespace, field_path::FieldPath};

use super::{
    fan_out::FanOut,
    relationships::Link,
    spread::{How, Known, Spread, ratio},
};

/// How often something happened, in how long a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// How often.
    pub times: u64,
    /// In how many seconds.
    pub seconds: f64,
}

impl Rate {
    /// Times a day.
    #[must_use]
    pub fn per_day(&self) -> f64 {
        if self.seconds > 0.0 { ratio(self.times, 1) / self.seconds * 86_400.0 } else { 0.0 }
    }
}

/// In which form one document refers to others.
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
    /// Which fields.
    pub link: Link,
    /// In which form.
    pub form: Form,
    /// Whether references are DBRefs, and how many bytes each spends on that.
    pub db_ref: Option<u64>,
    /// How many refer to one, and what resolves.
    pub fan_out: FanOut,
    /// How many one refers to, where references are in an array.
    pub lengths: Option<Spread>,
    /// How many values of the key several documents share.
    pub duplicates: Known<u64>,
    /// The documents that refer.
    pub holder: Side,
    /// What they refer to.
    pub held: Side,
    /// The field by which what is referred to refers back.
    pub back: Option<FieldPath>,
    /// Other fields that refer to the documents that refer here.
    pub others: usize,
    /// Whether a rule of the config collects the referring documents already.
    pub collected: bool,
    /// Other collections that the referring documents might be embedded in as well.
    pub parents: Vec<String>,
    /// How many of the referring documents the application shows of one, and in which order: by its own queries.
    pub shown: Option<Shown>,
    /// Joins that the log has seen, and those of them that fetch whole documents.
    pub joins: (u64, u64),
    /// The fields that might be copied.
    pub fields: Vec<Candidate>,
}

/// One end of a relationship.
#[derive(Debug, Clone, PartialEq)]
pub struct Side {
    /// The collection.
    pub namespace: Namespace,
    /// Its documents.
    pub count: u64,
    /// Their sizes.
    pub size: Option<Spread>,
    /// Reads of the collection.
    pub reads: Option<Rate>,
    /// Those of them that use an index on the field of the relationship.
    pub by_reference: Option<u64>,
    /// Documents that come and go, and are changed.
    pub changes: Option<Rate>,
    /// Documents that are made in a day, by their ids.
    pub made_per_day: Option<f64>,
    /// Whether an index begins with the field of the relationship.
    pub indexed: bool,
    /// The fields at the root of the documents, by name.
    pub names: Vec<String>,
    /// A field with a time, at the root.
    pub time: Option<String>,
}

/// What the application asks for by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// How many.
    pub limit: u64,
    /// In which order.
    pub sort: Vec<(String, i64)>,
}

/// A field that might be copied.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// Its path in the documents that are referred to.
    pub path: FieldPath,
    /// Its updates.
    pub updates: Option<Rate>,
    /// Where the documents that refer have it, or would have it.
    pub place: FieldPath,
    /// What the place holds now.
    pub held: Place,
}

/// What the documents that refer have where a copy would be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Nothing.
    Free,
    /// The same values: of so many that were compared, so many differ.
    Copy {
        /// Compared.
        compared: u64,
        /// Different.
        stale: u64,
    },
    /// Something else.
    Taken,
}

impl Relationship {
    /// Referring documents that lead to nothing, of how many: null, missing and dangling.
    #[must_use]
    pub fn homeless(&self) -> (u64, u64) {
        let found: u64 = self.fan_out.types.iter().map(|of| of.resolved + of.converted).sum();
        let of = match self.fan_out.how {
            How::Exact => self.holder.count,
            How::Sample(drawn) => drawn,
        };
        (of.saturating_sub(found), of)
    }

    /// Reads of the referring documents that do not come through the reference; None where that is not known.
    #[must_use]
    pub fn holder_read_alone(&self) -> Option<(u64, u64)> {
        let reads = self.holder.reads?.times;
        Some((reads.saturating_sub(self.holder.by_reference?), reads))
    }
}
