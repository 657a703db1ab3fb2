//! Aggregation expressions and query filters: the paths that they read, and the reasons to refuse them.
//!
//! They run on the server, so nothing is evaluated here. Refused are operators whose result does not depend on the
//! documents alone, operators that run code, and operators that the server does not know (better now, with the line,
//! than at the first read).

use bson::{Bson, Document};

use crate::config::literal::WRAPPERS;
use denormd_model::field_path::FieldPath;

/// The paths that an expression or a filter depends on.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Reads {
    /// Every path: `$$ROOT` and the like.
    Everything,
    /// These paths.
    Paths(Vec<FieldPath>),
    /// No path.
    #[default]
    Nothing,
}

impl Reads {
    /// Adds one path.
    pub fn add(&mut self, path: FieldPath) {
        match self {
            Self::Everything => {}
            Self::Paths(paths) if paths.contains(&path) => {}
            Self::Paths(paths) => paths.push(path),
            Self::Nothing => *self = Self::Paths(vec![path]),
        }
    }

    /// Adds a path by its text; a text that is not a plain path (with an array index, for example) counts as everything
    /// below its root.
    pub fn add_text(&mut self, text: &str) {
        let plain: Vec<&str> = text.split('.').take_while(|part| !part.bytes().all(|b| b.is_ascii_digit())).collect();
        match FieldPath::parse(&plain.join(".")) {
            Ok(path) => self.add(path),
            Err(_) => *self = Self::Everything,
        }
    }

    /// Adds all paths of `other`.
    pub fn extend(&mut self, other: Self) {
        match other {
            Self::Everything => *self = Self::Everything,
            Self::Paths(paths) => paths.into_iter().for_each(|path| self.add(path)),
            Self::Nothing => {}
        }
    }

    /// True if an update that changed these dotted paths may affect the result.
    #[must_use]
    pub fn touched_by(&self, changed: &[String]) -> bool {
        match self {
            Self::Everything => true,
            Self::Paths(paths) => changed.iter().any(|changed| paths.iter().any(|path| path.touched_by(changed))),
            Self::Nothing => false,
        }
    }

    /// True if a write to `owned` may affect the result. Ignores `$[]`: an expression looks into arrays implicitly.
    #[must_use]
    pub fn overlap(&self, owned: &FieldPath) -> bool {
        match self {
            Self::Everything => true,
            Self::Paths(paths) => paths.iter().any(|path| path.overlaps_loosely(owned)),
            Self::Nothing => false,
        }
    }
}

/// Reason to refuse an expression, with a suggested correction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Description of the problem.
    pub message: String,
    /// Suggested replacement.
    pub hint: Option<String>,
}

impl Refusal {
    fn new(message: impl Into<String>, hint: &str) -> Self {
        Self { message: message.into(), hint: (!hint.is_empty()).then(|| hint.to_owned()) }
    }
}

/// The meaning of the variables that the daemon binds.
#[derive(Debug, Clone, Copy, Default)]
pub struct Variables<'a> {
    /// `$$element` is an element of this array of the source.
    pub element: Option<&'a FieldPath>,
    /// `$$targetElement` is an element of this array of the target.
    pub target_element: Option<&'a FieldPath>,
    /// `$$target` is the target.
    pub target: bool,
    /// Those of the rule's `let` are known here.
    pub of_let: bool,
}

/// The paths that an expression depends on, by the document that has them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Dependencies {
    /// Paths of the source.
    pub source: Reads,
    /// Paths of the target.
    pub target: OfTarget,
    /// True if the daemon's `$$element` is read, and not a variable of that name that the expression binds itself.
    pub element: bool,
}

/// The paths of a target that values are computed from.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct OfTarget {
    /// Paths of `$$target`.
    pub paths: Vec<FieldPath>,
    /// Paths of `$$targetElement`, each from the document's root: `lines.$[].qty`.
    pub elements: Vec<FieldPath>,
}

impl OfTarget {
    /// True if no path is read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.paths.is_empty() && self.elements.is_empty()
    }

    /// All paths.
    pub fn all(&self) -> impl Iterator<Item = &FieldPath> {
        self.paths.iter().chain(&self.elements)
    }

    /// Adds the paths of `other`.
    pub fn extend(&mut self, other: Self) {
        for (mine, theirs) in [(&mut self.paths, other.paths), (&mut self.elements, other.elements)] {
            for path in theirs {
                if !mine.contains(&path) {
                    mine.push(path);
                }
            }
        }
    }
}

