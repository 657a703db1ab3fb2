//! Compares targets with their definition. Reads only.

use std::{
    collections::BTreeSet,
    hash::{DefaultHasher, Hash, Hasher},
    sync::atomic::AtomicUsize,
    time::Duration,
};

use bson::{Bson, Document, RawBson, RawDocumentBuf, doc};

use crate::{
    reconcile::{
        by_target::Referrer,
        context::{Context, Load, ReadsSources},
        places, read, shape,
        value::{Desired, Field, Rows},
    },
    request::Task,
};
use denormd_model::{
    field_path::{FieldPath, value_at},
    key::{Key, id_of},
    position::ClusterTime,
};
use denormd_mongo::{
    command::decoded,
    error::{Error, Kind, Result},
};
use denormd_rules::plan::{Keyed, Rule, Values, expression::OfTarget, reference::Role};

pub mod created;

/// Expected and stored value of one owned path of one target.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// The target's `_id`.
    pub target: Bson,
    /// The path, with `$[]` for the element.
    pub path: String,
    /// Index of the element in the order of the target's references; none for a path outside the array.
    pub element: Option<usize>,
    /// Expected value.
    pub expected: Field,
    /// Stored value.
    pub stored: Field,
}

/// One target compared with its definition.
#[derive(Debug, Clone, PartialEq)]
pub struct Compared {
    /// The target's `_id`.
    pub target: Bson,
    /// Every owned path with its expected and its stored value; for arrays, once for each element.
    pub fields: Vec<Difference>,
    /// Reference keys of the target.
    pub references: Vec<Option<Key>>,
}

/// A target that differs, without its values.
#[derive(Debug, Clone, PartialEq)]
pub struct Mismatch {
    /// The target's `_id`.
    pub target: Bson,
    /// The paths that differ.
    pub paths: BTreeSet<String>,
    /// Reference keys of the target.
    pub references: Vec<Option<Key>>,
    /// The fingerprint of [`Compared::fingerprint`].
    pub fingerprint: u64,
}

impl Difference {
    /// True if the values differ in any bit.
    #[must_use]
    pub fn differs(&self) -> bool {
        !identical(self.expected.as_ref(), self.stored.as_ref())
    }
}

impl Compared {
    /// The paths that differ in any bit.
    pub fn differences(&self) -> impl Iterator<Item = &Difference> {
        self.fields.iter().filter(|field| field.differs())
    }

    /// The place in the target, if there is one, below which the server refuses to write the values of this comparison.
    #[must_use]
    pub fn in_the_way(&self, rule: &Rule, target: &Document) -> Option<String> {
        // To remove what is not there is no error.
        let written = self.differences().filter(|difference| difference.expected.is_some());
        if written.count() == 0 { None } else { shape::in_the_way(&rule.owned(), target) }
    }

    /// The mismatch; none if nothing differs.
    #[must_use]
    pub fn mismatch(self) -> Option<Mismatch> {
        let paths: BTreeSet<String> = self.differences().map(|difference| difference.path.clone()).collect();
        let fingerprint = self.fingerprint()?;
        Some(Mismatch { target: self.target, paths, references: self.references, fingerprint })
    }

    /// Fingerprint of the differences: equal if the expected and the stored values are the same. None if nothing differs.
    #[must_use]
    pub fn fingerprint(&self) -> Option<u64> {
        let mut hasher = DefaultHasher::new();
        let mut differs = false;
        for Difference { path, element, expected, stored, .. } in self.differences() {
            differs = true;
            (path, element).hash(&mut hasher);
            for field in [expected, stored] {
                bytes(field.as_ref()).hash(&mut hasher);
            }
        }
        differs.then(|| hasher.finish())
    }
}

