//! Status for people and programs: lag, causes, progress, history.
//!
//! The pipeline publishes its state; the board adds what it learns from the server (its clock, its last write, its
//! oplog window), and turns both into figures on request.

mod canary;
mod causes;
mod compose;
mod currency;
mod history;
mod lag;
mod leadership;
mod probe;
mod report;
mod sentence;
mod shared;
mod timeline;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};
use prometheus::GaugeVec;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::logging::TIMELINE;
use canary::Canary;
use causes::ActiveCause;
use currency::Currency;
use denormd_engine::{
    deployment::{identity::Identity, instances::fingerprint, lease::Holder},
    events::{Event, Journal},
    metrics::{Cause, Metrics},
    reconcile::Context,
    snapshot::Snapshot,
};
use denormd_model::{clock::wall_millis, partition::Partition, text::duration};
use denormd_mongo::error::{Error, Kind, Result};
use history::{History, Lines};
pub use lag::BEHIND;
use lag::{Lags, Probes};
pub use leadership::Leadership;
use leadership::{Facts, Reading};
pub use report::{
    Backfill, CauseReport, Current, InstanceReport, Level, Oplog, Partitions, Percentiles, RetiredField, Rule, Status,
};
use shared::Shared;
use timeline::Timeline;

/// Interval between two checks of the board.
const TICK: Duration = Duration::from_secs(1);
/// Gap between two ticks after which all readings may be too old to detect an outage.
const PAUSE: Duration = Duration::from_secs(2);
/// Time between two ticks that is recorded as a pause of this process.
const LONG_PAUSE: Duration = Duration::from_secs(4);
/// Time limit for writing events, after which they are tried again.
const WRITE_EVENTS: Duration = Duration::from_secs(10);
/// Time that a process that ends spends on writing its last events.
const CLOSE: Duration = Duration::from_secs(2);
/// Time without a check after which the event loop counts as blocked.
const LIVE: Duration = Duration::from_secs(30);

/// Rounds between reads of the stored timeline, into which other instances write as well.
const READ_EVENTS: u32 = 10;
/// Events shown, and events buffered while they cannot be written.
const EVENTS: usize = 200;

/// Gathers the figures of one daemon.
#[derive(Debug)]
pub struct Board {
    /// The measured values.
    pub metrics: Arc<Metrics>,
    name: String,
    /// This instance.
    instance: Identity,
    /// Its creation time, in milliseconds since 1970.
    started: i64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The running pipelines, by the place of their partition.
    attached: BTreeMap<u32, Arc<Context>>,
    /// Number of pipelines that were attached so far.
    pipelines: u64,
    /// The last snapshots of the pipelines that have ended, until another instance leads their partition.
    left: BTreeMap<u32, Snapshot>,
    /// Number of partitions.
    partitions: u32,
    times: Times,
    /// The context of this process, once it has reached the cluster, and the time after which a silent instance counts
    /// as gone.
    cluster: Option<(Arc<Context>, Duration)>,
    /// The fingerprint of that context's rules.
    plan: Option<String>,
    /// The leases as they were last read.
    read: Option<Reading>,
    /// The leadership at the last check, against which changes are found.
    told: Leadership,
    /// Data that the instances share.
    shared: Shared,
    probes: Probes,
    /// The error of the last request to the server; None if it was answered.
    unanswered: Option<(Kind, String)>,
    /// The lag of the majority behind the primary's last write.
    majority_lag: Duration,
    /// Retired fields, which earlier rules have left behind.
    retired: Vec<RetiredField>,
    oplog: Oplog,
    /// The difference between the members' clocks, in seconds.
    clock_skew: Option<f64>,
    /// Dead letters by rule and reason. None while it is not known whether there are any.
    dead_letters: Option<BTreeMap<String, BTreeMap<String, u64>>>,
    history: History,
    behind_since: BTreeMap<String, i64>,
    since: BTreeMap<Cause, i64>,
    /// The rules that each cause names in the metrics.
    named: BTreeSet<(Cause, String)>,
    /// The time up to which the copies are current, while this process leads.
    currency: Currency,
    /// Present while this process leads.
    canary: Option<Canary>,
    timeline: Timeline,
    journal: Option<Arc<Journal>>,
    /// Events that are not stored yet, oldest first.
    unwritten: VecDeque<Event>,
    /// The last stored events of all instances, oldest first.
    written: Vec<Event>,
    /// The end of the last pause of this process.
    resumed: Option<Instant>,
    insecure: Vec<&'static str>,
}

