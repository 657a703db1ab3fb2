//! Repartitioning: the change of a deployment's number of partitions.
//!
//! One transaction in the state database changes the number. It ends all leases of the old partitions, and only commits while none
//! of them is held: from then on no write of an old leader takes effect. The new partitions start at the earliest
//! checkpoint of the old ones, and repeat what the others had done beyond it. Open fan-out jobs and dead letters go to
//! the partitions that own their keys. If there are too many of them, all rules are backfilled instead, and the new leaders delete the old
//! dead letters ([`crate::dead_letter::DeadLetters::retain`]). A rule whose backfill was not complete in all of them is backfilled. The
//! leases of the old partitions remain, so that their terms continue if the number is changed back.
//!
//! Before that transaction, short ones delete the dead letters that are left from an earlier time with the new number.

use std::{cmp::Reverse, collections::BTreeMap, time::Duration};

use bson::{Bson, DateTime, Document, Timestamp, doc};
use futures_util::TryStreamExt;
use mongodb::{
    ClientSession, Collection,
    options::{ReadConcern, ReturnDocument, WriteConcern},
};

use crate::{
    checkpoint::{
        fan_out, format,
        requests::REQUESTS,
        rule_record::{self, Id, RULES, RuleRecord},
        store::{POSITIONS, highest_term},
        unreadable,
    },
    dead_letter,
    deployment::lease,
    request::Task,
};
use denormd_model::{clock::millis, key::Key, partition::Partition, stored_key::loaded};
use denormd_mongo::{
    Server, bounded, code,
    error::{Error, Result},
    unless,
};

/// The most fan-out jobs and dead letters that are carried over, counted in each new partition. If there are more, all rules
/// are backfilled instead, which does the work of the jobs and finds the dead letters again.
const MOST_CARRIED: usize = 10_000;
/// Maximum number of leftover dead letters that one transaction deletes before the number changes.
const CLEARED: i64 = 1000;
/// Time limit for each transaction.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Divides a deployment into `of` partitions. Returns false while the old partitions have leaders. A leader whose lease
/// was deleted counts as alive for the duration of a lease (`ttl`).
pub async fn divide(server: &Server, database: &str, deployment: &str, of: u32, ttl: Duration) -> Result<bool> {
    let from = format::check(server, database, deployment).await?;
    if from == of {
        return Ok(true);
    }
    let repartitioning = Repartitioning {
        server,
        database,
        deployment,
        from,
        old: Partition::all(from).map(|partition| partition.id(deployment)).collect(),
        new: Partition::all(of).collect(),
    };
    for name in [
        POSITIONS,
        RULES,
        fan_out::COLLECTION,
        dead_letter::COLLECTION,
        lease::COLLECTION,
        REQUESTS,
        format::COLLECTION,
    ] {
        unless(code::NAMESPACE_EXISTS, server.database(database).create_collection(name).await)?;
    }
    repartitioning.suspect_leaders(ttl).await?;
    while repartitioning.has_leftovers().await? {
        let transaction = async {
            let mut session = repartitioning.begin().await?;
            let cleared = repartitioning.clear_some(&mut session).await?;
            ended(&mut session, cleared).await
        };
        if !in_time(transaction).await? {
            return Ok(false);
        }
    }
    let transaction = async {
        let mut session = repartitioning.begin().await?;
        let changed = repartitioning.change(&mut session).await?;
        ended(&mut session, changed).await
    };
    let changed = in_time(transaction).await?;
    if changed {
        tracing::info!(from, to = of, "the deployment is repartitioned");
    }
    Ok(changed)
}

/// The result of a transaction, or an error after [`TIMEOUT`]: a frozen server never answers.
async fn in_time(transaction: impl Future<Output = Result<bool>>) -> Result<bool> {
    let result = tokio::time::timeout(TIMEOUT, Box::pin(transaction)).await;
    result.unwrap_or_else(|_| Err(Error::internal("the partitions could not be changed in time")))
}

/// Commits the transaction if `changed`, and aborts it otherwise. Returns `changed`.
async fn ended(session: &mut ClientSession, changed: bool) -> Result<bool> {
    if changed {
        session.commit_transaction().await?;
    } else {
        session.abort_transaction().await?;
    }
    Ok(changed)
}

