//! Expressions: literals, paths, variables, and the table of the operators.

use bson::{Bson, Document};

use super::{
    EvalError, Result, Value,
    accumulator::Accumulator,
    compare, is_nullish, is_true, needs_server,
    path::{below, below_document, steps},
    refused, type_name,
};

mod arithmetic;
mod array;
mod date;
mod text;

pub use array::ZERO_STEP;

/// Environment of an expression: the document and the variables.
#[derive(Debug, Clone)]
pub(super) struct Scope<'a> {
    root: &'a Document,
    variables: Vec<(String, Value)>,
}

impl<'a> Scope<'a> {
    pub fn new(root: &'a Document) -> Self {
        Self { root, variables: Vec::new() }
    }

    /// The same scope with more variables, which hide those of the same name.
    pub fn with(&self, variables: impl IntoIterator<Item = (String, Value)>) -> Self {
        let mut inner = self.clone();
        inner.variables.extend(variables);
        inner
    }

    /// Evaluates an expression.
    pub fn evaluate(&self, expression: &Bson) -> Result<Value> {
        match expression {
            Bson::String(text) => match text.strip_prefix('$') {
                Some(path) => self.path(path),
                None => Ok(Some(expression.clone())),
            },
            Bson::Array(items) => {
                let items: Result<Vec<Bson>> =
                    items.iter().map(|item| Ok(self.evaluate(item)?.unwrap_or(Bson::Null))).collect();
                Ok(Some(Bson::Array(items?)))
            }
            Bson::Document(doc) => match doc.iter().next() {
                Some((name, argument)) if name.starts_with('$') => self.operator(name, argument),
                _ => {
                    let mut out = Document::new();
                    for (name, value) in doc {
                        if let Some(value) = self.evaluate(value)? {
                            out.insert(name.clone(), value);
                        }
                    }
                    Ok(Some(Bson::Document(out)))
                }
            },
            other => Ok(Some(other.clone())),
        }
    }

    fn path(&self, text: &str) -> Result<Value> {
        let Some(variable) = text.strip_prefix('$') else { return Ok(below_document(self.root, &steps(text))) };
        let (name, path) = variable.split_once('.').unwrap_or((variable, ""));
        let path = if path.is_empty() { Vec::new() } else { steps(path) };
        let bound = self.variables.iter().rev().find(|(bound, _)| bound == name);
        match (bound, name) {
            (Some((_, value)), _) => Ok(below(value.as_ref(), &path)),
            (None, "ROOT" | "CURRENT") if path.is_empty() => Ok(Some(Bson::Document(self.root.clone()))),
            (None, "ROOT" | "CURRENT") => Ok(below_document(self.root, &path)),
            (None, "REMOVE") => Ok(None),
            (None, _) => needs_server(format!("`$${name}`")),
        }
    }

    fn operator(&self, name: &str, argument: &Bson) -> Result<Value> {
        let Some((_, least, most, apply)) = TABLE.iter().find(|(known, ..)| *known == name) else {
            return needs_server(format!("`{name}`"));
        };
        let operands: Vec<&Bson> = match argument {
            Bson::Array(items) => items.iter().collect(),
            one => vec![one],
        };
        if name != "$literal" && !(*least..=*most).contains(&operands.len()) {
            return refused(format!("`{name}` was given {} arguments", operands.len()));
        }
        let operands = match name {
            "$add" | "$multiply" => rearranged(name, operands),
            "$sum" | "$min" | "$max" if operands.len() > 1 => rearranged(name, operands),
            _ => operands,
        };
        apply(&Args { name: name.to_owned(), argument, operands, scope: self })
    }
}

/// The operands of a sum or a product in the order of the server's optimizer, which affects the last digit and which
/// error comes first: a nested operand of the same operator is flattened, and constants come last. A nested operator
/// with one operand stays as it is, because that operand may evaluate to an array.
fn rearranged<'a>(name: &str, operands: Vec<&'a Bson>) -> Vec<&'a Bson> {
    let mut flat = Vec::new();
    for operand in operands {
        match operand.as_document().and_then(|doc| doc.get(name)) {
            Some(Bson::Array(inner)) if inner.len() > 1 && !is_constant(operand) => {
                flat.extend(rearranged(name, inner.iter().collect()));
            }
            _ => flat.push(operand),
        }
    }
    let (constant, other): (Vec<&Bson>, Vec<&Bson>) = flat.into_iter().partition(|operand| is_constant(operand));
    other.into_iter().chain(constant).collect()
}

