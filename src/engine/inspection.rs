//! Cluster inspection: indexes, references, fan-outs, sizes and validators that rules meet on the live cluster, from
//! samples. Reads only.

pub mod adoption;
pub mod created;
mod lookups;
mod sample;
mod sharding;
pub mod suspicion;

use std::collections::BTreeMap;

use bson::Document;
use serde::Serialize;

use crate::{preflight, reconcile::Context};
use denormd_mongo::{Server, error::Result};
use denormd_rules::plan::{Plan, Rule, expression::Reads};
pub use lookups::Lookup;
use sample::Drawn;
pub use sample::{Distribution, Example, References, Sample, Sizes};
pub use sharding::{ShardKey, Sharded};

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
    /// Its effect on existing values. None if no sample was requested, and for a shadow rule.
    pub adoption: Option<adoption::Count>,
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
        let before = earlier.get(&rule.name).map(|earlier| adoption::owned_before(rule, Some(earlier)));
        let adoption = match sample {
            Some(_) => Some(Box::pin(adoption::figures(context, rule, &before.unwrap_or_default(), at_once)).await?),
            None => None,
        };
        out.push(Inspection {
            rule: rule.name.clone(),
            source_reads: paths(&rule.source_reads),
            target_reads: paths(&rule.target_reads),
            lookups,
            sharded: sharding::of_rule(&context.server, rule).await?,
            pre_images: pre_images(&context.server, rule).await?,
            sample,
            adoption,
        });
    }
    Ok(out)
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
    pub hint: &'static str,
    /// True if the rule as a whole is wrong for its collections. Otherwise some documents become dead letters, and the rule
    /// runs for the others.
    pub is_general: bool,
}

impl Inspection {
    /// Problems that the inspection found.
    #[must_use]
    pub fn problems(&self, rule: &Rule) -> Vec<Problem> {
        let mut out = Vec::new();
        for sharded in self.sharded.iter().filter(|sharded| sharded.collection == rule.target.namespace.to_string()) {
            if let Some((path, part)) = sharded.owned(rule) {
                out.push(Problem {
                    message: format!("`{}` is sharded by `{part}`, and the rule writes `{path}`", sharded.collection),
                    hint: "copy to another path: a write to the shard key would move the document",
                    is_general: true,
                });
            }
        }
        let Some(sample) = &self.sample else { return out };
        let is_general = |some: u64| some * 2 > sample.targets;
        if sample.refused > 0 {
            out.push(Problem {
                message: format!(
                    "the validator of `{}` would refuse {} of {} sampled targets",
                    rule.target.namespace, sample.refused, sample.targets
                ),
                hint: "let the validator accept the copied fields, or change the rule; refused targets become dead letters",
                is_general: is_general(sample.refused),
            });
        }
        if sample.sizes.largest_then > sample::LARGEST {
            out.push(Problem {
                message: format!(
                    "a target of `{}` would have {} bytes, and 16 MB is the most",
                    rule.target.namespace, sample.sizes.largest_then
                ),
                hint: "copy less: `slice`, `max_elements`, or fewer fields",
                is_general: true,
            });
        }
        if sample.failing > 0 {
            out.push(Problem {
                message: format!(
                    "the rule's expressions fail on {} of {} sampled targets",
                    sample.failing, sample.targets
                ),
                hint: "the server refuses to compute them (a division by zero, a wrong type), and they become dead letters: guard the expression with $cond or $ifNull",
                is_general: is_general(sample.failing),
            });
        }
        out
    }
}