/// The projection for a comparison: the reference paths, and the paths that the rule owns.
#[must_use]
pub fn projection(rule: &Rule) -> Document {
    let mut roots = Document::new();
    // A document that the rule creates is compared as a whole: fields of others decide if it stays.
    if rule.creates.is_some() {
        roots.insert(created::ABSENT, 0);
        return roots;
    }
    let read = rule.of_target.iter().flat_map(OfTarget::all);
    for path in rule.reference.paths(Role::Target).chain(rule.owned()).chain(read) {
        roots.insert(path.root(), 1);
    }
    roots.insert(read::UNINDEXED, 1);
    roots
}

/// Receives one target after the other, or the error that prevents its comparison. Values may be large, and the same
/// for many targets, so they are not collected for a whole page of targets.
pub type Take<'a> = &'a mut (dyn FnMut(Result<Compared>) -> Result<()> + Send);

/// Compares a few targets, read with [`projection`], with their definition.
pub async fn compare(
    context: &Context,
    rule: &Rule,
    targets: &[Document],
    after: ClusterTime,
) -> Result<Vec<Compared>> {
    let mut out = Vec::with_capacity(targets.len());
    let mut take = |compared: Result<Compared>| {
        out.push(compared?);
        Ok(())
    };
    compare_by(context, rule, targets, after, None, &mut take).await?;
    Ok(out)
}

