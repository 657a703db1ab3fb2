//! Rules that look like a mistake: the names in a rule are compared with a sample of the existing documents.
//!
//! A suspicion is not proof, so it stops no rule by itself. It points to its place in the config, and says what was
//! found and what was probably meant.

mod constants;
mod filters;
mod interpolation;
mod places;

use std::time::Duration;

use bson::{Document, doc};
use tokio::time::Instant;

use crate::{preflight, reconcile::read::simple_collation};
use denormd_model::{
    clock::millis,
    field_path::{FieldPath, Segment},
    namespace::Namespace,
    position::ClusterTime,
    shape::{Field, Shape},
};
use denormd_mongo::{Server, command::decoded, error::Result};
use denormd_rules::{
    config::{ConfigPath, KeyType, Mistake},
    plan::{Pair, Plan, Rule, Side, reference::Role},
};

/// Documents that are sampled from each side.
const DRAWN: i32 = 100;
/// Size above which a document is skipped, in bytes: a hundred of them would be too much.
const LARGEST: i32 = 256 << 10;
/// Time limit of a sample, and of the search for the fields that it lacks.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The collection, or its whole database, does not exist.
#[derive(Debug)]
struct Absent {
    database: bool,
    /// The name that was probably meant.
    near: Option<String>,
}

/// The findings about one side of a rule.
#[derive(Debug, Default)]
struct Seen {
    /// The collection or database that does not exist.
    absent: Option<Absent>,
    /// A sample of the matching documents; None if there are none, or if drawing them took too long.
    shape: Option<Shape>,
    /// No document matches the filter: the sample is of the whole collection.
    none_match: bool,
    /// The sample may lack fields that exist.
    cut: bool,
    /// Paths that rules write: no document may have them yet.
    written: Vec<FieldPath>,
    /// Paths that no sampled document has, but at least one other document.
    rare: Vec<FieldPath>,
}

/// The suspected mistakes in a rule. Reads only.
pub async fn suspicions(server: &Server, plan: &Plan, rule: &Rule) -> Result<Vec<Mistake>> {
    let (source, target) = see(server, plan, rule).await?;
    Ok(suspicions_of(rule, &source, &target))
}

/// Reasons to doubt that a rule needs the indexes and pre-images that it asks for.
#[derive(Debug)]
pub struct Doubts {
    /// The paths of `match` look reversed: the needs are then not those of the rule that was meant.
    pub is_reversed: bool,
    sides: [(Namespace, Seen); 2],
}

/// Looks for reasons not to create what a rule asks for. Reads only.
pub async fn doubts(server: &Server, plan: &Plan, rule: &Rule) -> Result<Doubts> {
    let (source, target) = see(server, plan, rule).await?;
    let is_reversed = !reversed(rule, &source, &target).is_empty();
    let sides = [(rule.source.namespace.clone(), source), (rule.target.namespace.clone(), target)];
    Ok(Doubts { is_reversed, sides })
}

impl Doubts {
    /// A field that no document seems to have, among those of an index of a rule's collection, and the existing field that
    /// was probably meant. Less similar names are only a warning: the field may be still to come.
    #[must_use]
    pub fn misspelt(&self, database: &str, index: &Document) -> Option<(String, String)> {
        let (collection, keys) = preflight::index_keys(index)?;
        let is_meant = |ns: &Namespace| ns.database == database && ns.collection == collection;
        // Both, if the rule copies within one collection.
        let sides: Vec<&Seen> = self.sides.iter().filter(|(ns, _)| is_meant(ns)).map(|(_, seen)| seen).collect();
        let shapes = sides.iter().filter_map(|seen| seen.shape.as_ref());
        let known: Vec<String> = shapes.flat_map(|shape| &shape.fields).map(|field| field.path.query()).collect();
        keys.keys().find_map(|key| {
            let path = FieldPath::parse(key).ok()?;
            let is_absent = !sides.is_empty() && sides.iter().all(|seen| has(seen, &path) == Some(false));
            Some((key.clone(), preflight::nearest(&path.query(), &known).filter(|_| is_absent)?))
        })
    }
}

