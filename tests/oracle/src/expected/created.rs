//! Documents that a rule creates: one for each key that has sources.

use bson::{Bson, DateTime, Document};

use super::{Candidate, Desired, Key, Reference, candidates, holds, sources_of, want_aggregate, want_groups, write};
use crate::{
    World,
    expression::View,
    path::{Part, Path, Place, Step},
    query::matches,
    rule::{Kind, Rule},
    value::equal,
};

const DAY: i64 = 86_400_000;

/// Documents with sources exist and have their values. Documents without are gone, unless they have fields of others or
/// the rule keeps them.
pub(super) fn apply(rule: &Rule, rules: &[Rule], world: &mut World, notes: &mut Vec<String>) -> Result<(), String> {
    if !world.contains_key(&rule.source.collection) {
        notes.push(format!("rule {}: its source does not exist, so the documents stay", rule.name));
        return Ok(());
    }
    let sources = sources_of(rule, world)?;
    let rows = rows(rule, &sources)?;
    let mut kept_by_others = Vec::new();
    let here = || rules.iter().filter(|other| other.target.collection == rule.target.collection);
    for other in here().filter(|other| other.creates && other.name != rule.name) {
        // Nothing is known of the keys of a source that is gone.
        if !world.contains_key(&other.source.collection) {
            kept_by_others.push(None);
            continue;
        }
        let theirs = sources_of(other, world)?;
        kept_by_others.extend(self::rows(other, &theirs)?.into_iter().map(|row| Some(row.keys)));
    }
    let stored = world.get(&rule.target.collection).cloned().unwrap_or_default();
    let mut documents: Vec<Document> = Vec::new();
    let mut known: Vec<Vec<Bson>> = Vec::new();
    for document in stored {
        let Some(key) = key_of_id(rule, &document) else {
            documents.push(document);
            continue;
        };
        let is_kept = |held: &Option<Vec<Key>>| held.as_ref().is_none_or(|held| same(held, &key));
        let has_rows = rows.iter().any(|row| same(&row.keys, &key));
        // In other documents, the paths of a rule with `target.where` are the application's.
        let mut owned: Vec<Path> = Vec::new();
        for other in here() {
            if matches(&document, &other.target.filter)? {
                owned.extend(other.owned());
            }
        }
        let stays =
            has_rows || rule.keeps || kept_by_others.iter().any(is_kept) || has_more(&document, &owned, &["_id"]);
        known.push(key.clone());
        if stays {
            documents.push(with_values(rule, &key, document, &rows, notes).1);
        }
    }
    for row in &rows {
        let key: Vec<Bson> = row
            .keys
            .iter()
            .filter_map(|key| if let Key::Value(value) = key { Some(value.clone()) } else { None })
            .collect();
        if known.iter().any(|known| same(&row.keys, known)) {
            continue;
        }
        known.push(key.clone());
        let document = Document::from_iter([("_id".to_owned(), id_of(rule, &key))]);
        if let (true, document) = with_values(rule, &key, document, &rows, notes) {
            documents.push(document);
        }
    }
    world.insert(rule.target.collection.clone(), documents);
    Ok(())
}

/// The sources, or their elements, that have a key.
fn rows<'a>(rule: &Rule, sources: &'a [Bson]) -> Result<Vec<Candidate<'a>>, String> {
    let mut rows = Vec::new();
    for mut row in candidates(rule, sources)? {
        for (key, unit) in row.keys.iter_mut().zip(&rule.units) {
            let Some(unit) = unit else { continue };
            *key = match key {
                Key::Value(Bson::DateTime(date)) => Key::Value(start(*date, unit)?.into()),
                _ => Key::Nothing,
            };
        }
        if row.keys.iter().all(|key| matches!(key, Key::Value(_))) {
            rows.push(row);
        }
    }
    Ok(rows)
}

