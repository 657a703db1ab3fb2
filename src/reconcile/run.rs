//! Runs a batch: read, compute, write, and find the culprit where the server refuses.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bson::{Bson, Document, RawDocumentBuf, doc};
use futures_util::{StreamExt, stream};
use tracing::{Instrument, Span, field::Empty};

use crate::{
    change::Namespace,
    checkpoint::fan_out::{FanOut, FanOuts, Subject},
    config::{Limits, OnDrift},
    dead_letter::{Culprit, DeadLetters},
    error::{Error, Kind, Result},
    failpoint,
    key::Key,
    logging::STAGES,
    metrics::Metrics,
    mongo::{Fence, Reads, Server, Written},
    partition::Partition,
    plan::{Plan, Rule, RuleId, reference::Role},
    position::ClusterTime,
    reconcile::{
        compare::{self, Compared},
        group::{self, Member, Shape, Size},
        read, shape,
        statement::{self, Part, Statement},
        value::{Desired, Field, Rows},
    },
    request::{Request, Scope, Task},
    route::{reference_requests, target_requests, value_request},
    workqueue::{Batch, Doubt, Lane, Work},
};

/// How long the guard waits before it calls a difference drift.
const SECOND_LOOK: Duration = Duration::from_millis(200);
/// The span of `limits.destroy_per_hour`.
const HOUR: Duration = Duration::from_secs(3600);
/// Targets written by one statement when the culprit of a refusal is looked for.
const STEP: usize = 1000;
/// From twice as many targets of one key on, they are written by two commands at once.
const HALF: usize = 1000;
/// How long it is believed how large targets are.
const SIZE_AGE: Duration = Duration::from_secs(60);
/// A statement that has taken too long for all targets of a key is begun anew for so many times `limits.write_timeout`: what it
/// has written is soon passed, and statements are twice as fast as the pages of a fan-out. Others that wait for the key wait as
/// long.
const ANEW: u32 = 3;
/// The first one has this part of `limits.write_timeout`: only then are the targets known to be many.
const FIRST: u32 = 10;
/// Statements that write the rest of a key's targets, two at once, where it makes up much of its collection.
const PARTS: usize = 16;
/// Documents that are looked at to tell how much it makes up: a quarter is much.
const SAMPLE: usize = 400;
/// Targets that a look-up may lead to. More of one key are a fan-out of their own.
const MANY: usize = 10_000;

/// What every batch needs.
#[derive(Debug)]
pub struct Context {
    /// The cluster.
    pub server: Server,
    /// The rules.
    pub plan: Plan,
    /// Bounds.
    pub limits: Limits,
    /// Where refused work is recorded.
    pub dead_letters: DeadLetters,
    /// Where large fan-outs are recorded.
    pub fan_outs: FanOuts,
    /// Those that are under way.
    pub spreading: Mutex<HashSet<Subject>>,
    /// The source collections that are known to have been there: one of them that is missing has been dropped.
    pub sources: Mutex<HashSet<Namespace>>,
    /// What `remove` and `delete` of each rule have destroyed, and since when that is counted.
    destroyed: Mutex<HashMap<RuleId, (Instant, usize)>>,
    /// What the targets of each rule are like, and since when it is known how large they are.
    shapes: Mutex<HashMap<RuleId, (Shape, Option<Instant>)>>,
    /// Rules in whose sums not all numbers are whole.
    fractions: Mutex<HashSet<RuleId>>,
    /// Rules that the cluster lacked something for when the config was taken, and what.
    pub lacking: BTreeMap<RuleId, String>,
    /// What was done so far.
    pub counts: Counts,
    /// What is measured.
    pub metrics: Arc<Metrics>,
    /// Which keys are reconciled here.
    pub partition: Partition,
}

impl Context {
    /// Gathers them.
    #[must_use]
    pub fn new(server: Server, plan: Plan, limits: Limits, dead_letters: DeadLetters, metrics: Arc<Metrics>) -> Self {
        let (database, deployment) = (dead_letters.database.clone(), dead_letters.deployment.clone());
        Self {
            server,
            plan,
            limits,
            dead_letters,
            fan_outs: FanOuts { database, deployment },
            spreading: Mutex::default(),
            sources: Mutex::default(),
            destroyed: Mutex::default(),
            shapes: Mutex::default(),
            fractions: Mutex::default(),
            lacking: BTreeMap::new(),
            counts: Counts::default(),
            metrics,
            partition: Partition::WHOLE,
        }
    }

    /// The same for one partition: it reconciles the keys that it owns, and keeps its own state. Limits that bound all
    /// partitions together become its share of them.
    #[must_use]
    pub fn within(mut self, partition: Partition) -> Self {
        self.fan_outs.deployment = partition.id(&self.dead_letters.deployment);
        self.dead_letters.partition = partition;
        self.limits.pending = partition.share(self.limits.pending);
        self.limits.destroy_per_hour = partition.share(self.limits.destroy_per_hour);
        self.partition = partition;
        self
    }

    /// Whether what writes this key of the rule runs here.
    #[must_use]
    pub fn owns(&self, rule: &Rule, key: &Key) -> bool {
        self.partition.owns(&rule.name, key)
    }

