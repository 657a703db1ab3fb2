//! Figures of several rounds.

/// The median; of an even number of values, the lower one.
pub fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(f64::NAN)
}

/// `0.93 (0.88 to 0.95)` with this number of `decimals`: the median, the least and the greatest value.
pub fn fan_out(values: &[f64], decimals: usize) -> String {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let greatest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    format!("{:.decimals$} ({least:.decimals$} to {greatest:.decimals$})", median(values))
}
