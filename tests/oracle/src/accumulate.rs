//! `$group`'s accumulators, by definition and with the server's types.

use bson::Bson;

use crate::{
    expression::{counts, integer},
    value::{compare, equal, float, is_nothing},
};

/// The accumulators the oracle knows.
pub const KNOWN: [&str; 9] = ["$sum", "$avg", "$min", "$max", "$count", "$first", "$last", "$push", "$addToSet"];

/// The result over the values of the operand, in reading order (`None`: the operand was missing there).
pub fn accumulate(operator: &str, values: &[Option<Bson>]) -> Result<Bson, String> {
    if matches!(operator, "$sum" | "$avg") && values.iter().any(|value| matches!(value, Some(Bson::Decimal128(_)))) {
        return Err("decimal arithmetic is not modelled".to_owned());
    }
    let something = || values.iter().flatten().filter(|value| !is_nothing(Some(value)));
    Ok(match operator {
        "$sum" => sum(values),
        "$avg" => {
            let numbers = numbers(values);
            #[allow(clippy::cast_precision_loss)]
            let count = numbers.len() as f64;
            if numbers.is_empty() { Bson::Null } else { Bson::Double(add_up(&numbers) / count) }
        }
        // Of equal values (1, 1.0) the first one read stays.
        "$min" => something().reduce(|a, b| if compare(a, b).is_gt() { b } else { a }).cloned().unwrap_or(Bson::Null),
        "$max" => something().reduce(|a, b| if compare(a, b).is_lt() { b } else { a }).cloned().unwrap_or(Bson::Null),
        "$count" => integer(values.len() as i128, false),
        "$first" => values.first().cloned().flatten().unwrap_or(Bson::Null),
        "$last" => values.last().cloned().flatten().unwrap_or(Bson::Null),
        "$push" => Bson::Array(values.iter().flatten().cloned().collect()),
        "$addToSet" => {
            let mut set: Vec<Bson> = Vec::new();
            for value in values.iter().flatten() {
                if !set.iter().any(|known| equal(known, value)) {
                    set.push(value.clone());
                }
            }
            set.sort_by(compare);
            Bson::Array(set)
        }
        other => return Err(format!("accumulator {other}")),
    })
}

/// The value of `on_empty: value`.
#[must_use]
pub fn of_nothing(operator: &str) -> Bson {
    match operator {
        "$sum" | "$count" => Bson::Int32(0),
        "$push" | "$addToSet" => Bson::Array(Vec::new()),
        _ => Bson::Null,
    }
}

/// Only numbers count.
fn numbers(values: &[Option<Bson>]) -> Vec<&Bson> {
    values.iter().flatten().filter(|value| counts(Some(value))).collect()
}

/// int32 sums stay int32 until they overflow into int64 and that into double; one double makes the sum a double.
fn sum(values: &[Option<Bson>]) -> Bson {
    let numbers = numbers(values);
    let whole = numbers.iter().map(|value| i128::from(value.as_i64().or(value.as_i32().map(i64::from)).unwrap_or(0)));
    let whole: i128 = whole.sum();
    if numbers.iter().any(|value| matches!(value, Bson::Double(_))) || i64::try_from(whole).is_err() {
        return Bson::Double(add_up(&numbers));
    }
    integer(whole, numbers.iter().any(|value| matches!(value, Bson::Int64(_))))
}

/// The server's sum, which depends on the order: `DoubleDoubleSummation` in its `util/summation.h`. What rounding has lost
/// is added to the next number, and left out of the result.
fn add_up(numbers: &[&Bson]) -> f64 {
    let (mut sum, mut lost, mut plain) = (0.0_f64, 0.0_f64, 0.0_f64);
    for term in numbers.iter().copied().flat_map(terms) {
        plain += term;
        let more = term + lost;
        // The server takes this for exact. It is not where more was lost than is added.
        let rest = lost - (more - term);
        let next = sum + more;
        let before = next - more;
        lost = rest + ((sum - before) + (more - (next - before)));
        sum = next;
    }
    // Infinities make it NaN; then the plain sum is right.
    if sum.is_nan() { plain } else { sum }
}

