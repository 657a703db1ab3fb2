//! Accumulators: over the documents of a group, or over an array's elements.

use bson::{Bson, Document};

use super::{
    Result, Value, compare, is_nullish, needs_server,
    number::{Number, Sum},
    refused, type_name,
};

/// The supported accumulators.
pub const ACCUMULATORS: &[&str] = &[
    "$addToSet",
    "$avg",
    "$bottom",
    "$bottomN",
    "$count",
    "$first",
    "$firstN",
    "$last",
    "$lastN",
    "$max",
    "$mergeObjects",
    "$min",
    "$push",
    "$stdDevPop",
    "$stdDevSamp",
    "$sum",
    "$top",
    "$topN",
];

/// Intermediate state of an accumulator.
pub(super) enum Accumulator {
    Sum(Sum),
    Average(Sum, u32),
    /// The least, or with true the greatest.
    Extreme(Value, bool),
    First(Option<Value>),
    Last(Value),
    Push(Vec<Bson>),
    Set(Vec<Bson>),
    Count(i32),
    /// Welford's algorithm: count, mean, sum of squares; true for a sample, false for a population.
    Deviation(f64, f64, f64, bool),
    Merged(Document),
}

impl Accumulator {
    pub fn new(name: &str) -> Result<Self> {
        Ok(match name {
            "$sum" => Self::Sum(Sum::default()),
            "$avg" => Self::Average(Sum::default(), 0),
            "$min" => Self::Extreme(None, false),
            "$max" => Self::Extreme(None, true),
            "$first" => Self::First(None),
            "$last" => Self::Last(None),
            "$push" => Self::Push(Vec::new()),
            "$addToSet" => Self::Set(Vec::new()),
            "$count" => Self::Count(0),
            "$stdDevPop" => Self::Deviation(0.0, 0.0, 0.0, false),
            "$stdDevSamp" => Self::Deviation(0.0, 0.0, 0.0, true),
            "$mergeObjects" => Self::Merged(Document::new()),
            _ => return needs_server(format!("`{name}`")),
        })
    }

    pub fn take(&mut self, value: Value) -> Result<()> {
        match self {
            Self::Sum(sum) => {
                if let Some(number) = value.as_ref().and_then(Number::or_decimal) {
                    sum.add(number)?;
                }
            }
            Self::Average(sum, count) => {
                if let Some(number) = value.as_ref().and_then(Number::or_decimal) {
                    sum.add(number)?;
                    *count += 1;
                }
            }
            Self::Extreme(found, greatest) => {
                if is_nullish(value.as_ref()) {
                    return Ok(());
                }
                let order = compare(value.as_ref(), found.as_ref());
                // The first of equal values stays. The server's slot-based engine may keep another one; the daemon's reads
                // avoid that engine, see `aggregate` in `engine/reconcile/read.rs`.
                let better = found.is_none() || if *greatest { order.is_gt() } else { order.is_lt() };
                if better {
                    *found = value;
                }
            }
            Self::First(first) => drop(first.get_or_insert(value)),
            Self::Last(last) => *last = value,
            Self::Push(items) => items.extend(value),
            Self::Set(items) => match value {
                Some(value) if !items.iter().any(|item| compare(Some(item), Some(&value)).is_eq()) => items.push(value),
                _ => {}
            },
            Self::Count(count) => *count += 1,
            Self::Deviation(count, mean, squares, _) => {
                if let Some(number) = value.as_ref().map(Number::of).transpose()?.flatten() {
                    *count += 1.0;
                    let delta = number.double() - *mean;
                    if delta != 0.0 {
                        *mean += delta / *count;
                        *squares += delta * (number.double() - *mean);
                    }
                }
            }
            Self::Merged(doc) => match value {
                value if is_nullish(value.as_ref()) => {}
                Some(Bson::Document(other)) => doc.extend(other),
                value => {
                    return refused(format!(
                        "`$mergeObjects` takes objects, and was given {}",
                        type_name(value.as_ref())
                    ));
                }
            },
        }
        Ok(())
    }

    pub fn value(self) -> Result<Value> {
        Ok(match self {
            Self::Sum(sum) => Some(sum.value()?),
            Self::Average(_, 0) => Some(Bson::Null),
            Self::Average(sum, count) => Some(sum.mean(count)?),
            Self::Extreme(value, _) => Some(value.unwrap_or(Bson::Null)),
            Self::First(value) => value.flatten(),
            Self::Last(value) => value,
            Self::Push(items) | Self::Set(items) => Some(Bson::Array(items)),
            Self::Count(count) => Some(Bson::Int32(count)),
            Self::Deviation(count, _, squares, sample) => {
                let divisor = if sample { count - 1.0 } else { count };
                Some(if divisor <= 0.0 { Bson::Null } else { Bson::Double((squares / divisor).sqrt()) })
            }
            Self::Merged(doc) => Some(Bson::Document(doc)),
        })
    }
}