async fn see(server: &Server, plan: &Plan, rule: &Rule) -> Result<(Seen, Seen)> {
    Ok((see_side(server, plan, rule, Role::Source).await?, see_side(server, plan, rule, Role::Target).await?))
}

async fn see_side(server: &Server, plan: &Plan, rule: &Rule, role: Role) -> Result<Seen> {
    let side = side(rule, role);
    let mut seen = look(server, side).await?;
    // A tree reads its own output.
    let others = plan
        .rules
        .iter()
        .filter(|other| (other.id != rule.id || rule.tree.is_some()) && other.target.namespace == side.namespace);
    seen.written = others.flat_map(|other| other.owned()).cloned().collect();
    seen.rare = rare(server, rule, role, &seen).await?;
    Ok(seen)
}

/// Searches the whole collection for the fields that the sample lacks, because a sample is likely to lack a rare one. A field
/// that is not found in time counts as absent: a needless question about a name costs less than a wrong name.
async fn rare(server: &Server, rule: &Rule, role: Role, seen: &Seen) -> Result<Vec<FieldPath>> {
    let side = side(rule, role);
    let until = Instant::now() + TIMEOUT;
    let mut found = Vec::new();
    for path in places::paths(rule, role, seen.none_match) {
        let left = until.saturating_duration_since(Instant::now());
        if has(seen, &path) != Some(false) || left < Duration::from_millis(1) {
            continue;
        }
        let filter = side.filter.clone().filter(|_| !seen.none_match).unwrap_or_default();
        let filter = doc! {"$and": [filter, {path.query(): {"$exists": true}}]};
        if is_any(server, &side.namespace, &filter, left).await? == Some(true) {
            found.push(path);
        }
    }
    Ok(found)
}

/// True if a document matches; None if that is not known within the time limit.
async fn is_any(server: &Server, namespace: &Namespace, filter: &Document, within: Duration) -> Result<Option<bool>> {
    let command = doc! {
        "find": &namespace.collection, "filter": filter.clone(), "projection": {"_id": 1}, "limit": 1,
        "maxTimeMS": millis(within), "collation": simple_collation(),
    };
    match server.read(&namespace.database, command, ClusterTime::default()).await {
        Ok(rows) => Ok(Some(!rows.is_empty())),
        Err(error) if error.leaves_unknown() => Ok(None),
        Err(error) => Err(error),
    }
}

/// The suspected mistakes that the text of a rule alone shows.
#[must_use]
pub fn without_a_server(rule: &Rule) -> Vec<Mistake> {
    let mut found = quotes(rule);
    found.extend(interpolation::suspicions(rule));
    found
}

/// The place of an entry of `match`.
#[must_use]
pub fn pair_place(rule: &Rule, pair: &Pair) -> Mistake {
    Mistake::new(places::pair_at(rule, pair), "").on_key()
}

fn suspicions_of(rule: &Rule, source: &Seen, target: &Seen) -> Vec<Mistake> {
    let mut found = without_a_server(rule);
    found.extend(existence(&rule.source.namespace, source, rule.side_at(Role::Source)));
    if rule.creates.is_none() {
        found.extend(existence(&rule.target.namespace, target, rule.side_at(Role::Target)));
    }
    let reversed = reversed(rule, source, target);
    if reversed.is_empty() {
        found.extend(arrays(rule, source, target));
        let absent = fields(rule, source, target);
        // A text like `$first $last` has been reported as such.
        found.extend(
            absent.iter().filter(|absent| found.iter().all(|known| known.at != absent.at)).cloned().collect::<Vec<_>>(),
        );
        found.extend(types(rule, source, target));
        for (role, seen) in [(Role::Source, source), (Role::Target, target)] {
            let suspected = filters::suspicions(rule, role, seen);
            // A field that no document has was reported at the same place.
            found.extend(
                suspected.into_iter().filter(|one| absent.iter().all(|known| !one.at.0.starts_with(&known.at.0))),
            );
        }
        found.extend(lacking(rule, target));
        found.extend(no_times(rule, target));
    } else {
        found.extend(reversed);
    }
    if let Some(shape) = &source.shape {
        found.extend(constants::suspicions(rule, shape));
    }
    found
}

