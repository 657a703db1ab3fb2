//! What is said to people and programs about how true the copies are: lag, causes, progress, history.
//!
//! The pipeline publishes what it knows; the board adds what the server says (its clock, its last write, how far its oplog
//! reaches back), and turns both into figures whenever somebody asks.

mod canary;
mod causes;
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
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use prometheus::GaugeVec;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    error::{Error, Kind, Result},
    events::{Event, Journal, instance},
    lease::Holder,
    metrics::{Cause, Metrics},
    partition::Partition,
    pipeline::Progress,
    reconcile::Context,
};
use canary::Canary;
use causes::Found;
use currency::Currency;
use history::History;
pub use lag::BEHIND;
use lag::{Lags, Probes};
pub use leadership::Leadership;
use leadership::{Facts, Reading};
pub use report::{
    Backfill, CauseReport, Current, InstanceReport, Level, Oplog, Partitions, Percentiles, RetiredField, Rule, Status,
    duration,
};
use shared::Shared;
use timeline::Timeline;

/// How often the board looks.
const TICK: Duration = Duration::from_secs(1);
/// How long writing events may take before it is tried again.
const WRITE_EVENTS: Duration = Duration::from_secs(10);
/// How long a process that ends waits for its last events to be kept.
const CLOSE: Duration = Duration::from_secs(2);
/// A board that has not looked for so long is on an event loop that does not turn.
const LIVE: Duration = Duration::from_secs(30);

/// How often the kept timeline is read: other instances write into it too.
const READ_EVENTS: u32 = 10;
/// Events shown, and events kept while they cannot be written.
const EVENTS: usize = 200;

/// Gathers the figures of one daemon.
#[derive(Debug)]
pub struct Board {
    /// What is measured.
    pub metrics: Arc<Metrics>,
    name: String,
    instance: String,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// By the partition's place.
    attached: BTreeMap<u32, Attached>,
    /// How many partitions there are.
    partitions: u32,
    /// When this board was made.
    began: Instant,
    /// What this process works with, once it has reached the cluster, and how long an instance that is not heard of is there.
    cluster: Option<(Arc<Context>, Duration)>,
    /// The leases, as read last.
    read: Option<Reading>,
    /// What was told last of who leads.
    told: Leadership,
    /// What the instances tell each other.
    shared: Shared,
    probes: Probes,
    /// Why the last question to the server was not answered.
    unanswered: Option<(Kind, String)>,
    /// Fields that earlier rules have left behind.
    retired: Vec<RetiredField>,
    oplog: Oplog,
    /// By how much the clocks of the members differ, in seconds.
    clock_skew: Option<f64>,
    /// Dead letters by rule and reason.
    letters: BTreeMap<String, BTreeMap<String, u64>>,
    history: History,
    behind_since: BTreeMap<String, i64>,
    since: BTreeMap<Cause, i64>,
    /// The rules that each cause names in the metrics.
    named: BTreeSet<(Cause, String)>,
    /// Up to when the copies are current, while this process leads, and which rules that is not said of.
    currency: Currency,
    except: BTreeSet<String>,
    /// While this process leads.
    canary: Option<Canary>,
    timeline: Timeline,
    journal: Option<Arc<Journal>>,
    /// Events that are not kept yet, oldest first.
    unwritten: VecDeque<Event>,
    /// The last events that are kept, of all instances, oldest first.
    written: Vec<Event>,
    ticked: Instant,
    /// The last time at which every pipeline ran.
    ran: Instant,
    insecure: Vec<&'static str>,
}

/// The pipeline that runs.
#[derive(Debug, Clone)]
pub struct Attached {
    /// What it works with.
    pub context: Arc<Context>,
    /// How far it is.
    pub progress: watch::Receiver<Progress>,
}

impl State {
    fn runs(&self) -> bool {
        self.attached.values().all(|attached| attached.progress.has_changed().is_ok())
    }
}

