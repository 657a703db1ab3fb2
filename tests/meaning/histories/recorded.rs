//! What the state of a simulated deployment must never have recorded, from the history of its documents.

use std::collections::{BTreeMap, BTreeSet};

use bson::{Bson, Timestamp};
use denormd_engine::{
    checkpoint::{fan_out, format, rule_record::RULES, store::POSITIONS},
    dead_letter,
    deployment::lease::{self, GRACE},
};
use denormd_model::{clock::millis, key::Key, partition::Partition, stored_key::loaded};
use denormd_simulated::{Model, Timed};

/// The history of a field, by `_id`.
type Histories = BTreeMap<String, (Bson, Timed)>;

/// A change of the number of partitions.
struct Repartition {
    time: Timestamp,
    from: u32,
    to: u32,
}

/// Fails if the state has recorded what it never must.
pub fn is_right(model: &Model, state: &str) -> Result<(), String> {
    let repartitions = repartitions(model, state);
    leases_are_waited_for(model, state, &repartitions)?;
    all_partitions_know_what_is_done(model, state)?;
    for repartition in &repartitions {
        no_position_passes_another(model, state, repartition)?;
        no_open_rule_is_done(model, state, repartition)?;
        circles_concern_all_owners(model, state, repartition)?;
    }
    Ok(())
}

fn repartitions(model: &Model, state: &str) -> Vec<Repartition> {
    let number = |value: &Option<Bson>| {
        let number = value.as_ref().and_then(Bson::as_i32).and_then(|number| u32::try_from(number).ok());
        number.unwrap_or(1)
    };
    let histories = model.timed(state, format::COLLECTION, "partitions").into_values();
    let changes = histories.flat_map(|(_, values)| {
        let changes = values.windows(2).map(|pair| (pair[1].0, number(&pair[0].1), number(&pair[1].1)));
        changes.filter(|(_, from, to)| from != to).collect::<Vec<_>>()
    });
    changes.map(|(time, from, to)| Repartition { time, from, to }).collect()
}

/// The number of partitions of a deployment with one of these, by its id: `default#0/2` is the first one of two.
fn of(id: &str) -> u32 {
    id.split_once('/').and_then(|(_, of)| of.parse().ok()).unwrap_or(1)
}

/// A text field of an `_id`.
fn part<'a>(id: &'a Bson, name: &str) -> &'a str {
    id.as_document().and_then(|id| id.get_str(name).ok()).unwrap_or_default()
}

/// The value before a time.
fn before(values: &Timed, time: Timestamp) -> Option<&Bson> {
    values.iter().rev().find(|(at, _)| *at < time)?.1.as_ref()
}

/// The value that was set at a time.
fn set_at(values: &Timed, time: Timestamp) -> Option<&Bson> {
    values.iter().rev().find(|(at, _)| *at == time)?.1.as_ref()
}

/// Fails if an instance has replaced the owner of a lease, or a repartition has ended it, before it was free.
fn leases_are_waited_for(model: &Model, state: &str, repartitions: &[Repartition]) -> Result<(), String> {
    let field = |name: &str| model.timed(state, lease::COLLECTION, name);
    let (untils, ends, takens) = (field("until"), field("cluster_until"), field("taken"));
    let date = |histories: &Histories, id: &str, nth: usize| {
        Some(histories.get(id)?.1.get(nth)?.1.as_ref()?.as_datetime()?.timestamp_millis())
    };
    for (id, (lease, owners)) in field("owner") {
        let partitions = of(lease.as_str().unwrap_or_default());
        let owner = |nth: usize| owners[nth].1.as_ref().and_then(Bson::as_str);
        for nth in 1..owners.len() {
            let time = owners[nth].0;
            // Leases of the new partitions end in any case: their terms have a gap.
            let is_repartition = || repartitions.iter().any(|one| one.time == time && one.from == partitions);
            let now = match (owner(nth - 1), owner(nth)) {
                (Some(former), Some(other)) if other != former => date(&takens, &id, nth),
                (Some(_), None) if is_repartition() => date(&untils, &id, nth),
                _ => None,
            };
            let (Some(now), Some(until)) = (now, date(&untils, &id, nth - 1)) else { continue };
            // The cluster time of the change is the one that the instance saw, or the server's clock.
            let latest = now.max(i64::from(time.time) * 1000);
            let end = date(&ends, &id, nth - 1).unwrap_or_default();
            if now < until + millis(GRACE) || latest < end + millis(GRACE) {
                return Err(format!("the lease {id} until {until}, {end} is ended at {now}, {latest}"));
            }
        }
    }
    Ok(())
}

