//! How numbers are spread, and how that is known. Pure.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// How a figure is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Everything was counted.
    Exact,
    /// So many documents were drawn.
    Sample(u64),
}

/// What is not known, and why: a privilege, a time limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unknown(pub String);

/// A figure, or why there is none.
pub type Known<T> = std::result::Result<T, Unknown>;

/// The usual figures of many numbers. Percentiles are by nearest rank, so each is a number that was there.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// How many numbers.
    pub count: u64,
    /// Their sum.
    pub sum: u64,
    /// Half of them are not greater.
    pub median: u64,
    /// 99 of 100 are not greater.
    pub p99: u64,
    /// The greatest.
    pub max: u64,
    /// How it is known.
    pub how: How,
}

impl Spread {
    /// Of a histogram: how often each number was met. None of nothing.
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

    /// Of a list.
    #[must_use]
    pub fn of_list(numbers: impl IntoIterator<Item = u64>, how: How) -> Option<Self> {
        let mut histogram = BTreeMap::new();
        for number in numbers {
            *histogram.entry(number).or_insert(0) += 1;
        }
        Self::of(&histogram, how)
    }

    /// The mean.
    #[must_use]
    pub fn mean(&self) -> f64 {
        ratio(self.sum, self.count)
    }

    /// For programs.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "count": self.count, "mean": self.mean(), "median": self.median, "p99": self.p99, "max": self.max,
            "exact": self.how == How::Exact,
        })
    }
}

/// One number over another; 0 over nothing.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "figures for people")]
pub fn ratio(over: u64, under: u64) -> f64 {
    if under == 0 { 0.0 } else { over as f64 / under as f64 }
}

/// A number that is not negative, without what is behind the point.
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
        let spread = Spread::of_list(1..=100, How::Exact).unwrap();
        assert_eq!((spread.median, spread.p99, spread.max, spread.count, spread.sum), (50, 99, 100, 100, 5050));
        let spread = Spread::of_list([3], How::Sample(1)).unwrap();
        assert_eq!((spread.median, spread.p99, spread.max), (3, 3, 3));
        let skewed = Spread::of(&BTreeMap::from([(1, 989), (7, 10), (5000, 1)]), How::Exact).unwrap();
        assert_eq!((skewed.median, skewed.p99, skewed.max), (1, 7, 5000));
        assert_eq!(Spread::of(&BTreeMap::new(), How::Exact), None);
    }
}
