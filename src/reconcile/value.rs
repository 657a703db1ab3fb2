//! From the rows that a read returned to what each key's targets should hold. Pure.

use std::collections::{HashMap, HashSet};

use bson::{Bson, RawArrayBuf, RawBson, RawDocument, RawDocumentBuf};
use tokio::sync::OwnedSemaphorePermit;

use crate::{
    config::{OnEmpty, OnMissing},
    error::{Error, Kind, Result},
    key::Key,
    plan::{Assignment, Keyed, Rule, Values},
};

/// What is to be done with an owned path.
pub type Field = Option<RawBson>;

/// What the targets of a key should hold.
#[derive(Debug, Clone, PartialEq)]
pub enum Desired {
    /// One entry for each owned path, in the rule's order: a value, or nothing there.
    Fields(Vec<Field>),
    /// No source answers, and the targets keep what they have.
    Keep,
    /// No source answers: the element that holds the reference goes.
    Remove,
    /// No source answers: the target goes.
    Delete,
}

impl Desired {
    /// Whether a few copies of the values would take much memory.
    #[must_use]
    pub fn is_large(&self) -> bool {
        matches!(self, Self::Fields(fields) if size_of(fields) > LARGE)
    }
}

/// About how many bytes values take.
#[must_use]
pub fn size_of(fields: &[Field]) -> usize {
    fields
        .iter()
        .flatten()
        .map(|value| match value {
            RawBson::Document(doc) => doc.as_bytes().len(),
            RawBson::Array(array) => array.as_bytes().len(),
            RawBson::String(text) => text.len(),
            RawBson::Binary(binary) => binary.bytes.len(),
            _ => 16,
        })
        .sum()
}

/// Values of more bytes than this are written by one command at a time.
const LARGE: usize = 1 << 20;
/// The largest document that the server holds.
const DOCUMENT: usize = 16 << 20;
/// What a row has beside its values, and a little.
const ROW: usize = 64;

/// The rows of [`super::read::sources`], by key. Of several rows with one key the first counts: they come sorted.
#[derive(Debug)]
pub struct Rows {
    by_key: HashMap<Key, (usize, RawDocumentBuf)>,
    bytes: usize,
    share: Share,
}

/// How much the rows may hold.
#[derive(Debug)]
enum Share {
    /// So many bytes.
    Bytes(usize),
    /// What one key or target needs, while no other batch holds that much.
    Alone {
        _turn: OwnedSemaphorePermit,
        wanted: HashSet<Key>,
        /// Of several sources only the first counts.
        first: bool,
    },
}

impl Rows {
    /// Room for so many bytes.
    #[must_use]
    pub fn within(bytes: usize) -> Self {
        Self { by_key: HashMap::new(), bytes: 0, share: Share::Bytes(bytes) }
    }

    /// Room for what one key, or one target with these keys, needs. A batch that holds the turn never waits for another.
    pub(super) fn alone(rule: &Rule, keys: &[&Key], turn: OwnedSemaphorePermit) -> Self {
        let first = rule.keyed == Keyed::Target && matches!(rule.values, Values::Set { .. });
        let wanted = keys.iter().map(|key| (*key).clone()).collect();
        Self { by_key: HashMap::new(), bytes: 0, share: Share::Alone { _turn: turn, wanted, first } }
    }

    pub(super) fn is_alone(&self) -> bool {
        matches!(self.share, Share::Alone { .. })
    }

    /// Forgets the rows taken.
    pub(super) fn clear(&mut self) {
        self.by_key.clear();
        self.bytes = 0;
    }

    /// Bytes of values held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes the next row of the read.
    pub fn take(&mut self, row: &RawDocument) -> Result<()> {
        let key = key_of(row)?;
        let mut values = row.get_document("v").map_err(|_| Error::internal("a row without values"))?;
        if self.by_key.contains_key(&key) {
            return Ok(());
        }
        let nothing = RawDocumentBuf::new();
        match &self.share {
            // A source with an array that holds the key is found as well, and answers nothing.
            Share::Alone { wanted, .. } if !wanted.contains(&key) => return Ok(()),
            Share::Alone { first: true, .. } if !self.by_key.is_empty() => values = &nothing,
            _ => {}
        }
        self.bytes += values.as_bytes().len();
        match self.share {
            Share::Bytes(most) if self.bytes > most => {
                return Err(Error::new(Kind::TooLarge, "these keys have more values than a batch may hold"));
            }
            // They would all go into one array.
            Share::Alone { .. } if !self.by_key.is_empty() && self.bytes > DOCUMENT + self.by_key.len() * ROW => {
                return Err(Error::new(Kind::Refused, "the values of this target are larger than a document can be"));
            }
            _ => {}
        }
        let rank = self.by_key.len();
        self.by_key.insert(key, (rank, values.to_owned()));
        Ok(())
    }

    /// Whether no source was found at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// Whether a source was found for `key`.
    #[must_use]
    pub fn answer(&self, key: &Key) -> bool {
        self.by_key.contains_key(key)
    }

