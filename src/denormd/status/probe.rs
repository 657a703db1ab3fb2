//! The board's requests to the server.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use bson::{Document, doc};
use tokio::time::Instant;

use denormd_engine::{
    checkpoint::store::Store, dead_letter, deployment::lease, jobs::prune::retired, reconcile::Context,
    snapshot::Snapshot,
};
use denormd_model::{
    clock::{millis, wall_millis},
    distribution::{number, ratio},
    position::ClusterTime,
    rule_state::RuleState,
};
use denormd_mongo::{
    Server,
    error::{Error, Kind, Result},
    primary::{majority_lag, no_oplog},
    silent,
    skew::skew,
};

use super::{
    Board, State,
    currency::Claim,
    lag::{BEHIND, Probe},
    report::{Oplog, RetiredField},
};

/// Timeout of a request that is made every second.
const SHORT_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout of any other request.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Rounds, of about a second, between counts of the dead letters.
const COUNT_ROUNDS: u64 = 2;
/// Rounds between checks of the oplog.
const SELDOM: u64 = 5;

/// Maximum age of the last reading of the oplog window; after that, the window counts as unknown. Under heavy writes a read may
/// time out, and that is when the window shrinks.
const KNOWN: Duration = Duration::from_secs(60);

/// Rounds between comparisons of the clocks of all members.
const CLOCKS: u64 = 30;
/// Rounds between reads of the retired fields.
const RETIRED: u64 = 15;
/// Rounds between canaries.
const CANARY: u64 = 10;
/// The collection of canaries in the state database: one document per deployment.
const CANARIES: &str = "canaries";

impl Board {
    /// Asks the primary for its clock and its last operation, and reads the leases.
    pub(super) async fn ask(&self) {
        let known = {
            let state = self.state();
            let attached = state.attached.values().next().cloned();
            state.cluster.as_ref().map(|(context, _)| context.clone()).or(attached)
        };
        let Some(context) = known else { return };
        let dead_letters = &context.dead_letters;
        let asked = tokio::time::timeout(SHORT_TIMEOUT, hello(&context.server));
        let read = tokio::time::timeout(
            SHORT_TIMEOUT,
            lease::holders(&context.server, &dead_letters.database, &dead_letters.deployment),
        );
        let (answer, leases) = tokio::join!(asked, read);
        match answer.unwrap_or_else(|_| Err(silent())) {
            Ok((probe, offset, majority_lag)) => {
                self.metrics.set_clock(offset);
                let mut state = self.state();
                state.probes.add(probe);
                state.unanswered = None;
                state.majority_lag = majority_lag;
            }
            Err(error) => {
                let mut state = self.state();
                state.unanswered = Some((error.kind, error.message));
                state.majority_lag = Duration::ZERO;
            }
        }
        match leases.unwrap_or_else(|_| Err(silent())) {
            Ok(held) => self.take_leases(held),
            Err(error) => self.metrics.record_error(None, "read the lease", &error),
        }
    }

    /// Makes the less frequent requests, while this process leads: the canary, the dead letters, the oplog window.
    pub(super) async fn probe(&self, round: u64) {
        let Some(context) = &self.attached() else { return self.count_down(&self.state()) };
        if round.is_multiple_of(CANARY) {
            let sent = self.metrics.now();
            match tokio::time::timeout(TIMEOUT, canary(context)).await.unwrap_or_else(|_| Err(silent())) {
                Ok(place) => {
                    if let Some(canary) = &mut self.state().canary {
                        canary.sent(place, sent);
                    }
                }
                Err(error) => self.metrics.record_error(None, "send a canary", &error),
            }
        }
        if round.is_multiple_of(COUNT_ROUNDS) {
            self.look(context).await;
        }
        if round.is_multiple_of(CLOCKS) {
            self.compare_clocks(&context.server).await;
        }
        if round.is_multiple_of(RETIRED) {
            self.look_for_retired(context).await;
        }
        if !round.is_multiple_of(SELDOM) {
            return;
        }
        let saved = self
            .state()
            .snapshot()
            .and_then(|seen| seen.streams.iter().filter_map(|stream| stream.saved.or(Some(stream.applied))).min());
        match tokio::time::timeout(TIMEOUT, oplog(&context.server, saved)).await.unwrap_or_else(|_| Err(silent())) {
            Ok(oplog) => self.take_oplog(oplog),
            Err(error) => {
                let mut state = self.state();
                let is_known = state.times.oplog_read.elapsed() < KNOWN;
                let has_no_answer = error.kind == Kind::Connection || error.kind == Kind::Unavailable;
                // During an outage, the status says that the window is the last known one.
                if has_no_answer && (is_known || state.unanswered.is_some()) {
                    return self.count_down(&state);
                }
                state.oplog = Oplog { readable: Some(false), reason: Some(error.message), ..Oplog::default() };
                self.metrics.oplog_readable.set(0);
                // They may not exist.
                self.metrics.oplog_headroom.remove_label_values::<&str>(&[]).ok();
                self.metrics.oplog_loss.remove_label_values::<&str>(&[]).ok();
            }
        }
    }

