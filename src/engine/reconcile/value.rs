//! Computes the desired content of each key's targets from the rows of a read. Pure.

use std::collections::{BTreeSet, HashMap, HashSet};

use bson::{Bson, RawArrayBuf, RawBson, RawBsonRef, RawDocument, RawDocumentBuf};
use tokio::sync::OwnedSemaphorePermit;

use crate::reconcile::read;
use denormd_model::key::Key;
use denormd_mongo::error::{Error, Kind, Result};
use denormd_rules::{
    config::{GroupForm, OnEmpty, OnMissing},
    plan::{Assignment, Groups, Keyed, Rule, Values},
};

/// The desired value of an owned path; None to remove it.
pub type Field = Option<RawBson>;

/// The desired content of the targets of a key.
#[derive(Debug, Clone, PartialEq)]
pub enum Desired {
    /// One entry for each owned path, in the rule's order.
    Fields(Vec<Field>),
    /// No source matches, and the targets keep their values.
    Keep,
    /// No source matches: the element that holds the reference is removed.
    Remove,
    /// No source matches: the target is deleted.
    Delete,
    /// No source is left of a document that the rule creates: it is deleted if `deletes`, and if it has no fields of
    /// others. Otherwise it gets these values.
    Emptied {
        /// One entry for each owned path, in the rule's order.
        fields: Vec<Field>,
        /// False if the document stays in any case.
        deletes: bool,
    },
}

impl Desired {
    /// One entry for each owned path, if the targets get values.
    #[must_use]
    pub fn fields(&self) -> Option<&[Field]> {
        match self {
            Self::Fields(fields) => Some(fields),
            _ => None,
        }
    }

    /// True if several copies of the values would take much memory.
    #[must_use]
    pub fn is_large(&self) -> bool {
        matches!(self, Self::Fields(fields) if size_of(fields) > LARGE)
    }
}

/// Approximate size of the values in bytes.
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
/// Approximate memory of a row in addition to its values, in bytes.
const ROW: usize = 128;

/// The key in [`Rows`] of a target's values, or of those of its `nth` reference.
#[must_use]
pub fn target_key(id: &Bson, nth: usize) -> Key {
    Key::new(vec![id.clone(), index(nth)])
}

/// The key of the values where no source matches.
#[must_use]
pub fn target_key_without_source(id: &Bson, nth: usize) -> Key {
    Key::new(vec![id.clone(), index(nth), Bson::Null])
}

/// The index of a reference as a value.
pub(super) fn index(nth: usize) -> Bson {
    Bson::Int64(i64::try_from(nth).unwrap_or(i64::MAX))
}

/// The rows of [`super::read::sources`], by key. Of several rows with one key the first counts: they come sorted.
#[derive(Debug)]
pub struct Rows {
    by_key: HashMap<Key, (usize, RawDocumentBuf)>,
    bytes: usize,
    share: Share,
    /// The row of [`super::read::no_input`].
    pub no_input: Option<NoInput>,
    /// Keys without sources whose documents another rule keeps.
    pub held: HashSet<Key>,
}

/// The values of a key without sources, as the server computes them, or its reason to refuse that.
pub type NoInput = std::result::Result<RawDocumentBuf, String>;

/// Limit on the size of the rows.
#[derive(Debug)]
enum Share {
    /// At most this number of bytes.
    Bytes(usize),
    /// As much as one key or target needs, while no other batch holds that much.
    Alone {
        _turn: OwnedSemaphorePermit,
        wanted: HashSet<Key>,
        /// The names of the values that count only for the first of several sources.
        of_first: BTreeSet<String>,
    },
}

impl Rows {
    /// Rows of at most this number of bytes.
    #[must_use]
    pub fn within(bytes: usize) -> Self {
        Self { by_key: HashMap::new(), bytes: 0, share: Share::Bytes(bytes), no_input: None, held: HashSet::new() }
    }