/// Times that begin with the board.
#[derive(Debug)]
struct Times {
    /// Creation time of the board.
    began: Instant,
    /// Time of the last successful read of the oplog window, or of the beginning of this leadership.
    oplog_read: Instant,
    /// Time of the last look at the snapshots.
    ticked: Instant,
}

impl Default for Times {
    fn default() -> Self {
        let now = Instant::now();
        Self { began: now, oplog_read: now, ticked: now }
    }
}

impl State {
    /// Changes with each write of a target, and with each pipeline that starts or ends.
    fn written(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for (place, context) in &self.attached {
            let pipeline = Arc::as_ptr(context) as usize;
            (place, pipeline, context.counts.effects()).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// True if this process leads all partitions, and runs them with the same rules. During a reload it does not.
    fn is_whole(&self) -> bool {
        fn definitions(context: &Context) -> impl Iterator<Item = &bson::Document> {
            context.plan.rules.iter().map(|rule| &rule.definition)
        }
        let mut all = self.attached.values();
        let Some(first) = all.next() else { return false };
        self.runs()
            && usize::try_from(self.partitions).is_ok_and(|partitions| partitions == self.attached.len())
            && all.all(|other| definitions(other).eq(definitions(first)))
    }

    /// The rules of the newest config that do not run yet as it defines them, and those that read their copies. While a
    /// config is put into force, the pipelines of the former one still run.
    fn starting(&self) -> BTreeSet<String> {
        let Some((context, _)) = &self.cluster else { return BTreeSet::new() };
        let rules = context.plan.rules.iter();
        let starting = rules.filter(|rule| !self.attached.values().all(|one| one.plan.runs(rule)));
        context.plan.with_fed(starting.map(|rule| rule.name.clone()).collect())
    }

    fn runs(&self) -> bool {
        !self.attached.values().any(|context| context.published.borrow().ended)
    }

    /// Time since the last turn of the slowest pipeline's loop; zero without one that runs. After a pipeline has ended, the next
    /// one may take a while to start, because it queries the server first.
    fn since_turn(&self) -> Duration {
        let snapshots = self.attached.values().map(|context| context.published.borrow());
        snapshots.filter(|snapshot| !snapshot.ended).map(|snapshot| snapshot.at.elapsed()).max().unwrap_or_default()
    }

    /// The snapshots of all partitions, merged. None before a pipeline has started, or while other instances lead.
    fn snapshot(&self) -> Option<Snapshot> {
        let running = self.attached.values().map(|context| context.published.borrow().clone());
        running.chain(self.left.values().cloned()).reduce(Snapshot::joined)
    }
}

/// True if another instance leads the partition at this place, by the leases that are held; or if the deployment now has another
/// number of partitions: then the old ones have no leader, and this instance leads none of the new ones.
fn is_led_by_others(
    deployment: &str,
    partitions: u32,
    place: u32,
    held: &BTreeMap<String, Holder>,
    instance: &str,
) -> bool {
    let mut all = Partition::all(partitions);
    let lease = all.find(|partition| partition.place() == place).and_then(|of| held.get(&of.id(deployment)));
    let is_known = |id: &String| Partition::all(partitions).any(|partition| partition.id(deployment) == *id);
    lease.is_some_and(|holder| holder.id != instance) || !held.keys().all(is_known)
}

/// The names of a cause in the metrics.
fn names(cause: Cause) -> impl Iterator<Item = &'static str> {
    std::iter::once(cause.name()).chain(cause.former_name())
}

/// Does the work of each round, a [`TICK`] after that of the one before.
async fn rounds<F: Future<Output = ()>>(work: impl Fn(u64) -> F) {
    for round in 0.. {
        work(round).await;
        tokio::time::sleep(TICK).await;
    }
}

/// Logs an event. The engine logs backfills by itself.
fn log(event: &Event) {
    let Event { what, text, rules, .. } = event;
    let rules = rules.len();
    if Cause::ALL.iter().any(|cause| cause.is_severe() && cause.name() == what) {
        tracing::error!(target: TIMELINE, event = %what, rules, "{text}");
    } else if !what.starts_with("backfill_") {
        tracing::info!(target: TIMELINE, event = %what, rules, "{text}");
    }
}

/// The inputs of one status.
struct View {
    leadership: Leadership,
    snapshot: Option<Snapshot>,
    lags: Lags,
    causes: Vec<ActiveCause>,
}

impl Board {
    /// The board of this instance, without a pipeline yet.
    #[must_use]
    pub fn new(name: &str, instance: &Identity, metrics: Arc<Metrics>) -> Arc<Self> {
        metrics.build.with_label_values(&[env!("CARGO_PKG_VERSION"), env!("DENORMD_COMMIT")]).set(1);
        let state = State { partitions: 1, ..State::default() };
        Arc::new(Self {
            metrics,
            name: name.to_owned(),
            instance: instance.clone(),
            started: wall_millis(),
            state: Mutex::new(state),
        })
    }

