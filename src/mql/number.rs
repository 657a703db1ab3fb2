//! Numbers: the narrowest type that holds a result, as the server keeps it.

use bigdecimal::BigDecimal;
use bson::{Bson, Decimal128};

use super::{Result, needs_server};

pub(super) mod decimal;

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

    pub fn is_decimal(self) -> bool {
        matches!(self, Self::Decimal(_))
    }
}

/// An int where it fits and all that went in were ints; a long otherwise.
pub(super) fn narrow(value: i64, ints: bool) -> Bson {
    match i32::try_from(value) {
        Ok(small) if ints => Bson::Int32(small),
        _ => Bson::Int64(value),
    }
}

/// The server's `DoubleDoubleSummation`: the rounding error of each addition goes into the next one. Decimals are summed apart.
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
        // This step is exact only if `x` is the larger number. The server takes it regardless, so the result must match.
        let corrected = x + self.rest;
        let rest = self.rest - (corrected - x);
        let (sum, lost) = exactly(self.total, corrected);
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

    /// True for a sum of integers that a long cannot hold.
    pub fn is_beyond_a_long(&self) -> bool {
        !self.doubles && i64::try_from(self.whole).is_err()
    }

    pub fn whole(&self) -> Option<i64> {
        if self.doubles || self.decimals.is_some() { None } else { i64::try_from(self.whole).ok() }
    }
}

/// A sum, rounded, and what the rounding lost.
fn exactly(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let part = sum - a;
    (sum, (a - (sum - part)) + (b - part))
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
