//! `denormd explain`

use std::{collections::HashMap, fmt::Write as _};

use bson::{Bson, Document, doc};

use crate::{
    cli::Output,
    commands::{Failure, chosen, connected, meanings, print_as, state_note, terminal::fitted},
};
use denormd_engine::{
    checkpoint::rule_record::RuleRecord,
    reconcile::{
        Context,
        by_target::{self, Referrer},
        compare::{Compared, Difference, compare, compare_ids, created::stand_ins, projection},
        read,
    },
};
use denormd_model::{
    field_path::value_at,
    key::{Key, id_of},
    position::ClusterTime,
    text::{shown, shown_or_nothing},
};
use denormd_mongo::error::{Error, Kind, Result};
use denormd_rules::{
    config::Loaded,
    plan::{Rule, Values, reference::Role},
};

/// Sources that are named of one reference.
const NAMED: usize = 10;
/// Sources that are looked through for all references.
const LOOKED: i64 = 1000;

/// Everything that is said of one target.
struct Explained<'a> {
    rule: &'a Rule,
    target: Bson,
    /// It is not left out by `target.where`.
    takes_part: bool,
    compared: Compared,
    /// Values that a `once` rule has written and keeps, beside what their source says now.
    kept: Vec<Difference>,
    references: Vec<Answered>,
    /// The paths of the target that values are computed from, with their values.
    read: Vec<(String, Option<Bson>)>,
    notes: Vec<String>,
    /// The reason why its values cannot be computed.
    failure: Option<Error>,
}

/// One reference of the target, and the sources that answer it.
struct Answered {
    /// The element that holds it, where an array does.
    element: Option<usize>,
    key: Option<Key>,
    sources: Vec<Bson>,
    /// There are more, or may be.
    more: bool,
}

/// Says of one target what each owned path should hold, where that comes from, and what is stored.
pub async fn explain(loaded: &Loaded, output: Output, rule: &str, id: &str) -> std::result::Result<(), Failure> {
    let (context, store) = connected(loaded).await?;
    let rule = chosen(&context.plan, &[rule.to_owned()])?.remove(0).clone();
    let state = store.rules(&context.server).await?.into_iter().find(|(name, _)| *name == rule.name);
    let explained = look(&context, &rule, id, state.map(|(_, state)| state)).await?;
    print_as(output, || fitted(&text(&explained)), || json(&explained));
    Ok(())
}

async fn look<'a>(context: &Context, rule: &'a Rule, id: &str, state: Option<RuleRecord>) -> Result<Explained<'a>> {
    let time = context.server.operation_time().await?;
    let (target, is_stored) = target(context, rule, id, time).await?;
    let id = id_of(&target);
    let mut takes_part = false;
    let mut take = |_| {
        takes_part = true;
        Ok(())
    };
    let mut notes = Vec::new();
    let compared = async {
        compare_ids(context, rule, std::slice::from_ref(&id), time, &mut take).await?;
        let compared = compare(context, rule, std::slice::from_ref(&target), time).await?.pop();
        let compared = compared.ok_or_else(|| Error::internal("a target that is not compared"))?;
        Ok::<_, Error>((compared, kept(context, rule, &target, time).await?))
    };
    let (compared, kept, failure) = match compared.await {
        Ok((compared, kept)) => (compared, kept, None),
        Err(error) if error.kind == Kind::Refused => {
            takes_part = true;
            notes.push(format!("its values cannot be computed, and stay as they are: {}", error.message));
            let references = rule.reference.keys(Role::Target, &target);
            (Compared { target: id.clone(), fields: Vec::new(), references }, Vec::new(), Some(error))
        }
        Err(error) => return Err(error),
    };
    if !is_stored && compared.fields.is_empty() && failure.is_none() {
        return Err(absent(rule));
    }
    let references = references(context, rule, (&target, &compared), time).await?;
    let of_target = rule.of_target.iter().flat_map(|of_target| &of_target.paths);
    let read = of_target.map(|path| (path.query(), value_at(&target, path.segments()).cloned())).collect();
    if !takes_part {
        notes.push("it does not take part: `target.where` leaves it out, and it keeps what it has".to_owned());
    }
    notes.extend(state_note(rule, state.as_ref()).map(|note| format!("the rule: {note}")));
    let key = Key::one(id.clone());
    let about = [(key.clone(), compared.references.as_slice())];
    let dead_letters = context.dead_letters.concerning(&context.server, rule, &about).await?;
    for dead_letter in dead_letters.iter().filter(|dead_letter| dead_letter.concerns(&key, &compared.references)) {
        let times =
            if dead_letter.attempts == 1 { "once".to_owned() } else { format!("{} times", dead_letter.attempts) };
        notes.push(format!("a dead letter, tried {times}: {}", dead_letter.reason));
    }
    Ok(Explained { rule, target: id, takes_part, compared, kept, references, read, notes, failure })
}