    /// Records the options that disable the verification of certificates; normally none.
    pub fn insecure(&self, options: Vec<&'static str>) {
        self.metrics.tls_unverified.set(i64::from(!options.is_empty()));
        self.state().insecure = options;
    }

    /// Records the number of partitions of the deployment.
    pub fn divided(&self, partitions: u32) {
        self.state().partitions = partitions;
        self.metrics.divided(partitions);
    }

    /// Records that the cluster cannot be reached, so that nothing has started yet.
    pub fn unreached(&self, error: &Error) {
        self.metrics.record_error(None, "connect", error);
        self.state().unanswered = Some((error.kind, error.message.clone()));
    }

    /// Records the context that this process uses outside of any pipeline: the cluster is reached, or the config was
    /// read again.
    pub fn reached(&self, context: Arc<Context>, ttl: Duration) {
        let mut state = self.state();
        state.plan = Some(fingerprint(&context.plan, state.partitions));
        state.cluster = Some((context, ttl));
    }

    /// Records that the pipeline of a partition runs: this process leads it.
    pub fn attach(&self, context: Arc<Context>) {
        let mut state = self.state();
        let place = context.partition.place();
        let before = state.left.remove(&place).or_else(|| Some(state.attached.get(&place)?.published.borrow().clone()));
        if let Some(before) = before {
            context.published.note(|snapshot| snapshot.inherit(&before));
        }
        let leader = Leadership::Leader { term: context.server.term() };
        // After a reload the same leader goes on.
        if state.attached.is_empty() && state.told != leader {
            state.dead_letters = None;
            self.metrics.dead_letters_unknown();
        }
        state.told = leader;
        state.currency = Currency::default();
        state.attached.insert(place, context);
        state.pipelines += 1;
        // With several partitions, the first one sends the canary, which arrives when all partitions have applied it.
        if state.attached.len() == 1 || state.canary.is_none() {
            state.times.oplog_read = Instant::now();
            state.canary = Some(Canary::new(self.metrics.now()));
        }
    }

    /// Records that the pipeline of a partition has stopped. Its figures stay until a lease names another instance: in
    /// the meantime there may be no leader.
    pub fn detach(&self, partition: Partition) {
        let mut state = self.state();
        if let Some(context) = state.attached.remove(&partition.place()) {
            state.left.insert(partition.place(), context.published.borrow().clone());
        }
        state.currency = Currency::default();
    }

    /// Records the leases that were read.
    fn take_leases(&self, held: BTreeMap<String, Holder>) {
        let mut state = self.state();
        let partitions = state.partitions;
        state.left.retain(|place, _| !is_led_by_others(&self.name, partitions, *place, &held, &self.instance.id));
        if state.attached.is_empty() && state.left.is_empty() {
            state.canary = None;
            state.timeline.forget();
        }
        state.read = Some(Reading { at: Instant::now(), held });
    }

    /// One of the running pipelines, if there is one.
    #[must_use]
    pub fn attached(&self) -> Option<Arc<Context>> {
        self.state().attached.values().next().cloned()
    }

    /// The running pipelines, one for each partition that this process leads.
    #[must_use]
    pub fn all_attached(&self) -> Vec<Arc<Context>> {
        self.state().attached.values().cloned().collect()
    }

