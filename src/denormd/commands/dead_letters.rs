//! `denormd dead-letters`: lists, retries or drops dead letters.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use bson::{Bson, DateTime};

use crate::{
    cli::{DeadLetters as Action, Letters, Output},
    commands::{
        Failure,
        backfill::{state, stopped},
        compile, context,
        leader::{LACKING, with_a_leader},
        meanings, notice, print, print_as, print_json,
        terminal::fitted,
        unknown_rule,
    },
};
use denormd_engine::{
    checkpoint::store::Store,
    dead_letter::{Chosen, DeadLetter, Entry, Unreadable},
    metrics::Metrics,
    reconcile::Context,
};
use denormd_model::{
    key::Key,
    position::ClusterTime,
    text::{counted, shown},
};
use denormd_mongo::error::{Error, Kind};
use denormd_rules::config::Loaded;

/// Interval between reads of the outcome of a retry.
const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// Lists, retries or drops dead letters.
pub async fn dead_letters(loaded: &Loaded, output: Output, action: &Action) -> Result<(), Failure> {
    let context = context(loaded, compile(loaded).await?, Metrics::new()?).await?;
    let (Action::List { which, .. } | Action::Retry { which, .. } | Action::Drop { which, .. }) = action;
    // A command that changes something requires an explicit selection.
    if let Action::Retry { all: false, .. } | Action::Drop { all: false, .. } = action
        && which.rule.is_none()
        && which.key.is_none()
    {
        return Err(Error::new(Kind::Config, "give --rule, --key or --all").into());
    }
    let chosen = chosen(&context, which).await?;
    match action {
        Action::List { limit, .. } => list(&context, output, &chosen, *limit).await,
        Action::Retry { .. } => retry(loaded, &context, output, &chosen).await,
        Action::Drop { .. } => drop(&context, output, &chosen).await,
    }
}

/// The selection of dead letters. An error for a rule that neither the config nor the state knows, and for a key that may
/// stand for several values that have dead letters.
async fn chosen(context: &Context, which: &Letters) -> Result<Chosen, Error> {
    if let Some(rule) = &which.rule {
        is_known(context, rule).await?;
    }
    let chosen = |key: Option<Bson>| Chosen { rule: which.rule.clone(), key };
    let Some(text) = &which.key else { return Ok(chosen(None)) };
    let meant = meanings(text);
    let mut found = Vec::new();
    for key in &meant {
        let chosen = chosen(Some(key.clone()));
        if context.dead_letters.count(&context.server, &chosen).await? > 0 {
            found.push(chosen);
        }
    }
    if found.len() > 1 {
        return Err(Error::new(Kind::Refused, format!("`{text}` may stand for several values that have dead letters"))
            .hint("write it as Extended JSON: '{\"$numberInt\": \"17\"}' is a number, '\"17\"' a string"));
    }
    Ok(found.pop().unwrap_or_else(|| chosen(meant.into_iter().next())))
}

/// An error for a rule that neither the config nor the state has.
async fn is_known(context: &Context, rule: &str) -> Result<(), Error> {
    if context.plan.named(rule).is_some() {
        return Ok(());
    }
    let (dead_letters, server) = (&context.dead_letters, &context.server);
    let store = Store::open(server, &dead_letters.database, &dead_letters.deployment).await?;
    let mut known: BTreeSet<String> = context.plan.rules.iter().map(|rule| rule.name.clone()).collect();
    known.extend(store.rules(server).await?.into_iter().map(|(name, _)| name));
    known.extend(dead_letters.rules(server, ClusterTime::default()).await?);
    if known.contains(rule) {
        return Ok(());
    }
    let known: Vec<&str> = known.iter().map(String::as_str).collect();
    let message = format!("neither the config nor the state has a rule `{rule}`");
    Err(unknown_rule(message, rule, "known rules", &known))
}