fn side(rule: &Rule, role: Role) -> &Side {
    match role {
        Role::Source => &rule.source,
        Role::Target => &rule.target,
    }
}

async fn look(server: &Server, side: &Side) -> Result<Seen> {
    let Namespace { database, collection } = &side.namespace;
    let names = server.collections(database).await?;
    let mut seen = Seen::default();
    if !names.contains(collection) {
        let database_absent = names.is_empty();
        let near =
            if database_absent { nearest(database, &server.databases().await) } else { nearest(collection, &names) };
        seen.absent = Some(Absent { database: database_absent, near });
        return Ok(seen);
    }
    let mut documents = draw(server, &side.namespace, side.filter.as_ref()).await?;
    if let Some(filter) = side.filter.as_ref().filter(|_| documents.as_ref().is_some_and(Vec::is_empty)) {
        // Those that match may be too large to be drawn.
        seen.none_match = is_any(server, &side.namespace, filter, TIMEOUT).await? == Some(false);
        documents = if seen.none_match { draw(server, &side.namespace, None).await? } else { None };
    }
    if let Some(documents) = documents.filter(|documents| !documents.is_empty()) {
        let shape = Shape::of(documents.iter().map(|document| (document, 0)));
        seen.cut = shape.is_cut();
        seen.shape = Some(shape);
    }
    Ok(seen)
}

/// Draws a few documents. None if that takes too long, or if the server refuses the filter, which is reported
/// separately.
async fn draw(server: &Server, namespace: &Namespace, filter: Option<&Document>) -> Result<Option<Vec<Document>>> {
    let mut stages: Vec<Document> = filter.map(|filter| doc! {"$match": filter.clone()}).into_iter().collect();
    stages.push(doc! {"$sample": {"size": DRAWN}});
    stages.push(doc! {"$match": {"$expr": {"$lte": [{"$bsonSize": "$$ROOT"}, LARGEST]}}});
    let command = doc! {
        "aggregate": &namespace.collection, "pipeline": stages, "cursor": {}, "maxTimeMS": millis(TIMEOUT),
        "allowDiskUse": true, "collation": simple_collation(),
    };
    match server.read(&namespace.database, command, ClusterTime::default()).await {
        Ok(rows) => Ok(Some(decoded(&rows)?)),
        Err(error) if error.leaves_unknown() => Ok(None),
        Err(error) => Err(error),
    }
}

/// The most similar known name, if it is similar enough.
fn nearest(word: &str, known: &[String]) -> Option<String> {
    let lower = word.to_lowercase();
    let distance = |name: &&String| strsim::damerau_levenshtein(&lower, &name.to_lowercase());
    let near = known.iter().filter(|name| *name != word).min_by_key(distance)?;
    (distance(&near) <= (near.len() / 3).max(1)).then(|| near.clone())
}

fn meant(near: Option<&String>, otherwise: &str) -> String {
    near.map_or_else(|| otherwise.to_owned(), |near| format!("did you mean `{near}`?"))
}

fn existence(namespace: &Namespace, seen: &Seen, at: ConfigPath) -> Option<Mistake> {
    let Absent { database, near } = seen.absent.as_ref()?;
    let (message, otherwise) = if *database {
        (
            format!("the database `{}` of `{namespace}` does not exist", namespace.database),
            "name an existing database, or create the collection first",
        )
    } else {
        (
            format!("the collection `{namespace}` does not exist"),
            "name an existing collection, or create it first: nothing was sampled",
        )
    };
    Some(Mistake::new(at, message).hint(meant(near.as_ref(), otherwise)))
}

