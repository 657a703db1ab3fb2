//! A parsed rule document, with the paths that it reads and writes.

use std::collections::BTreeSet;

use bson::{Bson, Document, doc};

use crate::{
    accumulate, expression,
    path::{Part, Path},
};

/// One rule.
#[derive(Debug, Clone)]
pub struct Rule {
    /// The rule's name.
    pub name: String,
    /// The collection that values come from.
    pub source: Side,
    /// The collection that values are written to.
    pub target: Side,
    /// `match`: target path, source path.
    pub on: Vec<(Path, Path)>,
    /// The longest array prefix among the target paths of `match`.
    pub target_prefix: Vec<Part>,
    /// The same for the source paths.
    pub source_prefix: Vec<Part>,
    /// Source paths; true for descending order.
    pub sort: Vec<(String, bool)>,
    /// The values that the rule writes.
    pub kind: Kind,
    /// `on_missing`
    pub on_missing: OnMissing,
    /// `key_type`
    pub key_type: Option<KeyType>,
    /// `otherwise`
    pub otherwise: Option<Document>,
    /// `once`
    pub once: bool,
    /// `touch`
    pub touch: Option<Path>,
    /// `on_empty: unset`
    pub unset_on_empty: bool,
    /// `recursive`, with `max_depth`
    pub tree: Option<usize>,
    /// `create: true` in the target
    pub creates: bool,
    /// `on_empty: keep`
    pub keeps: bool,
    /// For each entry of `match` the unit of its interval, if it is one.
    pub units: Vec<Option<String>>,
}

/// One side of a rule.
#[derive(Debug, Clone)]
pub struct Side {
    /// The key of [`crate::World`].
    pub collection: String,
    /// The collection's name without a database.
    pub bare: String,
    /// Its database.
    pub database: String,
    /// `where`
    pub filter: Document,
    /// The condition of `where` on `$$element`, on `$$target` or on both.
    pub rows: Option<Bson>,
}

/// The values that a rule writes.
#[derive(Debug, Clone)]
pub enum Kind {
    /// `copy` with `set`.
    Set(Vec<(Path, Bson)>),
    /// `copy` with `into` and `element`.
    Into(Path, Bson),
    /// `collect`
    Collect(Path, Bson, Option<i64>),
    /// `aggregate`
    Aggregate(Vec<(Path, Accumulated)>),
    /// `aggregate` with `by`
    Groups(Groups),
}

/// The groups of `aggregate` with `by`.
#[derive(Debug, Clone)]
pub struct Groups {
    /// `into`
    pub into: Path,
    /// `by`: names with expressions.
    pub by: Vec<(String, Bson)>,
    /// `set`: names with values.
    pub fields: Vec<(String, Accumulated)>,
    /// Names of fields; true for descending order.
    pub sort: Vec<(String, bool)>,
    /// `slice`
    pub slice: Option<i64>,
    /// `as: object`
    pub object: bool,
}

/// A value of `aggregate`.
#[derive(Debug, Clone)]
pub enum Accumulated {
    /// An accumulator.
    Plain(Accumulator),
    /// An expression over the accumulators of `let`, by their names.
    Over(Vec<(String, Accumulator)>, Bson),
}

/// An accumulator and its operand.
#[derive(Debug, Clone)]
pub struct Accumulator {
    /// `$sum`, …
    pub operator: String,
    /// An expression over a source.
    pub operand: Bson,
}

impl Accumulator {
    fn parse(value: &Bson) -> Result<Self, String> {
        match value.as_document().and_then(|value| value.iter().next()) {
            Some((operator, operand)) if accumulate::KNOWN.contains(&operator.as_str()) => {
                Ok(Self { operator: operator.clone(), operand: operand.clone() })
            }
            other => Err(format!("accumulator {other:?}")),
        }
    }
}

impl Accumulated {
    /// The operands of all its accumulators.
    fn operands(&self) -> Vec<&Bson> {
        match self {
            Self::Plain(accumulator) => vec![&accumulator.operand],
            Self::Over(variables, _) => variables.iter().map(|(_, accumulator)| &accumulator.operand).collect(),
        }
    }
}