/// Reads an expression: returns the paths that it depends on.
pub fn expression(value: &Bson, variables: Variables<'_>) -> Result<Dependencies, Refusal> {
    let mut walk = Walk::new(variables);
    walk.expression(value)?;
    Ok(walk.found)
}

/// Reads a `$group` accumulator such as `{ $sum: 1 }`.
pub fn accumulator(value: &Bson, variables: Variables<'_>) -> Result<Dependencies, Refusal> {
    let form = "an accumulator is written { $sum: 1 } or { $avg: $rating }";
    let Some((name, argument)) = value.as_document().filter(|doc| doc.len() == 1).and_then(|doc| doc.iter().next())
    else {
        return Err(Refusal::new("this is not a `$group` accumulator", form));
    };
    if name == "$accumulator" {
        return Err(code("$accumulator"));
    }
    if !ACCUMULATORS.contains(&name.as_str()) {
        return Err(unknown(name, "accumulator", ACCUMULATORS, form));
    }
    if name == "$count" && argument.as_document().is_none_or(|argument| !argument.is_empty()) {
        return Err(Refusal::new("`$count` takes no argument", "write { $count: {} }, or { $sum: 1 }"));
    }
    let mut walk = Walk::new(variables);
    walk.arguments(name, argument)?;
    Ok(walk.found)
}

/// Reads a value of an aggregate's `set`: an accumulator, or an expression over the variables of `let`, which have these
/// names.
pub fn accumulated(value: &Bson, names: &[&str], variables: Variables<'_>) -> Result<Dependencies, Refusal> {
    let variables = Variables { of_let: true, ..variables };
    if names.iter().any(|name| mentions(value, name)) {
        return over_variables(value, names, variables);
    }
    let is_expression = match value {
        Bson::String(text) => text.starts_with("$$"),
        Bson::Document(doc) => doc.keys().any(|name| {
            OPERATORS.contains(&name.as_str()) && !ACCUMULATORS.contains(&name.as_str()) && name != "$accumulator"
        }),
        _ => false,
    };
    let refusal = || over_variables(value, names, variables).err();
    accumulator(value, variables).map_err(|other| is_expression.then(refusal).flatten().unwrap_or(other))
}

/// Reads an expression over the variables of `let`, which cannot read a source document.
fn over_variables(value: &Bson, names: &[&str], variables: Variables<'_>) -> Result<Dependencies, Refusal> {
    let mut walk = Walk::new(variables);
    walk.scope = names.iter().map(|name| (*name).to_owned()).collect();
    walk.expression(value)?;
    let found = walk.found;
    if found.source != Reads::Nothing {
        return Err(Refusal::new(
            "this expression reads a source field, but a target has many sources",
            "accumulate them under names in `let`, and write the expression over these: let: { n: { $sum: $x } }, then $$n",
        ));
    }
    Ok(found)
}

/// True if an expression contains `$$name`.
#[must_use]
pub fn mentions(value: &Bson, name: &str) -> bool {
    match value {
        Bson::String(text) => text.strip_prefix("$$").is_some_and(|text| text.split('.').next() == Some(name)),
        Bson::Array(items) => items.iter().any(|item| mentions(item, name)),
        Bson::Document(doc) => doc.iter().any(|(operator, value)| operator != "$literal" && mentions(value, name)),
        _ => false,
    }
}

/// Reads a query document.
pub fn filter(query: &Document) -> Result<Reads, Refusal> {
    let mut reads = Reads::default();
    read_filter(query, &mut reads)?;
    Ok(reads)
}

fn read_filter(query: &Document, reads: &mut Reads) -> Result<(), Refusal> {
    for (name, value) in query {
        match name.as_str() {
            "$and" | "$or" | "$nor" => {
                for clause in value.as_array().map(Vec::as_slice).unwrap_or_default() {
                    let clause = clause
                        .as_document()
                        .ok_or_else(|| Refusal::new(format!("`{name}` takes an array of filters"), ""))?;
                    read_filter(clause, reads)?;
                }
            }
            "$expr" => reads.extend(expression(value, Variables::default())?.source),
            "$comment" => {}
            "$where" => return Err(code("$where")),
            "$jsonSchema" => *reads = Reads::Everything,
            _ if name.starts_with('$') => {
                return Err(Refusal::new(
                    format!("`{name}` cannot be used in `where`"),
                    "use a plain query document, { status: published }",
                ));
            }
            path => {
                queried(path)?;
                reads.add_text(path);
                inside_filter(value)?;
            }
        }
    }
    Ok(())
}

