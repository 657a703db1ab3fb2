//! What the board asks the server.

use std::time::Duration;

use bson::{Bson, Document, doc};
use futures_util::TryStreamExt;

use crate::{
    dead_letter,
    error::{Error, Kind, Result},
    metrics::wall_millis,
    mongo::Server,
    position::ClusterTime,
    reconcile::Context,
};

use super::{
    Board,
    lag::{BEHIND, Probe},
    report::Oplog,
};

/// How long one question may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// In rounds of about a second: how often the dead letters are counted and the oplog is looked at.
const SELDOM: u64 = 5;

/// In rounds of about a second: how often a canary is sent.
const CANARY: u64 = 10;
/// The collection of canaries in the state database: one document a deployment.
const CANARIES: &str = "canaries";

impl Board {
    pub(super) async fn probe(&self, round: u64) {
        let Some(attached) = self.attached() else { return };
        let context = &attached.context;
        match tokio::time::timeout(PATIENCE, hello(&context.server)).await.unwrap_or_else(|_| Err(silent())) {
            Ok((probe, offset)) => {
                self.metrics.set_clock(offset);
                let mut state = self.state();
                state.probes.add(probe);
                state.unanswered = None;
            }
            Err(error) => {
                self.state().unanswered = Some(error.kind);
                return;
            }
        }
        if round.is_multiple_of(CANARY) {
            let sent = self.metrics.now();
            if let Ok(Ok(place)) = tokio::time::timeout(PATIENCE, canary(context)).await
                && let Some(canary) = &mut self.state().canary
            {
                canary.sent(place, sent);
            }
        }
        if !round.is_multiple_of(SELDOM) {
            return;
        }
        if let Ok(Ok(letters)) = tokio::time::timeout(PATIENCE, letters(context)).await {
            let mut state = self.state();
            state.letters.clear();
            for rule in &context.plan.rules {
                let count =
                    letters.iter().filter(|(name, ..)| *name == rule.name).map(|(.., count)| count).sum::<u64>();
                let count = i64::try_from(count).unwrap_or(i64::MAX);
                self.metrics.dead_letters.with_label_values(&[&rule.name]).set(count);
            }
            for (rule, reason, count) in letters {
                *state.letters.entry(rule).or_default().entry(reason).or_default() += count;
            }
        }
        let saved = self
            .metrics
            .observation()
            .and_then(|seen| seen.streams.iter().filter_map(|stream| stream.saved.or(Some(stream.applied))).min());
        match tokio::time::timeout(PATIENCE, oplog(&context.server, saved)).await.unwrap_or_else(|_| Err(silent())) {
            Ok(oplog) => self.take_oplog(oplog),
            Err(error) => {
                let mut state = self.state();
                if error.kind == Kind::Connection || error.kind == Kind::Unavailable {
                    return;
                }
                state.oplog = Oplog { readable: Some(false), reason: Some(error.message), ..Oplog::default() };
                self.metrics.oplog_readable.set(0);
                // There may have been none.
                self.metrics.oplog_headroom.remove_label_values::<&str>(&[]).ok();
                self.metrics.oplog_loss.remove_label_values::<&str>(&[]).ok();
            }
        }
    }

    fn take_oplog(&self, oplog: Oplog) {
        let behind = self.metrics.lag.get() >= BEHIND;
        let mut state = self.state();
        self.metrics.oplog_readable.set(1);
        if let Some(headroom) = oplog.headroom_seconds {
            self.metrics.oplog_headroom.with_label_values::<&str>(&[]).set(headroom);
            state.history.headroom(self.metrics.now(), headroom);
        }
        let lost_in_seconds = state.history.lost_in().filter(|_| behind);
        self.metrics.oplog_loss.with_label_values::<&str>(&[]).set(lost_in_seconds.unwrap_or(f64::INFINITY));
        state.oplog = Oplog { lost_in_seconds, ..oplog };
    }
}

fn silent() -> Error {
    Error::new(Kind::Connection, "no answer in time")
}

/// The server's last operation, and by how much its clock is ahead of ours.
async fn hello(server: &Server) -> Result<(Probe, i64)> {
    let before = wall_millis();
    let reply = server.client().database("admin").run_command(doc! {"hello": 1}).await?;
    let after = wall_millis();
    let millis = reply.get_datetime("localTime").map_err(|_| Error::internal("no local time"))?.timestamp_millis();
    let operation =
        reply.get_timestamp("operationTime").map_err(|_| Error::new(Kind::Topology, "no operation time"))?;
    // Within the round trip the difference cannot be told from none.
    let offset = if (before..=after).contains(&millis) { 0 } else { millis - i64::midpoint(before, after) };
    Ok((Probe { operation: operation.into(), millis }, offset))
}