/// `on_missing`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnMissing {
    /// Owned paths are unset.
    Unset,
    /// Owned paths become null.
    Null,
    /// Owned paths keep their values.
    Keep,
    /// The array element is pulled.
    Remove,
    /// The target is deleted.
    Delete,
}

/// `key_type`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyType {
    /// `objectId`
    ObjectId,
    /// `string`
    String,
}

impl Rule {
    /// Parses an entry of `rules:`; `database` is the database of bare collection names.
    pub fn parse(entry: &Document, database: &str) -> Result<Self, String> {
        let name = entry.get_str("name").map_err(|error| error.to_string())?.to_owned();
        let body = |kind| entry.get_document(kind).ok();
        let fail = |why: &str| format!("rule {name}: {why}");
        let (kind, body) = [("copy", body("copy")), ("collect", body("collect")), ("aggregate", body("aggregate"))]
            .into_iter()
            .find_map(|(kind, body)| Some((kind, body?)))
            .ok_or_else(|| fail("copy, collect or aggregate"))?;

        let on: Vec<(Path, Path)> = body
            .get_document("match")
            .map_err(|error| fail(&error.to_string()))?
            .iter()
            .map(|(target, source)| {
                let (source, _) = interval(source).ok_or_else(|| fail("a source path is a string"))?;
                Ok((Path::parse(target), Path::parse(&source)))
            })
            .collect::<Result<_, String>>()?;
        let entries = body.get_document("match").into_iter().flat_map(Document::values);
        let units = entries.map(|entry| interval(entry).and_then(|(_, unit)| unit)).collect();
        let target_prefix = prefix(on.iter().map(|(target, _)| target)).map_err(|why| fail(&why))?;
        let source_prefix = prefix(on.iter().map(|(_, source)| source)).map_err(|why| fail(&why))?;
        let set = || -> Result<Vec<(Path, Bson)>, String> {
            let set = body.get_document("set").map_err(|error| fail(&error.to_string()))?;
            Ok(set.iter().map(|(path, value)| (Path::parse(path), value.clone())).collect())
        };
        let sorted = || -> Vec<(String, bool)> {
            body.get_document("sort")
                .map(|sort| {
                    sort.iter().map(|(path, way)| (path.clone(), whole(way).is_some_and(|way| way < 0))).collect()
                })
                .unwrap_or_default()
        };
        let into = || body.get_str("into").map(Path::parse).map_err(|error| fail(&error.to_string()));
        let element = || body.get("element").cloned().ok_or_else(|| fail("element"));
        let kind = match kind {
            "copy" if body.contains_key("into") => Kind::Into(into()?, element()?),
            "copy" => Kind::Set(set()?),
            "collect" => Kind::Collect(into()?, element()?, body.get("slice").and_then(whole)),
            _ => {
                let variables = body.get_document("let").cloned().unwrap_or_default();
                let variables: Vec<(String, Accumulator)> = variables
                    .iter()
                    .map(|(name, value)| Ok((name.clone(), Accumulator::parse(value)?)))
                    .collect::<Result<_, String>>()
                    .map_err(|why| fail(&why))?;
                let accumulated = |(path, value): (Path, Bson)| {
                    let text = value.to_string();
                    let over = variables.iter().any(|(name, _)| text.contains(&format!("$${name}")));
                    let value = if over {
                        Accumulated::Over(variables.clone(), value)
                    } else {
                        Accumulated::Plain(Accumulator::parse(&value).map_err(|why| fail(&why))?)
                    };
                    Ok((path, value))
                };
                let set: Vec<(Path, Accumulated)> =
                    set()?.into_iter().map(accumulated).collect::<Result<_, String>>()?;
                match body.get_document("by") {
                    Err(_) => Kind::Aggregate(set),
                    Ok(by) => Kind::Groups(Groups {
                        into: into()?,
                        by: by.clone().into_iter().collect(),
                        fields: set.into_iter().map(|(path, value)| (path.to_string(), value)).collect(),
                        sort: sorted(),
                        slice: body.get("slice").and_then(whole),
                        object: body.get_str("as").is_ok_and(|form| form == "object"),
                    }),
                }
            }
        };
        // The order of groups is not the order of their sources.
        let sort = if matches!(kind, Kind::Groups(_)) { Vec::new() } else { sorted() };
        let on_missing = match body.get_str("on_missing").unwrap_or("unset") {
            "unset" => OnMissing::Unset,
            "null" => OnMissing::Null,
            "keep" => OnMissing::Keep,
            "remove" => OnMissing::Remove,
            "delete" => OnMissing::Delete,
            other => return Err(fail(other)),
        };
        let key_type = match body.get_str("key_type").ok() {
            None => None,
            Some("objectId") => Some(KeyType::ObjectId),
            Some("string") => Some(KeyType::String),
            Some(other) => return Err(fail(other)),
        };
        let rule = Self {
            source: Side::parse(body.get("source"), database).map_err(|why| fail(&why))?,
            target: Side::parse(body.get("target"), database).map_err(|why| fail(&why))?,
            on,
            target_prefix,
            source_prefix,
            sort,
            kind,
            on_missing,
            key_type,
            otherwise: body.get_document("otherwise").ok().cloned(),
            once: body.get_bool("once").unwrap_or(false),
            touch: body.get_str("touch").ok().map(Path::parse),
            unset_on_empty: body.get_str("on_empty").is_ok_and(|value| value == "unset"),
            tree: body.get_bool("recursive").unwrap_or(false).then(|| {
                let most = body.get("max_depth").and_then(whole).and_then(|most| usize::try_from(most).ok());
                most.unwrap_or(64)
            }),
            creates: body.get_document("target").is_ok_and(|target| target.get_bool("create").unwrap_or(false)),
            keeps: body.get_str("on_empty").is_ok_and(|value| value == "keep"),
            units,
            name,
        };
        rule.check().map_err(|why| format!("rule {}: {why}", rule.name))?;
        Ok(rule)
    }

