//! Documents of trees: which of them are written now, which later, and which keep their values.
//!
//! A recursive rule reads its own output, level by level. denormd's own write to a document is a change like any other:
//! its event requests the documents that read it (for a `copy` the children, for an `aggregate` the parent), and so on,
//! until a level has the values that it should have. Each of these requests holds back the checkpoint, so a crash
//! between two levels repeats the events of the first. In a tree without a circle every document is computed after the
//! last change of what it reads, so its value is right at the end, by induction over the levels. What this module adds:
//!
//! - **Circles.** Around a circle, the events would go on for ever (`depth: { $add: [1, $depth] }`). So before a document
//!   is written, its chain of ancestors is read. A document that is its own ancestor keeps its values. What hangs below
//!   the circle follows these. Each event is read before the chain, and no read is older than the event, so once a circle
//!   is closed, each further request of a member finds it: at most one write of each request in flight follows.
//! - **Depth.** The chain is followed for `max_depth` ancestors. A document with more keeps its values, too.
//! - **Dead letters.** A document that keeps its values though its inputs changed must be computed once it may: nothing
//!   else would request it. The members of a circle share a dead letter, which is retried as a whole: when a member
//!   leaves, the values of the others may have been waiting for years. Both kinds name the documents whose place they
//!   depend on, and a request of one of these that succeeds retries them. The chain is not read at one point in time.
//!   So a chain may be seen that never existed, but then one of its documents has changed since, and its event retries
//!   the dead letter.
//! - **Order.** A document waits while one that it reads, directly or through others, is pending: while an ancestor is
//!   for a `copy`, while a descendant is for an `aggregate`. Pending is a document with a request in the queue, and one
//!   that was written until the event of that write is routed. So no value is written that is computed from a half of a
//!   change. This is about intermediate values alone, so the wait has a limit: where an ancestor changes all the time,
//!   the documents below it are still written. Other partitions have queues of their own, and what is pending there is
//!   not waited for.
//!
//! A backfill goes from level to level for the same reason ([`crate::jobs::backfill`]).

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use bson::DateTime;
use tokio::time::Instant;

use crate::{
    dead_letter::{Nodes, Offending},
    reconcile::{
        batch::{End, Item, Run},
        of_target::Read,
        places::{circle, too_deep},
    },
};
use denormd_model::{clock, key::Key, position::ClusterTime};
use denormd_mongo::error::Result;
use denormd_rules::plan::{
    reference::Role,
    tree::{Place, Tree},
};

/// Longest time that a document waits for those that it reads.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// Delay before a document looks again at what it waits for.
const RETRY_DELAY: Duration = Duration::from_millis(20);
/// Most pending documents whose ancestors are read, to find out who waits for them.
const MOST: usize = 1000;

impl Run<'_> {
    /// Removes the targets that are not written now: those that wait, and those that keep their values. Their items get
    /// their end.
    pub(super) async fn hold_back(
        &self,
        tree: Tree,
        items: &mut [Item],
        targets: &mut HashMap<Key, Read>,
        after: ClusterTime,
    ) -> Result<()> {
        if targets.is_empty() {
            return Ok(());
        }
        let began = clock::now();
        let others = match tree.parent {
            Role::Target => Vec::new(),
            Role::Source => {
                let mine = |id: &Key| targets.contains_key(id);
                self.context.memory.pending.some(self.rule.id, MOST, mine)
            }
        };
        let asked: Vec<&Key> = targets.keys().chain(&others).collect();
        let known = tree.known_parents(targets.iter().map(|(id, read)| (id.clone(), read.references.as_slice())));
        let places = self.context.places(self.rule, tree, &asked, known, (after, self.limit)).await?;
        self.keep_in_tree(tree, items, targets, &places, began).await;
        let waits: Vec<(usize, Duration)> = {
            let order = Order { run: self, tree, places: &places, targets, read_by: read_by(&places, targets) };
            items.iter().enumerate().filter_map(|(nth, item)| Some((nth, order.delay(&item.key)?))).collect()
        };
        for (nth, delay) in waits {
            let item = &mut items[nth];
            if item.work.waits_since.get_or_insert_with(Instant::now).elapsed() < LONGEST_WAIT {
                targets.remove(&item.key);
                item.end = Some(End::Later(delay));
            }
        }
        Ok(())
    }

    /// Records the dead letters of documents that keep their values.
    async fn keep_in_tree(
        &self,
        tree: Tree,
        items: &mut [Item],
        targets: &mut HashMap<Key, Read>,
        places: &HashMap<Key, Place>,
        began: DateTime,
    ) {
        let mut circles: BTreeMap<&Key, (&Vec<Key>, Vec<usize>)> = BTreeMap::new();
        for (nth, item) in items.iter_mut().enumerate() {
            let (nodes, error) = match places.get(&item.key) {
                Some(Place::Circle(members)) => {
                    let Some(first) = members.first() else { continue };
                    circles.entry(first).or_insert_with(|| (members, Vec::new())).1.push(nth);
                    continue;
                }
                Some(Place::TooDeep(ancestors)) => (Nodes::Ancestors(ancestors), too_deep(tree)),
                _ => continue,
            };
            let offending =
                Offending { key: &item.key, target: None, path: None, tree: Some(nodes), since: Some(began) };
            item.end = Some(self.record(&offending, &error).await);
            targets.remove(&item.key);
        }
        for (first, (members, of)) in circles {
            let nodes = Some(Nodes::Circle(members));
            let offending = Offending { key: first, target: None, path: None, tree: nodes, since: Some(began) };
            let end = self.record(&offending, &circle(members)).await;
            for nth in of {
                targets.remove(&items[nth].key);
                items[nth].end = Some(match &end {
                    End::Failed(error) => End::Failed(error.clone()),
                    _ => End::DeadLetter,
                });
            }
        }
    }
}

/// The ancestors of documents, each with whether one of these documents is a target of this batch.
fn read_by<'a>(places: &'a HashMap<Key, Place>, targets: &HashMap<Key, Read>) -> HashMap<&'a Key, bool> {
    let mut out = HashMap::new();
    for (id, place) in places {
        if let Place::Node(ancestors) = place {
            for ancestor in ancestors {
                *out.entry(ancestor).or_default() |= targets.contains_key(id);
            }
        }
    }
    out
}

/// The order in which the documents of a batch are written.
struct Order<'a, 'b> {
    run: &'a Run<'b>,
    tree: Tree,
    places: &'a HashMap<Key, Place>,
    targets: &'a HashMap<Key, Read>,
    read_by: HashMap<&'a Key, bool>,
}

impl Order<'_, '_> {
    /// The time for which a target waits for others; None if it is its turn.
    fn delay(&self, id: &Key) -> Option<Duration> {
        let Some(Place::Node(ancestors)) = self.places.get(id).filter(|_| self.targets.contains_key(id)) else {
            return None;
        };
        // All of a batch end together.
        let together = |same_batch: bool| if same_batch { Duration::ZERO } else { RETRY_DELAY };
        match self.tree.parent {
            Role::Source => self.read_by.get(id).map(|same_batch| together(*same_batch)),
            Role::Target => {
                let same_batch = ancestors.iter().any(|ancestor| self.targets.contains_key(ancestor));
                let pending = &self.run.context.memory.pending;
                (same_batch || pending.any(self.run.rule.id, ancestors.iter())).then(|| together(same_batch))
            }
        }
    }
}
