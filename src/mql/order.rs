//! The server's order of all values
//! (<https://www.mongodb.com/docs/manual/reference/bson-type-comparison-order/>), under the simple collation.

use std::cmp::Ordering;

use bigdecimal::BigDecimal;
use bson::{Bson, Document};
use denormd_model::key::whole_number;

use super::{Result, Value, number::position, refused};

/// Compares as the server sorts. Numbers compare by value, whatever their types; a missing value comes before null.
#[must_use]
pub fn compare(a: Option<&Bson>, b: Option<&Bson>) -> Ordering {
    class(a).cmp(&class(b)).then_with(|| match (a, b) {
        (Some(a), Some(b)) => same_class(a, b),
        _ => Ordering::Equal,
    })
}

/// Sort position of a value's type. Values of one class compare with each other.
pub(super) fn class(value: Option<&Bson>) -> i8 {
    match value {
        Some(Bson::MinKey) => -1,
        None | Some(Bson::Undefined) => 0,
        Some(Bson::Null) => 5,
        Some(Bson::Double(_) | Bson::Int32(_) | Bson::Int64(_) | Bson::Decimal128(_)) => 10,
        Some(Bson::String(_) | Bson::Symbol(_)) => 15,
        Some(Bson::Document(_)) => 20,
        Some(Bson::Array(_)) => 25,
        Some(Bson::Binary(_)) => 30,
        Some(Bson::ObjectId(_)) => 35,
        Some(Bson::Boolean(_)) => 40,
        Some(Bson::DateTime(_)) => 45,
        Some(Bson::Timestamp(_)) => 47,
        Some(Bson::RegularExpression(_)) => 50,
        Some(Bson::DbPointer(_)) => 55,
        Some(Bson::JavaScriptCode(_)) => 60,
        Some(Bson::JavaScriptCodeWithScope(_)) => 65,
        Some(Bson::MaxKey) => 127,
    }
}

fn same_class(a: &Bson, b: &Bson) -> Ordering {
    match (a, b) {
        (Bson::String(a) | Bson::Symbol(a), Bson::String(b) | Bson::Symbol(b)) => a.as_bytes().cmp(b.as_bytes()),
        (Bson::Document(a), Bson::Document(b)) => documents(a, b),
        (Bson::Array(a), Bson::Array(b)) => {
            let differing = a.iter().zip(b).map(|(a, b)| compare(Some(a), Some(b))).find(|order| order.is_ne());
            differing.unwrap_or_else(|| a.len().cmp(&b.len()))
        }
        (Bson::Binary(a), Bson::Binary(b)) => {
            let key = |v: &bson::Binary| (v.bytes.len(), u8::from(v.subtype));
            key(a).cmp(&key(b)).then_with(|| a.bytes.cmp(&b.bytes))
        }
        (Bson::ObjectId(a), Bson::ObjectId(b)) => a.bytes().cmp(&b.bytes()),
        (Bson::Boolean(a), Bson::Boolean(b)) => a.cmp(b),
        (Bson::DateTime(a), Bson::DateTime(b)) => a.cmp(b),
        (Bson::Timestamp(a), Bson::Timestamp(b)) => (a.time, a.increment).cmp(&(b.time, b.increment)),
        (Bson::RegularExpression(a), Bson::RegularExpression(b)) => {
            let key = |v: &bson::Regex| (v.pattern.as_str().to_owned(), v.options.as_str().to_owned());
            key(a).cmp(&key(b))
        }
        (Bson::JavaScriptCode(a), Bson::JavaScriptCode(b)) => a.cmp(b),
        _ => numbers(a, b),
    }
}

/// Field by field: the type, then the name, then the value.
fn documents(a: &Document, b: &Document) -> Ordering {
    for ((a_name, a), (b_name, b)) in a.iter().zip(b) {
        let order = class(Some(a)).cmp(&class(Some(b)));
        let order = order.then_with(|| a_name.as_bytes().cmp(b_name.as_bytes()));
        let order = order.then_with(|| compare(Some(a), Some(b)));
        if order.is_ne() {
            return order;
        }
    }
    a.len().cmp(&b.len())
}

