//! `denormd dead-letters`: lists, retries or drops dead letters.

use std::{sync::Arc, time::Duration};

use bson::{Bson, DateTime};

use crate::{
    cli::{DeadLetters as Action, Letters, Output},
    commands::{
        Failure,
        backfill::{state, stopped},
        compile, context,
        leader::with_a_leader,
        print, shown,
        terminal::fitted,
    },
};
use denormd_engine::{
    checkpoint::store::Store,
    dead_letter::{Chosen, DeadLetter},
    metrics::Metrics,
    reconcile::Context,
};
use denormd_model::key::Key;
use denormd_mongo::error::{Error, Kind};
use denormd_rules::config::Loaded;

/// Interval between reads of the outcome of a retry.
const LOOK: Duration = Duration::from_millis(300);

/// Lists, retries or drops dead letters.
pub async fn dead_letters(loaded: &Loaded, output: Output, action: &Action) -> Result<(), Failure> {
    let context = context(loaded, compile(loaded).await?, Metrics::new()?).await?;
    match action {
        Action::List { which, limit } => list(&context, output, &chosen(which), *limit).await,
        Action::Retry { which, all } => retry(loaded, &context, output, &some(which, *all)?).await,
        Action::Drop { which, all } => drop(&context, output, &some(which, *all)?).await,
    }
}

fn chosen(which: &Letters) -> Chosen {
    Chosen { rule: which.rule.clone(), key: which.key.as_deref().map(value) }
}

/// Requires an explicit selection, for the commands that change something.
fn some(which: &Letters, all: bool) -> Result<Chosen, Failure> {
    if which.rule.is_none() && which.key.is_none() && !all {
        return Err(Error::new(Kind::Config, "give --rule, --key or --all").into());
    }
    Ok(chosen(which))
}

/// Parses Extended JSON; any other text is a plain string.
fn value(text: &str) -> Bson {
    let parsed = serde_json::from_str::<serde_json::Value>(text).ok().and_then(|json| Bson::try_from(json).ok());
    parsed.unwrap_or_else(|| Bson::String(text.to_owned()))
}

async fn list(context: &Context, output: Output, chosen: &Chosen, limit: u32) -> Result<(), Failure> {
    let dead_letters = context.dead_letters.find(&context.server, chosen, limit.into()).await?;
    let count = context.dead_letters.count(&context.server, chosen).await?;
    match output {
        Output::Json => {
            let dead_letters: Vec<serde_json::Value> = dead_letters.iter().map(json).collect();
            print(&format!("{:#}\n", serde_json::json!({"count": count, "dead_letters": dead_letters})));
        }
        Output::Text => {
            for dead_letter in &dead_letters {
                print(&fitted(&text(context, dead_letter)));
            }
            let unlisted = count.saturating_sub(dead_letters.len() as u64);
            let more = if unlisted > 0 { format!(", {unlisted} of them not listed (--limit)") } else { String::new() };
            print(&format!("{}{more}\n", counted(count)));
        }
    }
    Ok(())
}

async fn retry(loaded: &Loaded, context: &Arc<Context>, output: Output, chosen: &Chosen) -> Result<(), Failure> {
    let (dead_letters, server) = (&context.dead_letters, &context.server);
    let store = Store::open(server, &dead_letters.database, &dead_letters.deployment).await?;
    let (mut before, mut left) = (0, Vec::new());
    // Dead letters of removed rules are skipped: nothing can retry them.
    for rule in super::chosen(&context.plan, chosen.rule.as_slice())? {
        let chosen = Chosen { rule: Some(rule.name.clone()), key: chosen.key.clone() };
        let count = dead_letters.count(server, &chosen).await?;
        if count == 0 {
            continue;
        }
        let asked = dead_letters.ask(server, &chosen).await?;
        let tried = async {
            while dead_letters.untried(server, &chosen, asked).await? > 0 {
                let record = state(&store, server, &rule.name).await?;
                if record.state.is_stopped() {
                    return Err(stopped(&rule.name, &record.state));
                }
                tokio::time::sleep(LOOK).await;
            }
            Ok(())
        };
        with_a_leader(loaded, context, tried).await?;
        before += count;
        left.extend(dead_letters.find(server, &chosen, 0).await?);
    }
    match output {
        Output::Json => {
            let left: Vec<serde_json::Value> = left.iter().map(json).collect();
            print(&format!("{:#}\n", serde_json::json!({"tried": before, "left": left})));
        }
        Output::Text => {
            for dead_letter in &left {
                print(&fitted(&text(context, dead_letter)));
            }
            print(&format!("{} tried, {} left\n", counted(before), left.len()));
        }
    }
    if left.is_empty() {
        Ok(())
    } else {
        let error = Error::new(Kind::Refused, "some could not be written");
        Err(error.hint("their reasons are above; mend the documents or the rule, and try again").into())
    }
}

async fn drop(context: &Context, output: Output, chosen: &Chosen) -> Result<(), Failure> {
    let dropped = context.dead_letters.drop(&context.server, chosen).await?;
    match output {
        Output::Json => print(&format!("{:#}\n", serde_json::json!({"dropped": dropped}))),
        Output::Text => print(&format!("{} forgotten; their targets stay as they are\n", counted(dropped))),
    }
    Ok(())
}

fn counted(count: u64) -> String {
    if count == 1 { "1 dead letter".to_owned() } else { format!("{count} dead letters") }
}

/// The collection of the document that `side` means, `source` or `target`, with a space; nothing for a removed rule.
fn collection(context: &Context, dead_letter: &DeadLetter, side: &str) -> String {
    let rule = context.plan.rules.iter().find(|rule| rule.name == dead_letter.rule);
    rule.map_or_else(String::new, |rule| match side {
        "source" => format!("{} ", rule.source.namespace),
        "target" => format!("{} ", rule.target.namespace),
        _ => String::new(),
    })
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
