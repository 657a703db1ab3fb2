//! The expected value of every owned path, recomputed by definition from whole collections.

mod created;

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet},
};

use bson::{Bson, Document, RawDocumentBuf, oid::ObjectId};

use crate::{
    World, accumulate,
    expression::{Scope, View, evaluate},
    path::{Part, Path, Place, Step, at, get, places, pull, set, unset},
    query::matches,
    rule::{Accumulated, Accumulator, Groups, KeyType, Kind, OnMissing, Rule, Side, in_dependency_order},
    tree,
    value::{compare, equal, identical, is_nothing},
};
pub(crate) use created::has_more;

/// Rules against which worlds are checked.
#[derive(Debug, Clone)]
pub struct Oracle {
    rules: Vec<Rule>,
}

/// The expected state of the database.
#[derive(Debug, Clone)]
pub struct Expectation {
    /// Every collection, with every owned path according to its definition.
    pub world: World,
    /// The owned paths of each collection.
    pub owned: BTreeMap<String, Vec<Path>>,
    /// Places and reasons where the oracle expects nothing: the target keeps its values (after a write that the server
    /// refuses, or an expression that fails).
    pub notes: Vec<String>,
}

/// A value that only the application changes, or a document that only the application deletes.
#[derive(Debug, Clone)]
pub struct Staying {
    /// The collection of the document.
    pub collection: String,
    /// The `_id` of the document.
    pub id: Bson,
    /// An owned path without `$[]`; `_id` for the document itself.
    path: Path,
    value: Option<Bson>,
}

/// One source document (or one element of its reference array) that a reference may find.
#[derive(Clone)]
struct Candidate<'a> {
    document: &'a Bson,
    element: Option<&'a Bson>,
    keys: Vec<Key>,
}

/// The value of one entry of `match` on one side.
#[derive(Debug, Clone)]
enum Key {
    /// An empty reference: null, missing, an array, a DBRef to another collection.
    Nothing,
    /// A value that `key_type` cannot convert: the reference dangles.
    Dangling,
    /// A value to match.
    Value(Bson),
}

/// One reference of a target, with its place.
struct Reference {
    place: Place,
    keys: Vec<Key>,
}

enum Want {
    Set(Bson),
    Unset,
    Leave,
}

/// The expected changes of one target.
#[derive(Default)]
struct Desired {
    wants: Vec<(Place, Want)>,
    pulls: Vec<Place>,
    delete: bool,
}

impl Oracle {
    /// Parses rule documents as in a config; `database` is the database of bare collection names (a DBRef's `$db` is
    /// compared with it).
    pub fn new(rules: &[Document], database: &str) -> Result<Self, String> {
        let rules: Vec<Rule> = rules.iter().map(|rule| Rule::parse(rule, database)).collect::<Result<_, _>>()?;
        in_dependency_order(&rules)?;
        Ok(Self { rules })
    }

    /// The parsed rules.
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Collections that need `changeStreamPreAndPostImages`.
    #[must_use]
    pub fn pre_images(&self) -> BTreeSet<String> {
        crate::rule::pre_images(&self.rules)
    }

    /// Indexes that the rules' lookups need, without duplicates.
    #[must_use]
    pub fn indexes(&self) -> Vec<(String, Document)> {
        let mut indexes: Vec<(String, Document)> = Vec::new();
        for index in self.rules.iter().flat_map(Rule::indexes) {
            if !indexes.contains(&index) {
                indexes.push(index);
            }
        }
        indexes
    }

    /// The expected state of the database, given its content: the user-owned part of `actual` is the truth, and every
    /// owned path is recomputed, rule after rule in dependency order.
    pub fn expected(&self, actual: &World) -> Result<Expectation, String> {
        self.expected_by(&in_dependency_order(&self.rules)?, actual)
    }

    /// The same with the owned paths of one rule recomputed: those of the others are taken as they are stored.
    pub fn expected_of(&self, name: &str, actual: &World) -> Result<Expectation, String> {
        let rules: Vec<&Rule> = self.rules.iter().filter(|rule| rule.name == name).collect();
        self.expected_by(&rules, actual)
    }

