//! Positions and rule states in the state database, written with majority acknowledgement.
//!
//! Every document contains the term of the leader that wrote it last. A new leader first marks all of them with its own
//! term. From then on, delayed writes of a former leader change nothing.

use std::{
    collections::{BTreeMap, HashMap},
    mem,
    sync::Arc,
    time::Duration,
};

use bson::{Bson, Document, Timestamp, doc};
use mongodb::options::UpdateModifications;

use denormd_model::{
    clock,
    partition::Partition,
    position::{ClusterTime, Position},
    rule_state::{BlockReason, RuleState},
};
use denormd_mongo::{
    Server, all, bounded, code,
    error::{Error, Kind, Result},
    unless,
};
use denormd_rules::plan::{Plan, Rule, is_once, is_same_definition};

use super::{
    adoption::Decisions,
    fan_out,
    kept::Keeping,
    rule_record::{
        self, Agreement, RULES, Retired, RuleRecord, backfill_or_awaiting, changed, end_of_pause, has_ended,
        is_backfilling, is_paused, is_unavailable, progress_field, same_generation, state_fields,
    },
    term::{mine, not_superseded, refused_upsert, superseded},
    unreadable,
};

/// The collection of positions: one document per deployment and stream.
pub const POSITIONS: &str = "positions";
/// The collection of terms: one document per deployment, with the latest claimed term.
const TERMS: &str = "terms";

/// The state of one deployment, or of one of its partitions.
#[derive(Debug, Clone)]
pub struct Store {
    database: String,
    /// The deployment or partition in the `_id` of this state's documents.
    deployment: String,
    /// The partitions that this store covers: one for a leader, all of the deployment for commands.
    ids: Arc<[String]>,
    /// The UUID of the collection of positions. A copy of the data in another cluster has a different UUID, both after
    /// a restore and after a synchronisation. Reading it needs no additional privilege.
    cluster: Arc<Bson>,
}

/// The highest term that was claimed or written for the deployment; 0 if there is none.
pub async fn highest_term(server: &Server, database: &str, deployment: &str) -> Result<i64> {
    let mut highest = 0;
    for name in [TERMS, POSITIONS, RULES, fan_out::COLLECTION] {
        let collection = server.collection(database, name);
        let last = bounded(collection.find_one(doc! {"_id.deployment": deployment}).sort(doc! {"term": -1})).await?;
        // State without a term comes from a daemon without a lease.
        let Some(last) = last else { continue };
        highest = highest.max(match last.get("term") {
            None | Some(Bson::Null) => 1,
            Some(Bson::Int64(term)) => (*term).max(1),
            Some(_) => return Err(unreadable(name, &last, "its term is no number")),
        });
    }
    Ok(highest)
}

/// Claims a term for a new leader, before any other write in that term. Returns false if this term or a later one is
/// already claimed: each term has one leader, regardless of the lease. A delayed claim only uses up a term.
pub async fn claim_term(server: &Server, database: &str, deployment: &str, term: i64) -> Result<bool> {
    let unclaimed = doc! {"_id": {"deployment": deployment}, "term": {"$not": {"$gte": term}}};
    let claim = doc! {"$set": {"term": term, "since": clock::now()}};
    let claimed = bounded(server.collection(database, TERMS).update_one(unclaimed, claim).upsert(true)).await;
    Ok(unless(code::DUPLICATE_KEY, claimed)?.is_some())
}

impl Store {
    /// Opens the state of a whole deployment to read it and to make requests. Leaders are not affected, whatever the term
    /// of `server` is: each partition has terms of its own.
    pub async fn open(server: &Server, database: &str, deployment: &str) -> Result<Self> {
        let partitions = super::format::check(server, database, deployment).await?;
        let ids = Partition::all(partitions).map(|partition| partition.id(deployment)).collect();
        create_collections(server, database).await?;
        Self::of_cluster(server, database, deployment, ids).await
    }

