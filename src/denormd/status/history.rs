//! The last hour, in points of ten seconds: bounded by the number of rules, and small for idle rules.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;

use denormd_engine::metrics::Metrics;
use denormd_model::distribution::ratio;

use super::{
    lag::{Lags, seconds},
    report::Percentiles,
};

/// Milliseconds in one point.
const STEP: i64 = 10_000;
/// An oplog window, in seconds, that a burst of writes cannot use up.
const AMPLE: f64 = 4.0 * 3600.0;
/// Points kept: an hour.
const POINTS: usize = 360;
/// Points that percentiles and rates cover: five minutes.
const WINDOW: usize = 30;

/// The points of the last hour.
#[derive(Debug, Default)]
pub struct History {
    /// The rules of the last sample.
    rules: Vec<String>,
    points: VecDeque<Point>,
    /// The point that is being filled.
    open: Option<Point>,
    /// Totals at the ends of the last points.
    totals: VecDeque<Totals>,
    /// Time and headroom of the oplog, in milliseconds and seconds.
    headroom: VecDeque<(i64, f64)>,
}

#[derive(Debug, Clone, Default)]
struct Point {
    /// Its start, in milliseconds since 1970.
    at: i64,
    /// The largest lag within it.
    lag: f64,
    /// The largest lag of each rule that was late, and None for each rule whose lag was not known.
    rules: BTreeMap<String, Option<f64>>,
    events_rate: f64,
    targets_rate: f64,
    propagation: Percentiles,
}

#[derive(Debug, Clone, Default)]
struct Totals {
    at: i64,
    events: u64,
    /// All changed targets.
    targets: u64,
    /// Counts by bucket, for the rules that have any.
    propagation: BTreeMap<String, Vec<u64>>,
    writes: (u64, f64),
}

impl Totals {
    fn now(metrics: &Metrics, at: i64) -> Self {
        let (events, targets) = metrics.totals();
        Self {
            at,
            events,
            targets: targets.into_iter().map(|(_, targets)| targets).sum(),
            propagation: metrics
                .propagations()
                .into_iter()
                .filter(|(_, counts)| counts.iter().any(|n| *n > 0))
                .collect(),
            writes: metrics.writes(),
        }
    }

    fn rates(&self, before: &Self) -> (f64, f64) {
        let elapsed = seconds((self.at - before.at).max(1));
        (
            ratio(self.events.saturating_sub(before.events), 1) / elapsed,
            ratio(self.targets.saturating_sub(before.targets), 1) / elapsed,
        )
    }

    fn since(&self, before: &Self, rule: Option<&str>) -> Percentiles {
        let mut sum = vec![0_u64; Metrics::bounds().len() + 1];
        let chosen: Vec<(&String, &Vec<u64>)> = match rule {
            Some(rule) => self.propagation.get_key_value(rule).into_iter().collect(),
            None => self.propagation.iter().collect(),
        };
        for (name, counts) in chosen {
            let known = before.propagation.get(name);
            for (nth, count) in counts.iter().enumerate() {
                let earlier = known.and_then(|known| known.get(nth)).copied().unwrap_or_default();
                sum[nth] += count.saturating_sub(earlier);
            }
        }
        percentiles(&sum)
    }
}

/// The totals of now and of five minutes ago.
#[derive(Debug)]
pub struct Recent<'a> {
    now: Totals,
    before: Option<&'a Totals>,
}

impl Recent<'_> {
    /// Propagation, of one rule or of all.
    pub fn propagation(&self, rule: Option<&str>) -> Percentiles {
        self.before.map(|before| self.now.since(before, rule)).unwrap_or_default()
    }
}

/// The points for the page. Each list has a value for each point; one that is not known is null.
#[derive(Debug, Serialize)]
pub struct Lines {
    step_seconds: i64,
    /// The starts of the points, in milliseconds since 1970.
    times: Vec<i64>,
    lag: Vec<f64>,
    /// The lag of each rule.
    rules: BTreeMap<String, Vec<Option<f64>>>,
    events_per_second: Vec<f64>,
    targets_per_second: Vec<f64>,
    p50: Vec<Option<f64>>,
    p99: Vec<Option<f64>>,
}

