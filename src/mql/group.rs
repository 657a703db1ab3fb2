//! Accumulators: over the documents of a group, or over an array's elements.

use bson::{Bson, Document, doc};

use super::{
    Result, Value,
    array::directions,
    compare,
    expression::Scope,
    is_nullish, needs_server,
    number::{Number, Sum, position},
    order::by_keys,
    pipeline::{sort_keys, through_array},
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
        let number = |value: &Value| value.as_ref().map(Number::of).transpose().map(Option::flatten);
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
                if let Some(number) = number(&value)? {
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

/// The result of an accumulator of `$group` for these documents; a missing value becomes null.
pub(super) fn accumulate(accumulator: &Bson, documents: &[Document]) -> Result<Bson> {
    let Some((name, argument)) = accumulator.as_document().and_then(|doc| doc.iter().next()) else {
        return refused("an accumulator is written { $sum: 1 }");
    };
    let value = match name.as_str() {
        "$top" | "$bottom" | "$topN" | "$bottomN" | "$firstN" | "$lastN" => some(name, argument, documents)?,
        _ => {
            let mut accumulator = Accumulator::new(name)?;
            // `$first` is not evaluated for the documents after the first one.
            for document in documents.iter().take(if name == "$first" { 1 } else { usize::MAX }) {
                // `$count` takes an empty document.
                let value = if name == "$count" { None } else { Scope::new(document).evaluate(argument)? };
                accumulator.take(value)?;
            }
            accumulator.value()?
        }
    };
    Ok(value.unwrap_or(Bson::Null))
}

/// The first or the last of the documents, in their order or in the order of `sortBy`.
fn some(name: &str, argument: &Bson, documents: &[Document]) -> Result<Value> {
    let Bson::Document(argument) = argument else { return refused(format!("`{name}` takes a document of arguments")) };
    let many = name.ends_with('N');
    let count = match argument.get("n") {
        None if !many => 1,
        Some(n @ (Bson::Int32(_) | Bson::Int64(_) | Bson::Double(_))) => match position(Some(n))? {
            Some(count @ 1..) => usize::try_from(count).unwrap_or(usize::MAX),
            _ => return refused(format!("`n` of `{name}` is a whole number from 1")),
        },
        _ => return needs_server(format!("a computed `n` of `{name}`")),
    };
    let output = argument.get(if matches!(name, "$firstN" | "$lastN") { "input" } else { "output" });
    let Some(output) = output else { return refused(format!("`{name}` has no output")) };
    let by = argument.get_document("sortBy").cloned().unwrap_or_default();
    let ways = directions(&by)?;
    let mut rows = Vec::new();
    let looked_at = if name == "$firstN" { count } else { usize::MAX };
    for document in documents.iter().take(looked_at) {
        if by.keys().any(|path| through_array(document, path)) {
            return needs_server(format!("`{name}` sorted by an array"));
        }
        let value = Scope::new(document).evaluate(output)?.unwrap_or(Bson::Null);
        rows.push((sort_keys(document, &by)?, value));
    }
    rows.sort_by(|(a, _), (b, _)| by_keys(&ways, a, b));
    let values = rows.into_iter().map(|(_, value)| value);
    let kept: Vec<Bson> = if matches!(name, "$bottom" | "$bottomN" | "$lastN") {
        let more = values.len().saturating_sub(count);
        values.skip(more).collect()
    } else {
        values.take(count).collect()
    };
    Ok(if many { Some(Bson::Array(kept)) } else { kept.into_iter().next() })
}

/// One `{ _id, … }` document for each group, in the order of first occurrence.
pub(super) fn group(stage: &Document, documents: Vec<Document>) -> Result<Vec<Document>> {
    let id = stage.get("_id").cloned().unwrap_or(Bson::Null);
    let mut groups: Vec<(denormd_model::key::Key, Bson, Vec<Document>)> = Vec::new();
    for document in documents {
        let value = Scope::new(&document).evaluate(&id)?.unwrap_or(Bson::Null);
        let key = denormd_model::key::Key::one(value.clone());
        match groups.iter_mut().find(|(known, ..)| *known == key) {
            Some((.., members)) => members.push(document),
            None => groups.push((key, value, vec![document])),
        }
    }
    let rows = groups.into_iter().map(|(_, id, members)| {
        let mut row = doc! {"_id": id};
        for (name, accumulator) in stage.iter().filter(|(name, _)| *name != "_id") {
            row.insert(name.clone(), accumulate(accumulator, &members)?);
        }
        Ok(row)
    });
    rows.collect()
}