    fn expected_by(&self, rules: &[&Rule], actual: &World) -> Result<Expectation, String> {
        let mut world = actual.clone();
        let mut owned: BTreeMap<String, Vec<Path>> = BTreeMap::new();
        let mut notes = Vec::new();
        for &rule in rules {
            owned.entry(rule.target.collection.clone()).or_default().extend(rule.owned());
            let applied = match rule.tree {
                Some(most) => tree::apply(rule, most, &mut world, &mut notes),
                None if rule.creates => created::apply(rule, &self.rules, &mut world, &mut notes),
                None => apply(rule, &mut world, &mut notes),
            };
            applied.map_err(|why| format!("rule {}: {why}", rule.name))?;
        }
        Ok(Expectation { world, owned, notes })
    }

    /// Values that do not change until the application changes their document, whatever happens to other documents: those of
    /// documents outside of `target.where`, and `once` values that exist. The same for documents that no rule deletes.
    pub fn staying(&self, actual: &World) -> Result<Vec<Staying>, String> {
        // The created documents that stay even if no rule has sources.
        let creating = || self.rules.iter().filter(|rule| rule.creates);
        let mut without_sources = actual.clone();
        without_sources.extend(creating().map(|rule| (rule.source.collection.clone(), Vec::new())));
        for rule in creating() {
            created::apply(rule, &self.rules, &mut without_sources, &mut Vec::new())?;
        }
        let mut found = Vec::new();
        for (collection, documents) in actual {
            let rules: Vec<&Rule> = self.rules.iter().filter(|rule| rule.target.collection == *collection).collect();
            let are_created = rules.iter().any(|rule| rule.creates);
            for document in documents {
                let id = document.get("_id").cloned().unwrap_or(Bson::Null);
                let mut add = |path: Path, value: Option<Bson>| {
                    found.push(Staying { collection: collection.clone(), id: id.clone(), path, value });
                };
                let stays = |left: &Document| left.get("_id") == document.get("_id");
                let mut may_go = are_created && !without_sources[collection].iter().any(stays);
                for rule in &rules {
                    let takes_part = matches(document, &rule.target.filter)?;
                    may_go |= takes_part && rule.on_missing == OnMissing::Delete;
                    for path in rule.owned().into_iter().filter(|path| path.prefix_len() == 0) {
                        let value = stored_at(document, &path).cloned();
                        if !takes_part || (rule.once && value.is_some()) {
                            add(path, value);
                        }
                    }
                }
                if !may_go {
                    add(Path::parse("_id"), Some(id.clone()));
                }
            }
        }
        Ok(found)
    }
}

impl Staying {
    /// None if the value is unchanged, or if its document was deleted and did not have to stay.
    #[must_use]
    pub fn difference(&self, actual: &World) -> Option<String> {
        let Self { collection, id, path, value } = self;
        let is_mine = |document: &&Document| document.get("_id").is_some_and(|other| equal(other, id));
        let stored = match actual.get(collection).into_iter().flatten().find(is_mine) {
            Some(document) => stored_at(document, path),
            None if path.names() == ["_id"] => None,
            None => return None,
        };
        let is_same = match (value, stored) {
            (Some(value), Some(stored)) => identical(value, stored),
            (value, stored) => value.is_none() && stored.is_none(),
        };
        (!is_same).then(|| format!("{collection} {id} {path}: had to stay {value:?}, stored {stored:?}"))
    }
}

/// The value at a path without `$[]`.
fn stored_at<'a>(document: &'a Document, path: &Path) -> Option<&'a Bson> {
    match path.0.split_first()? {
        (Part::Field(name), rest) => get(document.get(name)?, rest),
        (Part::All, _) => None,
    }
}

/// [`Oracle::new`] and [`Oracle::expected`] in one.
pub fn expected(rules: &[Document], database: &str, actual: &World) -> Result<Expectation, String> {
    Oracle::new(rules, database)?.expected(actual)
}

fn apply(rule: &Rule, world: &mut World, notes: &mut Vec<String>) -> Result<(), String> {
    if !world.contains_key(&rule.source.collection) {
        notes.push(format!("rule {}: its source does not exist, so the values stay", rule.name));
        return Ok(());
    }
    let targets = targets(rule, world, &|_| true, notes)?;
    if world.contains_key(&rule.target.collection) {
        world.insert(rule.target.collection.clone(), targets);
    }
    Ok(())
}