    /// Opens the state of one partition for its leader, whose term `server` has. From now on, unacknowledged writes of a
    /// former leader cannot change it.
    pub async fn open_partition(
        server: &Server,
        database: &str,
        deployment: &str,
        partition: Partition,
    ) -> Result<Self> {
        let partitions = super::format::check(server, database, deployment).await?;
        if partitions != partition.of() {
            let message = format!("the deployment is divided into {partitions} partitions now");
            return Err(Error::new(Kind::Unavailable, message));
        }
        create_collections(server, database).await?;
        let (id, term) = (partition.id(deployment), server.term());
        for name in [POSITIONS, RULES, fan_out::COLLECTION] {
            let documents = server.collection(database, name);
            let later = doc! {"_id.deployment": &id, "term": {"$gt": term}};
            if term > 0 && bounded(documents.find_one(later)).await?.is_some() {
                return Err(superseded(server));
            }
            let earlier = doc! {"_id.deployment": &id, "term": {"$not": {"$gte": term}}};
            // A delayed update raises terms at most to the term of this leadership.
            bounded(documents.update_many(earlier, doc! {"$set": {"term": term}})).await?;
        }
        Self::of_cluster(server, database, &id, Arc::from([id.clone()])).await
    }

    async fn of_cluster(server: &Server, database: &str, deployment: &str, ids: Arc<[String]>) -> Result<Self> {
        let listed = server.listed(database, doc! {"filter": {"name": POSITIONS}}).await?;
        let uuid = listed.first().and_then(|found| found.get_document("info").ok()?.get("uuid").cloned());
        let cluster = uuid.ok_or_else(|| Error::internal("the collection of positions has no UUID"))?;
        Ok(Self { database: database.to_owned(), deployment: deployment.to_owned(), ids, cluster: Arc::new(cluster) })
    }

    /// The same state, limited to these partitions.
    #[must_use]
    pub fn of(self, partitions: &[Partition]) -> Self {
        Self { ids: partitions.iter().map(|partition| partition.id(&self.deployment)).collect(), ..self }
    }

    /// The name of the state database.
    #[must_use]
    pub fn database(&self) -> &str {
        &self.database
    }

    /// The partitions that this store covers, as ids in stored documents.
    #[must_use]
    pub fn ids(&self) -> &[String] {
        &self.ids
    }

    /// The documents of a rule, one per partition.
    fn of_rule(&self, rule: &str) -> Document {
        doc! {"_id": {"$in": self.ids.iter().map(|id| doc! {"deployment": id, "rule": rule}).collect::<Vec<_>>()}}
    }

    pub(super) fn id(&self, name: &str, value: &str) -> Document {
        doc! {"deployment": &self.deployment, name: value}
    }

    /// The position to resume the stream of `database` from, if there is one. The token is valid only for the pipeline
    /// that produced it. With another pipeline, the stream is reopened by time.
    pub async fn position(&self, server: &Server, database: &str, pipeline: &[Document]) -> Result<Option<Position>> {
        let positions = server.collection(&self.database, POSITIONS);
        let found = bounded(positions.find_one(doc! {"_id": self.id("stream", database)})).await?;
        let now = server.operation_time().await?;
        let Some(doc) = found.filter(|doc| doc.contains_key("time")) else { return Ok(None) };
        let unreadable = |error| unreadable(POSITIONS, &doc, &format!("{error}"));
        let time = ClusterTime::from(doc.get_timestamp("time").map_err(unreadable)?);
        if doc.get("cluster") != Some(&*self.cluster) || time > now {
            tracing::error!(database, "the checkpoint is of another cluster and is not used");
            return Ok(None);
        }
        let same = doc.get_array("pipeline").map_err(unreadable)?.iter().filter_map(Bson::as_document).eq(pipeline);
        let token = doc.get_document("token").ok().filter(|_| same).cloned();
        Ok(Some(Position { time, token }))
    }