/// Refuses a path that a query document would take for the name of a field.
fn queried(path: &str) -> Result<(), Refusal> {
    if !path.split('.').any(|part| part == "$" || part.ends_with("[]")) {
        return Ok(());
    }
    let names = path.split('.').map(|part| part.trim_end_matches("[]").trim_end_matches('$'));
    let plain = names.filter(|name| !name.is_empty()).collect::<Vec<_>>().join(".");
    let hint = format!(
        "a query looks into arrays by itself: write `{plain}`, or use `$elemMatch` for several fields of one element"
    );
    Err(Refusal::new(format!("`{path}` cannot be a path in `where`"), &hint))
}

/// The variables that an expression may use.
const VARIABLES: [&str; 6] = ["$$target", "$$targetElement", "$$element", "$$ROOT", "$$CURRENT", "$$NOW"];

fn inside_filter(value: &Bson) -> Result<(), Refusal> {
    let doc = match value {
        Bson::Document(doc) => doc,
        Bson::Array(items) => return items.iter().try_for_each(inside_filter),
        // The server would compare with the text.
        Bson::String(text) if VARIABLES.contains(&text.split('.').next().unwrap_or_default()) => {
            return Err(Refusal::new(
                format!("`{text}` is an expression, and `where` would compare with it as text"),
                &format!("compare by $expr: where: {{ $expr: {{ $gt: [$field, {text}] }} }}"),
            ));
        }
        _ => return Ok(()),
    };
    for (name, value) in doc {
        if !name.starts_with('$') {
            queried(name)?;
        }
        // The server would compare with the document.
        if let Some(refusal) = malformed(name) {
            return Err(refusal);
        }
        if matches!(name.as_str(), "$where" | "$function") {
            return Err(code(name));
        }
        if matches!(name.as_str(), "$near" | "$nearSphere" | "$text") {
            return Err(Refusal::new(format!("`{name}` cannot be used in `where`"), ""));
        }
        inside_filter(value)?;
    }
    Ok(())
}

/// Refuses a `$cond` that lacks one of its parts.
fn condition(argument: &Bson) -> Result<(), Refusal> {
    let missing = match argument {
        Bson::Array(parts) if parts.len() == 3 => return Ok(()),
        Bson::Array(parts) => format!("`$cond` takes three values, this one has {}", parts.len()),
        Bson::Document(parts) => match ["if", "then", "else"].iter().find(|part| !parts.contains_key(**part)) {
            None => return Ok(()),
            Some(part) => format!("`$cond` has no `{part}`"),
        },
        _ => "`$cond` takes three values".to_owned(),
    };
    Err(Refusal::new(
        missing,
        "write { $cond: { if: …, then: …, else: … } }, or { $cond: [if, then, else] }; `else: null` for none",
    ))
}

fn code(name: &str) -> Refusal {
    Refusal::new(format!("`{name}` runs code on the server and is refused"), "express it with aggregation operators")
}

/// Refuses a value that is written like a literal of Extended JSON, and is none.
fn malformed(name: &str) -> Option<Refusal> {
    let hint = match name {
        "$date" => "write { $date: \"2024-01-01T00:00:00Z\" }, with the time and the time zone",
        "$oid" => "write { $oid: \"…\" } with 24 hexadecimal digits",
        "$numberInt" | "$numberLong" | "$numberDouble" | "$numberDecimal" => {
            "write the number as text: { $numberLong: \"1\" }"
        }
        _ if WRAPPERS.contains(&name) => "write it as MongoDB Extended JSON v2 (canonical)",
        _ => return None,
    };
    Some(Refusal::new(format!("`{name}` does not hold a valid Extended JSON value"), hint))
}

fn unknown(name: &str, what: &str, known: &[&str], fallback: &str) -> Refusal {
    let near = known
        .iter()
        .map(|known| (strsim::damerau_levenshtein(known, name), known))
        .filter(|(distance, _)| *distance <= 2)
        .min();
    let hint = near.map_or_else(|| fallback.to_owned(), |(_, known)| format!("did you mean `{known}`?"));
    Refusal::new(format!("unknown {what} `{name}`"), &hint)
}