    /// Counts the dead letters, and determines the time up to which the copies are current: dead letters are recorded
    /// before anything counts as applied.
    async fn look(&self, context: &Context) {
        let (seen, written, pipelines) = {
            let state = self.state();
            if !state.attached.values().any(|attached| Arc::as_ptr(attached) == std::ptr::from_ref(context)) {
                return;
            }
            (state.snapshot(), state.written(), state.pipelines)
        };
        // Shortly after a failover, a majority read without a time may miss dead letters. While the majority lags behind, they
        // are counted, and nothing is claimed.
        let now = tokio::time::timeout(TIMEOUT, context.server.operation_time()).await;
        let now = now.ok().and_then(Result::ok).unwrap_or_default();
        let newest = tokio::time::timeout(TIMEOUT, dead_letters(context, now)).await;
        let is_newest = now != ClusterTime::default() && matches!(newest, Ok(Ok(_)));
        let counted = match newest {
            Ok(Err(Error { kind: Kind::ReadTimedOut, .. })) | Err(_) => {
                let counted = tokio::time::timeout(TIMEOUT, dead_letters(context, ClusterTime::default())).await;
                counted.unwrap_or_else(|_| Err(silent()))
            }
            Ok(counted) => counted,
        };
        let dead_letters = match counted {
            Ok(dead_letters) => dead_letters,
            // An outage has a cause of its own.
            Err(_) if self.state().unanswered.is_some() => return,
            Err(error) => {
                // None earlier does not say that there is none now. What there was stays a cause.
                let mut state = self.state();
                state.dead_letters.take_if(|of_rules| of_rules.is_empty());
                if state.dead_letters.is_none() {
                    self.metrics.dead_letters_unknown();
                }
                drop(state);
                return self.metrics.record_error(None, "count the dead letters", &error);
            }
        };
        let operation = tokio::time::timeout(TIMEOUT, context.server.operation_time()).await;
        let mut state = self.state();
        for rule in &context.plan.rules {
            let count =
                dead_letters.iter().filter(|(name, ..)| *name == rule.name).map(|(.., count)| count).sum::<u64>();
            self.metrics.dead_letters_counted(&rule.name, count);
        }
        let mut of_rules = BTreeMap::<String, BTreeMap<String, u64>>::new();
        for (rule, reason, count) in dead_letters {
            *of_rules.entry(rule).or_default().entry(reason).or_default() += count;
        }
        let with_dead_letters = of_rules.keys().cloned().collect();
        state.dead_letters = Some(of_rules);
        let (Some(seen), Ok(Ok(operation))) = (seen, operation) else { return };
        // What was read of one pipeline does not say what the next one excepts. A large fan-out is recorded as a job, and the
        // position passes it before its last target is written.
        let is_current = is_newest && state.pipelines == pipelines && state.is_whole();
        if is_current && !seen.streams.is_empty() && seen.fan_outs.is_empty() {
            let claim = Claim { time: seen.applied(), except: except(context, &seen, with_dead_letters) };
            state.currency.applied(claim, operation, context.plan.longest_chain(), written);
        }
    }