/// NaN is equal to itself and less than every other number.
fn numbers(a: &Bson, b: &Bson) -> Ordering {
    if denormd_model::key::Key::one(a.clone()) == denormd_model::key::Key::one(b.clone()) {
        return Ordering::Equal;
    }
    let double = |value: &Bson| match value {
        Bson::Int32(v) => f64::from(*v),
        #[expect(clippy::cast_precision_loss, reason = "rounding keeps the order; what it makes equal is told below")]
        Bson::Int64(v) => *v as f64,
        Bson::Double(v) => *v,
        Bson::Decimal128(v) => v.to_string().parse().unwrap_or(f64::NAN),
        _ => f64::NAN,
    };
    let (x, y) = (double(a), double(b));
    match (x.is_nan(), y.is_nan()) {
        (true, true) => Ordering::Equal,
        (true, false) => Ordering::Less,
        (false, true) => Ordering::Greater,
        (false, false) => x.partial_cmp(&y).filter(|order| order.is_ne()).unwrap_or_else(|| close(x, a, b)),
    }
}

/// Compares two different numbers that round to the same double: integers beyond 2^53, and decimals.
fn close(double: f64, a: &Bson, b: &Bson) -> Ordering {
    if let (Some(a), Some(b)) = (whole_number(a), whole_number(b)) {
        return a.cmp(&b);
    }
    // None for an infinity, to which a large decimal is rounded.
    let exact = |value: &Bson| match value {
        Bson::Double(v) => BigDecimal::try_from(*v).ok(),
        Bson::Decimal128(v) => v.to_string().parse().ok(),
        value => whole_number(value).map(BigDecimal::from),
    };
    let beyond = |infinity: f64| if infinity < 0.0 { Ordering::Less } else { Ordering::Greater };
    match (exact(a), exact(b)) {
        (Some(a), Some(b)) => a.cmp(&b),
        (None, Some(_)) => beyond(double),
        (Some(_), None) => beyond(double).reverse(),
        (None, None) => Ordering::Equal,
    }
}

/// The directions of a sort.
pub(super) fn directions(by: &Document) -> Result<Vec<i32>> {
    let one = |way: &Bson| match position(Some(way))? {
        Some(1) => Ok(1),
        Some(-1) => Ok(-1),
        _ => refused("a sort's direction is 1 or -1"),
    };
    by.values().map(one).collect()
}

/// Orders by several keys, each ascending or descending.
pub(super) fn by_keys(directions: &[i32], a: &[Value], b: &[Value]) -> Ordering {
    let keys = directions.iter().zip(a.iter().zip(b)).map(|(direction, (a, b))| {
        let order = compare(a.as_ref(), b.as_ref());
        if *direction < 0 { order.reverse() } else { order }
    });
    keys.fold(Ordering::Equal, Ordering::then)
}

#[cfg(test)]
mod tests {
    use bson::Decimal128;

    use super::*;

    /// They were equal if the nearest double was: `{ price: { $gte: 0.1 } }` held for the decimal 0.1.
    #[test]
    fn numbers_that_round_to_one_double_are_told_apart() {
        let decimal = |text: &str| Bson::Decimal128(text.parse::<Decimal128>().unwrap());
        let long = Bson::Int64;
        for (less, more) in [
            (decimal("0.1"), Bson::Double(0.1)),
            (decimal("1.0000000000000000001"), decimal("1.0000000000000000002")),
            (decimal("-1.0000000000000000002"), decimal("-1.0000000000000000001")),
            (long(9_007_199_254_740_992), long(9_007_199_254_740_993)),
            (long(i64::MAX), Bson::Double(9_223_372_036_854_775_808.0)),
            (Bson::Int32(0), decimal("1E-400")),
            (decimal("-1E-400"), Bson::Double(0.0)),
            (decimal("6E+6143"), decimal("6E+6144")),
            (decimal("6E+6144"), Bson::Double(f64::INFINITY)),
            (decimal("-Infinity"), decimal("-6E+6144")),
        ] {
            assert_eq!(compare(Some(&less), Some(&more)), Ordering::Less, "{less} {more}");
            assert_eq!(compare(Some(&more), Some(&less)), Ordering::Greater, "{less} {more}");
        }
    }
}
