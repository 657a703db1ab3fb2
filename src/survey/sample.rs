//! What a sample of a rule's documents says.

use std::collections::BTreeMap;

use bson::{Bson, Document, RawDocumentBuf, doc};
use serde::Serialize;

use crate::{
    check::difference::{Differing, type_name},
    error::{Error, Result},
    key::Key,
    mongo::Reads,
    plan::{Rule, reference::Role},
    reconcile::{
        Context,
        applied::applied,
        compare::{Compared, compare_each, projection},
        read,
    },
};

/// The most bytes that a document may have.
pub(super) const LARGEST: u64 = 16 << 20;
/// Sources that are drawn for fan-outs, and targets for fan-ins.
const SOURCES: i32 = 100;
/// How long one of them may be counted for, in milliseconds.
const COUNTING: i64 = 2000;
/// Keys in one read.
const KEYS: usize = 200;
/// Documents that are read for them.
const FOUND: i64 = 20_000;
/// Targets that the validator is tried on.
const TRIED: usize = 100;
/// Changes that are shown.
const EXAMPLES: usize = 3;
/// The field that a sampled target's size is in.
const SIZE: &str = "__denormd_size";

/// Figures from a sample.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Sample {
    /// Targets drawn.
    pub targets: u64,
    /// Sources drawn.
    pub sources: u64,
    /// Whose references are counted: `target` or `source`, whichever holds them.
    pub held_by: &'static str,
    /// References by the BSON type of their value, and how many of them resolve.
    pub references: Vec<References>,
    /// Targets of one source.
    pub fan_out: Option<Spread>,
    /// Sources of one target, where several make one value.
    pub fan_in: Option<Spread>,
    /// Sampled targets that a backfill would change.
    pub differing: u64,
    /// Some of them.
    pub examples: Vec<Example>,
    /// Sizes of the sampled targets.
    pub sizes: Sizes,
    /// Sampled targets that the validator would refuse.
    pub refused: u64,
    /// Sampled targets for which the rule's expressions fail.
    pub failing: u64,
    /// A key that occurs.
    #[serde(skip)]
    pub key: Vec<Key>,
}

/// References of one type.
#[derive(Debug, Clone, Serialize)]
pub struct References {
    /// The type of the value, or of each one of several.
    pub kind: String,
    /// How many.
    pub count: u64,
    /// How many resolve.
    pub resolved: u64,
}

/// How a number is spread over a sample.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// Half have no more.
    pub median: u64,
    /// 99 of 100 have no more.
    pub p99: u64,
    /// None has more.
    pub worst: u64,
    /// On average.
    pub mean: f64,
}

/// Bytes of targets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Sizes {
    /// The largest as it is.
    pub largest_now: u64,
    /// The largest as it would be.
    pub largest_then: u64,
    /// By how much a target grows on average.
    pub mean_growth: f64,
}

/// A path that would change.
#[derive(Debug, Clone, Serialize)]
pub struct Example {
    /// The target's `_id`, as Extended JSON.
    pub target: serde_json::Value,
    /// The path.
    pub path: String,
    /// What is and what should be, without values.
    pub words: String,
}

/// Draws targets and sources, and looks at them.
pub(super) async fn draw(context: &Context, rule: &Rule, size: u32) -> Result<Sample> {
    let mut fields = projection(rule);
    fields.insert(SIZE, 1);
    let set = doc! {"$set": {SIZE: {"$bsonSize": "$$ROOT"}}};
    let targets = sampled(context, rule, Role::Target, size.into(), vec![set, doc! {"$project": fields}]).await?;
    let sources = vec![doc! {"$project": rule.reference.projection(Role::Source)}];
    let sources = sampled(context, rule, Role::Source, SOURCES.into(), sources).await?;
    let mut sample = Sample { targets: targets.len() as u64, sources: sources.len() as u64, ..Sample::default() };
    let time = context.server.operation_time().await?;
    let mut compared = Vec::new();
    for targets in targets.chunks(KEYS) {
        let (some, failing) = compare_each(context, rule, targets, time).await?;
        compared.extend(some);
        sample.failing += failing;
    }
    changes(&mut sample, &targets, &compared)?;
    let by_source: Vec<Vec<Key>> = sources
        .iter()
        .map(|source| rule.reference.keys(Role::Source, source).into_iter().flatten().collect())
        .collect();
    let by_target: Vec<Vec<Key>> =
        compared.iter().map(|compared| compared.references.iter().flatten().cloned().collect()).collect();
    let source_holds = rule.reference.keyed_by_target_id();
    let (held, other) = if source_holds { (&by_source, Role::Target) } else { (&by_target, Role::Source) };
    sample.held_by = if source_holds { "source" } else { "target" };
    sample.key = held.iter().flatten().find(|key| rule.reference.can_resolve(key)).cloned().into_iter().collect();
    sample.references = references(context, rule, held, other).await?;
    sample.fan_out = spread(counts(context, rule, &by_source, Role::Target).await?);
    let gathers = !matches!(rule.values, crate::plan::Values::Set { .. } | crate::plan::Values::Into { .. });
    if gathers {
        let some = &by_target[..by_target.len().min(100)];
        sample.fan_in = spread(counts(context, rule, some, Role::Source).await?);
    }
    sample.refused = refused(context, rule, &compared).await?;
    Ok(sample)
}