    /// Counts what a rule destroys; returns how much that is in this hour.
    pub fn destroyed(&self, rule: RuleId, count: usize) -> usize {
        let Ok(mut destroyed) = self.destroyed.lock() else { return usize::MAX };
        let (since, total) = destroyed.entry(rule).or_insert_with(|| (Instant::now(), 0));
        if since.elapsed() > HOUR {
            (*since, *total) = (Instant::now(), 0);
        }
        *total += count;
        *total
    }

    /// Starts counting anew: the rule was released.
    pub fn released(&self, rule: RuleId) {
        if let Ok(mut destroyed) = self.destroyed.lock() {
            destroyed.remove(&rule);
        }
    }

    /// What the targets of a rule are like; without their size when that was seen too long ago.
    fn shape(&self, rule: RuleId) -> Shape {
        let Ok(mut shapes) = self.shapes.lock() else { return Shape::default() };
        let (shape, since) = shapes.entry(rule).or_default();
        shape.size = shape.size.filter(|_| since.is_some_and(|since| since.elapsed() < SIZE_AGE));
        *shape
    }

    fn learn(&self, rule: RuleId, take: impl FnOnce(&mut Shape, &mut Option<Instant>)) {
        if let Ok(mut shapes) = self.shapes.lock() {
            let (shape, since) = shapes.entry(rule).or_default();
            take(shape, since);
        }
    }

    /// Reads the sources of `keys`, at least as new as `after`.
    pub(super) async fn rows(&self, rule: &Rule, keys: &[&Key], after: ClusterTime) -> Result<Rows> {
        let read = async |command| self.server.read(&rule.source.namespace.database, command, Reads { after }).await;
        let fractions = self.fractions.lock().is_ok_and(|fractions| fractions.contains(&rule.id));
        let mut rows = Rows::default();
        if let Some(command) = read::sources_in_any_order(rule, keys).filter(|_| !fractions) {
            let found = read(command).await?;
            if found.iter().all(|row| row.get_bool("w").unwrap_or(false)) {
                rows.take(found)?;
                return Ok(rows);
            }
            if let Ok(mut fractions) = self.fractions.lock() {
                fractions.insert(rule.id);
            }
        }
        rows.take(read(read::sources(rule, keys)).await?)?;
        Ok(rows)
    }

    /// Whether a source collection is known to have been there.
    #[must_use]
    pub fn has_seen(&self, source: &Namespace) -> bool {
        self.sources.lock().is_ok_and(|sources| sources.contains(source))
    }

    /// Remembers that a source collection is there, or forgets that it was.
    pub fn saw(&self, source: &Namespace, there: bool) {
        let Ok(mut sources) = self.sources.lock() else { return };
        if there {
            sources.insert(source.clone());
        } else {
            sources.remove(source);
        }
    }

    /// Whether a fan-out is under way.
    #[must_use]
    pub fn is_spreading(&self, subject: &Subject) -> bool {
        self.spreading.lock().is_ok_and(|spreading| spreading.contains(subject))
    }

    /// The same for a leader, whose writes end with its lease. Counts begin anew.
    #[must_use]
    pub fn under(&self, fence: Arc<Fence>) -> Self {
        Self {
            server: self.server.under(fence),
            plan: self.plan.clone(),
            limits: self.limits.clone(),
            dead_letters: self.dead_letters.clone(),
            fan_outs: self.fan_outs.clone(),
            spreading: Mutex::default(),
            sources: Mutex::default(),
            destroyed: Mutex::default(),
            shapes: Mutex::default(),
            fractions: Mutex::default(),
            lacking: self.lacking.clone(),
            counts: Counts::default(),
            metrics: self.metrics.clone(),
            partition: self.partition,
        }
    }
}

/// What was done since the start.
#[derive(Debug, Default)]
pub struct Counts {
    /// Keys that were reconciled.
    pub reconciled: AtomicU64,
    /// Targets that a statement matched.
    pub matched: AtomicU64,
    /// Targets that a statement changed.
    pub modified: AtomicU64,
    /// Keys and targets that were set aside.
    pub dead_letters: AtomicU64,
    /// Runs that failed for the moment.
    pub retries: AtomicU64,
    /// Targets whose owned fields somebody else had written.
    pub drift: AtomicU64,
}

/// How a batch ended.
#[derive(Debug)]
pub struct Outcome {
    /// Its rule and task.
    pub lane: Lane,
    /// Each key's end.
    pub keys: Vec<Ended>,
    /// What look-ups have led to. It comes from all keys of the batch together.
    pub follow_ups: Vec<Request>,
    /// The batch's number.
    pub number: u64,
    /// How long it took.
    pub took: Duration,
}

/// How the run of one key ended.
#[derive(Debug)]
pub struct Ended {
    /// The key.
    pub key: Key,
    /// What had been asked of it.
    pub work: Work,
    /// How it ended.
    pub end: End,
}

/// The end itself.
#[derive(Debug)]
pub enum End {
    /// Acknowledged by a majority.
    Done,
    /// Recorded as one or more dead letters, acknowledged by a majority.
    SetAside,
    /// Recorded as a fan-out, acknowledged by a majority: its targets are done a page at a time.
    Spread(FanOut),
    /// Failed for the moment.
    Failed(Error),
    /// More would be destroyed than the rule may: it is to be held.
    Brake,
    /// To be looked at again after this while: a reference that dangles under a policy that destroys, a target that differs
    /// and may be about to be written.
    Later(Duration),
}