    fn check(&self) -> Result<(), String> {
        for path in self.owned() {
            let prefix = &path.0[..path.prefix_len()];
            if !self.target_prefix.starts_with(prefix) {
                return Err(format!("{path} is in another array than the match"));
            }
        }
        if let Kind::Into(into, _) = &self.kind
            && into.prefix_len() >= self.target_prefix.len()
        {
            return Err(format!("{into} wants a match with one more $[]"));
        }
        match self.on_missing {
            OnMissing::Remove if self.target_prefix.is_empty() => Err("remove wants a $[] in the match".to_owned()),
            OnMissing::Delete if !self.target_prefix.is_empty() => Err("delete wants a scalar reference".to_owned()),
            _ => Ok(()),
        }
    }

    /// The paths this rule owns in its target.
    #[must_use]
    pub fn owned(&self) -> Vec<Path> {
        match &self.kind {
            Kind::Set(set) => set.iter().map(|(path, _)| path.clone()).collect(),
            Kind::Into(path, _) | Kind::Collect(path, ..) => vec![path.clone()],
            Kind::Aggregate(set) => set.iter().map(|(path, ..)| path.clone()).collect(),
            Kind::Groups(groups) => vec![groups.into.clone()],
        }
    }

    /// True if a source document decides which targets it belongs to.
    #[must_use]
    pub fn source_held(&self) -> bool {
        !self.source_prefix.is_empty()
    }

    /// True if the rule needs pre-images of its source collection.
    #[must_use]
    pub fn wants_pre_images(&self) -> bool {
        let by_id = self.on.iter().all(|(_, source)| source.names() == ["_id"]);
        match &self.kind {
            Kind::Aggregate(_) | Kind::Groups(_) => true,
            Kind::Collect(_, element, _) => self.source_held() || !holds_id(element),
            Kind::Set(_) | Kind::Into(..) => !by_id,
        }
    }

    /// The indexes that its lookups need: (collection, keys).
    #[must_use]
    pub fn indexes(&self) -> Vec<(String, Document)> {
        let keys = |paths: Vec<&Path>| -> Document {
            paths.into_iter().map(|path| (path.names().join("."), Bson::Int32(1))).collect()
        };
        let mut source = keys(self.on.iter().map(|(_, source)| source).collect());
        if !source.contains_key("_id") {
            for (path, descends) in &self.sort {
                source.entry(path).or_insert(Bson::Int32(if *descends { -1 } else { 1 }));
            }
            source.entry("_id").or_insert(Bson::Int32(1));
        }
        // A document that the rule creates is found by its whole `_id`.
        let target = if self.creates {
            doc! {"_id": 1}
        } else {
            keys(self.on.iter().map(|(target, _)| target).collect())
        };
        [(self.source.collection.clone(), source), (self.target.collection.clone(), target)]
            .into_iter()
            .filter(|(_, keys)| keys.keys().next().is_some_and(|first| first != "_id"))
            .collect()
    }

