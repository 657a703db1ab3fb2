//! Findings from a sample of a rule's documents.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use bson::{Bson, Document, RawDocumentBuf, doc};
use serde::Serialize;
use tokio::time::Instant;

use crate::{
    inspection::{
        in_tree,
        lookups::{self, Lookup},
    },
    jobs::check::difference::Differing,
    reconcile::{
        Context,
        applied::applied,
        compare::{Compared, compare_by, compare_each, projection},
        read,
    },
};
use denormd_model::{
    distribution::{self, How, number},
    field_path::{Segment, value_at},
    key::{Key, id_of, whole_number},
    position::ClusterTime,
    shape::type_name,
};
use denormd_mongo::{
    command::decoded,
    error::{Kind, Result},
};
use denormd_rules::plan::{Rule, Side, reference::Role};

/// The most bytes that a document may have.
pub(super) const LARGEST: u64 = 16 << 20;
/// Sources that are drawn for fan-outs, and targets for fan-ins.
const SOURCES: i32 = 100;
/// Keys that are counted in addition, because many sampled references name them.
const FREQUENT: usize = 5;
/// Keys in one read.
const KEYS: usize = 200;
/// Documents that are read for them; where there are more, fewer keys are requested at once.
const FOUND: i64 = 20_000;
/// Largest collection, in documents, that may be scanned for each request.
const FEW: u64 = 10_000;
/// Time limit of the one pass over a larger collection, in milliseconds.
const PASS: i64 = 10_000;
/// Different references that such a pass may find.
const GROUPS: usize = 200_000;
/// Targets on which the validator is tested.
const TRIED: usize = 100;
/// Examples of changes.
const EXAMPLES: usize = 3;
/// The field with the size of a sampled target.
const SIZE: &str = "__denormd_size";

/// Figures from a sample.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Sample {
    /// Targets drawn.
    pub targets: u64,
    /// Sources drawn.
    pub sources: u64,
    /// The side whose references are counted, because it has them: `target` or `source`.
    pub held_by: &'static str,
    /// References by the BSON type of their value, with the number of those that resolve.
    pub references: Vec<References>,
    /// The number of targets of one source.
    pub fan_out: Option<Distribution>,
    /// The number of sources of one target, where several make one value.
    pub fan_in: Option<Distribution>,
    /// Sampled targets that a backfill would change.
    pub differing: u64,
    /// Examples of these changes.
    pub examples: Vec<Example>,
    /// Sizes of the sampled targets.
    pub sizes: Sizes,
    /// Sampled targets that the validator would refuse.
    pub refused: u64,
    /// Sampled targets for which the rule's expressions fail.
    pub failing: u64,
    /// The owned paths below which something else is in the way of a subdocument, in some sampled targets.
    pub unwritable: Vec<Unwritable>,
    /// The figures that are not estimated without an index.
    pub not_estimated: Vec<&'static str>,
}

/// A place of the target where a path of the rule cannot continue.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Unwritable {
    /// The place.
    pub place: String,
    /// Number of targets.
    pub targets: u64,
    /// Of these, targets that hold an array there.
    pub arrays: u64,
}

/// References of one type.
#[derive(Debug, Clone, Serialize)]
pub struct References {
    /// The types of its values, separated by commas.
    pub kind: String,
    /// Strings that would be ObjectIds in lower case.
    #[serde(skip)]
    pub upper_case: u64,
    /// Number of references.
    pub count: u64,
    /// Number of those that resolve.
    pub resolved: u64,
}

/// The distribution of a number in a sample.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Distribution {
    /// Half of the values are not larger.
    pub median: u64,
    /// 99 of 100 values are not larger.
    pub p99: u64,
    /// The largest value.
    pub worst: u64,
    /// The mean.
    pub mean: f64,
}

/// Sizes of targets, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Sizes {
    /// The largest current size.
    pub largest_now: u64,
    /// The largest size after a backfill.
    pub largest_then: u64,
    /// The mean growth of a target.
    pub mean_growth: f64,
}

/// A path that would change.
#[derive(Debug, Clone, Serialize)]
pub struct Example {
    /// The target's `_id`, as Extended JSON.
    pub target: serde_json::Value,
    /// The path.
    pub path: String,
    /// The difference in words, without values.
    pub words: String,
}

