//! Compares every target of a rule with its definition, during live writes and in constant memory.
//!
//! A target that differs may be about to be written. So it is first a suspect, and is compared again each time the
//! leader has applied everything committed at the previous comparison. It counts as different if the same paths hold
//! the same wrong values in successive comparisons. A target whose sources keep changing is left undecided.
//!
//! Of a rule that creates its targets, the sources are read as well: each key must have its document.
//!
//! The position is saved whenever there are no suspects, so that an interrupted check can resume from there.

pub mod difference;
mod suspects;

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
    time::Duration,
};

use bson::{Bson, Document, RawDocumentBuf, doc};
use tokio::{task::JoinSet, time::Instant};

use crate::{
    checkpoint::{
        progress::{CheckProgress, Tally},
        store::Store,
    },
    deployment::lease,
    reconcile::{
        Context,
        compare::{Compared, compare_each, compare_ids_each, projection},
        read,
        scan::{self, decoded_in_parts},
    },
};
use denormd_model::{failpoint, key::Key, position::ClusterTime};
use denormd_mongo::{
    Pages,
    command::{decoded, encoded},
    error::{Error, Kind, Result},
};
use denormd_rules::plan::{Rule, reference::Role};
pub use difference::{Differing, Kind as DifferenceKind};
use suspects::{Suspects, Verdict};

/// Number of targets in a page. The next page is read while one is compared.
const PAGE: usize = 500;
/// Number of targets to compare at once.
const AT_ONCE: usize = 200;
/// Number of sources whose documents are looked up at once.
const SOURCES: usize = 2000;
/// Number of suspects at which no further page is compared until they are judged.
const MOST_SUSPECTS: usize = 1000;
/// Maximum time to read before the suspects are judged.
const ROUND: Duration = Duration::from_secs(20);
/// Maximum time to read without suspects before the position is saved.
const SHORT_ROUND: Duration = Duration::from_secs(2);
/// Number of comparisons that must agree while a leader is writing, including the first one.
const LOOKS: u32 = 3;
/// Number of comparisons that must agree without a leader.
const LOOKS_ALONE: u32 = 2;
/// Number of comparisons after which a target that keeps changing is left undecided.
const MAX_COMPARISONS: u32 = 20;
/// Time limit for the leader to apply everything that is committed.
const TIMEOUT: Duration = Duration::from_secs(600);
/// Pause between two reads of the leader's progress.
const PAUSE: Duration = Duration::from_millis(200);

/// The extent of a check.
#[derive(Debug, Clone, Copy, Default)]
pub struct Scope {
    /// Number of targets to draw at random; None for all targets.
    pub sample: Option<u64>,
    /// Resume where the last check of the rule stopped.
    pub resume: bool,
    /// Keep the values that differ, to show them.
    pub values: bool,
}

/// A target that differs from its definition.
#[derive(Debug, Clone, PartialEq)]
pub struct DifferingTarget {
    /// The `_id` of the target.
    pub target: Bson,
    /// The paths that differ, and how.
    pub differing: Vec<Differing>,
    /// True if the difference is known: a dead letter explains why the target cannot be written.
    pub set_aside: bool,
}

/// The check of one rule.
pub struct Check<'a> {
    context: &'a Arc<Context>,
    store: &'a Store,
    rule: &'a Arc<Rule>,
    values: bool,
    /// The counts so far, without targets that are still suspects.
    pub tally: Tally,
    suspects: Suspects,
    reading: Reading<'a>,
    /// The page that was read and is to be compared.
    ahead: Option<Page>,
    /// The position after the last page that was compared.
    position: Position,
    saved: bool,
}

/// Reads targets page by page.
struct Reading<'a> {
    context: &'a Context,
    rule: &'a Rule,
    position: Position,
    sample: Option<Sample>,
}

/// Targets drawn at random, and the number of sources to draw after them.
struct Sample {
    targets: Pages,
    sources: u64,
}

/// A position in the targets, or in the sources that follow them.
#[derive(Debug, Clone, Default)]
struct Position {
    after: Option<Bson>,
    in_sources: bool,
    done: bool,
}

/// Targets that were read after `time`.
struct Page {
    targets: Vec<RawDocumentBuf>,
    /// Number of sources without a usable key, whose documents cannot be determined.
    unusable: u64,
    time: ClusterTime,
    /// The position after them.
    position: Position,
}