/// The documents of the target collection after the rule is applied to those that are due.
pub(crate) fn targets(
    rule: &Rule,
    world: &World,
    is_due: &dyn Fn(&Document) -> bool,
    notes: &mut Vec<String>,
) -> Result<Vec<Document>, String> {
    let documents = |side: &Side| world.get(&side.collection).cloned().unwrap_or_default();
    let sources = sources_of(rule, world)?;
    let candidates = candidates(rule, &sources)?;

    let mut targets = Vec::new();
    for document in documents(&rule.target) {
        if !is_due(&document) || !matches(&document, &rule.target.filter)? {
            targets.push(document);
            continue;
        }
        let id = document.get("_id").cloned().unwrap_or(Bson::Null);
        let before = Bson::Document(document);
        let after = desired(rule, &before, &candidates);
        let after = after.and_then(|desired| holds(rule, &before, &candidates).and(Ok(desired)));
        let after = after.and_then(|desired| write(before.clone(), desired));
        match after {
            Ok(Some(Bson::Document(after))) => targets.push(after),
            Ok(_) => {}
            Err(why) => {
                notes.push(format!("rule {}, target {id}: {why}", rule.name));
                targets.extend(before.as_document().cloned());
            }
        }
    }
    Ok(targets)
}

/// The documents that take part as sources, in the rule's order.
fn sources_of(rule: &Rule, world: &World) -> Result<Vec<Bson>, String> {
    let mut sources = Vec::new();
    for document in world.get(&rule.source.collection).into_iter().flatten() {
        if matches(document, &rule.source.filter)? {
            sources.push(Bson::Document(document.clone()));
        }
    }
    sources.sort_by(|a, b| by_sort(rule, a, b));
    Ok(sources)
}

/// Largest document that the server stores, less a margin for the rest of an answer.
const MOST: usize = (16 << 20) - 100_000;

/// Ok if the server can certainly store the target and every answer on the way to it. Otherwise the target keeps its
/// values: it is a dead letter, or correct.
fn holds(rule: &Rule, target: &Bson, candidates: &[Candidate]) -> Result<(), String> {
    let size = |value: &Bson| {
        let document = bson::doc! {"v": value.clone()};
        RawDocumentBuf::try_from(&document).map_or(usize::MAX, |raw| raw.as_bytes().len())
    };
    let large =
        |candidate: &&Candidate| !matches!(candidate.document.as_document(), Some(doc) if doc.values().all(is_small));
    let references = references(rule, target, &Place::new(), 0);
    let found = candidates.iter().filter(large);
    let found = found.filter(|candidate| references.iter().any(|reference| reference.finds(candidate)));
    let times = rule.owned().len() * references.len().max(1);
    let all: usize = found.map(|candidate| size(candidate.document).saturating_mul(times)).sum();
    if all > 0 && all.saturating_add(size(target)) > MOST {
        return Err("larger than the server may hold".to_owned());
    }
    Ok(())
}

/// True for most values, whose bytes need not be counted.
fn is_small(value: &Bson) -> bool {
    match value {
        Bson::String(text) => text.len() < 100_000,
        Bson::Document(document) => document.values().all(is_small),
        Bson::Array(elements) => elements.iter().all(is_small),
        _ => true,
    }
}

/// `sort`, then `_id` ascending.
fn by_sort(rule: &Rule, a: &Bson, b: &Bson) -> Ordering {
    let mut order = Ordering::Equal;
    for (path, descends) in &rule.sort {
        let way = compare(&sort_key(a, path, *descends), &sort_key(b, path, *descends));
        order = order.then(if *descends { way.reverse() } else { way });
    }
    order.then_with(|| compare(&sort_key(a, "_id", false), &sort_key(b, "_id", false)))
}