    /// Every expression of the rule.
    fn expressions(&self) -> Vec<&Bson> {
        fn of<'a>(value: &'a Accumulated, all: &mut Vec<&'a Bson>) {
            all.extend(value.operands());
            if let Accumulated::Over(_, expression) = value {
                all.push(expression);
            }
        }
        let mut all: Vec<&Bson> = self.source.rows.iter().collect();
        match &self.kind {
            Kind::Set(set) => all.extend(set.iter().map(|(_, value)| value)),
            Kind::Into(_, element) | Kind::Collect(_, element, _) => all.push(element),
            Kind::Aggregate(set) => set.iter().for_each(|(_, value)| of(value, &mut all)),
            Kind::Groups(groups) => {
                all.extend(groups.by.iter().map(|(_, value)| value));
                groups.fields.iter().for_each(|(_, value)| of(value, &mut all));
            }
        }
        all.extend(self.otherwise.iter().flat_map(Document::values));
        all
    }

    /// The (collection, path) pairs that determine the rule's writes.
    pub(crate) fn reads(&self) -> Vec<(&str, String)> {
        let mut source = Vec::new();
        match &self.kind {
            Kind::Set(set) => set.iter().for_each(|(_, value)| expression::reads(value, &mut source)),
            Kind::Into(_, element) | Kind::Collect(_, element, _) => expression::reads(element, &mut source),
            Kind::Aggregate(set) => {
                let operands = set.iter().flat_map(|(_, value)| value.operands());
                operands.for_each(|operand| expression::reads(operand, &mut source));
            }
            Kind::Groups(groups) => {
                let operands = groups.fields.iter().flat_map(|(_, value)| value.operands());
                let by = groups.by.iter().map(|(_, value)| value);
                operands.chain(by).for_each(|operand| expression::reads(operand, &mut source));
            }
        }
        source.extend(self.sort.iter().map(|(path, _)| path.clone()));
        source.extend(self.source.filter.keys().cloned());
        source.extend(self.on.iter().map(|(_, path)| path.names().join(".")));
        if matches!(&self.kind, Kind::Set(_) | Kind::Into(..)) && uses_element(&self.kind) {
            let names = Path(self.source_prefix.clone());
            source.push(names.names().join("."));
        }
        if let Some(condition) = &self.source.rows {
            expression::reads(condition, &mut source);
        }
        let mut target: Vec<String> = self.target.filter.keys().cloned().collect();
        self.expressions().into_iter().for_each(|value| expression::reads_of("target", value, &mut target));
        if !self.creates {
            target.extend(self.on.iter().map(|(path, _)| path.names().join(".")));
        }
        source
            .into_iter()
            .map(|path| (self.source.collection.as_str(), path))
            .chain(target.into_iter().map(|path| (self.target.collection.as_str(), path)))
            .collect()
    }

    /// (collection, path) pairs that the rule writes.
    pub(crate) fn writes(&self) -> Vec<(&str, String)> {
        let mut paths: Vec<String> = self.owned().iter().map(|path| path.names().join(".")).collect();
        if self.on_missing == OnMissing::Delete {
            paths.push(String::new());
        }
        if self.creates {
            paths.push("_id".to_owned());
        }
        paths.into_iter().map(|path| (self.target.collection.as_str(), path)).collect()
    }
}

/// The source path of an entry of `match`, and the unit of its interval: `{ $dateTrunc: { date: $at, unit: day } }`.
fn interval(entry: &Bson) -> Option<(String, Option<String>)> {
    if let Bson::String(path) = entry {
        return Some((path.clone(), None));
    }
    let arguments = entry.as_document()?.get_document("$dateTrunc").ok()?;
    let known = arguments.keys().all(|name| name == "date" || name == "unit");
    let path = arguments.get_str("date").ok()?.strip_prefix('$')?;
    known.then(|| Some((path.to_owned(), Some(arguments.get_str("unit").ok()?.to_owned()))))?
}

