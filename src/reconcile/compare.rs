//! What targets hold against what they should hold. Reads only.

use std::{
    collections::BTreeSet,
    hash::{DefaultHasher, Hash, Hasher},
    sync::atomic::AtomicUsize,
    time::Duration,
};

use bson::{Bson, Document, RawBson, RawDocumentBuf, doc};

use crate::{
    error::{Error, Kind, Result},
    field_path::{FieldPath, Segment},
    key::Key,
    mongo::Reads,
    plan::{Keyed, Rule, Values, reference::Role},
    position::ClusterTime,
    reconcile::{
        context::{Context, Load, ReadsSources},
        read,
        value::{Desired, Field, Rows},
    },
    request::Task,
};

/// One owned path of one target: what should be there, and what is.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// The target's `_id`.
    pub target: Bson,
    /// The path, with `$[]` for the element.
    pub path: String,
    /// Which element, in the order of the target's references; none where the path is not below the array.
    pub element: Option<usize>,
    /// What should be there.
    pub expected: Field,
    /// What is there.
    pub stored: Field,
}

/// One target against its definition.
#[derive(Debug, Clone, PartialEq)]
pub struct Compared {
    /// The target's `_id`.
    pub target: Bson,
    /// Every owned path with what should be there and what is; for arrays, once for each element.
    pub fields: Vec<Difference>,
    /// The values by which it refers to its sources.
    pub references: Vec<Option<Key>>,
}

/// A target that differs, without its values.
#[derive(Debug, Clone, PartialEq)]
pub struct Mismatch {
    /// The target's `_id`.
    pub target: Bson,
    /// The paths that differ.
    pub paths: BTreeSet<String>,
    /// The values by which it refers to its sources.
    pub references: Vec<Option<Key>>,
    /// Tells the differences from others of the same target: equal when the same values are expected and the same are stored.
    pub fingerprint: u64,
}

impl Difference {
    /// Whether it differs, bit by bit.
    #[must_use]
    pub fn differs(&self) -> bool {
        !identical(self.expected.as_ref(), self.stored.as_ref())
    }
}

impl Compared {
    /// The paths that differ, bit by bit.
    pub fn differences(&self) -> impl Iterator<Item = &Difference> {
        self.fields.iter().filter(|field| field.differs())
    }

    /// What differs; none where nothing does.
    #[must_use]
    pub fn mismatch(self) -> Option<Mismatch> {
        let paths: BTreeSet<String> = self.differences().map(|difference| difference.path.clone()).collect();
        let fingerprint = self.fingerprint();
        (!paths.is_empty()).then_some(Mismatch { target: self.target, paths, references: self.references, fingerprint })
    }

    /// See [`Mismatch::fingerprint`].
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for Difference { path, expected, stored, .. } in self.differences() {
            path.hash(&mut hasher);
            for field in [expected, stored] {
                bytes(field.as_ref()).hash(&mut hasher);
            }
        }
        hasher.finish()
    }
}

/// The projection that comparing needs: what the target refers by, and what the rule owns.
#[must_use]
pub fn projection(rule: &Rule) -> Document {
    let mut roots = Document::new();
    for path in rule.reference.paths(Role::Target).chain(rule.owned()) {
        roots.insert(path.root(), 1);
    }
    roots
}

/// Takes one target after the other, or why it cannot be compared. Values may be large, and many targets may have the same: they
/// are not to be held for a page of targets.
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

/// The same, by another way to read the sources of keys. Targets whose sources are larger together than a batch may be are
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

/// The same at once. Takes no target where their sources cannot be read, or are larger together than a batch may be.
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
    let owned = |key: &&Key| rule.keyed == Keyed::Target || context.owns(rule, key);
    let references = mine.iter().flat_map(|(_, references)| references.iter().flatten());
    let mut wanted: Vec<&Key> = references.filter(|key| rule.reference.can_resolve(key)).filter(owned).collect();
    wanted.sort_unstable();
    wanted.dedup();
    let mut rows = Rows::within(0);
    let bytes = AtomicUsize::default();
    if !wanted.is_empty() {
        let load = Load { task: Task::Guard, items: targets.len(), limit, bytes: &bytes, sources };
        let read = context.rows(rule, &wanted, after, load).await;
        let part = if read.is_ok() { targets.len() } else { targets.len().div_ceil(2) };
        context.memory.cost(rule.id, Task::Guard, part, bytes.into_inner());
        rows = read?;
    }
    let owns = |key: &Key| context.owns(rule, key);
    mine.into_iter().try_for_each(|(target, references)| take(one(rule, &rows, target, references, &owns)))
}

/// Whether a part of the target is written by this partition: what the others write they compare.
fn owns_some(context: &Context, rule: &Rule, target: &Document, references: &[Option<Key>]) -> bool {
    match (rule.keyed, &rule.reference.target_each) {
        _ if context.partition.of() == 1 => true,
        (Keyed::Target, _) => context.owns(rule, &Key::one(target.get("_id").cloned().unwrap_or(Bson::Null))),
        (Keyed::Value, None) => context.owns(rule, &key_of(references.first())),
        (Keyed::Value, Some(_)) => references.iter().any(|key| context.owns(rule, &key_of(Some(key)))),
    }
}

