//! What targets hold against what they should hold. Reads only.

use std::hash::{DefaultHasher, Hash, Hasher};

use bson::{Bson, Document, RawBson, RawDocumentBuf, doc};

use crate::{
    error::{Error, Kind, Result},
    field_path::{FieldPath, Segment},
    key::Key,
    mongo::Reads,
    plan::{Keyed, Rule, Values, reference::Role},
    position::ClusterTime,
    reconcile::{
        read,
        run::Context,
        value::{Desired, Field, Rows},
    },
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

    /// Tells the differences from others of the same target: equal when the same values are expected and the same are
    /// stored.
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

/// Compares targets, read with [`projection`], with their definition.
pub async fn compare(
    context: &Context,
    rule: &Rule,
    targets: &[Document],
    after: ClusterTime,
) -> Result<Vec<Compared>> {
    compare_by(context, rule, targets, after, None).await
}

/// The command that reads the sources of keys.
pub type ReadsSources<'a> = &'a (dyn Fn(&[&Key]) -> Document + Sync);

/// The same, by another way to read the sources of keys.
pub async fn compare_by(
    context: &Context,
    rule: &Rule,
    targets: &[Document],
    after: ClusterTime,
    sources: Option<ReadsSources<'_>>,
) -> Result<Vec<Compared>> {
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
    let mut rows = Rows::default();
    match sources {
        _ if wanted.is_empty() => {}
        Some(sources) => {
            let command = sources(&wanted);
            rows.take(context.server.read(&rule.source.namespace.database, command, Reads { after }).await?)?;
        }
        None => rows = context.rows(rule, &wanted, after).await?,
    }
    let owns = |key: &Key| context.owns(rule, key);
    mine.into_iter().map(|(target, references)| one(rule, &rows, target, references, &owns)).collect()
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

/// The same, with those apart for which the rule's expressions fail (a division by zero fails the whole read): a page is
/// halved until the culprits stand alone. Returns how many they are.
pub async fn compare_each(
    context: &Context,
    rule: &Rule,
    targets: &[Document],
    after: ClusterTime,
) -> Result<(Vec<Compared>, u64)> {
    let (mut out, mut failing) = (Vec::new(), 0);
    let mut stack = vec![targets];
    while let Some(part) = stack.pop() {
        match compare(context, rule, part, after).await {
            Ok(compared) => out.extend(compared),
            Err(error) if error.kind == Kind::Refused && part.len() > 1 => {
                let (front, back) = part.split_at(part.len() / 2);
                stack.extend([back, front]);
            }
            Err(error) if error.kind == Kind::Refused => failing += part.len() as u64,
            Err(error) => return Err(error),
        }
    }
    Ok((out, failing))
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
pub async fn compare_ids(context: &Context, rule: &Rule, ids: &[Bson], after: ClusterTime) -> Result<Vec<Compared>> {
    let filter = doc! {"$and": [{"_id": {"$in": ids.to_vec()}}, rule.target.filter.clone().unwrap_or_default()]};
    let command = doc! {
        "find": &rule.target.namespace.collection, "filter": filter, "projection": projection(rule), "batchSize": 10_000,
        "collation": read::simple_collation(),
    };
    let rows = context.server.read(&rule.target.namespace.database, command, Reads { after }).await?;
    let targets =
        rows.iter().map(|row| Document::try_from(row.as_ref()).map_err(Error::from)).collect::<Result<Vec<_>>>()?;
    compare(context, rule, &targets, after).await
}
