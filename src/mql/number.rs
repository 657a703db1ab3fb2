//! Arithmetic: the narrowest type that holds the result, as the server keeps it.

use bigdecimal::BigDecimal;
use bson::{Bson, DateTime, Decimal128};

use super::{Result, Value, decimal, expression::Args, is_nullish, needs_server, refused, type_name};

/// A number in one of the types that are computed with here.
#[derive(Debug, Clone, Copy)]
pub(super) enum Number {
    Int(i32),
    Long(i64),
    Double(f64),
    Decimal(Decimal128),
}

impl Number {
    /// The number that a value is, for operators that leave decimals to the server.
    pub fn of(value: &Bson) -> Result<Option<Self>> {
        match Self::or_decimal(value) {
            Some(Self::Decimal(_)) => needs_server("this operator with a decimal"),
            number => Ok(number),
        }
    }

    /// The number that a value is.
    pub fn or_decimal(value: &Bson) -> Option<Self> {
        match value {
            Bson::Int32(v) => Some(Self::Int(*v)),
            Bson::Int64(v) => Some(Self::Long(*v)),
            Bson::Double(v) => Some(Self::Double(*v)),
            Bson::Decimal128(v) => Some(Self::Decimal(*v)),
            _ => None,
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "as the server converts")]
    pub fn double(self) -> f64 {
        match self {
            Self::Int(v) => f64::from(v),
            Self::Long(v) => v as f64,
            Self::Double(v) => v,
            Self::Decimal(v) => v.to_string().parse().unwrap_or(f64::NAN),
        }
    }

    /// The integer, where its type is one.
    pub fn integer(self) -> Option<i64> {
        match self {
            Self::Int(v) => Some(i64::from(v)),
            Self::Long(v) => Some(v),
            Self::Double(_) | Self::Decimal(_) => None,
        }
    }

    pub fn is_int(self) -> bool {
        matches!(self, Self::Int(_))
    }
}

/// An int where it fits and all that went in were ints; a long otherwise.
fn narrow(value: i64, ints: bool) -> Bson {
    match i32::try_from(value) {
        Ok(small) if ints => Bson::Int32(small),
        _ => Bson::Int64(value),
    }
}

/// A sum that loses nothing on the way: Knuth's exact addition, as the server's `DoubleDoubleSummation`. Decimals are summed
/// apart.
#[derive(Debug, Clone)]
pub(super) struct Sum {
    total: f64,
    rest: f64,
    special: f64,
    /// The exact sum of the integers, where they are all there is.
    whole: i128,
    ints: bool,
    doubles: bool,
    decimals: Option<BigDecimal>,
}

impl Default for Sum {
    fn default() -> Self {
        Self { total: 0.0, rest: 0.0, special: 0.0, whole: 0, ints: true, doubles: false, decimals: None }
    }
}

impl Sum {
    pub fn add(&mut self, number: Number) -> Result<()> {
        if let Number::Decimal(_) = number {
            let total = self.decimals.take().unwrap_or_default();
            self.decimals = Some(decimal::sum(&total, &decimal::of(number)?));
            return Ok(());
        }
        self.ints &= number.is_int();
        self.doubles |= number.integer().is_none();
        match number.integer() {
            Some(value) if !number.is_int() => {
                self.whole += i128::from(value);
                // A long has more digits than a double: its lower and its upper half are added one after the other.
                let upper = value / (1 << 32) * (1 << 32);
                self.add_double(Number::Long(value - upper).double());
                self.add_double(Number::Long(upper).double());
            }
            int => {
                self.whole += i128::from(int.unwrap_or_default());
                self.add_double(number.double());
            }
        }
        Ok(())
    }

    fn add_double(&mut self, x: f64) {
        self.special += x;
        let (x, rest) = exactly(x, self.rest);
        let (sum, lost) = exactly(self.total, x);
        (self.total, self.rest) = (sum, rest + lost);
    }

