//! Decides whether a new or changed rule may write at all. The effect on existing data is counted and recorded before
//! the first write.

use std::sync::Arc;

use bson::Document;
use futures_util::{StreamExt, TryStreamExt, stream};

use super::keep;
use crate::{
    checkpoint::{
        adoption::{Decision, Decisions},
        rule_record::RuleRecord,
        store::Store,
    },
    inspection::{
        adoption::{EarlierWrites, Figures, Standing, Use, figures, unsettled_feeder},
        suspicion::suspicions,
    },
    jobs::prune::{OtherDeployments, written_by},
    reconcile::Context,
};
use denormd_model::{
    failpoint,
    rule_state::{Adoption, RuleState},
};
use denormd_mongo::error::Result;
use denormd_rules::plan::{Rule, is_same_definition};

/// Rules whose existing data is counted at the same time: each holds a server answer of up to 16 MB, and the sources
/// for a part of it.
const AT_ONCE: usize = 2;

/// Storage of this deployment's decisions.
pub(super) fn decisions_of(context: &Context) -> Decisions<'_> {
    let dead_letters = &context.dead_letters;
    Decisions { server: &context.server, database: &dead_letters.database, deployment: &dead_letters.deployment }
}

/// A decision for each new or changed rule of the plan; none for the others.
pub(super) async fn decide(context: &Context, known: &[(String, RuleRecord)]) -> Result<Vec<Option<Decision>>> {
    // The decision covers the whole rule, not only this partition's keys.
    let whole = &context.whole();
    let decided = &decisions_of(context).definitions().await?;
    let others = &OtherDeployments::default();
    let one = |rule: &Arc<Rule>| {
        let rule = rule.clone();
        let before = known.iter().find(|(name, _)| *name == rule.name).map(|(_, record)| record.clone());
        async move { decision(context, (whole, others), &rule, before.as_ref(), decided.get(&rule.name)).await }
    };
    stream::iter(&context.plan.rules).map(one).buffered(AT_ONCE).try_collect().await
}

async fn decision(
    context: &Context,
    (whole, others): (&Context, &OtherDeployments),
    rule: &Rule,
    before: Option<&RuleRecord>,
    decided: Option<&Document>,
) -> Result<Option<Decision>> {
    let same = before.is_some_and(|record| record.runs(rule));
    let decisions = decisions_of(context);
    let is_decided = same && !(rule.adopt && before.is_some_and(|record| record.state.awaits_agreement()));
    let owner = if is_decided || rule.shadow { None } else { others.objection(whole, &written_by(rule)).await? };
    // An adopted rule stays blocked while a rule of another deployment owns its fields.
    if is_decided || same && owner.is_some() {
        // Another definition was decided on and taken back before it ran. If it returns, its effect is counted again.
        if let Some(other) = decided.filter(|other| !rule.has_definition(other))
            && !is_in_force(context, rule, other).await?
        {
            decisions.withdraw(&rule.name, other, context.partition.of() > 1).await?;
        }
        return Ok(None);
    }
    let asked = context.server.operation_time().await?;
    let last = decisions.of(&rule.name).await?;
    // Another partition has decided, or this one before a crash. `adopt: true` agrees to what was blocked.
    let stands = |last: &&Decision| rule.has_definition(&last.definition) && !(rule.adopt && last.block.is_some());
    if let Some(decision) = last.as_ref().filter(stands) {
        return Ok(Some(decision.clone()));
    }
    let earlier = match unfinished(context, rule, before).await? {
        Some(definition) => last.and_then(|last| last.earlier_than(&definition)),
        None => before.map(|record| record.definition.clone()),
    };
    // `denormd undo` has put back the application's values in fields of that definition, or the application has written values while
    // the rule was not in the config.
    let has_kept = |earlier: &Document| {
        before.is_none_or(|record| record.state != RuleState::Removed && !record.has_given_back(earlier))
    };
    let earlier = earlier.filter(has_kept);
    let mut decision = Decision { definition: rule.definition.clone(), earlier, block: None };
    keep::leave_earlier(context, rule, before, &decision, asked).await?;
    if rule.adopt && owner.is_none() {
        decisions.agree(&rule.name, &rule.definition, decision.earlier.as_ref()).await?;
        return Ok(Some(decision));
    }
    if !rule.shadow {
        decision.block = count(whole, rule, decision.earlier.as_ref(), owner).await?;
    }
    failpoint::here("adoption-counted");
    let decision = decisions.decide(&rule.name, decision).await?;
    failpoint::here("adoption-decided");
    Ok(Some(decision))
}

/// The definition of a rule that has not written every target: it awaits an agreement, or its agreement is open in one partition at
/// least. What it would have written there is still the application's.
async fn unfinished(context: &Context, rule: &Rule, before: Option<&RuleRecord>) -> Result<Option<Document>> {
    let is_unfinished = |record: &&RuleRecord| record.state.awaits_agreement() || record.has_open_agreement();
    if let Some(record) = before.filter(is_unfinished) {
        return Ok(Some(record.definition.clone()));
    }
    let Some(others) = of_other_partitions(context).await? else { return Ok(None) };
    let records = others.of_each_partition(&context.server, &rule.name).await?;
    Ok(records.into_iter().find(|(_, record)| record.has_open_agreement()).map(|(_, record)| record.definition))
}

/// The state of a deployment that has other partitions than this one.
pub(super) async fn of_other_partitions(context: &Context) -> Result<Option<Store>> {
    if context.partition.of() == 1 {
        return Ok(None);
    }
    context.state_of_deployment().await.map(Some)
}

/// True if another partition runs this definition of the rule.
async fn is_in_force(context: &Context, rule: &Rule, definition: &Document) -> Result<bool> {
    let Some(others) = of_other_partitions(context).await? else { return Ok(false) };
    let records = others.of_each_partition(&context.server, &rule.name).await?;
    Ok(records.iter().any(|(_, record)| is_same_definition(&record.definition, definition)))
}

/// Reasons against the first writes of a rule; none if there are no objections. `owner` says which rule of another deployment owns
/// its fields: the two would overwrite each other's values again and again.
async fn count(
    whole: &Context,
    rule: &Rule,
    earlier: Option<&Document>,
    owner: Option<String>,
) -> Result<Option<Adoption>> {
    let own = EarlierWrites::of(rule, earlier);
    let standing = if own.paths.is_empty() { Standing::New } else { Standing::Changed };
    let figures = match Box::pin(figures(whole, rule, &own, Use::Decision)).await {
        Ok(counted) => counted.figures,
        Err(error) if error.is_transient() => return Err(error),
        Err(error) => {
            let cause = format!("what it would do to existing values could not be counted: {}", error.message);
            return Ok(Some(Adoption { causes: vec![cause], ..Adoption::default() }));
        }
    };
    let mut causes: Vec<String> = owner.into_iter().chain(figures.objections(standing)).collect();
    if let Some(at_stake) = figures.at_stake(rule, &own)
        && let Some(feeder) = unsettled_feeder(whole, rule).await?
    {
        causes.push(Figures::unknown_before(&feeder, &at_stake));
    }
    // The rule may replace its own values, but not by values that look like a mistake.
    if causes.is_empty() && figures.replaces_many() {
        let suspected = Box::pin(suspicions(&whole.server, &whole.plan, rule)).await?;
        causes.extend(suspected.first().map(|first| figures.suspected(first)));
    }
    Ok((!causes.is_empty()).then(|| figures.adoption(causes)))
}
