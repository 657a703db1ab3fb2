//! Update operators, replacements and update pipelines, on one document.

use bson::{Bson, DateTime, Document, Timestamp, doc};
use denormd_mql::{compare, expression, matches};

use crate::{
    diff::{Changes, between, identical, same_documents},
    projection,
    read::bytes,
    replies::{Failure, Result},
    state::bind,
};

/// The largest document.
const LARGEST: i64 = 16 << 20;

/// An update statement whose filter has matched.
pub struct Statement<'a> {
    pub update: &'a Bson,
    pub filters: &'a [Document],
    /// The variables of its expressions.
    pub variables: &'a Document,
    pub now: DateTime,
    pub cluster_time: Timestamp,
    /// True for a document that does not exist yet.
    pub inserts: bool,
}

/// What becomes of a document.
#[derive(Debug, PartialEq)]
pub enum Outcome {
    Same,
    Replaced(Document),
    Changed(Document, Changes),
}

/// One operator on one path.
struct Modifier<'a> {
    operator: &'a str,
    path: Vec<&'a str>,
    argument: &'a Bson,
}

/// What an operator does to a value.
enum Effect {
    Nothing,
    Set(Bson),
    /// The array, of which only the elements from an index on are new.
    Appended(Vec<Bson>, usize),
    Unset,
}