/// Writes a canary; returns a place of the oplog that is not before it.
async fn canary(context: &Context) -> Result<ClusterTime> {
    let letters = &context.dead_letters;
    let command = doc! {
        "update": CANARIES,
        "updates": [{"q": {"_id": &letters.deployment}, "u": {"$currentDate": {"sent": true}}, "upsert": true}],
        "writeConcern": {"w": "majority", "wtimeout": i64::try_from(PATIENCE.as_millis()).unwrap_or(i64::MAX)},
    };
    let reply = context.server.database(&letters.database).run_command(command).await?;
    if reply.contains_key("writeErrors") || reply.contains_key("writeConcernError") {
        return Err(Error::new(Kind::NotReplicated, "a canary was not acknowledged"));
    }
    reply.get_timestamp("operationTime").map(Into::into).map_err(|_| Error::new(Kind::Topology, "no operation time"))
}

/// Rule, reason and number of the dead letters.
async fn letters(context: &Context) -> Result<Vec<(String, String, u64)>> {
    let letters = &context.dead_letters;
    let pipeline = [
        doc! {"$match": {"deployment": &letters.deployment}},
        doc! {"$group": {"_id": {"rule": "$rule", "reason": "$reason"}, "count": {"$sum": 1_i64}}},
        doc! {"$sort": {"count": -1}},
        doc! {"$limit": 1000},
    ];
    let found: Vec<Document> = context
        .server
        .collection(&letters.database, dead_letter::COLLECTION)
        .aggregate(pipeline)
        .await?
        .try_collect()
        .await?;
    let read = |doc: &Document| {
        let id = doc.get_document("_id").ok()?;
        let count = u64::try_from(doc.get_i64("count").ok()?).ok()?;
        Some((id.get_str("rule").ok()?.to_owned(), id.get_str("reason").unwrap_or("unknown").to_owned(), count))
    };
    Ok(found.iter().filter_map(read).collect())
}

/// How far the oplog reaches back, seen from the saved position.
async fn oplog(server: &Server, saved: Option<ClusterTime>) -> Result<Oplog> {
    let local = server.database("local");
    let oplog = local.collection::<Document>("oplog.rs");
    let edge = async |order: i32| {
        let found = oplog.find_one(doc! {}).sort(doc! {"$natural": order}).projection(doc! {"_id": 0, "ts": 1}).await?;
        let ts = found.as_ref().and_then(|entry| entry.get_timestamp("ts").ok());
        ts.map(ClusterTime::from).ok_or_else(|| Error::new(Kind::Topology, "the oplog is empty or not there"))
    };
    let (first, last) = (edge(1).await?, edge(-1).await?);
    let window = f64::from(last.seconds.saturating_sub(first.seconds));
    // Without the privilege for its size, the oplog is taken for full.
    let stats = local.run_command(doc! {"collStats": "oplog.rs"}).await.unwrap_or_default();
    let fill = fill(&stats).unwrap_or(1.0);
    let unused = if fill > 0.0 { window / fill - window } else { 0.0 };
    Ok(Oplog {
        readable: Some(true),
        reason: None,
        window_seconds: Some(window),
        headroom_seconds: saved.map(|saved| f64::from(saved.seconds) - f64::from(first.seconds) + unused),
        size_megabytes: number(&stats, "maxSize").map(|bytes| bytes / f64::from(1 << 20)),
        bridged_seconds: Some(window + unused).filter(|bridged| *bridged > 0.0),
        lost_in_seconds: None,
    })
}

/// How much of the oplog's size is used, at most 1.
fn fill(stats: &Document) -> Option<f64> {
    let (size, most) = (number(stats, "size")?, number(stats, "maxSize")?);
    (most > 0.0).then(|| (size / most).min(1.0))
}

fn number(stats: &Document, name: &str) -> Option<f64> {
    match stats.get(name)? {
        Bson::Int32(n) => Some(f64::from(*n)),
        #[expect(clippy::cast_precision_loss, reason = "a size in bytes, for a share")]
        Bson::Int64(n) => Some(*n as f64),
        Bson::Double(n) => Some(*n),
        _ => None,
    }
}