/// The value that the server sorts by: the least element of an array ascending, the greatest descending; missing is
/// null, an empty array is less than null.
fn sort_key(document: &Bson, path: &str, descends: bool) -> Bson {
    fn collect(value: Option<&Bson>, names: &[&str], found: &mut Vec<Bson>) {
        match (value, names.split_first()) {
            (Some(Bson::Array(elements)), None) if elements.is_empty() => found.push(Bson::Undefined),
            (Some(Bson::Array(elements)), None) => found.extend(elements.iter().cloned()),
            (value, None) => found.push(value.cloned().unwrap_or(Bson::Null)),
            (Some(Bson::Array(elements)), Some(_)) => {
                // A path does not lead into an array in an array.
                let inside =
                    elements.iter().map(|element| Some(element).filter(|element| element.as_array().is_none()));
                inside.for_each(|element| collect(element, names, found));
            }
            (Some(Bson::Document(document)), Some((name, rest))) => collect(document.get(name), rest, found),
            (_, Some(_)) => found.push(Bson::Null),
        }
    }
    let mut found = Vec::new();
    collect(Some(document), &path.split('.').collect::<Vec<_>>(), &mut found);
    let extreme = if descends { found.into_iter().max_by(compare) } else { found.into_iter().min_by(compare) };
    extreme.unwrap_or(Bson::Null)
}

/// The sources in order, each once for every element of its reference array.
fn candidates<'a>(rule: &Rule, sources: &'a [Bson]) -> Result<Vec<Candidate<'a>>, String> {
    let mut found = Vec::new();
    for document in sources {
        for place in places(document, &rule.source_prefix) {
            let element = at(document, &place);
            let keys = rule.on.iter().map(|(_, path)| key(document, element, path, &rule.target)).collect();
            let element = element.filter(|_| !rule.source_prefix.is_empty());
            found.push(Candidate { document, element, keys });
        }
    }
    Ok(found)
}

/// The candidates that one of these references finds, and that fulfil the condition on element and target.
fn counting<'a>(
    rule: &Rule,
    references: &[Reference],
    candidates: &[Candidate<'a>],
    view: View,
) -> Result<Vec<Candidate<'a>>, String> {
    let mut found = Vec::new();
    for candidate in candidates.iter().filter(|candidate| references.iter().any(|reference| reference.finds(candidate)))
    {
        if let Some(condition) = &rule.source.rows
            && evaluate(condition, scope(candidate, view))? != Some(Bson::Boolean(true))
        {
            continue;
        }
        found.push(candidate.clone());
    }
    Ok(found)
}

/// The value of one entry of `match`: from below `element` if the path has the array prefix, from the document
/// otherwise.
fn key(document: &Bson, element: Option<&Bson>, path: &Path, names: &Side) -> Key {
    let (base, rest) = match path.prefix_len() {
        0 => (Some(document), &path.0[..]),
        prefix => (element, &path.0[prefix..]),
    };
    let Some(base) = base else { return Key::Nothing };
    if let Some((Part::Field(last), parents)) = rest.split_last()
        && last == "$id"
    {
        let reference = get(base, parents).and_then(Bson::as_document);
        let named = reference.and_then(|reference| reference.get("$ref")).and_then(Bson::as_str) == Some(&names.bare);
        let database = reference.and_then(|reference| reference.get("$db")).filter(|database| **database != Bson::Null);
        if !named || database.is_some_and(|database| database.as_str() != Some(&names.database)) {
            return Key::Nothing;
        }
    }
    match get(base, rest) {
        Some(Bson::Array(_)) => Key::Nothing,
        value if is_nothing(value) => Key::Nothing,
        Some(value) => Key::Value(value.clone()),
        None => Key::Nothing,
    }
}

fn whole(number: f64) -> Key {
    if number.fract() == 0.0 && number.abs() < 9e15 {
        #[allow(clippy::cast_possible_truncation)]
        let whole = number as i64;
        return Key::Value(Bson::String(whole.to_string()));
    }
    Key::Dangling
}

fn convert(key: Key, key_type: Option<KeyType>) -> Key {
    let Key::Value(value) = key else { return key };
    match (key_type, value) {
        (None, value) => Key::Value(value),
        (Some(KeyType::ObjectId), Bson::ObjectId(id)) => Key::Value(Bson::ObjectId(id)),
        (Some(KeyType::ObjectId), Bson::String(text)) => {
            ObjectId::parse_str(&text).map_or(Key::Dangling, |id| Key::Value(Bson::ObjectId(id)))
        }
        (Some(KeyType::String), Bson::String(text)) => Key::Value(Bson::String(text)),
        (Some(KeyType::String), Bson::ObjectId(id)) => Key::Value(Bson::String(id.to_hex())),
        (Some(KeyType::String), Bson::Int32(number)) => Key::Value(Bson::String(number.to_string())),
        (Some(KeyType::String), Bson::Int64(number)) => Key::Value(Bson::String(number.to_string())),
        // 5.0 equals 5, so both refer to the same.
        (Some(KeyType::String), Bson::Double(number)) => whole(number),
        (Some(KeyType::String), Bson::Decimal128(number)) => whole(number.to_string().parse().unwrap_or(0.5)),
        (Some(_), _) => Key::Dangling,
    }
}