fn is_constant(expression: &Bson) -> bool {
    match expression {
        Bson::String(text) => !text.starts_with('$'),
        Bson::Array(items) => items.iter().all(is_constant),
        Bson::Document(doc) => doc.contains_key("$literal") || doc.values().all(is_constant),
        _ => true,
    }
}

pub(super) struct Args<'a> {
    pub name: String,
    /// The whole argument, as written.
    pub argument: &'a Bson,
    operands: Vec<&'a Bson>,
    pub scope: &'a Scope<'a>,
}

impl<'a> Args<'a> {
    pub fn len(&self) -> usize {
        self.operands.len()
    }

    /// The value of an operand. Operands are evaluated one after the other, as on the server: those after the one that
    /// decides the result are not evaluated.
    pub fn get(&self, nth: usize) -> Result<Value> {
        self.operands.get(nth).map_or(Ok(None), |operand| self.scope.evaluate(operand))
    }

    /// The values of the operands in the order in which they were written.
    pub fn as_written(&self) -> impl Iterator<Item = Result<Value>> {
        let operands = match self.argument {
            Bson::Array(items) => items.as_slice(),
            one => std::slice::from_ref(one),
        };
        operands.iter().map(|operand| self.scope.evaluate(operand))
    }

    /// The result of `combine` over all operands, with constants last. The server combines several constants before it
    /// reads a document, so together they count as one operand.
    pub fn combined(
        &self,
        combine: impl Fn(&mut dyn Iterator<Item = Result<Value>>) -> Result<Value>,
    ) -> Result<Value> {
        let constants = self.operands.iter().position(|operand| is_constant(operand)).unwrap_or(self.len());
        let get = |nth| self.get(nth);
        if self.len() - constants < 2 {
            return combine(&mut (0..self.len()).map(get));
        }
        let constant = combine(&mut (constants..self.len()).map(get))?;
        combine(&mut (0..constants).map(get).chain([Ok(constant)]))
    }

    /// The named arguments of an operator; any name other than `names` is refused.
    pub fn named(&self, names: &[&str]) -> Result<&'a Document> {
        let Bson::Document(doc) = self.argument else {
            return refused(format!("`{}` takes a document of arguments", self.name));
        };
        match doc.keys().find(|key| !names.contains(&key.as_str())) {
            Some(unknown) => needs_server(format!("`{}` with `{unknown}`", self.name)),
            None => Ok(doc),
        }
    }

    /// The value of a named argument; none if it is not given.
    pub fn of(&self, doc: &Document, name: &str) -> Result<Value> {
        doc.get(name).map_or(Ok(None), |expression| self.scope.evaluate(expression))
    }

    /// A named argument that is required.
    pub fn required(&self, doc: &'a Document, name: &str) -> Result<&'a Bson> {
        doc.get(name).ok_or_else(|| EvalError::Refused(format!("`{}` needs `{name}`", self.name)))
    }

    pub fn wrong<T>(&self, wanted: &str, value: Option<&Bson>) -> Result<T> {
        refused(format!("`{}` takes {wanted}, and was given {}", self.name, type_name(value)))
    }
}

/// Evaluates an expression over a document.
pub fn expression(expression: &Bson, document: &Document) -> Result<Value> {
    Scope::new(document).evaluate(expression)
}