/// The key that a reference is reconciled by.
fn key_of(reference: Option<&Option<Key>>) -> Key {
    reference.cloned().flatten().unwrap_or_else(|| Key::new(Vec::new()))
}

/// Compares targets, with those apart that cannot be compared, because an expression fails (a division by zero fails the whole
/// read), an array would be too large, or reading the sources takes too long: a page is halved until they stand alone. Returns how
/// many they are.
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

/// Compares one target with what rows that were read for its references say; of its elements those whose keys are owned
/// here. Pure.
pub fn one(
    rule: &Rule,
    rows: &Rows,
    target: &Document,
    references: Vec<Option<Key>>,
    owns: &dyn Fn(&Key) -> bool,
) -> Result<Compared> {
    let id = target.get("_id").cloned().unwrap_or(Bson::Null);
    let mut fields = Vec::new();
    match (rule.keyed, &rule.reference.target_each) {
        (Keyed::Target, _) => {
            let desired = rows.desired_of_target(rule, &references, rule.reference.has_array(target))?;
            push(rule, (&id, None), &desired, &|path| value_at(Some(target), path.segments()), &mut fields)?;
        }
        (Keyed::Value, None) => {
            let desired = rows.desired(rule, &key_of(references.first()))?;
            push(rule, (&id, None), &desired, &|path| value_at(Some(target), path.segments()), &mut fields)?;
        }
        (Keyed::Value, Some(each)) => {
            for (nth, element) in rule.reference.elements(Role::Target, target).into_iter().enumerate() {
                // What is no subdocument has no fields to hold a copy.
                let Bson::Document(element) = element else { continue };
                let key = key_of(references.get(nth));
                if !owns(&key) {
                    continue;
                }
                let desired = rows.desired(rule, &key)?;
                let stored = |path: &FieldPath| value_at(Some(element), path.below(each).unwrap_or_default());
                push(rule, (&id, Some(nth)), &desired, &stored, &mut fields)?;
            }
        }
    }
    Ok(Compared { target: id, fields, references })
}

/// Adds the owned paths of one target, or of one element.
fn push(
    rule: &Rule,
    (id, element): (&Bson, Option<usize>),
    desired: &Desired,
    stored: &dyn Fn(&FieldPath) -> Option<Bson>,
    out: &mut Vec<Difference>,
) -> Result<()> {
    let fields = match desired {
        Desired::Fields(fields) => fields.clone(),
        Desired::Keep => return Ok(()),
        // The element, or the target, should not be there: said of each owned path.
        Desired::Remove | Desired::Delete => vec![Some(RawBson::Undefined); rule.owned().len()],
    };
    let once = matches!(rule.values, Values::Set { once: true, .. });
    for (path, expected) in rule.owned().into_iter().zip(fields) {
        let stored = stored(path).map(RawBson::try_from).transpose()?;
        if once && (stored.is_some() || expected.is_none()) {
            continue;
        }
        out.push(Difference { target: id.clone(), path: path.to_string(), element, expected, stored });
    }
    Ok(())
}

/// The value at a path that does not look into arrays.
fn value_at(doc: Option<&Document>, path: &[Segment]) -> Option<Bson> {
    let (last, parents) = path.split_last()?;
    let mut at = doc?;
    for segment in parents {
        let Segment::Name(name) = segment else { return None };
        at = at.get_document(name).ok()?;
    }
    let Segment::Name(name) = last else { return None };
    at.get(name).cloned()
}

/// Equal to the last bit: 1 is not 1.0, NaN is NaN, missing is not null.
fn identical(a: Option<&RawBson>, b: Option<&RawBson>) -> bool {
    bytes(a) == bytes(b)
}

fn bytes(value: Option<&RawBson>) -> Option<Vec<u8>> {
    let mut doc = RawDocumentBuf::new();
    doc.append(bson::cstr!("v"), value?.clone());
    Some(doc.into_bytes())
}

/// Reads targets by `_id` and compares them. Those that do not take part (`target.where`) or are gone are left out.
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

/// The same in the way of [`compare_each`].
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
        if let Some(targets) = by_ids(context, rule, part, after, &mut parts).await? {
            failing += compare_each(context, rule, &targets, after, take).await?;
        }
    }
    Ok(failing)
}

/// The mismatches among as many targets as a batch may hold, else an error of the kind [`Kind::TooLarge`]; reads of sources may
/// take `limit`.
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

/// Reads targets by `_id`. None where several are too large for a batch: both halves of them go to `parts`.
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
    let mut pages = context.server.pages(&rule.target.namespace.database, command, Reads { after }).await?;
    let (rows, all) = pages.up_to(most).await?;
    if !all {
        let (front, back) = ids.split_at(ids.len() / 2);
        parts.extend([back, front]);
        return Ok(None);
    }
    let targets = rows.iter().map(|row| Document::try_from(row.as_ref()).map_err(Error::from));
    targets.collect::<Result<_>>().map(Some)
}
