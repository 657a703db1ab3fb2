//! Selects the changes that get a line in the timeline. Pure.
//!
//! A spell is a period in which a cause holds, with a line at its beginning and one at its end. A very short one leaves
//! no line, and short interruptions do not end it: so a server that is slow for a second, once a minute, does not fill
//! the timeline.

use std::collections::{BTreeMap, BTreeSet};

use denormd_engine::{events::Event, metrics::Cause, snapshot::BackfillProgress};
use tokio::time::Instant;

use super::{causes::ActiveCause, lag::seconds, sentence::named};
use denormd_model::text::duration;

/// Milliseconds that a cause must hold before it is reported; a severe one is reported at once.
const SETTLED: i64 = 5_000;
/// Milliseconds without the cause after which its spell is over.
const GONE: i64 = 15_000;
/// Milliseconds after a pause of the process for which readings may be from before it.
const STALE: i64 = 4_000;
/// Milliseconds after which a cause is reported in spite of pauses: a process may pause again and again.
const LONGEST_DEFERRAL: i64 = 15_000;
/// Rules named in a line.
const NAMED: usize = 5;

/// The current spells and backfills.
#[derive(Debug, Default)]
pub struct Timeline {
    spells: BTreeMap<Cause, Spell>,
    /// The last reported backfill of each rule: its start, and true if its end was reported.
    backfills: BTreeMap<String, (Instant, bool)>,
}

#[derive(Debug)]
struct Spell {
    began: i64,
    found: i64,
    seen: i64,
    reported: bool,
    rules: BTreeSet<String>,
}

impl Timeline {
    /// Takes the causes that hold at `now`; returns the events to report. `resumed` is the end of the last pause of this
    /// process. Soon after it, readings are stale: no new spell is reported, and those that were reported go on.
    /// Both times are in milliseconds since 1970.
    pub fn causes(&mut self, now: i64, found: &[ActiveCause], resumed: i64) -> Vec<Event> {
        let mut events = Vec::new();
        let is_stale = is_stale(now, resumed);
        for ActiveCause { cause, rules, since } in found.iter().filter(|found| is_spell(found.cause)) {
            let spell = self.spells.entry(*cause).or_insert_with(|| Spell {
                // Nothing is known about the time of the pause.
                began: since.unwrap_or(now).max(resumed),
                found: now,
                seen: now,
                reported: false,
                rules: BTreeSet::new(),
            });
            spell.seen = now;
            let joined: Vec<String> = rules.iter().filter(|rule| !spell.rules.contains(*rule)).cloned().collect();
            spell.rules.extend(joined.iter().cloned());
            let may_tell = !is_stale || now - spell.found >= LONGEST_DEFERRAL;
            if !spell.reported && may_tell && (cause.is_severe() || now - spell.began >= SETTLED) {
                spell.reported = true;
                let rules: Vec<String> = spell.rules.iter().cloned().collect();
                events.push(event(spell.began, cause.name(), rules, cause.meaning()));
            } else if spell.reported && !joined.is_empty() && is_by_rule(*cause) {
                events.push(event(now, cause.name(), joined, cause.meaning()));
            }
        }
        self.spells.retain(|cause, spell| {
            let over = now - spell.seen >= GONE;
            if over && spell.reported {
                let lasted = duration(seconds(spell.seen - spell.began));
                let text = format!("`{}` ended after {lasted}", cause.name());
                let rules = spell.rules.iter().cloned().collect();
                events.push(event(spell.seen, &format!("{}_ended", cause.name()), rules, &text));
            }
            !over
        });
        events
    }

    /// Forgets the causes of a leader, because another instance leads now and reports its own.
    pub fn forget(&mut self) {
        self.spells.retain(|cause, _| cause.is_of_the_instance());
    }