impl Reference {
    fn refers_to_nothing(&self) -> bool {
        self.keys.iter().any(|key| matches!(key, Key::Nothing))
    }

    fn finds(&self, candidate: &Candidate) -> bool {
        self.keys.iter().zip(&candidate.keys).all(|(a, b)| match (a, b) {
            (Key::Value(a), Key::Value(b)) => equal(a, b),
            _ => false,
        })
    }

    fn dangles(&self, candidates: &[Candidate]) -> bool {
        !self.refers_to_nothing() && !candidates.iter().any(|candidate| self.finds(candidate))
    }
}

/// The references below one place of the target: one for each combination of the `$[]` that follow.
fn references(rule: &Rule, target: &Bson, owner: &Place, bound: usize) -> Vec<Reference> {
    let Some(base) = at(target, owner) else { return Vec::new() };
    let below = places(base, &rule.target_prefix[bound..]).into_iter();
    below
        .map(|rest| {
            let place: Place = owner.iter().cloned().chain(rest).collect();
            let element = at(target, &place);
            let keys = rule.on.iter();
            let keys = keys.map(|(path, _)| convert(key(target, element, path, &rule.source), rule.key_type)).collect();
            Reference { place, keys }
        })
        .collect()
}

/// True if the array that holds the references below a place exists. Without a further `$[]` no array is needed.
fn has_array(rule: &Rule, target: &Bson, owner: &Place, bound: usize) -> bool {
    let rest = &rule.target_prefix[bound..];
    let array = rest.iter().position(|part| *part == Part::All);
    array.is_none_or(|array| {
        at(target, owner).and_then(|base| get(base, &rest[..array])).is_some_and(|value| value.as_array().is_some())
    })
}

/// True if the target refers to something. An array of keys does, even if it is empty: it is a set.
fn refers(rule: &Rule, target: &Bson, (owner, bound): (&Place, usize), references: &[Reference]) -> bool {
    let is_set = rule.target_prefix[bound..].contains(&Part::All) && has_array(rule, target, owner, bound);
    is_set || !references.iter().all(Reference::refers_to_nothing)
}

fn desired(rule: &Rule, target: &Bson, candidates: &[Candidate]) -> Result<Desired, String> {
    let mut desired = Desired::default();
    let all = references(rule, target, &Place::new(), 0);
    let whole = View { target: Some(target), element: None };
    // Rules that remove have no condition on the target.
    let removes = matches!(rule.on_missing, OnMissing::Delete | OnMissing::Remove);
    let counted = if removes { counting(rule, &all, candidates, whole)? } else { Vec::new() };
    let dangling: Vec<&Reference> = all.iter().filter(|reference| reference.dangles(&counted)).collect();
    match rule.on_missing {
        OnMissing::Delete if !dangling.is_empty() => {
            desired.delete = true;
            return Ok(desired);
        }
        OnMissing::Remove => desired.pulls = dangling.iter().map(|reference| reference.place.clone()).collect(),
        _ => {}
    }
    for (index, path) in rule.owned().iter().enumerate() {
        let bound = path.prefix_len();
        for owner in places(target, &path.0[..bound]) {
            let references = references(rule, target, &owner, bound);
            let view = View { element: at(target, &owner).filter(|_| bound > 0), ..whole };
            let counted = match &rule.kind {
                // Each reference sees its own element.
                Kind::Into(..) => candidates.to_vec(),
                _ => counting(rule, &references, candidates, view)?,
            };
            let candidates = counted.as_slice();
            let place: Place = owner
                .iter()
                .cloned()
                .chain(path.0[bound..].iter().map(|part| match part {
                    Part::Field(name) => Step::Field(name.clone()),
                    Part::All => Step::Index(0),
                }))
                .collect();
            let refers = refers(rule, target, (&owner, bound), &references);
            let mut want = match &rule.kind {
                Kind::Collect(..) | Kind::Aggregate(_) | Kind::Groups(_) if !refers => Want::Unset,
                Kind::Set(set) => match want_set(&set[index].1, &references, candidates, view)? {
                    Some(want) => want,
                    // An element that is no document has no room for a value.
                    None if bound > 0 && at(target, &owner).and_then(Bson::as_document).is_none() => Want::Unset,
                    None => want_otherwise(rule, &set[index].0, &references, view)?,
                },
                Kind::Into(_, element) if has_array(rule, target, &owner, bound) => {
                    want_into(rule, element, &references, (target, candidates))?
                }
                Kind::Into(..) => Want::Unset,
                Kind::Collect(_, element, slice) => {
                    want_collect(rule, element, *slice, (&references, view), candidates)?
                }
                Kind::Aggregate(set) => want_aggregate(rule, &set[index].1, &references, candidates, view)?,
                Kind::Groups(groups) => want_groups(rule, groups, &references, candidates, view)?,
            };
            // An existing value stays; only a reference that a source matches fills.
            if rule.once && (at(target, &place).is_some() || dangling_only(&references, candidates)) {
                want = Want::Leave;
            }
            desired.wants.push((place, want));
        }
    }
    Ok(desired)
}

