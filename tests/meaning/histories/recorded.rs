//! Checks the history of the state: what a deployment must never record.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use bson::{Bson, Timestamp};
use denormd_engine::{
    checkpoint::{fan_out, format, rule_record::RULES, store::POSITIONS},
    dead_letter,
    deployment::lease::{self, GRACE},
};
use denormd_model::{clock::millis, key::Key, partition::Partition, stored_key::loaded};
use denormd_simulated::{FieldHistory, Model};

/// The history of a field in each document of a collection, by `_id` as text, with the `_id` itself.
type Histories = BTreeMap<String, (Bson, FieldHistory)>;

/// A record that is so many seconds old is in what a repartitioning reads. A younger one may have come during its transaction.
const READ_AFTER: u32 = 2;

/// A change of the number of partitions.
#[derive(Clone, Copy)]
struct Repartitioning {
    time: Timestamp,
    from: u32,
    to: u32,
}

/// The histories of the state.
struct Recorded {
    positions: Histories,
    rules: Histories,
    fan_outs: Histories,
    circles: Histories,
}

/// Returns an error if the state has recorded something that it must never record.
pub fn check(model: &Model, state: &str) -> Result<(), String> {
    let histories = |collection, field| model.field_histories(state, collection, field);
    let recorded = Recorded {
        positions: histories(POSITIONS, "time"),
        rules: histories(RULES, "backfill"),
        fan_outs: histories(fan_out::COLLECTION, "term"),
        circles: histories(dead_letter::COLLECTION, "circle"),
    };
    let repartitionings = repartitionings(&histories(format::COLLECTION, "partitions"));
    leases_were_free(model, state, &repartitionings)?;
    recorded.backfills_wait_for_all_partitions()?;
    for repartitioning in repartitionings {
        recorded.new_partitions_skip_nothing(repartitioning)?;
        recorded.open_work_is_repeated(repartitioning)?;
        recorded.circles_concern_all_owners(repartitioning)?;
    }
    Ok(())
}

fn repartitionings(numbers: &Histories) -> Vec<Repartitioning> {
    let number = |value: &Option<Bson>| {
        let number = value.as_ref().and_then(Bson::as_i32).and_then(|number| u32::try_from(number).ok());
        number.unwrap_or(1)
    };
    let changes = numbers.values().flat_map(|(_, values)| values.windows(2));
    let changes = changes.map(|pair| (pair[1].0, number(&pair[0].1), number(&pair[1].1)));
    let changes = changes.filter(|(_, from, to)| from != to);
    changes.map(|(time, from, to)| Repartitioning { time, from, to }).collect()
}

/// Number of partitions of the deployment, from the id of one of them: `default#0/2` is the first of two.
fn partitions_of(id: &str) -> u32 {
    id.split_once('/').and_then(|(_, of)| of.parse().ok()).unwrap_or(1)
}

/// A text field of an `_id`; empty if it is missing.
fn id_field<'a>(id: &'a Bson, name: &str) -> &'a str {
    id.as_document().and_then(|id| id.get_str(name).ok()).unwrap_or_default()
}

/// The value before a time.
fn before(values: &FieldHistory, time: Timestamp) -> Option<&Bson> {
    values.iter().rev().find(|(at, _)| *at < time)?.1.as_ref()
}

/// The same, if a transaction that ends at that time has read it.
fn read_before(values: &FieldHistory, time: Timestamp) -> Option<&Bson> {
    let (at, value) = values.iter().rev().find(|(at, _)| *at < time)?;
    value.as_ref().filter(|_| at.time + READ_AFTER <= time.time)
}

/// The value that was set at a time.
fn set_at(values: &FieldHistory, time: Timestamp) -> Option<&Bson> {
    values.iter().rev().find(|(at, _)| *at == time)?.1.as_ref()
}

/// Fails if an instance took a lease, or a repartitioning ended one, before the lease was free.
fn leases_were_free(model: &Model, state: &str, repartitionings: &[Repartitioning]) -> Result<(), String> {
    let histories = |field| model.field_histories(state, lease::COLLECTION, field);
    let (untils, ends, takens) = (histories("until"), histories("cluster_until"), histories("taken"));
    let date = |histories: &Histories, id: &str, nth: usize| {
        Some(histories.get(id)?.1.get(nth)?.1.as_ref()?.as_datetime()?.timestamp_millis())
    };
    for (id, (lease, owners)) in histories("owner") {
        let partitions = partitions_of(lease.as_str().unwrap_or_default());
        let owner = |nth: usize| owners[nth].1.as_ref().and_then(Bson::as_str);
        for (nth, (time, _)) in owners.iter().enumerate().skip(1) {
            // A repartitioning also ends the leases of the new partitions, even if they are held: the next leaders have later terms.
            let is_ended = || repartitionings.iter().any(|one| one.time == *time && one.from == partitions);
            let now = match (owner(nth - 1), owner(nth)) {
                (Some(former), Some(other)) if other != former => date(&takens, &id, nth),
                (Some(_), None) if is_ended() => date(&untils, &id, nth),
                _ => None,
            };
            let (Some(now), Some(until)) = (now, date(&untils, &id, nth - 1)) else { continue };
            // The server compares with the later of its clock and the cluster time.
            let latest = now.max(i64::from(time.time) * 1000);
            let end = date(&ends, &id, nth - 1).unwrap_or_default();
            if now < until + millis(GRACE) || latest < end + millis(GRACE) {
                return Err(format!(
                    "the lease {id}, valid until {until} and by cluster time until {end}, was taken at {now}, cluster time {latest}"
                ));
            }
        }
    }
    Ok(())
}