    /// Saves the position of the stream of `database`, unless another leader has opened the state. `known` is the time of
    /// the last position that this leader has read or saved. If the stored one is older, the cluster was restored to an
    /// earlier time ([`Kind::HistoryLost`]): the stored position stays, because changes after it may not be applied.
    /// Between `effects_until` and the moment when this position was taken, this leader changed no target and started no job.
    pub async fn save_position(
        &self,
        server: &Server,
        database: &str,
        pipeline: &[Document],
        position: &Position,
        known: Option<ClusterTime>,
        effects_until: ClusterTime,
    ) -> Result<()> {
        let state = doc! {
            "time": Timestamp::from(position.time),
            "token": position.token.clone(),
            "pipeline": pipeline.to_vec(),
            "cluster": (*self.cluster).clone(),
            "term": server.term(),
            "saved": clock::now(),
            // With the position that it belongs to: an older program moves the position and leaves this as it is.
            "effects": {"until": Timestamp::from(effects_until), "at": Timestamp::from(position.time)},
        };
        let positions = server.collection(&self.database, POSITIONS);
        let id = self.id("stream", database);
        let mut stored = mine(server, id.clone());
        if let Some(known) = known {
            // A save that is executed late does not take a later one back.
            stored.insert("time", doc! {"$gte": Timestamp::from(known), "$lte": Timestamp::from(position.time)});
        }
        let save = positions.update_one(stored, doc! {"$set": state}).upsert(true);
        let Err(error) = bounded(save).await else { return Ok(()) };
        if let Some(known) = known.filter(|_| error.code == Some(code::DUPLICATE_KEY)) {
            let mut older = mine(server, id);
            older.insert("time", doc! {"$lt": Timestamp::from(known)});
            if bounded(positions.find_one(older)).await?.is_some() {
                let message = "the stored position is older than the last one that was saved";
                return Err(Error::new(Kind::HistoryLost, message));
            }
        }
        Err(refused_upsert(server, &positions, self.id("stream", database), error).await)
    }

    /// The records of all current and former rules of this deployment, by name, merged over the partitions.
    pub async fn rules(&self, server: &Server) -> Result<Vec<(String, RuleRecord)>> {
        self.found(server, doc! {}, ClusterTime::default()).await
    }

    /// The same records without definitions, which are read every second for the states of the rules.
    pub async fn standing(&self, server: &Server) -> Result<Vec<(String, RuleRecord)>> {
        self.standing_after(server, ClusterTime::default()).await
    }

    /// The same, as of `after` or later. Without a time, a majority read may miss recent writes shortly after a failover.
    pub(super) async fn standing_after(
        &self,
        server: &Server,
        after: ClusterTime,
    ) -> Result<Vec<(String, RuleRecord)>> {
        self.found(server, doc! {"definition": 0, "retired": 0, "agreed": 0}, after).await
    }

    /// The records by the id of the partition and the name of the rule, as of `after` or later.
    pub async fn records(&self, server: &Server, after: ClusterTime) -> Result<BTreeMap<(String, String), RuleRecord>> {
        let records = self.of_partitions(server, doc! {}, after).await?.into_iter();
        Ok(records.map(|(id, record)| ((id.deployment, id.rule), record)).collect())
    }

    async fn of_partitions(
        &self,
        server: &Server,
        projection: Document,
        after: ClusterTime,
    ) -> Result<Vec<(rule_record::Id, RuleRecord)>> {
        let mine = doc! {"_id.deployment": {"$in": self.ids.to_vec()}};
        let command = doc! {"find": RULES, "filter": mine, "projection": projection};
        server.read_state(&self.database, command, after).await?.iter().map(rule_record::read).collect()
    }

    async fn found(
        &self,
        server: &Server,
        projection: Document,
        after: ClusterTime,
    ) -> Result<Vec<(String, RuleRecord)>> {
        let mut out: Vec<(String, RuleRecord)> = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        for (rule_record::Id { rule: name, .. }, record) in self.of_partitions(server, projection, after).await? {
            match places.get(&name) {
                Some(place) => out[*place].1.join(record),
                None => {
                    places.insert(name.clone(), out.len());
                    out.push((name, record));
                }
            }
        }
        Ok(out)
    }