/// Like [`compare`], with an optional command for reading the sources of keys. Targets whose sources exceed a batch are
/// compared in parts.
pub async fn compare_by(
    context: &Context,
    rule: &Rule,
    targets: &[Document],
    after: ClusterTime,
    sources: Option<ReadsSources<'_>>,
    take: Take<'_>,
) -> Result<()> {
    let mut stack = vec![targets];
    while let Some(part) = stack.pop() {
        let limit = context.limits.read_timeout;
        match compare_at_once(context, rule, part, after, (limit, sources), take).await {
            Ok(()) => {}
            Err(error) if error.kind == Kind::TooLarge && part.len() > 1 => {
                let (front, back) = part.split_at(part.len() / 2);
                stack.extend([back, front]);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Like [`compare_by`], but in one read. Passes no target to `take` if their sources cannot be read, or together exceed
/// a batch.
pub async fn compare_at_once(
    context: &Context,
    rule: &Rule,
    targets: &[Document],
    after: ClusterTime,
    (limit, sources): (Duration, Option<ReadsSources<'_>>),
    take: Take<'_>,
) -> Result<()> {
    let mut mine: Vec<(&Document, Vec<Option<Key>>)> = Vec::new();
    for target in targets {
        let references = rule.reference.keys(Role::Target, target);
        if owns_some(context, rule, target, &references) {
            mine.push((target, references));
        }
    }
    keep_in_tree(context, rule, &mut mine, after, limit, take).await?;
    let owned = |key: &&Key| rule.keyed == Keyed::Target || context.owns(rule, key);
    let references = mine.iter().flat_map(|(_, references)| references.iter().flatten());
    let mut wanted: Vec<&Key> = references.filter(|key| rule.reference.can_resolve(key)).filter(owned).collect();
    wanted.sort_unstable();
    wanted.dedup();
    let mut rows = Rows::within(0);
    let bytes = AtomicUsize::default();
    if !wanted.is_empty() || read::values_without_source(rule).is_some() {
        let load = Load { task: Task::Guard, items: targets.len(), limit, bytes: &bytes, sources };
        let read = if rule.of_target.is_some() {
            let asked: Vec<Referrer> =
                mine.iter().map(|(target, references)| Referrer { target, references }).collect();
            context.rows_of_targets(rule, &asked, after, load).await
        } else {
            context.rows(rule, &wanted, after, load).await
        };
        let part = if read.is_ok() { targets.len() } else { targets.len().div_ceil(2) };
        context.memory.traits.cost(rule.id, Task::Guard, part, bytes.into_inner());
        rows = read?;
    }
    let owns = |key: &Key| context.owns(rule, key);
    mine.into_iter().try_for_each(|(target, references)| take(one(rule, &rows, target, references, &owns)))
}

/// Removes the documents of a tree that keep their values, whatever these are: nothing is expected of them.
async fn keep_in_tree(
    context: &Context,
    rule: &Rule,
    mine: &mut Vec<(&Document, Vec<Option<Key>>)>,
    after: ClusterTime,
    limit: Duration,
    take: Take<'_>,
) -> Result<()> {
    let Some(tree) = rule.tree else { return Ok(()) };
    let ids: Vec<Key> = mine.iter().map(|(target, _)| Key::of_document(target)).collect();
    let asked: Vec<&Key> = ids.iter().collect();
    let references = mine.iter().map(|(_, references)| references.as_slice());
    let known = tree.known_parents(ids.iter().cloned().zip(references));
    let places = Box::pin(context.places(rule, tree, &asked, known, (after, limit))).await?;
    let keeps = |target: &Document| {
        places.get(&Key::of_document(target)).is_some_and(|place| places::reason(tree, place).is_some())
    };
    for (target, references) in mine.extract_if(.., |(target, _)| keeps(target)) {
        take(Ok(Compared { target: id_of(target), fields: Vec::new(), references }))?;
    }
    Ok(())
}

/// True if this partition writes a part of the target. The other partitions compare their own parts.
fn owns_some(context: &Context, rule: &Rule, target: &Document, references: &[Option<Key>]) -> bool {
    match (rule.keyed, &rule.reference.target_each) {
        _ if context.partition.of() == 1 => true,
        (Keyed::Target, _) => context.owns(rule, &Key::of_document(target)),
        (Keyed::Value, None) => context.owns(rule, &key_of(references.first())),
        (Keyed::Value, Some(_)) => references.iter().any(|key| context.owns(rule, &key_of(Some(key)))),
    }
}

/// The key under which a reference is reconciled.
pub(super) fn key_of(reference: Option<&Option<Key>>) -> Key {
    reference.cloned().flatten().unwrap_or_else(|| Key::new(Vec::new()))
}

/// Compares targets and isolates those that cannot be compared: an expression fails (a division by zero fails the whole
/// read), an array would be too large, or reading the sources takes too long. A failing page is halved until these
/// targets are alone. Returns their number.
pub async fn compare_each(
    context: &Context,
    rule: &Rule,
    targets: &[Document],
    after: ClusterTime,
    take: &mut (dyn FnMut(Compared) + Send),
) -> Result<u64> {
    let mut failing = 0;
    let mut stack = vec![targets];
    while let Some(part) = stack.pop() {
        let mut compared = |compared: Result<Compared>| {
            match compared {
                Ok(compared) => take(compared),
                Err(error) if error.kind == Kind::Refused => failing += 1,
                Err(error) => return Err(error),
            }
            Ok(())
        };
        let reads = (context.limits.read_timeout, None);
        match compare_at_once(context, rule, part, after, reads, &mut compared).await {
            Ok(()) => {}
            Err(error) if !matches!(error.kind, Kind::Refused | Kind::ReadTimedOut | Kind::TooLarge) => {
                return Err(error);
            }
            Err(_) if part.len() > 1 => {
                let (front, back) = part.split_at(part.len() / 2);
                stack.extend([back, front]);
            }
            Err(_) => failing += 1,
        }
    }
    Ok(failing)
}

/// Compares one target with the rows read for its references. Of its elements, only those whose keys this partition
/// owns. No I/O.
pub fn one(
    rule: &Rule,
    rows: &Rows,
    target: &Document,
    references: Vec<Option<Key>>,
    owns: &dyn Fn(&Key) -> bool,
) -> Result<Compared> {
    let id = id_of(target);
    let mut fields = Vec::new();
    let inside = |path: &&FieldPath| path.has_each();
    if let Some(each) = rule.reference.target_each.as_ref().filter(|_| rule.owned().iter().any(inside)) {
        for (nth, element) in rule.reference.elements(Role::Target, target).into_iter().enumerate() {
            // A value that is not a subdocument has no fields for copies.
            let Bson::Document(element) = element else { continue };
            let key = key_of(references.get(nth));
            if rule.keyed == Keyed::Value && !owns(&key) {
                continue;
            }
            let desired = match rule.of_target {
                Some(_) => rows.desired_of_pair(rule, &id, nth, !key.values().is_empty())?,
                None => rows.desired(rule, &key)?,
            };
            let stored = |path: &FieldPath| value_at(element, path.below(each).unwrap_or_default()).cloned();
            push(rule, (&id, Some(nth)), &desired, &stored, &mut fields)?;
        }
    }
    if rule.creates.is_some() {
        created::compare(rule, rows, target, references.first().and_then(Option::as_ref), &mut fields)?;
    } else if !rule.owned().iter().all(inside) {
        let has_array = rule.reference.has_array(target);
        let desired = match rule.of_target {
            Some(_) => rows.desired_of_referrer(rule, &id, &references, has_array)?,
            None if rule.by_key => rows.desired(rule, &key_of(references.first()))?,
            None => rows.desired_of_target(rule, &references, has_array)?,
        };
        push(rule, (&id, None), &desired, &|path| value_at(target, path.segments()).cloned(), &mut fields)?;
    }
    Ok(Compared { target: id, fields, references })
}

/// Adds the owned paths of one target that lie beside its array, or those of one element.
fn push(
    rule: &Rule,
    (id, element): (&Bson, Option<usize>),
    desired: &Desired,
    stored: &dyn Fn(&FieldPath) -> Option<Bson>,
    out: &mut Vec<Difference>,
) -> Result<()> {
    let fields = match desired {
        Desired::Fields(fields) | Desired::Emptied { fields, deletes: false } => fields.clone(),
        Desired::Keep => return Ok(()),
        // The element, or the target, should not exist: reported for each owned path.
        Desired::Remove | Desired::Delete | Desired::Emptied { deletes: true, .. } => {
            vec![Some(RawBson::Undefined); rule.owned().len()]
        }
    };
    let once = matches!(rule.values, Values::Set { once: true, .. });
    let here = rule.owned().into_iter().zip(fields).filter(|(path, _)| path.has_each() == element.is_some());
    for (path, expected) in here {
        let stored = stored(path).map(RawBson::try_from).transpose()?;
        if once && (stored.is_some() || expected.is_none()) {
            continue;
        }
        let expected = unless_decoded_alike(expected, stored.as_ref())?;
        out.push(Difference { target: id.clone(), path: path.to_string(), element, expected, stored });
    }
    Ok(())
}

/// The expected value; the stored one if the two are equal once decoded: of a duplicate field name, decoding keeps one.
fn unless_decoded_alike(expected: Option<RawBson>, stored: Option<&RawBson>) -> Result<Option<RawBson>> {
    let Some(value @ (RawBson::Document(_) | RawBson::Array(_))) = &expected else { return Ok(expected) };
    if identical(Some(value), stored) {
        return Ok(expected);
    }
    let decoded = RawBson::try_from(Bson::try_from(value.clone())?)?;
    Ok(if identical(Some(&decoded), stored) { stored.cloned() } else { expected })
}

/// True if a document differs from what it should hold.
pub(super) fn differs(rule: &Rule, document: &Document, desired: &Desired) -> Result<bool> {
    let Desired::Fields(fields) = desired else { return Ok(true) };
    for (path, expected) in rule.owned().into_iter().zip(fields) {
        let stored = value_at(document, path.segments()).cloned().map(RawBson::try_from).transpose()?;
        if !identical(expected.as_ref(), stored.as_ref())
            && !identical(unless_decoded_alike(expected.clone(), stored.as_ref())?.as_ref(), stored.as_ref())
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Equal in every bit: 1 is not 1.0, NaN is NaN, missing is not null.
fn identical(a: Option<&RawBson>, b: Option<&RawBson>) -> bool {
    bytes(a) == bytes(b)
}

fn bytes(value: Option<&RawBson>) -> Option<Vec<u8>> {
    let mut doc = RawDocumentBuf::new();
    doc.append(bson::cstr!("v"), value?.clone());
    Some(doc.into_bytes())
}

/// Reads targets by `_id` and compares them. Targets that do not take part (`target.where`) or no longer exist are left
/// out.
pub async fn compare_ids(
    context: &Context,
    rule: &Rule,
    ids: &[Bson],
    after: ClusterTime,
    take: Take<'_>,
) -> Result<()> {
    let mut parts = vec![ids];
    while let Some(part) = parts.pop() {
        if let Some(targets) = by_ids(context, rule, part, after, &mut parts).await? {
            compare_by(context, rule, &targets, after, None, take).await?;
        }
    }
    Ok(())
}

/// Like [`compare_ids`], but isolates failing targets like [`compare_each`].
pub async fn compare_ids_each(
    context: &Context,
    rule: &Rule,
    ids: &[Bson],
    after: ClusterTime,
    take: &mut (dyn FnMut(Compared) + Send),
) -> Result<u64> {
    let mut failing = 0;
    let mut parts = vec![ids];
    while let Some(part) = parts.pop() {
        match by_ids(context, rule, part, after, &mut parts).await {
            Ok(Some(targets)) => failing += compare_each(context, rule, &targets, after, take).await?,
            Ok(None) => {}
            Err(error) if error.kind != Kind::Refused => return Err(error),
            Err(_) if part.len() > 1 => {
                let (front, back) = part.split_at(part.len() / 2);
                parts.extend([back, front]);
            }
            // The rule's `where` cannot be evaluated on it.
            Err(_) => failing += 1,
        }
    }
    Ok(failing)
}

/// The mismatches among the targets, if they fit into one batch; otherwise an error of the kind [`Kind::TooLarge`].
/// Each read of sources may take `limit`.
pub(super) async fn mismatches_at_once(
    context: &Context,
    rule: &Rule,
    ids: &[Bson],
    after: ClusterTime,
    limit: Duration,
) -> Result<Vec<Mismatch>> {
    let targets = by_ids(context, rule, ids, after, &mut Vec::new()).await?;
    let targets = targets.ok_or_else(|| Error::new(Kind::TooLarge, "these targets hold more than a batch may"))?;
    let mut out = Vec::new();
    let mut take = |compared: Result<Compared>| {
        out.extend(compared?.mismatch());
        Ok(())
    };
    compare_at_once(context, rule, &targets, after, (limit, None), &mut take).await?;
    Ok(out)
}

/// Reads targets by `_id`. None if several together exceed a batch: their two halves go to `parts`.
async fn by_ids<'a>(
    context: &Context,
    rule: &Rule,
    ids: &'a [Bson],
    after: ClusterTime,
    parts: &mut Vec<&'a [Bson]>,
) -> Result<Option<Vec<Document>>> {
    let filter = doc! {"$and": [{"_id": {"$in": ids.to_vec()}}, rule.target.filter.clone().unwrap_or_default()]};
    let command = doc! {
        "find": &rule.target.namespace.collection, "filter": filter, "projection": projection(rule), "batchSize": 10_000,
        "collation": read::simple_collation(),
    };
    let most = if ids.len() > 1 { context.limits.batch_bytes } else { usize::MAX };
    let mut pages = context.server.pages(&rule.target.namespace.database, command, after).await?;
    let (rows, all) = pages.up_to(most).await?;
    if !all {
        let (front, back) = ids.split_at(ids.len() / 2);
        parts.extend([back, front]);
        return Ok(None);
    }
    let mut targets = decoded(&rows)?;
    if rule.creates.is_some() {
        targets.extend(created::stand_ins(&targets, ids));
    }
    Ok(Some(targets))
}