struct Repartitioning<'a> {
    server: &'a Server,
    database: &'a str,
    deployment: &'a str,
    /// The old number of partitions.
    from: u32,
    old: Vec<String>,
    new: Vec<Partition>,
}

/// State of the old partitions that is carried over.
#[derive(Debug, Default)]
struct Kept {
    rules: Vec<Document>,
    positions: Vec<Document>,
    fan_outs: Vec<Document>,
    dead_letters: Vec<Document>,
}

impl Kept {
    /// True if there are few enough fan-out jobs and dead letters for one transaction.
    fn can_be_carried(&self, to: &[Partition]) -> bool {
        let carried = |work: &[Document]| to.iter().map(|new| carried(*new, work).count()).sum::<usize>();
        // No more than that many were read.
        let is_complete = self.fan_outs.len() <= MOST_CARRIED && self.dead_letters.len() <= MOST_CARRIED;
        is_complete && carried(&self.fan_outs) + carried(&self.dead_letters) <= MOST_CARRIED
    }
}

impl Repartitioning<'_> {
    fn collection(&self, name: &str) -> Collection<Document> {
        // Operations of a transaction must not set read or write concerns of their own.
        self.server.database(self.database).collection(name)
    }

    /// Marks the leases of partitions that have state but no lease: they may have a leader that has not noticed yet.
    async fn suspect_leaders(&self, ttl: Duration) -> Result<()> {
        let ttl = millis(ttl);
        for id in &self.old {
            if highest_term(self.server, self.database, id).await? == 0 {
                continue;
            }
            let state = doc! {"owner": "unknown", "until": {"$add": ["$$NOW", ttl]}, "term": 0_i64};
            let missing = doc! {"_id": id, "term": {"$exists": false}};
            let leases = self.server.collection(self.database, lease::COLLECTION);
            let marked = leases.update_one(missing, vec![doc! {"$set": state}]).upsert(true).await;
            unless(code::DUPLICATE_KEY, marked)?;
        }
        Ok(())
    }

    async fn begin(&self) -> Result<ClientSession> {
        let mut session = self.server.client().start_session().await?;
        let options = session.start_transaction().read_concern(ReadConcern::snapshot());
        options.write_concern(WriteConcern::majority()).await?;
        Ok(session)
    }

    /// Filter for the dead letters of the new partitions, left from an earlier time with the same number.
    fn leftovers(&self) -> Document {
        let new: Vec<String> = self.new.iter().map(|partition| partition.id(self.deployment)).collect();
        doc! {"_id.deployment": {"$in": new}}
    }

    async fn has_leftovers(&self) -> Result<bool> {
        let dead_letters = self.server.collection(self.database, dead_letter::COLLECTION);
        Ok(bounded(dead_letters.find_one(self.leftovers())).await?.is_some())
    }

    /// Deletes up to [`CLEARED`] leftovers. Returns false if another instance has changed the number: the dead letters may then belong to
    /// its leaders.
    async fn clear_some(&self, session: &mut ClientSession) -> Result<bool> {
        let now = format::of_number(self.deployment, number(self.from));
        // This write conflicts with that of another instance that changes the number, so only one of the two commits.
        let mark = doc! {"$currentDate": {"cleared": true}};
        if self.collection(format::COLLECTION).update_one(now, mark).session(&mut *session).await?.matched_count == 0 {
            return Ok(false);
        }
        let dead_letters = self.collection(dead_letter::COLLECTION);
        let found = dead_letters.find(self.leftovers()).projection(doc! {"_id": 1}).limit(CLEARED);
        let mut found = found.session(&mut *session).await?;
        let found: Vec<Document> = found.stream(&mut *session).try_collect().await?;
        let ids: Vec<&Bson> = found.iter().filter_map(|document| document.get("_id")).collect();
        dead_letters.delete_many(doc! {"_id": {"$in": ids}}).session(&mut *session).await?;
        Ok(true)
    }

    async fn change(&self, session: &mut ClientSession) -> Result<bool> {
        if !self.end_leases(session).await? || !self.change_number(session).await? {
            return Ok(false);
        }
        let kept = self.read(session).await?;
        let new: Vec<String> = self.new.iter().map(|partition| partition.id(self.deployment)).collect();
        let with_work = kept.can_be_carried(&self.new);
        for name in [POSITIONS, RULES, fan_out::COLLECTION, dead_letter::COLLECTION] {
            // Deleting hundreds of thousands could exceed the transaction's time limit.
            let stays = name == dead_letter::COLLECTION && !with_work;
            let old = self.old.iter().filter(|_| !stays);
            let gone = doc! {"_id.deployment": {"$in": old.chain(&new).cloned().collect::<Vec<_>>()}};
            self.collection(name).delete_many(gone).session(&mut *session).await?;
        }
        let refused = doc! {"$set": {"refused": "the number of partitions has changed meanwhile: ask again"}};
        let asked = doc! {"deployment": {"$in": &self.old}};
        self.collection(REQUESTS).update_many(asked, refused).session(&mut *session).await?;
        let rules = joined(&kept.rules, self.old.len(), with_work)?;
        let positions = positions(&kept.positions, self.old.len())?;
        for partition in &self.new {
            let id = partition.id(self.deployment);
            let term = self.free_lease(session, &id).await?;
            let of_rules = rules.iter().map(|(rule, record)| {
                rule_record::document(Id { deployment: id.clone(), rule: rule.clone() }, record, term)
            });
            self.insert(session, RULES, of_rules.collect::<Result<_>>()?).await?;
            let of_positions = positions.iter().map(|position| renamed(position, &id, term)).collect();
            self.insert(session, POSITIONS, of_positions).await?;
            if with_work {
                let jobs = carried(*partition, &kept.fan_outs).map(|job| from_the_first(&renamed(job, &id, term)));
                self.insert(session, fan_out::COLLECTION, jobs.collect()).await?;
                // Dead letters have no term.
                let dead_letters = carried(*partition, &kept.dead_letters).map(|dead_letter| moved(dead_letter, &id));
                self.insert(session, dead_letter::COLLECTION, dead_letters.collect()).await?;
            }
        }
        Ok(true)
    }

    /// Returns false if another instance has changed the number since it was read. The old partitions then have no
    /// state left, and it must not replace that of the new ones.
    async fn change_number(&self, session: &mut ClientSession) -> Result<bool> {
        let old = format::of_number(self.deployment, number(self.from));
        let update = format::divided(number(u32::try_from(self.new.len()).unwrap_or(u32::MAX)));
        let changed = self.collection(format::COLLECTION).update_one(old, update).session(&mut *session).await?;
        Ok(changed.matched_count > 0)
    }

    /// Ends the leases of the old partitions. False when one of them is held.
    async fn end_leases(&self, session: &mut ClientSession) -> Result<bool> {
        let leases = self.collection(lease::COLLECTION);
        for id in &self.old {
            let free = doc! {"_id": id, "$expr": lease::is_free()};
            let ended = leases.update_one(free, vec![given_back()]).session(&mut *session).await?;
            if ended.matched_count == 0 && leases.find_one(doc! {"_id": id}).session(&mut *session).await?.is_some() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Creates the lease of a new partition, or ends an existing one; returns its term.
    async fn free_lease(&self, session: &mut ClientSession, id: &str) -> Result<i64> {
        let leases = self.collection(lease::COLLECTION);
        let lease = leases.find_one_and_update(doc! {"_id": id}, vec![given_back()]).upsert(true);
        let lease = lease.return_document(ReturnDocument::After).session(&mut *session).await?;
        lease.as_ref().map_or(Ok(1), lease::term_of)
    }

    async fn read(&self, session: &mut ClientSession) -> Result<Kept> {
        let mut kept = Kept::default();
        for (name, into) in [
            (RULES, &mut kept.rules),
            (POSITIONS, &mut kept.positions),
            (fan_out::COLLECTION, &mut kept.fan_outs),
            (dead_letter::COLLECTION, &mut kept.dead_letters),
        ] {
            let is_limited = name == dead_letter::COLLECTION || name == fan_out::COLLECTION;
            let limit = if is_limited { i64::try_from(MOST_CARRIED + 1).unwrap_or(i64::MAX) } else { 0 };
            let old = doc! {"_id.deployment": {"$in": &self.old}};
            let mut cursor = self.collection(name).find(old).limit(limit).session(&mut *session).await?;
            *into = cursor.stream(&mut *session).try_collect().await?;
        }
        Ok(kept)
    }

    async fn insert(&self, session: &mut ClientSession, name: &str, documents: Vec<Document>) -> Result<()> {
        if !documents.is_empty() {
            self.collection(name).insert_many(documents).session(&mut *session).await?;
        }
        Ok(())
    }
}

fn number(partitions: u32) -> i32 {
    i32::try_from(partitions).unwrap_or(i32::MAX)
}

/// A text field of the `_id`.
fn part<'a>(doc: &'a Document, name: &str) -> Option<&'a str> {
    doc.get_document("_id").ok()?.get_str(name).ok()
}

