//! The server's order and equality of values, and the stricter identity of promise 1.

use std::cmp::Ordering;

use bson::{Bson, Document};

/// The server's order of any two values (`sort`, `$min`, `$gt` within one type).
///
/// Decimal128 is compared through `f64`: exact for the small decimals that the generator draws.
#[must_use]
pub fn compare(a: &Bson, b: &Bson) -> Ordering {
    class(a).cmp(&class(b)).then_with(|| match (a, b) {
        (Bson::Document(a), Bson::Document(b)) => compare_documents(a, b),
        (Bson::Array(a), Bson::Array(b)) => compare_arrays(a, b),
        (Bson::Binary(a), Bson::Binary(b)) => (a.bytes.len().cmp(&b.bytes.len()))
            .then_with(|| u8::from(a.subtype).cmp(&u8::from(b.subtype)))
            .then_with(|| a.bytes.cmp(&b.bytes)),
        (Bson::ObjectId(a), Bson::ObjectId(b)) => a.bytes().cmp(&b.bytes()),
        (Bson::Boolean(a), Bson::Boolean(b)) => a.cmp(b),
        (Bson::DateTime(a), Bson::DateTime(b)) => a.cmp(b),
        (Bson::Timestamp(a), Bson::Timestamp(b)) => (a.time, a.increment).cmp(&(b.time, b.increment)),
        (Bson::RegularExpression(a), Bson::RegularExpression(b)) => {
            (a.pattern.as_str(), a.options.as_str()).cmp(&(b.pattern.as_str(), b.options.as_str()))
        }
        (Bson::JavaScriptCode(a), Bson::JavaScriptCode(b)) => a.cmp(b),
        _ => match (text(a), text(b)) {
            (Some(a), Some(b)) => a.as_bytes().cmp(b.as_bytes()),
            _ if is_number(a) && is_number(b) => compare_numbers(a, b),
            _ => Ordering::Equal,
        },
    })
}

/// The server's equality under the simple collation: 1, 1.0, Int64 1 and Decimal128 1 are one key, nested too.
#[must_use]
pub fn equal(a: &Bson, b: &Bson) -> bool {
    compare(a, b) == Ordering::Equal
}

/// The same value, including BSON type, order of fields and sign of zero. NaN is identical to NaN.
#[must_use]
pub fn identical(a: &Bson, b: &Bson) -> bool {
    match (a, b) {
        (Bson::Double(a), Bson::Double(b)) => a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()),
        (Bson::Array(a), Bson::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| identical(a, b)),
        (Bson::Document(a), Bson::Document(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|((ka, a), (kb, b))| ka == kb && identical(a, b))
        }
        _ => a == b,
    }
}

/// True for the four number types.
#[must_use]
pub fn is_number(value: &Bson) -> bool {
    matches!(value, Bson::Int32(_) | Bson::Int64(_) | Bson::Double(_) | Bson::Decimal128(_))
}

/// True for null, undefined and a missing value.
#[must_use]
pub fn is_nothing(value: Option<&Bson>) -> bool {
    matches!(value, None | Some(Bson::Null | Bson::Undefined))
}

/// A value's class: values of different classes never compare equal.
#[must_use]
pub fn class(value: &Bson) -> u8 {
    match value {
        Bson::MinKey => 0,
        Bson::Undefined => 1,
        Bson::Null => 5,
        Bson::Int32(_) | Bson::Int64(_) | Bson::Double(_) | Bson::Decimal128(_) => 10,
        Bson::String(_) | Bson::Symbol(_) => 15,
        Bson::Document(_) => 20,
        Bson::Array(_) => 25,
        Bson::Binary(_) => 30,
        Bson::ObjectId(_) => 35,
        Bson::Boolean(_) => 40,
        Bson::DateTime(_) => 45,
        Bson::Timestamp(_) => 47,
        Bson::RegularExpression(_) => 50,
        Bson::DbPointer(_) => 55,
        Bson::JavaScriptCode(_) => 60,
        Bson::JavaScriptCodeWithScope(_) => 65,
        Bson::MaxKey => 127,
    }
}

fn text(value: &Bson) -> Option<&str> {
    match value {
        Bson::String(text) | Bson::Symbol(text) => Some(text),
        _ => None,
    }
}

/// Fields compare in order: class of the value, then name, then value; the shorter document is less.
fn compare_documents(a: &Document, b: &Document) -> Ordering {
    for ((name_a, a), (name_b, b)) in a.iter().zip(b) {
        let order = class(a).cmp(&class(b)).then_with(|| name_a.cmp(name_b)).then_with(|| compare(a, b));
        if order != Ordering::Equal {
            return order;
        }
    }
    a.len().cmp(&b.len())
}