fn dangling_only(references: &[Reference], candidates: &[Candidate]) -> bool {
    !candidates.iter().any(|candidate| references.iter().any(|reference| reference.finds(candidate)))
}

fn scope<'a>(candidate: &Candidate<'a>, view: View<'a>) -> Scope<'a> {
    Scope { root: candidate.document, element: candidate.element, view }
}

/// The first source, in the candidates' order, that any of the references finds.
fn want_set(
    value: &Bson,
    references: &[Reference],
    candidates: &[Candidate],
    view: View,
) -> Result<Option<Want>, String> {
    let mut values = Vec::new();
    for found in candidates.iter().filter(|candidate| references.iter().any(|reference| reference.finds(candidate))) {
        // A value that fails makes the target a dead letter, even if another source wins.
        values.push(evaluate(value, scope(found, view))?);
    }
    Ok(values.into_iter().next().map(|first| first.map_or(Want::Unset, Want::Set)))
}

/// The value without a source.
fn want_otherwise(rule: &Rule, path: &Path, references: &[Reference], view: View) -> Result<Want, String> {
    if let Some(otherwise) = &rule.otherwise {
        let Some(value) = otherwise.get(path.to_string()) else { return Ok(Want::Unset) };
        let nothing = Bson::Document(Document::new());
        return Ok(evaluate(value, Scope { root: &nothing, element: None, view })?.map_or(Want::Unset, Want::Set));
    }
    let dangles = references.iter().any(|reference| !reference.refers_to_nothing());
    Ok(match rule.on_missing {
        OnMissing::Null if dangles => Want::Set(Bson::Null),
        OnMissing::Keep if dangles => Want::Leave,
        _ => Want::Unset,
    })
}

/// One element for each reference, in the references' order and with their duplicates.
fn want_into(
    rule: &Rule,
    element: &Bson,
    references: &[Reference],
    (target, candidates): (&Bson, &[Candidate]),
) -> Result<Want, String> {
    let mut elements = Vec::new();
    for reference in references.iter().filter(|reference| !reference.refers_to_nothing()) {
        let mut values = Vec::new();
        let view = View { target: Some(target), element: at(target, &reference.place) };
        for found in &counting(rule, std::slice::from_ref(reference), candidates, view)? {
            values.push(evaluate(element, scope(found, view))?);
        }
        match values.into_iter().next() {
            Some(first) => elements.extend(first),
            None if rule.on_missing == OnMissing::Null => elements.push(Bson::Null),
            None if rule.on_missing == OnMissing::Keep => return Ok(Want::Leave),
            None => {}
        }
    }
    Ok(Want::Set(Bson::Array(elements)))
}

/// The rows that any of the references finds, in order: a source, or each of its elements that matches.
fn input<'a, 'b>(references: &[Reference], candidates: &'b [Candidate<'a>]) -> Vec<&'b Candidate<'a>> {
    let is_found = |candidate: &&Candidate| references.iter().any(|reference| reference.finds(candidate));
    candidates.iter().filter(is_found).collect()
}