/// Typographic quotation marks, which every parser takes for a part of the name.
fn quotes(rule: &Rule) -> Vec<Mistake> {
    let smart = |text: &str| text.contains(['\u{201c}', '\u{201d}', '\u{2018}', '\u{2019}']);
    let plain = |text: &str| text.replace(['\u{201c}', '\u{201d}', '\u{2018}', '\u{2019}'], "");
    let mut found = Vec::new();
    for (place, text, on_key) in places::names(rule) {
        if smart(&text) {
            let mistake =
                Mistake::new(place, format!("`{text}` holds typographic quotation marks, which are part of the name"));
            let mistake = if on_key { mistake.on_key() } else { mistake };
            found.push(mistake.hint(format!("did you mean `{}`? use \" or '", plain(&text))));
        }
    }
    found
}

/// True if any sampled document has a value at a path, also inside arrays; None if that is not known, or if only other
/// documents have one.
fn has(seen: &Seen, path: &FieldPath) -> Option<bool> {
    let shape = seen.shape.as_ref()?;
    let query = path.query();
    let found = shape.fields.iter().any(|field| field.path.query() == query);
    // In a map or a deep document, there may be more fields than were sampled.
    let may_come = seen.cut || query.contains('$') || seen.written.iter().any(|written| written.overlaps(path));
    if found { Some(true) } else { (!may_come && !seen.rare.contains(path)).then_some(false) }
}

/// Pairs in which each path belongs to the other side: `{ _id: customer_id }` for `{ customer_id: _id }`.
fn reversed(rule: &Rule, source: &Seen, target: &Seen) -> Vec<Mistake> {
    let there = |seen: &Seen, path: &FieldPath| has(seen, path) == Some(true);
    let absent = |seen: &Seen, path: &FieldPath| has(seen, path) == Some(false);
    let turned = rule.reference.pairs.iter().filter(|pair| {
        (absent(source, &pair.source) || absent(target, &pair.target))
            && there(target, &pair.source)
            && there(source, &pair.target)
    });
    turned
        .map(|pair| {
            let written = |path: &FieldPath, seen: &Seen| as_met(seen, path).unwrap_or_else(|| path.to_string());
            let (target_path, source_path) = (written(&pair.source, target), written(&pair.target, source));
            let message = format!(
                "`match` looks reversed: `{}` is a field of `{}`, and `{}` one of `{}`",
                pair.source, rule.target.namespace.collection, pair.target, rule.source.namespace.collection
            );
            Mistake::new(places::pair_at(rule, pair), message)
                .on_key()
                .hint(format!("`match` is target path: source path; did you mean `{target_path}: {source_path}`?"))
        })
        .collect()
}

/// The path as the documents have it, with `$[]` at their arrays, if it differs from the given one.
fn as_met(seen: &Seen, path: &FieldPath) -> Option<String> {
    let shape = seen.shape.as_ref()?;
    let (mut met, mut text) = (String::new(), String::new());
    for name in path.names() {
        for part in [&mut met, &mut text] {
            if !part.is_empty() {
                part.push('.');
            }
            part.push_str(name);
        }
        let field = |text: &str| FieldPath::parse(text).ok().and_then(|path| shape.field(&path));
        if field(&met).is_some_and(is_array) {
            met.push_str(".$[]");
        }
    }
    (met != path.to_string()).then_some(met)
}

/// True if the field is mostly an array.
fn is_array(field: &Field) -> bool {
    let arrays = field.types.get("array").copied().unwrap_or_default();
    let nulls = field.types.get("null").copied().unwrap_or_default();
    arrays * 2 > field.met - nulls
}