impl Statement<'_> {
    pub fn apply(&self, before: &Document) -> Result<Outcome> {
        let outcome = match self.update {
            Bson::Array(stages) => self.pipeline(stages, before)?,
            Bson::Document(update) if update.keys().next().is_some_and(|name| name.starts_with('$')) => {
                self.modifiers(update, before)?
            }
            Bson::Document(replacement) => replaced(before, replacement.clone()),
            _ => return Err(Failure::new(9, "an update is a document or a pipeline")),
        };
        if let Outcome::Replaced(after) | Outcome::Changed(after, _) = &outcome {
            if !self.inserts
                && !after.get("_id").is_some_and(|id| before.get("_id").is_some_and(|old| identical(id, old)))
            {
                return Err(Failure::new(66, "the immutable field '_id' was altered"));
            }
            if bytes(after) > LARGEST {
                return Err(Failure::new(17419, "Resulting document after update is larger than 16777216"));
            }
        }
        Ok(outcome)
    }

    fn pipeline(&self, stages: &[Bson], before: &Document) -> Result<Outcome> {
        let mut rows = vec![before.clone()];
        for stage in stages {
            let bound = bind(stage, self.variables);
            let Some((name, argument)) = bound.as_document().and_then(|stage| stage.iter().next()) else {
                return Err(Failure::new(14, "a stage is a document"));
            };
            rows = match (name.as_str(), argument) {
                ("$set" | "$addFields", Bson::Document(spec)) => projection::set(spec, rows)?,
                ("$unset", argument) => projection::unset(argument, &rows)?,
                ("$project", Bson::Document(spec)) => projection::project(spec, rows)?,
                ("$replaceWith", root) => {
                    let row = expression(root, &rows.remove(0))?;
                    let Some(Bson::Document(row)) = row else {
                        return Err(Failure::new(40228, "`newRoot` must be an object"));
                    };
                    vec![row]
                }
                (name, _) => return Err(Failure::unknown(format_args!("the stage `{name}` of an update"))),
            };
        }
        let mut after = rows.remove(0);
        if let (None, Some(id)) = (after.get("_id"), before.get("_id")) {
            after = with_id(id.clone(), after);
        }
        Ok(match between(before, &after) {
            _ if same_documents(before, &after) => Outcome::Same,
            Some(changes) if !self.inserts => Outcome::Changed(after, changes),
            _ => Outcome::Replaced(after),
        })
    }

    fn modifiers(&self, update: &Document, before: &Document) -> Result<Outcome> {
        let modifiers = parsed(update)?;
        let mut after = Bson::Document(before.clone());
        let mut changes = Changes::default();
        let applied = modifiers.iter().filter(|modifier| self.inserts || modifier.operator != "$setOnInsert");
        for modifier in applied {
            self.walk(modifier, &mut after, 0, &mut Vec::new(), &mut changes)?;
        }
        match after {
            Bson::Document(after) if !changes.is_empty() => {
                join_created(&mut changes, &after);
                Ok(Outcome::Changed(after, changes))
            }
            _ => Ok(Outcome::Same),
        }
    }

    /// Applies a modifier below a value; `at` is the place in its path, `names` are the names so far.
    fn walk(
        &self,
        modifier: &Modifier<'_>,
        value: &mut Bson,
        at: usize,
        names: &mut Vec<String>,
        changes: &mut Changes,
    ) -> Result<()> {
        let name = modifier.path[at];
        if name == "$" {
            return Err(Failure::unknown("the positional operator `$`"));
        }
        if let Some(identifier) = name.strip_prefix("$[").and_then(|name| name.strip_suffix(']')) {
            let Bson::Array(items) = value else {
                let message = format!(
                    "The path '{}' must exist in the document in order to apply array updates.",
                    names.join(".")
                );
                return Err(Failure::new(2, message));
            };
            let selected = items.iter().map(|item| self.selects(identifier, item)).collect::<Result<Vec<bool>>>()?;
            let alone = selected.iter().filter(|selected| **selected).count() == 1;
            let mut changed = Vec::new();
            for (nth, _) in selected.iter().enumerate().filter(|(_, selected)| **selected) {
                let mut inner = Changes::default();
                names.push(nth.to_string());
                self.place(modifier, value, &nth.to_string(), at, names, &mut inner)?;
                names.pop();
                if alone {
                    changes.append(inner);
                } else if !inner.is_empty() {
                    changed.push(nth);
                }
            }
            // With several selected elements, a change is described by the whole element, and several changes by the array.
            match (changed.as_slice(), &*value) {
                ([], _) => {}
                ([one], Bson::Array(items)) => {
                    changes.set.push((format!("{}.{one}", names.join(".")), items[*one].clone()));
                }
                _ => changes.set.push((names.join("."), value.clone())),
            }
            return Ok(());
        }
        names.push(name.to_owned());
        let result = self.place(modifier, value, name, at, names, changes);
        names.pop();
        result
    }

    /// True if an array filter selects an element; `$[]` selects all.
    fn selects(&self, identifier: &str, item: &Bson) -> Result<bool> {
        if identifier.is_empty() {
            return Ok(true);
        }
        let named = |filter: &&Document| mentions(filter, identifier);
        let Some(filter) = self.filters.iter().find(named) else {
            return Err(Failure::new(2, format!("No array filter found for identifier '{identifier}'")));
        };
        Ok(matches(filter, &doc! {identifier: item.clone()})?)
    }

    /// Applies a modifier to the field or the element of this name.
    fn place(
        &self,
        modifier: &Modifier<'_>,
        value: &mut Bson,
        name: &str,
        at: usize,
        names: &mut Vec<String>,
        changes: &mut Changes,
    ) -> Result<()> {
        let last = at + 1 == modifier.path.len();
        let in_array = matches!(value, Bson::Array(_));
        let existing = match value {
            Bson::Document(document) => document.get_mut(name),
            Bson::Array(items) => match index(name) {
                Some(nth) => items.get_mut(nth),
                None if modifier.operator == "$unset" => return Ok(()),
                None => return Err(not_viable(name)),
            },
            _ if modifier.operator == "$unset" => return Ok(()),
            _ => return Err(not_viable(name)),
        };
        if let Some(existing) = existing {
            if !last {
                return self.walk(modifier, existing, at + 1, names, changes);
            }
            match self.effect(modifier, Some(existing))? {
                Effect::Nothing => {}
                Effect::Set(new) => {
                    changes.set.push((names.join("."), new.clone()));
                    *existing = new;
                }
                Effect::Appended(items, from) => {
                    for (nth, item) in items.iter().enumerate().skip(from) {
                        changes.set.push((format!("{}.{nth}", names.join(".")), item.clone()));
                    }
                    *existing = Bson::Array(items);
                }
                Effect::Unset if in_array => {
                    *existing = Bson::Null;
                    changes.set.push((names.join("."), Bson::Null));
                }
                Effect::Unset => {
                    if let Bson::Document(document) = value {
                        document.remove(name);
                    }
                    changes.unset.push(names.join("."));
                }
            }
            return Ok(());
        }
        // Neither the field nor what would be below it exists.
        if modifier.path[at + 1..].iter().any(|name| name.starts_with("$[")) {
            let message =
                format!("The path '{}' must exist in the document in order to apply array updates.", names.join("."));
            return Err(Failure::new(2, message));
        }
        let created = match self.effect(modifier, None)? {
            Effect::Nothing | Effect::Unset => return Ok(()),
            Effect::Set(new) => new,
            Effect::Appended(items, _) => Bson::Array(items),
        };
        let mut created = created;
        for name in modifier.path[at + 1..].iter().rev() {
            created = doc! {*name: created}.into();
        }
        changes.set.push((names.join("."), created.clone()));
        match value {
            Bson::Document(document) => drop(document.insert(name, created)),
            Bson::Array(items) => {
                let nth = index(name).unwrap_or_default();
                if nth > items.len() + 1_500_000 {
                    return Err(Failure::new(2, "can't backfill more than 1500000 elements"));
                }
                items.resize(nth, Bson::Null);
                items.push(created);
            }
            _ => {}
        }
        Ok(())
    }

    fn effect(&self, modifier: &Modifier<'_>, existing: Option<&Bson>) -> Result<Effect> {
        let argument = modifier.argument;
        let set = |new: Bson| match existing {
            Some(old) if identical(old, &new) => Effect::Nothing,
            _ => Effect::Set(new),
        };
        Ok(match modifier.operator {
            "$set" | "$setOnInsert" => set(argument.clone()),
            "$unset" => existing.map_or(Effect::Nothing, |_| Effect::Unset),
            "$min" | "$max" => match existing {
                None => Effect::Set(argument.clone()),
                Some(old) => {
                    let order = compare(Some(argument), Some(old));
                    let better = if modifier.operator == "$min" { order.is_lt() } else { order.is_gt() };
                    if better { Effect::Set(argument.clone()) } else { Effect::Nothing }
                }
            },
            "$inc" => set(add(existing, argument)?),
            "$currentDate" => match argument {
                Bson::Boolean(_) => Effect::Set(self.now.into()),
                Bson::Document(kind) if kind.get_str("$type").is_ok_and(|text| text == "date") => {
                    Effect::Set(self.now.into())
                }
                Bson::Document(kind) if kind.get_str("$type").is_ok_and(|text| text == "timestamp") => {
                    Effect::Set(self.cluster_time.into())
                }
                _ => return Err(Failure::new(2, "`$currentDate` takes true or a type")),
            },
            "$push" => push(existing, argument)?,
            "$addToSet" => add_to_set(existing, argument)?,
            "$pull" => Self::pull(existing, argument)?,
            "$pullAll" => match (existing, argument) {
                (None, _) => Effect::Nothing,
                (Some(Bson::Array(items)), Bson::Array(wanted)) => {
                    let pulled = |item: &Bson| wanted.iter().any(|one| compare(Some(one), Some(item)).is_eq());
                    kept(items, |item| Ok(!pulled(item)))?
                }
                _ => return Err(Failure::new(2, "Cannot apply $pullAll to a non-array value")),
            },
            other => return Err(Failure::unknown(format_args!("the update operator `{other}`"))),
        })
    }

    fn pull(existing: Option<&Bson>, argument: &Bson) -> Result<Effect> {
        let items = match existing {
            None => return Ok(Effect::Nothing),
            Some(Bson::Array(items)) => items,
            Some(_) => return Err(Failure::new(2, "Cannot apply $pull to a non-array value")),
        };
        let is_condition = |inner: &Document| {
            inner
                .keys()
                .next()
                .is_some_and(|name| name.starts_with('$') && !["$ref", "$id", "$db"].contains(&name.as_str()))
        };
        match argument {
            Bson::Document(inner) if is_condition(inner) => {
                kept(items, |item| Ok(!matches(&doc! {"v": inner.clone()}, &doc! {"v": item.clone()})?))
            }
            Bson::Document(inner) => kept(items, |item| match item {
                Bson::Document(item) => Ok(!matches(inner, item)?),
                _ => Ok(true),
            }),
            Bson::RegularExpression(_) => Err(Failure::unknown("`$pull` of a regular expression")),
            value => kept(items, |item| Ok(compare(Some(item), Some(value)).is_ne())),
        }
    }
}