impl Side {
    fn parse(side: Option<&Bson>, database: &str) -> Result<Self, String> {
        let (collection, filter) = match side {
            Some(Bson::String(collection)) => (collection.clone(), doc! {}),
            Some(Bson::Document(side)) => (
                side.get_str("collection").map_err(|error| error.to_string())?.to_owned(),
                side.get_document("where").cloned().unwrap_or_default(),
            ),
            other => return Err(format!("source or target: {other:?}")),
        };
        let mut filter = filter;
        let on_rows = filter.get("$expr").is_some_and(|condition| {
            let text = condition.to_string();
            text.contains("$$element") || text.contains("$$target")
        });
        let rows = filter.remove("$expr").filter(|_| on_rows);
        let (database, bare) = collection.split_once('.').unwrap_or((database, &collection));
        Ok(Self { database: database.to_owned(), bare: bare.to_owned(), filter, rows, collection })
    }
}

/// The collections that need `changeStreamPreAndPostImages`.
pub fn pre_images(rules: &[Rule]) -> BTreeSet<String> {
    rules.iter().filter(|rule| rule.wants_pre_images()).map(|rule| rule.source.collection.clone()).collect()
}

/// The rules in an order in which each follows the rules whose writes it reads.
pub(crate) fn in_dependency_order(rules: &[Rule]) -> Result<Vec<&Rule>, String> {
    let overlap = |a: &str, b: &str| {
        let (shorter, longer) = if a.len() <= b.len() { (a, b) } else { (b, a) };
        shorter.is_empty()
            || longer == shorter
            || longer.strip_prefix(shorter).is_some_and(|rest| rest.starts_with('.'))
    };
    let after = |later: &Rule, earlier: &Rule| {
        earlier.writes().iter().any(|(collection, path)| {
            later.reads().iter().any(|(read_in, read)| {
                // A deleted document in a rule's own target collection is not an input.
                (read_in == collection)
                    // A recursive rule reads what it writes.
                    && !(later.tree.is_some() && later.name == earlier.name)
                    && !(path.is_empty() && *collection == later.target.collection)
                    && overlap(path, read)
            })
        })
    };
    let mut left: Vec<&Rule> = rules.iter().collect();
    let mut ordered = Vec::new();
    while !left.is_empty() {
        let free = left.iter().position(|rule| !left.iter().any(|earlier| after(rule, earlier)));
        let free = free.ok_or_else(|| format!("a cycle through {}", left[0].name))?;
        ordered.push(left.remove(free));
    }
    Ok(ordered)
}

/// The array prefix that all paths with `$[]` share.
fn prefix<'a>(paths: impl Iterator<Item = &'a Path>) -> Result<Vec<Part>, String> {
    let mut found: Vec<Part> = Vec::new();
    for path in paths {
        let prefix = &path.0[..path.prefix_len()];
        if found.is_empty() {
            found = prefix.to_vec();
        } else if !prefix.is_empty() && prefix != found {
            return Err(format!("{path} is in another array than the rest of the match"));
        }
    }
    Ok(found)
}

fn holds_id(element: &Bson) -> bool {
    let is_id = |value: &Bson| value.as_str() == Some("$_id");
    is_id(element) || element.as_document().is_some_and(|element| element.values().any(is_id))
}

fn uses_element(kind: &Kind) -> bool {
    fn within(value: &Bson) -> bool {
        match value {
            Bson::String(text) => text.starts_with("$$element"),
            Bson::Array(elements) => elements.iter().any(within),
            Bson::Document(document) => document.values().any(within),
            _ => false,
        }
    }
    match kind {
        Kind::Set(set) => set.iter().any(|(_, value)| within(value)),
        Kind::Into(_, element) | Kind::Collect(_, element, _) => within(element),
        Kind::Aggregate(set) => set.iter().flat_map(|(_, value)| value.operands()).any(within),
        Kind::Groups(groups) => groups.by.iter().any(|(_, value)| within(value)),
    }
}

fn whole(value: &Bson) -> Option<i64> {
    match value {
        Bson::Int32(number) => Some(i64::from(*number)),
        Bson::Int64(number) => Some(*number),
        #[allow(clippy::cast_possible_truncation)]
        Bson::Double(number) => Some(*number as i64),
        _ => None,
    }
}