/// The path of a variable up to the first array index; None if nothing is left.
fn plain(text: &str) -> Result<Option<FieldPath>, Refusal> {
    if text.contains("$[]") {
        return Err(Refusal::new(
            format!("`{text}`: `$[]` has no meaning in an expression"),
            "an expression looks into arrays by itself; $$targetElement is the target's matched element",
        ));
    }
    let plain: Vec<&str> = text.split('.').take_while(|part| !part.bytes().all(|b| b.is_ascii_digit())).collect();
    if plain.is_empty() {
        return Ok(None);
    }
    let path = FieldPath::parse(&plain.join("."));
    path.map(Some).map_err(|error| Refusal::new(format!("`{text}` is not a path: {error}"), ""))
}

struct Walk<'a> {
    variables: Variables<'a>,
    scope: Vec<String>,
    found: Dependencies,
}

impl<'a> Walk<'a> {
    fn new(variables: Variables<'a>) -> Self {
        Self { variables, scope: Vec::new(), found: Dependencies::default() }
    }

    fn expression(&mut self, value: &Bson) -> Result<(), Refusal> {
        match value {
            Bson::String(text) => self.text(text),
            Bson::Array(items) => items.iter().try_for_each(|item| self.expression(item)),
            Bson::Document(doc) => self.document(doc),
            _ => Ok(()),
        }
    }

    fn text(&mut self, text: &str) -> Result<(), Refusal> {
        if let Some(variable) = text.strip_prefix("$$") {
            return self.variable(variable);
        }
        let Some(path) = text.strip_prefix('$') else { return Ok(()) };
        if path.contains("$[]") {
            return Err(Refusal::new(
                format!("`{text}`: `$[]` has no meaning in an expression"),
                "an expression looks into arrays by itself; $$element is the matched element of a source-held reference",
            ));
        }
        if path.is_empty() || path.split('.').any(str::is_empty) {
            return Err(Refusal::new(
                format!("`{text}` is not a field path"),
                "write $name or $address.city, or { $literal: \"$\" }",
            ));
        }
        self.found.source.add_text(path);
        Ok(())
    }

    fn variable(&mut self, text: &str) -> Result<(), Refusal> {
        let (name, path) = text.split_once('.').unwrap_or((text, ""));
        match name {
            "ROOT" | "CURRENT" if path.is_empty() => self.found.source = Reads::Everything,
            "ROOT" | "CURRENT" => self.found.source.add_text(path),
            "REMOVE" | "DESCEND" | "PRUNE" | "KEEP" => {}
            "NOW" | "CLUSTER_TIME" => {
                return Err(Refusal::new(
                    format!("`$${name}` is refused: a copied value is a function of the data alone"),
                    "store the time in the source document when it is written",
                ));
            }
            _ if self.scope.iter().any(|bound| bound == name) => {}
            "target" => self.of_target(path)?,
            "targetElement" => self.of_target_element(path)?,
            "element" => match self.variables.element {
                Some(each) => {
                    self.found.source.add(each.clone());
                    self.found.element = true;
                }
                None => {
                    return Err(Refusal::new(
                        "`$$element` is the source's matched element, and this rule's source holds no array of references",
                        "it needs a match such as { _id: \"cast.$[].film\" }",
                    ));
                }
            },
            _ => {
                let fallback = if self.variables.of_let {
                    format!("define it in the rule's `let`: {{ {name}: {{ $sum: $price }} }}")
                } else {
                    "$$target, $$targetElement and $$element are known, and others are bound by $let, $map, $filter and $reduce; a field of the source is written without a variable: $name".to_owned()
                };
                let own = ["target", "targetElement", "element"].map(str::to_owned);
                let bound: Vec<String> = self.scope.iter().chain(&own).map(|name| format!("$${name}")).collect();
                let bound: Vec<&str> = bound.iter().map(String::as_str).collect();
                return Err(unknown(&format!("$${name}"), "variable", &bound, &fallback));
            }
        }
        Ok(())
    }

    fn of_target(&mut self, path: &str) -> Result<(), Refusal> {
        if !self.variables.target {
            return Err(Refusal::new(
                "`$$target` is not known here",
                "it is known in `set`, `element`, `by`, `let`, `otherwise`, and in the `$expr` at the top of the source's `where`",
            ));
        }
        let Some(path) = plain(path)? else {
            return Err(Refusal::new(
                "`$$target` alone reads the whole target, and with it what the rule writes",
                "name the path: $$target.last_seen",
            ));
        };
        self.found.target.extend(OfTarget { paths: vec![path], elements: Vec::new() });
        Ok(())
    }