impl Recorded {
    /// Fails if a backfill ended in one partition before all partitions had registered the rule.
    fn backfills_wait_for_all_partitions(&self) -> Result<(), String> {
        let mut partitions: BTreeMap<(&str, u32), Vec<&FieldHistory>> = BTreeMap::new();
        for (id, values) in self.rules.values() {
            let of = partitions_of(id_field(id, "deployment"));
            partitions.entry((id_field(id, "rule"), of)).or_default().push(values);
        }
        for ((rule, of), records) in partitions {
            let is_done = |value: &Option<Bson>| value.as_ref().and_then(Bson::as_str) == Some("done");
            let times = records.iter().flat_map(|values| values.iter().filter(|(_, value)| is_done(value)));
            for time in times.map(|(time, _)| *time) {
                let is_registered = |values: &&&FieldHistory| {
                    values.iter().rev().find(|(at, _)| *at <= time).is_some_and(|(_, value)| value.is_some())
                };
                let count = records.iter().filter(is_registered).count();
                if count < of as usize {
                    return Err(format!(
                        "`{rule}` is done at {time}, but only {count} of {of} partitions have registered it"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Fails if a new partition starts after the checkpoint of an old one.
    fn new_partitions_skip_nothing(&self, Repartitioning { time, from, to }: Repartitioning) -> Result<(), String> {
        let of_number = |number| {
            let positions = self.positions.values();
            positions.filter(move |(id, _)| partitions_of(id_field(id, "deployment")) == number)
        };
        for (id, values) in of_number(to) {
            let Some(start) = set_at(values, time).and_then(Bson::as_timestamp) else { continue };
            let same = of_number(from).filter(|(old, _)| id_field(old, "stream") == id_field(id, "stream"));
            let earliest = same.filter_map(|(_, values)| before(values, time)?.as_timestamp()).min();
            if earliest.is_none_or(|earliest| start > earliest) {
                return Err(format!("{id} starts at {start}, and an old partition was at {earliest:?}"));
            }
        }
        Ok(())
    }

    /// Fails if a rule counts as done in the new partitions although an old partition had not registered it, or had an open
    /// fan-out job for it that no new partition has.
    fn open_work_is_repeated(&self, Repartitioning { time, from, to }: Repartitioning) -> Result<(), String> {
        let is_of = |id: &Bson, number| partitions_of(id_field(id, "deployment")) == number;
        let is_open = |(id, values): &&(Bson, FieldHistory)| is_of(id, from) && read_before(values, time).is_some();
        let subject = |id: &Bson| {
            let id = id.as_document()?;
            Some((
                id.get_str("rule").ok()?.to_owned(),
                id.get_str("task").ok()?.to_owned(),
                loaded(id.get_array("key").ok()?),
            ))
        };
        let goes_on = |(id, values): &&(Bson, FieldHistory)| is_of(id, to) && set_at(values, time).is_some();
        let carried: HashSet<_> = self.fan_outs.values().filter(goes_on).filter_map(|(id, _)| subject(id)).collect();
        let is_lost = |(id, _): &&(Bson, FieldHistory)| subject(id).is_some_and(|subject| !carried.contains(&subject));
        let lost = self.fan_outs.values().filter(is_open).filter(is_lost);
        let open: BTreeSet<&str> = lost.map(|(id, _)| id_field(id, "rule")).collect();
        for (id, values) in self.rules.values().filter(|(id, _)| is_of(id, to)) {
            let rule = id_field(id, "rule");
            let old = self.rules.values().filter(|(old, values)| {
                id_field(old, "rule") == rule && is_of(old, from) && before(values, time).is_some()
            });
            let known = old.count();
            let has_more = open.contains(rule) || known < from as usize;
            if has_more && set_at(values, time).and_then(Bson::as_str) == Some("done") {
                return Err(format!("{id} is done, and {known} of {from} partitions knew it; open: {open:?}"));
            }
        }
        Ok(())
    }

    /// Fails if a new partition owns a member of a circle and has no dead letter for that circle.
    fn circles_concern_all_owners(&self, Repartitioning { time, from, to }: Repartitioning) -> Result<(), String> {
        let key = |id: &Bson| -> Option<Key> { Some(loaded(id.as_document()?.get_array("key").ok()?)) };
        for (id, values) in self.circles.values() {
            let deployment = id_field(id, "deployment");
            let Some(circle) = read_before(values, time).and_then(Bson::as_array) else { continue };
            if partitions_of(deployment) != from {
                continue;
            }
            let rule = id_field(id, "rule");
            let members: Vec<Key> = circle.iter().filter_map(Bson::as_array).map(|key| loaded(key)).collect();
            for partition in Partition::all(to).filter(|one| members.iter().any(|member| one.owns(rule, member))) {
                // The name of a deployment has no `#`.
                let new = partition.id(deployment.split('#').next().unwrap_or_default());
                let is_same = |(other, values): &(Bson, FieldHistory)| {
                    set_at(values, time).is_some()
                        && (id_field(other, "deployment"), id_field(other, "rule")) == (new.as_str(), rule)
                        && key(other) == key(id)
                };
                if !self.circles.values().any(is_same) {
                    return Err(format!("{new} has no dead letter of {circle:?} for `{rule}`"));
                }
            }
        }
        Ok(())
    }
}