/// The start of the interval that contains a date, in UTC.
fn start(date: DateTime, unit: &str) -> Result<DateTime, String> {
    let millis = date.timestamp_millis();
    let length = match unit {
        "minute" => 60_000,
        "hour" => 3_600_000,
        "day" => DAY,
        // The first Sunday was the fourth day.
        "week" => return Ok(DateTime::from_millis(millis - (millis - 3 * DAY).rem_euclid(7 * DAY))),
        other => return Err(format!("an interval of a {other}")),
    };
    Ok(DateTime::from_millis(millis - millis.rem_euclid(length)))
}

fn same(keys: &[Key], values: &[Bson]) -> bool {
    keys.len() == values.len()
        && keys.iter().zip(values).all(|(key, value)| matches!(key, Key::Value(key) if equal(key, value)))
}

fn names(rule: &Rule) -> Vec<&str> {
    rule.on.iter().filter_map(|(path, _)| path.names().get(1).copied()).collect()
}

/// The values of a document's key; None if its `_id` has another form.
fn key_of_id(rule: &Rule, document: &Document) -> Option<Vec<Bson>> {
    let id = document.get("_id")?;
    let names = names(rule);
    let values = match id {
        id if names.is_empty() => vec![id.clone()],
        Bson::Document(id) if id.keys().map(String::as_str).eq(names) => id.values().cloned().collect(),
        _ => return None,
    };
    let usable = |value: &Bson| !matches!(value, Bson::Null | Bson::Undefined | Bson::Array(_));
    values.iter().all(usable).then_some(values)
}

fn id_of(rule: &Rule, key: &[Bson]) -> Bson {
    let names = names(rule);
    if names.is_empty() {
        key[0].clone()
    } else {
        names.into_iter().map(str::to_owned).zip(key.iter().cloned()).collect::<Document>().into()
    }
}

/// True if a document has a path that no rule owns. Arrays around owned paths belong to others.
pub(crate) fn has_more(document: &Document, owned: &[Path], others: &[&str]) -> bool {
    let plain = |path: &&Path| path.0.iter().all(|part| matches!(part, Part::Field(_)));
    let owned: Vec<Vec<&str>> = owned.iter().filter(plain).map(Path::names).collect();
    more(document, &owned, others)
}

fn more(document: &Document, owned: &[Vec<&str>], others: &[&str]) -> bool {
    document.iter().any(|(name, value)| {
        if others.contains(&name.as_str()) || owned.iter().any(|path| path.as_slice() == [name.as_str()]) {
            return false;
        }
        let below: Vec<Vec<&str>> =
            owned.iter().filter(|path| path.len() > 1 && path[0] == name).map(|path| path[1..].to_vec()).collect();
        match value {
            Bson::Document(inside) if !below.is_empty() => more(inside, &below, &[]),
            _ => true,
        }
    })
}

/// The document with the values of its key; false where they cannot be computed or written.
fn with_values(
    rule: &Rule,
    key: &[Bson],
    document: Document,
    rows: &[Candidate],
    notes: &mut Vec<String>,
) -> (bool, Document) {
    let before = Bson::Document(document.clone());
    let reference = Reference { place: Place::new(), keys: key.iter().cloned().map(Key::Value).collect() };
    let references = [reference];
    let found: Vec<Candidate> = rows.iter().filter(|row| references[0].finds(row)).cloned().collect();
    let view = View { target: Some(&before), element: None };
    let after = (|| {
        let mut desired = Desired::default();
        for (index, path) in rule.owned().iter().enumerate() {
            let want = match &rule.kind {
                Kind::Aggregate(set) => want_aggregate(rule, &set[index].1, &references, &found, view)?,
                Kind::Groups(groups) => want_groups(rule, groups, &references, &found, view)?,
                _ => return Err("only an aggregate creates documents".to_owned()),
            };
            let step = |part: &Part| match part {
                Part::Field(name) => Step::Field(name.clone()),
                Part::All => Step::Index(0),
            };
            desired.wants.push((path.0.iter().map(step).collect(), want));
        }
        holds(rule, &before, rows)?;
        write(before.clone(), desired)
    })();
    match after {
        Ok(Some(Bson::Document(after))) => (true, after),
        Ok(_) => (false, document),
        Err(why) => {
            notes.push(format!("rule {}, key {key:?}: {why}", rule.name));
            (false, document)
        }
    }
}