    fn of_target_element(&mut self, path: &str) -> Result<(), Refusal> {
        let Some(each) = self.variables.target_element.filter(|_| self.variables.target) else {
            return Err(Refusal::new(
                "`$$targetElement` is the target's matched element, and `match` binds no array of the target",
                "it needs a match such as { \"lines.$[].item\": _id }; $$target.path reads a path of the target",
            ));
        };
        let below = plain(path)?.map(|path| FieldPath::parse(&format!("{each}.{path}")));
        let path = below.and_then(Result::ok).unwrap_or_else(|| each.clone());
        self.found.target.extend(OfTarget { paths: Vec::new(), elements: vec![path] });
        Ok(())
    }

    fn document(&mut self, doc: &Document) -> Result<(), Refusal> {
        let Some((operator, argument)) = doc.iter().find(|(name, _)| name.starts_with('$')) else {
            for (name, value) in doc {
                if name.contains('.') {
                    return Err(Refusal::new(
                        format!("`{name}`: a field of a subdocument expression cannot have a dot in its name"),
                        "nest it: { a: { b: $x } }",
                    ));
                }
                self.expression(value)?;
            }
            return Ok(());
        };
        if doc.len() > 1 {
            return Err(Refusal::new(
                format!("`{operator}` stands beside other keys; an operator stands alone in its document"),
                "",
            ));
        }
        self.arguments(operator, argument)
    }

    fn arguments(&mut self, operator: &str, argument: &Bson) -> Result<(), Refusal> {
        match operator {
            "$literal" => Ok(()),
            "$function" | "$accumulator" | "$where" => Err(code(operator)),
            "$rand" | "$sampleRate" => Err(Refusal::new(
                format!("`{operator}` is refused: a copied value is a function of the data alone"),
                "",
            )),
            "$getField" => self.get_field(argument),
            "$cond" => {
                condition(argument)?;
                self.named(operator, argument)
            }
            "$let" | "$map" | "$filter" | "$reduce" => self.binding(operator, argument),
            _ if OPERATORS.contains(&operator) || ACCUMULATORS.contains(&operator) => self.named(operator, argument),
            _ => {
                let fallback = "a text that starts with `$` is written { $literal: \"$text\" }";
                Err(malformed(operator).unwrap_or_else(|| unknown(operator, "operator", OPERATORS, fallback)))
            }
        }
    }

    /// Reads arguments: named ones (`{ input: …, to: … }`) are expressions, and their names are not fields.
    fn named(&mut self, operator: &str, argument: &Bson) -> Result<(), Refusal> {
        match argument {
            Bson::Document(doc) if !doc.keys().any(|name| name.starts_with('$')) => {
                doc.iter().try_for_each(|(name, value)| {
                    match (name.as_str(), operator) {
                        // Its paths are those of elements.
                        ("sortBy", "$sortArray") => Ok(()),
                        ("sortBy", "$top" | "$topN" | "$bottom" | "$bottomN") => {
                            self.sort_by(value);
                            Ok(())
                        }
                        // `{ $push: { sortBy: $x } }` has a field of this name.
                        _ => self.expression(value),
                    }
                })
            }
            other => self.expression(other),
        }
    }

    /// `sortBy` of `$topN` and its like: field paths as keys.
    fn sort_by(&mut self, value: &Bson) {
        for path in value.as_document().into_iter().flat_map(Document::keys) {
            self.found.source.add_text(path);
        }
    }

    fn get_field(&mut self, argument: &Bson) -> Result<(), Refusal> {
        let (name, input) = match argument {
            Bson::Document(doc) if doc.contains_key("field") => (doc.get("field"), doc.get("input")),
            name => (Some(name), None),
        };
        let is_source = input.is_none_or(|input| matches!(input.as_str(), Some("$$ROOT" | "$$CURRENT")));
        match (name, input) {
            (Some(Bson::String(name)), _) if is_source && !name.starts_with('$') => self.found.source.add_text(name),
            // Both parts are expressions: a computed name and its input are read too.
            (name, input) => {
                if is_source {
                    self.found.source = Reads::Everything;
                }
                name.into_iter().chain(input).try_for_each(|part| self.expression(part))?;
            }
        }
        Ok(())
    }

