//! Unavailable rules: the cluster lacks something that they need, such as a revoked privilege, or an index that was
//! dropped with its collection. Each rule becomes unavailable separately, with its reason, and runs again by itself
//! once that exists; a backfill then covers the missed changes, or the rule waits for `denormd backfill` again.
//!
//! A rule that has never run is refused instead, before anything is written. So is the config if all of its rules are
//! affected: a person who has just written the rules, or created the user, reads the message.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{
    checkpoint::{earlier, store::Store},
    preflight::{self, Finding},
    reconcile::Context,
};
use denormd_model::rule_state::RuleState;
use denormd_mongo::error::{Error, Kind, Result};
use denormd_rules::plan::RuleId;

/// The name of what an unavailable rule lacks among the recent errors.
pub const UNAVAILABLE: &str = "unavailable";

/// Interval between checks for unavailable rules.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The first pause between two checks of a rule; each check doubles it.
const FIRST: Duration = Duration::from_secs(1);
/// The longest pause.
const LONGEST: Duration = Duration::from_secs(20);
/// Time limit of a check.
const CHECK: Duration = Duration::from_secs(60);
/// Time without a check after which the pauses begin again with the first one.
const WELL: Duration = Duration::from_secs(600);

/// Rules that lack something: those that become unavailable, and those that refuse the start.
#[derive(Debug, Default)]
pub struct Lacking {
    /// Findings that refuse the start.
    pub refused: Vec<Finding>,
    /// Unavailable rules, which have run before, each with its reason.
    pub unavailable: BTreeMap<RuleId, String>,
}

/// Separates the two kinds. `all` has the findings for all rules together.
pub async fn sort(context: &Context, all: Vec<Finding>) -> Result<Lacking> {
    let (state, deployment) = (&context.dead_letters.database, &context.dead_letters.deployment);
    let have_run = match earlier::have_run(&context.server, state, deployment, &context.plan).await {
        // Without the privilege to read the state, every rule is treated as new. The findings name it.
        Err(error) if error.kind == Kind::Privilege => BTreeSet::new(),
        have_run => have_run?,
    };
    let mut lacking = Lacking::default();
    for rule in &context.plan.rules {
        let findings = preflight::of_rule(&context.server, &context.plan, state, rule.id).await?;
        match findings.first() {
            Some(finding) if have_run.contains(&rule.id) => {
                lacking.unavailable.insert(rule.id, finding.message.clone());
            }
            Some(_) => lacking.refused.extend(findings),
            None => {}
        }
    }
    // Rules share requirements: `all` has each of them once.
    let (refused, unavailable) = (lacking.refused.len(), lacking.unavailable.len());
    if unavailable == context.plan.rules.len() || (unavailable == 0 && refused > 0) {
        return Ok(Lacking { refused: all, unavailable: BTreeMap::new() });
    }
    Ok(lacking)
}

/// The rules that lacked something when the config was loaded and still do, each with its reason.
pub async fn still(context: &Context) -> Result<BTreeMap<RuleId, String>> {
    let mut still = BTreeMap::new();
    for rule in context.lacking.keys() {
        let findings =
            preflight::of_rule(&context.server, &context.plan, &context.dead_letters.database, *rule).await?;
        still.extend(findings.into_iter().next().map(|finding| (*rule, finding.message)));
    }
    Ok(still)
}

/// Makes unavailable rules run again once the cluster has what they lack.
pub async fn watch(context: Arc<Context>, store: Store, stop: CancellationToken) {
    let mut looks: HashMap<RuleId, (Instant, Duration)> = HashMap::new();
    while stop.run_until_cancelled(tokio::time::sleep(POLL_INTERVAL)).await.is_some() {
        let Some(round) = stop.run_until_cancelled(look(&context, &store, &mut looks)).await else { return };
        if let Err(error) = round {
            tracing::debug!(error = %error.message, "unavailable rules cannot be checked; trying again");
        }
    }
}

async fn look(context: &Context, store: &Store, looks: &mut HashMap<RuleId, (Instant, Duration)>) -> Result<()> {
    for (name, state) in store.standing(&context.server).await? {
        let unavailable = matches!(state.state, RuleState::Unavailable { .. });
        let rule = context.plan.named(&name);
        let Some(rule) = rule.filter(|_| unavailable) else { continue };
        let (last, pause) = looks.get(&rule.id).copied().unwrap_or((Instant::now(), Duration::ZERO));
        if last.elapsed() < pause {
            continue;
        }
        let longer = if last.elapsed() > WELL { FIRST } else { (pause * 2).clamp(FIRST, LONGEST) };
        looks.insert(rule.id, (Instant::now(), longer));
        let state_database = &context.dead_letters.database;
        let findings = preflight::of_rule(&context.server, &context.plan, state_database, rule.id);
        // A frozen server never answers.
        let Ok(findings) = tokio::time::timeout(CHECK, Box::pin(findings)).await else {
            return Err(Error::new(Kind::Connection, "no answer in time"));
        };
        match findings?.into_iter().next() {
            None => {
                tracing::info!(rule = %rule.name, "the cluster now has what the rule lacked: the rule runs again");
                store.resume_unavailable(&context.server, &rule.name, state.generation).await?;
            }
            Some(Finding { kind, message, .. }) => {
                context.metrics.record_error(Some(&rule.name), UNAVAILABLE, &Error::new(kind, message));
            }
        }
    }
    Ok(())
}