fn given_back() -> Document {
    let term = doc! {"$add": [{"$ifNull": ["$term", 0_i64]}, 1_i64]};
    doc! {"$set": {"owner": Bson::Null, "until": "$$NOW", "term": term}}
}

/// The records of `old` partitions merged into one for each rule. A rule restarts if it is not complete in all of them,
/// or if their open work is not carried over (`with_work`).
fn joined(documents: &[Document], old: usize, with_work: bool) -> Result<BTreeMap<String, RuleRecord>> {
    let mut by_rule: BTreeMap<String, Vec<RuleRecord>> = BTreeMap::new();
    for document in documents {
        let (id, record) = rule_record::read(document)?;
        by_rule.entry(id.rule).or_default().push(record);
    }
    let joined = by_rule.into_iter().filter_map(|(rule, records)| {
        let is_whole = records.len() == old && with_work;
        Some((rule, RuleRecord::of_new_partitions(records, is_whole)?))
    });
    Ok(joined.collect())
}

/// For each stream that all `old` partitions have followed in this cluster: the earliest checkpoint. Given as a time,
/// because a resume token belongs to one stream.
fn positions(positions: &[Document], old: usize) -> Result<Vec<Document>> {
    let mut by_stream: BTreeMap<&str, Vec<(Timestamp, &Document)>> = BTreeMap::new();
    for position in positions.iter().filter(|position| position.contains_key("time")) {
        let unreadable = |why: String| unreadable(POSITIONS, position, &why);
        let stream = part(position, "stream").ok_or_else(|| unreadable("it names no stream".to_owned()))?;
        let time = position.get_timestamp("time").map_err(|error| unreadable(error.to_string()))?;
        by_stream.entry(stream).or_default().push((time, position));
    }
    let last = |positions: Vec<(Timestamp, &Document)>| {
        let cluster = positions.first()?.1.get("cluster");
        let whole = positions.len() == old && positions.iter().all(|(_, position)| position.get("cluster") == cluster);
        let mut last = positions.iter().min_by_key(|(time, _)| *time)?.1.clone();
        last.extend(doc! {"token": Bson::Null, "pipeline": []});
        // These effects are of one partition. A partition that was ahead may have changed targets later.
        last.remove("effects");
        whole.then_some(last)
    };
    Ok(by_stream.into_values().filter_map(last).collect())
}