    fn binding(&mut self, operator: &str, argument: &Bson) -> Result<(), Refusal> {
        let Bson::Document(doc) = argument else {
            return Err(Refusal::new(format!("`{operator}` takes a document"), ""));
        };
        let depth = self.scope.len();
        let inner = match operator {
            "$let" => {
                let vars = doc.get_document("vars").cloned().unwrap_or_default();
                for value in vars.values() {
                    self.expression(value)?;
                }
                self.scope.extend(vars.keys().cloned());
                "in"
            }
            _ => {
                for name in ["input", "initialValue", "limit"] {
                    if let Some(value) = doc.get(name) {
                        self.expression(value)?;
                    }
                }
                self.scope.extend(doc.get_str("as").ok().map(ToOwned::to_owned));
                self.scope.extend(["this".to_owned(), "value".to_owned()]);
                if operator == "$filter" { "cond" } else { "in" }
            }
        };
        if let Some(body) = doc.get(inner) {
            self.expression(body)?;
        }
        self.scope.truncate(depth);
        Ok(())
    }
}

/// `$group` accumulators of MongoDB 6.0
/// (<https://www.mongodb.com/docs/v6.0/reference/operator/aggregation/#accumulators---group---bucket---bucketauto---setwindowfields->).
const ACCUMULATORS: &[&str] = &[
    "$addToSet",
    "$avg",
    "$bottom",
    "$bottomN",
    "$count",
    "$first",
    "$firstN",
    "$last",
    "$lastN",
    "$max",
    "$maxN",
    "$mergeObjects",
    "$min",
    "$minN",
    "$push",
    "$stdDevPop",
    "$stdDevSamp",
    "$sum",
    "$top",
    "$topN",
];

/// Expression operators of MongoDB 6.0 and the two that later versions added to common use.
const OPERATORS: &[&str] = &[
    "$abs",
    "$acos",
    "$acosh",
    "$add",
    "$allElementsTrue",
    "$and",
    "$anyElementTrue",
    "$arrayElemAt",
    "$arrayToObject",
    "$asin",
    "$asinh",
    "$atan",
    "$atan2",
    "$atanh",
    "$avg",
    "$binarySize",
    "$bitAnd",
    "$bitNot",
    "$bitOr",
    "$bitXor",
    "$bsonSize",
    "$ceil",
    "$cmp",
    "$concat",
    "$concatArrays",
    "$cond",
    "$convert",
    "$cos",
    "$cosh",
    "$dateAdd",
    "$dateDiff",
    "$dateFromParts",
    "$dateFromString",
    "$dateSubtract",
    "$dateToParts",
    "$dateToString",
    "$dateTrunc",
    "$dayOfMonth",
    "$dayOfWeek",
    "$dayOfYear",
    "$degreesToRadians",
    "$divide",
    "$eq",
    "$exp",
    "$filter",
    "$first",
    "$firstN",
    "$floor",
    "$getField",
    "$gt",
    "$gte",
    "$hour",
    "$ifNull",
    "$in",
    "$indexOfArray",
    "$indexOfBytes",
    "$indexOfCP",
    "$isArray",
    "$isNumber",
    "$isoDayOfWeek",
    "$isoWeek",
    "$isoWeekYear",
    "$last",
    "$lastN",
    "$let",
    "$literal",
    "$ln",
    "$log",
    "$log10",
    "$lt",
    "$lte",
    "$ltrim",
    "$map",
    "$max",
    "$maxN",
    "$median",
    "$mergeObjects",
    "$meta",
    "$millisecond",
    "$min",
    "$minN",
    "$minute",
    "$mod",
    "$month",
    "$multiply",
    "$ne",
    "$not",
    "$objectToArray",
    "$or",
    "$percentile",
    "$pow",
    "$radiansToDegrees",
    "$range",
    "$reduce",
    "$regexFind",
    "$regexFindAll",
    "$regexMatch",
    "$replaceAll",
    "$replaceOne",
    "$reverseArray",
    "$round",
    "$rtrim",
    "$second",
    "$setDifference",
    "$setEquals",
    "$setField",
    "$setIntersection",
    "$setIsSubset",
    "$setUnion",
    "$sin",
    "$sinh",
    "$size",
    "$slice",
    "$sortArray",
    "$split",
    "$sqrt",
    "$stdDevPop",
    "$stdDevSamp",
    "$strLenBytes",
    "$strLenCP",
    "$strcasecmp",
    "$substr",
    "$substrBytes",
    "$substrCP",
    "$subtract",
    "$sum",
    "$switch",
    "$tan",
    "$tanh",
    "$toBool",
    "$toDate",
    "$toDecimal",
    "$toDouble",
    "$toInt",
    "$toLong",
    "$toLower",
    "$toObjectId",
    "$toString",
    "$toUpper",
    "$trim",
    "$trunc",
    "$tsIncrement",
    "$tsSecond",
    "$type",
    "$unsetField",
    "$week",
    "$year",
    "$zip",
];