/// Targets and sources of a rule, drawn at random.
pub(super) struct Drawn {
    targets: Vec<Document>,
    /// The keys by which each of them refers to its sources.
    by_target: Vec<Vec<Key>>,
    /// The keys by which each sampled source refers to its targets.
    by_source: Vec<Vec<Key>>,
}

impl Drawn {
    /// Draws this number of targets, and some sources.
    pub(super) async fn draw(context: &Context, rule: &Rule, size: u32) -> Result<Self> {
        let mut fields = projection(rule);
        if rule.creates.is_none() {
            fields.insert(SIZE, 1);
        }
        let set = doc! {"$set": {SIZE: {"$bsonSize": "$$ROOT"}}};
        let targets = sampled(context, rule, Role::Target, size.into(), vec![set, doc! {"$project": fields}]).await?;
        let sources = vec![doc! {"$project": rule.reference.projection(Role::Source)}];
        let sources = sampled(context, rule, Role::Source, SOURCES.into(), sources).await?;
        let keys = |role: Role, documents: &[Document]| {
            documents.iter().map(|document| keys(rule, role, document).collect()).collect()
        };
        let mut by_source: Vec<Vec<Key>> = keys(Role::Source, &sources);
        if rule.reference.has_buckets() {
            let dates: Vec<&Key> = by_source.iter().flatten().collect();
            by_source = context.bucket_keys(rule, &dates).await?.into_iter().map(|key| vec![key]).collect();
        }
        Ok(Self { by_target: keys(Role::Target, &targets), by_source, targets })
    }

    /// The keys that refer to the other side, and the role of that side.
    fn held(&self, rule: &Rule) -> (&[Vec<Key>], Role) {
        if source_holds(rule) { (&self.by_source, Role::Target) } else { (&self.by_target, Role::Source) }
    }

    /// A key that occurs in the sample.
    pub(super) fn key(&self, rule: &Rule) -> Option<Key> {
        self.held(rule).0.iter().flatten().find(|key| rule.reference.can_resolve(key)).cloned()
    }

    /// Inspects the sample.
    pub(super) async fn look(mut self, context: &Context, rule: &Rule, lookups: &[Lookup]) -> Result<Sample> {
        let slow = |what: &str| lookups.iter().any(|lookup| lookup.what == what && lookup.index.is_none());
        let slow_sources = slow(lookups::SOURCES) && has_many(context, rule, Role::Source).await?;
        let slow_targets = slow(lookups::TARGETS) && has_many(context, rule, Role::Target).await?;
        if slow_sources {
            // The number that one pass can compare.
            self.targets.truncate(KEYS);
        }
        let mut sample = Sample {
            targets: self.targets.len() as u64,
            sources: self.by_source.len() as u64,
            held_by: if source_holds(rule) { "source" } else { "target" },
            ..Sample::default()
        };
        let mut compared = self.compare(context, rule, slow_sources, &mut sample).await?;
        if let Some(compared) = &mut compared {
            sample.unwritable = unwritable(rule, &self.targets, compared);
        }
        match &compared {
            Some(compared) => changes(&mut sample, &self.targets, compared)?,
            None => sample.not_estimated.push("changes"),
        }
        // Each source has its document, and a document any number of sources.
        if rule.creates.is_none() {
            self.count_references(context, rule, (slow_sources, slow_targets), &mut sample).await?;
        }
        sample.refused = refused(context, rule, compared.as_deref().unwrap_or_default()).await?;
        Ok(sample)
    }

