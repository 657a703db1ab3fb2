//! Compares targets whose owned fields were written: detects drift, and counts the writes that a rule in shadow mode
//! would make.

use std::{
    collections::{BTreeSet, HashMap},
    sync::atomic::Ordering,
    time::Duration,
};

use bson::Bson;
use tokio::time::Instant;

use crate::{
    reconcile::{
        batch::{End, Item, Run, newest},
        compare::{self, Compared, Mismatch},
        context::Context,
        isolate::STEP,
        read::{self, id_of},
    },
    request::{Request, Scope, Task},
    route::reference_requests,
    workqueue::{LONGEST_UNCONFIRMED, UnconfirmedMismatch, Verdict, Work},
};
use denormd_model::{key::Key, position::ClusterTime};
use denormd_mongo::{command::limited, error::Result};
use denormd_rules::{config::OnDrift, plan::Rule};

/// Delay before the guard reports a difference as drift.
const CONFIRMATION_DELAY: Duration = Duration::from_millis(200);

/// The verdict on a target that differs in this way; `seen` is the time by which everything that it was compared with was
/// committed.
fn verdict(work: &mut Work, difference: u64, seen: ClusterTime) -> Verdict {
    let mismatch = work.unconfirmed_mismatch.get_or_insert_default();
    let is_same = mismatch.difference == difference;
    let is_new = work.unconfirmed_since.is_none() || !is_same;
    // Otherwise a program that keeps writing the target would postpone the verdict for ever, and hold the checkpoint.
    let is_old = mismatch.since.get_or_insert_with(Instant::now).elapsed() > LONGEST_UNCONFIRMED;
    match mismatch.verdict {
        verdict if !is_new => verdict,
        Verdict::Drift if is_old && is_same => Verdict::Drift,
        Verdict::Postponed | Verdict::Drift if !is_old => {
            work.unconfirmed_since = Some(Instant::now());
            **mismatch = UnconfirmedMismatch { difference, seen, verdict: Verdict::Postponed, since: mismatch.since };
            Verdict::Postponed
        }
        _ => Verdict::Unconfirmed,
    }
}

impl Run<'_> {
    /// Compares targets whose owned fields were written. Usually denormd wrote them itself, and nothing differs.
    pub(super) async fn guard(&self, items: &mut [Item], follow_ups: &mut Vec<Request>) -> Result<()> {
        let ids: Vec<Bson> = items.iter().filter_map(|item| item.key.values().first().cloned()).collect();
        let differing = compare::mismatches_at_once(self.context, self.rule, &ids, newest(items), self.limit).await?;
        let differing: HashMap<Key, Mismatch> =
            differing.into_iter().map(|m| (Key::one(m.target.clone()), m)).collect();
        if differing.is_empty() {
            return Ok(());
        }
        let seen = self.context.server.operation_time().await?;
        let (mut drift, mut unconfirmed) = (Vec::new(), 0);
        for item in items {
            let Some(mismatch) = differing.get(&item.key) else { continue };
            // The source may have just changed, and the resulting write may be in progress: only a difference that
            // remains afterwards is drift.
            match verdict(&mut item.work, mismatch.fingerprint, seen) {
                Verdict::Postponed => {
                    item.end = Some(End::Later(CONFIRMATION_DELAY));
                    continue;
                }
                Verdict::Drift => drift.push(mismatch.clone()),
                Verdict::Unconfirmed => unconfirmed += 1,
            }
            // The current definition is right, whoever wrote the target.
            if self.rule.on_drift == OnDrift::Repair {
                follow_ups.extend(reference_requests(self.rule, &item.key, mismatch.references.clone()));
            }
        }
        drifted(self.context, self.rule, &drift);
        if unconfirmed > 0 {
            let repaired = self.rule.on_drift == OnDrift::Repair;
            tracing::warn!(
                rule = %self.rule.name, targets = unconfirmed, repaired,
                "targets differ; who wrote them is unknown, because the backlog is too long or they are written again and again: \
                 they are not counted as drift"
            );
        }
        Ok(())
    }

    /// Compares instead of writing, for a rule in shadow mode, and counts the differences.
    pub(super) async fn shadow(&self, items: &[Item]) -> Result<()> {
        let after = newest(items);
        let mut named: Vec<Bson> = Vec::new();
        for item in items {
            match (&item.work.scope, self.task) {
                (Scope::Named(ids), _) => named.extend(ids.iter().filter_map(|id| id.values().first().cloned())),
                (Scope::All, _) if self.rule.creates.is_some() => named.push(self.rule.reference.id_of(&item.key)),
                (Scope::All, Task::Target) => named.extend(item.key.values().first().cloned()),
                (Scope::All, _) => {
                    let command = read::holders(self.rule, &[&item.key]);
                    let database = &self.rule.target.namespace.database;
                    let mut pages = self.context.server.pages(database, limited(command, self.limit), after).await?;
                    while let Some(page) = pages.next().await? {
                        let ids = page.iter().map(|row| Ok(id_of(row)?.values().first().cloned()));
                        let ids: Vec<Bson> = ids.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
                        self.shadow_of(&ids, after).await?;
                    }
                }
            }
        }
        self.shadow_of(&named, after).await
    }

    pub(super) async fn shadow_of(&self, ids: &[Bson], after: ClusterTime) -> Result<()> {
        for ids in ids.chunks(STEP) {
            let (mut all, mut differing) = (0, 0);
            let mut take = |compared: Result<Compared>| {
                all += 1;
                differing += u64::from(compared?.differences().next().is_some());
                Ok(())
            };
            compare::compare_ids(self.context, self.rule, ids, after, &mut take).await?;
            self.context.metrics.shadowed(&self.rule.name, all, differing);
        }
        Ok(())
    }
}