    /// Reads the fields that earlier rules, or earlier definitions of rules, have left behind.
    async fn look_for_retired(&self, context: &Context) {
        let dead_letters = &context.dead_letters;
        let read = async {
            let store = Store::open(&context.server, &dead_letters.database, &dead_letters.deployment).await?;
            store.rules(&context.server).await
        };
        let Ok(Ok(known)) = tokio::time::timeout(TIMEOUT, read).await else { return };
        let left = known.iter().flat_map(|(name, _)| {
            let fields = retired(&context.plan, &known, name).into_iter();
            fields.map(|left| RetiredField {
                rule: name.clone(),
                collection: left.collection,
                path: left.path.to_string(),
            })
        });
        self.state().retired = left.collect();
    }

    async fn compare_clocks(&self, server: &Server) {
        let skew = tokio::time::timeout(TIMEOUT, skew(server)).await.ok().flatten();
        match skew {
            Some(skew) => self.metrics.clock_skew.with_label_values::<&str>(&[]).set(skew),
            None => drop(self.metrics.clock_skew.remove_label_values::<&str>(&[])),
        }
        self.state().clock_skew = skew;
    }

    /// Lowers the oplog's gauges by the time since they were read. Nothing is known of an oplog that cannot be reached, but others may
    /// still write to it, and the checkpoint stays where it is.
    fn count_down(&self, state: &State) {
        // An instance that stands by has none.
        let leads = !(state.attached.is_empty() && state.left.is_empty());
        let Some(headroom) = state.oplog.headroom_seconds.filter(|_| leads) else { return };
        let left = (headroom - state.times.oplog_read.elapsed().as_secs_f64()).max(0.0);
        for gauge in [&self.metrics.oplog_headroom, &self.metrics.oplog_loss] {
            gauge.with_label_values::<&str>(&[]).set(left);
        }
    }

    fn take_oplog(&self, oplog: Oplog) {
        let mut state = self.state();
        let behind = self.view(&state, self.metrics.now()).lags.overall.is_some_and(|lag| lag >= BEHIND);
        self.metrics.oplog_readable.set(1);
        state.times.oplog_read = Instant::now();
        if let Some(headroom) = oplog.headroom_seconds {
            self.metrics.oplog_headroom.with_label_values::<&str>(&[]).set(headroom);
            state.history.headroom(self.metrics.now(), headroom);
        }
        let lost_in_seconds = state.history.lost_in().filter(|_| behind);
        self.metrics.oplog_loss.with_label_values::<&str>(&[]).set(lost_in_seconds.unwrap_or(f64::INFINITY));
        state.oplog = Oplog { lost_in_seconds, ..oplog };
    }
}

/// The rules whose copies may lack a change, whatever is applied, and those that read these copies.
fn except(context: &Context, seen: &Snapshot, with_dead_letters: BTreeSet<String>) -> BTreeSet<String> {
    let stopped = seen.in_state(|state| *state != RuleState::Live);
    let stopped = stopped.union(&seen.degraded).filter_map(|rule| seen.rules.get(*rule)).map(|rule| rule.name.clone());
    let incomplete = stopped.chain(with_dead_letters).chain(seen.unrepaired.keys().cloned()).collect();
    let shadow = context.plan.rules.iter().filter(|rule| rule.shadow).map(|rule| rule.name.clone());
    context.plan.with_fed(incomplete).into_iter().chain(shadow).collect()
}

/// The server's last operation, the time by which its clock is ahead of ours, and the lag of the majority.
async fn hello(server: &Server) -> Result<(Probe, i64, Duration)> {
    let before = wall_millis();
    let reply = server.client().database("admin").run_command(doc! {"hello": 1}).await?;
    let after = wall_millis();
    let millis = reply.get_datetime("localTime").map_err(|_| Error::internal("no local time"))?.timestamp_millis();
    let operation =
        reply.get_timestamp("operationTime").map_err(|_| Error::new(Kind::Topology, "no operation time"))?;
    // A difference within the round trip counts as none.
    let offset = if (before..=after).contains(&millis) { 0 } else { millis - i64::midpoint(before, after) };
    Ok((Probe { operation: operation.into(), millis }, offset, majority_lag(&reply)))
}