impl<'a> Check<'a> {
    /// Prepares a check of `rule`, from the start or from the last saved position.
    pub async fn new(context: &'a Arc<Context>, store: &'a Store, rule: &'a Arc<Rule>, scope: Scope) -> Result<Self> {
        let mut tally = Tally::default();
        let mut position = Position::default();
        let sample = match scope.sample {
            Some(size) => {
                let sources = if rule.creates.is_some() { size } else { 0 };
                Some(Sample { targets: sample(context, rule, size).await?, sources })
            }
            None => None,
        };
        if scope.resume && sample.is_none() {
            // A finished check starts again.
            let before = store.check(&context.server, rule).await?.filter(|before| !before.done);
            if let Some(before) = before {
                (position.after, tally) = (before.after, before.tally);
            }
        }
        tally.resumed = tally.compared > 0;
        Ok(Self {
            context,
            store,
            rule,
            values: scope.values,
            tally,
            suspects: Suspects::default(),
            reading: Reading { context, rule, position: position.clone(), sample },
            ahead: None,
            position,
            saved: true,
        })
    }

    /// Returns the next confirmed differences; None after the last target. The call assumes that earlier results have
    /// been handled, and saves the position after them.
    pub async fn next(&mut self) -> Result<Option<Vec<DifferingTarget>>> {
        let started = Instant::now();
        loop {
            if self.suspects.is_empty() && !self.saved {
                self.save().await?;
            }
            if self.position.done && self.suspects.is_empty() {
                return Ok(None);
            }
            while !self.position.done && self.suspects.len() < MOST_SUSPECTS {
                self.compare_page().await?;
                let round = if self.suspects.is_empty() { SHORT_ROUND } else { ROUND };
                if started.elapsed() > round {
                    break;
                }
            }
            // Judging takes long, and so may a repair: what is written meanwhile would make suspects of the page that was read ahead.
            if !self.suspects.is_empty() && self.reading.sample.is_none() {
                (self.ahead, self.reading.position) = (None, self.position.clone());
            }
            let found = self.judge(&mut Vec::new()).await?;
            self.tally.differing += found.len() as u64;
            if !found.is_empty() || !self.position.done {
                return Ok(Some(found));
            }
        }
    }

    /// Compares these targets again, after a repair, and counts those that are right now. Returns the others: those that
    /// still differ or change all the time, and those whose definition cannot be computed any more.
    pub async fn again(&mut self, ids: &[Bson]) -> Result<Vec<Bson>> {
        let time = self.context.server.operation_time().await?;
        let mut others = Vec::new();
        for ids in ids.chunks(AT_ONCE) {
            let mut take = |compared: Compared| self.suspects.add(&compared);
            others.extend(refused_of(self.context, self.rule, ids, time, &mut take).await?);
        }
        self.tally.refused += others.len() as u64;
        let found = self.judge(&mut others).await?;
        let left: Vec<Bson> = found.into_iter().map(|found| found.target).chain(others).collect();
        self.tally.repaired += ids.len().saturating_sub(left.len()) as u64;
        Ok(left)
    }

    /// Compares the next page, and reads the one after it meanwhile.
    async fn compare_page(&mut self) -> Result<()> {
        let Page { targets, unusable, time, position } = match self.ahead.take() {
            Some(page) => page,
            None => self.reading.next().await?,
        };
        let mut comparisons = JoinSet::new();
        for targets in targets.chunks(AT_ONCE).map(<[_]>::to_vec) {
            // A task of its own: comparing takes as much of this process as of the server.
            let (context, rule) = (self.context.clone(), self.rule.clone());
            comparisons.spawn(async move {
                let (mut refused, mut suspects) = (0, Suspects::default());
                for targets in decoded_in_parts(&targets) {
                    let mut take = |compared: Compared| suspects.add(&compared);
                    refused += compare_each(&context, &rule, &targets?, time, &mut take).await?;
                }
                Ok::<_, Error>((refused, suspects))
            });
        }
        let compared = async {
            let mut refused = 0;
            while let Some(compared) = comparisons.join_next().await {
                let (more, suspects) = compared.map_err(|error| Error::internal(error.to_string()))??;
                self.suspects.join(suspects);
                refused += more;
            }
            Ok(refused)
        };
        let ahead = async { if position.done { Ok(None) } else { self.reading.next().await.map(Some) } };
        let (refused, ahead) = tokio::try_join!(compared, ahead)?;
        // Targets whose expressions fail, and sources without a usable key, have dead letters.
        self.tally.refused += refused + unusable;
        self.tally.compared += targets.len() as u64;
        (self.position, self.ahead, self.saved) = (position, ahead, false);
        Ok(())
    }