    /// The records of a rule by the id of the partition, for each partition that has registered it.
    pub async fn of_each_partition(&self, server: &Server, rule: &str) -> Result<Vec<(String, RuleRecord)>> {
        let rules = server.collection(&self.database, RULES);
        let found = all(rules.find(self.of_rule(rule)).sort(doc! {"_id": 1})).await?;
        found.iter().map(|document| rule_record::read(document).map(|(id, record)| (id.deployment, record))).collect()
    }

    /// Records the definition and state of a rule, regardless of the previous state. Returns the stored state and the
    /// generation of this change, which invalidates requests of earlier generations.
    pub async fn reset_rule(
        &self,
        server: &Server,
        rule: &Rule,
        state: &RuleState,
        agreement: Agreement,
    ) -> Result<(RuleState, i64)> {
        self.change_rule(server, rule, |_| Some((state.clone(), agreement)), Document::new()).await
    }

    /// Records the definition of a rule that is new, changed, or returns to the config, its next state, and the values that its
    /// first backfill keeps.
    pub async fn register_rule(
        &self,
        server: &Server,
        rule: &Rule,
        next: impl Fn(Option<&RuleRecord>) -> (RuleState, Agreement),
        keeping: Option<&Keeping>,
        is_agreed: bool,
    ) -> Result<(RuleState, i64)> {
        let mut more = doc! {"keeping": keeping.map(bson::serialize_to_document).transpose()?};
        more.extend(is_agreed.then(|| ("agreed".to_owned(), rule.definition.clone().into())));
        self.change_rule(server, rule, |seen| Some(next(seen)), more).await
    }

    /// Records the definition of a rule, and the state that `next` computes from its record: a command may have changed that since
    /// the caller read it. With None the record stays as it is. `more` has further fields to set. Returns the stored state and its
    /// generation.
    pub(crate) async fn change_rule(
        &self,
        server: &Server,
        rule: &Rule,
        next: impl Fn(Option<&RuleRecord>) -> Option<(RuleState, Agreement)>,
        more: Document,
    ) -> Result<(RuleState, i64)> {
        let rules = server.collection(&self.database, RULES);
        loop {
            let id = self.id("rule", &rule.name);
            let before = bounded(rules.find_one(doc! {"_id": id.clone()})).await?;
            let seen = before.as_ref().map(rule_record::read).transpose()?.map(|(_, seen)| seen);
            let generation = seen.as_ref().map_or(0, |seen| seen.generation);
            if before.as_ref().is_some_and(|before| before.get_i64("term").is_ok_and(|term| term > server.term())) {
                return Err(superseded(server));
            }
            let Some((state, agreement)) = next(seen.as_ref()) else {
                return Ok((seen.map_or(RuleState::Removed, |seen| seen.state), generation));
            };
            let mut fields = state_fields(&state)?;
            let has_awaited = |seen: &RuleRecord| seen.awaiting || seen.state == RuleState::AwaitingBackfill;
            if state.is_stopped() && seen.as_ref().is_some_and(has_awaited) {
                fields.insert("awaiting", generation + 1);
            }
            if seen.as_ref().is_some_and(|seen| !rule.has_source(&seen.definition)) {
                fields.extend(doc! {"source_seen": false, "source_uuid": Bson::Null, "released": Bson::Null});
            }
            fields.extend(more.clone());
            fields.extend(doc! {
                "definition": rule.definition.clone(), "term": server.term(), "generation": generation + 1,
            });
            let kept = || seen.is_some_and(|seen| seen.removals_agreed && rule.has_definition(&seen.definition));
            let agreed = agreement == Agreement::Given || agreement == Agreement::Kept && kept();
            // Without an agreement, an existing number belongs to an earlier generation and has no effect.
            if agreed {
                fields.insert("removals_agreed", generation + 1);
            }
            // A delayed write finds another generation, and cannot undo later changes.
            let mut unchanged = mine(server, id);
            unchanged.insert("generation", same_generation(generation));
            let reset = rules.update_one(unchanged, doc! {"$set": fields}).upsert(before.is_none());
            let done = unless(code::DUPLICATE_KEY, bounded(reset).await)?;
            if done.is_some_and(|done| done.matched_count > 0 || done.upserted_id.is_some()) {
                return Ok((state.with_removals(agreed), generation + 1));
            }
        }
    }

