//! Positions and rule states in the state database, acknowledged by a majority.
//!
//! Every document holds the term of the leader that wrote it last. A leader first marks all of them with its own term; from
//! then on nothing that a former leader has sent changes them.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use bson::{Bson, DateTime, Document, Timestamp, doc};
use futures_util::TryStreamExt;

use crate::{
    error::{Error, Kind, Result},
    mongo::{Server, bounded},
    partition::{Partition, SEPARATOR},
    plan::{Plan, Rule, RuleId},
    position::{ClusterTime, Position},
    rule_state::{BlockReason, RuleState},
};

use super::{
    fan_out,
    rule_record::{self, RuleRecord, progress_field, state_fields},
};

/// The collection of positions: one document a deployment and stream.
pub const POSITIONS: &str = "positions";
/// NamespaceExists
const NAMESPACE_EXISTS: i32 = 48;
/// DuplicateKey
const DUPLICATE_KEY: i32 = 11000;
/// The collection of rule states: one document a deployment and rule.
pub const RULES: &str = "rules";

/// The collection of terms: one document a deployment, with the last one that was led under.
const TERMS: &str = "terms";

/// The state of one deployment, or of one of its partitions.
#[derive(Debug, Clone)]
pub struct Store {
    database: String,
    /// What documents of this state are kept under.
    deployment: String,
    /// The partitions that it speaks for: one, or for commands all of the deployment.
    ids: Arc<[String]>,
    /// The UUID of the collection of positions. A copy of the data in another cluster has another one, whether it was
    /// restored from a dump or synchronised, and reading it takes no more privilege than the state needs anyway.
    cluster: Arc<Bson>,
}

/// The greatest term that was ever led under, or that any state of the deployment was written under; 0 when there is none.
pub async fn highest_term(server: &Server, database: &str, deployment: &str) -> Result<i64> {
    let mut highest = 0;
    for name in [TERMS, POSITIONS, RULES, fan_out::COLLECTION] {
        let last = server
            .collection(database, name)
            .find_one(doc! {"_id.deployment": deployment})
            .sort(doc! {"term": -1})
            .await?;
        // State without a term is of a daemon without a lease.
        highest = highest.max(last.map_or(0, |doc| doc.get_i64("term").unwrap_or(1).max(1)));
    }
    Ok(highest)
}

/// Records that a term is led under, before anything else is done under it. False when it has been, or a later one: each is
/// led under once, whatever happens to the lease. One that comes late claims a term that nobody leads under.
pub async fn claim_term(server: &Server, database: &str, deployment: &str, term: i64) -> Result<bool> {
    let unclaimed = doc! {"_id": {"deployment": deployment}, "term": {"$not": {"$gte": term}}};
    let claim = doc! {"$set": {"term": term, "since": DateTime::now()}};
    match bounded(server.collection(database, TERMS).update_one(unclaimed, claim).upsert(true)).await {
        Ok(_) => Ok(true),
        Err(error) if error.code == Some(DUPLICATE_KEY) => Ok(false),
        Err(error) => Err(error),
    }
}

impl Store {
    /// Opens the state of a whole deployment, whatever it is divided into: for commands, and where it is not divided for its
    /// leader, whose term `server` writes under. What a former leader has sent and not seen acknowledged does not change it
    /// from now on.
    pub async fn open(server: &Server, database: &str, deployment: &str) -> Result<Self> {
        let partitions = super::format::check(server, database, deployment).await?;
        let ids = Partition::all(partitions).map(|partition| partition.id(deployment)).collect();
        Self::open_all(server, database, deployment, ids).await
    }