async fn list(context: &Context, output: Output, chosen: &Chosen, limit: u32) -> Result<(), Failure> {
    let dead_letters = context.dead_letters.find(&context.server, chosen, limit.into()).await?;
    let count = context.dead_letters.count(&context.server, chosen).await?;
    match output {
        Output::Json => {
            let dead_letters: Vec<serde_json::Value> = dead_letters.iter().map(entry_json).collect();
            print_json(&serde_json::json!({"count": count, "dead_letters": dead_letters}));
        }
        Output::Text => {
            for dead_letter in &dead_letters {
                print(&fitted(&entry_text(context, dead_letter)));
            }
            let unlisted = count.saturating_sub(dead_letters.len() as u64);
            let more = if unlisted > 0 { format!(", {unlisted} of them not listed (--limit)") } else { String::new() };
            print(&format!("{}{more}\n", counted(count, "dead letter")));
        }
    }
    Ok(())
}

async fn retry(loaded: &Loaded, context: &Arc<Context>, output: Output, chosen: &Chosen) -> Result<(), Failure> {
    let (dead_letters, server) = (&context.dead_letters, &context.server);
    let store = Store::open(server, &dead_letters.database, &dead_letters.deployment).await?;
    let (mut before, mut left, mut untried) = (0, Vec::new(), Vec::new());
    let is_only_rule = chosen.rule.is_some();
    for rule in super::chosen(&context.plan, chosen.rule.as_slice())? {
        let chosen = Chosen { rule: Some(rule.name.clone()), key: chosen.key.clone() };
        let count = dead_letters.count(server, &chosen).await?;
        if count == 0 {
            continue;
        }
        let unreadable = dead_letters.find(server, &chosen, 0).await?.iter().filter(|entry| entry.is_err()).count();
        let asked = dead_letters.ask(server, &chosen).await?;
        let tried = async {
            // The leader does not retry those that cannot be read.
            while dead_letters.untried(server, &chosen, asked).await? > unreadable as u64 {
                let record = state(&store, server, &rule.name).await?;
                if record.state.is_stopped() {
                    return Ok(Some(stopped(&rule.name, &record.state)));
                }
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            Ok(None)
        };
        if let Some(error) = with_a_leader(loaded, context, tried).await? {
            if is_only_rule {
                return Err(error.into());
            }
            // The others are tried, and reported.
            notice(&error.message);
            untried.push(rule.name.clone());
            continue;
        }
        before += count;
        left.extend(dead_letters.find(server, &chosen, 0).await?);
    }
    let absent = if is_only_rule { Vec::new() } else { absent_rules(context, chosen).await? };
    match output {
        Output::Json => {
            let left: Vec<serde_json::Value> = left.iter().map(entry_json).collect();
            let told = serde_json::json!({
                "tried": before, "left": left, "stopped_rules": untried, "absent_rules": absent,
            });
            print_json(&told);
        }
        Output::Text => {
            for dead_letter in &left {
                print(&fitted(&entry_text(context, dead_letter)));
            }
            print(&format!("{} tried, {} left\n", counted(before, "dead letter"), left.len()));
        }
    }
    let skipped = [
        (untried, "these rules are stopped", "`denormd status` says why, and what lets them run again"),
        (absent, "this config does not have these rules", LACKING),
    ];
    let skipped = skipped.into_iter().filter(|(rules, ..)| !rules.is_empty());
    let (why, hints): (Vec<String>, Vec<&str>) =
        skipped.map(|(rules, why, hint)| (format!("{why}: {}", rules.join(", ")), hint)).unzip();
    if !why.is_empty() {
        let message = format!("not tried, because {}", why.join("; "));
        Err(Error::new(Kind::State, message).hint(hints.join("; ")).into())
    } else if left.is_empty() {
        Ok(())
    } else {
        let error = Error::new(Kind::Refused, "some could not be written");
        Err(error.hint("their reasons are above; correct the documents or the rule, then retry").into())
    }
}

/// The rules of these dead letters that this config does not have.
async fn absent_rules(context: &Context, chosen: &Chosen) -> Result<Vec<String>, Error> {
    let (dead_letters, server) = (&context.dead_letters, &context.server);
    let mut absent = Vec::new();
    for rule in dead_letters.rules(server, ClusterTime::default()).await? {
        if context.plan.named(&rule).is_none() {
            let chosen = Chosen { rule: Some(rule.clone()), key: chosen.key.clone() };
            if dead_letters.count(server, &chosen).await? > 0 {
                absent.push(rule);
            }
        }
    }
    Ok(absent)
}

async fn drop(context: &Context, output: Output, chosen: &Chosen) -> Result<(), Failure> {
    let dropped = context.dead_letters.drop(&context.server, chosen).await?;
    let text = || format!("{} dropped; their targets stay as they are\n", counted(dropped, "dead letter"));
    print_as(output, text, || serde_json::json!({"dropped": dropped}));
    Ok(())
}

/// The collection of the document that `side` means, `source` or `target`, with a space; nothing for a removed rule.
fn collection(context: &Context, dead_letter: &DeadLetter, side: &str) -> String {
    let rule = context.plan.named(&dead_letter.rule);
    rule.map_or_else(String::new, |rule| match side {
        "source" => format!("{} ", rule.source.namespace),
        "target" => format!("{} ", rule.target.namespace),
        _ => String::new(),
    })
}

fn entry_text(context: &Context, entry: &Entry) -> String {
    match entry {
        Ok(dead_letter) => text(context, dead_letter),
        Err(Unreadable { id, rule, why }) => {
            let rule = rule.as_deref().unwrap_or("unknown rule");
            format!("{rule} record {}: it cannot be read, and is not retried: {why}\n", shown(id))
        }
    }
}

fn text(context: &Context, dead_letter: &DeadLetter) -> String {
    let key: Vec<String> = dead_letter.key.values().iter().map(shown).collect();
    let target = dead_letter.target.as_ref().and_then(|target| target.values().first());
    let within = |side: &str| collection(context, dead_letter, side);
    let target = target.map(|target| format!(", target {}{}", within("target"), shown(target))).unwrap_or_default();
    let path = dead_letter.path.as_ref().map(|path| format!(" at {path}")).unwrap_or_default();
    let next = if dead_letter.due == 0 { "now".to_owned() } else { time(DateTime::from_millis(dead_letter.due)) };
    format!(
        "{} {} {}{}{target}: {}{path}\n  tried {} since {}, last {}, next {next}\n",
        dead_letter.rule,
        dead_letter.about(),
        within(dead_letter.about()),
        if key.is_empty() { "nothing".to_owned() } else { key.join(", ") },
        reason(dead_letter),
        if dead_letter.attempts == 1 { "once".to_owned() } else { format!("{} times", dead_letter.attempts) },
        time(dead_letter.first),
        time(dead_letter.last),
    )
}

/// The reason, with the members of a circle.
fn reason(dead_letter: &DeadLetter) -> String {
    let members = dead_letter.circle.iter().flat_map(Key::values).map(shown).collect::<Vec<_>>();
    let members = if members.is_empty() { String::new() } else { format!(": {}", members.join(", ")) };
    format!("{}{members}", dead_letter.reason)
}

fn time(at: DateTime) -> String {
    at.try_to_rfc3339_string().unwrap_or_default()
}

fn entry_json(entry: &Entry) -> serde_json::Value {
    match entry {
        Ok(dead_letter) => json(dead_letter),
        Err(Unreadable { id, rule, why }) => {
            serde_json::json!({"rule": rule, "id": Bson::clone(id).into_relaxed_extjson(), "unreadable": why})
        }
    }
}

fn json(dead_letter: &DeadLetter) -> serde_json::Value {
    let value = |value: &Bson| value.clone().into_relaxed_extjson();
    let mut out = serde_json::json!({
        "rule": dead_letter.rule,
        "about": dead_letter.about(),
        "key": dead_letter.key.values().iter().map(value).collect::<Vec<_>>(),
        "target": dead_letter.target.as_ref().and_then(|target| target.values().first()).map(value),
        "reason": dead_letter.reason,
        "path": dead_letter.path,
        "attempts": dead_letter.attempts,
        "first": time(dead_letter.first),
        "last": time(dead_letter.last),
        "next": (dead_letter.due > 0).then(|| time(DateTime::from_millis(dead_letter.due))),
    });
    if !dead_letter.circle.is_empty() {
        out["circle"] = dead_letter.circle.iter().flat_map(Key::values).map(value).collect();
    }
    out
}