    /// Finds how many references resolve, and how many documents one of the other side has.
    async fn count_references(
        &self,
        context: &Context,
        rule: &Rule,
        (slow_sources, slow_targets): (bool, bool),
        sample: &mut Sample,
    ) -> Result<()> {
        let some_targets = &self.by_target[..self.by_target.len().min(100)];
        let (held, other) = self.held(rule);
        let frequent = frequent(rule, held);
        let sources = if slow_sources {
            let wanted = if other == Role::Source { held } else { some_targets };
            Way::pass(context, rule, Role::Source, &[wanted, &frequent].concat()).await?
        } else {
            Way::Lookups
        };
        let targets = if slow_targets {
            Way::pass(context, rule, Role::Target, &[&self.by_source[..], &frequent].concat()).await?
        } else {
            Way::Lookups
        };
        let way = if other == Role::Source { &sources } else { &targets };
        match way.answered(context, rule, held, other).await? {
            Some(answered) => sample.references = references(held, &answered),
            None => sample.not_estimated.push("references"),
        }
        match targets.counts(context, rule, &self.by_source, Role::Target).await? {
            Some(counts) => sample.fan_out = distribution(counts),
            None => sample.not_estimated.push("fan-out"),
        }
        if let (Some(distribution), Role::Source) = (&mut sample.fan_out, other) {
            let counts = targets.counts(context, rule, &frequent, Role::Target).await?.unwrap_or_default();
            distribution.worst = counts.into_iter().fold(distribution.worst, u64::max);
            if let Some(mean) = self.mean(context, rule, &sample.references).await? {
                distribution.mean = mean;
            }
        }
        if rule.gathers() {
            match sources.counts(context, rule, some_targets, Role::Source).await? {
                Some(counts) => sample.fan_in = distribution(counts),
                None => sample.not_estimated.push("fan-in"),
            }
            if let (Some(distribution), Role::Target) = (&mut sample.fan_in, other) {
                let counts = sources.counts(context, rule, &frequent, Role::Source).await?.unwrap_or_default();
                distribution.worst = counts.into_iter().fold(distribution.worst, u64::max);
            }
        }
        Ok(())
    }

    /// Mean number of targets of a source, from the share of the sampled references that resolve. None where a filter
    /// leaves the number of participating documents unknown.
    async fn mean(&self, context: &Context, rule: &Rule, references: &[References]) -> Result<Option<f64>> {
        if rule.source.filter.is_some() || rule.target.filter.is_some() || self.by_target.is_empty() {
            return Ok(None);
        }
        let (sources, targets) = (count(context, rule, Role::Source).await?, count(context, rule, Role::Target).await?);
        let resolved: u64 = references.iter().map(|references| references.resolved).sum();
        #[expect(clippy::cast_precision_loss, reason = "a mean for people")]
        let mean = (targets as f64 * resolved as f64) / (self.by_target.len() as f64 * sources.max(1) as f64);
        Ok(Some(mean))
    }

    /// Compares the targets. None if that takes too long because there is no index.
    async fn compare(
        &self,
        context: &Context,
        rule: &Rule,
        at_once: bool,
        sample: &mut Sample,
    ) -> Result<Option<Vec<Compared>>> {
        let time = context.server.operation_time().await?;
        if let Some(tree) = rule.tree {
            if at_once || count(context, rule, Role::Target).await? > in_tree::MOST {
                return Ok(None);
            }
            let deadline = Instant::now() + Duration::from_millis(PASS.unsigned_abs());
            let Some(whole) = in_tree::compare(context, rule, tree, time, deadline).await? else { return Ok(None) };
            let drawn: BTreeSet<Key> = self.targets.iter().map(Key::of_document).collect();
            let mut compared = whole.compared;
            compared.retain(|compared| drawn.contains(&Key::one(compared.target.clone())));
            sample.failing = whole.failing.min((drawn.len() - compared.len().min(drawn.len())) as u64);
            return Ok(Some(compared));
        }
        if at_once {
            let sources = |keys: &[&Key]| {
                let mut command = read::sources_at_once(rule, keys);
                command.insert("maxTimeMS", PASS);
                command
            };
            let mut compared = Vec::new();
            let mut take = |one: Result<Compared>| {
                compared.push(one?);
                Ok(())
            };
            let read = compare_by(context, rule, &self.targets, time, Some(&sources), &mut take).await;
            return too_long(read.map(|()| compared));
        }
        let mut compared = Vec::new();
        for targets in self.targets.chunks(KEYS) {
            sample.failing += compare_each(context, rule, targets, time, &mut |one| compared.push(one)).await?;
        }
        Ok(Some(compared))
    }
}

/// True if the source's side has the references: then many of them name one target. An airport has no reference to its
/// flights.
pub(super) fn source_holds(rule: &Rule) -> bool {
    rule.reference.keyed_by_target_id() || (rule.gathers() && !rule.reference.keyed_by_source_id())
}