/// Paths without `$[]` that lead into an array, where the rule would find or write nothing.
fn arrays(rule: &Rule, source: &Seen, target: &Seen) -> Vec<Mistake> {
    let mut found = Vec::new();
    let mut say = |seen: &Seen, path: &FieldPath, side: &Side, place| {
        let Some(met) = as_met(seen, path).filter(|met| met.contains("$[]") && !path.has_each()) else { return };
        let array = met.split(".$[]").next().unwrap_or_default();
        let message = format!("`{array}` is an array in `{}`, and `{path}` has no `$[]`", side.namespace.collection);
        let mistake: Mistake = place;
        found.push(Mistake { message, ..mistake }.hint(format!("did you mean `{met}`? `$[]` stands for each element")));
    };
    for pair in &rule.reference.pairs {
        say(target, &pair.target, &rule.target, Mistake::new(places::pair_at(rule, pair), "").on_key());
        say(source, &pair.source, &rule.source, Mistake::new(places::pair_at(rule, pair), ""));
    }
    for path in rule.owned() {
        // The value at the end of the path is replaced, whatever it is.
        let parent = path.segments().split_last().map(|(_, parents)| parents.to_vec()).unwrap_or_default();
        let inside = parent.iter().scan(String::new(), |text, segment| {
            let Segment::Name(name) = segment else { return Some(text.clone()) };
            *text = if text.is_empty() { name.clone() } else { format!("{text}.{name}") };
            Some(text.clone())
        });
        let through = inside
            .filter_map(|text| FieldPath::parse(&text).ok())
            .any(|path| target.shape.as_ref().and_then(|shape| shape.field(&path)).is_some_and(is_array));
        if through && !path.has_each() {
            say(target, path, &rule.target, rule.written_at(path));
        }
    }
    found
}

/// Fields that no sampled document has.
fn fields(rule: &Rule, source: &Seen, target: &Seen) -> Vec<Mistake> {
    let mut found: Vec<Mistake> = Vec::new();
    for (role, seen) in [(Role::Target, target), (Role::Source, source)] {
        for (place, path) in places::reads(rule, role, seen.none_match) {
            if has(seen, &path) != Some(false) {
                continue;
            }
            let shape = seen.shape.as_ref();
            let documents = shape.map_or(0, |shape| shape.documents);
            let known: Vec<String> = shape
                .map(|shape| shape.fields.iter().map(|field| field.path.to_string()).collect())
                .unwrap_or_default();
            let message = format!(
                "no document of {documents} sampled in `{}` has the field `{path}`",
                side(rule, role).namespace
            );
            let otherwise = "check the name; if the field will be added later, ignore this";
            let hint = meant(nearest(&path.to_string(), &known).as_ref(), otherwise);
            found.push(Mistake { message, ..place }.hint(hint));
        }
    }
    found
}

/// Paths of `$$target` and `$$targetElement` that some sampled targets or elements lack: an expression takes a missing
/// value for less than any other.
fn lacking(rule: &Rule, target: &Seen) -> Vec<Mistake> {
    let (Some(of_target), Some(shape)) = (&rule.of_target, &target.shape) else { return Vec::new() };
    let each = rule.reference.target_each.as_ref();
    let elements = each.and_then(|each| shape.field(each)).map_or(0, |field| field.met);
    let known = |path: &&FieldPath| !target.written.iter().any(|written| written.overlaps_loosely(path));
    let all = of_target.paths.iter().map(|path| (path, "$$target", shape.documents, "targets"));
    let inside = of_target.elements.iter().map(|path| (path, "$$targetElement", elements, "elements"));
    let mut found = Vec::new();
    for (path, variable, of, what) in all.chain(inside).filter(|(path, ..)| known(path)) {
        let here = |field: &&Field| field.path.query() == path.query();
        // Of a path that leads into an array, a document may have many values or none.
        if shape.fields.iter().filter(here).any(|field| field.path.has_each() && !path.has_each()) {
            continue;
        }
        let met: u64 =
            shape.fields.iter().filter(|field| field.path.query() == path.query()).map(|field| field.met).sum();
        if met >= of || target.cut {
            continue;
        }
        let text = path.to_string();
        let name = each.and_then(|each| text.strip_prefix(&format!("{each}."))).unwrap_or(&text);
        let message = format!("{} of {of} sampled {what} lack `{path}`, which `{variable}.{name}` reads", of - met);
        let hint = "a missing value compares as less than any other, and most operators give null for it: { $ifNull: [..., 0] }";
        found.push(Mistake::new(rule.side_at(Role::Target), message).hint(hint));
    }
    found
}