/// Counts targets that differ from their definition though no change explains it, and logs them once: otherwise a script
/// that changed a whole collection would fill the log. Another program may have written them; or they had a dead letter,
/// which was dropped.
pub fn drifted(context: &Context, rule: &Rule, targets: &[Mismatch]) {
    if targets.is_empty() {
        return;
    }
    let repaired = rule.on_drift == OnDrift::Repair;
    let mut paths = BTreeSet::new();
    for mismatch in targets {
        context.counts.drift.fetch_add(1, Ordering::Relaxed);
        context.metrics.drifted(&rule.name, repaired);
        paths.extend(mismatch.paths.iter().map(String::as_str));
    }
    if !repaired {
        context.published.note(|snapshot| {
            snapshot.unrepaired.insert(rule.name.clone(), Instant::now());
        });
    }
    let paths: Vec<&str> = paths.into_iter().collect();
    let (targets, paths) = (targets.len(), paths.join(", "));
    tracing::warn!(rule = %rule.name, targets, paths, repaired, "owned fields differ from their definition");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A target that was written again and again had its verdict postponed for ever.
    #[tokio::test(start_paused = true)]
    async fn a_verdict_is_not_postponed_for_ever() {
        let time = ClusterTime::default();
        for (difference, of_pipeline, last) in [
            ((|round| round) as fn(u64) -> u64, Verdict::Postponed, Verdict::Unconfirmed),
            (|_| 1, Verdict::Postponed, Verdict::Unconfirmed),
            (|_| 1, Verdict::Drift, Verdict::Drift),
            (|round| round, Verdict::Drift, Verdict::Unconfirmed),
        ] {
            let mut work = Work::default();
            for round in 0.. {
                // A new request begins a period of its own.
                work.unconfirmed_since = None;
                let found = verdict(&mut work, difference(round), time);
                if round < 6 {
                    assert_eq!(found, Verdict::Postponed);
                } else if round > 6 {
                    assert_eq!(found, last);
                    break;
                }
                work.unconfirmed_mismatch.as_mut().unwrap().verdict = of_pipeline;
                tokio::time::advance(LONGEST_UNCONFIRMED / 6).await;
            }
        }
    }
}