    /// Rows of one key, or of one target with these keys, of any size. A batch that holds the turn never waits for
    /// another.
    pub(super) fn alone(rule: &Rule, keys: &[&Key], turn: OwnedSemaphorePermit) -> Self {
        let several = rule.keyed == Keyed::Target && rule.of_target.is_none() && !rule.by_key;
        let assignments = if let Values::Set { assignments, .. } = &rule.values { assignments.as_slice() } else { &[] };
        let beside = assignments.iter().enumerate().filter(|(_, assignment)| several && !assignment.path.has_each());
        let of_first = beside.map(|(nth, _)| format!("v{nth}")).collect();
        let wanted = keys.iter().map(|key| (*key).clone()).collect();
        let share = Share::Alone { _turn: turn, wanted, of_first };
        Self { by_key: HashMap::new(), bytes: 0, share, no_input: None, held: HashSet::new() }
    }

    pub(super) fn is_alone(&self) -> bool {
        matches!(self.share, Share::Alone { .. })
    }

    /// Discards the rows.
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
        let values = row.get_document("v").map_err(|_| Error::internal("a row without values"))?;
        if self.by_key.contains_key(&key) {
            return Ok(());
        }
        let values = match &self.share {
            // A source with an array that holds the key is found as well, but matches no key.
            Share::Alone { wanted, .. } if !wanted.contains(&key) => return Ok(()),
            Share::Alone { of_first, .. } if !self.by_key.is_empty() => {
                let mut others = RawDocumentBuf::new();
                for field in values {
                    let (name, value) = field?;
                    if !of_first.contains(name.as_str()) {
                        others.append(name, value);
                    }
                }
                others
            }
            _ => values.to_owned(),
        };
        self.bytes += ROW + values.as_bytes().len();
        self.within_share()?;
        let rank = self.by_key.len();
        self.by_key.insert(key, (rank, values));
        Ok(())
    }

    /// Fails if the rows are larger than they may be.
    fn within_share(&self) -> Result<()> {
        match self.share {
            Share::Bytes(most) if self.bytes > most => {
                Err(Error::new(Kind::TooLarge, "these keys have more values than a batch may hold"))
            }
            // All of them would go into one array.
            Share::Alone { .. } if !self.by_key.is_empty() && self.bytes > DOCUMENT + 2 * self.by_key.len() * ROW => {
                Err(Error::new(Kind::Refused, "the values of this target are larger than a document can be"))
            }
            _ => Ok(()),
        }
    }

    /// Takes the rows of an earlier read for other targets.
    pub(super) fn extend(&mut self, other: Self) -> Result<()> {
        self.bytes += other.bytes;
        self.by_key.extend(other.by_key);
        self.within_share()
    }

    /// True if no source was found at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// True if a source was found for `key`.
    #[must_use]
    pub fn answer(&self, key: &Key) -> bool {
        self.by_key.contains_key(key)
    }

    /// The desired content of the targets of `key`.
    pub fn desired(&self, rule: &Rule, key: &Key) -> Result<Desired> {
        let desired = computed(rule, !key.values().is_empty(), self.row(key), self.without_source())?;
        Ok(match (desired, &rule.creates) {
            (Desired::Fields(fields), Some(creates)) if !self.answer(key) => {
                Desired::Emptied { fields, deletes: !creates.keeps && !self.held.contains(key) }
            }
            (desired, _) => desired,
        })
    }

    /// The desired content of one target, or of its `nth` element, for rules whose values depend on the target.
    /// `refers` tells that it has a reference.
    pub fn desired_of_pair(&self, rule: &Rule, id: &Bson, nth: usize, refers: bool) -> Result<Desired> {
        let without = self.row(&target_key_without_source(id, nth)).map(Ok);
        computed(rule, refers, self.row(&target_key(id, nth)), without)
    }

    fn row(&self, key: &Key) -> Option<&RawDocument> {
        self.by_key.get(key).map(|(_, values)| values.as_ref())
    }

    fn without_source(&self) -> Option<WithoutSource<'_>> {
        self.no_input.as_ref().map(|values| values.as_deref().map_err(String::as_str))
    }

    /// The array of a target with these references. `row` finds the values of one.
    fn array<'a>(
        rule: &Rule,
        references: &[Option<Key>],
        row: impl Fn(usize, &Key) -> Option<&'a RawDocument>,
    ) -> Result<Desired> {
        let mut array = RawArrayBuf::new();
        let mut dangles = false;
        for (nth, key) in references.iter().enumerate() {
            let Some(key) = key else { continue };
            match row(nth, key) {
                Some(row) => row.get("e")?.into_iter().for_each(|element| array.push(RawBson::from(element))),
                None => {
                    dangles = true;
                    if rule.on_missing == OnMissing::Null {
                        array.push(RawBson::Null);
                    }
                }
            }
        }
        let kept = rule.on_missing == OnMissing::Keep && dangles;
        Ok(if kept { Desired::Keep } else { Desired::Fields(vec![Some(RawBson::Array(array))]) })
    }

    /// The desired content of one target as a whole, for rules whose values depend on the target.
    pub fn desired_of_referrer(
        &self,
        rule: &Rule,
        id: &Bson,
        references: &[Option<Key>],
        has_array: bool,
    ) -> Result<Desired> {
        match &rule.values {
            Values::Into { .. } if !has_array => Ok(Desired::Fields(vec![None])),
            Values::Into { .. } => Self::array(rule, references, |nth, _| self.row(&target_key(id, nth))),
            _ => self.desired_of_pair(rule, id, 0, refers(rule, references, has_array)),
        }
    }

    /// The desired content of one target with these references, for rules that are keyed by the target.
    pub fn desired_of_target(&self, rule: &Rule, references: &[Option<Key>], has_array: bool) -> Result<Desired> {
        match &rule.values {
            Values::Into { .. } if !has_array => Ok(Desired::Fields(vec![None])),
            Values::Into { .. } => Self::array(rule, references, |_, key| self.row(key)),
            Values::Set { assignments, otherwise, .. } => {
                let first =
                    references.iter().flatten().filter_map(|key| self.by_key.get(key)).min_by_key(|(rank, _)| *rank);
                match first {
                    Some((_, row)) => Ok(Desired::Fields(fields(assignments, row)?)),
                    None if otherwise.is_some() => self::otherwise(rule, self.without_source())?
                        .ok_or_else(|| Error::internal("no values of `otherwise`")),
                    None if references.iter().any(Option::is_some) => Ok(missing(rule, assignments.len(), false)),
                    None => Ok(Desired::Fields(vec![None; assignments.len()])),
                }
            }
            Values::Collect { .. } | Values::Aggregate { .. } | Values::Groups(_) => {
                Err(Error::internal("this rule is keyed by a value"))
            }
        }
    }
}