/// The keys that the sampled references name most often. If all flights leave from 3 of 1,458 airports, a sample of
/// airports has none of these; a sample of flights has all.
fn frequent(rule: &Rule, held: &[Vec<Key>]) -> Vec<Vec<Key>> {
    let mut times: BTreeMap<&Key, usize> = BTreeMap::new();
    for key in held.iter().flatten().filter(|key| rule.reference.can_resolve(key)) {
        *times.entry(key).or_default() += 1;
    }
    let mut keys: Vec<(usize, &Key)> = times.into_iter().map(|(key, times)| (times, key)).collect();
    keys.sort_unstable_by(|a, b| b.cmp(a));
    keys.into_iter().take(FREQUENT).map(|(_, key)| vec![key.clone()]).collect()
}

/// The references of a document that are not empty.
pub(super) fn keys(rule: &Rule, role: Role, document: &Document) -> impl Iterator<Item = Key> + use<> {
    rule.reference.keys(role, document).into_iter().flatten()
}

/// None for a read that took too long, or failed on a document: to find that document, the collection would be read
/// many times.
fn too_long<T>(result: Result<T>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.leaves_unknown() => Ok(None),
        Err(error) => Err(error),
    }
}

/// True if a side is too large to be scanned for each request.
async fn has_many(context: &Context, rule: &Rule, role: Role) -> Result<bool> {
    Ok(count(context, rule, role).await? > FEW)
}

/// Number of documents in a side's collection.
pub(super) async fn count(context: &Context, rule: &Rule, role: Role) -> Result<u64> {
    let namespace = &rule.side(role).namespace;
    // Without a filter the server knows the number and does not count.
    let reply = context.server.database(&namespace.database).run_command(doc! {"count": &namespace.collection}).await?;
    Ok(reply.get("n").map_or(0, number))
}

/// The way to find the documents of a side that have certain keys.
enum Way {
    /// By lookups.
    Lookups,
    /// From the result of one pass over the side.
    Pass(Pass),
    /// None: the pass took too long.
    TooLong,
}

impl Way {
    async fn pass(context: &Context, rule: &Rule, role: Role, sample: &[Vec<Key>]) -> Result<Self> {
        Ok(Pass::over(context, rule, role, sample).await?.map_or(Self::TooLong, Self::Pass))
    }

    /// The keys for which the `other` side has a document.
    async fn answered(
        &self,
        context: &Context,
        rule: &Rule,
        held: &[Vec<Key>],
        other: Role,
    ) -> Result<Option<Vec<Key>>> {
        Ok(match self {
            Self::Lookups => Some(answered(context, rule, held, other).await?),
            Self::Pass(pass) => Some(pass.groups_of.keys().cloned().collect()),
            Self::TooLong => None,
        })
    }

    /// For each document of a sample, the number of documents on the other side that have its keys.
    async fn counts(
        &self,
        context: &Context,
        rule: &Rule,
        sample: &[Vec<Key>],
        other: Role,
    ) -> Result<Option<Vec<u64>>> {
        Ok(match self {
            Self::Lookups => Some(counts(context, rule, sample, other).await?),
            Self::Pass(pass) => Some(sample.iter().map(|keys| pass.count(rule, keys)).collect()),
            Self::TooLong => None,
        })
    }
}

/// The counts for a sample's keys on a side without an index: one pass over it groups the documents by their
/// references.
struct Pass {
    /// Number of documents in each group.
    groups: Vec<u64>,
    /// The groups that have a key.
    groups_of: BTreeMap<Key, Vec<usize>>,
}