/// Writes a canary; returns a place of the oplog that is not before it.
async fn canary(context: &Context) -> Result<ClusterTime> {
    let dead_letters = &context.dead_letters;
    let command = doc! {
        "update": CANARIES,
        "updates": [{"q": {"_id": &dead_letters.deployment}, "u": {"$currentDate": {"sent": true}}, "upsert": true}],
        "writeConcern": {"w": "majority", "wtimeout": millis(TIMEOUT)},
    };
    let reply = context.server.database(&dead_letters.database).run_command(command).await?;
    if reply.contains_key("writeErrors") || reply.contains_key("writeConcernError") {
        return Err(Error::new(Kind::NotReplicated, "a canary was not acknowledged"));
    }
    reply.get_timestamp("operationTime").map(Into::into).map_err(|_| Error::new(Kind::Topology, "no operation time"))
}

/// Rule, reason and number of the dead letters, as of `after` or later.
async fn dead_letters(context: &Context, after: ClusterTime) -> Result<Vec<(String, String, u64)>> {
    let dead_letters = &context.dead_letters;
    let pipeline = [
        doc! {"$match": {"deployment": &dead_letters.deployment}},
        doc! {"$group": {"_id": {"rule": "$rule", "reason": "$reason"}, "count": {"$sum": 1_i64}}},
    ];
    let command = doc! {"aggregate": dead_letter::COLLECTION, "pipeline": pipeline.to_vec(), "cursor": {}, "maxTimeMS": millis(TIMEOUT)};
    let found = context.server.read_state(&dead_letters.database, command, after).await?;
    let read = |doc: &Document| {
        let id = doc.get_document("_id").ok()?;
        let count = u64::try_from(doc.get_i64("count").ok()?).ok()?;
        Some((id.get_str("rule").ok()?.to_owned(), id.get_str("reason").unwrap_or("unknown").to_owned(), count))
    };
    Ok(found.iter().filter_map(read).collect())
}

/// The oplog window, as seen from the checkpoint.
async fn oplog(server: &Server, saved: Option<ClusterTime>) -> Result<Oplog> {
    if server.is_router().await? {
        return Err(no_oplog());
    }
    let local = server.database("local");
    let oplog = local.collection::<Document>("oplog.rs");
    let edge = async |order: i32| {
        let found = oplog.find_one(doc! {}).sort(doc! {"$natural": order}).projection(doc! {"_id": 0, "ts": 1}).await?;
        let ts = found.as_ref().and_then(|entry| entry.get_timestamp("ts").ok());
        ts.map(ClusterTime::from).ok_or_else(|| Error::new(Kind::Topology, "the oplog is empty or not there"))
    };
    let (first, last) = (edge(1).await?, edge(-1).await?);
    let window = f64::from(last.seconds.saturating_sub(first.seconds));
    // Without the privilege to read its size, the oplog counts as full.
    let stats = local.run_command(doc! {"collStats": "oplog.rs"}).await.unwrap_or_default();
    let fill = fill(&stats).unwrap_or(1.0);
    let unused = if fill > 0.0 { window / fill - window } else { 0.0 };
    Ok(Oplog {
        readable: Some(true),
        reason: None,
        window_seconds: Some(window),
        headroom_seconds: saved.map(|saved| f64::from(saved.seconds) - f64::from(first.seconds) + unused),
        size_megabytes: stats.get("maxSize").map(|bytes| ratio(number(bytes), 1 << 20)),
        bridged_seconds: Some(window + unused).filter(|bridged| *bridged > 0.0),
        lost_in_seconds: None,
    })
}

/// The used part of the oplog's size, at most 1.
fn fill(stats: &Document) -> Option<f64> {
    let (size, most) = (number(stats.get("size")?), number(stats.get("maxSize")?));
    (most > 0).then(|| ratio(size, most).min(1.0))
}