/// The same document for another partition, under that partition's term.
fn renamed(doc: &Document, id: &str, term: i64) -> Document {
    let mut doc = moved(doc, id);
    doc.insert("term", term);
    doc
}

fn moved(doc: &Document, id: &str) -> Document {
    let mut doc = doc.clone();
    if let Ok(parts) = doc.get_document_mut("_id") {
        parts.insert("deployment", id);
    }
    doc
}

/// The fan-out jobs or dead letters that the partition continues, each once: two old partitions may both have one of the
/// same lookup or the same circle. Of two such jobs, the one with the earlier commit time counts.
fn carried(partition: Partition, of_old: &[Document]) -> impl Iterator<Item = &Document> {
    let committed = |work: &&Document| work.get_datetime("committed").copied().unwrap_or(DateTime::MAX);
    let mut concerned: Vec<&Document> = of_old.iter().filter(|work| concerns(partition, work)).collect();
    concerned.sort_by_key(|work| Reverse(committed(work)));
    concerned.into_iter().map(|work| (identity(work), work)).collect::<BTreeMap<_, _>>().into_values()
}

/// A fan-out job without its progress, which is that of an old partition over its own targets.
fn from_the_first(job: &Document) -> Document {
    let mut job = job.clone();
    job.insert("after", Bson::Array(Vec::new()));
    job.remove("in_parts");
    job
}

