//! Arithmetic operators.

use bigdecimal::BigDecimal;
use bson::{Bson, DateTime};

use super::{Args, Result, Value, is_nullish, needs_server, refused, type_name};
use crate::number::{Number, Sum, decimal, narrow, position};

/// The operand, none where it makes the result null.
fn operand(args: &Args<'_>, nth: usize, name: &str) -> Result<Option<Number>> {
    match number(args.get(nth)?.as_ref(), name)? {
        Some(Number::Decimal(_)) => needs_server(format!("`{name}` of a decimal")),
        number => Ok(number),
    }
}

fn number(value: Option<&Bson>, name: &str) -> Result<Option<Number>> {
    let Some(some) = value.filter(|value| !is_nullish(Some(value))) else { return Ok(None) };
    match Number::or_decimal(some) {
        Some(number) => Ok(Some(number)),
        None => refused(format!("`{name}` takes numbers, and was given {}", type_name(value))),
    }
}

pub(super) fn add(args: &Args<'_>) -> Result<Value> {
    let sum = args.combined(|values| total(values))?;
    same_in_every_version(args, sum, "sum", |sum, number| sum + number)
}

/// The result of a fold of numbers, where every version of the server computes it. 6.0 combines constants first and sums without
/// loss; 7.0 goes from one operand to the next, where a double loses digits and zeros keep their sign.
fn same_in_every_version(args: &Args<'_>, result: Value, name: &str, step: impl Fn(f64, f64) -> f64) -> Result<Value> {
    let Some(Bson::Double(one)) = result else { return Ok(result) };
    let mut other: Option<f64> = None;
    for value in args.as_written() {
        let Some(number) = value?.as_ref().and_then(Number::or_decimal) else { return Ok(result) };
        other = Some(other.map_or_else(|| number.double(), |so_far| step(so_far, number.double())));
    }
    match other {
        Some(other) if other.to_bits() != one.to_bits() && !(other.is_nan() && one.is_nan()) => {
            needs_server(format!("a {name} of doubles that 6.0 and 7.0 compute differently"))
        }
        _ => Ok(result),
    }
}

fn total(values: &mut dyn Iterator<Item = Result<Value>>) -> Result<Value> {
    let mut sum = Sum::default();
    let mut date: Option<i64> = None;
    for value in values {
        let Some(value) = value?.filter(|value| !is_nullish(Some(value))) else { return Ok(Some(Bson::Null)) };
        match &value {
            Bson::DateTime(_) if date.is_some() => return refused("`$add` takes one date at most"),
            Bson::DateTime(time) => date = Some(time.timestamp_millis()),
            other => match Number::or_decimal(other) {
                Some(number) => {
                    sum.add(number)?;
                    if sum.is_beyond_a_long() {
                        return beyond_a_long();
                    }
                }
                None => {
                    return refused(format!(
                        "`$add` takes numbers and a date, and was given {}",
                        type_name(Some(other))
                    ));
                }
            },
        }
    }
    Ok(Some(match date {
        None => sum.value()?,
        Some(time) => match sum.whole().and_then(|whole| whole.checked_add(time)) {
            Some(time) => Bson::DateTime(DateTime::from_millis(time)),
            None => return needs_server("`$add` of a date and a number with a fraction"),
        },
    }))
}