fn want_collect(
    rule: &Rule,
    element: &Bson,
    slice: Option<i64>,
    (references, view): (&[Reference], View),
    candidates: &[Candidate],
) -> Result<Want, String> {
    let mut elements = Vec::new();
    for candidate in input(references, candidates) {
        elements.extend(evaluate(element, scope(candidate, view))?);
    }
    if elements.is_empty() && rule.unset_on_empty {
        return Ok(Want::Unset);
    }
    if let Some(slice) = slice {
        let keep = usize::try_from(slice.unsigned_abs()).unwrap_or(usize::MAX);
        if slice < 0 {
            elements.drain(..elements.len().saturating_sub(keep));
        } else {
            elements.truncate(keep);
        }
    }
    Ok(Want::Set(Bson::Array(elements)))
}

fn want_aggregate(
    rule: &Rule,
    value: &Accumulated,
    references: &[Reference],
    candidates: &[Candidate],
    view: View,
) -> Result<Want, String> {
    let found = input(references, candidates);
    if found.is_empty() && rule.unset_on_empty {
        return Ok(Want::Unset);
    }
    Ok(value_of(value, &found, view)?.map_or(Want::Unset, Want::Set))
}

fn value_of(value: &Accumulated, found: &[&Candidate], view: View) -> Result<Option<Bson>, String> {
    match value {
        Accumulated::Plain(accumulator) => accumulated(accumulator, found, view).map(Some),
        Accumulated::Over(variables, expression) => {
            let mut results = Document::new();
            for (name, accumulator) in variables {
                results.insert(name, accumulated(accumulator, found, view)?);
            }
            // Over the results as a document, `$$name` is `$name`, and `$$target.path` is `$target.path`.
            for (name, seen) in [("target", view.target), ("targetElement", view.element)] {
                results.extend(seen.map(|seen| (name.to_owned(), seen.clone())));
            }
            let results = Bson::Document(results);
            evaluate(&as_fields(expression), Scope { root: &results, element: None, view })
        }
    }
}

/// One element, or one field, for each group of sources with equal values of `by`.
fn want_groups(
    rule: &Rule,
    groups: &Groups,
    references: &[Reference],
    candidates: &[Candidate],
    view: View,
) -> Result<Want, String> {
    let found = input(references, candidates);
    if found.is_empty() && rule.unset_on_empty {
        return Ok(Want::Unset);
    }
    let mut parts: Vec<(Vec<Bson>, Vec<&Candidate>)> = Vec::new();
    for candidate in found {
        let by = groups.by.iter().map(|(_, value)| Ok(evaluate(value, scope(candidate, view))?.unwrap_or(Bson::Null)));
        let by: Vec<Bson> = by.collect::<Result<_, String>>()?;
        let same = |known: &[Bson]| known.iter().zip(&by).all(|(a, b)| equal(a, b));
        match parts.iter_mut().find(|(known, _)| same(known)) {
            Some((_, members)) => members.push(candidate),
            None => parts.push((by, vec![candidate])),
        }
    }
    let mut elements: Vec<(Vec<Bson>, Document)> = Vec::new();
    for (by, members) in parts {
        let mut fields = Document::new();
        for (name, value) in &groups.fields {
            if let Some(value) = value_of(value, &members, view)? {
                fields.insert(name, value);
            }
        }
        elements.push((by, fields));
    }
    elements.sort_by(|(by, fields), (other_by, other)| {
        let field = |fields: &Document, name: &str| fields.get(name).cloned().unwrap_or(Bson::Null);
        for (name, descends) in &groups.sort {
            let order = compare(&field(fields, name), &field(other, name));
            if order.is_ne() {
                return if *descends { order.reverse() } else { order };
            }
        }
        by.iter().zip(other_by).map(|(a, b)| compare(a, b)).find(|order| order.is_ne()).unwrap_or(Ordering::Equal)
    });
    if let Some(slice) = groups.slice {
        let keep = usize::try_from(slice.unsigned_abs()).unwrap_or(usize::MAX);
        let from = if slice < 0 { elements.len().saturating_sub(keep) } else { 0 };
        elements = elements.into_iter().skip(from).take(keep).collect();
    }
    if !groups.object {
        let element = |(by, fields): (Vec<Bson>, Document)| {
            let names = groups.by.iter().map(|(name, _)| name.clone());
            Bson::Document(names.zip(by).chain(fields).collect())
        };
        return Ok(Want::Set(elements.into_iter().map(element).collect::<Vec<_>>().into()));
    }
    let mut object = Document::new();
    for (by, fields) in elements {
        let name = match &by[0] {
            Bson::String(text) if !text.is_empty() => text.clone(),
            Bson::ObjectId(id) => id.to_hex(),
            Bson::Int32(number) => number.to_string(),
            Bson::Int64(number) => number.to_string(),
            _ => return Err("a value of by that names no field".to_owned()),
        };
        if object.insert(name, fields).is_some() {
            return Err("two groups of one name".to_owned());
        }
    }
    Ok(Want::Set(object.into()))
}