/// Rule, task, key, target and circle of a dead letter; rule, task and key of a fan-out job. Keys are equal as the
/// server's index on `_id` sees them: 1 and 1.0 are.
fn identity(work: &Document) -> (String, String, Key, Key, Key) {
    let text = |name| part(work, name).unwrap_or_default().to_owned();
    // One that cannot be read is carried over, too.
    let key = |name| match work.get_document("_id").ok().and_then(|id| id.get(name)) {
        Some(Bson::Array(values)) => Key::new(values.clone()),
        other => Key::new(other.cloned().into_iter().collect()),
    };
    (text("rule"), text("task"), key("key"), key("target"), key("circle"))
}

/// True if this partition continues the fan-out job or retries the dead letter.
fn concerns(partition: Partition, work: &Document) -> bool {
    let Ok(id) = work.get_document("_id") else { return false };
    let key = id.get_array("key").ok();
    // Each partition retries its own members of a circle.
    let members = work.get_array("circle").into_iter().flatten().map(Bson::as_array);
    let mut keys = std::iter::once(key).chain(members).map(|key| loaded(key.map(Vec::as_slice).unwrap_or_default()));
    match id.get_str("task").ok().and_then(Task::named) {
        Some(Task::Value | Task::Target) => {
            keys.any(|key| partition.owns(id.get_str("rule").unwrap_or_default(), &key))
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(place: usize, backfill: &str) -> Document {
        doc! {"_id": {"deployment": format!("d#{place}/2"), "rule": "r"}, "definition": {"a": 1}, "backfill": backfill, "generation": 3_i64, "after": [7]}
    }

    /// The document of each rule in a new partition.
    fn joined(states: &[Document], old: usize, with_work: bool) -> Vec<Document> {
        let rules = super::joined(states, old, with_work).unwrap();
        let document = |(rule, record): (String, RuleRecord)| {
            rule_record::document(Id { deployment: "d".to_owned(), rule }, &record, 1).unwrap()
        };
        rules.into_iter().map(document).collect()
    }

    fn backfill(states: &[Document], old: usize, with_work: bool) -> String {
        let rules = joined(states, old, with_work);
        rules[0].get_str("backfill").unwrap().to_owned()
    }

    #[test]
    fn a_rule_is_done_where_all_partitions_have_done_it() {
        let cases = [
            (["done", "done"], "done"),
            (["done", "pending"], "pending"),
            (["done", "manual"], "manual"),
            (["absent", "done"], "absent"),
            (["absent", "pending"], "absent"),
            (["absent", "held"], "held"),
            (["held", "done"], "held"),
        ];
        for (states, expected) in cases {
            let states: Vec<Document> = states.iter().enumerate().map(|(nth, what)| state(nth, what)).collect();
            assert_eq!(backfill(&states, 2, true), expected);
        }
        let both = [state(0, "done"), state(1, "done")];
        assert_eq!(backfill(&both, 3, true), "pending", "the third one has never run");
        assert_eq!(backfill(&both, 2, false), "pending", "there is too much open work");
        for still in ["absent", "manual"] {
            let states = [state(0, still), state(1, still)];
            assert_eq!(backfill(&states, 2, false), still, "nobody has asked for a backfill");
        }
        let error = super::joined(&[state(0, "done"), state(1, "unknown")], 2, true).unwrap_err().message;
        assert!(error.contains("`rules` cannot be read"), "{error}");
        let mut other = state(1, "done");
        other.insert("definition", doc! {"a": 2});
        assert_eq!(backfill(&[state(0, "done"), other], 2, true), "pending", "they have done different rules");
    }

    /// Without its dead letters and jobs, nobody knows which targets the first backfill has passed over: it once overwrote their
    /// values without keeping them.
    #[test]
    fn values_are_kept_from_the_first_target_on_if_open_work_is_not_carried() {
        let passed = |with_work| {
            let mut state = state(0, "pending");
            state.insert("keeping", doc! {"paths": ["a"], "passed": [7]});
            let keeping = joined(&[state], 1, with_work)[0].get_document("keeping").unwrap().clone();
            assert_eq!(keeping.get_array("paths").unwrap().len(), 1);
            keeping.get_array("passed").map_or(0, Vec::len)
        };
        assert_eq!((passed(true), passed(false)), (1, 0));
    }

    /// The backfill that repairs a loss of changes has ended in one partition, and not in the other.
    #[test]
    fn a_loss_in_one_partition_is_one_of_the_rule() {
        let degraded = |place, backfill| {
            let mut state = state(place, backfill);
            state.insert("degraded", true);
            state
        };
        let is_degraded = |states: &[Document]| joined(states, 2, true)[0].get_bool("degraded").ok();
        assert_eq!(is_degraded(&[state(0, "done"), degraded(1, "pending")]), Some(true));
        assert_eq!(is_degraded(&[state(0, "pending"), state(1, "pending")]), None);
    }

    /// Of four partitions with the same lookups each, the last one's own dead letters were not read, and lost.
    #[test]
    fn what_was_not_read_is_not_taken_for_carried() {
        let lookup = doc! {"_id": {"rule": "r", "task": "Holders", "key": [1]}};
        let one: Vec<Partition> = Partition::all(1).collect();
        let kept = |count| Kept { dead_letters: vec![lookup.clone(); count], ..Kept::default() };
        assert!(kept(MOST_CARRIED).can_be_carried(&one));
        assert!(!kept(MOST_CARRIED + 1).can_be_carried(&one));
        let many: Vec<Partition> = Partition::all(2).collect();
        let different = (0..6000).map(|n| doc! {"_id": {"rule": "r", "task": "Holders", "key": [n]}}).collect();
        assert!(
            !Kept { dead_letters: different, ..Kept::default() }.can_be_carried(&many),
            "each of them has them all"
        );
    }

    /// Members of a circle may be owned by different partitions, which see the shared dead letter's key by their own
    /// references.
    #[test]
    fn equal_keys_are_one_dead_letter() {
        let of = |key: bson::Bson| identity(&doc! {"_id": {"rule": "r", "task": "Target", "key": [key], "target": []}});
        assert_eq!(of(6.into()), of(6.0.into()));
        assert_ne!(of(6.into()), of("6".into()));
        let circle = |other: i32| {
            identity(&doc! {"_id": {"rule": "r", "task": "Target", "key": [1], "target": [], "circle": [[1], [other]]}})
        };
        assert_ne!(circle(2), circle(3));
    }

    #[test]
    fn a_circle_concerns_the_partition_of_each_member() {
        let keys = 1..20;
        let owner = |key: i32| Partition::all(3).find(|one| one.owns("r", &Key::one(key.into()))).unwrap();
        let other = keys.clone().find(|key| owner(*key) != owner(1)).unwrap();
        let letter = doc! {"_id": {"rule": "r", "task": "Target", "key": [1]}, "circle": [[1], [other]]};
        let concerned: Vec<Partition> = Partition::all(3).filter(|one| concerns(*one, &letter)).collect();
        assert_eq!(concerned.len(), 2);
        assert!(concerned.contains(&owner(1)) && concerned.contains(&owner(other)));
    }

    #[test]
    fn a_backfill_starts_over() {
        let rules = joined(&[state(0, "pending"), state(1, "done")], 2, true);
        assert_eq!(rules[0].get_array("after").unwrap().len(), 0);
        assert_eq!(rules[0].get_i64("generation").unwrap(), 3);
    }

    /// Values of the other partitions would otherwise be overwritten without being kept, or pruned after an `undo`.
    #[test]
    fn a_backfill_that_starts_over_begins_with_the_targets() {
        let (mut first, second) = (state(0, "done"), state(1, "pending"));
        first.insert("in_sources", true);
        let rule = &joined(&[first, second], 2, true)[0];
        assert_eq!((rule.get_str("backfill").unwrap(), rule.get_bool("in_sources").unwrap()), ("pending", false));
    }

    #[test]
    fn an_agreement_to_removals_ends_unless_every_partition_has_it() {
        let with = |place, backfill, agreed: i64| {
            let mut state = state(place, backfill);
            state.insert("removals_agreed", agreed);
            state
        };
        for (first, second, expected) in [
            (with(0, "pending", 3), with(1, "pending", 3), Some(3)),
            (with(0, "pending", 3), with(1, "pending", 2), None),
            (with(0, "done", 3), with(1, "pending", 3), None),
            (with(0, "held", 3), state(1, "pending"), None),
        ] {
            let rule = &joined(&[first, second], 2, true)[0];
            assert_eq!(rule.get_i64("removals_agreed").ok(), expected, "{rule}");
        }
    }

    /// An unavailable rule resumes by itself, which would end the pause.
    #[test]
    fn a_pause_in_one_partition_is_one_of_the_rule() {
        let with = |place, what: &str| {
            let mut state = state(place, "held");
            state.insert(what, true);
            state
        };
        for (first, second) in [("paused", "suspended"), ("suspended", "paused")] {
            let rule = &joined(&[with(0, first), with(1, second)], 2, true)[0];
            assert_eq!(
                (rule.get_bool("paused").ok(), rule.get_bool("suspended").ok()),
                (Some(true), Some(false)),
                "{rule}"
            );
        }
    }

    #[test]
    fn what_any_partition_keeps_or_has_put_back_is_carried_over() {
        let undone = |path: &str| doc! {"collection": "d.c", "path": path};
        let (mut first, mut second) = (state(0, "pending"), state(1, "pending"));
        first.extend(doc! {"keeping": {"paths": ["a"], "passed": [9]}, "undone": [undone("a")]});
        let blocked = |place, kind, definition: i32| {
            let mut state = state(place, "held");
            state.extend(doc! {"block": {"kind": kind}, "definition": {"a": definition}});
            state
        };
        // One that is blocked for its effect on existing data has written nothing.
        for (first, second, retired) in [
            ("removal_limit", "removal_limit", vec![Bson::from(doc! {"a": 2})]),
            ("removal_limit", "adoption", vec![doc! {"a": 1}.into()]),
            ("adoption", "adoption", vec![]),
        ] {
            let rule = &joined(&[blocked(0, first, 1), blocked(1, second, 2)], 2, true)[0];
            assert_eq!(rule.get_array("retired").unwrap(), &retired, "{first}, {second}");
        }
        second.extend(doc! {"keeping": {"paths": ["a", "b"], "passed": [4]}, "undone": [undone("b"), undone("a")], "definition": {"a": 2}});
        let rule = &joined(&[first.clone(), second], 2, true)[0];
        assert_eq!(rule.get_document("keeping").unwrap(), &doc! {"paths": ["a", "b"], "passed": []});
        assert_eq!(rule.get_array("undone").unwrap(), &[undone("a"), undone("b")].map(Bson::from));
        assert_eq!(rule.get_array("retired").unwrap(), &[doc! {"a": 2}.into()], "what it has written is not forgotten");
        let rule = &joined(&[state(1, "done"), first.clone()], 2, true)[0];
        assert_eq!(rule.get_document("keeping").unwrap(), &doc! {"paths": ["a"], "passed": []});
        let rule = &joined(&[first.clone(), first], 2, true)[0];
        assert_eq!(rule.get_document("keeping").unwrap(), &doc! {"paths": ["a"], "passed": [9]});
    }

    #[test]
    fn what_was_held_for_a_loss_is_not_taken_for_paused() {
        for rest in ["paused", "suspended"] {
            let mut rests = state(0, "held");
            rests.insert(rest, true);
            let rules = joined(&[rests, state(1, "held")], 2, true);
            assert!(!rules[0].get_bool(rest).unwrap_or_default());
        }
    }

    #[test]
    fn a_stream_goes_on_where_the_last_partition_was() {
        let at = |place: usize, time: u32| {
            doc! {
                "_id": {"deployment": format!("d#{place}/2"), "stream": "app"}, "time": Timestamp { time, increment: 1 },
                "token": {"_data": "x"}, "pipeline": [{}], "cluster": 1, "effects": {"at": Timestamp { time, increment: 1 }},
            }
        };
        let both = positions(&[at(0, 9), at(1, 5)], 2).unwrap();
        assert_eq!(both[0].get_timestamp("time").unwrap().time, 5);
        assert_eq!(both[0].get("token"), Some(&Bson::Null));
        assert_eq!(both[0].get("effects"), None, "the other one may have changed targets later");
        assert_eq!(positions(&[at(0, 9)], 2).unwrap(), Vec::<Document>::new(), "one of them has none");
        let mut unreadable = at(1, 5);
        unreadable.insert("time", 5);
        let error = positions(&[at(0, 9), unreadable], 2).unwrap_err().message;
        assert!(error.contains("`positions` cannot be read"), "{error}");
    }
}
