//! The distribution of numbers, and the basis of a figure. Pure.

use std::collections::BTreeMap;

use bson::Bson;
use serde_json::{Value, json};

use crate::key::whole_number;

/// The basis of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Everything was counted.
    Exact,
    /// A sample of this many documents.
    Sample(u64),
}

/// The reason why a figure is not known: a missing privilege, a time limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unknown(pub String);

/// A figure, or the reason why it is not known.
pub type Known<T> = std::result::Result<T, Unknown>;

/// Summary statistics of many numbers. Percentiles use the nearest rank, so each is one of the numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Distribution {
    /// Number of values.
    pub count: u64,
    /// The sum of the values.
    pub sum: u64,
    /// The 50th percentile.
    pub median: u64,
    /// The 99th percentile.
    pub p99: u64,
    /// The greatest value.
    pub max: u64,
    /// The basis of these figures.
    pub how: How,
}

impl Distribution {
    /// The statistics of a histogram, which maps each number to its frequency. None if it is empty.
    #[must_use]
    pub fn of(histogram: &BTreeMap<u64, u64>, how: How) -> Option<Self> {
        let count: u64 = histogram.values().sum();
        let (max, _) = histogram.last_key_value()?;
        let sum = histogram.iter().map(|(number, times)| number.saturating_mul(*times)).sum();
        let rank = |percent: u64| {
            let wanted = count.saturating_mul(percent).div_ceil(100).max(1);
            let mut seen = 0;
            let at = histogram.iter().find(|(_, times)| {
                seen += **times;
                seen >= wanted
            });
            at.map_or(*max, |(number, _)| *number)
        };
        Some(Self { count, sum, median: rank(50), p99: rank(99), max: *max, how })
    }

    /// The statistics of a list. None if it is empty.
    #[must_use]
    pub fn of_list(numbers: impl IntoIterator<Item = u64>, how: How) -> Option<Self> {
        let mut histogram = BTreeMap::new();
        for number in numbers {
            *histogram.entry(number).or_insert(0) += 1;
        }
        Self::of(&histogram, how)
    }

    /// The arithmetic mean; 0 if there are no numbers.
    #[must_use]
    pub fn mean(&self) -> f64 {
        ratio(self.sum, self.count)
    }

    /// The statistics as JSON, for programs.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "count": self.count, "mean": self.mean(), "median": self.median, "p99": self.p99, "max": self.max,
            "exact": self.how == How::Exact,
        })
    }
}

/// The quotient of two numbers; 0 if the divisor is 0.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "figures for people")]
pub fn ratio(over: u64, under: u64) -> f64 {
    if under == 0 { 0.0 } else { over as f64 / under as f64 }
}

/// The whole number that a value of any numeric type is; 0 for other values.
#[must_use]
pub fn number(value: &Bson) -> u64 {
    whole_number(value).and_then(|number| u64::try_from(number).ok()).unwrap_or_default()
}

/// The integer part of a non-negative number.
#[must_use]
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a cast from float saturates")]
pub fn whole(number: f64) -> u64 {
    number as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_numbers_that_were_there() {
        let distribution = Distribution::of_list(1..=100, How::Exact).unwrap();
        assert_eq!(
            (distribution.median, distribution.p99, distribution.max, distribution.count, distribution.sum),
            (50, 99, 100, 100, 5050)
        );
        let distribution = Distribution::of_list([3], How::Sample(1)).unwrap();
        assert_eq!((distribution.median, distribution.p99, distribution.max), (3, 3, 3));
        let skewed = Distribution::of(&BTreeMap::from([(1, 989), (7, 10), (5000, 1)]), How::Exact).unwrap();
        assert_eq!((skewed.median, skewed.p99, skewed.max), (1, 7, 5000));
        assert_eq!(Distribution::of(&BTreeMap::new(), How::Exact), None);
    }
}