    /// The rules of the newest config that do not run yet as it defines them.
    pub(crate) fn starting(&self) -> BTreeSet<String> {
        self.state().starting()
    }

    /// The context that this process uses outside of any pipeline, once it has reached the cluster.
    #[must_use]
    pub fn context(&self) -> Option<Arc<Context>> {
        self.state().cluster.as_ref().map(|(context, _)| context.clone())
    }

    /// Number of partitions of the deployment.
    #[must_use]
    pub fn partitions(&self) -> u32 {
        self.state().partitions
    }

    /// The current role of this instance in its deployment.
    #[must_use]
    pub fn leadership(&self) -> Leadership {
        self.view(&self.state(), self.metrics.now()).leadership
    }

    /// Stores the timeline in this journal from now on.
    pub fn keep(&self, journal: Journal) {
        self.state().journal = Some(Arc::new(journal));
    }

    /// Adds an event to the timeline. It may name rules and reasons, never a document's id or value.
    pub fn happened(&self, what: &str, text: &str) {
        self.tell(&mut self.state(), vec![Event::new(self.metrics.now(), what, Vec::new(), text.to_owned())]);
    }

    /// The last events after `since` (milliseconds since 1970), oldest first.
    #[must_use]
    pub fn events(&self, since: i64) -> Vec<Event> {
        let state = self.state();
        let mut events: Vec<Event> = state.written.iter().filter(|event| event.time > since).cloned().collect();
        let new = state.unwritten.iter().filter(|event| event.time > since && !events.iter().any(|e| e.id == event.id));
        events.extend(new.cloned().collect::<Vec<_>>());
        events.sort_by(|a, b| (a.time, &a.id).cmp(&(b.time, &b.id)));
        events
    }

    fn tell(&self, state: &mut State, events: Vec<Event>) {
        for event in events {
            self.metrics.happened(&event.what, event.time);
            log(&event);
            state.unwritten.push_back(Event { instance: self.instance.to_string(), ..event });
        }
        while state.unwritten.len() > EVENTS {
            state.unwritten.pop_front();
        }
    }

    /// Writes the events that are not stored yet, and reads the stored ones. After a failure, the next round tries
    /// again.
    async fn write_events(&self, read: bool) -> Result<()> {
        let (journal, events) = {
            let state = self.state();
            let events: Vec<Event> = state.unwritten.iter().cloned().collect();
            (state.journal.clone(), events)
        };
        let Some(journal) = journal else { return Ok(()) };
        if !events.is_empty() {
            journal.open().await?;
            journal.write(&events).await?;
        }
        if read || !events.is_empty() {
            let written = journal.read(0, i64::try_from(EVENTS).unwrap_or(i64::MAX)).await?;
            let mut state = self.state();
            state.unwritten.retain(|event| !events.iter().any(|done| done.id == event.id));
            state.written = written;
        }
        Ok(())
    }

    /// Writes the remaining events when the process ends.
    pub async fn close(&self) {
        match tokio::time::timeout(CLOSE, self.write_events(false)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(error = %error.message, "the last events could not be kept"),
            Err(_) => tracing::warn!("the last events could not be kept in time"),
        }
    }

    /// Checks the server and this process until `stop`.
    pub async fn watch(self: Arc<Self>, stop: CancellationToken) {
        let journaling = async {
            let mut round = 0_u32;
            loop {
                let read = round.is_multiple_of(READ_EVENTS);
                let failed = match tokio::time::timeout(WRITE_EVENTS, self.write_events(read)).await {
                    Ok(result) => result.is_err(),
                    Err(_) => true,
                };
                // Events that could not be written are written when the server is back.
                round = if failed { 0 } else { round + 1 };
                tokio::time::sleep(TICK).await;
            }
        };
        let ticking = async {
            let mut tick = tokio::time::interval(TICK);
            loop {
                tick.tick().await;
                self.tick();
            }
        };
        tokio::select! {
            () = rounds(|_| self.ask()) => {}
            () = rounds(|round| self.share(round)) => {}
            () = rounds(|round| self.probe(round)) => {}
            () = ticking => {}
            () = journaling => {}
            () = stop.cancelled() => {}
        }
    }