/// The values of a `once` rule that are there, each with what the rule would write if it were new.
async fn kept(context: &Context, rule: &Rule, target: &Document, after: ClusterTime) -> Result<Vec<Difference>> {
    let mut anew = rule.clone();
    match &mut anew.values {
        Values::Set { once, .. } if *once => *once = false,
        _ => return Ok(Vec::new()),
    }
    let compared = compare(context, &anew, std::slice::from_ref(target), after).await?.pop();
    let fields = compared.map(|compared| compared.fields).unwrap_or_default();
    Ok(fields.into_iter().filter(|field| field.stored.is_some()).collect())
}

/// The target that is meant by an `_id` ([`meanings`]). False for one that is not stored, but that the rule may have to create.
async fn target(context: &Context, rule: &Rule, id: &str, after: ClusterTime) -> Result<(Document, bool)> {
    let meant = meanings(id);
    let namespace = &rule.target.namespace;
    let command = doc! {
        "find": &namespace.collection, "filter": {"_id": {"$in": &meant}}, "projection": projection(rule),
        "collation": read::simple_collation(),
    };
    let rows = context.server.read(&namespace.database, command, after).await?;
    match rows.as_slice() {
        [row] => Ok((Document::try_from(row.as_ref())?, true)),
        // The document may be one that should exist.
        [] if meant.first().is_some_and(|id| rule.creates.is_some() && rule.reference.key_of_id(id).is_some()) => {
            Ok((stand_ins(&[], &meant[..1]).remove(0), false))
        }
        [] => Err(absent(rule)),
        _ => Err(Error::new(Kind::Refused, format!("`{namespace}` has several documents that this may mean"))
            .hint("write it as Extended JSON: 17 is a number, '\"17\"' a string")),
    }
}

fn absent(rule: &Rule) -> Error {
    let message = format!("`{}` has no document with this _id", rule.target.namespace);
    let hint =
        "write it as Extended JSON: 17, '\"text\"', '{\"$oid\": \"…\"}', '{\"$date\": \"2026-09-03T00:00:00Z\"}'";
    Error::new(Kind::Refused, message).hint(hint)
}

/// The sources of each reference that count for this target.
async fn answers_of_target(
    context: &Context,
    rule: &Rule,
    (target, compared): (&Document, &Compared),
    after: ClusterTime,
) -> Result<Vec<Answered>> {
    let limit = i64::try_from(NAMED).unwrap_or(i64::MAX) + 1;
    let referrer = Referrer { target, references: &compared.references };
    let command = by_target::source_ids(rule, referrer, limit);
    let mut found: HashMap<usize, Vec<Bson>> = HashMap::new();
    for row in context.server.read(&rule.source.namespace.database, command, after).await? {
        let row = Document::try_from(row.as_ref())?;
        let nth = row.get_i64("n").ok().and_then(|nth| usize::try_from(nth).ok()).unwrap_or_default();
        found.insert(nth, row.get_array("ids").cloned().unwrap_or_default());
    }
    let each = rule.reference.target_each.is_some();
    let answered = compared.references.iter().enumerate().map(|(nth, key)| {
        let mut sources = found.get(if rule.by_reference() { &nth } else { &0 }).cloned().unwrap_or_default();
        let more = sources.len() > NAMED;
        sources.truncate(NAMED);
        let key = key.clone();
        let sources = if key.is_some() { sources } else { Vec::new() };
        Answered { element: each.then_some(nth), key, sources, more }
    });
    Ok(answered.collect())
}

async fn references(
    context: &Context,
    rule: &Rule,
    (target, compared): (&Document, &Compared),
    after: ClusterTime,
) -> Result<Vec<Answered>> {
    if rule.of_target.as_ref().is_some_and(|of_target| !of_target.is_empty()) {
        return answers_of_target(context, rule, (target, compared), after).await;
    }
    let mut keys: Vec<&Key> =
        compared.references.iter().flatten().filter(|key| rule.reference.can_resolve(key)).collect();
    keys.sort_unstable();
    keys.dedup();
    let mut sources: Vec<(Vec<Key>, Bson)> = Vec::new();
    if !keys.is_empty() {
        let command = read::source_ids(rule, &keys, LOOKED);
        for row in context.server.read(&rule.source.namespace.database, command, after).await? {
            let source = Document::try_from(row.as_ref())?;
            let keys = rule.reference.keys(Role::Source, &source).into_iter().flatten().collect();
            sources.push((keys, id_of(&source)));
        }
    }
    let dates: Vec<&Key> = sources.iter().flat_map(|(keys, _)| keys).collect();
    let mut intervals = context.bucket_keys(rule, &dates).await?.into_iter();
    for (keys, _) in &mut sources {
        *keys = intervals.by_ref().take(keys.len()).collect();
    }
    let cut = i64::try_from(sources.len()).is_ok_and(|found| found == LOOKED);
    let each = rule.reference.target_each.is_some();
    let answered = compared.references.iter().enumerate().map(|(nth, key)| {
        let answers = |(keys, _): &&(Vec<Key>, Bson)| key.as_ref().is_some_and(|key| keys.contains(key));
        let mut ids: Vec<Bson> = sources.iter().filter(answers).map(|(_, id)| id.clone()).collect();
        let more = cut || ids.len() > NAMED;
        ids.truncate(NAMED);
        Answered { element: each.then_some(nth), key: key.clone(), sources: ids, more }
    });
    Ok(answered.collect())
}

