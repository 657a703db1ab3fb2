//! `denormd pause` and `denormd resume`

use std::{collections::BTreeSet, time::Duration};

use crate::{
    cli::Output,
    commands::{
        Failure,
        backfill::{complete, noticed, state, stopped, text, wait},
        chosen, connected,
        leader::{self, with_a_leader},
        notice, print, print_as, print_json,
    },
};
use denormd_engine::{
    checkpoint::{rule_record::RuleRecord, store::Store},
    deployment::lease,
    reconcile::Context,
};
use denormd_model::{
    rule_state::{BlockReason, RuleState},
    text::duration,
};
use denormd_mongo::error::{Error, Kind};
use denormd_rules::config::Loaded;

/// Interval between checks that the leader has read the pause.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The rules by the outcome of their pause.
#[derive(Default)]
struct Outcome {
    /// Paused as the command asks for.
    paused: Vec<String>,
    /// Still paused without an end, although the command gives one.
    endless: Vec<String>,
    blocked: Vec<String>,
    /// Not paused: no leader has registered them yet.
    unregistered: Vec<String>,
}

/// Pauses a rule, or all of them, for a while or until they are resumed. All pauses are recorded before waiting for
/// any, because this is the emergency stop.
pub async fn pause(loaded: &Loaded, output: Output, rule: Option<&str>, time: Option<Duration>) -> Result<(), Failure> {
    let (context, store) = connected(loaded).await?;
    chosen(&context.plan, rule.map(ToOwned::to_owned).as_slice())?;
    let mut outcome = Outcome::default();
    let mut seen = BTreeSet::new();
    loop {
        let mut there = known(&store, &context, rule).await?;
        // A leader may have registered rules since the last look.
        there.retain(|(name, record)| record.state != RuleState::Removed && seen.insert(name.clone()));
        if there.is_empty() {
            break;
        }
        let mut recorded = Vec::new();
        for (name, _) in there {
            store.pause(&context.server, &name, time).await?;
            recorded.push(name);
        }
        for name in recorded {
            match take_effect(&context, &store, &name, time).await? {
                None => outcome.paused.push(name),
                Some(state) if !state.is_blocked() => outcome.endless.push(name),
                Some(state) if rule.is_some() => return Err(stopped(&name, &state).into()),
                Some(_) => outcome.blocked.push(name),
            }
        }
    }
    for name in &outcome.blocked {
        notice(&format!("{name} is blocked; `denormd resume` does not unblock it"));
    }
    let names = context.plan.rules.iter().map(|rule| rule.name.clone()).filter(|_| rule.is_none());
    // This includes rules that were not in the last leader's config: this config may be newer, and a leader may be about to register them.
    outcome.unregistered = names.filter(|name| !seen.contains(name)).collect();
    print_as(output, || outcome.text(rule, time), || outcome.json(rule, time));
    if outcome.unregistered.is_empty() { Ok(()) } else { Err(not_paused(&outcome.unregistered).into()) }
}

/// The error for rules of the config that a leader may start at any time.
fn not_paused(rules: &[String]) -> Error {
    let rules = rules.join(", ");
    Error::new(Kind::State, format!("not paused, as no leader has registered them yet: {rules}")).hint(
        "a leader that reads this config starts them; run `denormd pause --all` again once `denormd status` lists \
         them, or stop the daemon",
    )
}

impl Outcome {
    fn text(&self, rule: Option<&str>, time: Option<Duration>) -> String {
        let stay = |name: &String| format!("{name}: stays paused, without an end; resume it first to give it one\n");
        let stay: String = self.endless.iter().map(stay).collect();
        let has_paused = !self.paused.is_empty() || self.endless.is_empty();
        if has_paused { text_of(rule, self.paused.len(), time) + &stay } else { stay }
    }

    fn json(&self, rule: Option<&str>, time: Option<Duration>) -> serde_json::Value {
        let Self { paused, endless, blocked, unregistered } = self;
        let seconds = time.map(|time| time.as_secs());
        match rule {
            Some(rule) => {
                let seconds = seconds.filter(|_| endless.is_empty());
                serde_json::json!({"rule": rule, "paused": true, "seconds": seconds})
            }
            None => serde_json::json!({
                "rules": paused, "paused": true, "seconds": seconds, "without_end": endless,
                "blocked": blocked, "not_registered": unregistered,
            }),
        }
    }
}

fn text_of(rule: Option<&str>, paused: usize, time: Option<Duration>) -> String {
    let end = time.map_or_else(
        || format!("until `denormd resume {}`", rule.unwrap_or("--all")),
        |time| format!("for {}", duration(time.as_secs_f64())),
    );
    let (who, its) = match (rule, paused) {
        (Some(rule), _) => (format!("{rule} is"), "its fields stay as they are"),
        (None, 1) => ("1 rule is".to_owned(), "its fields stay as they are"),
        (None, many) => (format!("{many} rules are"), "their fields stay as they are"),
    };
    format!(
        "{who} paused {end}: {its}\n\
         the checkpoint keeps advancing, so the oplog is not held up; a resumed rule is backfilled from the start\n"
    )
}