/// True if a target with these references, whose sources count together, refers to something. An array without a key is an empty set
/// of keys, which has values.
#[must_use]
pub(super) fn refers(rule: &Rule, references: &[Option<Key>], has_array: bool) -> bool {
    references.iter().any(Option::is_some) || (rule.gathers() && has_array)
}

/// The values of a target or an element without sources, or the server's reason to refuse them.
type WithoutSource<'a> = std::result::Result<&'a RawDocument, &'a str>;

/// The content that follows from the row of the sources, if there are any.
fn computed(
    rule: &Rule,
    refers: bool,
    row: Option<&RawDocument>,
    without: Option<WithoutSource<'_>>,
) -> Result<Desired> {
    if !refers {
        let nothing = || Desired::Fields(vec![None; rule.owned().len()]);
        return Ok(otherwise(rule, without)?.unwrap_or_else(nothing));
    }
    match (&rule.values, row) {
        (Values::Set { assignments, .. } | Values::Aggregate { assignments, .. }, Some(row)) => {
            Ok(Desired::Fields(fields(assignments, row)?))
        }
        (Values::Set { assignments, once, .. }, None) => {
            Ok(otherwise(rule, without)?.unwrap_or_else(|| missing(rule, assignments.len(), *once)))
        }
        (Values::Collect { on_empty, max_elements, max_bytes, .. }, row) => {
            collected(row, *on_empty, *max_elements, *max_bytes)
        }
        (Values::Aggregate { assignments, on_empty }, None) => Ok(Desired::Fields(match without {
            Some(Ok(row)) => fields(assignments, row)?,
            Some(Err(reason)) => return Err(Error::new(Kind::Refused, reason)),
            None if *on_empty == OnEmpty::Unset => vec![None; assignments.len()],
            None => {
                let values = assignments.iter().map(|a| RawBson::try_from(read::no_input_of(&a.expression)));
                values.map(|value| value.map(Some)).collect::<std::result::Result<_, _>>()?
            }
        })),
        (Values::Groups(groups), row) => {
            let value = match row {
                None if groups.on_empty == OnEmpty::Unset => None,
                row => Some(grouped(groups, row)?),
            };
            Ok(Desired::Fields(vec![value]))
        }
        (Values::Into { .. }, _) => Err(Error::internal("an array of references has no value of one key")),
    }
}

