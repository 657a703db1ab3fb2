//! The levels of a tree, before the backfill of a recursive rule.
//!
//! A backfill in the order of `_id` would compute documents before those that they read, and once more for each of
//! these: the values on the way would be wrong, and the more the deeper the tree. So the tree is gone through level by
//! level first: from the roots down where values come from the parent, from the deepest documents up where they come
//! from the children. Each level is acknowledged before the next one begins.
//!
//! This is about the order alone. The ordinary pass follows, whatever happened here: it reaches the documents that moved
//! to a level that was done already, records the dead letters, and saves its progress. A backfill that is killed while it
//! goes through the levels goes through them again; documents with the right values are only read.

use std::collections::VecDeque;

use bson::Bson;

use crate::reconcile::scan;
use denormd_model::{key::Key, position::ClusterTime};
use denormd_mongo::{command::decoded, error::Result};
use denormd_rules::plan::{
    reference::Role,
    tree::{Place, Tree},
};

use super::{BackfillRequest, IN_FLIGHT, PAGE, Pending, RuleBackfill, acknowledged, pace::Pace, requests_of};

impl RuleBackfill<'_> {
    /// Requests the documents of a tree, level by level. Returns false if the rule no longer needs a backfill.
    pub(super) async fn levels(
        &self,
        tree: Tree,
        request: &BackfillRequest,
        time: ClusterTime,
        pace: &mut Pace<'_>,
    ) -> Result<bool> {
        let mut level = match tree.parent {
            Role::Target => 0,
            Role::Source => self.level(tree, None, time, pace).await?,
        };
        loop {
            let deepest = self.level(tree, Some(level), time, pace).await?;
            tracing::debug!(rule = %self.rule.name, level, deepest, "a level of the tree is done");
            if !self.is_to_go_on(request).await? {
                return Ok(false);
            }
            level = match tree.parent {
                Role::Target if level < deepest => level + 1,
                Role::Source if level > 0 => level - 1,
                _ => return Ok(true),
            };
        }
    }

    /// Requests the documents with this number of ancestors, and waits until they are done. Returns the greatest number
    /// of ancestors that a document has.
    async fn level(&self, tree: Tree, level: Option<usize>, time: ClusterTime, pace: &mut Pace<'_>) -> Result<usize> {
        let (mut deepest, mut after) = (0, None);
        let mut pending: VecDeque<Pending> = VecDeque::new();
        let mut fields = self.rule.reference.projection(Role::Target);
        fields.insert("_id", 1);
        loop {
            let most = usize::try_from(pace.page(PAGE)).unwrap_or(1);
            let page = scan::page(self.context, self.rule, &fields, after.as_ref(), most, time).await?;
            let targets = decoded(&page.targets)?;
            let read = |target| (Key::of_document(target), self.rule.reference.keys(Role::Target, target));
            let read: Vec<(Key, Vec<Option<Key>>)> = targets.iter().map(read).collect();
            let asked: Vec<&Key> = read.iter().map(|(id, _)| id).collect();
            let known = tree.known_parents(read.iter().map(|(id, references)| (id.clone(), references.as_slice())));
            let limit = self.context.limits.read_timeout;
            let places = self.context.places(self.rule, tree, &asked, known, (time, limit)).await?;
            let mut wanted = Vec::new();
            for target in targets {
                let Some(Place::Node(ancestors)) = places.get(&Key::of_document(&target)) else { continue };
                deepest = deepest.max(ancestors.len());
                if Some(ancestors.len()) == level {
                    wanted.push(target);
                }
            }
            if !wanted.is_empty() {
                let requests = requests_of(self.rule, &wanted);
                self.submit(requests, (wanted.len() as u64, &Bson::Null), time, &mut pending).await?;
            }
            let keep = if page.last.is_some() { IN_FLIGHT } else { 0 };
            while pending.len() > keep {
                if let Some(page) = pending.pop_front() {
                    acknowledged(page).await?;
                }
            }
            if page.last.is_none() {
                return Ok(deepest);
            }
            after = page.last;
            pace.keep(wanted.len()).await?;
        }
    }
}