    /// Requests a backfill of a rule from the start, from the current or next leader. Returns false for a rule that has
    /// never run, or is stopped or absent from the config in every partition: a rule that is blocked or paused after the
    /// user has looked stays so, and one that returns to the config is registered first, with the values that it keeps.
    pub async fn ask(&self, server: &Server, rule: &str) -> Result<bool> {
        let runs = |seen: &RuleRecord| !seen.state.is_stopped() && seen.state != RuleState::Removed;
        self.ask_all(server, rule, runs, None).await
    }

    /// Unblocks a rule by a backfill, if it is still blocked for the reason that the user has seen; returns false if it
    /// is not. For a block because of its effect on existing data, partitions that have not recorded this definition yet
    /// use the same decision.
    pub async fn unblock(
        &self,
        server: &Server,
        rule: &str,
        reason: &BlockReason,
        definition: &Document,
    ) -> Result<bool> {
        let is_blocked = |seen: &RuleRecord| match (&seen.state, reason) {
            (RuleState::Blocked(BlockReason::Adoption(_)), BlockReason::Adoption(_)) => {
                is_same_definition(&seen.definition, definition)
            }
            (RuleState::Blocked(other), reason) => mem::discriminant(other) == mem::discriminant(reason),
            _ => false,
        };
        let agreed = match reason {
            // From now on, a missing source collection counts as empty.
            BlockReason::SourceGone => {
                let now = Timestamp::from(server.operation_time().await?);
                doc! {"released": now, "source_seen": false, "source_uuid": Bson::Null}
            }
            BlockReason::Adoption(_) => {
                let decisions = Decisions { server, database: &self.database, deployment: &self.deployment };
                decisions.agree(rule, definition, None).await?;
                doc! {"agreed": definition.clone()}
            }
            BlockReason::RemovalLimit => Document::new(),
        };
        self.ask_all(server, rule, is_blocked, Some(agreed)).await
    }

    /// Requests a backfill from each partition whose record `fits`. Returns false if none does. `agreed` has the fields
    /// that record an agreement to its effect.
    async fn ask_all(
        &self,
        server: &Server,
        rule: &str,
        fits: impl Fn(&RuleRecord) -> bool,
        agreed: Option<Document>,
    ) -> Result<bool> {
        let update = |seen: &RuleRecord| {
            if !fits(seen) {
                return Ok(None);
            }
            let mut fields = state_fields(&RuleState::BACKFILL)?;
            let mut more = Document::new();
            if let Some(agreed) = &agreed {
                fields.extend(agreed.clone());
                more.insert("removals_agreed", seen.generation + 1);
            }
            Ok(Some(changed(fields, more)))
        };
        Ok(self.update_each(server, rule, Document::new(), update).await? > 0)
    }

