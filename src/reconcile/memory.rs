//! What a leader remembers between batches. It begins anew with each leadership, and any of it may be forgotten.

use std::{
    collections::{HashMap, HashSet},
    sync::Mutex,
    time::{Duration, Instant},
};

use bson::Bson;

use crate::{
    change::Namespace, checkpoint::fan_out::Subject, key::Key, plan::RuleId, reconcile::group::Shape, request::Task,
};

/// The span of `limits.destroy_per_hour`.
const HOUR: Duration = Duration::from_secs(3600);
/// How long it is believed how large targets are.
const SIZE_AGE: Duration = Duration::from_secs(60);

/// Facts about the rules and their collections that spare a read, or bound what a rule removes.
#[derive(Debug, Default)]
pub struct Memory {
    /// Fan-out jobs that are under way.
    spreading: Mutex<HashSet<Subject>>,
    /// The targets of the page that each of them has asked for.
    pages: Mutex<HashMap<Subject, HashSet<Key>>>,
    /// The UUIDs of source collections that have existed: one that is missing, or has another UUID, was dropped.
    sources: Mutex<HashMap<Namespace, Bson>>,
    /// The removal limit of each rule where it follows the number of its targets, and when that was counted.
    limits: Mutex<HashMap<RuleId, (Instant, usize)>>,
    /// Rules whose backfill somebody has agreed to: the removal limit does not stop them.
    agreed: Mutex<HashSet<RuleId>>,
    /// Targets of each rule that have lost a value because no source answers, and since when they are counted.
    destroyed: Mutex<HashMap<RuleId, (Instant, usize)>>,
    /// The shape of each rule's targets, and when their size was measured.
    shapes: Mutex<HashMap<RuleId, (Shape, Option<Instant>)>>,
    /// Bytes that the last read of each task took for a key.
    costs: Mutex<HashMap<(RuleId, Task), usize>>,
    /// Rules whose sums contain numbers that are not whole.
    fractions: Mutex<HashSet<RuleId>>,
    /// How many documents of each rule's target collection one page covers, where a full page took too long to read.
    windows: Mutex<HashMap<RuleId, i64>>,
    /// Rules whose keys were written to the same few targets.
    crowded: Mutex<HashSet<RuleId>>,
}

impl Memory {
    /// Counts targets that lose a value; returns how many that are in this hour.
    pub fn destroyed(&self, rule: RuleId, count: usize) -> usize {
        let Ok(mut destroyed) = self.destroyed.lock() else { return usize::MAX };
        let (since, total) = destroyed.entry(rule).or_insert_with(|| (Instant::now(), 0));
        if since.elapsed() > HOUR {
            (*since, *total) = (Instant::now(), 0);
        }
        *total += count;
        *total
    }

    /// Counts from zero: the rule was unblocked.
    pub fn released(&self, rule: RuleId) {
        if let Ok(mut destroyed) = self.destroyed.lock() {
            destroyed.remove(&rule);
        }
    }

    /// What the targets of a rule are like; without their size when that was seen too long ago.
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

    /// Whether somebody has agreed to what the backfill of a rule removes.
    #[must_use]
    pub fn has_agreed(&self, rule: RuleId) -> bool {
        self.agreed.lock().is_ok_and(|agreed| agreed.contains(&rule))
    }

    /// Remembers whether somebody has agreed to what the backfill of a rule removes.
    pub fn agrees(&self, rule: RuleId, agreed: bool) {
        let Ok(mut rules) = self.agreed.lock() else { return };
        if agreed {
            rules.insert(rule);
        } else {
            rules.remove(&rule);
        }
    }

    /// Whether a fan-out is under way.
    #[must_use]
    pub fn is_spreading(&self, subject: &Subject) -> bool {
        self.spreading.lock().is_ok_and(|spreading| spreading.contains(subject))
    }

    /// Remembers that a fan-out job is under way, or that it is over.
    pub fn spreads(&self, subject: &Subject, under_way: bool) {
        let Ok(mut spreading) = self.spreading.lock() else { return };
        if under_way {
            spreading.insert(subject.clone());
        } else {
            spreading.remove(subject);
        }
    }

    /// The targets of the page that a fan-out job has asked for, if it waits for one.
    pub(super) fn page(&self, subject: &Subject) -> Option<HashSet<Key>> {
        self.pages.lock().ok()?.get(subject).cloned()
    }

    /// Remembers the page that a fan-out job asks for, or that it has been done.
    pub fn asks_page(&self, subject: &Subject, page: Option<HashSet<Key>>) {
        let Ok(mut pages) = self.pages.lock() else { return };
        match page {
            Some(page) => drop(pages.insert(subject.clone(), page)),
            None => drop(pages.remove(subject)),
        }
    }

    /// Keys of which one read is likely to stay within so many bytes: at least one.
    #[must_use]
    pub fn keys_at_once(&self, rule: RuleId, task: Task, bytes: usize) -> usize {
        let cost = self.costs.lock().ok().and_then(|costs| costs.get(&(rule, task)).copied());
        cost.and_then(|cost| bytes.checked_div(cost)).map_or(usize::MAX, |keys| keys.max(1))
    }

    /// Remembers what a read of so many keys took.
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

    /// Whether the keys of a rule were written to the same few targets last: batches that run beside each other would conflict.
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