/// Describes a field that the update creates, and what it then sets inside that field, as one.
fn join_created(changes: &mut Changes, after: &Document) {
    let is_below = |path: &str, other: &str| path.strip_prefix(other).is_some_and(|rest| rest.starts_with('.'));
    let paths: Vec<String> = changes.set.iter().map(|(path, _)| path.clone()).collect();
    changes.set.retain(|(path, _)| !paths.iter().any(|other| is_below(path, other)));
    for (path, value) in &mut changes.set {
        if paths.iter().any(|other| is_below(other, path)) {
            let mut steps = path.split('.');
            let mut now = steps.next().and_then(|name| after.get(name));
            for step in steps {
                now = match now {
                    Some(Bson::Document(inside)) => inside.get(step),
                    Some(Bson::Array(items)) => index(step).and_then(|nth| items.get(nth)),
                    _ => None,
                };
            }
            *value = now.cloned().unwrap_or(Bson::Null);
        }
    }
}

/// Fails if an update cannot be right for any document.
pub fn check(update: &Bson) -> Result<()> {
    match update {
        Bson::Document(update) if update.keys().next().is_some_and(|name| name.starts_with('$')) => {
            parsed(update).map(drop)
        }
        _ => Ok(()),
    }
}

/// The operators of an update in the order in which they are applied.
fn parsed(update: &Document) -> Result<Vec<Modifier<'_>>> {
    let mut modifiers = Vec::new();
    for (operator, fields) in update {
        let Bson::Document(fields) = fields else {
            return Err(Failure::new(9, format!("`{operator}` takes a document")));
        };
        for (path, argument) in fields {
            let path: Vec<&str> = path.split('.').collect();
            if path.iter().any(|name| name.is_empty()) {
                return Err(Failure::new(56, "an update path contains an empty field name"));
            }
            modifiers.push(Modifier { operator, path, argument });
        }
    }
    modifiers.sort_by(|a, b| in_order(&a.path, &b.path));
    for pair in modifiers.windows(2) {
        if pair[1].path.starts_with(&pair[0].path) {
            let path = pair[1].path.join(".");
            return Err(Failure::new(40, format!("Updating the path '{path}' would create a conflict")));
        }
    }
    Ok(modifiers)
}