impl Pass {
    /// None if it takes too long, or finds too much.
    async fn over(context: &Context, rule: &Rule, role: Role, sample: &[Vec<Key>]) -> Result<Option<Self>> {
        let mut keys: Vec<&Key> = sample.iter().flatten().filter(|key| rule.reference.can_resolve(key)).collect();
        keys.sort_unstable();
        keys.dedup();
        if keys.is_empty() {
            return Ok(Some(Self { groups: Vec::new(), groups_of: BTreeMap::new() }));
        }
        let (side, find) = lookup(rule, role, &keys);
        let mut fields = rule.reference.projection(role);
        if !fields.contains_key("_id") {
            fields.insert("_id", 0);
        }
        let stages = vec![
            doc! {"$match": find.get_document("filter").cloned().unwrap_or_default()},
            doc! {"$project": fields},
            // If the stage grouped by `$$ROOT` itself, MongoDB 6.0.5 would ignore the projection.
            doc! {"$replaceWith": {"held": "$$ROOT"}},
            doc! {"$group": {"_id": "$held", "n": {"$sum": 1}}},
            doc! {"$limit": i64::try_from(GROUPS).unwrap_or(i64::MAX)},
        ];
        let command = doc! {
            "aggregate": &side.namespace.collection, "pipeline": stages, "cursor": {}, "allowDiskUse": true,
            "maxTimeMS": PASS, "collation": read::simple_collation(),
        };
        let Some(rows) =
            too_long(context.server.read(&side.namespace.database, command, ClusterTime::default()).await)?
        else {
            return Ok(None);
        };
        if rows.len() >= GROUPS {
            return Ok(None);
        }
        let mut groups = Vec::new();
        let mut groups_of: BTreeMap<Key, Vec<usize>> = BTreeMap::new();
        for row in decoded(&rows)? {
            let Ok(document) = row.get_document("_id") else { continue };
            for key in self::keys(rule, role, document) {
                groups_of.entry(key).or_default().push(groups.len());
            }
            groups.push(row.get("n").map_or(0, number));
        }
        Ok(Some(Self { groups, groups_of }))
    }

    /// The documents that have one of the keys.
    fn count(&self, rule: &Rule, keys: &[Key]) -> u64 {
        let keys = keys.iter().filter(|key| rule.reference.can_resolve(key));
        let groups: BTreeSet<usize> = keys.filter_map(|key| self.groups_of.get(key)).flatten().copied().collect();
        groups.into_iter().filter_map(|nth| self.groups.get(nth)).sum()
    }
}

/// One side, and the command that finds its documents that have one of the keys.
fn lookup<'a>(rule: &'a Rule, role: Role, keys: &[&Key]) -> (&'a Side, Document) {
    match role {
        Role::Source => (&rule.source, read::source_ids(rule, keys, FOUND)),
        Role::Target => (&rule.target, read::holders(rule, keys)),
    }
}

pub(super) async fn sampled(
    context: &Context,
    rule: &Rule,
    role: Role,
    size: i64,
    more: Vec<Document>,
) -> Result<Vec<Document>> {
    let side = rule.side(role);
    let mut stages: Vec<Document> = side.filter.clone().map(|filter| doc! {"$match": filter}).into_iter().collect();
    stages.push(doc! {"$sample": {"size": size}});
    stages.extend(more);
    let command = doc! {
        "aggregate": &side.namespace.collection, "pipeline": stages, "cursor": {}, "allowDiskUse": true,
        "collation": read::simple_collation(),
    };
    decoded(&context.server.read(&side.namespace.database, command, ClusterTime::default()).await?)
}

/// Removes the targets that the server would refuse to write. Returns the places because of which it would.
fn unwritable(rule: &Rule, targets: &[Document], compared: &mut Vec<Compared>) -> Vec<Unwritable> {
    let of_id: BTreeMap<Key, &Document> = targets.iter().map(|target| (Key::of_document(target), target)).collect();
    let mut places: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    compared.retain(|compared| {
        let target = of_id.get(&Key::one(compared.target.clone()));
        let place = target.and_then(|target| Some((target, compared.in_the_way(rule, target)?)));
        let Some((target, place)) = &place else { return true };
        let (count, arrays) = places.entry(place.clone()).or_default();
        *count += 1;
        let path: Vec<Segment> = place.split('.').map(|name| Segment::Name(name.to_owned())).collect();
        *arrays += u64::from(matches!(value_at(target, &path), Some(Bson::Array(_))));
        false
    });
    places.into_iter().map(|(place, (targets, arrays))| Unwritable { place, targets, arrays }).collect()
}