    /// Compares the suspects until each is cleared, confirmed or left undecided. The undecided ones, and those whose definition
    /// cannot be computed, go to `others`.
    async fn judge(&mut self, others: &mut Vec<Bson>) -> Result<Vec<DifferingTarget>> {
        let mut found: Vec<Result<(DifferingTarget, Vec<Option<Key>>)>> = Vec::new();
        for look in 0.. {
            if self.suspects.is_empty() || look == MAX_COMPARISONS {
                break;
            }
            let needed = if self.applied_up_to_now().await? { LOOKS } else { LOOKS_ALONE };
            let time = self.context.server.operation_time().await?;
            for ids in self.suspects.ids(AT_ONCE) {
                let mut seen = HashSet::new();
                let mut take = |compared: Compared| {
                    seen.insert(Key::one(compared.target.clone()));
                    if self.suspects.look(&compared, needed) == Verdict::Differs {
                        found.push(found_of(&compared, self.values));
                    }
                };
                let failing = refused_of(self.context, self.rule, &ids, time, &mut take).await?;
                self.tally.refused += failing.len() as u64;
                others.extend(failing);
                self.suspects.forget_all_but(&ids, &seen);
            }
        }
        self.tally.undecided += self.suspects.len() as u64;
        others.extend(self.suspects.ids(AT_ONCE).into_iter().flatten());
        self.suspects.clear();
        let mut found = found.into_iter().collect::<Result<Vec<_>>>()?;
        if !found.is_empty() {
            let about = found.iter().map(|(found, references)| (Key::one(found.target.clone()), references.as_slice()));
            let about: Vec<_> = about.collect();
            let dead_letters = self.context.dead_letters.concerning(&self.context.server, self.rule, &about).await?;
            for (found, references) in &mut found {
                let id = Key::one(found.target.clone());
                found.set_aside = dead_letters.iter().any(|dead_letter| dead_letter.concerns(&id, references));
            }
        }
        Ok(found.into_iter().map(|(found, _)| found).collect())
    }

    /// The databases of this rule, and of those that run as this config defines them: the leader may not follow others.
    async fn followed(&self) -> Result<BTreeSet<String>> {
        let known = self.store.rules(&self.context.server).await?;
        let runs = |rule: &&Arc<Rule>| known.iter().any(|(name, record)| *name == rule.name && record.runs(rule));
        let sides = |rule: &Rule| [&rule.source, &rule.target].map(|side| side.namespace.database.clone());
        let others = self.context.plan.rules.iter().filter(runs).flat_map(|rule| sides(rule));
        Ok(others.chain(sides(self.rule)).collect())
    }