fn kept(items: &[Bson], mut keep: impl FnMut(&Bson) -> Result<bool>) -> Result<Effect> {
    let mut out = Vec::new();
    for item in items {
        if keep(item)? {
            out.push(item.clone());
        }
    }
    Ok(if out.len() == items.len() { Effect::Nothing } else { Effect::Set(Bson::Array(out)) })
}

fn push(existing: Option<&Bson>, argument: &Bson) -> Result<Effect> {
    let mut items = match existing {
        None => Vec::new(),
        Some(Bson::Array(items)) => items.clone(),
        Some(_) => return Err(Failure::new(2, "The field must be an array but is of another type")),
    };
    let length = items.len();
    let modifiers = argument.as_document().filter(|modifiers| modifiers.contains_key("$each"));
    let Some(modifiers) = modifiers else {
        items.push(argument.clone());
        return Ok(if length > 0 { Effect::Appended(items, length) } else { Effect::Set(Bson::Array(items)) });
    };
    let mut new = Vec::new();
    // The place of the new elements; None is the end.
    let mut place = None;
    for (name, value) in modifiers {
        match (name.as_str(), value) {
            ("$each", Bson::Array(each)) => new.clone_from(each),
            ("$position", value) => {
                let wanted = crate::read::number(value).unwrap_or_default();
                let size = i64::try_from(length).unwrap_or_default();
                let from_end = if wanted < 0 { (size + wanted).max(0) } else { wanted.min(size) };
                place = usize::try_from(from_end).ok().filter(|_| wanted <= size);
            }
            (other, _) => return Err(Failure::unknown(format_args!("`{other}` of `$push`"))),
        }
    }
    if new.is_empty() && existing.is_some() {
        return Ok(Effect::Nothing);
    }
    let at = place.unwrap_or(length);
    items.splice(at..at, new);
    Ok(if place.is_none() && length > 0 { Effect::Appended(items, length) } else { Effect::Set(Bson::Array(items)) })
}