/// Records the changes that a backfill would make, and the sizes after it.
fn changes(sample: &mut Sample, targets: &[Document], compared: &[Compared]) -> Result<()> {
    let sizes: BTreeMap<Key, i64> = targets
        .iter()
        .map(|target| (Key::of_document(target), target.get(SIZE).and_then(whole_number).unwrap_or_default()))
        .collect();
    let mut growth = 0_i64;
    for compared in compared {
        let now = sizes.get(&Key::one(compared.target.clone())).copied().unwrap_or_default();
        let grows: i64 = compared
            .differences()
            .map(|d| bytes(&d.path, d.expected.as_ref()) - bytes(&d.path, d.stored.as_ref()))
            .sum();
        growth += grows;
        let whole = |bytes: i64| u64::try_from(bytes).unwrap_or_default();
        sample.sizes.largest_now = sample.sizes.largest_now.max(whole(now));
        sample.sizes.largest_then = sample.sizes.largest_then.max(whole(now + grows));
        let mut differs = compared.differences().peekable();
        if let Some(first) = differs.peek() {
            sample.differing += 1;
            if sample.examples.len() < EXAMPLES {
                let differing = Differing::of(first, false)?;
                let target = compared.target.clone().into_relaxed_extjson();
                sample.examples.push(Example { target, path: differing.path, words: differing.words });
            }
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "a mean for people")]
    if !compared.is_empty() {
        sample.sizes.mean_growth = growth as f64 / compared.len() as f64;
    }
    Ok(())
}

/// Bytes of a field: its type, its name, its value.
fn bytes(path: &str, value: Option<&bson::RawBson>) -> i64 {
    let Some(value) = value.filter(|value| !matches!(value, bson::RawBson::Undefined)) else { return 0 };
    let mut doc = RawDocumentBuf::new();
    doc.append(bson::cstr!("v"), value.clone());
    let name = path.rsplit('.').next().unwrap_or(path).len();
    // An empty document has 5 bytes, and the name counted above is one.
    i64::try_from(doc.as_bytes().len() - 5 - 1 + name).unwrap_or_default()
}

/// The keys for which the `other` side has a document.
pub(super) async fn answered(context: &Context, rule: &Rule, held: &[Vec<Key>], other: Role) -> Result<Vec<Key>> {
    let mut keys: Vec<&Key> = held.iter().flatten().filter(|key| rule.reference.can_resolve(key)).collect();
    keys.sort_unstable();
    keys.dedup();
    let mut answered: Vec<Key> = Vec::new();
    let mut stack: Vec<&[&Key]> = keys.chunks(KEYS).collect();
    while let Some(keys) = stack.pop() {
        let (side, mut command) = lookup(rule, other, keys);
        command.insert("projection", rule.reference.projection(other));
        command.insert("limit", FOUND);
        command.remove("sort");
        let found = decoded(&context.server.read(&side.namespace.database, command, ClusterTime::default()).await?)?;
        // Some keys have so many documents that others may have been cut off.
        if found.len() >= usize::try_from(FOUND).unwrap_or(usize::MAX) && keys.len() > 1 {
            let (front, back) = keys.split_at(keys.len() / 2);
            stack.extend([front, back]);
        }
        answered.extend(found.iter().flat_map(|document| self::keys(rule, other, document)));
        answered.sort_unstable();
        answered.dedup();
    }
    Ok(answered)
}

/// True for 24 hexadecimal digits with capital letters, which are not how an ObjectId is written.
fn is_upper_case_id(value: &Bson) -> bool {
    let Bson::String(text) = value else { return false };
    text.len() == 24
        && text.bytes().all(|byte| byte.is_ascii_hexdigit())
        && text.bytes().any(|byte| byte.is_ascii_uppercase())
}

/// References by type, with the number of those that are in `answered`, which is sorted.
fn references(held: &[Vec<Key>], answered: &[Key]) -> Vec<References> {
    let mut by_kind: BTreeMap<String, References> = BTreeMap::new();
    for key in held.iter().flatten() {
        let kinds: Vec<&str> = key.values().iter().map(type_name).collect();
        let kind = kinds.join(", ");
        let empty = || References { kind: kind.clone(), count: 0, resolved: 0, upper_case: 0 };
        let references = by_kind.entry(kind.clone()).or_insert_with(empty);
        references.count += 1;
        references.resolved += u64::from(answered.binary_search(key).is_ok());
        references.upper_case += u64::from(key.values().iter().any(is_upper_case_id));
    }
    let mut out: Vec<References> = by_kind.into_values().collect();
    out.sort_by_key(|references| std::cmp::Reverse(references.count));
    out
}