/// A long has more digits than a double: the server adds its lower half, then its upper half.
fn terms(number: &Bson) -> Vec<f64> {
    const HALF: i64 = 1 << 32;
    match number {
        Bson::Int64(number) => {
            let upper = *number / HALF * HALF;
            [*number - upper, upper].map(|half| float(&Bson::Int64(half))).to_vec()
        }
        other => vec![float(other)],
    }
}

#[cfg(test)]
mod tests {
    use bson::{Bson, bson};

    use super::*;

    fn of(operator: &str, values: &[Bson]) -> Bson {
        accumulate(operator, &values.iter().cloned().map(Some).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn sums_take_the_servers_types() {
        assert_eq!(of("$sum", &[bson!(1), bson!("x"), bson!(2), Bson::Null]), Bson::Int32(3));
        assert_eq!(of("$sum", &[bson!(i32::MAX), bson!(1)]), Bson::Int64(1 << 31));
        assert_eq!(of("$sum", &[Bson::Int64(1), bson!(1)]), Bson::Int64(2));
        assert_eq!(of("$sum", &[Bson::Int64(i64::MAX), bson!(1)]), Bson::Double(9_223_372_036_854_775_808.0));
        assert_eq!(of("$sum", &[bson!(1), bson!(0.5)]), Bson::Double(1.5));
        assert_eq!(of("$sum", &[bson!("x")]), Bson::Int32(0));
    }

    /// The results of MongoDB 6.0.5.
    #[test]
    fn sums_of_doubles_depend_on_the_order() {
        let [long, short] = [(1 << 53) + 1, -1].map(Bson::Int64);
        for (numbers, expected) in [
            (vec![bson!(1e100), bson!(-1e100), bson!(0.1)], 0.1),
            (vec![bson!(1e100), bson!(0.1), bson!(-1e100)], 0.0),
            (vec![bson!(5), bson!(1e100), bson!(-1e100), bson!(0.1), bson!(0.1)], 5.199_999_999_999_999),
            (vec![bson!(4), bson!(1), bson!(1e100), long, bson!(-1e100), short], 9_007_199_254_740_998.0),
            (vec![bson!(-64.571_428_571_428_57), bson!(-64.0), bson!(1900)], 1_771.428_571_428_571_6),
            (vec![bson!(-64.571_428_571_428_57), bson!(-64.0), Bson::Int64(1900)], 1_771.428_571_428_571_3),
        ] {
            assert_eq!(of("$sum", &numbers), Bson::Double(expected), "{numbers:?}");
            #[allow(clippy::cast_precision_loss)]
            let count = numbers.len() as f64;
            assert_eq!(of("$avg", &numbers), Bson::Double(expected / count), "{numbers:?}");
        }
    }

    #[test]
    fn the_rest() {
        assert_eq!(of("$avg", &[bson!(1), bson!(2), bson!("x")]), Bson::Double(1.5));
        assert_eq!(of("$avg", &[bson!("x")]), Bson::Null);
        assert_eq!(of("$min", &[Bson::Null, bson!(1), bson!(1.0)]), Bson::Int32(1));
        assert_eq!(of("$max", &[bson!(3), bson!("a"), Bson::Null]), bson!("a"));
        assert_eq!(of("$addToSet", &[bson!("b"), bson!(2), bson!(1), bson!(2.0)]), bson!([1, 2, "b"]));
        assert_eq!(accumulate("$push", &[None, Some(Bson::Null)]).unwrap(), bson!([null]));
        assert_eq!(accumulate("$first", &[None, Some(bson!(1))]).unwrap(), Bson::Null);
        assert_eq!(accumulate("$count", &[None, None]).unwrap(), Bson::Int32(2));
    }
}
