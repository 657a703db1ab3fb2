//! TOML with places, from the spans that the `toml` crate keeps.

use ::toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use crate::config::tree::{Entry, Fault, MAX_DEPTH, Node, Span, Value};

pub(super) fn parse(text: &str) -> (Option<Node>, Vec<Fault>) {
    match DeTable::parse(text) {
        Ok(table) => {
            let span = table.span();
            let mut faults = Vec::new();
            match mapping(table.into_inner(), &span, 0, &mut faults) {
                Ok(value) => (Some(Node::new(value, span)), faults),
                Err(fault) => (None, vec![fault]),
            }
        }
        Err(error) => {
            let span = error.span().unwrap_or(0..1);
            (None, vec![Fault::new(span, format!("this is not TOML: {}", error.message().replace('\n', ", ")))])
        }
    }
}

fn mapping(table: DeTable<'_>, span: &Span, depth: usize, faults: &mut Vec<Fault>) -> Result<Value, Fault> {
    if depth > MAX_DEPTH {
        return Err(Fault::too_deep(span.clone()));
    }
    let entries = table.into_iter().map(|(key, value)| {
        let key_span = key.span();
        let node = node(value, depth + 1, faults)?;
        Ok(Entry { key: key.into_inner().into_owned(), key_span, node })
    });
    Ok(Value::Mapping(entries.collect::<Result<_, _>>()?))
}

fn node(value: Spanned<DeValue<'_>>, depth: usize, faults: &mut Vec<Fault>) -> Result<Node, Fault> {
    let span = value.span();
    let value = match value.into_inner() {
        DeValue::String(text) => Value::String(text.into_owned()),
        DeValue::Boolean(flag) => Value::Bool(flag),
        DeValue::Datetime(date) => Value::Date(date.to_string()),
        DeValue::Integer(number) => {
            Value::Int(i64::from_str_radix(number.as_str(), number.radix()).unwrap_or_else(|_| {
                faults.push(Fault::number_too_large(span.clone()));
                0
            }))
        }
        DeValue::Float(number) => Value::Float(number.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::Table(table) => mapping(table, &span, depth, faults)?,
        DeValue::Array(_) if depth > MAX_DEPTH => return Err(Fault::too_deep(span)),
        DeValue::Array(items) => {
            Value::Sequence(items.into_iter().map(|item| node(item, depth + 1, faults)).collect::<Result<_, _>>()?)
        }
    };
    Ok(Node::new(value, span))
}
