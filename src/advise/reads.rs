//! Read statistics: reads the counters of every member twice and computes the difference. Never changes profiler
//! settings.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use bson::{Bson, Document, doc};
use secrecy::SecretString;
use tokio::time::Instant;

use denormd_model::{
    clock,
    distribution::{Known, Unknown, number},
    namespace::Namespace,
    text::{counted, duration},
};
use denormd_mongo::{connect, error::Result};

use super::{
    ask::Ask,
    log::{Query, slow_query},
};

/// Counter differences between two readings, or totals since the members started.
#[derive(Debug, Clone, Default)]
pub struct Reads {
    /// Length of the period, in seconds.
    pub seconds: f64,
    /// True if the period is the members' uptime rather than the time between two readings.
    pub since_start: bool,
    /// Number of members that were read.
    pub members: usize,
    /// Reads and writes of each collection, on all members.
    pub collections: HashMap<Namespace, Used>,
    /// Uses of each index, on all members.
    pub indexes: HashMap<(Namespace, String), IndexUse>,
    /// Number of find, aggregate, count and distinct commands, on all members.
    pub commands: Option<u64>,
    /// Number of `$lookup` stages, on all members.
    pub lookups: Option<u64>,
    /// Number of `$regex` in queries, on all members.
    pub regexes: Option<u64>,
    /// The cache: the size of the smallest, and the bytes read into all of them.
    pub cache: Option<Cache>,
    /// Queries in the slow query log of the members.
    pub slow: Vec<Query>,
    /// True if the log of a member could be read.
    pub log_read: bool,
    /// Figures that are not known, each with the reason.
    pub unknown: BTreeSet<String>,
}

/// The use of one collection.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Used {
    /// Number of read operations.
    pub reads: u64,
    /// Number of write operations.
    pub writes: u64,
    /// Microseconds spent in the collection, according to `top`.
    pub micros: u64,
}

/// The use of one index.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct IndexUse {
    /// Uses between the two readings.
    pub between: u64,
    /// Uses since counting began.
    pub ever: u64,
    /// Seconds since counting began, on the member with the shortest time.
    pub seconds: f64,
}

/// WiredTiger's cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cache {
    /// The configured maximum, in bytes.
    pub size: u64,
    /// Bytes read into the cache during the period.
    pub read: u64,
}

impl Reads {
    /// The use of a collection; None if it is not known.
    #[must_use]
    pub fn of(&self, namespace: &Namespace) -> Option<Used> {
        self.collections.get(namespace).copied()
    }

    /// The number of uses of an index in the period of [`Reads::seconds`].
    #[must_use]
    pub fn index(&self, namespace: &Namespace, name: &str) -> Option<u64> {
        let used = self.indexes.get(&(namespace.clone(), name.to_owned()))?;
        Some(if self.since_start { used.ever } else { used.between })
    }
}

/// The counters of one member at one moment.
#[derive(Debug, Clone, Default)]
struct Counters {
    /// Seconds since the member started; 0 if not known.
    uptime: f64,
    latency: HashMap<Namespace, (u64, u64)>,
    top: HashMap<Namespace, u64>,
    indexes: HashMap<(Namespace, String), (u64, f64)>,
    status: Option<Document>,
}

/// The members of the replica set and the first reading of their counters.
pub struct Observation {
    members: Vec<(Ask, Counters)>,
    began: Instant,
    unknown: BTreeSet<String>,
}

/// Takes the first reading of every member.
pub async fn begin(ask: &Ask, uri: &SecretString, namespaces: &[Namespace]) -> Result<Observation> {
    let (clients, mut unknown) = members(ask, uri).await?;
    let mut members = Vec::new();
    for ask in clients {
        let mut counters = Counters::default();
        counters.indexes(&ask, namespaces, &mut unknown).await?;
        counters.latencies(&ask, namespaces, &mut unknown).await?;
        counters.top(&ask, &mut unknown).await?;
        counters.status(&ask, &mut unknown).await?;
        members.push((ask, counters));
    }
    Ok(Observation { members, began: Instant::now(), unknown })
}