/// The record of the given rule, or those of all rules that have run, whether or not they are in the config of this command.
async fn known(store: &Store, context: &Context, rule: Option<&str>) -> Result<Vec<(String, RuleRecord)>, Error> {
    let Some(rule) = rule else { return store.rules(&context.server).await };
    Ok(vec![(rule.to_owned(), state(store, &context.server, rule).await?)])
}

/// Returns when the leader of every partition reports the pause. Until then a leader may overwrite the state, and then the
/// pause is recorded again. A leader that registers the rule later looks at the other partitions itself. Returns the
/// state of a partition in which the rule is not paused as asked: it is blocked, or its pause has no end.
async fn take_effect(
    context: &Context,
    store: &Store,
    rule: &str,
    time: Option<Duration>,
) -> Result<Option<RuleState>, Error> {
    let server = &context.server;
    loop {
        let led = lease::held(server, store.database(), store.ids()).await?;
        let records = store.of_each_partition(server, rule).await?;
        let (mut runs, mut waits) = (false, false);
        let mut other = None;
        for (id, record) in records {
            match &record.state {
                RuleState::Paused { until, .. } => {
                    waits |= record.noticed != record.generation && led.contains(&id);
                    if until.is_none() && time.is_some() {
                        other.get_or_insert(record.state);
                    }
                }
                RuleState::Blocked(reason) if *reason != BlockReason::SourceGone => other = Some(record.state),
                RuleState::Removed => {}
                _ => runs = true,
            }
        }
        if runs {
            store.pause(server, rule, time).await?;
        } else if !waits {
            return Ok(other);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Resumes a paused rule, or all paused rules, with a backfill. A rule that was blocked
/// during its pause stays blocked.
pub async fn resume(loaded: &Loaded, output: Output, rule: Option<&str>) -> Result<(), Failure> {
    let (context, store) = connected(loaded).await?;
    chosen(&context.plan, rule.map(ToOwned::to_owned).as_slice())?;
    let records = known(&store, &context, rule).await?;
    // Checked before the pause ends: otherwise this command would fail, and the next leader would run the rule.
    let runs_again = |(name, record): &(String, RuleRecord)| {
        matches!(record.state, RuleState::Paused { blocked: None, .. }) && context.plan.named(name).is_some()
    };
    if records.iter().any(runs_again) && !lease::is_held(&context.server, store.database(), store.ids()).await? {
        leader::ready(loaded, &context, &[]).await?;
    }
    let (resumed, blocked) = end_pauses(&store, &context, records, rule.is_some()).await?;
    for (name, reason) in &blocked {
        if rule.is_some() {
            return Err(stopped(name, &RuleState::Blocked(reason.clone())).into());
        }
        notice(&format!("{name} is not paused any more, but blocked: {reason}"));
    }
    let (mut unled, mut failed) = (Vec::new(), None);
    for name in &resumed {
        let led = match noticed(&store, &context.server, name).await {
            Ok(led) => led,
            // The others are resumed, and reported.
            Err(error) if rule.is_none() => {
                failed.get_or_insert(error);
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let is_planned = context.plan.named(name).is_some();
        let by = match (led, is_planned) {
            (true, _) => ", and backfilled by the leader",
            (false, true) => "",
            (false, false) => ", and backfilled when a daemon leads whose config has it",
        };
        if !led && is_planned {
            unled.push(name.clone());
        }
        if output == Output::Text {
            print(&format!("{name} is resumed{by}\n"));
        }
    }
    match (output, rule) {
        (Output::Text, Some(rule)) if resumed.is_empty() => print(&format!("{rule} is not paused\n")),
        (Output::Text, None) if resumed.is_empty() && blocked.is_empty() => print("no rule is paused\n"),
        (Output::Text, _) => {}
        (Output::Json, Some(rule)) => {
            print_json(&serde_json::json!({"rule": rule, "resumed": !resumed.is_empty()}));
        }
        (Output::Json, None) => {
            let blocked: Vec<&String> = blocked.iter().map(|(name, _)| name).collect();
            print_json(&serde_json::json!({"rules": resumed, "resumed": true, "blocked": blocked}));
        }
    }
    if !unled.is_empty() {
        let done = with_a_leader(loaded, &context, wait(&store, &context, &unled)).await?;
        if output == Output::Text {
            print(&text(&done));
        }
        if failed.is_none() {
            complete(&done)?;
        }
    }
    failed.map_or(Ok(()), |error| Err(error.into()))
}

/// Ends the pauses of the rules. Returns those that run again, and those that are blocked now, with the reason. Fails for the one
/// rule that a command is about if it is stopped otherwise.
async fn end_pauses(
    store: &Store,
    context: &Context,
    records: Vec<(String, RuleRecord)>,
    is_one: bool,
) -> Result<(Vec<String>, Vec<(String, BlockReason)>), Error> {
    let (mut resumed, mut blocked) = (Vec::new(), Vec::new());
    for (name, record) in records {
        match record.state {
            RuleState::Paused { blocked: reason, .. } => {
                if store.resume(&context.server, &name).await? == 0 {
                    continue;
                }
                match reason {
                    Some(reason) => blocked.push((name, reason)),
                    None => resumed.push(name),
                }
            }
            state if state.is_stopped() && is_one => return Err(stopped(&name, &state)),
            _ => {}
        }
    }
    Ok((resumed, blocked))
}
