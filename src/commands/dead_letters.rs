//! `denormd dead-letters`

use std::{sync::Arc, time::Duration};

use bson::{Bson, DateTime};

use crate::{
    cli::{DeadLetters as Action, Letters, Output},
    commands::{Failure, compile, context, leader::with_a_leader, print, shown, terminal::fitted},
    config::Loaded,
    dead_letter::{Chosen, Letter},
    error::{Error, Kind},
    metrics::Metrics,
    reconcile::Context,
};

/// How often it is looked for what came of a retry.
const LOOK: Duration = Duration::from_millis(300);

/// Lists them, has them tried again, or forgets them.
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

/// What changes something wants to be told of what.
fn some(which: &Letters, all: bool) -> Result<Chosen, Failure> {
    if which.rule.is_none() && which.key.is_none() && !all {
        return Err(Error::new(Kind::Config, "name them by --rule or --key, or say --all").into());
    }
    Ok(chosen(which))
}

/// Extended JSON, or a plain string where it is none.
fn value(text: &str) -> Bson {
    let parsed = serde_json::from_str::<serde_json::Value>(text).ok().and_then(|json| Bson::try_from(json).ok());
    parsed.unwrap_or_else(|| Bson::String(text.to_owned()))
}

async fn list(context: &Context, output: Output, chosen: &Chosen, limit: u32) -> Result<(), Failure> {
    let letters = context.dead_letters.find(&context.server, chosen, limit.into()).await?;
    let count = context.dead_letters.count(&context.server, chosen).await?;
    match output {
        Output::Json => {
            let letters: Vec<serde_json::Value> = letters.iter().map(json).collect();
            print(&format!("{:#}\n", serde_json::json!({"count": count, "dead_letters": letters})));
        }
        Output::Text => {
            for letter in &letters {
                print(&fitted(&text(letter)));
            }
            let unlisted = count.saturating_sub(letters.len() as u64);
            let more = if unlisted > 0 { format!(", {unlisted} of them not listed (--limit)") } else { String::new() };
            print(&format!("{}{more}\n", counted(count)));
        }
    }
    Ok(())
}

async fn retry(loaded: &Loaded, context: &Arc<Context>, output: Output, chosen: &Chosen) -> Result<(), Failure> {
    let (letters, server) = (&context.dead_letters, &context.server);
    let (mut before, mut left) = (0, Vec::new());
    // Of rules that are no more nobody tries anything.
    for rule in super::chosen(&context.plan, chosen.rule.as_slice())? {
        let chosen = Chosen { rule: Some(rule.name.clone()), key: chosen.key.clone() };
        let count = letters.count(server, &chosen).await?;
        if count == 0 {
            continue;
        }
        let asked = letters.ask(server, &chosen).await?;
        let tried = async {
            while letters.untried(server, &chosen, asked).await? > 0 {
                tokio::time::sleep(LOOK).await;
            }
            Ok(())
        };
        with_a_leader(loaded, context, tried).await?;
        before += count;
        left.extend(letters.find(server, &chosen, 0).await?);
    }
    match output {
        Output::Json => {
            let left: Vec<serde_json::Value> = left.iter().map(json).collect();
            print(&format!("{:#}\n", serde_json::json!({"tried": before, "left": left})));
        }
        Output::Text => {
            for letter in &left {
                print(&fitted(&text(letter)));
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

fn text(letter: &Letter) -> String {
    let key: Vec<String> = letter.key.values().iter().map(shown).collect();
    let target = letter.target.as_ref().and_then(|target| target.values().first());
    let target = target.map(|target| format!(", target {}", shown(target))).unwrap_or_default();
    let path = letter.path.as_ref().map(|path| format!(" at {path}")).unwrap_or_default();
    let next = if letter.due == 0 { "now".to_owned() } else { time(DateTime::from_millis(letter.due)) };
    format!(
        "{} {} {}{target}: {}{path}\n  tried {} since {}, last {}, next {next}\n",
        letter.rule,
        letter.about(),
        if key.is_empty() { "nothing".to_owned() } else { key.join(", ") },
        letter.reason,
        if letter.attempts == 1 { "once".to_owned() } else { format!("{} times", letter.attempts) },
        time(letter.first),
        time(letter.last),
    )
}

fn time(at: DateTime) -> String {
    at.try_to_rfc3339_string().unwrap_or_default()
}

fn json(letter: &Letter) -> serde_json::Value {
    let value = |value: &Bson| value.clone().into_relaxed_extjson();
    serde_json::json!({
        "rule": letter.rule,
        "about": letter.about(),
        "key": letter.key.values().iter().map(value).collect::<Vec<_>>(),
        "target": letter.target.as_ref().and_then(|target| target.values().first()).map(value),
        "reason": letter.reason,
        "path": letter.path,
        "attempts": letter.attempts,
        "first": time(letter.first),
        "last": time(letter.last),
        "next": (letter.due > 0).then(|| time(DateTime::from_millis(letter.due))),
    })
}