/// Runs one batch to its end. Never fails as a whole: each key has its own end. With `detached`, the source is gone for
/// now: targets keep what no source answers.
pub async fn run(context: Arc<Context>, batch: Batch, detached: bool) -> Outcome {
    let started = Instant::now();
    let (rule, task) = batch.lane;
    let rule = context.plan.rule(rule).clone();
    let run = Run { context: &context, rule: &rule, task, detached };
    let items: Vec<Item> = batch.items.into_iter().map(|(key, work)| Item { key, work, end: None }).collect();
    let mut follow_ups = Vec::new();
    let late = batch_age(&items, context.metrics.now());
    let span = tracing::info_span!(target: STAGES, "batch", rule = %rule.name, ?task, keys = items.len(), oldest_change_ms = late);
    let keys = run.items(items, &mut follow_ups).instrument(span).await;
    Outcome { lane: batch.lane, keys, follow_ups, number: batch.number, took: started.elapsed() }
}

/// How many milliseconds ago the oldest change was committed that these come from.
fn batch_age(items: &[Item], now: i64) -> Option<i64> {
    items.iter().filter_map(|item| item.work.committed).min().map(|committed| (now - committed).max(0))
}

/// What was refused of one statement, and the items that it belongs to.
type Shared = (Vec<usize>, Error);

struct Run<'a> {
    context: &'a Context,
    rule: &'a Rule,
    task: Task,
    detached: bool,
}

struct Item {
    key: Key,
    work: Work,
    end: Option<End>,
}

impl Item {
    fn member<'a>(&'a self, fields: &'a [Field]) -> Member<'a> {
        Member { key: &self.key, scope: &self.work.scope, fields }
    }

    fn ended(self) -> Ended {
        let end = self.end.unwrap_or(End::Done);
        Ended { key: self.key, work: self.work, end }
    }
}

