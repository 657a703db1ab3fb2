//! Cluster inspection: indexes, references, fan-outs, sizes and validators that rules meet on the live cluster, from
//! samples. Reads only.

pub mod adoption;
pub mod created;
pub mod deployment;
mod in_tree;
mod lookups;
mod sample;
mod sharding;
pub mod suspicion;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bson::Document;
use serde::Serialize;

use crate::{checkpoint::earlier::settled, preflight, reconcile::Context};
use denormd_model::field_path::FieldPath;
use denormd_mongo::{Server, error::Result};
use denormd_rules::{
    config::Mistake,
    plan::{Plan, Rule, RuleId, expression::Reads},
};
pub use lookups::Lookup;
use sample::Drawn;
pub use sample::{Distribution, Example, References, Sample, Sizes, Unwritable};
pub use sharding::{ShardKey, Sharded};

/// Sampled references of one type, none of which resolves, that are enough for a warning.
const NONE_OF: u64 = 10;

/// The findings about one rule.
#[derive(Debug, Clone, Serialize)]
pub struct Inspection {
    /// Its name.
    pub rule: String,
    /// The source paths whose change triggers it; `*` for all.
    pub source_reads: Vec<String>,
    /// The target paths whose change triggers it.
    pub target_reads: Vec<String>,
    /// Its lookups, and the index that each would use.
    pub lookups: Vec<Lookup>,
    /// Its collections that are sharded, or may be.
    pub sharded: Vec<Sharded>,
    /// The pre-images that it needs.
    pub pre_images: Option<PreImages>,
    /// The findings from a sample of its documents. None if no sample was requested.
    pub sample: Option<Sample>,
    /// Its effect on existing values.
    pub adoption: adoption::Count,
    /// A rule that it reads from and that has not finished writing; `adoption` excludes the effect of those writes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unsettled_by: Option<String>,
}

/// The pre-images of a rule's source.
#[derive(Debug, Clone, Serialize)]
pub struct PreImages {
    /// The source collection.
    pub collection: String,
    /// True if it keeps them; None if it does not exist yet.
    pub kept: Option<bool>,
    /// The command that enables them.
    pub command: String,
}

/// Inspects the rules of a plan; `size` targets of each are sampled at random, none if it is 0. `earlier` has the
/// definitions that have run, by the rule's name.
pub async fn inspection(
    context: &Context,
    plan: &Plan,
    size: u32,
    earlier: &BTreeMap<String, Document>,
) -> Result<Vec<Inspection>> {
    let mut out = Vec::new();
    for rule in &plan.rules {
        let drawn = if size > 0 { Some(Drawn::draw(context, rule, size).await?) } else { None };
        let key = drawn.as_ref().and_then(|drawn| drawn.key(rule));
        let lookups = lookups::lookups(context, rule, key).await?;
        let sample = match drawn {
            Some(drawn) => Some(drawn.look(context, rule, &lookups).await?),
            None => None,
        };
        let at_once = lookups.iter().any(|lookup| lookup.what == lookups::SOURCES && lookup.index.is_none());
        let of = adoption::Use::Show { at_once };
        let before = earlier.get(&rule.name).map(|earlier| adoption::EarlierWrites::of(rule, Some(earlier)));
        let adoption = Box::pin(adoption::figures(context, rule, &before.unwrap_or_default(), of)).await?;
        out.push(Inspection {
            rule: rule.name.clone(),
            source_reads: paths(&rule.source_reads),
            target_reads: paths(&rule.target_reads),
            lookups,
            sharded: sharding::of_rule(&context.server, rule).await?,
            pre_images: pre_images(&context.server, rule).await?,
            sample,
            adoption,
            unsettled_by: None,
        });
    }
    let settled = settled(&context.server, &context.dead_letters.database, plan).await?;
    let unsettled: Vec<Option<String>> =
        plan.rules.iter().map(|rule| unsettled_by(plan, rule, &settled, &out)).collect();
    for (inspection, feeder) in out.iter_mut().zip(unsettled) {
        inspection.unsettled_by = feeder;
    }
    Ok(out)
}

/// A rule that this one reads from and that has not finished writing, by the inspections of the plan's rules.
fn unsettled_by(plan: &Plan, rule: &Rule, settled: &BTreeSet<RuleId>, inspections: &[Inspection]) -> Option<String> {
    let has_yet_to_write = |feeder: &&Arc<Rule>| {
        let count = inspections.iter().find(|of| of.rule == feeder.name).map(|of| &of.adoption);
        !settled.contains(&feeder.id) && count.is_some_and(|count| !count.figures.writes_nothing(feeder))
    };
    let feeders = plan.feeders(rule.id).into_iter().map(|feeder| plan.rule(feeder));
    feeders.into_iter().find(has_yet_to_write).map(|feeder| feeder.name.clone())
}

async fn pre_images(server: &Server, rule: &Rule) -> Result<Option<PreImages>> {
    if !rule.needs_pre_images() {
        return Ok(None);
    }
    let namespace = &rule.source.namespace;
    let kept = preflight::has_pre_images(server, namespace).await?;
    let command = preflight::enable_pre_images(namespace, kept.is_some()).shell;
    Ok(Some(PreImages { collection: namespace.to_string(), kept, command }))
}