/// Fails if a rule was done in a partition before each of the others had registered it: its backfill has begun too early.
fn all_partitions_know_what_is_done(model: &Model, state: &str) -> Result<(), String> {
    let rules = model.timed(state, RULES, "backfill");
    let mut partitions: BTreeMap<(&str, u32), Vec<&Timed>> = BTreeMap::new();
    for (id, values) in rules.values() {
        partitions.entry((part(id, "rule"), of(part(id, "deployment")))).or_default().push(values);
    }
    for ((rule, of), known) in partitions {
        let is_done = |value: &Option<Bson>| value.as_ref().and_then(Bson::as_str) == Some("done");
        let times = known.iter().flat_map(|values| values.iter().filter(|(_, value)| is_done(value)));
        for time in times.map(|(time, _)| *time) {
            let is_known = |values: &&&Timed| {
                values.iter().rev().find(|(at, _)| *at <= time).is_some_and(|(_, value)| value.is_some())
            };
            let count = known.iter().filter(is_known).count();
            if count < of as usize {
                return Err(format!("`{rule}` is done at {time} while {count} of {of} partitions know it"));
            }
        }
    }
    Ok(())
}

/// Fails if a new partition begins after the checkpoint of an old one.
fn no_position_passes_another(model: &Model, state: &str, repartition: &Repartition) -> Result<(), String> {
    let Repartition { time, from, to } = *repartition;
    let histories = model.timed(state, POSITIONS, "time");
    let of_number = |number: u32| histories.values().filter(move |(id, _)| of(part(id, "deployment")) == number);
    for (id, values) in of_number(to) {
        let Some(begin) = set_at(values, time).and_then(Bson::as_timestamp) else { continue };
        let same = of_number(from).filter(|(old, _)| part(old, "stream") == part(id, "stream"));
        let earliest = same.filter_map(|(_, values)| before(values, time)?.as_timestamp()).min();
        if earliest.is_none_or(|earliest| begin > earliest) {
            return Err(format!("{id} begins at {begin}, and an old partition was at {earliest:?}"));
        }
    }
    Ok(())
}

/// Fails if a rule is done in the new partitions although an old one had a fan-out to do, or did not know the rule.
fn no_open_rule_is_done(model: &Model, state: &str, repartition: &Repartition) -> Result<(), String> {
    let Repartition { time, from, to } = *repartition;
    let is_old = |id: &Bson, values: &Timed| of(part(id, "deployment")) == from && before(values, time).is_some();
    let jobs = model.timed(state, fan_out::COLLECTION, "term");
    // Without a term, it is a late one of the weather, and may have come during the change.
    let has_term = |values: &Timed| before(values, time).and_then(Bson::as_i64).is_some_and(|term| term > 0);
    let is_open = |(id, values): &&(Bson, Timed)| is_old(id, values) && has_term(values);
    let open: BTreeSet<&str> = jobs.values().filter(is_open).map(|(id, _)| part(id, "rule")).collect();
    let rules = model.timed(state, RULES, "backfill");
    for (id, values) in rules.values().filter(|(id, _)| of(part(id, "deployment")) == to) {
        let rule = part(id, "rule");
        let known = rules.values().filter(|(old, values)| part(old, "rule") == rule && is_old(old, values)).count();
        let is_open = open.contains(rule) || known < from as usize;
        if is_open && set_at(values, time).and_then(Bson::as_str) == Some("done") {
            return Err(format!("{id} is done, and {known} of {from} partitions knew it; open: {open:?}"));
        }
    }
    Ok(())
}

/// Fails if a new partition owns a member of a circle, and has no dead letter of it.
fn circles_concern_all_owners(model: &Model, state: &str, repartition: &Repartition) -> Result<(), String> {
    let Repartition { time, from, to } = *repartition;
    let letters = model.timed(state, dead_letter::COLLECTION, "circle");
    let key = |id: &Bson| -> Option<Key> { Some(loaded(id.as_document()?.get_array("key").ok()?)) };
    for (id, values) in letters.values().filter(|(id, _)| of(part(id, "deployment")) == from) {
        let Some(circle) = before(values, time).and_then(Bson::as_array) else { continue };
        let rule = part(id, "rule");
        let members: Vec<Key> = circle.iter().filter_map(Bson::as_array).map(|key| loaded(key)).collect();
        for partition in Partition::all(to).filter(|one| members.iter().any(|member| one.owns(rule, member))) {
            // The name of a deployment has no `#`.
            let deployment = partition.id(part(id, "deployment").split('#').next().unwrap_or_default());
            let is_same = |(other, values): &&(Bson, Timed)| {
                set_at(values, time).is_some()
                    && (part(other, "deployment"), part(other, "rule")) == (deployment.as_str(), rule)
                    && key(other) == key(id)
            };
            if !letters.values().any(|letter| is_same(&letter)) {
                return Err(format!("{deployment} has no dead letter of {circle:?} for `{rule}`"));
            }
        }
    }
    Ok(())
}
