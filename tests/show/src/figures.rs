//! Figures of several rounds.

/// The median; of an even number of values, the lower one.
pub fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(f64::NAN)
}

/// `0.93 (0.88 to 0.95)` with this number of `decimals`: the median, the least and the greatest value.
pub fn spread(values: &[f64], decimals: usize) -> String {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let greatest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    format!("{:.decimals$} ({least:.decimals$} to {greatest:.decimals$})", median(values))
}

/// The confidence interval of the median at 95%, by the binomial distribution: it leaves out as many values on each side as it can
/// while the median is beyond them with a chance of at most 2.5%. With fewer than six values, their range.
pub fn interval(values: &[f64]) -> (f64, f64) {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let mut below = 0.5_f64.powi(i32::try_from(values.len()).unwrap_or(i32::MAX));
    let (mut chance, mut skipped) = (below, 0);
    // `below` is the chance that at most `skipped` values are less than the median of all.
    while below <= 0.025 {
        skipped += 1;
        #[expect(clippy::cast_precision_loss, reason = "a few values")]
        let factor = (values.len() - skipped + 1) as f64 / skipped as f64;
        chance *= factor;
        below += chance;
    }
    let skipped = skipped.saturating_sub(1);
    let at = |nth: usize| values.get(nth).copied().unwrap_or(f64::NAN);
    (at(skipped), at(values.len().wrapping_sub(skipped + 1)))
}

#[cfg(test)]
mod tests {
    use super::interval;

    #[test]
    fn the_interval_of_twenty_values_leaves_out_five_on_each_side() {
        let values: Vec<f64> = (1..=20).map(f64::from).collect();
        assert_eq!(interval(&values), (6.0, 15.0));
        assert_eq!(interval(&[2.0, 1.0, 3.0]), (1.0, 3.0));
    }
}
