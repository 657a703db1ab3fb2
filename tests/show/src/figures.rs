//! Figures of several rounds.

/// The middle one; of an even number, the lower.
pub fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(f64::NAN)
}

/// `0.93 (0.88 to 0.95)` with two `decimals`: the middle one, the least and the greatest.
pub fn spread(values: &[f64], decimals: usize) -> String {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let greatest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    format!("{:.decimals$} ({least:.decimals$} to {greatest:.decimals$})", median(values))
}