fn compare_arrays(a: &[Bson], b: &[Bson]) -> Ordering {
    a.iter().zip(b).map(|(a, b)| compare(a, b)).find(|order| order.is_ne()).unwrap_or_else(|| a.len().cmp(&b.len()))
}

fn compare_numbers(a: &Bson, b: &Bson) -> Ordering {
    match (integer(a), integer(b)) {
        (Some(a), Some(b)) => a.cmp(&b),
        (Some(a), None) => compare_integer_with_float(a, float(b)),
        (None, Some(b)) => compare_integer_with_float(b, float(a)).reverse(),
        (None, None) => compare_floats(float(a), float(b)),
    }
}

fn integer(value: &Bson) -> Option<i64> {
    match value {
        Bson::Int32(number) => Some(i64::from(*number)),
        Bson::Int64(number) => Some(*number),
        _ => None,
    }
}

/// A number as `f64`; NaN for other values.
#[must_use]
pub fn float(value: &Bson) -> f64 {
    match value {
        Bson::Int32(number) => f64::from(*number),
        #[allow(clippy::cast_precision_loss)]
        Bson::Int64(number) => *number as f64,
        Bson::Double(number) => *number,
        Bson::Decimal128(number) => number.to_string().parse().unwrap_or(f64::NAN),
        _ => f64::NAN,
    }
}

/// NaN is less than every number and equal to itself; the zeros are equal.
fn compare_floats(a: f64, b: f64) -> Ordering {
    match (a.is_nan(), b.is_nan()) {
        (true, true) => Ordering::Equal,
        (true, false) => Ordering::Less,
        (false, true) => Ordering::Greater,
        (false, false) => a.partial_cmp(&b).unwrap_or(Ordering::Equal),
    }
}

/// Compares without rounding the integer: 2^53 + 1 is not 2^53.
fn compare_integer_with_float(integer: i64, float: f64) -> Ordering {
    const LIMIT: f64 = 9_223_372_036_854_775_808.0;
    if float.is_nan() || float < -LIMIT {
        Ordering::Greater
    } else if float >= LIMIT {
        Ordering::Less
    } else {
        #[allow(clippy::cast_possible_truncation)]
        let whole = float.trunc() as i64;
        integer.cmp(&whole).then_with(|| compare_floats(0.0, float.fract()))
    }
}

#[cfg(test)]
mod tests {
    use bson::{Bson, bson};

    use super::*;

    #[test]
    fn one_is_one_in_every_number_type_and_nested() {
        let ones = [Bson::Int32(1), Bson::Int64(1), Bson::Double(1.0), Bson::Decimal128("1.0".parse().unwrap())];
        for a in &ones {
            for b in &ones {
                assert!(equal(a, b));
                assert!(equal(&bson!({"k": [a.clone()]}), &bson!({"k": [b.clone()]})));
            }
        }
        assert!(!equal(&bson!({"a": 1, "b": 2}), &bson!({"b": 2, "a": 1})));
        assert!(!equal(&Bson::Int64((1 << 53) + 1), &Bson::Double(9_007_199_254_740_992.0)));
        assert!(!equal(&Bson::Int32(1), &Bson::Boolean(true)));
    }

    #[test]
    fn identity_tells_types_and_zeros_apart() {
        assert!(!identical(&Bson::Int32(1), &Bson::Int64(1)));
        assert!(!identical(&Bson::Double(0.0), &Bson::Double(-0.0)));
        assert!(identical(&Bson::Double(f64::NAN), &Bson::Double(f64::NAN)));
        assert!(!identical(&bson!({"a": 1, "b": 2}), &bson!({"b": 2, "a": 1})));
    }

    #[test]
    fn types_sort_in_the_servers_order() {
        let ascending = [
            Bson::Null,
            Bson::Double(f64::NAN),
            Bson::Double(-1.5),
            Bson::Int32(0),
            bson!("10"),
            bson!("9"),
            bson!({}),
            bson!({"a": 1}),
            bson!([]),
            bson!([0]),
            Bson::ObjectId(bson::oid::ObjectId::from_bytes([0; 12])),
            Bson::Boolean(false),
            Bson::Boolean(true),
        ];
        for pair in ascending.windows(2) {
            assert_eq!(compare(&pair[0], &pair[1]), Ordering::Less, "{pair:?}");
        }
    }
}
