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
};

use super::fan_out;

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

/// What is known of a rule from earlier runs.
#[derive(Debug, Clone, PartialEq)]
pub struct RuleState {
    /// What the rule was.
    pub definition: Document,
    /// What it was before, where that owned something else.
    pub retired: Vec<Document>,
    /// Whether its source collection has been there.
    pub source_seen: bool,
    /// Until when the loss of its source has been released: a drop up to then, met again after a crash, does not hold it again.
    pub released: Option<ClusterTime>,
    /// How far its backfill is.
    pub backfill: Backfill,
    /// How many targets its open backfill has done and has to do, where that is known.
    pub progress: Option<(u64, Option<u64>)>,
    /// The last wish that a leader has taken notice of, of those that it is told.
    pub noticed: i64,
    /// Counts the times that its backfill was asked for: progress of an older one must not overwrite a newer wish.
    pub generation: i64,
}

impl RuleState {
    /// The states of two partitions as one: the one that more has to be done for, and only what both have done.
    fn join(&mut self, other: Self) {
        let other_is_worse = other.backfill.urgency() > self.backfill.urgency();
        // A wish is noticed when every partition has noticed its own.
        self.noticed += other.noticed;
        self.generation += other.generation;
        self.source_seen |= other.source_seen;
        self.released = self.released.max(other.released);
        for definition in other.retired {
            if !self.retired.contains(&definition) {
                self.retired.push(definition);
            }
        }
        // Each goes through all targets: the last one tells how far they are.
        let behind = |progress: &Option<(u64, Option<u64>)>| progress.map(|(done, _)| done);
        if other_is_worse || behind(&other.progress) < behind(&self.progress) {
            self.progress = other.progress;
        }
        if other_is_worse {
            (self.definition, self.backfill) = (other.definition, other.backfill);
        }
    }
}

impl Backfill {
    /// Which of two says more about a rule as a whole.
    fn urgency(&self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Manual => 1,
            Self::Absent => 2,
            Self::Pending(_) => 3,
            Self::Held(hold) if hold.rests() => 4,
            Self::Held(_) => 5,
        }
    }
}

/// How far a rule's backfill is.
#[derive(Debug, Clone, PartialEq)]
pub enum Backfill {
    /// To be done, from the target after this `_id` on (or from the first).
    Pending(Option<Bson>),
    /// Waits for `denormd backfill`.
    Manual,
    /// Done.
    Done,
    /// What the rule would take away is held back until `denormd release`.
    Held(Hold),
    /// The rule was not in the config for a while: what was changed meanwhile is not known.
    Absent,
}

/// Why a rule is held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hold {
    /// In words.
    pub reason: String,
    /// Its source is gone: what copies find all the same is written. Otherwise the rule does nothing.
    pub detached: bool,
    /// An operator has paused it: resumed, it takes nothing away that it would not take away otherwise.
    pub paused: bool,
    /// The cluster lacks something that it needs: it comes back by itself when that is there.
    pub suspended: bool,
}

impl Hold {
    /// The rule does nothing at all, and the backfill that ends this does what it misses. Otherwise what it would take away is
    /// waiting for a release.
    #[must_use]
    pub fn rests(&self) -> bool {
        self.paused || self.suspended
    }
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
    pub async fn rules(&self, server: &Server) -> Result<Vec<(String, RuleState)>> {
        self.found(server, doc! {}).await
    }

    /// The same without definitions, and without what is retired: how the rules stand, which is looked at every second.
    pub async fn standing(&self, server: &Server) -> Result<Vec<(String, RuleState)>> {
        self.found(server, doc! {"definition": 0, "retired": 0}).await
    }