/// Everything that one status is made of.
struct View {
    leadership: Leadership,
    lags: Lags,
    causes: Vec<Found>,
}

impl Board {
    /// A board of a deployment, without a pipeline yet.
    #[must_use]
    pub fn new(name: &str, metrics: Arc<Metrics>) -> Arc<Self> {
        let state = State {
            attached: BTreeMap::new(),
            partitions: 1,
            began: Instant::now(),
            cluster: None,
            read: None,
            told: Leadership::Starting,
            shared: Shared::default(),
            probes: Probes::default(),
            unanswered: None,
            retired: Vec::new(),
            oplog: Oplog::default(),
            clock_skew: None,
            letters: BTreeMap::new(),
            history: History::default(),
            behind_since: BTreeMap::new(),
            since: BTreeMap::new(),
            named: BTreeSet::new(),
            currency: Currency::default(),
            except: BTreeSet::new(),
            canary: None,
            timeline: Timeline::default(),
            journal: None,
            unwritten: VecDeque::new(),
            written: Vec::new(),
            ticked: Instant::now(),
            ran: Instant::now(),
            insecure: Vec::new(),
        };
        Arc::new(Self { metrics, name: name.to_owned(), instance: instance(), state: Mutex::new(state) })
    }

    /// Options that switch the verification of certificates off; none is as it should be.
    pub fn insecure(&self, options: Vec<&'static str>) {
        self.metrics.tls_unverified.set(i64::from(!options.is_empty()));
        self.state().insecure = options;
    }

    /// The deployment is divided into so many partitions.
    pub fn divided(&self, partitions: u32) {
        self.state().partitions = partitions;
        self.metrics.divided(partitions);
    }

    /// The cluster cannot be reached, so that nothing has started yet.
    pub fn unreached(&self, error: &Error) {
        self.metrics.trouble(None, "connect", error);
        self.state().unanswered = Some((error.kind, error.message.clone()));
    }

    /// The cluster is reached, or the config was read again: what this process works with, beside any pipeline.
    pub fn reached(&self, context: Arc<Context>, ttl: Duration) {
        self.state().cluster = Some((context, ttl));
    }

    /// The pipeline of a partition runs: this process leads it.
    pub fn attach(&self, context: Arc<Context>, progress: watch::Receiver<Progress>) {
        let mut state = self.state();
        self.metrics.turn(context.partition.place());
        state.told = Leadership::Leader { term: context.server.term() };
        state.currency = Currency::default();
        state.attached.insert(context.partition.place(), Attached { context, progress });
        // Of several partitions the first one sends it, and it comes through when all have applied it.
        if state.attached.len() == 1 || state.canary.is_none() {
            state.canary = Some(Canary::new(self.metrics.now()));
        }
    }

    /// The pipeline of a partition runs no more. What it said stays until a lease is read that names another instance: nobody
    /// may lead meanwhile.
    pub fn detach_partition(&self, partition: Partition) {
        self.state().attached.remove(&partition.place());
        self.metrics.stopped(partition.place());
    }

    /// No pipeline runs any more.
    pub fn detach(&self) {
        let attached = std::mem::take(&mut self.state().attached);
        for place in attached.into_keys() {
            self.metrics.stopped(place);
        }
    }

    /// The leases were read.
    fn take_leases(&self, held: BTreeMap<String, Holder>) {
        let mut state = self.state();
        let by_others = |place: &u32| {
            let mut all = Partition::all(state.partitions);
            let lease = all.find(|partition| partition.place() == *place).and_then(|of| held.get(&of.id(&self.name)));
            !state.attached.contains_key(place) && lease.is_some_and(|holder| holder.instance != self.instance)
        };
        for place in self.metrics.observed().iter().filter(|place| by_others(place)) {
            self.metrics.forget_observation(*place);
        }
        if self.metrics.observation().is_none() {
            state.canary = None;
            state.timeline.forget();
        }
        state.read = Some(Reading { at: Instant::now(), held });
    }