async fn sampled(context: &Context, rule: &Rule, role: Role, size: i64, more: Vec<Document>) -> Result<Vec<Document>> {
    let side = match role {
        Role::Source => &rule.source,
        Role::Target => &rule.target,
    };
    let mut stages: Vec<Document> = side.filter.clone().map(|filter| doc! {"$match": filter}).into_iter().collect();
    stages.push(doc! {"$sample": {"size": size}});
    stages.extend(more);
    let command =
        doc! {"aggregate": &side.namespace.collection, "pipeline": stages, "cursor": {}, "allowDiskUse": true};
    documents(&context.server.read(&side.namespace.database, command, Reads::default()).await?)
}

fn documents(rows: &[RawDocumentBuf]) -> Result<Vec<Document>> {
    rows.iter().map(|row| Document::try_from(row.as_ref()).map_err(Error::from)).collect()
}

/// What a backfill would change, and how sizes would.
fn changes(sample: &mut Sample, targets: &[Document], compared: &[Compared]) -> Result<()> {
    let number = |target: &Document| match target.get(SIZE) {
        Some(Bson::Int32(n)) => i64::from(*n),
        Some(Bson::Int64(n)) => *n,
        _ => 0,
    };
    let sizes: BTreeMap<Key, i64> = targets
        .iter()
        .map(|target| (Key::one(target.get("_id").cloned().unwrap_or(Bson::Null)), number(target)))
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

/// The bytes that a field takes: its type, its name, its value.
fn bytes(path: &str, value: Option<&bson::RawBson>) -> i64 {
    let Some(value) = value.filter(|value| !matches!(value, bson::RawBson::Undefined)) else { return 0 };
    let mut doc = RawDocumentBuf::new();
    doc.append(bson::cstr!("v"), value.clone());
    let name = path.rsplit('.').next().unwrap_or(path).len();
    // An empty document has 5 bytes, and the name counted above is one.
    i64::try_from(doc.as_bytes().len() - 5 - 1 + name).unwrap_or_default()
}

/// References by type, and how many of them a document of the `other` side answers.
async fn references(context: &Context, rule: &Rule, held: &[Vec<Key>], other: Role) -> Result<Vec<References>> {
    let mut by_kind: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    let mut keys: Vec<&Key> = held.iter().flatten().collect();
    keys.sort_unstable();
    keys.dedup();
    let mut answered: Vec<Key> = Vec::new();
    let resolvable: Vec<&Key> = keys.into_iter().filter(|key| rule.reference.can_resolve(key)).collect();
    for keys in resolvable.chunks(KEYS) {
        let (side, mut command) = match other {
            Role::Source => (&rule.source, read::source_ids(rule, keys, FOUND)),
            Role::Target => (&rule.target, read::holders(rule, keys)),
        };
        command.insert("projection", rule.reference.projection(other));
        command.insert("limit", FOUND);
        command.remove("sort");
        let found = documents(&context.server.read(&side.namespace.database, command, Reads::default()).await?)?;
        answered.extend(found.iter().flat_map(|doc| rule.reference.keys(other, doc)).flatten());
    }
    answered.sort_unstable();
    answered.dedup();
    for key in held.iter().flatten() {
        let kinds: Vec<&str> = key.values().iter().map(type_name).collect();
        let (count, resolved) = by_kind.entry(kinds.join(", ")).or_default();
        *count += 1;
        *resolved += u64::from(answered.binary_search(key).is_ok());
    }
    let mut out: Vec<References> =
        by_kind.into_iter().map(|(kind, (count, resolved))| References { kind, count, resolved }).collect();
    out.sort_by_key(|references| std::cmp::Reverse(references.count));
    Ok(out)
}

/// For each document of a sample, how many of the other side its keys have. One that takes too long to count is left out.
async fn counts(context: &Context, rule: &Rule, sample: &[Vec<Key>], other: Role) -> Result<Vec<u64>> {
    let mut out = Vec::new();
    for keys in sample {
        let keys: Vec<&Key> = keys.iter().filter(|key| rule.reference.can_resolve(key)).collect();
        if keys.is_empty() {
            out.push(0);
            continue;
        }
        let (side, command) = match other {
            Role::Source => (&rule.source, read::source_ids(rule, &keys, FOUND)),
            Role::Target => (&rule.target, read::holders(rule, &keys)),
        };
        let filter = command.get_document("filter").cloned().unwrap_or_default();
        let count = doc! {
            "count": &side.namespace.collection, "query": filter, "maxTimeMS": COUNTING,
            "collation": read::simple_collation(),
        };
        match context.server.database(&side.namespace.database).run_command(count).await.map_err(Error::from) {
            Ok(reply) => out.push(match reply.get("n") {
                Some(Bson::Int32(n)) => u64::try_from(*n).unwrap_or_default(),
                Some(Bson::Int64(n)) => u64::try_from(*n).unwrap_or_default(),
                _ => 0,
            }),
            Err(error) if error.kind == crate::error::Kind::TimedOut => {}
            Err(error) => return Err(error),
        }
    }
    Ok(out)
}

fn spread(mut counts: Vec<u64>) -> Option<Spread> {
    counts.sort_unstable();
    let worst = *counts.last()?;
    // The smallest that so many of a hundred do not exceed.
    let at = |percent: usize| counts.get((counts.len() * percent).div_ceil(100).saturating_sub(1)).copied();
    #[expect(clippy::cast_precision_loss, reason = "a mean for people")]
    let mean = counts.iter().sum::<u64>() as f64 / counts.len() as f64;
    Some(Spread { median: at(50)?, p99: at(99)?, worst, mean })
}

/// How many of the sampled targets the collection's validator would refuse with what the rule would write.
async fn refused(context: &Context, rule: &Rule, compared: &[Compared]) -> Result<u64> {
    let namespace = &rule.target.namespace;
    let list = doc! {"listCollections": 1, "filter": {"name": &namespace.collection}};
    let reply = context.server.database(&namespace.database).run_command(list).await?;
    let info = reply.get_document("cursor").and_then(|cursor| cursor.get_array("firstBatch")).ok();
    let options = info.and_then(|batch| batch.first()?.as_document()?.get_document("options").ok());
    let Some(validator) = options.and_then(|options| options.get_document("validator").ok()) else { return Ok(0) };
    let warns = options.is_some_and(|options| options.get_str("validationAction").is_ok_and(|action| action == "warn"));
    let changing: Vec<&Compared> = compared.iter().filter(|c| c.differences().next().is_some()).take(TRIED).collect();
    if warns || validator.is_empty() || changing.is_empty() {
        return Ok(0);
    }
    let ids: Vec<Bson> = changing.iter().map(|compared| compared.target.clone()).collect();
    let command =
        doc! {"find": &namespace.collection, "filter": {"_id": {"$in": ids}}, "collation": read::simple_collation()};
    let mut targets = documents(&context.server.read(&namespace.database, command, Reads::default()).await?)?;
    for target in &mut targets {
        let id = target.get("_id").cloned().unwrap_or(Bson::Null);
        if let Some(compared) = changing.iter().find(|compared| compared.target == id) {
            // One that the rule deletes is not refused.
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
        accepted += context.server.read(&namespace.database, command, Reads::default()).await?.len();
    }
    Ok(targets.len().saturating_sub(accepted) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_its_percentiles() {
        let spread_of = |counts: Vec<u64>| spread(counts).map(|s| (s.median, s.p99, s.worst));
        assert_eq!(spread_of(vec![]), None);
        assert_eq!(spread_of(vec![7]), Some((7, 7, 7)));
        assert_eq!(spread_of((1..=100).collect()), Some((50, 99, 100)));
        assert_eq!(spread_of((1..=1000).rev().collect()), Some((500, 990, 1000)));
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
