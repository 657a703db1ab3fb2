//! Arithmetic with decimals: exact, then rounded to the 34 digits of a Decimal128. The number of digits after the point is kept, as
//! the server keeps it: 1.10 and 2 are 3.10.

use std::num::NonZeroU64;

use bigdecimal::{BigDecimal, RoundingMode, Zero, num_bigint::Sign};
use bson::{Bson, Decimal128};

use super::Number;
use crate::{Result, needs_server};

/// The most digits before or after the point, so that nothing overflows on the way.
const FAR: i64 = 1000;
/// Digits of a Decimal128.
const DIGITS: NonZeroU64 = NonZeroU64::new(34).expect("not zero");

/// A number as a decimal. Infinities, NaN and the negative zero are the server's, and so is a double among decimals: 6.0 takes its
/// exact value, and 7.0 its first fifteen digits.
pub fn of(number: Number) -> Result<BigDecimal> {
    match (number, number.integer()) {
        (_, Some(whole)) => Ok(BigDecimal::from(whole)),
        (Number::Decimal(decimal), _) => {
            let text = decimal.to_string();
            match text.parse::<BigDecimal>() {
                Ok(decimal) if decimal.is_zero() && text.starts_with('-') => {
                    needs_server("the negative zero as a decimal")
                }
                Ok(decimal) if decimal.fractional_digit_count().abs() <= FAR => Ok(decimal),
                _ => needs_server("arithmetic with infinity, NaN or a very large exponent as a decimal"),
            }
        }
        _ => needs_server("a decimal and a double in one operation"),
    }
}

/// The nearest decimal of 34 digits, the even one of two.
fn rounded(value: BigDecimal) -> BigDecimal {
    if value.digits() <= DIGITS.get() {
        return value;
    }
    value.with_precision_round(DIGITS, RoundingMode::HalfEven)
}

/// The sum, with the digits after the point of both. The library's own drops those of a zero.
pub fn sum(left: &BigDecimal, right: &BigDecimal) -> BigDecimal {
    let scale = left.fractional_digit_count().max(right.fractional_digit_count());
    let digits = |value: &BigDecimal| value.with_scale(scale).into_bigint_and_exponent().0;
    rounded(BigDecimal::new(digits(left) + digits(right), scale))
}

pub fn difference(left: &BigDecimal, right: &BigDecimal) -> BigDecimal {
    sum(left, &-right)
}

/// The product, with as many digits after the point as both together. A zero takes the sign of both, which is not kept here.
pub fn product(left: &BigDecimal, right: &BigDecimal) -> Result<BigDecimal> {
    let ((left_digits, left_scale), (right_digits, right_scale)) =
        (left.as_bigint_and_exponent(), right.as_bigint_and_exponent());
    let product = BigDecimal::new(left_digits * right_digits, left_scale + right_scale);
    let is_negative = |value: &BigDecimal| value.sign() == Sign::Minus;
    if product.is_zero() && (is_negative(left) || is_negative(right)) {
        return needs_server("a product of decimals that is the negative zero");
    }
    Ok(rounded(product))
}

/// The quotient, with as many digits after the point as the dividend has, or as many more as it needs.
pub fn quotient(left: &BigDecimal, right: &BigDecimal) -> Result<BigDecimal> {
    if left.is_zero() {
        return needs_server("a zero divided as a decimal");
    }
    let scale = left.fractional_digit_count() - right.fractional_digit_count();
    // Computed to a hundred digits.
    let short = rounded(left / right).normalized();
    Ok(if short.fractional_digit_count() < scale { short.with_scale(scale) } else { short })
}

/// The value as the server stores it.
pub fn value(decimal: &BigDecimal) -> Result<Bson> {
    let (digits, scale) = decimal.as_bigint_and_exponent();
    match format!("{digits}E{}", -scale).parse::<Decimal128>() {
        Ok(decimal) => Ok(Bson::Decimal128(decimal)),
        Err(_) => needs_server("a decimal beyond the exponents of a Decimal128"),
    }
}