    /// Changes the records of a rule, one per partition, of those that this filter finds. `update` gives the change of a record;
    /// None leaves it. Returns the number of records that were changed.
    ///
    /// A change applies only to the generation that it was computed from, as the caller need not be the leader. A delayed
    /// write, after the rule was blocked again, would agree to an effect that nobody has seen.
    async fn update_each(
        &self,
        server: &Server,
        rule: &str,
        which: Document,
        update: impl Fn(&RuleRecord) -> Result<Option<Vec<Document>>>,
    ) -> Result<u64> {
        let rules = server.collection(&self.database, RULES);
        let mut updated = 0;
        for id in self.ids.iter() {
            let mut filter = doc! {"_id": {"deployment": id, "rule": rule}};
            filter.extend(which.clone());
            while let Some(seen) = bounded(rules.find_one(filter.clone())).await? {
                let (_, seen) = rule_record::read(&seen)?;
                let Some(update) = update(&seen)? else { break };
                let mut unchanged = filter.clone();
                unchanged.insert("generation", same_generation(seen.generation));
                if bounded(rules.update_one(unchanged, update)).await?.matched_count > 0 {
                    updated += 1;
                    break;
                }
            }
        }
        Ok(updated)
    }

    /// Pauses a rule that is in the config, for this time or until it is resumed. A rule that is blocked until somebody agrees
    /// stays blocked, and one that is paused without an end stays so. The rule stops once the leader has read this. The state
    /// records that a backfill must cover all changes missed meanwhile.
    pub async fn pause(&self, server: &Server, rule: &str, time: Option<Duration>) -> Result<()> {
        let update = |seen: &RuleRecord| {
            let may_pause = match &seen.state {
                RuleState::Paused { until, .. } => until.is_some() || time.is_none(),
                // It would run again by itself once its source is there.
                RuleState::Blocked(reason) => *reason == BlockReason::SourceGone,
                state => *state != RuleState::Removed,
            };
            if !may_pause {
                return Ok(None);
            }
            let blocked = seen.state.block().cloned();
            let fields = state_fields(&RuleState::Paused { until: None, blocked })?;
            Ok(Some(changed(fields, time.map(|time| doc! {"until": end_of_pause(time)}).unwrap_or_default())))
        };
        self.update_each(server, rule, Document::new(), update).await?;
        Ok(())
    }

    /// Records that the leader has acted on a pause or a backfill request.
    pub async fn notice(&self, server: &Server, rule: &str, generation: i64) -> Result<()> {
        // A former leader does not speak for the one that writes now.
        let mut filter = mine(server, self.id("rule", rule));
        filter.insert("generation", generation);
        let rules = server.collection(&self.database, RULES);
        bounded(rules.update_one(filter, doc! {"$set": {"noticed": generation}})).await?;
        Ok(())
    }

    /// Resumes a paused rule with a full backfill, or blocks it ([`RuleState::resumed`]). Returns the number of records that were
    /// paused.
    pub async fn resume(&self, server: &Server, rule: &str) -> Result<u64> {
        self.resume_those(server, rule, Document::new()).await
    }

    /// Resumes those rules of the plan whose pause has ended, in the same way.
    pub async fn resume_ended(&self, server: &Server, plan: &Plan) -> Result<()> {
        let mut ended = doc! {"_id.deployment": {"$in": self.ids.to_vec()}};
        ended.extend(is_paused());
        ended.extend(has_ended());
        let rules = server.collection(&self.database, RULES);
        let found = all(rules.find(ended).projection(doc! {"_id": 1})).await?;
        let is_ended = |rule: &&Arc<Rule>| {
            let name = |found: &Document| Some(found.get_document("_id").ok()?.get_str("rule").ok()? == rule.name);
            found.iter().filter_map(name).any(|is_same| is_same)
        };
        for rule in plan.rules.iter().filter(is_ended) {
            self.resume_those(server, &rule.name, has_ended()).await?;
        }
        Ok(())
    }

    async fn resume_those(&self, server: &Server, rule: &str, which: Document) -> Result<u64> {
        let update = |seen: &RuleRecord| {
            let Some(state) = seen.state.resumed() else { return Ok(None) };
            Ok(Some(changed(state_fields(&state)?, Document::new())))
        };
        self.update_each(server, rule, which, update).await
    }