impl Run<'_> {
    async fn items(&self, mut items: Vec<Item>, follow_ups: &mut Vec<Request>) -> Vec<Ended> {
        let result = match self.task {
            Task::Value => self.values(&mut items).await,
            Task::Target => self.targets(&mut items).await,
            Task::LocateSource => self.locate(Role::Source, &items, follow_ups).await,
            Task::LocateTarget => self.locate(Role::Target, &items, follow_ups).await,
            Task::Guard => self.guard(&mut items, follow_ups).await,
            Task::Parents | Task::Holders => self.found(&mut items, follow_ups).await,
        };
        if let Err(error) = result {
            return self.whole_failed(items, error, follow_ups).await;
        }
        self.context.counts.reconciled.fetch_add(items.len() as u64, Ordering::Relaxed);
        items.into_iter().map(Item::ended).collect()
    }

    /// The batch failed before any key could be told from the others: halve it until the culprit stands alone.
    async fn whole_failed(&self, mut items: Vec<Item>, error: Error, follow_ups: &mut Vec<Request>) -> Vec<Ended> {
        let divide = match error.kind {
            Kind::Refused | Kind::TimedOut | Kind::Internal => true,
            Kind::Connection
            | Kind::Unavailable
            | Kind::NotReplicated
            | Kind::HistoryLost
            | Kind::Privilege
            | Kind::Config
            | Kind::Topology => false,
        };
        if divide && items.len() > 1 {
            let back = items.split_off(items.len() / 2);
            let mut out = Box::pin(self.items(items, follow_ups)).await;
            out.append(&mut Box::pin(self.items(back, follow_ups)).await);
            return out;
        }
        for item in &mut items {
            item.end = Some(match error.kind {
                Kind::Refused | Kind::Internal => self.set_aside(&item.key, None, &error).await,
                _ => End::Failed(copy(&error)),
            });
        }
        items.into_iter().map(Item::ended).collect()
    }

    async fn set_aside(&self, key: &Key, target: Option<&Key>, error: &Error) -> End {
        let Context { server, dead_letters, counts, .. } = self.context;
        let path = match target.or((self.task == Task::Target).then_some(key)) {
            Some(target) => self.in_the_way(target).await,
            None => None,
        };
        let culprit = Culprit { key, target, path };
        match dead_letters.record(server, self.rule, self.task, &culprit, error).await {
            Ok(()) => {
                failpoint::here("set-aside");
                counts.dead_letters.fetch_add(1, Ordering::Relaxed);
                self.context.metrics.set_aside(&self.rule.name, error);
                tracing::warn!(rule = %self.rule.name, error = %error.message, "set aside as a dead letter");
                End::SetAside
            }
            Err(error) => End::Failed(error),
        }
    }

    /// What in the shape of a target that refuses a write is in the way: for people, so a target that cannot be read has
    /// none.
    async fn in_the_way(&self, target: &Key) -> Option<String> {
        let paths = self.rule.owned();
        let fields: Document = paths.iter().map(|path| (path.root().to_owned(), Bson::Int32(1))).collect();
        let id = target.values().first()?.clone();
        let command =
            doc! {"find": &self.rule.target.namespace.collection, "filter": {"_id": {"$eq": id}}, "projection": fields};
        let found = self.read(Role::Target, command, ClusterTime::default()).await.ok()?;
        shape::in_the_way(&paths, &Document::try_from(found.first()?.as_ref()).ok()?)
    }

    async fn read(&self, role: Role, command: Document, after: ClusterTime) -> Result<Vec<RawDocumentBuf>> {
        let database = &self.namespace(role).database;
        self.context.server.read(database, command, Reads { after }).instrument(self.reading(role)).await
    }

    fn namespace(&self, role: Role) -> &Namespace {
        match role {
            Role::Source => &self.rule.source.namespace,
            Role::Target => &self.rule.target.namespace,
        }
    }

    fn reading(&self, role: Role) -> Span {
        tracing::info_span!(target: STAGES, "read", collection = %self.namespace(role))
    }

    async fn rows(&self, keys: &[&Key], after: ClusterTime) -> Result<Rows> {
        let mut rows = Rows::default();
        let keys: Vec<&Key> = keys.iter().copied().filter(|key| self.rule.reference.can_resolve(key)).collect();
        if !keys.is_empty() {
            rows = self.context.rows(self.rule, &keys, after).instrument(self.reading(Role::Source)).await?;
            if rows.is_empty() && !self.detached {
                self.still_there().await?;
            }
        }
        Ok(rows)
    }

    /// Nothing was found in a collection that was there when we started: it may be gone, and the event that says so on its
    /// way. What depends on it keeps what it has.
    async fn still_there(&self) -> Result<()> {
        let namespace = &self.rule.source.namespace;
        let server = &self.context.server;
        if !self.context.has_seen(namespace)
            || server.has_collection(&namespace.database, &namespace.collection).await?
        {
            return Ok(());
        }
        Err(Error::new(Kind::Unavailable, format!("the source collection `{namespace}` is gone")))
    }

    /// A rule in shadow compares where it would write, and counts.
    async fn shadow(&self, items: &[Item]) -> Result<()> {
        let after = newest(items);
        let mut named: Vec<Bson> = Vec::new();
        for item in items {
            match (&item.work.scope, self.task) {
                (Scope::Named(ids), _) => named.extend(ids.iter().filter_map(|id| id.values().first().cloned())),
                (Scope::All, Task::Target) => named.extend(item.key.values().first().cloned()),
                (Scope::All, _) => {
                    let command = read::holders(self.rule, &[&item.key]);
                    let database = &self.rule.target.namespace.database;
                    let mut pages = self.context.server.pages(database, command, Reads { after }).await?;
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

    async fn shadow_of(&self, ids: &[Bson], after: ClusterTime) -> Result<()> {
        for ids in ids.chunks(STEP) {
            let compared = compare::compare_ids(self.context, self.rule, ids, after).await?;
            let differing = compared.iter().filter(|compared| compared.differences().next().is_some()).count();
            self.context.metrics.shadowed(&self.rule.name, compared.len() as u64, differing as u64);
        }
        Ok(())
    }

    async fn values(&self, items: &mut [Item]) -> Result<()> {
        if self.rule.shadow {
            return self.shadow(items).await;
        }
        let keys: Vec<&Key> = items.iter().map(|item| &item.key).filter(|key| !key.values().is_empty()).collect();
        let rows = self.rows(&keys, newest(items)).await?;
        let shape = self.shape(items.len()).await;
        let (mut statements, mut beside) = (Vec::new(), Vec::new());
        let mut grouped: Vec<(usize, Vec<Field>)> = Vec::new();
        let mut destroys = false;
        for (nth, item) in items.iter_mut().enumerate() {
            if item.work.scope == Scope::All && self.context.is_spreading(&self.subject(item)) {
                item.end = Some(self.spread(item).await);
                continue;
            }
            if self.detached && !item.key.values().is_empty() && !rows.answer(&item.key) {
                continue;
            }
            let desired = match rows.desired(self.rule, &item.key) {
                Ok(desired) => desired,
                Err(error) if error.kind == Kind::Refused => {
                    item.end = Some(self.set_aside(&item.key, None, &error).await);
                    continue;
                }
                Err(error) => return Err(error),
            };
            if matches!(desired, Desired::Remove | Desired::Delete) {
                if let Some(end) = self.destroys(item).await? {
                    item.end = Some(end);
                    continue;
                }
                destroys = true;
            }
            match (desired, shape) {
                // All targets were wanted then, and are still.
                (desired @ Desired::Fields(_), _) if item.work.begun_anew.is_some() => {
                    item.end = Some(self.rest(item, &rows, &desired).await);
                }
                (Desired::Fields(fields), Some(shape)) if group::fits(self.rule, shape, &item.member(&fields)) => {
                    grouped.push((nth, fields));
                }
                (desired, _) => {
                    let (scope, other) = halves(&item.work.scope);
                    for (scope, out) in [(Some(scope), &mut statements), (other, &mut beside)] {
                        let Some(scope) = scope else { continue };
                        let alone = statement::of_value(self.rule, &item.key, &scope, &desired)?;
                        out.extend(alone.into_iter().map(|statement| (vec![nth], statement)));
                    }
                }
            }
        }
        let members = grouped.iter().map(|(nth, fields)| (*nth, items[*nth].member(fields))).collect();
        for group in group::divide(members) {
            let (owners, members): (Vec<usize>, Vec<Member>) = group.into_iter().unzip();
            statements.push((owners, group::statement(self.rule, &members)?));
        }
        let timeout = match items {
            [item] if item.work.scope == Scope::All && !destroys && !self.rule.reference.keyed_by_target_id() => {
                self.context.limits.write_timeout / FIRST
            }
            _ => self.context.limits.write_timeout,
        };
        self.write(items, [statements, beside], &rows, timeout).await
    }

    /// What the targets are like; None where their keys do not share statements.
    async fn shape(&self, keys: usize) -> Option<Shape> {
        if keys < 2 || !group::is_possible(self.rule) {
            return None;
        }
        let mut shape = self.context.shape(self.rule.id);
        if shape.size.is_none() {
            // Without an answer each key has a statement of its own, until it is asked again.
            let rows = self.read(Role::Target, read::target_size(self.rule), ClusterTime::default()).await;
            let rows = rows.unwrap_or_default();
            let row = rows.first().map(|row| Document::try_from(row.as_ref())).transpose().ok()?.unwrap_or_default();
            let others = row.get_i32("others").map_or(0.0, f64::from);
            shape.size = Some(Size { bytes: row.get_f64("bytes").unwrap_or_default(), others });
            self.context.learn(self.rule.id, |known, since| (known.size, *since) = (shape.size, Some(Instant::now())));
        }
        Some(shape)
    }

    /// Writes those targets of a key that do not hold `desired` yet, after a statement for all of them has taken too long, by two
    /// commands at once.
    async fn rest(&self, item: &mut Item, rows: &Rows, desired: &Desired) -> End {
        let begun = Instant::now();
        let timeout = self.context.limits.write_timeout;
        let end = item.work.begun_anew.unwrap_or(begun) + timeout * ANEW;
        let parts = self.parts_of_rest(&item.key, desired).await;
        let failed = Mutex::new(None);
        let (key, failure) = (&item.key, &failed);
        let written = stream::iter(&parts).for_each_concurrent(2, |part| async move {
            // A failure of one does not leave the other running.
            if failure.lock().is_ok_and(|failure| failure.is_some()) {
                return;
            }
            let result = match timeout.min(end.saturating_duration_since(Instant::now())) {
                Duration::ZERO => Err(Error::new(Kind::TimedOut, "this key has too many targets")),
                timeout => self.part(key, desired, part, timeout).await,
            };
            if let (Err(error), Ok(mut failure)) = (result, failure.lock()) {
                failure.get_or_insert(error);
            }
        });
        written.await;
        let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) else { return End::Done };
        self.refused(item, rows, error, begun.elapsed() > timeout / 2).await
    }

    async fn part(&self, key: &Key, desired: &Desired, part: &Part, timeout: Duration) -> Result<()> {
        let updates = statement::of_rest(self.rule, key, desired, part)?.into_iter().filter_map(|one| match one {
            Statement::Update(raw) => Some(raw),
            Statement::Delete(_) => None,
        });
        let mut written = self.send(false, &updates.collect::<Vec<_>>(), timeout).await?;
        written.refused.pop().map_or(Ok(()), |(_, error)| Err(error))
    }

    /// Parts of the collection in which the targets that do not hold `desired` yet are about as many. Only one where they are
    /// few among others: their reference's index finds them, but would have to be gone through for each part.
    async fn parts_of_rest(&self, key: &Key, desired: &Desired) -> Vec<Part> {
        let rest = statement::unfinished(self.rule, desired);
        let size = i32::try_from(SAMPLE).unwrap_or(i32::MAX);
        let mut command = read::some_of_rest(self.rule, key, rest.as_ref(), size);
        command.insert("maxTimeMS", i64::try_from(self.context.limits.write_timeout.as_millis()).unwrap_or(i64::MAX));
        // Without an answer it is one.
        let rows = self.read(Role::Target, command, ClusterTime::default()).await.unwrap_or_default();
        let count = if rows.len() >= SAMPLE / 4 { PARTS } else { 1 };
        let bound = |nth| id_of(rows.get(rows.len() * nth / count)?).ok()?.values().first().cloned();
        Part::between(&(1..count).filter_map(bound).collect::<Vec<_>>())
    }

    /// What keeps a dangling reference from destroying: the grace period, or the brake.
    async fn destroys(&self, item: &mut Item) -> Result<Option<End>> {
        let limits = &self.context.limits;
        let since = *item.work.doubted_since.get_or_insert_with(Instant::now);
        if since.elapsed() < limits.destroy_grace {
            return Ok(Some(End::Later(limits.destroy_grace)));
        }
        let left = limits.destroy_per_hour.saturating_sub(self.context.destroyed(self.rule.id, 0));
        let count = match &item.work.scope {
            Scope::Named(ids) => ids.len(),
            Scope::All => {
                let mut command = read::holders(self.rule, &[&item.key]);
                command.insert("limit", i64::try_from(left).unwrap_or(i64::MAX).saturating_add(1));
                self.read(Role::Target, command, item.work.after).await?.len()
            }
        };
        if count > left {
            return Ok(Some(End::Brake));
        }
        self.context.destroyed(self.rule.id, count);
        Ok(None)
    }

    /// Sends the statements, those of the two lists beside each other, each list for as long as `timeout`.
    async fn write(
        &self,
        items: &mut [Item],
        statements: [Vec<(Vec<usize>, Statement)>; 2],
        rows: &Rows,
        timeout: Duration,
    ) -> Result<()> {
        let begun = Instant::now();
        let [first, second] = statements.map(|statements| self.sent(items, statements, timeout));
        // A failure of one does not leave the other running.
        let (first, second) = tokio::join!(first, second);
        let ((mut refused, mut matched), (others, found)) = (first?, second?);
        refused.extend(others);
        matched += found;
        let whole = |item: &Item| item.work.scope == Scope::All && item.work.begun_anew.is_none();
        if self.task == Task::Value && items.iter().all(whole) {
            self.context.learn(self.rule.id, |shape, _| shape.learn(items.len(), matched));
        }
        // What the server refuses of a statement for several keys is done key by key.
        let shared: Vec<usize> =
            refused.extract_if(.., |(owners, _)| owners.len() > 1).flat_map(|(owners, _)| owners).collect();
        let mut alone = Vec::new();
        for nth in shared {
            let item = &items[nth];
            let desired = rows.desired(self.rule, &item.key)?;
            let statements = statement::of_value(self.rule, &item.key, &item.work.scope, &desired)?;
            alone.extend(statements.into_iter().map(|statement| (vec![nth], statement)));
        }
        refused.extend(self.sent(items, alone, timeout).await?.0);
        let mut seen = HashSet::new();
        for (nth, error) in refused.into_iter().filter_map(|(owners, error)| Some((*owners.first()?, error))) {
            // Both halves of a key may be refused. In steps all of it is done.
            if !seen.insert(nth) {
                continue;
            }
            let end = self.refused(&mut items[nth], rows, error, begun.elapsed() > timeout / 2).await;
            items[nth].end = Some(end);
        }
        Ok(())
    }

    /// What becomes of a key of which the server refuses a statement, after a `long` time or at once.
    async fn refused(&self, item: &mut Item, rows: &Rows, error: Error, long: bool) -> End {
        match error.kind {
            Kind::TimedOut if long && self.may_go_on(item, rows) => {
                item.work.begun_anew.get_or_insert_with(Instant::now);
                End::Later(Duration::ZERO)
            }
            Kind::Refused | Kind::TimedOut | Kind::Internal => {
                self.in_steps(item, rows, error).await.unwrap_or_else(End::Failed)
            }
            _ => End::Failed(error),
        }
    }

    /// Whether a statement that has taken too long is begun anew. What is destroyed has been counted already.
    fn may_go_on(&self, item: &Item, rows: &Rows) -> bool {
        self.task == Task::Value
            && item.work.scope == Scope::All
            && item.work.begun_anew.is_none_or(|since| since.elapsed() < self.context.limits.write_timeout * ANEW)
            && matches!(rows.desired(self.rule, &item.key), Ok(Desired::Fields(_)))
    }

    /// Sends the statements. Returns what the server refuses, with the items that it belongs to, and how many targets it found.
    async fn sent(
        &self,
        items: &[Item],
        statements: Vec<(Vec<usize>, Statement)>,
        timeout: Duration,
    ) -> Result<(Vec<Shared>, u64)> {
        let mut refused = Vec::new();
        let mut matched = 0;
        let (mut updates, mut deletes) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new()));
        for (owners, statement) in statements {
            let (side, raw) = match statement {
                Statement::Update(raw) => (&mut updates, raw),
                Statement::Delete(raw) => (&mut deletes, raw),
            };
            side.0.push(owners);
            side.1.push(raw);
        }
        for (deletes, (mut owners, raw)) in [(false, updates), (true, deletes)] {
            match self.send(deletes, &raw, timeout).await {
                Ok(written) => {
                    matched += written.matched;
                    let owned = |(index, error): (usize, Error)| (std::mem::take(&mut owners[index]), error);
                    refused.extend(written.refused.into_iter().map(owned));
                }
                // One key whose targets take too long is taken in steps.
                Err(error) if error.kind == Kind::TimedOut && items.len() == 1 => refused.push((vec![0], error)),
                Err(error) => return Err(error),
            }
        }
        Ok((refused, matched))
    }

    async fn send(&self, deletes: bool, statements: &[RawDocumentBuf], timeout: Duration) -> Result<Written> {
        if statements.is_empty() {
            return Ok(Written::default());
        }
        let Context { server, counts, metrics, .. } = self.context;
        failpoint::here("read");
        let writing = metrics.write(&self.rule.name, if deletes { "delete" } else { "update" });
        let ns = &self.rule.target.namespace;
        let span = tracing::info_span!(
            target: STAGES, "write", collection = %ns, deletes, statements = statements.len(), matched = Empty, modified = Empty
        );
        let sent = async {
            if deletes {
                server.delete(&ns.database, &ns.collection, statements, timeout).await
            } else {
                server.update(&ns.database, &ns.collection, statements, timeout).await
            }
        };
        let written = sent.instrument(span.clone()).await?;
        span.record("matched", written.matched).record("modified", written.modified);
        failpoint::here("written");
        writing.done(written.matched, written.modified);
        counts.matched.fetch_add(written.matched, Ordering::Relaxed);
        counts.modified.fetch_add(written.modified, Ordering::Relaxed);
        Ok(written)
    }

    /// Writes the named targets of one key a step at a time, and sets aside those that the server refuses. All targets of a
    /// key are too many to hold: they become a fan-out.
    async fn in_steps(&self, item: &Item, rows: &Rows, cause: Error) -> Result<End> {
        if self.task == Task::Target {
            return Ok(self.set_aside(&item.key, None, &cause).await);
        }
        let Scope::Named(ids) = &item.work.scope else { return Ok(self.spread(item).await) };
        let desired = rows.desired(self.rule, &item.key)?;
        let mut end = End::Done;
        let ids: Vec<Key> = ids.iter().cloned().collect();
        for step in ids.chunks(STEP) {
            self.step(&item.key, step, &desired, &mut end).await?;
        }
        Ok(end)
    }

    async fn step(&self, key: &Key, ids: &[Key], desired: &Desired, end: &mut End) -> Result<()> {
        let mut stack = vec![ids];
        while let Some(ids) = stack.pop() {
            let scope = Scope::Named(ids.iter().cloned().collect::<HashSet<_>>());
            let statements = statement::of_value(self.rule, key, &scope, desired)?;
            let mut error = None;
            for deletes in [false, true] {
                let raw = statements.iter().filter_map(|statement| match statement {
                    Statement::Update(raw) if !deletes => Some(raw.clone()),
                    Statement::Delete(raw) if deletes => Some(raw.clone()),
                    _ => None,
                });
                error = error.or(self
                    .send(deletes, &raw.collect::<Vec<_>>(), self.context.limits.write_timeout)
                    .await?
                    .refused
                    .pop()
                    .map(|(_, error)| error));
            }
            match error {
                None => {}
                Some(_) if ids.len() > 1 => {
                    let (front, back) = ids.split_at(ids.len() / 2);
                    stack.extend([front, back]);
                }
                Some(error) if error.is_transient() => return Err(error),
                Some(error) => match self.set_aside(key, ids.first(), &error).await {
                    End::Failed(error) => return Err(error),
                    aside => *end = aside,
                },
            }
        }
        Ok(())
    }

    async fn targets(&self, items: &mut [Item]) -> Result<()> {
        if self.rule.shadow {
            return self.shadow(items).await;
        }
        let after = newest(items);
        let ids: Vec<&Key> = items.iter().map(|item| &item.key).collect();
        let mut targets = HashMap::new();
        for row in self.read(Role::Target, read::targets(self.rule, &ids), after).await? {
            let doc = Document::try_from(row.as_ref())?;
            let guard =
                row.get_document(read::GUARD).map_err(|_| Error::internal("a target without its guard"))?.to_owned();
            let references = self.rule.reference.keys(Role::Target, &doc);
            targets.insert(id_of(&row)?, (references, self.rule.reference.has_array(&doc), guard));
        }
        let wanted: HashSet<&Key> = targets.values().flat_map(|(references, ..)| references.iter().flatten()).collect();
        let rows = self.rows(&wanted.into_iter().collect::<Vec<_>>(), after).await?;
        let mut statements = Vec::new();
        for (nth, item) in items.iter().enumerate() {
            let Some((references, has_array, guard)) = targets.get(&item.key) else { continue };
            if self.detached && references.iter().flatten().any(|key| !rows.answer(key)) {
                continue;
            }
            let desired = rows.desired_of_target(self.rule, references, *has_array)?;
            for statement in statement::of_target(self.rule, &item.key, guard, &desired)? {
                statements.push((vec![nth], statement));
            }
        }
        self.write(items, [statements, Vec::new()], &rows, self.context.limits.write_timeout).await
    }

    async fn locate(&self, role: Role, items: &[Item], follow_ups: &mut Vec<Request>) -> Result<()> {
        let ids: Vec<&Key> = items.iter().map(|item| &item.key).collect();
        for row in self.read(role, read::by_id(self.rule, role, &ids), newest(items)).await? {
            let doc = Document::try_from(row.as_ref())?;
            match role {
                Role::Source => {
                    let keys = self.rule.reference.keys(role, &doc).into_iter().flatten();
                    follow_ups.extend(keys.map(|key| value_request(self.rule, key)));
                }
                Role::Target => follow_ups.extend(target_requests(self.rule, &id_of(&row)?, &doc)),
            }
        }
        Ok(())
    }

    /// Compares targets whose owned fields were written. Most often it was we who wrote them, and nothing differs.
    async fn guard(&self, items: &mut [Item], follow_ups: &mut Vec<Request>) -> Result<()> {
        let ids: Vec<Bson> = items.iter().filter_map(|item| item.key.values().first().cloned()).collect();
        let compared = compare::compare_ids(self.context, self.rule, &ids, newest(items)).await?;
        let differing = compared.into_iter().filter(|compared| compared.differences().next().is_some());
        let differing: HashMap<Key, Compared> = differing.map(|c| (Key::one(c.target.clone()), c)).collect();
        if differing.is_empty() {
            return Ok(());
        }
        let seen = self.context.server.operation_time().await?;
        let mut drift = Vec::new();
        for item in items {
            let Some(compared) = differing.get(&item.key) else { continue };
            // The source may have changed a moment ago, and the write that follows may be under way: drift is what is the same
            // when that is over.
            let (difference, doubt) = (compared.fingerprint(), &mut item.work.doubt);
            let is_new = item.work.doubted_since.is_none() || doubt.difference != difference;
            if is_new {
                item.work.doubted_since = Some(Instant::now());
                *doubt = Doubt { difference, seen, premature: true };
            }
            if doubt.premature {
                item.end = Some(End::Later(SECOND_LOOK));
                continue;
            }
            if self.rule.on_drift == OnDrift::Repair {
                follow_ups.extend(reference_requests(self.rule, &item.key, compared.references.clone()));
            }
            drift.push(compared.clone());
        }
        drifted(self.context, self.rule, &drift);
        Ok(())
    }

    /// Finds the targets that refer to the keys, or hold them, and asks for each.
    async fn found(&self, items: &mut [Item], follow_ups: &mut Vec<Request>) -> Result<()> {
        match (self.few(items).await?, items) {
            (Some(mut requests), _) => follow_ups.append(&mut requests),
            (None, [item]) => item.end = Some(self.spread(item).await),
            (None, _) => return Err(Error::new(Kind::TimedOut, "these keys have too many targets")),
        }
        Ok(())
    }

    /// What the targets found ask for; None when they are many.
    async fn few(&self, items: &[Item]) -> Result<Option<Vec<Request>>> {
        let mut requests = Vec::new();
        let keys: Vec<&Key> = items.iter().map(|item| &item.key).collect();
        let Some(command) = read::found(self.rule, self.task, &keys) else { return Ok(Some(requests)) };
        let database = &self.rule.target.namespace.database;
        let mut pages = self.context.server.pages(database, command, Reads { after: newest(items) }).await?;
        let mut targets = 0;
        while let Some(page) = pages.next().await? {
            targets += page.len();
            if targets > MANY {
                return Ok(None);
            }
            for row in &page {
                requests.extend(request_of_found(self.rule, self.task, row)?);
            }
        }
        Ok(Some(requests))
    }

    /// Leaves all targets of a key to a fan-out, which has its own progress: neither the saved position nor other keys wait
    /// for it.
    async fn spread(&self, item: &Item) -> End {
        let Context { server, fan_outs, .. } = self.context;
        let subject = self.subject(item);
        match fan_outs.open(server, self.rule, subject, item.work.committed).await {
            Ok(fan_out) => {
                failpoint::here("fan-out-opened");
                End::Spread(fan_out)
            }
            Err(error) => End::Failed(error),
        }
    }

    fn subject(&self, item: &Item) -> Subject {
        Subject { rule: self.rule.id, task: self.task, key: item.key.clone() }
    }
}