    /// One of the pipelines that run, if one does.
    #[must_use]
    pub fn attached(&self) -> Option<Attached> {
        self.state().attached.values().next().cloned()
    }

    /// The pipelines that run, one for each partition that this process leads.
    #[must_use]
    pub fn all_attached(&self) -> Vec<Attached> {
        self.state().attached.values().cloned().collect()
    }

    /// What this process works with beside any pipeline, once it has reached the cluster.
    #[must_use]
    pub fn context(&self) -> Option<Arc<Context>> {
        self.state().cluster.as_ref().map(|(context, _)| context.clone())
    }

    /// How many partitions the deployment is divided into.
    #[must_use]
    pub fn partitions(&self) -> u32 {
        self.state().partitions
    }

    /// What this instance is to its deployment now.
    #[must_use]
    pub fn leadership(&self) -> Leadership {
        self.view(&self.state(), self.metrics.now()).leadership
    }

    /// Where the timeline is kept, from now on.
    pub fn keep(&self, journal: Journal) {
        self.state().journal = Some(Arc::new(journal));
    }

    /// Something for the timeline. It names rules and reasons, never a document's id or value.
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
            tracing::info!(event = %event.what, rules = event.rules.len(), "{}", event.text);
            state.unwritten.push_back(Event { instance: self.instance.clone(), ..event });
        }
        while state.unwritten.len() > EVENTS {
            state.unwritten.pop_front();
        }
    }

    /// Writes what is not kept yet, and reads what is. A server that does not answer is asked again.
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

    /// Writes what is left, for a process that ends.
    pub async fn close(&self) {
        match tokio::time::timeout(CLOSE, self.write_events(false)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(error = %error.message, "the last events could not be kept"),
            Err(_) => tracing::warn!("the last events could not be kept in time"),
        }
    }

    /// Looks at the server and at itself until `stop`.
    pub async fn watch(self: Arc<Self>, stop: CancellationToken) {
        let asking = async {
            loop {
                self.ask().await;
                tokio::time::sleep(TICK).await;
            }
        };
        let sharing = async {
            let mut round = 0_u64;
            loop {
                self.share(round).await;
                round += 1;
                tokio::time::sleep(TICK).await;
            }
        };
        let probing = async {
            let mut round = 0_u64;
            loop {
                self.probe(round).await;
                round += 1;
                tokio::time::sleep(TICK).await;
            }
        };
        let journaling = async {
            let mut round = 0_u32;
            loop {
                let read = round.is_multiple_of(READ_EVENTS);
                let failed = match tokio::time::timeout(WRITE_EVENTS, self.write_events(read)).await {
                    Ok(result) => result.is_err(),
                    Err(_) => true,
                };
                // What could not be written is written when the server is back.
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
            () = asking => {}
            () = sharing => {}
            () = probing => {}
            () = ticking => {}
            () = journaling => {}
            () = stop.cancelled() => {}
        }
    }

    /// Whether the event loop turns and the pipelines with it. Does not depend on the server. A pipeline that ends, for a new
    /// config or a new leader, has time to do so.
    #[must_use]
    pub fn is_live(&self) -> bool {
        let state = self.state();
        let lives = |since: Instant| since.elapsed() < LIVE;
        lives(state.ticked) && lives(state.ran) && (state.attached.is_empty() || self.metrics.since_turn() < LIVE)
    }

    /// Whether every pipeline of this process runs.
    #[must_use]
    pub fn runs(&self) -> bool {
        self.state().runs()
    }

    /// Computes the gauges anew.
    pub fn refresh(&self) {
        let now = self.metrics.now();
        let mut state = self.state();
        let view = self.view(&state, now);
        self.publish(&mut state, &view, now);
    }

    /// The exposition text, as of now.
    pub fn expose(&self) -> Result<Vec<u8>> {
        self.refresh();
        self.metrics.expose()
    }

    /// The history since a time in milliseconds since 1970, as JSON.
    #[must_use]
    pub fn history(&self, since: i64) -> serde_json::Value {
        self.state().history.json(since)
    }

    /// The status as of now.
    #[must_use]
    pub fn status(&self) -> Status {
        let now = self.metrics.now();
        let mut state = self.state();
        let view = self.view(&state, now);
        self.publish(&mut state, &view, now);
        report::status(self, &state, &view, now)
    }

    fn tick(&self) {
        let now = self.metrics.now();
        let mut state = self.state();
        state.ticked = Instant::now();
        if state.runs() {
            state.ran = state.ticked;
        }
        let view = self.view(&state, now);
        self.publish(&mut state, &view, now);
        state.history.sample(&self.metrics, &view.lags, now);
        let mut events: Vec<Event> = view.leadership.news(&state.told, now).into_iter().collect();
        state.told = view.leadership;
        events.extend(state.timeline.causes(now, &view.causes));
        events.extend(state.timeline.backfills(now, &self.metrics.backfills()));
        self.tell(&mut state, events);
    }

    fn view(&self, state: &State, now: i64) -> View {
        let running = state.attached.values().map(|attached| &attached.context.server);
        let facts = Facts {
            instance: &self.instance,
            running: running.map(|server| (server.term(), server.since_renewal())).collect(),
            read: state.read.as_ref(),
        };
        let leadership = Leadership::of(&facts, now);
        let lags = match self.metrics.observation() {
            Some(seen) => Lags::of(&seen, &state.probes, now),
            None => state.shared.lags(now),
        };
        let causes = causes::find(&self.metrics, state, &leadership, &lags, now);
        View { leadership, lags, causes }
    }

    fn publish(&self, state: &mut State, view: &View, now: i64) {
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
        if let (Some(canary), Some(seen)) = (&mut state.canary, metrics.observation()) {
            if let Some(applied) = seen.streams.iter().map(|stream| stream.applied).min() {
                canary.applied(applied);
            }
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
            causes.with_label_values(&[cause.name(), ""]).set(i64::from(found.is_some() && rules.is_empty()));
            for rule in rules {
                causes.with_label_values(&[cause.name(), rule]).set(1);
                named.insert((cause, rule.clone()));
            }
            if let Some(found) = found {
                state.since.entry(cause).or_insert(found.since.unwrap_or(now));
            } else {
                state.since.remove(&cause);
            }
        }
        for (cause, rule) in state.named.difference(&named) {
            // It is there: this is what was set before.
            causes.remove_label_values(&[cause.name(), rule]).ok();
        }
        state.named = named;
    }

    fn publish_lags(&self, state: &mut State, view: &View, now: i64) {
        let metrics = &self.metrics;
        // A standby only passes on what the leader says of itself.
        let own = !matches!(view.leadership, Leadership::Standby { .. });
        let Some(overall) = view.lags.overall.filter(|_| own) else {
            [&metrics.lag, &metrics.rule_lag, &metrics.rule_chain_lag].into_iter().for_each(GaugeVec::reset);
            state.behind_since.clear();
            return;
        };
        metrics.lag.with_label_values::<&str>(&[]).set(overall);
        for rule in &view.lags.rules {
            metrics.rule_chain_lag.with_label_values(&[&rule.name]).set(rule.chain);
            if rule.runs {
                metrics.rule_lag.with_label_values(&[&rule.name]).set(rule.own);
            } else {
                // It may have had none.
                metrics.rule_lag.remove_label_values(&[&rule.name]).ok();
            }
            if rule.is_behind() {
                state.behind_since.entry(rule.name.clone()).or_insert(now - lag::millis(rule.own));
            } else {
                state.behind_since.remove(&rule.name);
            }
        }
        state.behind_since.retain(|name, _| view.lags.rules.iter().any(|rule| rule.name == *name));
        metrics.checkpoint_age.set(view.lags.checkpoint);
        metrics.stream_age.set(view.lags.stream_age);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