    /// Resumes an unavailable rule with a full backfill, or leaves that to `denormd backfill` if the rule waited for it; nothing if its
    /// state has changed since.
    pub async fn resume_unavailable(&self, server: &Server, rule: &str, generation: i64) -> Result<()> {
        let mut unavailable = is_unavailable();
        unavailable.insert("generation", generation);
        let update = changed(state_fields(&RuleState::BACKFILL)?, backfill_or_awaiting());
        self.update_own(server, rule, unavailable, update).await?;
        Ok(())
    }

    /// Records that the source collection of a rule exists, with its UUID. If the rule was unblocked meanwhile, so that
    /// a missing source counts as empty, a delayed write finds another generation, changes nothing and returns false.
    pub async fn source_seen(&self, server: &Server, rule: &str, generation: i64, uuid: &Bson) -> Result<bool> {
        let update = doc! {"$set": {"source_seen": true, "source_uuid": uuid.clone()}};
        self.update_own(server, rule, doc! {"generation": same_generation(generation)}, update).await
    }

    /// Updates the record of a rule of this leader's partition. Returns false if the record does not match `unchanged` any more, and
    /// fails if a later leader has marked it.
    async fn update_own(
        &self,
        server: &Server,
        rule: &str,
        unchanged: Document,
        update: impl Into<UpdateModifications>,
    ) -> Result<bool> {
        let (rules, id) = (server.collection(&self.database, RULES), self.id("rule", rule));
        let mut filter = mine(server, id.clone());
        filter.extend(unchanged);
        if bounded(rules.update_one(filter, update)).await?.matched_count > 0 {
            return Ok(true);
        }
        not_superseded(server, &rules, id).await?;
        Ok(false)
    }

    /// Records that a rule is not in the config, so that it is backfilled if it returns. With a generation of its own: a
    /// former leader's backfill, saved late, does not bring the rule back.
    pub async fn remove(&self, server: &Server, rule: &str) -> Result<()> {
        // If it returns, its backfill is an ordinary one.
        let removed = changed(state_fields(&RuleState::Removed)?, doc! {"degraded": "$$REMOVE"});
        let rules = server.collection(&self.database, RULES);
        while let Some(seen) = bounded(rules.find_one(doc! {"_id": self.id("rule", rule)})).await? {
            // A delayed write finds another generation: by then, the rule may be in the config again.
            let (_, seen) = rule_record::read(&seen)?;
            let unchanged = doc! {"generation": same_generation(seen.generation)};
            if self.update_own(server, rule, unchanged, removed.clone()).await? {
                break;
            }
        }
        Ok(())
    }

    /// Removes from the record of a rule the definition that is blocked for its effect on existing data: if the rule returns to the
    /// config, that effect is counted again.
    pub async fn forget_blocked(&self, server: &Server, rule: &str) -> Result<()> {
        let blocked = doc! {"definition": Document::new(), "keeping": Bson::Null};
        self.update_own(server, rule, Document::new(), doc! {"$set": blocked}).await?;
        Ok(())
    }

    /// Keeps an earlier definition of a rule, for `denormd prune`.
    pub async fn retire(&self, server: &Server, rule: &str, definition: &Document) -> Result<()> {
        let update = doc! {"$addToSet": {"retired": definition.clone()}};
        self.update_own(server, rule, Document::new(), update).await?;
        Ok(())
    }

    /// Deletes the retired definitions of a rule and, with `whole`, its record, but for those that tell which values belong to the
    /// application. Deletes only what is `known`: a rule that has returned to the config or has changed meanwhile is kept, even if the
    /// request is delayed.
    pub async fn forget(&self, server: &Server, rule: &str, known: &RuleRecord, whole: bool) -> Result<()> {
        let rules = server.collection(&self.database, RULES);
        if !whole {
            let mut same = self.of_rule(rule);
            same.insert("definition", known.definition.clone());
            let retired: Vec<Document> = known.retired.iter().filter(|retired| !is_once(retired)).cloned().collect();
            let update = doc! {"$pullAll": {"retired": retired}};
            bounded(rules.update_many(same, update)).await?;
            return Ok(());
        }
        // The partitions may have recorded different definitions. Each change of one has a generation of its own.
        let seen = self.of_each_partition(server, rule).await?;
        if seen.iter().map(|(_, record)| record.generation).sum::<i64>() != known.generation {
            return Ok(());
        }
        for (id, record) in seen {
            let mut definitions = record.retired.iter().chain([&record.definition]);
            if !record.undone.is_empty() || definitions.any(is_once) {
                continue;
            }
            let id = doc! {"deployment": id, "rule": rule};
            let unchanged = doc! {"_id": id, "generation": same_generation(record.generation)};
            bounded(rules.delete_one(unchanged)).await?;
        }
        Ok(())
    }