/// Characters of an array from which on only the elements that differ are printed, and how many of these.
const LONG: usize = 300;
const SHOWN: usize = 5;

fn text(explained: &Explained<'_>) -> String {
    let Explained { rule, target, compared, kept, references, read, notes, .. } = explained;
    let mut out = format!("{}: {} {}\n", rule.name, rule.target.namespace, shown(target));
    for note in notes {
        writeln!(out, "  ! {note}").ok();
    }
    for (path, value) in read {
        let value = value.as_ref().map_or_else(|| "missing".to_owned(), shown);
        writeln!(out, "  reads $$target.{path}: {value}").ok();
    }
    if let Some(path) = &rule.touch {
        writeln!(out, "  sets {path} to the server's time with each change, and does not compare it").ok();
    }
    if rule.reference.target_each.is_some() && references.is_empty() {
        out.push_str("  it has no references\n");
    }
    // The paths of an element beside its reference; those of the whole target after all references.
    for reference in references {
        writeln!(out, "  {}", refers(rule, reference)).ok();
        for field in
            compared.fields.iter().filter(|field| field.element.is_some() && field.element == reference.element)
        {
            path(&mut out, field);
        }
        for field in kept.iter().filter(|field| field.element.is_some() && field.element == reference.element) {
            keeps(&mut out, field);
        }
    }
    for field in kept.iter().filter(|field| field.element.is_none()) {
        keeps(&mut out, field);
    }
    for field in compared.fields.iter().filter(|field| field.element.is_none()) {
        path(&mut out, field);
    }
    if compared.fields.is_empty() && kept.is_empty() && explained.failure.is_none() {
        writeln!(out, "  {}", nothing(rule)).ok();
    }
    out
}

/// `parts.$[].id, element 0: 7, found in shop.parts 7`
fn refers(rule: &Rule, Answered { element, key, sources, more }: &Answered) -> String {
    let paths: Vec<String> = rule.reference.paths(Role::Target).map(ToString::to_string).collect();
    let element = element.map(|nth| format!(", element {nth}")).unwrap_or_default();
    let Some(key) = key else { return format!("{}{element}: refers to nothing", paths.join(", ")) };
    let values: Vec<String> = key.values().iter().map(shown).collect();
    let ids: Vec<String> = sources.iter().map(shown).collect();
    let (more, namespace) = (if *more { ", …" } else { "" }, &rule.source.namespace);
    let found = if ids.is_empty() {
        format!("not found in {namespace}")
    } else {
        format!("found in {namespace} {}{more}", ids.join(", "))
    };
    format!("{}{element}: {}, {found}", paths.join(", "), values.join(", "))
}

fn path(out: &mut String, field: &Difference) {
    let (expected, stored) = (plain(field.expected.as_ref()), plain(field.stored.as_ref()));
    let (right, found) = (shown_or_nothing(expected.as_ref()), shown_or_nothing(stored.as_ref()));
    writeln!(out, "    {}", field.path).ok();
    if !field.differs() {
        writeln!(out, "      expected and stored {found}").ok();
        return;
    }
    match (&expected, &stored) {
        (Some(Bson::Array(expected)), Some(Bson::Array(stored))) if right.len() > LONG => {
            elements(out, expected, stored);
        }
        _ => {
            writeln!(out, "      expected {right}").ok();
            writeln!(out, "      stored   {found}   <- differs").ok();
        }
    }
}

/// A value that a `once` rule keeps.
fn keeps(out: &mut String, field: &Difference) {
    let text = |value: Option<Bson>| shown_or_nothing(value.as_ref());
    writeln!(out, "    {}", field.path).ok();
    writeln!(out, "      stored {}, which `once` never changes again", text(plain(field.stored.as_ref()))).ok();
    if field.differs() {
        writeln!(out, "      the source gives {} now", text(plain(field.expected.as_ref()))).ok();
    }
}

