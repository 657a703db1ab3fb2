//! Finds the keys that a document refers to and the targets that refer to a key. Too many of them become a fan-out job.

use std::sync::atomic::Ordering;

use bson::{Document, RawDocumentBuf};

use crate::{
    checkpoint::fan_out::Subject,
    reconcile::{
        batch::{End, Item, MANY, Run, newest},
        context::Context,
        create,
        read::{self, id_of},
    },
    request::{Request, Scope, Task},
    route::{source_request, target_requests},
};
use denormd_model::{failpoint, key::Key};
use denormd_mongo::{
    command::limited,
    error::{Error, Kind, Result},
};
use denormd_rules::plan::{Rule, reference::Role};

impl Run<'_> {
    pub(super) async fn locate(&self, role: Role, items: &mut [Item], follow_ups: &mut Vec<Request>) -> Result<()> {
        let ids: Vec<&Key> = items.iter().map(|item| &item.key).collect();
        let after = newest(items);
        let mut unusable = Vec::new();
        for row in self.read_within(role, read::by_id(self.rule, role, &ids), after, items.len()).await? {
            let doc = Document::try_from(row.as_ref())?;
            match role {
                Role::Source => {
                    let keys = self.rule.reference.keys(role, &doc).into_iter().flatten();
                    follow_ups.extend(keys.map(|key| source_request(self.rule, key)));
                    if self.rule.reference.has_unusable_value(&doc) {
                        unusable.extend(doc.get("_id").cloned());
                    }
                }
                Role::Target => follow_ups.extend(target_requests(self.rule, &id_of(&row)?, &doc)),
            }
        }
        if unusable.is_empty() {
            return Ok(());
        }
        let unusable = self.unusable(&unusable, after).await?;
        let error = create::unusable(&self.rule.reference);
        for item in items.iter_mut().filter(|item| unusable.contains(&item.key)) {
            item.end = Some(self.set_aside(item, &error).await);
        }
        Ok(())
    }

    /// Finds the targets that refer to the keys, or hold them, and asks for each.
    pub(super) async fn found(&self, items: &mut [Item], follow_ups: &mut Vec<Request>) -> Result<()> {
        let found = match self.few(self.rule, items).await {
            // `where` cannot be evaluated on one of them. Each request names it again: only that target becomes a dead letter.
            Err(error) if read::where_fails(self.rule, &error) => {
                self.few(&self.rule.without_target_filter(), items).await
            }
            found => found,
        };
        match (found, items) {
            (Ok(Some(mut requests)), _) => follow_ups.append(&mut requests),
            (Ok(None), [item]) => item.end = Some(self.fan_out(item).await),
            // A fan-out job reads a part of the collection at a time.
            (Err(error), [item]) if error.kind == Kind::ReadTimedOut => item.end = Some(self.fan_out(item).await),
            (Err(error), _) => return Err(error),
            (Ok(None), _) => return Err(Error::new(Kind::TooLarge, "these keys have too many targets")),
        }
        Ok(())
    }

    /// Requests for the targets found; None if there are too many.
    async fn few(&self, rule: &Rule, items: &[Item]) -> Result<Option<Vec<Request>>> {
        let mut requests = Vec::new();
        let keys: Vec<&Key> = items.iter().map(|item| &item.key).collect();
        let Some(command) = read::found(rule, self.task, &keys) else { return Ok(Some(requests)) };
        let database = &rule.target.namespace.database;
        let command = limited(command, self.limit);
        let mut pages = self.context.server.pages(database, command, newest(items)).await?;
        let (mut targets, mut found) = (0, 0);
        while let Some(page) = pages.next().await? {
            targets += page.len();
            for row in &page {
                requests.extend(request_of_found(self.rule, self.task, row)?);
            }
            let bytes = requests[found..].iter().map(Request::bytes).sum::<usize>();
            found = requests.len();
            let bytes = bytes + self.bytes.fetch_add(bytes, Ordering::Relaxed);
            let large = items.len() > 1 && bytes > self.context.limits.batch_bytes;
            if large || targets > MANY || requests.len() > MANY {
                return Ok(None);
            }
        }
        Ok(Some(requests))
    }

    /// Leaves all targets of a key to a fan-out job, which has its own progress: neither the checkpoint nor other keys
    /// wait for it.
    pub(super) async fn fan_out(&self, item: &Item) -> End {
        let Context { server, fan_outs, counts, .. } = self.context;
        let subject = self.subject(item);
        counts.jobs.fetch_add(1, Ordering::Relaxed);
        match fan_outs.open(server, self.rule, subject, item.work.committed).await {
            Ok(fan_out) => {
                failpoint::here("fan-out-opened");
                End::FanOut(fan_out)
            }
            Err(error) => End::Failed(error),
        }
    }

    pub(super) fn subject(&self, item: &Item) -> Subject {
        Subject { rule: self.rule.id, task: self.task, key: item.key.clone() }
    }
}

/// Requests for a target that a lookup has found.
pub fn request_of_found(rule: &Rule, task: Task, row: &RawDocumentBuf) -> Result<Vec<Request>> {
    let id = id_of(row)?;
    Ok(match task {
        Task::Parents => target_requests(rule, &id, &Document::try_from(row.as_ref())?),
        _ => vec![Request { rule: rule.id, task: Task::Target, key: id, scope: Scope::All }],
    })
}