    /// What the targets of `key` should hold.
    pub fn desired(&self, rule: &Rule, key: &Key) -> Result<Desired> {
        if key.values().is_empty() {
            return Ok(Desired::Fields(vec![None; rule.owned().len()]));
        }
        let row = self.by_key.get(key).map(|(_, values)| values);
        match (&rule.values, row) {
            (Values::Set { assignments, .. } | Values::Aggregate { assignments, .. }, Some(row)) => {
                Ok(Desired::Fields(fields(assignments, row)?))
            }
            (Values::Set { assignments, once }, None) => Ok(missing(rule, assignments.len(), *once)),
            (Values::Collect { on_empty, max_elements, max_bytes, .. }, row) => {
                collected(row.map(RawDocumentBuf::as_ref), *on_empty, *max_elements, *max_bytes)
            }
            (Values::Aggregate { assignments, on_empty }, None) => Ok(Desired::Fields(
                assignments.iter().map(|a| (*on_empty == OnEmpty::Value).then(|| empty(&a.expression))).collect(),
            )),
            (Values::Into { .. }, _) => Err(Error::internal("an array of references has no value of one key")),
        }
    }

    /// What one target with these references should hold: the rules that are keyed by the target.
    pub fn desired_of_target(&self, rule: &Rule, references: &[Option<Key>], has_array: bool) -> Result<Desired> {
        match &rule.values {
            Values::Into { .. } if !has_array => Ok(Desired::Fields(vec![None])),
            Values::Into { .. } => {
                let mut array = RawArrayBuf::new();
                for key in references.iter().flatten() {
                    match self.by_key.get(key) {
                        Some((_, row)) => {
                            row.get("e")?.into_iter().for_each(|element| array.push(RawBson::from(element)));
                        }
                        None if rule.on_missing == OnMissing::Null => array.push(RawBson::Null),
                        None => {}
                    }
                }
                let kept = rule.on_missing == OnMissing::Keep
                    && references.iter().flatten().any(|key| !self.by_key.contains_key(key));
                Ok(if kept { Desired::Keep } else { Desired::Fields(vec![Some(RawBson::Array(array))]) })
            }
            Values::Set { assignments, .. } => {
                let first =
                    references.iter().flatten().filter_map(|key| self.by_key.get(key)).min_by_key(|(rank, _)| *rank);
                match first {
                    Some((_, row)) => Ok(Desired::Fields(fields(assignments, row)?)),
                    None if references.iter().any(Option::is_some) => Ok(missing(rule, assignments.len(), false)),
                    None => Ok(Desired::Fields(vec![None; assignments.len()])),
                }
            }
            Values::Collect { .. } | Values::Aggregate { .. } => Err(Error::internal("this rule is keyed by a value")),
        }
    }
}

fn key_of(row: &RawDocument) -> Result<Key> {
    let values = row.get_array("k").map_err(|_| Error::internal("a row without a key"))?;
    let values: Result<Vec<Bson>> =
        values.into_iter().map(|value| Bson::try_from(value.map_err(Error::from)?).map_err(Error::from)).collect();
    Ok(Key::new(values?))
}

fn fields(assignments: &[Assignment], row: &RawDocument) -> Result<Vec<Field>> {
    (0..assignments.len()).map(|n| Ok(row.get(format!("v{n}"))?.map(RawBson::from))).collect()
}

fn missing(rule: &Rule, fields: usize, once: bool) -> Desired {
    match rule.on_missing {
        _ if once => Desired::Keep,
        OnMissing::Unset => Desired::Fields(vec![None; fields]),
        OnMissing::Null => Desired::Fields(vec![Some(RawBson::Null); fields]),
        OnMissing::Keep => Desired::Keep,
        OnMissing::Remove => Desired::Remove,
        OnMissing::Delete => Desired::Delete,
    }
}

/// What `$group` has no row for: `[]` of what makes arrays, 0 of what counts, null of the rest.
fn empty(accumulator: &Bson) -> RawBson {
    let operator = accumulator.as_document().and_then(|doc| doc.keys().next()).map(String::as_str).unwrap_or_default();
    match operator {
        "$sum" | "$count" => RawBson::Int32(0),
        "$push" | "$addToSet" | "$firstN" | "$lastN" | "$topN" | "$bottomN" | "$minN" | "$maxN" => {
            RawBson::Array(RawArrayBuf::new())
        }
        _ => RawBson::Null,
    }
}

fn collected(
    row: Option<&RawDocument>,
    on_empty: OnEmpty,
    max_elements: Option<u64>,
    max_bytes: Option<u64>,
) -> Result<Desired> {
    let mut array = RawArrayBuf::new();
    let mut count = 0_u64;
    if let Some(row) = row {
        for element in row.get_array("e").map_err(|_| Error::internal("a row without elements"))? {
            let element = element?;
            let element = element.as_document().ok_or_else(|| Error::internal("an element without its cover"))?;
            if let Some(value) = element.get("e")? {
                array.push(RawBson::from(value));
                count += 1;
            }
        }
    }
    if row.is_none() && on_empty == OnEmpty::Unset {
        return Ok(Desired::Fields(vec![None]));
    }
    if let Some(limit) = max_elements.filter(|limit| count > *limit) {
        return Err(Error::new(
            Kind::Refused,
            format!("the array would have {count} elements, and max_elements is {limit}"),
        ));
    }
    let bytes = array.as_bytes().len() as u64;
    if let Some(limit) = max_bytes.filter(|limit| bytes > *limit) {
        return Err(Error::new(Kind::Refused, format!("the array would have {bytes} bytes, and max_bytes is {limit}")));
    }
    Ok(Desired::Fields(vec![Some(RawBson::Array(array))]))
}