    /// The sum, if decimals are in it.
    fn decimal(&self) -> Result<Option<BigDecimal>> {
        let Some(decimals) = &self.decimals else { return Ok(None) };
        match i64::try_from(self.whole) {
            Ok(whole) if !self.doubles => Ok(Some(decimal::sum(decimals, &BigDecimal::from(whole)))),
            _ => needs_server("a decimal and a double in one operation"),
        }
    }

    /// The mean of so many numbers.
    pub fn mean(&self, count: u32) -> Result<Bson> {
        match self.decimal()? {
            Some(decimal) => decimal::value(&decimal::quotient(&decimal, &BigDecimal::from(count))?),
            None => Ok(Bson::Double(self.double() / f64::from(count))),
        }
    }

    /// The sum as a double.
    fn double(&self) -> f64 {
        // Infinities leave no meaning to what was lost.
        if self.total.is_nan() { self.special } else { self.total }
    }

    /// The sum in the narrowest type.
    pub fn value(&self) -> Result<Bson> {
        if let Some(decimal) = self.decimal()? {
            return decimal::value(&decimal);
        }
        if self.doubles {
            return Ok(Bson::Double(self.double()));
        }
        Ok(i64::try_from(self.whole).map_or_else(|_| Bson::Double(self.double()), |value| narrow(value, self.ints)))
    }

    fn whole(&self) -> Option<i64> {
        if self.doubles || self.decimals.is_some() { None } else { i64::try_from(self.whole).ok() }
    }
}

/// A sum, rounded, and what the rounding lost.
fn exactly(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let part = sum - a;
    (sum, (a - (sum - part)) + (b - part))
}

fn is_decimal(number: Number) -> bool {
    matches!(number, Number::Decimal(_))
}

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
        let value = value?;
        match &value {
            value if is_nullish(value.as_ref()) => return Ok(Some(Bson::Null)),
            Some(Bson::DateTime(_)) if date.is_some() => return refused("`$add` takes one date at most"),
            Some(Bson::DateTime(time)) => date = Some(time.timestamp_millis()),
            Some(other) => match Number::or_decimal(other) {
                Some(number) => {
                    sum.add(number)?;
                    if !sum.doubles && i64::try_from(sum.whole).is_err() {
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
            None => return Ok(Some(Bson::Null)),
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
            (Some(a), Some(b)) if is_decimal(a) || is_decimal(b) => {
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
        if is_decimal(number) {
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

/// The integer that a number is, as positions and counts are given; none where it has a fraction or does not fit.
#[expect(clippy::cast_possible_truncation, reason = "it is compared with what it was")]
pub(super) fn position(value: Option<&Bson>) -> Result<Option<i64>> {
    Ok(match value.map(Number::of).transpose()?.flatten() {
        Some(Number::Double(v)) if v.fract() == 0.0 && (-2_147_483_648.0..2_147_483_648.0).contains(&v) => {
            Some(v as i64)
        }
        Some(number) => number.integer().filter(|value| i32::try_from(*value).is_ok()),
        None => None,
    })
}

pub(super) fn to_int(args: &Args<'_>) -> Result<Value> {
    convert(args, "$toInt", |value| match value {
        Some(value) => i32::try_from(value).ok().map(Bson::Int32),
        None => None,
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_int_is_added_at_once() {
        // A long is added by halves, which rounds once more. Both as the server adds (6.0.5).
        let sum = |last: Number| {
            let mut sum = Sum::default();
            for number in [Number::Double(-64.571_428_571_428_57), Number::Double(-64.0), last] {
                sum.add(number).unwrap();
            }
            sum.double().to_bits()
        };
        assert_eq!(sum(Number::Int(1900)), 1_771.428_571_428_571_6_f64.to_bits());
        assert_eq!(sum(Number::Long(1900)), 1_771.428_571_428_571_3_f64.to_bits());
    }
}
