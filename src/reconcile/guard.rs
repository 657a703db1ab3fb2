//! Compares targets whose owned fields were written: drift, and what a rule in shadow would write.

use std::{
    collections::{BTreeSet, HashMap},
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use bson::Bson;

use crate::{
    config::OnDrift,
    error::Result,
    key::Key,
    mongo::{Reads, command::limited},
    plan::Rule,
    position::ClusterTime,
    reconcile::{
        compare::{self, Compared, Mismatch},
        context::Context,
        isolate::STEP,
        read::{self, id_of},
        run::{End, Item, Run, newest},
    },
    request::{Request, Scope, Task},
    route::reference_requests,
    workqueue::{Doubt, Verdict},
};
/// How long the guard waits before it calls a difference drift.
const SECOND_LOOK: Duration = Duration::from_millis(200);

impl Run<'_> {
    /// Compares targets whose owned fields were written. Most often it was we who wrote them, and nothing differs.
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
            // The source may have changed a moment ago, and the write that follows may be under way: drift is what is the same
            // when that is over.
            let (difference, doubt) = (mismatch.fingerprint, &mut item.work.doubt);
            let is_new = item.work.doubted_since.is_none() || doubt.difference != difference;
            if is_new && doubt.verdict != Verdict::Unconfirmed {
                item.work.doubted_since = Some(Instant::now());
                *doubt = Doubt { difference, seen, verdict: Verdict::Postponed };
            }
            match doubt.verdict {
                Verdict::Postponed => {
                    item.end = Some(End::Later(SECOND_LOOK));
                    continue;
                }
                Verdict::Drift => drift.push(mismatch.clone()),
                Verdict::Unconfirmed => unconfirmed += 1,
            }
            // The definition as it is now is right whoever wrote the target.
            if self.rule.on_drift == OnDrift::Repair {
                follow_ups.extend(reference_requests(self.rule, &item.key, mismatch.references.clone()));
            }
        }
        drifted(self.context, self.rule, &drift);
        if unconfirmed > 0 {
            let repaired = self.rule.on_drift == OnDrift::Repair;
            tracing::warn!(
                rule = %self.rule.name, targets = unconfirmed, repaired,
                "targets differ, and the backlog is too long to tell who wrote them: they are not counted as drift"
            );
        }
        Ok(())
    }

    /// A rule in shadow compares where it would write, and counts.
    pub(super) async fn shadow(&self, items: &[Item]) -> Result<()> {
        let after = newest(items);
        let mut named: Vec<Bson> = Vec::new();
        for item in items {
            match (&item.work.scope, self.task) {
                (Scope::Named(ids), _) => named.extend(ids.iter().filter_map(|id| id.values().first().cloned())),
                (Scope::All, Task::Target) => named.extend(item.key.values().first().cloned()),
                (Scope::All, _) => {
                    let command = read::holders(self.rule, &[&item.key]);
                    let database = &self.rule.target.namespace.database;
                    let mut pages =
                        self.context.server.pages(database, limited(command, self.limit), Reads { after }).await?;
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

/// Counts that somebody else has written owned fields, and tells it once for all of these targets: a script that has gone
/// through a collection would otherwise fill the log.
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
    let paths: Vec<&str> = paths.into_iter().collect();
    let (targets, paths) = (targets.len(), paths.join(", "));
    tracing::warn!(rule = %rule.name, targets, paths, repaired, "somebody else has written owned fields");
}