    /// True if the event loop and the running pipelines make progress. Does not depend on the server.
    #[must_use]
    pub fn is_live(&self) -> bool {
        let state = self.state();
        state.times.ticked.elapsed() < LIVE && state.since_turn() < LIVE
    }

    /// True if every pipeline of this process runs.
    #[must_use]
    pub fn runs(&self) -> bool {
        self.state().runs()
    }

    /// The Prometheus exposition text as of now.
    pub fn expose(&self) -> Result<Vec<u8>> {
        let now = self.metrics.now();
        let mut state = self.state();
        let view = self.view(&state, now);
        self.publish(&mut state, &view, now);
        drop(state);
        self.metrics.expose()
    }

    /// The history since a time in milliseconds since 1970.
    #[must_use]
    pub fn history(&self, since: i64) -> Lines {
        self.state().history.lines(since)
    }

    /// The status as of now.
    #[must_use]
    pub fn status(&self) -> Status {
        let now = self.metrics.now();
        let mut state = self.state();
        let view = self.view(&state, now);
        self.publish(&mut state, &view, now);
        compose::status(self, &state, &view, now)
    }

    fn tick(&self) {
        let now = self.metrics.now();
        let mut state = self.state();
        let pause = state.times.ticked.elapsed();
        state.times.ticked = Instant::now();
        let mut events: Vec<Event> = Vec::new();
        if pause >= PAUSE {
            state.resumed = Some(state.times.ticked);
        }
        if pause >= LONG_PAUSE {
            let lasted = pause.as_secs_f64();
            let text = format!("this process did not run for {}: it was stopped, or got no CPU time", duration(lasted));
            events.push(Event::new(now - lag::millis(lasted), "did_not_run", Vec::new(), text));
        }
        let view = self.view(&state, now);
        self.publish(&mut state, &view, now);
        state.history.sample(&self.metrics, &view.lags, now);
        // Measured back from now, a step of the clock does not change how long ago it was.
        let resumed = state.resumed.map_or(0, |resumed| now - lag::millis(resumed.elapsed().as_secs_f64()));
        if !(timeline::is_stale(now, resumed) && matches!(view.leadership, Leadership::Unknown { .. })) {
            events.extend(view.leadership.news(&state.told, now));
            state.told = view.leadership;
        }
        events.extend(state.timeline.causes(now, &view.causes, resumed));
        if let Some(snapshot) = &view.snapshot {
            let in_shadow = |name: &str| snapshot.rules.iter().any(|rule| rule.shadow && rule.name == name);
            events.extend(state.timeline.backfills(now, &snapshot.backfills, in_shadow));
        }
        self.tell(&mut state, events);
    }

    fn view(&self, state: &State, now: i64) -> View {
        let running = state.attached.values().map(|context| &context.server);
        let facts = Facts {
            instance: &self.instance,
            running: running.map(|server| (server.term(), server.since_renewal())).collect(),
            read: state.read.as_ref(),
        };
        let leadership = Leadership::of(&facts, now);
        let snapshot = state.snapshot();
        let lags = match &snapshot {
            Some(snapshot) => Lags::of(snapshot, &state.probes, now),
            None => state.shared.lags(now),
        };
        let causes = causes::find(&self.metrics, state, &leadership, (snapshot.as_ref(), &lags), now);
        View { leadership, snapshot, lags, causes }
    }

    fn publish(&self, state: &mut State, view: &View, now: i64) {
        match (&view.snapshot, &view.leadership) {
            (Some(snapshot), _) => self.metrics.show(snapshot),
            (None, Leadership::Standby { .. }) => {
                state.dead_letters = None;
                self.metrics.reset_leader_gauges();
            }
            (None, _) => {}
        }
        self.publish_lags(state, view, now);
        let metrics = &self.metrics;
        metrics.leader.set(i64::from(view.leadership.leads()));
        for name in Leadership::NAMES {
            metrics.role.with_label_values(&[name]).set(i64::from(name == view.leadership.name()));
        }
        for place in 0..state.partitions {
            let leads = view.leadership.leads() && state.attached.contains_key(&place);
            metrics.partition_leader.with_label_values(&[&place.to_string()]).set(i64::from(leads));
        }
        if let (Some(canary), Some(snapshot)) = (&mut state.canary, &view.snapshot) {
            canary.applied(snapshot.applied());
            metrics.canary_age.with_label_values::<&str>(&[]).set(lag::seconds(canary.age(now)));
        } else {
            metrics.canary_age.reset();
        }
        self.publish_causes(state, view, now);
    }