/// Of two long arrays the elements that differ.
fn elements(out: &mut String, right: &[Bson], found: &[Bson]) {
    writeln!(out, "      expected {} elements, stored {}   <- differs", right.len(), found.len()).ok();
    let differing: Vec<usize> =
        (0..right.len().max(found.len())).filter(|nth| right.get(*nth) != found.get(*nth)).collect();
    for nth in differing.iter().take(SHOWN) {
        writeln!(out, "        element {nth}: expected {}", shown_or_nothing(right.get(*nth))).ok();
        writeln!(
            out,
            "        {:width$}  stored   {}",
            "",
            shown_or_nothing(found.get(*nth)),
            width = format!("element {nth}").len()
        )
        .ok();
    }
    if differing.len() > SHOWN {
        writeln!(out, "        and {} more that differ", differing.len() - SHOWN).ok();
    }
}

/// The reason why the answer names no path of a target.
fn nothing(rule: &Rule) -> &'static str {
    match rule.values {
        _ if rule.tree.is_some() => {
            "nothing is to be written: the document is part of a circle or too deep in its tree, and keeps its values"
        }
        Values::Set { once: true, .. } => "nothing is stored, and no source has a value to give yet",
        _ => "nothing is to be written: there is no element to write in, or `on_missing: keep` keeps what is there",
    }
}

/// A stored value; Undefined stands for what `on_missing` takes away.
fn plain(value: Option<&bson::RawBson>) -> Option<Bson> {
    match value? {
        bson::RawBson::Undefined => None,
        value => Bson::try_from(value.as_raw_bson_ref()).ok(),
    }
}

fn json(explained: &Explained<'_>) -> serde_json::Value {
    let Explained { rule, target, takes_part, compared, kept, references, read, notes, failure } = explained;
    let value = |value: &Bson| value.clone().into_relaxed_extjson();
    let references = references.iter().map(|reference| {
        serde_json::json!({
            "element": reference.element,
            "value": reference.key.as_ref().map(|key| key.values().iter().map(value).collect::<Vec<_>>()),
            "sources": reference.sources.iter().map(value).collect::<Vec<_>>(),
            "more": reference.more,
        })
    });
    let paths = compared.fields.iter().map(|field| {
        let mut path = serde_json::json!({"path": field.path, "element": field.element, "differs": field.differs()});
        for (name, stored) in [("expected", &field.expected), ("stored", &field.stored)] {
            if let Some(stored) = plain(stored.as_ref()) {
                path[name] = value(&stored);
            }
        }
        path
    });
    let kept = kept.iter().map(|field| {
        serde_json::json!({
            "path": field.path, "element": field.element,
            "stored": plain(field.stored.as_ref()).as_ref().map(value),
            "now": plain(field.expected.as_ref()).as_ref().map(value),
        })
    });
    serde_json::json!({
        "rule": rule.name,
        "collection": rule.target.namespace.to_string(),
        "target": value(target),
        "takes_part": takes_part,
        "source": rule.source.namespace.to_string(),
        "references": references.collect::<Vec<_>>(),
        "paths": paths.collect::<Vec<_>>(),
        "kept": kept.collect::<Vec<_>>(),
        "reads": read.iter().map(|(path, read)| serde_json::json!({"path": path, "value": read.as_ref().map(value)})).collect::<Vec<_>>(),
        "notes": notes, "failure": failure.as_ref().map(|failure| &failure.message),
        // Without a computed value there is nothing to compare with.
        "differs": failure.is_none().then(|| compared.differences().next().is_some()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The last ten flights of a plane were printed twice, to show that one was missing.
    #[test]
    fn of_long_arrays_the_elements_that_differ_are_told() {
        let element = |n: i32| Bson::Document(doc! {"number": n, "to": "a place with a rather long name"});
        let right: Vec<Bson> = (0..10).map(element).collect();
        let told = |found: Vec<Bson>| {
            let value = |array: &[Bson]| bson::RawBson::try_from(Bson::Array(array.to_vec())).ok();
            let mut out = String::new();
            let (expected, stored) = (value(&right), value(&found));
            let (target, path_) = (Bson::Int32(1), "last".to_owned());
            path(&mut out, &Difference { target, path: path_, element: None, expected, stored });
            out
        };
        let expected = "    last
      expected 10 elements, stored 9   <- differs
        element 9: expected {\"number\":9,\"to\":\"a place with a rather long name\"}
                   stored   nothing
";
        assert_eq!(told(right[..9].to_vec()), expected);
        let told = told(right.iter().rev().cloned().collect());
        assert!(told.contains("element 4: expected") && told.ends_with("and 5 more that differ\n"), "{told}");
    }
}