    async fn found(&self, server: &Server, projection: Document) -> Result<Vec<(String, RuleState)>> {
        let mine = doc! {"_id.deployment": {"$in": self.ids.to_vec()}, "definition": {"$type": "object"}};
        let mut cursor = server.collection(&self.database, RULES).find(mine).projection(projection).await?;
        let mut out: Vec<(String, RuleState)> = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        while let Some(mut doc) = cursor.try_next().await? {
            let definition = match doc.remove("definition") {
                Some(Bson::Document(definition)) => definition,
                _ => Document::new(),
            };
            let Ok(id) = doc.get_document("_id") else { continue };
            let backfill = match doc.get_str("backfill").unwrap_or_default() {
                "done" => Backfill::Done,
                "manual" => Backfill::Manual,
                "absent" => Backfill::Absent,
                "held" => Backfill::Held(Hold {
                    reason: doc.get_str("reason").unwrap_or_default().to_owned(),
                    detached: doc.get_bool("detached").unwrap_or_default(),
                    paused: doc.get_bool("paused").unwrap_or_default(),
                    suspended: doc.get_bool("suspended").unwrap_or_default(),
                }),
                _ => Backfill::Pending(doc.get_array("after").ok().and_then(|after| after.first().cloned())),
            };
            let generation = doc.get_i64("generation").unwrap_or_default();
            let retired = doc.get_array("retired").map(Vec::as_slice).unwrap_or_default();
            let retired = retired.iter().filter_map(Bson::as_document).cloned().collect();
            let source_seen = doc.get_bool("source_seen").unwrap_or_default();
            let progress = doc.get_document("progress").ok().and_then(progress);
            let noticed = doc.get_i64("noticed").unwrap_or_default();
            let state = RuleState {
                definition,
                retired,
                source_seen,
                released: doc.get_timestamp("released").ok().map(ClusterTime::from),
                backfill,
                progress,
                noticed,
                generation,
            };
            let name = id.get_str("rule").unwrap_or_default();
            match places.get(name) {
                Some(place) => out[*place].1.join(state),
                None => {
                    places.insert(name.to_owned(), out.len());
                    out.push((name.to_owned(), state));
                }
            }
        }
        Ok(out)
    }

    /// Records what a rule is, and that its backfill is to be done from the start (or waits to be asked for). Returns the
    /// generation of this wish.
    pub async fn reset_rule(&self, server: &Server, rule: &Rule, backfill: &Backfill) -> Result<i64> {
        let mut state = backfill_state(backfill);
        state.insert("definition", rule.definition.clone());
        state.insert("term", server.term());
        let rules = server.collection(&self.database, RULES);
        let update = doc! {"$set": state, "$inc": {"generation": 1_i64}};
        let reset = rules
            .find_one_and_update(mine(server, self.id("rule", &rule.name)), update)
            .upsert(true)
            .return_document(mongodb::options::ReturnDocument::After);
        // One that comes late asks for the backfill again, which is seen when its progress is saved.
        let saved = bounded(reset).await.map_err(refused_upsert)?;
        Ok(saved.and_then(|doc| doc.get_i64("generation").ok()).unwrap_or_default())
    }

    /// Asks the leader, whoever it is, to backfill a rule from the start; releases it where it is held. False for a rule
    /// that has never run.
    ///
    /// It is bound to the generation that it has seen, as whoever asks need not be the leader: one that comes late, after the
    /// rule was held once more, would release what nobody has looked at.
    pub async fn ask(&self, server: &Server, rule: &str) -> Result<bool> {
        // A source that is gone is taken for empty from now on.
        let mut state = backfill_state(&Backfill::Pending(None));
        state.insert("source_seen", false);
        let now = Timestamp::from(server.operation_time().await?);
        let mut asked = false;
        for id in self.ids.iter() {
            asked |= self.ask_one(server, doc! {"deployment": id, "rule": rule}, &state, now).await?;
        }
        Ok(asked)
    }

    async fn ask_one(&self, server: &Server, id: Document, state: &Document, now: Timestamp) -> Result<bool> {
        let rules = server.collection(&self.database, RULES);
        loop {
            let Some(seen) = bounded(rules.find_one(doc! {"_id": id.clone()})).await? else { return Ok(false) };
            let generation = same_generation(seen.get_i64("generation").unwrap_or_default());
            let unchanged = doc! {"_id": id.clone(), "generation": generation};
            let mut state = state.clone();
            if seen.get_bool("detached").unwrap_or_default() {
                state.insert("released", now);
            }
            let update = doc! {"$set": state, "$inc": {"generation": 1_i64}};
            if bounded(rules.update_one(unchanged, update)).await?.matched_count > 0 {
                return Ok(true);
            }
        }
    }