fn add_to_set(existing: Option<&Bson>, argument: &Bson) -> Result<Effect> {
    let mut items = match existing {
        None => Vec::new(),
        Some(Bson::Array(items)) => items.clone(),
        Some(_) => return Err(Failure::new(2, "Cannot apply $addToSet to non-array field")),
    };
    let length = items.len();
    let each = argument.as_document().and_then(|argument| argument.get("$each")).and_then(Bson::as_array);
    for item in each.map_or(std::slice::from_ref(argument), Vec::as_slice) {
        if !items.iter().any(|known| compare(Some(known), Some(item)).is_eq()) {
            items.push(item.clone());
        }
    }
    Ok(if items.len() == length && existing.is_some() { Effect::Nothing } else { Effect::Set(Bson::Array(items)) })
}

fn add(existing: Option<&Bson>, argument: &Bson) -> Result<Bson> {
    let wrong = |code: i32| Failure::new(code, "Cannot increment with or apply $inc to a value of non-numeric type");
    Ok(match (existing, argument) {
        (None, Bson::Int32(_) | Bson::Int64(_) | Bson::Double(_)) => argument.clone(),
        (Some(Bson::Int32(a)), Bson::Int32(b)) => {
            a.checked_add(*b).map_or_else(|| Bson::Int64(i64::from(*a) + i64::from(*b)), Bson::Int32)
        }
        (Some(Bson::Int32(a)), Bson::Int64(b)) => long(i64::from(*a).checked_add(*b))?,
        (Some(Bson::Int64(a)), Bson::Int32(b)) => long(a.checked_add(i64::from(*b)))?,
        (Some(Bson::Int64(a)), Bson::Int64(b)) => long(a.checked_add(*b))?,
        (Some(Bson::Double(a)), Bson::Double(b)) => Bson::Double(a + b),
        (Some(Bson::Double(a)), Bson::Int32(b)) => Bson::Double(a + f64::from(*b)),
        (Some(Bson::Int32(a)), Bson::Double(b)) => Bson::Double(f64::from(*a) + b),
        (_, Bson::Decimal128(_)) | (Some(Bson::Decimal128(_)), _) => {
            return Err(Failure::unknown("`$inc` of a decimal"));
        }
        (Some(Bson::Int64(_) | Bson::Double(_)), Bson::Int64(_) | Bson::Double(_)) => {
            return Err(Failure::unknown("`$inc` of a long and a double"));
        }
        _ => return Err(wrong(14)),
    })
}

fn long(sum: Option<i64>) -> Result<Bson> {
    sum.map(Bson::Int64).ok_or_else(|| Failure::new(2, "Failed to apply $inc operations to current value"))
}

fn replaced(before: &Document, replacement: Document) -> Outcome {
    let id = replacement.get("_id").or_else(|| before.get("_id")).cloned();
    let after = match id {
        Some(id) => with_id(id, replacement),
        None => replacement,
    };
    if same_documents(before, &after) { Outcome::Same } else { Outcome::Replaced(after) }
}

/// The document with this `_id` as its first field.
pub fn with_id(id: Bson, document: Document) -> Document {
    let rest = document.into_iter().filter(|(name, _)| name != "_id");
    [("_id".to_owned(), id)].into_iter().chain(rest).collect()
}

fn index(name: &str) -> Option<usize> {
    let canonical = name == "0" || !name.starts_with('0');
    name.parse().ok().filter(|_| canonical && name.bytes().all(|byte| byte.is_ascii_digit()))
}

fn not_viable(name: &str) -> Failure {
    Failure::new(28, format!("Cannot create field '{name}' in element"))
}

/// The order in which paths are applied: names by their bytes, numbers by value.
fn in_order(a: &[&str], b: &[&str]) -> std::cmp::Ordering {
    let one = |a: &str, b: &str| match (index(a), index(b)) {
        (Some(a), Some(b)) => a.cmp(&b),
        _ => a.cmp(b),
    };
    let differing = a.iter().zip(b).map(|(a, b)| one(a, b)).find(|order| order.is_ne());
    differing.unwrap_or_else(|| a.len().cmp(&b.len()))
}

/// True if an array filter is about this identifier.
fn mentions(filter: &Document, identifier: &str) -> bool {
    filter.iter().any(|(name, value)| {
        if name.starts_with('$') {
            value
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Bson::as_document)
                .any(|inner| mentions(inner, identifier))
        } else {
            name == identifier || name.strip_prefix(identifier).is_some_and(|rest| rest.starts_with('.'))
        }
    })
}