pub(super) fn subtract(args: &Args<'_>) -> Result<Value> {
    let (left, right) = (args.get(0)?, args.get(1)?);
    if is_nullish(left.as_ref()) || is_nullish(right.as_ref()) {
        return Ok(Some(Bson::Null));
    }
    let millis = |time: &DateTime| time.timestamp_millis();
    let value = match (&left, &right) {
        (Some(Bson::DateTime(a)), Some(Bson::DateTime(b))) => Bson::Int64(millis(a).wrapping_sub(millis(b))),
        (Some(Bson::DateTime(a)), Some(b)) => match Number::of(b)? {
            Some(number) => {
                match number.integer().and_then(i64::checked_neg).and_then(|number| millis(a).checked_add(number)) {
                    Some(time) => Bson::DateTime(DateTime::from_millis(time)),
                    None => return needs_server("`$subtract` of a number with a fraction from a date"),
                }
            }
            None => return refused("`$subtract` takes a number or a date from a date"),
        },
        (Some(a), Some(b)) => match (Number::or_decimal(a), Number::or_decimal(b)) {
            (Some(a), Some(b)) if a.is_decimal() || b.is_decimal() => {
                decimal::value(&decimal::difference(&decimal::of(a)?, &decimal::of(b)?))?
            }
            (Some(a), Some(b)) => match (a.integer(), b.integer()) {
                (Some(x), Some(y)) => match x.checked_sub(y) {
                    Some(value) => narrow(value, a.is_int() && b.is_int()),
                    None => return beyond_a_long(),
                },
                _ => Bson::Double(a.double() - b.double()),
            },
            _ => return refused("`$subtract` takes numbers and dates"),
        },
        _ => Bson::Null,
    };
    Ok(Some(value))
}

pub(super) fn multiply(args: &Args<'_>) -> Result<Value> {
    let product = args.combined(|values| product(values))?;
    same_in_every_version(args, product, "product", |product, number| product * number)
}

fn product(values: &mut dyn Iterator<Item = Result<Value>>) -> Result<Value> {
    let (mut whole, mut double, mut ints) = (Some(1_i64), 1.0, true);
    let (mut doubles, mut decimals): (bool, Option<BigDecimal>) = (false, None);
    for value in values {
        let Some(number) = number(value?.as_ref(), "$multiply")? else { return Ok(Some(Bson::Null)) };
        if number.is_decimal() {
            let factor = decimal::of(number)?;
            decimals = Some(decimals.map_or(Ok(factor.clone()), |product| decimal::product(&product, &factor))?);
            continue;
        }
        doubles |= matches!(number, Number::Double(_));
        ints &= number.is_int();
        whole = match whole.zip(number.integer()) {
            Some((a, b)) => match a.checked_mul(b) {
                Some(whole) => Some(whole),
                None => return beyond_a_long(),
            },
            None => None,
        };
        double *= number.double();
    }
    if let Some(decimals) = decimals {
        return match whole.filter(|_| !doubles) {
            Some(whole) => Ok(Some(decimal::value(&decimal::product(&decimals, &BigDecimal::from(whole))?)?)),
            None => needs_server("a decimal and a double in one operation"),
        };
    }
    Ok(Some(whole.map_or(Bson::Double(double), |whole| narrow(whole, ints))))
}

/// One of the server's engines goes on with doubles, the other with decimals.
fn beyond_a_long() -> Result<Value> {
    needs_server("whole numbers that do not fit into a long")
}

pub(super) fn divide(args: &Args<'_>) -> Result<Value> {
    let (left, right) = (args.get(0)?, args.get(1)?);
    if is_nullish(left.as_ref()) || is_nullish(right.as_ref()) {
        return Ok(Some(Bson::Null));
    }
    match (operand(args, 0, "$divide")?, operand(args, 1, "$divide")?) {
        (Some(_), Some(b)) if b.double() == 0.0 => refused("`$divide` by zero"),
        (Some(a), Some(b)) => Ok(Some(Bson::Double(a.double() / b.double()))),
        _ => Ok(Some(Bson::Null)),
    }
}

pub(super) fn modulo(args: &Args<'_>) -> Result<Value> {
    let (left, right) = (args.get(0)?, args.get(1)?);
    if is_nullish(left.as_ref()) || is_nullish(right.as_ref()) {
        return Ok(Some(Bson::Null));
    }
    let (Some(a), Some(b)) = (operand(args, 0, "$mod")?, operand(args, 1, "$mod")?) else {
        return Ok(Some(Bson::Null));
    };
    if b.double() == 0.0 {
        return refused("`$mod` by zero");
    }
    // By a double that is a whole number, an integer stays one.
    let by = match b {
        Number::Double(_) => position(right.as_ref())?.map(|whole| (whole, true)),
        _ => b.integer().map(|whole| (whole, b.is_int())),
    };
    Ok(Some(match (a.integer(), by) {
        (Some(x), Some((y, int))) => narrow(x.wrapping_rem(y), a.is_int() && int),
        _ => Bson::Double(a.double() % b.double()),
    }))
}