    /// Opens the state of one partition for its leader.
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
        let id = partition.id(deployment);
        Self::open_all(server, database, &id, Arc::from([id.clone()])).await
    }

    async fn open_all(server: &Server, database: &str, deployment: &str, ids: Arc<[String]>) -> Result<Self> {
        let mine = doc! {"$in": ids.to_vec()};
        for name in [POSITIONS, RULES, fan_out::COLLECTION] {
            match server.database(database).create_collection(name).await.map_err(Error::from) {
                Err(error) if error.code != Some(NAMESPACE_EXISTS) => return Err(error),
                Ok(()) | Err(_) => {}
            }
            let term = server.term();
            let others = server
                .collection(database, name)
                .count_documents(doc! {"_id.deployment": mine.clone(), "term": {"$gt": term}})
                .await?;
            if others > 0 && term > 0 {
                return Err(former());
            }
            server
                .collection(database, name)
                .update_many(
                    doc! {"_id.deployment": mine.clone(), "term": {"$not": {"$gte": term}}},
                    doc! {"$set": {"term": term}},
                )
                .await?;
        }
        let command = doc! {"listCollections": 1, "filter": {"name": POSITIONS}};
        let reply = server.database(database).run_command(command).await?;
        let uuid = reply
            .get_document("cursor")
            .and_then(|cursor| cursor.get_array("firstBatch"))
            .ok()
            .and_then(|batch| batch.first()?.as_document()?.get_document("info").ok()?.get("uuid").cloned());
        let cluster = uuid.ok_or_else(|| Error::internal("the collection of positions has no UUID"))?;
        Ok(Self { database: database.to_owned(), deployment: deployment.to_owned(), ids, cluster: Arc::new(cluster) })
    }

    /// The same, speaking for these partitions alone.
    #[must_use]
    pub fn of(self, partitions: &[Partition]) -> Self {
        Self { ids: partitions.iter().map(|partition| partition.id(&self.deployment)).collect(), ..self }
    }

    /// The state database.
    #[must_use]
    pub fn database(&self) -> &str {
        &self.database
    }

    /// The partitions that it speaks for.
    #[must_use]
    pub fn ids(&self) -> &[String] {
        &self.ids
    }

    /// The documents about a rule, one for each partition.
    fn of_rule(&self, rule: &str) -> Document {
        doc! {"_id": {"$in": self.ids.iter().map(|id| doc! {"deployment": id, "rule": rule}).collect::<Vec<_>>()}}
    }

    pub(super) fn id(&self, name: &str, value: &str) -> Document {
        doc! {"deployment": &self.deployment, name: value}
    }

    /// Where the stream of `database` is to go on, if it has been followed before. The token only fits the pipeline that
    /// it came from: with another one the stream is reopened by time.
    pub async fn position(&self, server: &Server, database: &str, pipeline: &[Document]) -> Result<Option<Position>> {
        let positions = server.collection(&self.database, POSITIONS);
        let found = bounded(positions.find_one(doc! {"_id": self.id("stream", database)})).await?;
        let now = server.operation_time().await?;
        Ok(found.and_then(|doc| {
            let time = ClusterTime::from(doc.get_timestamp("time").ok()?);
            if doc.get("cluster") != Some(&*self.cluster) || time > now {
                tracing::error!(database, "the saved position is of another cluster and is not used");
                return None;
            }
            let same = doc.get_array("pipeline").ok()?.iter().filter_map(Bson::as_document).eq(pipeline.iter());
            let token = doc.get_document("token").ok().filter(|_| same).cloned();
            Some(Position { time, token })
        }))
    }

    /// Saves where the stream of `database` is, unless another leader has opened the state.
    pub async fn save_position(
        &self,
        server: &Server,
        database: &str,
        pipeline: &[Document],
        position: &Position,
    ) -> Result<()> {
        let state = doc! {
            "time": Timestamp::from(position.time),
            "token": position.token.clone(),
            "pipeline": pipeline.to_vec(),
            "cluster": (*self.cluster).clone(),
            "term": server.term(),
            "saved": DateTime::now(),
        };
        let positions = server.collection(&self.database, POSITIONS);
        let save = positions.update_one(mine(server, self.id("stream", database)), doc! {"$set": state}).upsert(true);
        // One that comes late takes the position back: what follows it is only done again.
        bounded(save).await.map_err(refused_upsert)?;
        Ok(())
    }

    /// What is known of every rule that this deployment has or had, by name; what the partitions know taken together.
    pub async fn rules(&self, server: &Server) -> Result<Vec<(String, RuleRecord)>> {
        self.found(server, doc! {}).await
    }

    /// The same without definitions: the states of the rules, which are read every second.
    pub async fn standing(&self, server: &Server) -> Result<Vec<(String, RuleRecord)>> {
        self.found(server, doc! {"definition": 0, "retired": 0, "agreed": 0}).await
    }

    async fn found(&self, server: &Server, projection: Document) -> Result<Vec<(String, RuleRecord)>> {
        let mine = doc! {"_id.deployment": {"$in": self.ids.to_vec()}};
        let mut cursor = server.collection(&self.database, RULES).find(mine).projection(projection).await?;
        let mut out: Vec<(String, RuleRecord)> = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        while let Some(document) = cursor.try_next().await? {
            let (name, record) = rule_record::read(&document)?;
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

    /// Records what a rule is, and puts it into this state, whatever it was before. Returns the generation of this change: what
    /// was asked for under an earlier one no longer counts.
    pub async fn reset_rule(&self, server: &Server, rule: &Rule, state: &RuleState) -> Result<i64> {
        let mut fields = state_fields(state)?;
        fields.insert("definition", rule.definition.clone());
        fields.insert("term", server.term());
        let rules = server.collection(&self.database, RULES);
        loop {
            let id = self.id("rule", &rule.name);
            let before = bounded(rules.find_one(doc! {"_id": id.clone()})).await?;
            let generation = before.as_ref().map(rule_record::read).transpose()?.map_or(0, |(_, seen)| seen.generation);
            if before.as_ref().is_some_and(|before| before.get_i64("term").is_ok_and(|term| term > server.term())) {
                return Err(former());
            }
            fields.insert("generation", generation + 1);
            if matches!(state, RuleState::Backfilling { agreed: true, .. }) {
                fields.insert("removals_agreed", generation + 1);
            }
            // One that is late finds another generation, and cannot undo what was recorded meanwhile.
            let mut unchanged = mine(server, id);
            unchanged.insert("generation", same_generation(generation));
            let reset = rules.update_one(unchanged, doc! {"$set": fields.clone()}).upsert(before.is_none());
            match bounded(reset).await {
                Ok(done) if done.matched_count > 0 || done.upserted_id.is_some() => return Ok(generation + 1),
                Err(error) if error.code != Some(DUPLICATE_KEY) => return Err(error),
                Ok(_) | Err(_) => {}
            }
        }
    }

    /// Blocks a rule until somebody agrees to what its backfill does ([`Store::ask`]). Once agreed to, the same definition of the
    /// rule is not to be blocked again for its effect on existing data ([`RuleRecord::has_agreed`]). Returns the generation of
    /// the block.
    pub async fn block(&self, server: &Server, rule: &Rule, reason: BlockReason) -> Result<i64> {
        self.reset_rule(server, rule, &RuleState::Blocked(reason)).await
    }

    /// Requests a backfill of a rule from the start, from whichever instance leads. A blocked rule is unblocked by it, and what
    /// that does to existing data is agreed to for this definition of the rule. False for a rule that has never run.
    ///
    /// It is bound to the generation that it has read, as the caller need not be the leader: one that is late, after the rule
    /// was blocked once more, would agree to something that nobody has seen.
    pub async fn ask(&self, server: &Server, rule: &str) -> Result<bool> {
        self.ask_all(server, rule, None).await
    }

    /// The same for a rule that is blocked, as long as it is blocked for this reason, which somebody has seen. False when it is
    /// not.
    pub async fn unblock(&self, server: &Server, rule: &str, reason: &BlockReason) -> Result<bool> {
        self.ask_all(server, rule, Some(reason)).await
    }

    async fn ask_all(&self, server: &Server, rule: &str, reason: Option<&BlockReason>) -> Result<bool> {
        let now = Timestamp::from(server.operation_time().await?);
        let mut asked = false;
        for id in self.ids.iter() {
            asked |= self.ask_one(server, doc! {"deployment": id, "rule": rule}, now, reason).await?;
        }
        Ok(asked)
    }

    async fn ask_one(
        &self,
        server: &Server,
        id: Document,
        now: Timestamp,
        reason: Option<&BlockReason>,
    ) -> Result<bool> {
        let state = backfill_from_the_start()?;
        let rules = server.collection(&self.database, RULES);
        loop {
            let Some(seen) = bounded(rules.find_one(doc! {"_id": id.clone()})).await? else { return Ok(false) };
            let (_, seen) = rule_record::read(&seen)?;
            let unchanged = doc! {"_id": id.clone(), "generation": same_generation(seen.generation)};
            // A partition may be blocked for a reason that another one's has hidden.
            if reason.is_some_and(|reason| seen.state.urgency() > RuleState::Blocked(reason.clone()).urgency()) {
                return Ok(false);
            }
            let mut state = state.clone();
            if let RuleState::Blocked(reason) = seen.state {
                state.insert("removals_agreed", seen.generation + 1);
                match reason {
                    // A source that is gone is taken for empty from now on.
                    BlockReason::SourceGone => {
                        state.extend(doc! {"released": now, "source_seen": false, "source_uuid": Bson::Null});
                    }
                    BlockReason::Adoption(_) => drop(state.insert("agreed", seen.definition)),
                    BlockReason::RemovalLimit => {}
                }
            }
            let update = doc! {"$set": state, "$inc": {"generation": 1_i64}};
            if bounded(rules.update_one(unchanged, update)).await?.matched_count > 0 {
                return Ok(true);
            }
        }
    }

    /// Pauses a rule that is not stopped for another reason: once the leader has read this, the rule does nothing, and this state
    /// says that everything missed meanwhile is to be backfilled.
    pub async fn pause(&self, server: &Server, rule: &str, time: Option<Duration>) -> Result<()> {
        let mut state = state_fields(&RuleState::Paused { until: None })?;
        let until = time.map(|time| i64::try_from(time.as_millis()).unwrap_or(i64::MAX));
        // By the server's clock, as the end is looked for.
        let until = until.map_or(Bson::Null, |millis| doc! {"$add": ["$$NOW", millis]}.into());
        state.insert("until", until);
        state.insert("generation", doc! {"$add": [{"$ifNull": ["$generation", 0_i64]}, 1_i64]});
        let mut free = self.of_rule(rule);
        // An unavailable rule would come back by itself; a blocked one stays blocked.
        free.insert("$or", vec![doc! {"backfill": {"$ne": "held"}}, doc! {"paused": true}, doc! {"suspended": true}]);
        let rules = server.collection(&self.database, RULES);
        rules.update_many(free, vec![doc! {"$set": state}]).await?;
        Ok(())
    }

    /// The leader knows of the pause, or of the backfill that was asked for.
    pub async fn notice(&self, server: &Server, rule: &str, generation: i64) -> Result<()> {
        let filter = doc! {"_id": self.id("rule", rule), "generation": generation};
        let rules = server.collection(&self.database, RULES);
        bounded(rules.update_one(filter, doc! {"$set": {"noticed": generation}})).await?;
        Ok(())
    }

    /// Lets a paused rule go on, by a whole backfill; without a name, those whose pause is over. Returns how many.
    pub async fn resume(&self, server: &Server, rule: Option<&str>) -> Result<u64> {
        let mine = doc! {"$in": self.ids.to_vec()};
        let mut paused = doc! {"_id.deployment": mine, "backfill": "held", "paused": true};
        match rule {
            Some(rule) => {
                paused.insert("_id.rule", rule);
            }
            None => {
                let is_date = doc! {"$eq": [{"$type": "$until"}, "date"]};
                paused.insert("$expr", doc! {"$and": [is_date, {"$lte": ["$until", "$$NOW"]}]});
            }
        }
        let update = doc! {"$set": backfill_from_the_start()?, "$inc": {"generation": 1_i64}};
        Ok(server.collection(&self.database, RULES).update_many(paused, update).await?.modified_count)
    }

    /// Lets an unavailable rule run again, by a whole backfill, unless its state has changed since.
    pub async fn come_back(&self, server: &Server, rule: &str, generation: i64) -> Result<()> {
        let mut suspended = mine(server, self.id("rule", rule));
        suspended.extend(doc! {"backfill": "held", "suspended": true, "generation": generation});
        let update = doc! {"$set": backfill_from_the_start()?, "$inc": {"generation": 1_i64}};
        bounded(server.collection(&self.database, RULES).update_one(suspended, update)).await?;
        Ok(())
    }

    /// Which of these rules have run, as they are now. Reads only.
    pub async fn have_run(server: &Server, database: &str, deployment: &str, plan: &Plan) -> Result<BTreeSet<RuleId>> {
        // Its own, and those of its partitions, whose number need not be known here: they are between these two.
        let (first, last) = (format!("{deployment}{SEPARATOR}"), format!("{deployment}{SEPARATOR}~"));
        let mine = vec![doc! {"_id.deployment": deployment}, doc! {"_id.deployment": {"$gte": first, "$lt": last}}];
        let filter = doc! {"$or": mine, "backfill": {"$ne": "absent"}};
        let mut cursor = bounded(server.collection(database, RULES).find(filter)).await?;
        let mut found = BTreeSet::new();
        while let Some(doc) = bounded(cursor.try_next()).await? {
            let (Ok(id), Ok(definition)) = (doc.get_document("_id"), doc.get_document("definition")) else { continue };
            let same = |rule: &&Arc<Rule>| {
                id.get_str("rule").ok() == Some(rule.name.as_str()) && rule.definition == *definition
            };
            found.extend(plan.rules.iter().find(same).map(|rule| rule.id));
        }
        Ok(found)
    }

    /// Remembers that the source collection of a rule is there, and which one. A late write, after an unblock by which an absent
    /// source counts as empty, finds another generation and changes nothing.
    pub async fn source_seen(&self, server: &Server, rule: &str, generation: i64, uuid: &Bson) -> Result<()> {
        let mut filter = mine(server, self.id("rule", rule));
        filter.insert("generation", same_generation(generation));
        let update = doc! {"$set": {"source_seen": true, "source_uuid": uuid.clone()}};
        bounded(server.collection(&self.database, RULES).update_one(filter, update)).await?;
        Ok(())
    }

    /// Remembers that a rule is not in the config, so that it is backfilled when it comes back.
    pub async fn remove(&self, server: &Server, rule: &str) -> Result<()> {
        let state = state_fields(&RuleState::Removed)?;
        server
            .collection(&self.database, RULES)
            .update_one(mine(server, self.id("rule", rule)), doc! {"$set": state})
            .await?;
        Ok(())
    }

    /// Keeps what a rule was, for `denormd prune`.
    pub async fn retire(&self, server: &Server, rule: &str, definition: &Document) -> Result<()> {
        let filter = mine(server, self.id("rule", rule));
        let update = doc! {"$addToSet": {"retired": definition.clone()}};
        server.collection(&self.database, RULES).update_one(filter, update).await?;
        Ok(())
    }

    /// Forgets what a rule was; with `whole`, the rule too. Only what is `known`: a rule that has come back to the config
    /// meanwhile, or was changed again, is another one, also for a request that comes late.
    pub async fn forget(&self, server: &Server, rule: &str, known: &RuleRecord, whole: bool) -> Result<()> {
        let mut filter = self.of_rule(rule);
        filter.insert("definition", known.definition.clone());
        let rules = server.collection(&self.database, RULES);
        if !whole {
            let update = doc! {"$pullAll": {"retired": known.retired.clone()}};
            bounded(rules.update_many(filter, update)).await?;
            return Ok(());
        }
        let seen: Vec<Document> = bounded(rules.find(filter)).await?.try_collect().await?;
        let generations =
            seen.iter().map(|doc| Ok(rule_record::read(doc)?.1.generation)).collect::<Result<Vec<i64>>>()?;
        if generations.iter().sum::<i64>() != known.generation {
            return Ok(());
        }
        for (doc, generation) in seen.iter().zip(generations) {
            let unchanged = doc! {"_id": doc.get("_id").cloned(), "generation": same_generation(generation)};
            bounded(rules.delete_one(unchanged)).await?;
        }
        Ok(())
    }

    /// Saves how far the backfill of this generation is: its place, and how many targets it `(has done, has to do)`. False
    /// when a newer one has been asked for.
    pub async fn save_backfill(
        &self,
        server: &Server,
        rule: &Rule,
        generation: i64,
        state: &RuleState,
        progress: (u64, Option<u64>),
    ) -> Result<bool> {
        let mut filter = mine(server, self.id("rule", &rule.name));
        filter.insert("generation", generation);
        let rules = server.collection(&self.database, RULES);
        let mut state = state_fields(state)?;
        state.insert("progress", progress_field(progress));
        // One that comes late takes the progress back.
        let done = bounded(rules.update_one(filter, doc! {"$set": state})).await?;
        Ok(done.matched_count > 0)
    }
}

/// The document with this `_id`, unless a later leader has marked it. An upsert then finds that it is there all the same.
pub(super) fn mine(server: &Server, id: Document) -> Document {
    doc! {"_id": id, "term": {"$not": {"$gt": server.term()}}}
}

pub(super) fn refused_upsert(error: Error) -> Error {
    if error.code == Some(DUPLICATE_KEY) { former() } else { error }
}

fn former() -> Error {
    Error::new(Kind::Unavailable, "another instance has become the leader")
}

/// A state from before there were generations lacks it.
fn same_generation(generation: i64) -> Bson {
    if generation == 0 { doc! {"$in": [Bson::Null, 0_i64]}.into() } else { generation.into() }
}

fn backfill_from_the_start() -> Result<Document> {
    state_fields(&RuleState::BACKFILL)
}