    fn publish_causes(&self, state: &mut State, view: &View, now: i64) {
        let causes = &self.metrics.causes;
        let mut named = BTreeSet::new();
        for cause in Cause::ALL {
            let found = view.causes.iter().find(|found| found.cause == cause);
            let rules = found.map(|found| found.rules.as_slice()).unwrap_or_default();
            for name in names(cause) {
                causes.with_label_values(&[name, ""]).set(i64::from(found.is_some() && rules.is_empty()));
                for rule in rules {
                    causes.with_label_values(&[name, rule]).set(1);
                }
            }
            named.extend(rules.iter().map(|rule| (cause, rule.clone())));
            if let Some(found) = found {
                state.since.entry(cause).or_insert(found.since.unwrap_or(now));
            } else {
                state.since.remove(&cause);
            }
        }
        for (cause, rule) in state.named.difference(&named) {
            // They exist, because they were set before.
            names(*cause).for_each(|name| drop(causes.remove_label_values(&[name, rule])));
        }
        state.named = named;
    }

    fn publish_lags(&self, state: &mut State, view: &View, now: i64) {
        let metrics = &self.metrics;
        // A standby only passes on the leader's own figures.
        let own = !matches!(view.leadership, Leadership::Standby { .. });
        // Streams and checkpoints advance also while no rule has a lag.
        if own && (view.snapshot.is_some() || view.lags.overall.is_some()) {
            metrics.checkpoint_age.with_label_values::<&str>(&[]).set(view.lags.checkpoint);
            metrics.stream_age.with_label_values::<&str>(&[]).set(view.lags.stream_age);
        }
        let Some(overall) = view.lags.overall.filter(|_| own) else {
            [&metrics.lag, &metrics.rule_lag, &metrics.rule_chain_lag].into_iter().for_each(GaugeVec::reset);
            state.behind_since.clear();
            return;
        };
        metrics.lag.with_label_values::<&str>(&[]).set(overall);
        for rule in &view.lags.rules {
            let own = rule.is_known.then_some(rule.own);
            for (gauge, lag) in [(&metrics.rule_lag, own), (&metrics.rule_chain_lag, rule.chain)] {
                match lag {
                    Some(lag) => gauge.with_label_values(&[&rule.name]).set(lag),
                    // It may not exist.
                    None => drop(gauge.remove_label_values(&[&rule.name])),
                }
            }
            if rule.is_behind() {
                state.behind_since.entry(rule.name.clone()).or_insert(now - lag::millis(rule.own));
            } else {
                state.behind_since.remove(&rule.name);
            }
        }
        state.behind_since.retain(|name, _| view.lags.rules.iter().any(|rule| rule.name == *name));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After a change of the number of partitions, an instance with the old number reported the figures of its last leadership for as
    /// long as it ran, with a lag and the age of a canary that grew.
    #[test]
    fn figures_of_a_removed_partition_are_not_kept() {
        let holder = |id: &str| Holder { instance: id.to_owned(), id: id.to_owned(), term: 1, since: 0, until: 0 };
        let gone = |partitions: u32, place: u32, held: &[(&str, &str)]| {
            let held = held.iter().map(|(id, instance)| ((*id).to_owned(), holder(instance))).collect();
            is_led_by_others("d", partitions, place, &held, "me")
        };
        assert!(!gone(1, 0, &[]), "nobody leads");
        assert!(!gone(1, 0, &[("d", "me")]));
        assert!(gone(1, 0, &[("d", "other")]));
        assert!(!gone(2, 1, &[("d#0/2", "other")]), "nobody leads this one");
        assert!(gone(2, 1, &[("d#1/2", "other")]));
        assert!(gone(2, 1, &[("d#0/4", "other")]), "there are four now");
        assert!(gone(1, 0, &[("d#0/4", "other")]));
        assert!(gone(4, 3, &[("d", "other")]), "it is not divided any more");
    }
}