/// An operator of one number, by its value as an integer or as a double.
fn one(args: &Args<'_>, name: &str, whole: fn(i64) -> Option<i64>, double: fn(f64) -> f64) -> Result<Value> {
    let Some(number) = operand(args, 0, name)? else { return Ok(Some(Bson::Null)) };
    Ok(Some(match number.integer() {
        Some(value) => match whole(value) {
            Some(value) => narrow(value, number.is_int()),
            None => return refused(format!("`{name}` of the least long")),
        },
        None => Bson::Double(double(number.double())),
    }))
}

pub(super) fn abs(args: &Args<'_>) -> Result<Value> {
    one(args, "$abs", i64::checked_abs, f64::abs)
}

pub(super) fn ceil(args: &Args<'_>) -> Result<Value> {
    one(args, "$ceil", Some, f64::ceil)
}

pub(super) fn floor(args: &Args<'_>) -> Result<Value> {
    one(args, "$floor", Some, f64::floor)
}

pub(super) fn sqrt(args: &Args<'_>) -> Result<Value> {
    match operand(args, 0, "$sqrt")? {
        None => Ok(Some(Bson::Null)),
        Some(number) if number.double() < 0.0 => refused("`$sqrt` of a negative number"),
        Some(number) => Ok(Some(Bson::Double(number.double().sqrt()))),
    }
}

pub(super) fn to_int(args: &Args<'_>) -> Result<Value> {
    convert(args, "$toInt", |value| value.and_then(|value| i32::try_from(value).ok()).map(Bson::Int32))
}

pub(super) fn to_long(args: &Args<'_>) -> Result<Value> {
    convert(args, "$toLong", |value| value.map(Bson::Int64))
}

#[expect(clippy::cast_possible_truncation, reason = "the bounds are checked")]
fn convert(args: &Args<'_>, name: &str, make: fn(Option<i64>) -> Option<Bson>) -> Result<Value> {
    let value = args.get(0)?;
    let whole = match &value {
        value if is_nullish(value.as_ref()) => return Ok(Some(Bson::Null)),
        Some(Bson::Boolean(flag)) => Some(i64::from(*flag)),
        Some(Bson::Int32(v)) => Some(i64::from(*v)),
        Some(Bson::Int64(v)) => Some(*v),
        Some(Bson::Double(v)) if (-9_223_372_036_854_775_808.0..9_223_372_036_854_775_808.0).contains(&v.trunc()) => {
            Some(v.trunc() as i64)
        }
        Some(Bson::DateTime(time)) if name == "$toLong" => Some(time.timestamp_millis()),
        // The server accepts no notation of a whole number with a letter in it.
        Some(Bson::String(text)) if text.contains(|c: char| c.is_ascii_alphabetic()) => None,
        Some(Bson::String(_) | Bson::Decimal128(_)) => {
            return needs_server(format!("`{name}` of {}", type_name(value.as_ref())));
        }
        _ => None,
    };
    match make(whole) {
        Some(value) => Ok(Some(value)),
        None => refused(format!("`{name}` cannot convert this {}", type_name(value.as_ref()))),
    }
}

pub(super) fn to_double(args: &Args<'_>) -> Result<Value> {
    let value = args.get(0)?;
    Ok(Some(match &value {
        value if is_nullish(value.as_ref()) => Bson::Null,
        Some(Bson::Boolean(flag)) => Bson::Double(f64::from(u8::from(*flag))),
        Some(Bson::DateTime(time)) => Bson::Double(Number::Long(time.timestamp_millis()).double()),
        Some(Bson::String(_) | Bson::Decimal128(_)) => {
            return needs_server(format!("`$toDouble` of {}", type_name(value.as_ref())));
        }
        Some(other) => match Number::of(other)? {
            Some(number) => Bson::Double(number.double()),
            None => return refused(format!("`$toDouble` cannot convert {}", type_name(Some(other)))),
        },
        None => Bson::Null,
    }))
}