    /// Waits until the leader has applied everything that is committed now. Returns false if there is no leader: then
    /// no writes are pending.
    async fn applied_up_to_now(&self) -> Result<bool> {
        let server = &self.context.server;
        let started = Instant::now();
        let followed = self.followed().await?;
        let now = server.operation_time().await?;
        let mut nudged = false;
        loop {
            if !lease::is_held(server, self.store.database(), self.store.ids()).await? {
                tokio::time::sleep(PAUSE).await;
                return Ok(false);
            }
            let applied = self.store.applied(server, &followed).await?;
            let after = server.operation_time().await?;
            if applied.is_some_and(|applied| applied >= now)
                && !self.store.is_fanning_out(server, Some(&self.rule.name), after).await?
            {
                return Ok(true);
            }
            if started.elapsed() > TIMEOUT {
                let message =
                    format!("the daemon has not applied what was committed {} minutes ago", TIMEOUT.as_secs() / 60);
                return Err(Error::new(Kind::TimedOut, message)
                    .hint("`denormd status` says why; then `denormd check --resume` goes on from here"));
            }
            // Without writes, the position of a stream advances only every ten seconds.
            if !nudged {
                self.store.nudge(server).await?;
                nudged = true;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn save(&mut self) -> Result<()> {
        let Position { after, in_sources, done } = &self.position;
        // Sources are read from the start after an interruption: of most, only the key is looked up.
        if self.reading.sample.is_none() && (*done || !in_sources) {
            let progress = CheckProgress { after: after.clone(), done: *done, tally: self.tally.clone() };
            self.store.save_check(&self.context.server, self.rule, &progress).await?;
            failpoint::here("check-saved");
        }
        self.saved = true;
        Ok(())
    }
}

impl Reading<'_> {
    /// Reads the next page, which may be empty.
    async fn next(&mut self) -> Result<Page> {
        let time = self.context.server.operation_time().await?;
        let (targets, unusable) = match &mut self.sample {
            Some(sample) => match sample.targets.next().await? {
                Some(rows) => (rows, 0),
                None => {
                    self.position.done = true;
                    sample_of_sources(self.context, self.rule, sample.sources, time).await?
                }
            },
            None => self.next_of_all(time).await?,
        };
        Ok(Page { targets, unusable, time, position: self.position.clone() })
    }

    async fn next_of_all(&mut self, time: ClusterTime) -> Result<(Vec<RawDocumentBuf>, u64)> {
        let Position { after, in_sources, done } = &mut self.position;
        if *in_sources {
            let page = self.context.sources_of_documents(self.rule, after.as_ref(), SOURCES, time).await?;
            *done = page.last.is_none();
            *after = page.last;
            return Ok((encoded(&page.absent)?, page.unusable.len() as u64));
        }
        let page = scan::page(self.context, self.rule, &projection(self.rule), after.as_ref(), PAGE, time).await?;
        *done = page.last.is_none() && self.rule.creates.is_none();
        *in_sources = page.last.is_none() && !*done;
        if page.last.is_some() || *in_sources {
            *after = page.last;
        }
        Ok((page.targets, 0))
    }
}

/// Compares these targets, and returns those whose definition cannot be computed.
async fn refused_of(
    context: &Context,
    rule: &Rule,
    ids: &[Bson],
    time: ClusterTime,
    take: &mut (dyn FnMut(Compared) + Send),
) -> Result<Vec<Bson>> {
    if compare_ids_each(context, rule, ids, time, take).await? == 0 {
        return Ok(Vec::new());
    }
    // Only their number is known. They are few, and each is compared alone.
    let mut refused = Vec::new();
    for id in ids {
        if compare_ids_each(context, rule, std::slice::from_ref(id), time, &mut |_| {}).await? > 0 {
            refused.push(id.clone());
        }
    }
    Ok(refused)
}

async fn sample(context: &Context, rule: &Rule, size: u64) -> Result<Pages> {
    let size = i64::try_from(size.max(1)).unwrap_or(i64::MAX);
    let mut stages = Vec::new();
    stages.extend(rule.target.filter.clone().map(|filter| doc! {"$match": filter}));
    stages.extend([doc! {"$sample": {"size": size}}, doc! {"$project": projection(rule)}]);
    let command = doc! {
        "aggregate": &rule.target.namespace.collection, "pipeline": stages,
        "cursor": {"batchSize": i32::try_from(PAGE).unwrap_or(500)}, "allowDiskUse": true,
        "collation": read::simple_collation(),
    };
    context.server.pages(&rule.target.namespace.database, command, ClusterTime::default()).await
}

/// Stand-ins for the documents that some sources should have and do not have, and the number of sources without a usable key.
async fn sample_of_sources(
    context: &Context,
    rule: &Rule,
    size: u64,
    time: ClusterTime,
) -> Result<(Vec<RawDocumentBuf>, u64)> {
    if size == 0 {
        return Ok((Vec::new(), 0));
    }
    let size = i64::try_from(size).unwrap_or(i64::MAX);
    let mut stages: Vec<Document> =
        rule.source.filter.clone().map(|filter| doc! {"$match": filter}).into_iter().collect();
    stages.extend([doc! {"$sample": {"size": size}}, doc! {"$project": rule.reference.projection(Role::Source)}]);
    let command = read::command(&rule.source.namespace.collection, stages);
    let mut pages = context.server.pages(&rule.source.namespace.database, command, ClusterTime::default()).await?;
    let (mut absent, mut unusable) = (Vec::new(), 0);
    while let Some(page) = pages.next().await? {
        let found = context.documents_of(rule, &decoded(&page)?, time).await?;
        absent.extend(encoded(&found.absent)?);
        unusable += found.unusable.len() as u64;
    }
    Ok((absent, unusable))
}

/// The report on a target that differs, and the target's references.
fn found_of(compared: &Compared, values: bool) -> Result<(DifferingTarget, Vec<Option<Key>>)> {
    let differing = compared.differences().map(|difference| Differing::of(difference, values));
    let differing = differing.collect::<Result<Vec<_>>>()?;
    let found = DifferingTarget { target: compared.target.clone(), differing, set_aside: false };
    Ok((found, compared.references.clone()))
}