    /// Takes the last backfill of each rule; returns the events to report at `now`.
    pub fn backfills(
        &mut self,
        now: i64,
        all: &BTreeMap<String, BackfillProgress>,
        in_shadow: impl Fn(&str) -> bool,
    ) -> Vec<Event> {
        let (mut started, mut done) = (Vec::new(), Vec::new());
        for (rule, progress) in all {
            let (known, over) = self.backfills.get(rule).copied().unzip();
            if known != Some(progress.started) {
                started.push(rule.clone());
            }
            if let Some(ended) = progress.ended.filter(|_| known != Some(progress.started) || over == Some(false)) {
                let took = duration(ended.duration_since(progress.started).as_secs_f64());
                let targets = format!("{} targets in {took}", progress.scanned);
                let text = match progress.dead_letters {
                    _ if in_shadow(rule) => format!("existing data was compared, nothing was written: {targets}"),
                    0 => format!("existing data is up to date: {targets}"),
                    1 => format!("not all existing data is up to date: {targets}, 1 dead letter"),
                    some => format!("not all existing data is up to date: {targets}, {some} dead letters"),
                };
                done.push((rule, text));
            }
            self.backfills.insert(rule.clone(), (progress.started, progress.ended.is_some()));
        }
        let mut events = Vec::new();
        if !started.is_empty() {
            events.push(event(now, "backfill_started", started, "existing data is being brought up to date"));
        }
        // Events of one time are ordered by their ids, which ascend.
        events.extend(done.into_iter().map(|(rule, text)| event(now, "backfill_done", vec![rule.clone()], &text)));
        events
    }
}

/// True soon after a pause that ended at `resumed`: what is known may be from before it.
pub fn is_stale(now: i64, resumed: i64) -> bool {
    now - resumed < STALE
}

fn event(at: i64, what: &str, rules: Vec<String>, text: &str) -> Event {
    let named = if rules.is_empty() { String::new() } else { format!(" ({})", named(&rules, NAMED)) };
    Event::new(at, what, rules, format!("{text}{named}"))
}

/// Backfills and refused configs have lines of their own.
fn is_spell(cause: Cause) -> bool {
    !matches!(cause, Cause::Backfilling | Cause::ConfigRefused)
}