/// What is asked for when a look-up has found a target.
pub fn request_of_found(rule: &Rule, task: Task, row: &RawDocumentBuf) -> Result<Vec<Request>> {
    let id = id_of(row)?;
    Ok(match task {
        Task::Parents => target_requests(rule, &id, &Document::try_from(row.as_ref())?),
        _ => vec![Request { rule: rule.id, task: Task::Target, key: id, scope: Scope::All }],
    })
}

/// Counts that somebody else has written owned fields, and tells it once for all of these targets: a script that has gone
/// through a collection would otherwise fill the log.
pub fn drifted(context: &Context, rule: &Rule, targets: &[Compared]) {
    if targets.is_empty() {
        return;
    }
    let repaired = rule.on_drift == OnDrift::Repair;
    let mut paths = BTreeSet::new();
    for compared in targets {
        context.counts.drift.fetch_add(1, Ordering::Relaxed);
        context.metrics.drifted(&rule.name, repaired);
        paths.extend(compared.differences().map(|difference| difference.path.as_str()));
    }
    let paths: Vec<&str> = paths.into_iter().collect();
    let (targets, paths) = (targets.len(), paths.join(", "));
    tracing::warn!(rule = %rule.name, targets, paths, repaired, "somebody else has written owned fields");
}

/// A document's `_id`.
pub fn id_of(row: &RawDocumentBuf) -> Result<Key> {
    let id = row.get("_id")?.ok_or_else(|| Error::internal("a document without _id"))?;
    Ok(Key::one(Bson::try_from(id)?))
}

/// Many named targets in two parts, which two connections write faster than one.
fn halves(scope: &Scope) -> (Cow<'_, Scope>, Option<Cow<'_, Scope>>) {
    match scope {
        Scope::Named(ids) if ids.len() >= 2 * HALF => {
            let part = |ids: &mut dyn Iterator<Item = &Key>| Cow::Owned(Scope::Named(ids.cloned().collect()));
            let (half, mut ids) = (ids.len() / 2, ids.iter());
            let first = part(&mut ids.by_ref().take(half));
            (first, Some(part(&mut ids)))
        }
        scope => (Cow::Borrowed(scope), None),
    }
}

fn newest(items: &[Item]) -> ClusterTime {
    items.iter().map(|item| item.work.after).max().unwrap_or_default()
}

fn copy(error: &Error) -> Error {
    Error { kind: error.kind, message: error.message.clone(), hint: error.hint.clone(), code: error.code }
}

/// How long to wait before the next attempt: doubling from 50 ms to 10 s. A write whose answer was lost has been waited out
/// before its error got here.
#[must_use]
pub fn backoff(attempts: u32) -> Duration {
    Duration::from_millis(50).saturating_mul(1 << attempts.min(8)).min(Duration::from_secs(10))
}