fn paths(reads: &Reads) -> Vec<String> {
    match reads {
        Reads::Everything => vec!["*".to_owned()],
        Reads::Paths(paths) => paths.iter().map(ToString::to_string).collect(),
        Reads::Nothing => Vec::new(),
    }
}

/// A problem that the inspection of a rule found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The problem.
    pub message: String,
    /// Advice.
    pub hint: String,
    /// True if the rule as a whole is wrong for its collections. Otherwise some documents become dead letters, and the rule
    /// runs for the others.
    pub is_general: bool,
    /// Its place in the config, if that is a part of the rule. A general problem replaces a suspicion at this place, and
    /// any other gives way to it.
    pub at: Option<Mistake>,
}

impl Problem {
    fn new(message: String, hint: impl Into<String>, is_general: bool) -> Self {
        Self { message, hint: hint.into(), is_general, at: None }
    }
}

impl Inspection {
    /// Problems that the inspection found.
    #[must_use]
    pub fn problems(&self, rule: &Rule) -> Vec<Problem> {
        let mut out = Vec::new();
        for sharded in self.sharded.iter().filter(|sharded| sharded.collection == rule.target.namespace.to_string()) {
            if let Some((path, part)) = sharded.owned(rule) {
                let message = format!("`{}` is sharded by `{part}`, and the rule writes `{path}`", sharded.collection);
                let hint = "copy to another path: a write to the shard key would move the document";
                out.push(Problem::new(message, hint, true));
            }
        }
        let Some(sample) = &self.sample else { return out };
        let is_general = |some: u64| some * 2 > sample.targets;
        if sample.refused > 0 {
            let message = format!(
                "the validator of `{}` would refuse {} of {} sampled targets",
                rule.target.namespace, sample.refused, sample.targets
            );
            let hint =
                "let the validator accept the copied fields, or change the rule; refused targets become dead letters";
            out.push(Problem::new(message, hint, is_general(sample.refused)));
        }
        if sample.sizes.largest_then > sample::LARGEST {
            let message = format!(
                "a target of `{}` would have {} bytes, and 16 MB is the most",
                rule.target.namespace, sample.sizes.largest_then
            );
            out.push(Problem::new(message, "copy less: `slice`, `max_elements`, or fewer fields", true));
        }
        if sample.failing > 0 {
            let message =
                format!("the rule's expressions fail on {} of {} sampled targets", sample.failing, sample.targets);
            let hint = "the server refuses to compute them (a division by zero, a wrong type), and they become dead letters: guard the expression with $cond or $ifNull";
            out.push(Problem::new(message, hint, is_general(sample.failing)));
        }
        for unwritable in &sample.unwritable {
            let is_general = is_general(unwritable.targets);
            out.extend(unwritable.path(rule).map(|path| unwritable.problem(rule, path, sample.targets, is_general)));
        }
        out.extend(sample.references.iter().filter_map(|references| references.problem(rule, sample)));
        out
    }
}

impl Unwritable {
    /// The path of the rule that continues below the place.
    fn path<'a>(&self, rule: &'a Rule) -> Option<&'a FieldPath> {
        let below = format!("{}.", self.place);
        rule.owned().into_iter().find(|path| path.to_string().starts_with(&below))
    }

    fn problem(&self, rule: &Rule, path: &FieldPath, of: u64, is_general: bool) -> Problem {
        let Self { place, targets, arrays } = self;
        let is_array = arrays * 2 > *targets;
        let what = if is_array { "an array" } else { "no subdocument" };
        let message =
            format!("`{place}` is {what} in {targets} of {of} sampled targets: the server refuses to write `{path}`");
        let each = format!("{place}.$[]");
        let bound = rule.reference.target_each.as_ref().is_some_and(|bound| bound.to_string() == each);
        let hint = match (is_array, bound) {
            (true, true) => {
                let meant = path.to_string().replacen(place.as_str(), &each, 1);
                format!("did you mean `{meant}`? `$[]` stands for each element")
            }
            (true, false) => format!(
                "write to a field beside the array, or let `match` run through it: \"{each}.…\" stands for each element"
            ),
            (false, _) => {
                "these targets become dead letters: copy to another path, or change what they hold".to_owned()
            }
        };
        Problem { at: Some(rule.written_at(path)), ..Problem::new(message, hint, is_general) }
    }
}

impl References {
    /// The problem of a type of which no reference resolves.
    fn problem(&self, rule: &Rule, sample: &Sample) -> Option<Problem> {
        let Self { kind, count, resolved, upper_case } = self;
        let others = if sample.held_by == "source" { sample.targets } else { sample.sources };
        // An empty collection is one that is still to be filled.
        if *resolved > 0 || *count < NONE_OF || others == 0 {
            return None;
        }
        let held = sample.held_by;
        let message = format!("none of {count} references of type {kind} in sampled {held}s resolves");
        let hint = if upper_case * 2 > *count {
            "they are ObjectIds in capital letters, which `key_type` does not read: store them in lower case"
        } else {
            "check the paths of `match`, and whether both sides store one type and form of it; `key_type` converts between ObjectIds and their strings"
        };
        let at = rule.reference.pairs.first().map(|pair| suspicion::pair_place(rule, pair));
        Some(Problem { at, ..Problem::new(message, hint, false) })
    }
}