    /// Records that the first backfill of a rule is over, unless its state has changed since.
    pub async fn end_keeping(&self, server: &Server, rule: &Rule, generation: i64) -> Result<bool> {
        let update = doc! {"$unset": {"keeping": ""}, "$pull": written_again(rule)};
        self.update_own(server, &rule.name, doc! {"generation": same_generation(generation)}, update).await
    }

    /// Records that values are put back: these fields are the application's, and the next backfill of the rule keeps
    /// their values again.
    pub async fn undoing(&self, server: &Server, rule: &str, keeping: &Keeping, undone: &[Retired]) -> Result<()> {
        let undone = undone.iter().map(bson::serialize_to_bson).collect::<std::result::Result<Vec<_>, _>>()?;
        let keeping = bson::serialize_to_document(keeping)?;
        let update = doc! {"$set": {"keeping": keeping}, "$addToSet": {"undone": {"$each": undone}}};
        self.update_own(server, rule, Document::new(), update).await?;
        Ok(())
    }

    /// Saves the progress of this generation's backfill: its position, the targets `(done, to do)`, and the target that a
    /// first backfill has passed, if it keeps values: those up to there are denormd's own. Returns false if a newer
    /// backfill has been requested.
    pub async fn save_backfill(
        &self,
        server: &Server,
        rule: &Rule,
        generation: i64,
        (state, passed): (&RuleState, Option<&Bson>),
        progress: (u64, Option<u64>),
    ) -> Result<bool> {
        let mut same = doc! {"generation": same_generation(generation)};
        if *state != RuleState::Live {
            // A delayed write may move the progress back, but does not reopen a backfill that has ended.
            same.extend(is_backfilling());
        }
        // Until the backfill ends, the targets that it has not reached hold the values that `denormd undo` put back.
        let ended = if *state == RuleState::Live {
            doc! {"$unset": {"degraded": ""}, "$pull": written_again(rule)}
        } else {
            Document::new()
        };
        let update = |fields: Document| {
            let mut update = doc! {"$set": fields};
            update.extend(ended.clone());
            update
        };
        let mut state = state_fields(state)?;
        state.insert("progress", progress_field(progress));
        if let Some(passed) = passed {
            let (mut keeps, mut both) = (same.clone(), state.clone());
            keeps.insert("keeping", doc! {"$type": "object"});
            both.insert("keeping.passed", vec![passed.clone()]);
            if self.update_own(server, &rule.name, keeps, update(both)).await? {
                return Ok(true);
            }
            // The record keeps nothing any more: the answer to `end_keeping` was lost.
        }
        self.update_own(server, &rule.name, same, update(state)).await
    }
}

/// The fields of a record that `denormd undo` has given back to the application, of which the rule's backfill makes denormd's own.
fn written_again(rule: &Rule) -> Document {
    let paths: Vec<String> = rule.owned().into_iter().map(ToString::to_string).collect();
    doc! {"undone": {"collection": rule.target.namespace.to_string(), "path": {"$in": paths}}}
}

async fn create_collections(server: &Server, database: &str) -> Result<()> {
    for name in [POSITIONS, RULES, fan_out::COLLECTION] {
        unless(code::NAMESPACE_EXISTS, bounded(server.database(database).create_collection(name)).await)?;
    }
    Ok(())
}