impl History {
    /// Takes a sample, about once a second. While nothing is known, there are no points.
    pub fn sample(&mut self, metrics: &Metrics, lags: &Lags, now: i64) {
        let start = now - now.rem_euclid(STEP);
        if self.totals.is_empty() {
            self.totals.push_back(Totals::now(metrics, now));
        }
        if self.open.as_ref().is_some_and(|open| open.at != start) {
            self.close(metrics, now);
        }
        let Some(overall) = lags.overall else { return };
        let open = self.open.get_or_insert_with(|| Point { at: start, ..Point::default() });
        open.lag = open.lag.max(overall);
        for rule in lags.rules.iter().filter(|rule| !rule.is_known || rule.own > 0.0) {
            let largest = open.rules.entry(rule.name.clone()).or_default();
            if rule.is_known {
                *largest = Some(largest.unwrap_or_default().max(rule.own));
            }
        }
        let names = || lags.rules.iter().map(|rule| &rule.name);
        if !names().eq(&self.rules) {
            self.rules = names().cloned().collect();
        }
    }

    fn close(&mut self, metrics: &Metrics, now: i64) {
        let totals = Totals::now(metrics, now);
        if let (Some(mut point), Some(before)) = (self.open.take(), self.totals.back()) {
            (point.events_rate, point.targets_rate) = totals.rates(before);
            point.propagation = totals.since(before, None);
            self.points.push_back(point);
        }
        if self.points.len() > POINTS {
            self.points.pop_front();
        }
        self.totals.push_back(totals);
        if self.totals.len() > WINDOW + 1 {
            self.totals.pop_front();
        }
    }

    /// The last five minutes.
    pub fn recent(&self, metrics: &Metrics) -> Recent<'_> {
        Recent { now: Totals::now(metrics, 0), before: self.totals.front() }
    }

    /// Events and changed targets a second, in the last ten to twenty seconds.
    pub fn rates(&self, metrics: &Metrics, now: i64) -> (f64, f64) {
        let before = self.totals.iter().rev().find(|totals| now - totals.at >= STEP).or(self.totals.front());
        before.map(|before| Totals::now(metrics, now).rates(before)).unwrap_or_default()
    }

    /// Mean duration of a write command over the last ten seconds or so.
    pub fn write_seconds(&self, metrics: &Metrics) -> f64 {
        let Some(before) = self.totals.iter().rev().nth(1).or(self.totals.back()) else { return 0.0 };
        let (writes, seconds) = metrics.writes();
        let writes = writes.saturating_sub(before.writes.0);
        if writes == 0 { 0.0 } else { (seconds - before.writes.1) / ratio(writes, 1) }
    }

    /// Records the oplog's headroom.
    pub fn headroom(&mut self, now: i64, headroom: f64) {
        self.headroom.push_back((now, headroom));
        while self.headroom.front().is_some_and(|(at, _)| now - at > 300_000) {
            self.headroom.pop_front();
        }
    }

    /// Seconds until the position falls off the oplog, if it continues to fall behind as in the last minutes.
    pub fn lost_in(&self) -> Option<f64> {
        let ((from, before), (to, after)) = (self.headroom.front()?, self.headroom.back()?);
        let mut rate = (before - after) / seconds((to - from).max(1));
        // With an ample window a burst is no danger: the position must have fallen behind all the time.
        if *after >= AMPLE {
            let (at, between) = self.headroom.get(self.headroom.len() / 2)?;
            let fell = |before: f64, after: f64, millis: i64| (before - after) / seconds(millis.max(1));
            rate = rate.min(fell(*before, *between, at - from)).min(fell(*between, *after, to - at));
        }
        // A lower rate is normal variation of a healthy oplog.
        (to - from >= 15_000 && rate > 0.1).then(|| (after / rate).max(0.0))
    }

    /// The points since `since`, in milliseconds since 1970.
    pub fn lines(&self, since: i64) -> Lines {
        let points: Vec<&Point> = self.points.iter().filter(|point| point.at > since).collect();
        let of = |value: fn(&Point) -> f64| points.iter().map(|point| rounded(value(point))).collect::<Vec<_>>();
        let idle = vec![Some(0.0); points.len()];
        let mut rules: BTreeMap<String, _> = self.rules.iter().map(|name| (name.clone(), idle.clone())).collect();
        for (nth, point) in points.iter().enumerate() {
            for (name, lag) in &point.rules {
                // An entry would copy the name each time.
                match rules.get_mut(name) {
                    Some(line) => line[nth] = lag.map(rounded),
                    None => rules.entry(name.clone()).or_insert(idle.clone())[nth] = lag.map(rounded),
                }
            }
        }
        Lines {
            step_seconds: STEP / 1000,
            times: points.iter().map(|point| point.at).collect(),
            lag: of(|p| p.lag),
            rules,
            events_per_second: of(|p| p.events_rate),
            targets_per_second: of(|p| p.targets_rate),
            p50: points.iter().map(|point| point.propagation.p50).collect(),
            p99: points.iter().map(|point| point.propagation.p99).collect(),
        }
    }
}

fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Percentiles of counts by bucket, interpolated linearly within a bucket as Prometheus does.
fn percentiles(counts: &[u64]) -> Percentiles {
    let total: u64 = counts.iter().sum();
    let quantile = |q: f64| {
        let rank = q * ratio(total, 1);
        let (mut below, mut lower) = (0.0, 0.0);
        for (nth, bucket) in counts.iter().enumerate() {
            let here = ratio(*bucket, 1);
            let Some(upper) = Metrics::bounds().get(nth) else { return lower };
            if *bucket > 0 && below + here >= rank {
                return lower + (upper - lower) * ((rank - below) / here);
            }
            below += here;
            lower = *upper;
        }
        lower
    };
    let known = |q| (total > 0).then(|| rounded(quantile(q) * 10.0) / 10.0);
    Percentiles { count: total, p50: known(0.5), p95: known(0.95), p99: known(0.99) }
}

#[cfg(test)]
mod tests {
    use super::{super::lag::RuleLag, *};

    #[test]
    fn percentiles_lie_within_their_bucket() {
        let mut counts = vec![0; Metrics::bounds().len() + 1];
        counts[2] = 98;
        counts[9] = 2;
        let found = percentiles(&counts);
        assert!(found.p50.is_some_and(|p| (0.0025..=0.005).contains(&p)), "{found:?}");
        assert!(found.p99.is_some_and(|p| (0.5..=1.0).contains(&p)), "{found:?}");
        assert_eq!(percentiles(&[0; 18]).p50, None);
    }

    /// A burst of writes that takes two hours of a window of twenty must not be reported as a loss of changes within
    /// the hour.
    #[test]
    fn a_burst_beside_an_ample_window_is_no_danger() {
        let hour = 3600.0;
        let headroom = |second: i32| if second < 60 { 20.0 * hour } else { 18.0 * hour };
        let mut burst = History::default();
        (0..300).for_each(|second| burst.headroom(i64::from(second) * 1000, headroom(second)));
        assert_eq!(burst.lost_in(), None);
        let mut falling = History::default();
        (0..300).for_each(|second| falling.headroom(i64::from(second) * 1000, 20.0 * hour - f64::from(second) * 24.0));
        assert!(falling.lost_in().is_some_and(|left| left < hour));
    }

    /// The page drew a paused rule as one that is not behind.
    #[test]
    fn an_unknown_lag_is_null() {
        let rule = |name: &str, own, is_known| RuleLag { name: name.to_owned(), own, chain: None, is_known };
        let rules = vec![rule("idle", 0.0, true), rule("late", 7.0, true), rule("paused", 0.0, false)];
        let lags = Lags { overall: Some(7.0), rules, ..Lags::default() };
        let (metrics, mut history) = (Metrics::new().unwrap(), History::default());
        for now in [0, STEP] {
            history.sample(&metrics, &lags, now);
        }
        let json = serde_json::to_value(history.lines(-1)).unwrap();
        assert_eq!(json["rules"], serde_json::json!({"idle": [0.0], "late": [7.0], "paused": [null]}));
        assert_eq!(json["p99"], serde_json::json!([null]));
    }

    #[test]
    fn a_position_that_stands_still_is_lost_when_the_headroom_is_used_up() {
        let mut history = History::default();
        for second in 0..30_i32 {
            history.headroom(i64::from(second) * 1000, 1000.0 - f64::from(second));
        }
        assert!(history.lost_in().is_some_and(|left| (970.0..=972.0).contains(&left)));
        let mut healthy = History::default();
        (0..30).for_each(|second| healthy.headroom(second * 1000, 1000.0));
        assert_eq!(healthy.lost_in(), None);
    }
}