/// For each document of a sample, the number of documents on the other side that have its keys. A document for which
/// the count takes too long is left out.
async fn counts(context: &Context, rule: &Rule, sample: &[Vec<Key>], other: Role) -> Result<Vec<u64>> {
    let mut out = Vec::new();
    for keys in sample {
        let keys: Vec<&Key> = keys.iter().filter(|key| rule.reference.can_resolve(key)).collect();
        if keys.is_empty() {
            out.push(0);
            continue;
        }
        let (side, command) = lookup(rule, other, &keys);
        let filter = command.get_document("filter").cloned().unwrap_or_default();
        match context.server.count(&side.namespace, filter).await {
            Ok(count) => out.push(count),
            Err(error) if error.kind == Kind::TimedOut => {}
            Err(error) => return Err(error),
        }
    }
    Ok(out)
}

fn distribution(counts: Vec<u64>) -> Option<Distribution> {
    let all = distribution::Distribution::of_list(counts, How::Exact)?;
    Some(Distribution { median: all.median, p99: all.p99, worst: all.max, mean: all.mean() })
}

/// Number of sampled targets that the collection's validator would refuse after the rule's changes.
async fn refused(context: &Context, rule: &Rule, compared: &[Compared]) -> Result<u64> {
    let namespace = &rule.target.namespace;
    let listed = context.server.listed(&namespace.database, doc! {"filter": {"name": &namespace.collection}}).await?;
    let options = listed.first().and_then(|found| found.get_document("options").ok());
    let Some(validator) = options.and_then(|options| options.get_document("validator").ok()) else { return Ok(0) };
    let warns = options.is_some_and(|options| options.get_str("validationAction").is_ok_and(|action| action == "warn"));
    let changing: Vec<&Compared> = compared.iter().filter(|c| c.differences().next().is_some()).take(TRIED).collect();
    if warns || validator.is_empty() || changing.is_empty() {
        return Ok(0);
    }
    let ids: Vec<Bson> = changing.iter().map(|compared| compared.target.clone()).collect();
    let command =
        doc! {"find": &namespace.collection, "filter": {"_id": {"$in": ids}}, "collation": read::simple_collation()};
    let mut targets = decoded(&context.server.read(&namespace.database, command, ClusterTime::default()).await?)?;
    for target in &mut targets {
        let id = id_of(target);
        if let Some(compared) = changing.iter().find(|compared| compared.target == id) {
            // A target that the rule deletes is not refused.
            *target = applied(rule, target.clone(), compared)?.unwrap_or_else(|| target.clone());
        }
    }
    let mut accepted = 0;
    // A command document may not be larger than one document.
    for targets in targets.chunks(10) {
        let targets: Vec<Document> = targets.iter().map(|target| doc! {"$literal": target.clone()}).collect();
        let stages = vec![
            doc! {"$documents": targets.iter().map(|target| doc! {"d": target.clone()}).collect::<Vec<_>>()},
            doc! {"$replaceWith": "$d"},
            doc! {"$match": validator.clone()},
            doc! {"$project": {"_id": 1}},
        ];
        let command = doc! {"aggregate": 1, "pipeline": stages, "cursor": {}};
        accepted += context.server.read(&namespace.database, command, ClusterTime::default()).await?.len();
    }
    Ok(targets.len().saturating_sub(accepted) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_its_percentiles() {
        let distribution_of = |counts: Vec<u64>| distribution(counts).map(|s| (s.median, s.p99, s.worst));
        assert_eq!(distribution_of(vec![]), None);
        assert_eq!(distribution_of(vec![7]), Some((7, 7, 7)));
        assert_eq!(distribution_of((1..=100).collect()), Some((50, 99, 100)));
        assert_eq!(distribution_of((1..=1000).rev().collect()), Some((500, 990, 1000)));
    }

    #[test]
    fn a_field_takes_its_type_its_name_and_its_value() {
        let value = bson::RawBson::try_from(Bson::String("abc".to_owned())).unwrap();
        let mut with = bson::rawdoc! {"x": 1, "name": "abc"};
        let grown = with.as_bytes().len() - bson::rawdoc! {"x": 1}.as_bytes().len();
        assert_eq!(bytes("parts.$[].name", Some(&value)), i64::try_from(grown).unwrap());
        assert_eq!(bytes("name", None), 0);
        with.append(bson::cstr!("y"), 1);
    }
}