    /// Pauses a rule that is not held for another reason: from the moment that the leader sees it, the rule does nothing, and
    /// this state is what says that everything missed meanwhile is to be backfilled.
    pub async fn pause(&self, server: &Server, rule: &str, time: Option<Duration>) -> Result<()> {
        let hold = Hold { reason: "paused by an operator".to_owned(), detached: false, paused: true, suspended: false };
        let mut state = backfill_state(&Backfill::Held(hold));
        let until = time.map(|time| i64::try_from(time.as_millis()).unwrap_or(i64::MAX));
        // By the server's clock, as the end is looked for.
        let until = until.map_or(Bson::Null, |millis| doc! {"$add": ["$$NOW", millis]}.into());
        state.insert("until", until);
        state.insert("generation", doc! {"$add": [{"$ifNull": ["$generation", 0_i64]}, 1_i64]});
        let mut free = self.of_rule(rule);
        free.insert("$or", vec![doc! {"backfill": {"$ne": "held"}}, doc! {"paused": true}]);
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
        let mut state = backfill_state(&Backfill::Pending(None));
        state.insert("until", Bson::Null);
        let update = doc! {"$set": state, "$inc": {"generation": 1_i64}};
        Ok(server.collection(&self.database, RULES).update_many(paused, update).await?.modified_count)
    }

    /// Lets a suspended rule come back, by a whole backfill, unless it is another hold by now.
    pub async fn come_back(&self, server: &Server, rule: &str, generation: i64) -> Result<()> {
        let mut suspended = mine(server, self.id("rule", rule));
        suspended.extend(doc! {"backfill": "held", "suspended": true, "generation": generation});
        let update = doc! {"$set": backfill_state(&Backfill::Pending(None)), "$inc": {"generation": 1_i64}};
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

    /// Remembers that the source collection of a rule is there. One that comes late, after a release by which an absent source
    /// counts as empty, finds another generation and changes nothing.
    pub async fn source_seen(&self, server: &Server, rule: &str, generation: i64) -> Result<()> {
        let mut filter = mine(server, self.id("rule", rule));
        filter.insert("generation", same_generation(generation));
        let update = doc! {"$set": {"source_seen": true}};
        bounded(server.collection(&self.database, RULES).update_one(filter, update)).await?;
        Ok(())
    }

    /// Remembers that a rule is not in the config, so that it is backfilled when it comes back.
    pub async fn absent(&self, server: &Server, rule: &str) -> Result<()> {
        let state = backfill_state(&Backfill::Absent);
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
    pub async fn forget(&self, server: &Server, rule: &str, known: &RuleState, whole: bool) -> Result<()> {
        let mut filter = self.of_rule(rule);
        filter.insert("definition", known.definition.clone());
        let rules = server.collection(&self.database, RULES);
        if !whole {
            let update = doc! {"$pullAll": {"retired": known.retired.clone()}};
            bounded(rules.update_many(filter, update)).await?;
            return Ok(());
        }
        let seen: Vec<Document> = bounded(rules.find(filter)).await?.try_collect().await?;
        let generations = seen.iter().map(|doc| doc.get_i64("generation").unwrap_or_default());
        if generations.clone().sum::<i64>() != known.generation {
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
        backfill: &Backfill,
        progress: (u64, Option<u64>),
    ) -> Result<bool> {
        let mut filter = mine(server, self.id("rule", &rule.name));
        filter.insert("generation", generation);
        let rules = server.collection(&self.database, RULES);
        let mut state = backfill_state(backfill);
        let (done, expected) = (count(progress.0), progress.1.map(count));
        state.insert("progress", doc! {"done": done, "expected": expected});
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

fn backfill_state(backfill: &Backfill) -> Document {
    let (state, after) = match backfill {
        Backfill::Pending(after) => ("pending", after.clone().map_or_else(Vec::new, |id| vec![id])),
        Backfill::Manual => ("manual", Vec::new()),
        Backfill::Done => ("done", Vec::new()),
        Backfill::Held(_) => ("held", Vec::new()),
        Backfill::Absent => ("absent", Vec::new()),
    };
    let hold = match backfill {
        Backfill::Held(hold) => Some(hold),
        Backfill::Pending(_) | Backfill::Manual | Backfill::Done | Backfill::Absent => None,
    };
    doc! {
        "backfill": state, "after": after, "reason": hold.map(|hold| hold.reason.as_str()),
        "detached": hold.map(|hold| hold.detached), "paused": hold.map(|hold| hold.paused),
        "suspended": hold.map(|hold| hold.suspended), "progress": Bson::Null, "saved": DateTime::now(),
    }
}

fn count(targets: u64) -> i64 {
    i64::try_from(targets).unwrap_or(i64::MAX)
}

fn progress(doc: &Document) -> Option<(u64, Option<u64>)> {
    let number = |name: &str| u64::try_from(doc.get_i64(name).ok()?).ok();
    Some((number("done")?, number("expected")))
}
