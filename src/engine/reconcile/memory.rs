//! Facts that a leader keeps between batches. They are empty at the start of each leadership, and may be lost at any
//! time.

use std::{
    collections::{HashMap, HashSet},
    hash::{BuildHasher, RandomState},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use bson::Bson;

use crate::{
    checkpoint::{fan_out::Subject, kept::Keeping},
    reconcile::{group::Shape, value::NoInput},
    request::Task,
    workqueue::Pending,
};
use denormd_model::{key::Key, namespace::Namespace};
use denormd_rules::plan::RuleId;

/// The span of `limits.destroy_per_hour`.
const HOUR: Duration = Duration::from_secs(3600);
/// Time for which a measured target size is used.
const SIZE_AGE: Duration = Duration::from_secs(60);

/// Maximum number of targets of a rule whose loss of a value is remembered individually, at 8 bytes each. Any further
/// target is counted again with each attempt to write it.
const REMEMBERED: usize = 1_000_000;

/// Targets that have lost a value within the last hour because they have no source.
#[derive(Debug)]
struct Losses {
    since: Instant,
    count: usize,
    /// Hashes of their `_id`s: a batch that is retried recognises targets that it has counted but not written.
    targets: HashSet<u64>,
}

/// Facts about the rules and their collections that spare a read, or bound what a rule removes.
#[derive(Debug, Default)]
pub struct Memory {
    fan_outs_running: Mutex<HashSet<Subject>>,
    /// The targets of the page that each job is waiting for.
    pages: Mutex<HashMap<Subject, HashSet<Key>>>,
    /// The UUIDs of source collections that have existed: one that is missing, or has another UUID, was dropped.
    sources: Mutex<HashMap<Namespace, Bson>>,
    /// The removal limit of each rule whose limit depends on its number of targets, and the time of the count.
    limits: Mutex<HashMap<RuleId, (Instant, usize)>>,
    /// Rules whose backfill an operator has agreed to: the removal limit does not stop them.
    agreed: Mutex<HashSet<RuleId>>,
    losses: Mutex<HashMap<RuleId, Losses>>,
    hasher: RandomState,
    /// The shape of each rule's targets, and the time at which their size was measured.
    shapes: Mutex<HashMap<RuleId, (Shape, Option<Instant>)>>,
    /// Bytes for each key in the last read of each task.
    costs: Mutex<HashMap<(RuleId, Task), usize>>,
    /// Rules whose sums contain numbers that are not whole.
    fractions: Mutex<HashSet<RuleId>>,
    /// Number of documents of each rule's target collection that one page covers, if a full page took too long to read.
    windows: Mutex<HashMap<RuleId, i64>>,
    /// The values of a key without sources, for rules whose expressions only a server can compute.
    no_input: Mutex<HashMap<RuleId, NoInput>>,
    /// Rules whose keys were written to the same few targets.
    crowded: Mutex<HashSet<RuleId>>,
    /// The rules in their first backfill, which keep the values that they overwrite.
    keeping: Mutex<HashMap<RuleId, Kept>>,
    /// Bytes of kept values, if they were counted.
    kept_bytes: Mutex<Option<u64>>,
    /// The documents of trees that wait, or run.
    pub pending: Arc<Pending>,
    /// Number of running batches of each rule.
    batches: Mutex<HashMap<RuleId, usize>>,
}

/// The values that a rule in its first backfill keeps.
#[derive(Debug, Clone)]
pub(super) struct Kept {
    /// The paths, and the targets that the backfill has passed.
    pub keeping: Arc<Keeping>,
    /// True if a target behind the backfill may hold a value that is not denormd's: some became dead letters.
    pub aside: bool,
    /// True once a value was not kept because of `undo.max_bytes`: from then on, no further value is kept. A later one
    /// in the same place could be denormd's own.
    pub is_full: bool,
    /// True if the `_id`s of the targets are in the order of the simple collation; none until it was asked for.
    pub simple: Option<bool>,
}

impl Memory {
    /// Counts these targets as losing a value, unless more than `limit` would do so in this hour; returns false in that
    /// case. With `once`, a target counts only once; otherwise it has several values to lose, and counts each time.
    pub(super) fn lose<'a>(
        &self,
        rule: RuleId,
        limit: usize,
        targets: impl Iterator<Item = &'a Key>,
        once: bool,
    ) -> bool {
        let Ok(mut losses) = self.losses.lock() else { return false };
        let nothing = || Losses { since: Instant::now(), count: 0, targets: HashSet::new() };
        let known = losses.entry(rule).or_insert_with(nothing);
        if known.since.elapsed() > HOUR {
            *known = nothing();
        }
        let hashes = targets.map(|id| self.hasher.hash_one(id));
        let new: Vec<u64> = hashes.filter(|target| !once || !known.targets.contains(target)).collect();
        if known.count + new.len() > limit {
            return false;
        }
        known.count += new.len();
        let room = REMEMBERED.saturating_sub(known.targets.len());
        known.targets.extend(new.into_iter().filter(|_| once).take(room));
        true
    }

    /// Resets the count of losses after the rule was unblocked.
    pub fn released(&self, rule: RuleId) {
        if let Ok(mut losses) = self.losses.lock() {
            losses.remove(&rule);
        }
    }

    /// The shape of a rule's targets, without their size if that measurement is too old.
    pub(super) fn shape(&self, rule: RuleId) -> Shape {
        let Ok(mut shapes) = self.shapes.lock() else { return Shape::default() };
        let (shape, since) = shapes.entry(rule).or_default();
        shape.size = shape.size.filter(|_| since.is_some_and(|since| since.elapsed() < SIZE_AGE));
        *shape
    }

    pub(super) fn learn(&self, rule: RuleId, take: impl FnOnce(&mut Shape, &mut Option<Instant>)) {
        if let Ok(mut shapes) = self.shapes.lock() {
            let (shape, since) = shapes.entry(rule).or_default();
            take(shape, since);
        }
    }

    /// The UUID of a source collection that is known to have existed.
    #[must_use]
    pub fn source(&self, source: &Namespace) -> Option<Bson> {
        self.sources.lock().ok()?.get(source).cloned()
    }

    /// The values of a key without sources, if they were computed.
    pub(super) fn no_input(&self, rule: RuleId) -> Option<NoInput> {
        self.no_input.lock().ok()?.get(&rule).cloned()
    }

    /// Remembers the values of a key without sources: they depend on the rule alone.
    pub(super) fn saw_no_input(&self, rule: RuleId, values: NoInput) {
        if let Ok(mut no_input) = self.no_input.lock() {
            no_input.insert(rule, values);
        }
    }

    /// Remembers the UUID of a source collection, or forgets it.
    pub fn saw(&self, source: &Namespace, uuid: Option<Bson>) {
        let Ok(mut sources) = self.sources.lock() else { return };
        match uuid {
            Some(uuid) => drop(sources.insert(source.clone(), uuid)),
            None => drop(sources.remove(source)),
        }
    }

    /// The removal limit of a rule, if it was computed less than an hour ago.
    pub(super) fn removal_limit(&self, rule: RuleId) -> Option<usize> {
        let limits = self.limits.lock().ok()?;
        limits.get(&rule).filter(|(since, _)| since.elapsed() < HOUR).map(|(_, limit)| *limit)
    }

    pub(super) fn learn_removal_limit(&self, rule: RuleId, limit: usize) {
        if let Ok(mut limits) = self.limits.lock() {
            limits.insert(rule, (Instant::now(), limit));
        }
    }

    /// True if an operator has agreed to the removals of a rule's backfill.
    #[must_use]
    pub fn has_agreed(&self, rule: RuleId) -> bool {
        self.agreed.lock().is_ok_and(|agreed| agreed.contains(&rule))
    }

    /// Records if an operator has agreed to the removals of a rule's backfill.
    pub fn agrees(&self, rule: RuleId, agreed: bool) {
        let Ok(mut rules) = self.agreed.lock() else { return };
        if agreed {
            rules.insert(rule);
        } else {
            rules.remove(&rule);
        }
    }

    /// True if the fan-out job is in progress.
    #[must_use]
    pub fn has_fan_out(&self, subject: &Subject) -> bool {
        self.fan_outs_running.lock().is_ok_and(|fan_outs_running| fan_outs_running.contains(subject))
    }

    /// Records that a fan-out job is in progress, or has ended.
    pub fn runs_fan_out(&self, subject: &Subject, under_way: bool) {
        let Ok(mut fan_outs_running) = self.fan_outs_running.lock() else { return };
        if under_way {
            fan_outs_running.insert(subject.clone());
        } else {
            fan_outs_running.remove(subject);
        }
    }

    /// The targets of the page that a fan-out job waits for; none if it waits for no page.
    pub(super) fn page(&self, subject: &Subject) -> Option<HashSet<Key>> {
        self.pages.lock().ok()?.get(subject).cloned()
    }

    /// Records the page that a fan-out job requests, or that the page is done.
    pub fn asks_page(&self, subject: &Subject, page: Option<HashSet<Key>>) {
        let Ok(mut pages) = self.pages.lock() else { return };
        match page {
            Some(page) => drop(pages.insert(subject.clone(), page)),
            None => drop(pages.remove(subject)),
        }
    }

    /// Number of keys whose sources one read is likely to fit into this number of bytes: at least one.
    #[must_use]
    pub fn keys_at_once(&self, rule: RuleId, task: Task, bytes: usize) -> usize {
        let cost = self.costs.lock().ok().and_then(|costs| costs.get(&(rule, task)).copied());
        cost.and_then(|cost| bytes.checked_div(cost)).map_or(usize::MAX, |keys| keys.max(1))
    }

    /// Records the number of bytes that a read for `keys` keys took.
    pub(super) fn cost(&self, rule: RuleId, task: Task, keys: usize, bytes: usize) {
        if let Ok(mut costs) = self.costs.lock() {
            costs.insert((rule, task), bytes / keys.max(1));
        }
    }

    pub(super) fn window(&self, rule: RuleId) -> Option<i64> {
        self.windows.lock().ok()?.get(&rule).copied()
    }

    pub(super) fn learn_window(&self, rule: RuleId, window: Option<i64>) {
        if let (Some(window), Ok(mut windows)) = (window, self.windows.lock()) {
            windows.insert(rule, window);
        }
    }

    pub(super) fn has_fractions(&self, rule: RuleId) -> bool {
        self.fractions.lock().is_ok_and(|fractions| fractions.contains(&rule))
    }

    pub(super) fn saw_fractions(&self, rule: RuleId) {
        if let Ok(mut fractions) = self.fractions.lock() {
            fractions.insert(rule);
        }
    }

    /// The values that a rule keeps before it overwrites them; none after its first backfill.
    pub(super) fn kept(&self, rule: RuleId) -> Option<Kept> {
        self.keeping.lock().ok()?.get(&rule).cloned()
    }

    /// True if a rule keeps the values that it overwrites.
    #[must_use]
    pub fn is_keeping(&self, rule: RuleId) -> bool {
        self.keeping.lock().is_ok_and(|keeping| keeping.contains_key(&rule))
    }

    /// Sets what a rule keeps. With `aside`, some of its targets are dead letters.
    pub fn keeps(&self, rule: RuleId, keeping: Option<Keeping>, aside: bool, is_full: bool) {
        let Ok(mut rules) = self.keeping.lock() else { return };
        match keeping {
            Some(keeping) => {
                drop(rules.insert(rule, Kept { keeping: Arc::new(keeping), aside, is_full, simple: None }));
            }
            None => drop(rules.remove(&rule)),
        }
    }

    /// Changes what is known of the values that a rule keeps.
    pub(super) fn learn_kept(&self, rule: RuleId, change: impl FnOnce(&mut Kept)) {
        if let Ok(mut rules) = self.keeping.lock()
            && let Some(kept) = rules.get_mut(&rule)
        {
            change(kept);
        }
    }

    /// Records that the first backfill of a rule has come to this target. Returns false if it had passed it before, or
    /// keeps nothing.
    pub fn passes(&self, rule: RuleId, target: &Bson) -> bool {
        let mut is_new = false;
        self.learn_kept(rule, |kept| {
            is_new = !kept.keeping.passed.first().is_some_and(|passed| is_behind(target, passed));
            if is_new {
                Arc::make_mut(&mut kept.keeping).passed = vec![target.clone()];
            }
        });
        is_new
    }

    /// The known number of bytes of kept values.
    pub(super) fn kept_bytes(&self) -> Option<u64> {
        *self.kept_bytes.lock().ok()?
    }

    pub(super) fn learn_kept_bytes(&self, bytes: Option<u64>) {
        if let Ok(mut known) = self.kept_bytes.lock() {
            *known = bytes;
        }
    }

    /// Counts a batch of a rule until the returned value is dropped.
    pub(super) fn busy(&self, rule: RuleId) -> Busy<'_> {
        if let Ok(mut batches) = self.batches.lock() {
            *batches.entry(rule).or_default() += 1;
        }
        Busy { memory: self, rule }
    }

    /// True while a batch of the rule runs.
    #[must_use]
    pub fn is_busy(&self, rule: RuleId) -> bool {
        self.batches.lock().is_ok_and(|batches| batches.get(&rule).is_some_and(|batches| *batches > 0))
    }

    /// True if the keys of a rule were last written to the same few targets: parallel batches would conflict.
    #[must_use]
    pub fn is_crowded(&self, rule: RuleId) -> bool {
        self.crowded.lock().is_ok_and(|crowded| crowded.contains(&rule))
    }

    pub(super) fn saw_crowd(&self, rule: RuleId, is_crowded: bool) {
        let Ok(mut crowded) = self.crowded.lock() else { return };
        if is_crowded {
            crowded.insert(rule);
        } else {
            crowded.remove(&rule);
        }
    }
}

/// A running batch.
pub(super) struct Busy<'a> {
    memory: &'a Memory,
    rule: RuleId,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        if let Ok(mut batches) = self.memory.batches.lock()
            && let Some(batches) = batches.get_mut(&self.rule)
        {
            *batches = batches.saturating_sub(1);
        }
    }
}

/// True if a document with this `_id` comes before or at `passed` in the order of the simple collation. False where
/// that is not certain: for `_id`s of different types, or of other types.
pub(super) fn is_behind(id: &Bson, passed: &Bson) -> bool {
    match (id, passed) {
        (Bson::ObjectId(id), Bson::ObjectId(passed)) => id <= passed,
        (Bson::String(id), Bson::String(passed)) => id.is_ascii() && passed.is_ascii() && id <= passed,
        (Bson::Int32(id), Bson::Int32(passed)) => id <= passed,
        (Bson::Int64(id), Bson::Int64(passed)) => id <= passed,
        _ => false,
    }
}