#[cfg(test)]
mod tests {
    use bson::{bson, doc};

    use super::*;

    fn reads(value: &Bson) -> Vec<String> {
        let each = FieldPath::parse("cast.$[]").unwrap();
        match expression(value, Variables { element: Some(&each), ..Variables::default() }).unwrap().source {
            Reads::Everything => vec!["*".to_owned()],
            Reads::Paths(paths) => paths.iter().map(ToString::to_string).collect(),
            Reads::Nothing => vec![],
        }
    }

    /// A condition with a variable of its own of this name was taken for one on the matched element, and out of `where`.
    #[test]
    fn a_variable_that_an_expression_binds_is_not_the_matched_element() {
        let each = FieldPath::parse("lines.$[]").unwrap();
        let of_element = |value: Bson| {
            expression(&value, Variables { element: Some(&each), ..Variables::default() }).unwrap().element
        };
        let more = |name: &str| bson!({"$gt": [format!("$${name}.qty"), 1]});
        let filtered =
            |name: &str, by: &str| bson!({"$size": {"$filter": {"input": "$lines", "as": name, "cond": more(by)}}});
        assert!(of_element(more("element")));
        assert!(of_element(filtered("line", "element")));
        assert!(!of_element(filtered("element", "element")));
        assert!(of_element(bson!({"$and": [filtered("element", "element"), more("element")]})));
    }

    #[test]
    fn what_an_expression_reads() {
        for (value, expected) in [
            (bson!("$name"), vec!["name"]),
            (bson!("name"), vec![]),
            (bson!({"a": "$x.y", "b": [1, "$z"]}), vec!["x.y", "z"]),
            (bson!({"$concat": ["$a", " ", "$b"]}), vec!["a", "b"]),
            (bson!({"$literal": "$a"}), vec![]),
            (bson!({"$sortArray": {"input": "$lines", "sortBy": {"total": 1}}}), vec!["lines"]),
            (bson!("$$ROOT"), vec!["*"]),
            (bson!("$$ROOT.a.b"), vec!["a.b"]),
            (bson!("$$element.role"), vec!["cast.$[]"]),
            (
                bson!({"$map": {"input": "$items", "as": "i", "in": {"$add": ["$$i.n", "$base"]}}}),
                vec!["items", "base"],
            ),
            (bson!({"$let": {"vars": {"v": "$a"}, "in": "$$v.b"}}), vec!["a"]),
            (bson!({"$getField": "dotted.name"}), vec!["dotted.name"]),
            (bson!({"$getField": {"field": "dotted.name"}}), vec!["dotted.name"]),
            (bson!({"$getField": {"field": "dotted.name", "input": "$$ROOT"}}), vec!["dotted.name"]),
            (bson!({"$getField": {"field": "name", "input": "$names"}}), vec!["names"]),
            (bson!({"$getField": {"$concat": ["in_", "$language"]}}), vec!["*"]),
            (
                bson!({"$getField": {"field": {"$concat": ["in_", "$language"]}, "input": "$names"}}),
                vec!["language", "names"],
            ),
            (bson!({"$dateToString": {"date": "$at", "format": "%Y"}}), vec!["at"]),
            (bson!("$list.0"), vec!["list"]),
        ] {
            assert_eq!(reads(&value), expected, "{value}");
        }
    }

    #[test]
    fn what_is_refused_says_why() {
        for (value, message, hint) in [
            (bson!({"$concatt": []}), "unknown operator `$concatt`", "did you mean `$concat`?"),
            (bson!("$$NOW"), "`$$NOW` is refused", "store the time"),
            (bson!({"$rand": {}}), "`$rand` is refused", ""),
            (bson!({"$function": {}}), "`$function` runs code", "aggregation operators"),
            (bson!("$parts.$[].id"), "`$[]` has no meaning", "looks into arrays by itself"),
            (bson!("$$nope"), "unknown variable `$$nope`", "$let"),
            (bson!("$"), "is not a field path", "$literal"),
            (bson!({"$add": [1], "x": 2}), "stands beside other keys", ""),
            (bson!({"a.b": 1}), "cannot have a dot", "nest it"),
            (bson!({"$cond": {"if": "$a", "then": 1}}), "`$cond` has no `else`", "else: null"),
            (bson!({"$cond": [true]}), "takes three values, this one has 1", "[if, then, else]"),
            (bson!("$$targett"), "unknown variable `$$targett`", "did you mean `$$target`?"),
            (bson!("$$source.name"), "unknown variable `$$source`", "without a variable: $name"),
            (bson!({"$date": "2024-01-01"}), "`$date` does not hold a valid Extended JSON value", "and the time zone"),
        ] {
            let refusal = expression(&value, Variables::default()).unwrap_err();
            assert!(refusal.message.contains(message), "{value}: {}", refusal.message);
            assert!(refusal.hint.unwrap_or_default().contains(hint), "{value}");
        }
    }

