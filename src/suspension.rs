//! Rules that the cluster lacks something for: a privilege that was revoked, an index that went with its collection. Each
//! is suspended alone, its reason said, and comes back by itself; what it misses meanwhile is backfilled then.
//!
//! A rule that has never run is refused instead, before anything is written, as are all rules at once: whoever has just
//! written them, or made the user, is there to read it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use tokio_util::sync::CancellationToken;

use crate::{
    checkpoint::store::Store,
    error::{Error, Kind, Result},
    plan::RuleId,
    preflight::{self, Finding},
    reconcile::Context,
    rule_state::RuleState,
};

/// How often suspended rules are looked for.
const LOOK: Duration = Duration::from_secs(1);
/// The first pause between two looks at what a rule lacks; each doubles it.
const FIRST: Duration = Duration::from_secs(1);
/// The longest one.
const LONGEST: Duration = Duration::from_secs(20);
/// A rule that has been well for this long is not looked at more and more seldom when it is suspended again.
const WELL: Duration = Duration::from_secs(600);
/// Unauthorized: the user may not do this, while the connection is good.
pub const UNAUTHORIZED: i32 = 13;

/// Of rules that lack something, which are suspended, and why; the others refuse the start.
#[derive(Debug, Default)]
pub struct Lacking {
    /// What refuses the start.
    pub refused: Vec<Finding>,
    /// Rules that have run before.
    pub suspended: BTreeMap<RuleId, String>,
}

/// Tells one from the other. `all` is what was found for all rules together.
pub async fn sort(context: &Context, all: Vec<Finding>) -> Result<Lacking> {
    let (state, deployment) = (&context.dead_letters.database, &context.dead_letters.deployment);
    // Who may not read it has nothing to go on with.
    let have_run = match Store::have_run(&context.server, state, deployment, &context.plan).await {
        Err(error) if error.is_transient() => return Err(error),
        have_run => have_run.unwrap_or_default(),
    };
    let mut lacking = Lacking::default();
    for rule in &context.plan.rules {
        let findings = preflight::of_rule(&context.server, &context.plan, state, rule.id).await?;
        match findings.first() {
            Some(finding) if have_run.contains(&rule.id) => {
                lacking.suspended.insert(rule.id, finding.message.clone());
            }
            Some(_) => lacking.refused.extend(findings),
            None => {}
        }
    }
    if lacking.suspended.len() == context.plan.rules.len() {
        return Ok(Lacking { refused: all, suspended: BTreeMap::new() });
    }
    Ok(lacking)
}

/// Of the rules that lacked something when the config was taken, those that still do.
pub async fn still(context: &Context) -> Result<BTreeMap<RuleId, String>> {
    let mut still = BTreeMap::new();
    for rule in context.lacking.keys() {
        let findings =
            preflight::of_rule(&context.server, &context.plan, &context.dead_letters.database, *rule).await?;
        still.extend(findings.into_iter().next().map(|finding| (*rule, finding.message)));
    }
    Ok(still)
}

/// Lets suspended rules come back when what they lack is there.
pub async fn watch(context: Arc<Context>, store: Store, stop: CancellationToken) {
    let mut looks: HashMap<RuleId, (Instant, Duration)> = HashMap::new();
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            () = stop.cancelled() => return,
        }
        let round = tokio::select! {
            round = look(&context, &store, &mut looks) => round,
            () = stop.cancelled() => return,
        };
        if let Err(error) = round {
            tracing::debug!(error = %error.message, "suspended rules cannot be looked at; trying again");
        }
    }
}

async fn look(context: &Context, store: &Store, looks: &mut HashMap<RuleId, (Instant, Duration)>) -> Result<()> {
    for (name, state) in store.standing(&context.server).await? {
        let unavailable = matches!(state.state, RuleState::Unavailable { .. });
        let rule = context.plan.rules.iter().find(|rule| rule.name == name);
        let Some(rule) = rule.filter(|_| unavailable) else { continue };
        let (last, pause) = looks.get(&rule.id).copied().unwrap_or((Instant::now(), Duration::ZERO));
        if last.elapsed() < pause {
            continue;
        }
        let longer = if last.elapsed() > WELL { FIRST } else { (pause * 2).clamp(FIRST, LONGEST) };
        looks.insert(rule.id, (Instant::now(), longer));
        let state_database = &context.dead_letters.database;
        let findings = preflight::of_rule(&context.server, &context.plan, state_database, rule.id).await?;
        match findings.into_iter().next() {
            None => {
                tracing::info!(rule = %rule.name, "what the rule lacked is there: it comes back, and is backfilled");
                store.come_back(&context.server, &rule.name, state.generation).await?;
            }
            Some(finding) => tell(context, &rule.name, &finding),
        }
    }
    Ok(())
}

fn tell(context: &Context, rule: &str, finding: &Finding) {
    let kind = if finding.message.starts_with("the user lacks") { Kind::Privilege } else { Kind::Config };
    context.metrics.trouble(Some(rule), "suspended", &Error::new(kind, finding.message.clone()));
}
