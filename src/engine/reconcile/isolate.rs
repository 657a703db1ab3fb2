//! Isolates work that the server refuses: a batch is halved until the offending key is alone, and the targets of a key
//! are written in steps. A key or target that is refused alone becomes a dead letter.

use std::{collections::HashSet, sync::atomic::Ordering};

use bson::{Bson, Document, doc};

use crate::{
    dead_letter::Offending,
    reconcile::{
        batch::{End, Ended, Item, Run},
        context::Context,
        shape, statement,
        value::{Desired, Rows},
    },
    request::{Request, Scope, Task},
};
use denormd_model::{failpoint, field_path::FieldPath, key::Key, position::ClusterTime};
use denormd_mongo::error::{Error, Kind, Reaction, Result};
use denormd_rules::plan::reference::Role;

/// Targets written by one statement while the offending document is searched for.
pub(super) const STEP: usize = 1000;
/// Number of attempts after which a target becomes a dead letter, if it is alone in its statement and cannot be written
/// within `limits.write_timeout`. Earlier failures may be the server's fault.
const PATIENT: u32 = 5;

/// True if a write of the key that takes too long is not tried again.
fn has_waited(item: &Item) -> bool {
    item.work.attempts >= PATIENT || item.work.has_failed_for_long()
}

impl Run<'_> {
    /// Handles a batch that failed as a whole: halves it until the offending key is alone.
    pub(super) async fn whole_failed(
        &self,
        mut items: Vec<Item>,
        error: Error,
        follow_ups: &mut Vec<Request>,
    ) -> Vec<Ended> {
        let reaction = error.reaction();
        if reaction == Reaction::TakeTurns {
            return self.too_slow(items, error).await;
        }
        if matches!(reaction, Reaction::Divide | Reaction::Isolate) && items.len() > 1 {
            let back = items.split_off(items.len() / 2);
            let mut out = Box::pin(self.items(items, follow_ups)).await;
            out.append(&mut Box::pin(self.items(back, follow_ups)).await);
            return out;
        }
        for item in &mut items {
            item.end = Some(if reaction == Reaction::Isolate {
                self.set_aside(item, &error).await
            } else {
                End::Failed(error.clone())
            });
        }
        items.into_iter().map(Item::ended).collect()
    }

    /// Records a dead letter for the key of a request. Targets without a reference share the empty key, so each gets one of its own.
    pub(super) async fn set_aside(&self, item: &Item, error: &Error) -> End {
        let Scope::Named(ids) = &item.work.scope else { return self.dead_letter(&item.key, None, error).await };
        if !item.key.values().is_empty() {
            return self.dead_letter(&item.key, None, error).await;
        }
        let mut end = End::Done;
        for id in ids {
            end = self.dead_letter(&item.key, Some(id), error).await;
            if let End::Failed(_) = end {
                break;
            }
        }
        end
    }

    pub(super) async fn dead_letter(&self, key: &Key, target: Option<&Key>, error: &Error) -> End {
        let path = match target.or((self.task == Task::Target).then_some(key)) {
            Some(target) => self.in_the_way(target).await,
            None => None,
        };
        self.record(&Offending { key, target, path, tree: None, since: None }, error).await
    }

    /// Records a dead letter.
    pub(super) async fn record(&self, offending: &Offending<'_>, error: &Error) -> End {
        let Context { server, dead_letters, counts, .. } = self.context;
        match dead_letters.record(server, self.rule, self.task, offending, error).await {
            Ok(()) => {
                failpoint::here("set-aside");
                self.context.memory.kept.learn(self.rule.id, |kept| kept.aside = true);
                counts.dead_letters.fetch_add(1, Ordering::Relaxed);
                self.context.metrics.dead_letter(&self.rule.name, error);
                tracing::warn!(rule = %self.rule.name, error = %error.message, "became a dead letter");
                End::DeadLetter
            }
            Err(error) => End::Failed(error),
        }
    }

    /// The path of the target whose shape prevents the write. Only for display, so none if the target cannot be read.
    pub(super) async fn in_the_way(&self, target: &Key) -> Option<String> {
        let paths: Vec<&FieldPath> = self.rule.owned().into_iter().chain(self.rule.touch.as_ref()).collect();
        let fields: Document = paths.iter().map(|path| (path.root().to_owned(), Bson::Int32(1))).collect();
        let id = target.values().first()?.clone();
        let command =
            doc! {"find": &self.rule.target.namespace.collection, "filter": {"_id": {"$eq": id}}, "projection": fields};
        let found = self.read(Role::Target, command, ClusterTime::default()).await.ok()?;
        shape::in_the_way(&paths, &Document::try_from(found.first()?.as_ref()).ok()?)
    }

    /// Writes the named targets of one key in steps, and records a dead letter for each target that the server refuses.
    /// All targets of a key would be too many to hold: they become a fan-out job.
    pub(super) async fn in_steps(&self, item: &Item, rows: &Rows, cause: Error) -> Result<End> {
        // The key has one document.
        if self.task == Task::Target || self.rule.creates.is_some() {
            let is_patient = cause.kind != Kind::TimedOut || has_waited(item);
            return if is_patient { Ok(self.dead_letter(&item.key, None, &cause).await) } else { Err(cause) };
        }
        let Scope::Named(ids) = &item.work.scope else { return Ok(self.fan_out(item).await) };
        let desired = rows.desired(self.rule, &item.key)?;
        let mut end = End::Done;
        let ids: Vec<Key> = ids.iter().cloned().collect();
        for step in ids.chunks(STEP) {
            self.step(item, step, &desired, &mut end).await?;
        }
        Ok(end)
    }

    async fn step(&self, item: &Item, ids: &[Key], desired: &Desired, end: &mut End) -> Result<()> {
        let is_too_slow = |error: &Error| error.kind == Kind::TimedOut && has_waited(item);
        let key = &item.key;
        let mut stack = vec![ids];
        let mut was_behind = false;
        while let Some(ids) = stack.pop() {
            let scope = Scope::Named(ids.iter().cloned().collect::<HashSet<_>>());
            let statements = statement::of_value(self.rule, key, &scope, desired)?;
            let mut error = None;
            for deletes in [false, true] {
                let raw = statements.iter().filter(|one| one.deletes == deletes).map(|one| one.raw.clone());
                let sent = self.send(deletes, &raw.collect::<Vec<_>>(), self.context.limits.write_timeout).await;
                error = error.or(match sent {
                    Ok(mut written) => written.refused.pop().map(|(_, error)| error),
                    // Fewer targets take less time, and leave more of it to the majority. As many as before could leave too little in
                    // each attempt.
                    Err(error) if error.kind == Kind::TimedOut || error.is_majority_behind() => Some(error),
                    Err(error) => return Err(error),
                });
            }
            let is_behind = error.as_ref().is_some_and(Error::is_majority_behind);
            match error {
                None => {}
                // Half of the targets took as long: the majority is late, whatever their number.
                Some(error) if was_behind && is_behind => return Err(error),
                Some(_) if ids.len() > 1 => {
                    let (front, back) = ids.split_at(ids.len() / 2);
                    stack.extend([front, back]);
                }
                Some(error) if error.is_transient() && !is_too_slow(&error) => return Err(error),
                Some(error) => match self.dead_letter(key, ids.first(), &error).await {
                    End::Failed(error) => return Err(error),
                    dead_letter => *end = dead_letter,
                },
            }
            was_behind = is_behind;
        }
        Ok(())
    }
}