fn accumulated(accumulator: &Accumulator, found: &[&Candidate], view: View) -> Result<Bson, String> {
    let Accumulator { operator, operand } = accumulator;
    if found.is_empty() {
        return Ok(accumulate::of_nothing(operator));
    }
    let values: Vec<Option<Bson>> = if operator == "$count" {
        vec![None; found.len()]
    } else {
        found.iter().map(|candidate| evaluate(operand, scope(candidate, view))).collect::<Result<_, _>>()?
    };
    accumulate::accumulate(operator, &values)
}

fn as_fields(expression: &Bson) -> Bson {
    match expression {
        Bson::String(text) if text.starts_with("$$") => Bson::from(&text[1..]),
        Bson::Array(items) => items.iter().map(as_fields).collect::<Vec<_>>().into(),
        Bson::Document(doc) => {
            doc.iter().map(|(name, value)| (name.clone(), as_fields(value))).collect::<Document>().into()
        }
        other => other.clone(),
    }
}

/// The server's result of the write. An error is a write that it refuses as a whole.
fn write(mut target: Bson, desired: Desired) -> Result<Option<Bson>, String> {
    if desired.delete {
        return Ok(None);
    }
    for (place, want) in desired.wants {
        match want {
            Want::Set(value) => set(&mut target, &place, value)?,
            Want::Unset => unset(&mut target, &place),
            Want::Leave => {}
        }
    }
    // From the back, so that the positions of the others stay valid.
    for place in desired.pulls.iter().rev() {
        pull(&mut target, place);
    }
    Ok(Some(target))
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn some_values_and_documents_stay_whatever_happens_to_others() {
        let open = doc! {"collection": "t", "where": {"open": true}};
        let created = doc! {"collection": "e", "create": true};
        let rules = [
            doc! {"name": "open", "copy": {"source": "s", "target": open, "match": {"ref": "_id"}, "set": {"a": "$name"}}},
            doc! {"name": "once", "copy": {"source": "s", "target": "t", "match": {"ref": "_id"}, "set": {"b": "$name"}, "once": true}},
            doc! {"name": "count", "aggregate": {"source": "s", "target": created, "match": {"_id": "code"}, "set": {"n": {"$sum": 1}}}},
        ];
        let of = |sources: Vec<Document>, targets: Vec<Document>, created: Vec<Document>| {
            World::from([("s".to_owned(), sources), ("t".to_owned(), targets), ("e".to_owned(), created)])
        };
        let before = of(
            vec![doc! {"_id": 1, "code": 7}],
            vec![doc! {"_id": 1, "open": false, "a": 1}, doc! {"_id": 2, "open": true, "a": 1, "b": 1}],
            vec![doc! {"_id": 7, "n": 1}, doc! {"_id": 8, "n": 0, "note": "mine"}],
        );
        let after = of(
            Vec::new(),
            vec![doc! {"_id": 1, "open": false, "a": 2, "b": 2}, doc! {"_id": 2, "open": true, "a": 2, "b": 2}],
            Vec::new(),
        );
        let staying = Oracle::new(&rules, "d").unwrap().staying(&before).unwrap();
        assert!(staying.iter().all(|staying| staying.difference(&before).is_none()));
        let found: Vec<String> = staying.iter().filter_map(|staying| staying.difference(&after)).collect();
        let places: Vec<&str> = found.iter().filter_map(|line| line.split(':').next()).collect();
        assert_eq!(places, ["e 8 _id", "s 1 _id", "t 1 a", "t 2 b"]);
    }
}