/// The values of `otherwise`, for rules that have it.
fn otherwise(rule: &Rule, without: Option<WithoutSource<'_>>) -> Result<Option<Desired>> {
    let Values::Set { assignments, otherwise: Some(_), .. } = &rule.values else { return Ok(None) };
    match without {
        Some(Ok(row)) => Ok(Some(Desired::Fields(fields(assignments, row)?))),
        Some(Err(reason)) => Err(Error::new(Kind::Refused, reason)),
        None => Err(Error::internal("the values of `otherwise` were not read")),
    }
}

/// The key of a row `{ k: [values] }` of a read.
pub(super) fn key_of(row: &RawDocument) -> Result<Key> {
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

/// The groups of a key in the form that the target stores.
fn grouped(groups: &Groups, row: Option<&RawDocument>) -> Result<RawBson> {
    let missing = |_| Error::internal("a row without groups");
    let elements = row.map(|row| row.get_array("e").map_err(missing)).transpose()?;
    let (mut array, mut object) = (RawArrayBuf::new(), RawDocumentBuf::new());
    let mut names = HashSet::new();
    for element in elements.into_iter().flatten() {
        let element = element?.as_document().ok_or_else(|| Error::internal("a group that is no document"))?;
        let part = |name: &str| element.get_document(name).map_err(missing);
        let (by, fields) = (part("b")?, part("v")?);
        if groups.form == GroupForm::Array {
            let mut group = by.to_owned();
            fields.iter().try_for_each(|field| field.map(|(name, value)| group.append(name, value)))?;
            array.push(group);
            continue;
        }
        let value = by.iter().next().transpose()?.map(|(_, value)| value);
        let name = value.and_then(field_name).filter(|name| !name.is_empty());
        let Some(c_name) = name.as_deref().and_then(|name| bson::raw::CString::try_from(name).ok()) else {
            let reason =
                "a value of `by` cannot name a field: it is no string, ObjectId or integer, or an empty string";
            return Err(Error::new(Kind::Refused, reason));
        };
        if !names.insert(name) {
            return Err(Error::new(Kind::Refused, "two values of `by` make the same field name"));
        }
        object.append(c_name, fields.to_owned());
    }
    Ok(if groups.form == GroupForm::Array { RawBson::Array(array) } else { RawBson::Document(object) })
}

/// The name of a group's field in an object of groups.
fn field_name(by: RawBsonRef<'_>) -> Option<String> {
    match by {
        RawBsonRef::String(text) => Some(text.to_owned()),
        RawBsonRef::ObjectId(id) => Some(id.to_hex()),
        RawBsonRef::Int32(number) => Some(number.to_string()),
        RawBsonRef::Int64(number) => Some(number.to_string()),
        _ => None,
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
    // Dead letters are counted by reason: with the array's size in the text, each array would have its own reason.
    if let Some(limit) = max_elements.filter(|limit| count > *limit) {
        return Err(Error::new(
            Kind::Refused,
            format!("the array would have more than {limit} elements (max_elements)"),
        ));
    }
    let bytes = array.as_bytes().len() as u64;
    if let Some(limit) = max_bytes.filter(|limit| bytes > *limit) {
        return Err(Error::new(Kind::Refused, format!("the array would have more than {limit} bytes (max_bytes)")));
    }
    Ok(Desired::Fields(vec![Some(RawBson::Array(array))]))
}