async fn members(ask: &Ask, uri: &SecretString) -> Result<(Vec<Ask>, BTreeSet<String>)> {
    let hello = ask.client().database("admin").run_command(doc! {"hello": 1}).await?;
    let names = |field: &str| hello.get_array(field).map(Vec::as_slice).unwrap_or_default();
    let hosts: Vec<&str> = names("hosts").iter().chain(names("passives")).filter_map(Bson::as_str).collect();
    let (mut found, mut unknown) = (Vec::new(), BTreeSet::new());
    for host in &hosts {
        let member = async {
            let client = connect::member(uri, host).await?;
            client.database("admin").run_command(doc! {"ping": 1}).await?;
            Result::<mongodb::Client>::Ok(client)
        };
        match member.await {
            Ok(client) => found.push(Ask::new(&client)),
            Err(error) => {
                unknown.insert(format!("what is read on the member {host}: {}", error.message));
            }
        }
    }
    if found.is_empty() {
        // The cluster is sharded, or only the members can resolve their host names.
        found.push(ask.clone());
    }
    Ok((found, unknown))
}

impl Observation {
    /// Waits until `window` is over, takes the second reading and returns the difference. If the window is zero,
    /// returns the totals since the members started.
    pub async fn end(self, window: Duration, namespaces: &[Namespace]) -> Result<Reads> {
        let since_start = window.is_zero();
        tokio::time::sleep(window.saturating_sub(self.began.elapsed())).await;
        let mut reads = Reads {
            since_start,
            members: self.members.len(),
            seconds: self.began.elapsed().as_secs_f64(),
            unknown: self.unknown,
            ..Reads::default()
        };
        if since_start {
            reads.seconds = self.members.iter().map(|(_, first)| first.uptime).fold(f64::INFINITY, f64::min);
            if reads.seconds <= 0.0 {
                let what = "read rates: the uptime of a member is unknown (use --observe 10m)";
                reads.unknown.insert(what.to_owned());
            }
        }
        for (ask, first) in self.members {
            if since_start {
                reads.add(&Counters::default(), &first);
            } else {
                let mut second = Counters::default();
                second.status(&ask, &mut reads.unknown).await?;
                second.top(&ask, &mut reads.unknown).await?;
                second.latencies(&ask, namespaces, &mut reads.unknown).await?;
                second.indexes(&ask, namespaces, &mut reads.unknown).await?;
                // The server counts the first reading as a read.
                let mut first = first;
                first.latency.values_mut().for_each(|(reads, _)| *reads += 1);
                reads.add(&first, &second);
            }
            reads.log(&ask).await?;
        }
        Ok(reads)
    }
}

/// The answer; without one, notes the figures that are `unknown`, and the reason.
fn noted<T>(answer: Known<T>, what: &str, unknown: &mut BTreeSet<String>) -> Option<T> {
    answer.map_err(|Unknown(why)| unknown.insert(format!("{what}: {why}"))).ok()
}

impl Counters {
    async fn latencies(&mut self, ask: &Ask, namespaces: &[Namespace], unknown: &mut BTreeSet<String>) -> Result<()> {
        for namespace in namespaces {
            let needs = "collStats (latencyStats) on each collection";
            let reply = ask.aggregate(namespace, vec![doc! {"$collStats": {"latencyStats": {}}}], needs).await?;
            let Some(reply) = noted(reply, "how often a collection is read", unknown) else { continue };
            let stats = reply.first().and_then(|reply| reply.get_document("latencyStats").ok());
            let ops = |kind: &str| {
                let kind = stats.and_then(|stats| stats.get_document(kind).ok());
                kind.and_then(|kind| kind.get("ops")).map_or(0, number)
            };
            self.latency.insert(namespace.clone(), (ops("reads"), ops("writes")));
        }
        Ok(())
    }

    async fn indexes(&mut self, ask: &Ask, namespaces: &[Namespace], unknown: &mut BTreeSet<String>) -> Result<()> {
        for namespace in namespaces {
            let needs = "indexStats on each collection";
            let rows = ask.aggregate(namespace, vec![doc! {"$indexStats": {}}], needs).await?;
            let Some(rows) = noted(rows, "which indexes are used", unknown) else { continue };
            self.indexes.extend(rows.iter().filter_map(|row| {
                let accesses = row.get_document("accesses").ok()?;
                let since = accesses.get_datetime("since").ok()?;
                let age = clock::wall_millis() - since.timestamp_millis();
                let age = Duration::from_millis(u64::try_from(age).unwrap_or_default()).as_secs_f64();
                let name = row.get_str("name").ok()?.to_owned();
                Some(((namespace.clone(), name), (accesses.get("ops").map_or(0, number), age)))
            }));
        }
        Ok(())
    }