type Apply = fn(&Args<'_>) -> Result<Value>;

const MANY: usize = usize::MAX;

/// Every supported operator: its name, its least and greatest number of arguments, and its function.
pub(super) const TABLE: &[(&str, usize, usize, Apply)] = &[
    ("$abs", 1, 1, arithmetic::abs),
    ("$add", 0, MANY, arithmetic::add),
    ("$and", 0, MANY, and),
    ("$anyElementTrue", 1, 1, array::any_true),
    ("$arrayElemAt", 2, 2, array::element_at),
    ("$arrayToObject", 1, 1, array::to_object),
    ("$avg", 0, MANY, accumulated),
    ("$bsonSize", 1, 1, array::bson_size),
    ("$ceil", 1, 1, arithmetic::ceil),
    ("$cmp", 2, 2, ordering),
    ("$concat", 0, MANY, text::concat),
    ("$concatArrays", 0, MANY, array::concat),
    ("$cond", 1, 3, cond),
    ("$dateAdd", 1, 1, date::add),
    ("$dateToString", 1, 1, date::to_string),
    ("$dateTrunc", 1, 1, date::truncate),
    ("$dayOfMonth", 1, 1, date::part),
    ("$dayOfWeek", 1, 1, date::part),
    ("$dayOfYear", 1, 1, date::part),
    ("$divide", 2, 2, arithmetic::divide),
    ("$eq", 2, 2, ordering),
    ("$filter", 1, 1, array::filter),
    ("$first", 1, 1, array::first),
    ("$floor", 1, 1, arithmetic::floor),
    ("$getField", 1, 1, array::get_field),
    ("$gt", 2, 2, ordering),
    ("$gte", 2, 2, ordering),
    ("$hour", 1, 1, date::part),
    ("$ifNull", 2, MANY, if_null),
    ("$in", 2, 2, array::is_in),
    ("$indexOfArray", 2, 4, array::index_of),
    ("$isArray", 1, 1, is_array),
    ("$isNumber", 1, 1, is_number),
    ("$last", 1, 1, array::last),
    ("$let", 1, 1, bind),
    ("$literal", 0, MANY, literal),
    ("$lt", 2, 2, ordering),
    ("$lte", 2, 2, ordering),
    ("$ltrim", 1, 1, text::trim),
    ("$map", 1, 1, array::map),
    ("$max", 0, MANY, accumulated),
    ("$mergeObjects", 0, MANY, accumulated),
    ("$millisecond", 1, 1, date::part),
    ("$min", 0, MANY, accumulated),
    ("$minute", 1, 1, date::part),
    ("$mod", 2, 2, arithmetic::modulo),
    ("$month", 1, 1, date::part),
    ("$multiply", 0, MANY, arithmetic::multiply),
    ("$ne", 2, 2, ordering),
    ("$not", 1, 1, not),
    ("$objectToArray", 1, 1, array::of_object),
    ("$or", 0, MANY, or),
    ("$range", 2, 3, array::range),
    ("$reduce", 1, 1, array::reduce),
    ("$replaceAll", 1, 1, text::replace),
    ("$replaceOne", 1, 1, text::replace),
    ("$reverseArray", 1, 1, array::reverse),
    ("$rtrim", 1, 1, text::trim),
    ("$second", 1, 1, date::part),
    ("$setField", 1, 1, array::set_field),
    ("$setIsSubset", 2, 2, array::is_subset),
    ("$size", 1, 1, array::size),
    ("$slice", 2, 3, array::slice),
    ("$sortArray", 1, 1, array::sort),
    ("$split", 2, 2, text::split),
    ("$sqrt", 1, 1, arithmetic::sqrt),
    ("$stdDevPop", 0, MANY, accumulated),
    ("$stdDevSamp", 0, MANY, accumulated),
    ("$strLenBytes", 1, 1, text::length),
    ("$strLenCP", 1, 1, text::length),
    ("$strcasecmp", 2, 2, text::compare_case),
    ("$substrCP", 3, 3, text::substring),
    ("$subtract", 2, 2, arithmetic::subtract),
    ("$sum", 0, MANY, accumulated),
    ("$switch", 1, 1, switch),
    ("$toBool", 1, 1, to_bool),
    ("$toDate", 1, 1, date::to_date),
    ("$toDouble", 1, 1, arithmetic::to_double),
    ("$toInt", 1, 1, arithmetic::to_int),
    ("$toLong", 1, 1, arithmetic::to_long),
    ("$toLower", 1, 1, text::case),
    ("$toObjectId", 1, 1, text::to_object_id),
    ("$toString", 1, 1, text::to_string),
    ("$toUpper", 1, 1, text::case),
    ("$trim", 1, 1, text::trim),
    ("$type", 1, 1, type_of),
    ("$unsetField", 1, 1, array::set_field),
    ("$year", 1, 1, date::part),
];

#[expect(clippy::unnecessary_wraps, reason = "what the operators yield")]
fn literal(args: &Args<'_>) -> Result<Value> {
    Ok(Some(args.argument.clone()))
}

#[expect(clippy::unnecessary_wraps, reason = "what the operators yield")]
fn flag(flag: bool) -> Result<Value> {
    Ok(Some(Bson::Boolean(flag)))
}

fn and(args: &Args<'_>) -> Result<Value> {
    for nth in 0..args.len() {
        if !is_true(args.get(nth)?.as_ref()) {
            return flag(false);
        }
    }
    flag(true)
}

fn or(args: &Args<'_>) -> Result<Value> {
    for nth in 0..args.len() {
        if is_true(args.get(nth)?.as_ref()) {
            return flag(true);
        }
    }
    flag(false)
}

fn not(args: &Args<'_>) -> Result<Value> {
    flag(!is_true(args.get(0)?.as_ref()))
}

fn ordering(args: &Args<'_>) -> Result<Value> {
    let (left, right) = (args.get(0)?, args.get(1)?);
    let order = compare(left.as_ref(), right.as_ref());
    match args.name.as_str() {
        "$eq" => flag(order.is_eq()),
        "$ne" => flag(order.is_ne()),
        "$lt" => flag(order.is_lt()),
        "$lte" => flag(order.is_le()),
        "$gt" => flag(order.is_gt()),
        "$gte" => flag(order.is_ge()),
        _ => Ok(Some(Bson::Int32(order as i32))),
    }
}

fn cond(args: &Args<'_>) -> Result<Value> {
    let (condition, then, otherwise) = match args.argument {
        Bson::Array(items) if items.len() == 3 => (&items[0], &items[1], &items[2]),
        Bson::Document(_) => {
            let doc = args.named(&["if", "then", "else"])?;
            (args.required(doc, "if")?, args.required(doc, "then")?, args.required(doc, "else")?)
        }
        _ => return refused("`$cond` takes `if`, `then` and `else`"),
    };
    let holds = is_true(args.scope.evaluate(condition)?.as_ref());
    args.scope.evaluate(if holds { then } else { otherwise })
}

fn switch(args: &Args<'_>) -> Result<Value> {
    let doc = args.named(&["branches", "default"])?;
    for branch in doc.get_array("branches").map(Vec::as_slice).unwrap_or_default() {
        let branch = branch.as_document();
        let (Some(case), Some(then)) = (branch.and_then(|b| b.get("case")), branch.and_then(|b| b.get("then"))) else {
            return refused("a branch of `$switch` has `case` and `then`");
        };
        if is_true(args.scope.evaluate(case)?.as_ref()) {
            return args.scope.evaluate(then);
        }
    }
    match doc.get("default") {
        Some(default) => args.scope.evaluate(default),
        None => refused("no branch of `$switch` holds, and it has no `default`"),
    }
}

fn if_null(args: &Args<'_>) -> Result<Value> {
    for nth in 0..args.len() - 1 {
        let value = args.get(nth)?;
        if !is_nullish(value.as_ref()) {
            return Ok(value);
        }
    }
    args.get(args.len() - 1)
}

fn bind(args: &Args<'_>) -> Result<Value> {
    let doc = args.named(&["vars", "in"])?;
    let mut bound = Vec::new();
    for (name, value) in doc.get_document("vars").into_iter().flatten() {
        bound.push((name.clone(), args.scope.evaluate(value)?));
    }
    let body = args.required(doc, "in")?;
    args.scope.with(bound).evaluate(body)
}

fn is_array(args: &Args<'_>) -> Result<Value> {
    flag(matches!(args.get(0)?, Some(Bson::Array(_))))
}

fn is_number(args: &Args<'_>) -> Result<Value> {
    flag(matches!(args.get(0)?, Some(Bson::Int32(_) | Bson::Int64(_) | Bson::Double(_) | Bson::Decimal128(_))))
}

fn type_of(args: &Args<'_>) -> Result<Value> {
    Ok(Some(Bson::String(type_name(args.get(0)?.as_ref()).to_owned())))
}

fn to_bool(args: &Args<'_>) -> Result<Value> {
    match args.get(0)? {
        value if is_nullish(value.as_ref()) => Ok(Some(Bson::Null)),
        value => flag(is_true(value.as_ref())),
    }
}

/// An accumulator used as an operator: over the elements of one array, or over its arguments.
fn accumulated(args: &Args<'_>) -> Result<Value> {
    let all = |values: &mut dyn Iterator<Item = Result<Value>>| {
        let mut accumulator = Accumulator::new(&args.name)?;
        for value in values {
            accumulator.take(value?)?;
        }
        accumulator.value()
    };
    match &*args.name {
        _ if args.len() == 1 => match args.get(0)? {
            Some(Bson::Array(items)) => all(&mut items.into_iter().map(|item| Ok(Some(item)))),
            value => all(&mut std::iter::once(Ok(value))),
        },
        "$sum" | "$min" | "$max" => args.combined(all),
        _ => all(&mut (0..args.len()).map(|nth| args.get(nth))),
    }
}
