//! The lag of the copies. Pure.
//!
//! Two things make a copy late: work that waits or runs (the queue has the commit time of its oldest change), and
//! changes that have not been read. The second is measured against probes of the server: each has the server's last
//! operation at a certain time. A stream that has passed a probe's operation has read everything that was committed by
//! then.

use std::{collections::VecDeque, iter};

use tokio::time::Instant;

use denormd_engine::snapshot::{RuleFacts, Snapshot, StreamFacts};
use denormd_model::position::ClusterTime;

/// Lag, in seconds, from which a rule counts as behind.
pub const BEHIND: f64 = 5.0;
/// Age of unread changes, in milliseconds, that does not count as lag: a stream answers twice a second and probes come
/// once a second.
pub const RHYTHM: i64 = 3000;
/// Number of probes kept.
const KEPT: usize = 3600;

/// An answer of the server.
#[derive(Debug, Clone, Copy)]
pub struct Probe {
    /// Its last operation.
    pub operation: ClusterTime,
    /// Its clock, in milliseconds since 1970.
    pub millis: i64,
}

/// The last probes, oldest first.
#[derive(Debug, Default)]
pub struct Probes {
    ring: VecDeque<Probe>,
    answered: Option<Instant>,
}

impl Probes {
    /// Adds an answer.
    pub fn add(&mut self, probe: Probe) {
        self.answered = Some(Instant::now());
        // If an idle server answers many times, the last answer is enough.
        if self.ring.back().is_some_and(|last| last.operation >= probe.operation) {
            self.ring.pop_back();
        }
        self.ring.push_back(probe);
        if self.ring.len() > KEPT {
            self.ring.pop_front();
        }
    }

    /// Time of the server's last answer.
    pub fn answered(&self) -> Option<Instant> {
        self.answered
    }

    /// Time for which there may have been changes that a stream has not read, in milliseconds.
    fn unread(&self, reached: ClusterTime, now: i64) -> i64 {
        let age = match self.ring.iter().rev().find(|probe| probe.operation <= reached) {
            Some(probe) => now - probe.millis,
            // Before the first probe, the position's own time counts.
            None => now - i64::from(reached.seconds) * 1000,
        };
        if age > RHYTHM { age } else { 0 }
    }
}

/// The lags at one moment, in seconds.
#[derive(Debug, Clone, Default)]
pub struct Lags {
    /// The largest lag of the rules that have one. None if none has, and while nothing is known.
    pub overall: Option<f64>,
    /// The lag of each rule.
    pub rules: Vec<RuleLag>,
    /// The largest lag of changes that have not been read, of all streams.
    pub unread: f64,
    /// Age of the checkpoints while newer positions are known.
    pub checkpoint: f64,
    /// Age of the last answer of the slowest stream.
    pub stream_age: f64,
}

/// A rule's lag, in seconds.
#[derive(Debug, Clone)]
pub struct RuleLag {
    /// The rule.
    pub name: String,
    /// The lag of its own changes.
    pub own: f64,
    /// The largest of its own lag and those of the rules that feed it. None if one of them is not known.
    pub chain: Option<f64>,
    /// True if its lag is known and has a meaning: the rule is not stopped, and does not wait for `denormd backfill`.
    pub is_known: bool,
}

impl RuleLag {
    /// True if the rule counts as behind.
    pub fn is_behind(&self) -> bool {
        self.is_known && self.own >= BEHIND
    }
}

impl Lags {
    /// The lags at `now`, in milliseconds since 1970 by the server's clock.
    pub fn of(seen: &Snapshot, probes: &Probes, now: i64) -> Self {
        let unread: Vec<i64> = seen.streams.iter().map(|stream| probes.unread(stream.reached, now)).collect();
        let own = |(rule, oldest): (&RuleFacts, &Option<i64>)| {
            let held = oldest.map_or(0, |committed| (now - committed).max(0));
            let streams = rule.streams.iter().filter_map(|stream| unread.get(*stream)).max();
            seconds(held.max(streams.copied().unwrap_or_default()))
        };
        let own: Vec<f64> = seen.rules.iter().zip(&seen.oldest).map(own).collect();
        // Before the server's first answer, an idle stream cannot be distinguished from one that is behind.
        let known = !probes.ring.is_empty();
        let rules = seen.rules.iter().enumerate().map(|(nth, rule)| {
            let chain = iter::once(nth).chain(rule.fed_by.iter().copied());
            let has_lag = |rule: usize| seen.has_lag(rule) && known;
            RuleLag {
                name: rule.name.clone(),
                own: own[nth],
                chain: chain.clone().all(has_lag).then(|| chain.map(|rule| own[rule]).fold(0.0, f64::max)),
                is_known: has_lag(nth),
            }
        });
        let rules: Vec<RuleLag> = rules.collect();
        let checkpoint = seen.streams.iter().map(|stream| checkpoint(stream, now)).max();
        let stream_age = seen.streams.iter().map(|stream| stream.delivered.elapsed().as_secs_f64());
        Self {
            overall: rules.iter().filter(|rule| rule.is_known).map(|rule| rule.own).reduce(f64::max),
            unread: seconds(unread.iter().copied().max().unwrap_or_default()),
            checkpoint: seconds(checkpoint.unwrap_or_default()),
            stream_age: stream_age.fold(0.0, f64::max),
            rules,
        }
    }
}

fn checkpoint(stream: &StreamFacts, now: i64) -> i64 {
    match stream.saved {
        Some(saved) if saved >= stream.reached => 0,
        Some(saved) => (now - i64::from(saved.seconds) * 1000).max(0),
        None => 0,
    }
}

/// Milliseconds as seconds.
pub fn seconds(millis: i64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "milliseconds of a lag are far below 2^53")]
    let millis = millis as f64;
    millis / 1000.0
}

/// Seconds as milliseconds.
pub fn millis(seconds: f64) -> i64 {
    #[expect(clippy::cast_possible_truncation, reason = "a lag in milliseconds")]
    let millis = (seconds * 1000.0) as i64;
    millis
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u32) -> ClusterTime {
        ClusterTime { seconds, increment: 1 }
    }

    fn probes(all: &[(u32, i64)]) -> Probes {
        let mut probes = Probes::default();
        for (operation, millis) in all {
            probes.add(Probe { operation: at(*operation), millis: *millis });
        }
        probes
    }

    #[test]
    fn an_idle_cluster_is_not_behind_however_old_its_last_operation_is() {
        let probes = probes(&[(10, 10_000), (10, 500_000)]);
        assert_eq!(probes.unread(at(10), 501_000), 0);
    }

    #[test]
    fn what_a_stream_has_not_read_is_as_old_as_the_last_probe_that_it_passed() {
        let probes = probes(&[(10, 10_000), (20, 20_000), (30, 30_000)]);
        assert_eq!(probes.unread(at(30), 31_000), 0);
        assert_eq!(probes.unread(at(25), 31_000), 11_000);
        assert_eq!(probes.unread(at(5), 31_000), 26_000, "before the first probe its own time counts");
    }

    #[test]
    fn lag_grows_when_the_server_answers_no_more() {
        let probes = probes(&[(10, 10_000)]);
        assert_eq!(probes.unread(at(10), 60_000), 50_000);
    }
}