    #[test]
    fn filters_tell_their_paths_and_refuse_code() {
        let reads = filter(&doc! {"status": "x", "$or": [{"a.b": {"$gt": 1}}, {"$expr": {"$eq": ["$c", 1]}}]}).unwrap();
        assert_eq!(reads, Reads::Paths(["status", "a.b", "c"].map(|p| FieldPath::parse(p).unwrap()).to_vec()));
        assert!(filter(&doc! {"$where": "1"}).is_err());
        assert!(filter(&doc! {"a": {"$not": {"$where": "1"}}}).is_err());
        assert!(filter(&doc! {"$text": {"$search": "x"}}).is_err());
        // The server would compare with these documents.
        for malformed in [
            doc! {"at": {"$gte": {"$date": "2024-01-01"}}},
            doc! {"owner": {"$in": [1, {"$oid": "5f5c"}]}},
            doc! {"$or": [{"n": {"$numberLong": 1}}]},
        ] {
            let refusal = filter(&malformed).unwrap_err();
            assert!(
                refusal.message.contains("does not hold a valid Extended JSON value"),
                "{malformed}: {}",
                refusal.message
            );
        }
    }

    #[test]
    fn accumulators_are_those_of_group() {
        let accumulator = |value: &Bson| accumulator(value, Variables::default());
        assert_eq!(accumulator(&bson!({"$sum": 1})).unwrap().source, Reads::Nothing);
        let paths = |paths: &[&str]| Reads::Paths(paths.iter().map(|path| FieldPath::parse(path).unwrap()).collect());
        let top = bson!({"$topN": {"n": 2, "sortBy": {"at": -1}, "output": "$x"}});
        assert_eq!(accumulator(&top).unwrap().source, paths(&["at", "x"]));
        // A field of an element may have the name of an argument.
        assert_eq!(accumulator(&bson!({"$push": {"sortBy": "$x"}})).unwrap().source, paths(&["x"]));
        assert!(accumulator(&bson!({"$push": {"sortBy": "$$NOW"}})).is_err());
        assert!(accumulator(&bson!({"$summ": 1})).unwrap_err().hint.unwrap().contains("$sum"));
        assert!(accumulator(&bson!(5)).is_err());
        assert!(accumulator(&bson!({"$accumulator": {}})).is_err());
    }

    #[test]
    fn paths_of_the_target_are_told_apart_from_those_of_the_source() {
        let each = FieldPath::parse("lines.$[]").unwrap();
        let variables = Variables { target_element: Some(&each), target: true, ..Variables::default() };
        let read = |value: Bson| expression(&value, variables).map(|found| found.target);
        let path = |text: &str| FieldPath::parse(text).unwrap();
        let found =
            read(bson!({"$add": ["$price", "$$target.a.b", "$$target.list.0.x", "$$targetElement.qty"]})).unwrap();
        assert_eq!(found.paths, [path("a.b"), path("list")]);
        assert_eq!(found.elements, [path("lines.$[].qty")]);
        assert_eq!(read(bson!("$$targetElement")).unwrap().elements, [path("lines.$[]")]);
        // A variable of the expression's own.
        let bound = bson!({"$map": {"input": "$list", "as": "target", "in": "$$target"}});
        assert!(read(bound).unwrap().is_empty());
        for whole in [
            bson!("$$target"),
            bson!({"$getField": {"field": {"$concat": ["a", "$b"]}, "input": "$$target"}}),
            bson!({"$let": {"vars": {"t": "$$target"}, "in": "$$t.a"}}),
        ] {
            assert!(read(whole.clone()).unwrap_err().message.contains("reads the whole target"), "{whole}");
        }
        assert!(expression(&bson!("$$target.a"), Variables::default()).is_err());
    }
}