    async fn top(&mut self, ask: &Ask, unknown: &mut BTreeSet<String>) -> Result<()> {
        let reply = ask.command("admin", doc! {"top": 1}, "top on the cluster").await?;
        let Some(reply) = noted(reply, "where the time goes", unknown) else { return Ok(()) };
        let totals = reply.get_document("totals").cloned().unwrap_or_default();
        self.top = totals
            .iter()
            .filter_map(|(name, totals)| {
                let (database, collection) = name.split_once('.')?;
                let namespace = Namespace { database: database.to_owned(), collection: collection.to_owned() };
                let total = totals.as_document()?.get_document("total").ok()?;
                Some((namespace, total.get("time").map_or(0, number)))
            })
            .collect();
        Ok(())
    }

    async fn status(&mut self, ask: &Ask, unknown: &mut BTreeSet<String>) -> Result<()> {
        let command = doc! {"serverStatus": 1, "repl": 0, "locks": 0, "tcmalloc": 0, "transactions": 0};
        let status = ask.command("admin", command, "serverStatus on the cluster").await?;
        if let Some(status) = noted(status, "the share of $lookup, and the cache", unknown) {
            self.uptime = denormd_model::distribution::ratio(status.get("uptimeMillis").map_or(0, number), 1000);
            self.status = Some(status);
        }
        Ok(())
    }

    /// Finds a number in the reply of serverStatus.
    fn number(&self, path: &[&str]) -> Option<u64> {
        let (last, parents) = path.split_last()?;
        let mut at = self.status.as_ref()?;
        for name in parents {
            at = at.get_document(name).ok()?;
        }
        at.get(last).map(number)
    }

    fn read_commands(&self) -> Option<u64> {
        let total = |name: &str| self.number(&["metrics", "commands", name, "total"]);
        Some(total("find")? + total("aggregate")? + total("count").unwrap_or(0) + total("distinct").unwrap_or(0))
    }
}

impl Reads {
    /// Adds the difference between two readings of one member.
    fn add(&mut self, first: &Counters, second: &Counters) {
        for (namespace, (reads, writes)) in &second.latency {
            let (reads_then, writes_then) = first.latency.get(namespace).copied().unwrap_or_default();
            let used = self.collections.entry(namespace.clone()).or_default();
            used.reads += reads.saturating_sub(reads_then);
            used.writes += writes.saturating_sub(writes_then);
            let time = |counters: &Counters| counters.top.get(namespace).copied().unwrap_or_default();
            used.micros += time(second).saturating_sub(time(first));
        }
        for (index, (ops, seconds)) in &second.indexes {
            let used =
                self.indexes.entry(index.clone()).or_insert(IndexUse { seconds: *seconds, ..IndexUse::default() });
            used.between += ops.saturating_sub(first.indexes.get(index).map_or(0, |(ops, _)| *ops));
            used.ever += ops;
            used.seconds = used.seconds.min(*seconds);
        }
        let between = |read: &dyn Fn(&Counters) -> Option<u64>| {
            read(second).map(|now| now.saturating_sub(read(first).unwrap_or_default()))
        };
        let add = |sum: &mut Option<u64>, more: Option<u64>| {
            if let Some(more) = more {
                *sum = Some(sum.unwrap_or_default() + more);
            }
        };
        add(&mut self.commands, between(&Counters::read_commands));
        add(&mut self.lookups, between(&|counters| counters.number(&["metrics", "aggStageCounters", "$lookup"])));
        add(
            &mut self.regexes,
            between(&|counters| counters.number(&["metrics", "operatorCounters", "match", "$regex"])),
        );
        let cache = |counters: &Counters, name: &str| counters.number(&["wiredTiger", "cache", name]);
        if let Some(size) = cache(second, "maximum bytes configured") {
            let read = between(&|counters| cache(counters, "bytes read into cache")).unwrap_or_default();
            let least = self.cache.map_or(size, |cache| cache.size.min(size));
            self.cache = Some(Cache { size: least, read: read + self.cache.map_or(0, |cache| cache.read) });
        }
    }

    /// Adds the latest slow queries of a member's log.
    async fn log(&mut self, ask: &Ask) -> Result<()> {
        let reply = ask.command("admin", doc! {"getLog": "global"}, "getLog on the cluster").await?;
        if let Some(reply) = noted(reply, "what slow queries look like", &mut self.unknown) {
            self.log_read = true;
            let lines = reply.get_array("log").map(Vec::as_slice).unwrap_or_default();
            self.slow.extend(lines.iter().filter_map(Bson::as_str).filter_map(slow_query));
        }
        Ok(())
    }

    /// Describes the period and the members that the figures come from.
    #[must_use]
    pub fn basis(&self) -> String {
        let members = counted(self.members as u64, "member");
        let time = duration(self.seconds);
        if self.since_start {
            format!("in the {time} since {members} started, denormd's own among them")
        } else {
            format!("in {time}, on {members}")
        }
    }
}