/// True if each rule that joins is reported: with other causes, rules come and go with the lag.
fn is_by_rule(cause: Cause) -> bool {
    matches!(cause, Cause::Degraded | Cause::SourceGone | Cause::RemovalLimit | Cause::Paused | Cause::DeadLetters)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn found(cause: Cause, rules: &[&str]) -> ActiveCause {
        ActiveCause { cause, rules: rules.iter().map(|rule| (*rule).to_owned()).collect(), since: None }
    }

    fn without_pause(timeline: &mut Timeline, now: i64, found: &[ActiveCause]) -> Vec<Event> {
        timeline.causes(now, found, -STALE)
    }

    fn names(events: &[Event]) -> Vec<(i64, &str)> {
        events.iter().map(|event| (event.time, event.what.as_str())).collect()
    }

    #[test]
    fn a_spell_has_a_beginning_and_an_end_and_a_moment_of_slowness_has_neither() {
        let mut timeline = Timeline::default();
        let slow = [found(Cause::ServerSlow, &["r"])];
        assert_eq!(names(&without_pause(&mut timeline, 0, &slow)), []);
        assert_eq!(names(&without_pause(&mut timeline, 16_000, &[])), [], "it ended before it was reported");
        assert_eq!(names(&without_pause(&mut timeline, 20_000, &slow)), []);
        let start = without_pause(&mut timeline, 25_000, &slow);
        assert_eq!(names(&start), [(20_000, "server_slow")]);
        assert!(start[0].text.ends_with("(r)"), "{}", start[0].text);
        assert_eq!(names(&without_pause(&mut timeline, 30_000, &slow)), [], "once is enough");
        assert_eq!(names(&without_pause(&mut timeline, 40_000, &[])), [], "it may come back");
        assert_eq!(names(&without_pause(&mut timeline, 41_000, &slow)), [], "and is the same spell");
        let over = without_pause(&mut timeline, 60_000, &[]);
        assert_eq!(names(&over), [(41_000, "server_slow_ended")]);
        assert_eq!(over[0].text, "`server_slow` ended after 21 s (r)");
        assert_eq!(names(&without_pause(&mut timeline, 90_000, &[])), []);
    }

    #[test]
    fn stale_readings_begin_no_outage_and_end_none() {
        let outage = |since| [ActiveCause { since: Some(since), ..found(Cause::NoPrimary, &[]) }];
        let mut timeline = Timeline::default();
        assert_eq!(names(&timeline.causes(100_000, &outage(90_000), 100_000)), [], "known from before the pause");
        assert_eq!(names(&timeline.causes(103_000, &outage(90_000), 100_000)), []);
        let start = timeline.causes(104_000, &outage(90_000), 100_000);
        assert_eq!(names(&start), [(100_000, "no_primary")], "the outage goes on after the pause");
        assert_eq!(names(&timeline.causes(400_000, &outage(90_000), 400_000)), [], "after another pause");
        assert_eq!(names(&timeline.causes(402_000, &[], 400_000)), []);
        let over = timeline.causes(415_000, &[], 400_000);
        assert_eq!(names(&over), [(400_000, "no_primary_ended")], "not before the pause");
        // A process that pauses again and again reports the outage in the end.
        let mut timeline = Timeline::default();
        let pausing: Vec<Vec<(i64, String)>> = (0..8)
            .map(|n| 100_000 + n * 3_000)
            .map(|now| timeline.causes(now, &outage(90_000), now))
            .map(|events| events.iter().map(|event| (event.time, event.what.clone())).collect())
            .collect();
        assert_eq!(pausing.concat(), [(100_000, "no_primary".to_owned())]);
    }

    #[test]
    fn what_cannot_wait_is_told_at_once_and_each_rule_that_joins() {
        let mut timeline = Timeline::default();
        assert_eq!(
            names(&without_pause(&mut timeline, 0, &[found(Cause::RemovalLimit, &["a"])])),
            [(0, "removal_limit")]
        );
        let joined = without_pause(&mut timeline, 1000, &[found(Cause::RemovalLimit, &["a", "b"])]);
        assert_eq!(joined[0].rules, ["b"]);
        assert_eq!(names(&without_pause(&mut timeline, 2000, &[found(Cause::RemovalLimit, &["b"])])), []);
    }

    #[test]
    fn backfills_are_told_by_rule_when_they_end_and_together_when_they_start() {
        let (began, again) = (Instant::now(), Instant::now() + Duration::from_secs(60));
        let run = |rule: &str, started: Instant, took: Option<u64>| {
            let ended = took.map(|took| started + Duration::from_secs(took));
            (rule.to_owned(), BackfillProgress { started, scanned: 50, ended, ..BackfillProgress::started(None) })
        };
        let mut timeline = Timeline::default();
        let started = timeline.backfills(0, &[run("a", began, None), run("b", began, None)].into(), |_| false);
        assert_eq!((names(&started), started[0].rules.len()), (vec![(0, "backfill_started")], 2));
        let done = timeline.backfills(1000, &[run("a", began, Some(2)), run("b", began, None)].into(), |_| false);
        assert_eq!(names(&done), [(1000, "backfill_done")]);
        assert_eq!(
            names(&timeline.backfills(2000, &[run("a", began, Some(2)), run("b", began, None)].into(), |_| false)),
            []
        );
        // A backfill that starts and ends between two ticks.
        let quick = timeline.backfills(3000, &[run("a", again, Some(1))].into(), |_| false);
        assert_eq!(names(&quick), [(3000, "backfill_started"), (3000, "backfill_done")]);
        assert!(quick.is_sorted_by_key(|event| (event.time, event.id.clone())), "as readers sort them: {quick:?}");
    }

    /// Every target had failed, and the timeline called the data up to date.
    #[test]
    fn a_backfill_with_dead_letters_does_not_leave_the_data_up_to_date() {
        let ended = |rule: &str, dead_letters: u64| {
            let progress = BackfillProgress { scanned: 50, dead_letters, ..BackfillProgress::started(None) };
            let ended = Some(progress.started + Duration::from_secs(2));
            Timeline::default()
                .backfills(0, &[(rule.to_owned(), BackfillProgress { ended, ..progress })].into(), |name| name == "s")
                .remove(1)
                .text
        };
        assert_eq!(ended("r", 0), "existing data is up to date: 50 targets in 2.0 s (r)");
        assert_eq!(ended("r", 1), "not all existing data is up to date: 50 targets in 2.0 s, 1 dead letter (r)");
        assert_eq!(ended("r", 50), "not all existing data is up to date: 50 targets in 2.0 s, 50 dead letters (r)");
        assert_eq!(ended("s", 0), "existing data was compared, nothing was written: 50 targets in 2.0 s (s)");
    }

    #[test]
    fn a_thousand_rules_make_one_short_line() {
        let rules: Vec<String> = (0..1000).map(|n| format!("rule-{n}")).collect();
        let event = event(0, "degraded", rules, "lost");
        assert!(event.text.ends_with("and 995 more)") && event.text.len() < 200, "{}", event.text);
    }
}