/// Values at the path of `touch` that are no times: they stay as they are.
fn no_times(rule: &Rule, target: &Seen) -> Option<Mistake> {
    let path = rule.touch.as_ref()?;
    let field = target.shape.as_ref()?.field(path)?;
    let others: Vec<&str> =
        field.types.keys().copied().filter(|kind| !matches!(*kind, "date" | "null" | "undefined")).collect();
    let number: u64 = others.iter().filter_map(|kind| field.types.get(kind)).sum();
    let message = format!("`{path}` is {} in {number} of {} sampled targets", others.join(" or "), field.met);
    let hint = "`touch` sets dates, and leaves a value of another type as it is: choose another field";
    (number > 0).then(|| Mistake::new(rule.at().key("touch"), message).hint(hint))
}

/// References whose type no key of the other side has.
fn types(rule: &Rule, source: &Seen, target: &Seen) -> Vec<Mistake> {
    let mut found = Vec::new();
    for pair in &rule.reference.pairs {
        let field = |seen: &'_ Seen, path: &FieldPath| seen.shape.as_ref().and_then(|shape| shape.field(path).cloned());
        let (Some(left), Some(right)) = (field(target, &pair.target), field(source, &pair.source)) else { continue };
        let (mine, theirs) = (kinds(&left), kinds(&right));
        let converted = rule.reference.key_type.map(KeyType::name);
        let can_match = |kind: &str| converted.map_or_else(|| mine.contains(&kind), |converted| converted == kind);
        if mine.is_empty() || theirs.is_empty() || theirs.iter().any(|kind| can_match(kind)) {
            continue;
        }
        if let Some(converted) = converted {
            let message = format!(
                "`key_type: {converted}` converts `{}`, and `{}` is {} in `{}`: values of different types never match",
                pair.target,
                pair.source,
                theirs.join(" or "),
                rule.source.namespace.collection
            );
            let hint =
                "`key_type` holds for every entry of `match`: each must lead to values of this type in the source";
            found.push(Mistake::new(places::pair_at(rule, pair), message).on_key().hint(hint));
            continue;
        }
        let message = format!(
            "`{}` is {} in `{}`, and `{}` is {} in `{}`: values of different types never match",
            pair.target,
            mine.join(" or "),
            rule.target.namespace.collection,
            pair.source,
            theirs.join(" or "),
            rule.source.namespace.collection
        );
        let convertible = |one: &[&str], other: &[&str]| one == ["string"] && other == ["objectId"];
        let hint = if convertible(&mine, &theirs) {
            "did you mean `key_type: objectId`? it reads the strings of 24 hexadecimal digits as ObjectIds"
        } else if convertible(&theirs, &mine) {
            "did you mean `key_type: string`? it reads the ObjectIds as strings of 24 hexadecimal digits"
        } else {
            "store both with one type, or match on another field"
        };
        found.push(Mistake::new(places::pair_at(rule, pair), message).on_key().hint(hint));
    }
    found
}

/// The types that occur, as keys distinguish them: all numbers are one type.
fn kinds(field: &Field) -> Vec<&'static str> {
    let mut kinds: Vec<&'static str> = field
        .types
        .keys()
        .filter(|kind| !matches!(**kind, "null" | "undefined" | "array"))
        .map(|kind| if matches!(*kind, "int" | "long" | "double" | "decimal") { "number" } else { kind })
        .collect();
    kinds.dedup();
    kinds.sort_unstable();
    kinds.dedup();
    kinds
}
