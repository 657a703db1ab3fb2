//! The schedule and the lease in virtual time: thousands of seeded runs of events, crashes, pauses, slow and lost commands,
//! stale reads and former leaders, without a server.
//!
//! Real parts: the router, the work queue, the low watermark ([`Schedule`]), the lease's loops and the fence. Modelled:
//! a server that guarantees what MongoDB guarantees and no more. A read returns any majority snapshot that is not older
//! than requested; a write may start late and is checked against its deadline by the server's clock, may continue after
//! that for as long as it is allowed to, and its answer may be lost; a save may arrive late.
//!
//! `DENORMD_SIMULATIONS=200000` sets the number of runs, `DENORMD_SEED=…` replays one. Planted bugs prove that the runs
//! detect them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use bson::{Bson, Document, doc};
use denormd_engine::{
    change::{Change, ChangeEvent},
    deployment::lease::{GRACE, Grant, Held, Lease, Registry},
    pipeline::schedule::{Next, Schedule},
    request::{Request, Scope, Task},
    route::{Routed, target_requests, value_request},
    workqueue::{Batch, BatchLimits, Lane, Work},
};
use denormd_model::{
    key::Key,
    namespace::Namespace,
    position::{ClusterTime, Position},
};
use denormd_mongo::{
    End, Fence,
    error::{Error, Kind, Result},
    fence::Window,
};
use denormd_rules::plan::{Plan, Rule, reference::Role};
use rand::{Rng, SeedableRng, rngs::StdRng};
use tokio::{
    sync::watch,
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep, sleep_until},
};

const RULES: &str = "
mongodb: { uri: mongodb://localhost/?replicaSet=rs0, database: app }
rules:
  - { name: address, guard: off, copy: { source: hosts, target: logs, match: { host: _id }, set: { ip: $ip } } }
  - { name: tasks, guard: off, collect: { source: tasks, target: persons, match: { _id: owner }, into: tasks, element: $_id, sort: { due: 1 } } }
  - { name: info, guard: off, copy: { source: parts, target: products, match: { \"parts.$[]\": _id }, into: info, element: $name } }
";
const TTL: Duration = Duration::from_secs(4);
/// Time by which a write may start late, and for which it may run.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Documents of each collection.
const DOCUMENTS: i32 = 3;
const INSTANCES: usize = 3;
/// Most events in one batch.
const FULL: usize = 3;

/// A bug planted on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bug {
    None,
    /// The position after the last batch is saved, whatever is pending.
    EarlyPosition,
    /// A write has no deadline.
    NoFence,
    /// A write whose answer was lost is repeated at once.
    NotWaitedOut,
    /// A read may be older than the event.
    StaleRead,
    /// A write does not require that the reference is unchanged.
    NoGuard,
}

/// The state of the data at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
struct Data {
    hosts: BTreeMap<i32, i32>,
    /// Host and copied address.
    logs: BTreeMap<i32, (Option<i32>, Option<i32>)>,
    /// Owner and due date.
    tasks: BTreeMap<i32, (i32, i32)>,
    persons: BTreeMap<i32, Vec<i32>>,
    parts: BTreeMap<i32, i32>,
    /// Parts and copied names.
    products: BTreeMap<i32, (Vec<i32>, Vec<i32>)>,
}

impl Data {
    fn tasks_of(&self, person: i32) -> Vec<i32> {
        let mut tasks: Vec<(i32, i32)> =
            self.tasks.iter().filter(|(_, (owner, _))| *owner == person).map(|(id, (_, due))| (*due, *id)).collect();
        tasks.sort_unstable();
        tasks.into_iter().map(|(_, id)| id).collect()
    }

    fn names_of(&self, parts: &[i32]) -> Vec<i32> {
        parts.iter().filter_map(|part| self.parts.get(part).copied()).collect()
    }

    fn differences(&self) -> Vec<String> {
        let mut out = Vec::new();
        for (id, (host, ip)) in &self.logs {
            let expected = host.and_then(|host| self.hosts.get(&host).copied());
            if *ip != expected {
                out.push(format!("log {id} of host {host:?} has {ip:?}, not {expected:?}"));
            }
        }
        for (id, tasks) in &self.persons {
            if *tasks != self.tasks_of(*id) {
                out.push(format!("person {id} has {tasks:?}, not {:?}", self.tasks_of(*id)));
            }
        }
        for (id, (parts, info)) in &self.products {
            if *info != self.names_of(parts) {
                out.push(format!("product {id} of {parts:?} has {info:?}, not {:?}", self.names_of(parts)));
            }
        }
        out
    }
}

/// The server.
struct Server {
    /// The data after each oplog entry; the first is the state before any.
    history: Vec<Data>,
    oplog: Vec<ChangeEvent>,
    /// Number of entries acknowledged as majority-committed: no read is older.
    acknowledged: usize,
    lease: (i64, Option<String>, i64),
    /// Term and place.
    position: (i64, usize),
    random: StdRng,
    trace: u64,
    grown: watch::Sender<usize>,
}

impl Server {
    fn now(&self) -> &Data {
        self.history.last().unwrap()
    }

    fn write(&mut self, collection: &str, id: i32, change: Change, write: impl FnOnce(&mut Data)) {
        let mut data = self.now().clone();
        write(&mut data);
        // A write that changes nothing has no oplog entry.
        if data == *self.now() {
            return;
        }
        self.history.push(data);
        self.oplog.push(ChangeEvent {
            namespace: Namespace { database: "app".to_owned(), collection: collection.to_owned() },
            change,
            id: Bson::Int32(id),
            before: None,
            cluster_time: time(self.oplog.len() + 1),
            wall_time: None,
        });
        self.grown.send_replace(self.oplog.len());
        self.trace = self.trace.wrapping_mul(31).wrapping_add(u64::try_from(self.oplog.len()).unwrap());
    }
}

fn time(place: usize) -> ClusterTime {
    ClusterTime { seconds: u32::try_from(place).unwrap(), increment: 1 }
}

#[derive(Clone)]
struct Sim {
    server: Arc<Mutex<Server>>,
    begun: Instant,
    plan: Plan,
    bug: Bug,
}

impl Sim {
    fn new(seed: u64, bug: Bug) -> Self {
        let loaded = denormd_rules::config::load_str(RULES, denormd_rules::config::Format::Yaml).unwrap();
        let plan = denormd_rules::plan::compile(&loaded.config, None).unwrap();
        let server = Server {
            history: vec![Data::default()],
            oplog: Vec::new(),
            acknowledged: 0,
            lease: (0, None, 0),
            position: (0, 0),
            random: StdRng::seed_from_u64(seed),
            trace: seed,
            grown: watch::Sender::new(0),
        };
        Self { server: Arc::new(Mutex::new(server)), begun: Instant::now(), plan, bug }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Server) -> T) -> T {
        work(&mut self.server.lock().unwrap())
    }

    fn millis(&self) -> i64 {
        i64::try_from(self.begun.elapsed().as_millis()).unwrap()
    }

    fn random(&self, below: u64) -> u64 {
        self.with(|server| server.random.random_range(0..below))
    }

    fn chance(&self, percent: u64) -> bool {
        self.random(100) < percent
    }

    /// Usually short, sometimes long.
    async fn delay(&self) {
        let millis = match self.random(100) {
            0..90 => self.random(10),
            90..98 => self.random(500),
            _ => self.random(4000),
        };
        sleep(Duration::from_millis(millis)).await;
    }
}

/// An instance's connection to the server. While the instance is paused, it transmits nothing.
#[derive(Clone)]
struct Wire {
    sim: Sim,
    paused_until: Arc<Mutex<Instant>>,
}

impl Wire {
    async fn pass(&self) {
        loop {
            let until = *self.paused_until.lock().unwrap();
            if Instant::now() >= until {
                return;
            }
            sleep_until(until).await;
        }
    }

    async fn call<T>(&self, work: impl FnOnce(&mut Server) -> T) -> Result<T> {
        self.pass().await;
        self.sim.delay().await;
        let answer = self.sim.with(work);
        self.sim.delay().await;
        self.pass().await;
        if self.sim.chance(2) { Err(Error::new(Kind::Connection, "lost")) } else { Ok(answer) }
    }

    /// A majority snapshot that is not older than `after`.
    async fn read(&self, after: ClusterTime) -> Result<Data> {
        let stale = self.sim.bug == Bug::StaleRead;
        self.call(|server| {
            let oldest = server.acknowledged.max(usize::try_from(after.seconds).unwrap());
            let oldest = if stale { oldest.saturating_sub(2) } else { oldest };
            let newest = server.history.len() - 1;
            let place =
                if server.random.random_bool(0.5) { newest } else { server.random.random_range(oldest..=newest) };
            server.history[place].clone()
        })
        .await
    }

    /// A write with its deadline, which the server checks when it starts; it continues even if nothing waits for it.
    async fn write(&self, fence: &Fence, write: impl FnOnce(&mut Server) + Send + 'static) -> Result<()> {
        let now = self.sim.millis() - i64::try_from(self.sim.random(50)).unwrap();
        let sent = Instant::now();
        let window = Window::new(Some(fence), now, TIMEOUT, sent)?;
        // The process may be paused at this point, and send when it resumes.
        self.sim.delay().await;
        self.pass().await;
        let sim = self.sim.clone();
        let server = tokio::spawn(async move {
            sim.delay().await;
            if sim.bug != Bug::NoFence && sim.millis() >= window.deadline {
                return Err(Error::new(Kind::Unavailable, "too late"));
            }
            if sim.chance(3) {
                // It is killed when its time is over, which is noticed late.
                let run = u64::try_from(window.run.as_millis()).unwrap();
                sleep(Duration::from_millis(sim.random(run + 400))).await;
            }
            sim.with(write);
            let place = sim.with(|server| server.oplog.len());
            sim.delay().await;
            sim.with(|server| server.acknowledged = server.acknowledged.max(place));
            Ok(())
        });
        let lost = self.sim.chance(5).then(|| Instant::now() + Duration::from_millis(self.sim.random(20)));
        let over = window.over;
        let answer = tokio::time::timeout_at(lost.unwrap_or(over).min(over), server).await;
        self.pass().await;
        match answer {
            Ok(Ok(answer)) if lost.is_none() => answer,
            _ => {
                if self.sim.bug != Bug::NotWaitedOut {
                    sleep_until(over).await;
                }
                Err(Error::new(Kind::Connection, "lost"))
            }
        }
    }
}

impl Registry for Wire {
    async fn take(&self, owner: &str) -> Result<Option<Grant>> {
        let now = || self.sim.millis();
        self.call(|server| {
            let (term, holder, until) = server.lease.clone();
            let grace = holder.map_or(0, |_| i64::try_from(GRACE.as_millis()).unwrap());
            if until + grace > now() {
                return None;
            }
            let until = now() + i64::try_from(TTL.as_millis()).unwrap();
            server.lease = (term + 1, Some(owner.to_owned()), until);
            Some(Grant { term: term + 1, until: End { server: until, cluster: until }, has_later_term: false })
        })
        .await
    }

    async fn renew(&self, owner: &str, term: i64) -> Result<Option<End>> {
        self.call(|server| {
            if server.lease.0 != term || server.lease.1.as_deref() != Some(owner) {
                return None;
            }
            let until = self.sim.millis() + i64::try_from(TTL.as_millis()).unwrap();
            server.lease.2 = until;
            Some(End { server: until, cluster: until })
        })
        .await
    }

    async fn give_back(&self, owner: &str) -> Result<()> {
        self.call(|server| {
            if server.lease.1.as_deref() == Some(owner) {
                server.lease = (server.lease.0, None, self.sim.millis());
            }
        })
        .await
    }
}

type Write = Box<dyn FnOnce(&mut Server) + Send>;

/// The result of a batch.
struct Outcome {
    lane: Lane,
    number: u64,
    follow_ups: Vec<Request>,
    keys: Vec<(Key, Work, Next)>,
}

/// Leads whenever it can.
async fn instance(wire: Wire) {
    let lease = Lease::of(wire.clone(), TTL);
    loop {
        let held = lease.stand_by().await;
        if lead(&wire, &held).await {
            held.release().await;
        }
    }
}

/// Follows changes like the pipeline. Returns true after a regular stop.
async fn lead(wire: &Wire, held: &Held<Wire>) -> bool {
    let (sim, term) = (&wire.sim, held.term());
    // The state is marked with the term first: from then on, no earlier message of a former leader changes it.
    let opened = wire.call(|server| {
        (server.position.0 <= term).then(|| {
            server.position.0 = term;
            server.position.1
        })
    });
    let Ok(Some(start)) = opened.await else { return false };
    let mut schedule = Schedule::new(sim.plan.clone(), 40);
    schedule.follow(Position { time: time(start), token: None });
    let mut next = start;
    let mut running = JoinSet::new();
    let mut saving: Option<JoinHandle<()>> = None;
    let mut saved = start;
    let stops = Instant::now() + Duration::from_secs(5 + sim.random(200));
    loop {
        while running.len() < 3 {
            let Some(batch) = schedule.take(
                BatchLimits { keys: 2, batches: 3, all_running: false },
                Instant::now(),
                |_| false,
                |_| false,
            ) else {
                break;
            };
            running.spawn(run(wire.clone(), held.fence(), batch));
        }
        let frontier = schedule.frontier(0).map_or(start, |position| usize::try_from(position.time.seconds).unwrap());
        let frontier = if sim.bug == Bug::EarlyPosition { next } else { frontier };
        if frontier != saved && saving.as_ref().is_none_or(JoinHandle::is_finished) {
            saved = frontier;
            let wire = wire.clone();
            saving = Some(tokio::spawn(async move {
                let save = wire.call(|server| {
                    if server.position.0 == term {
                        server.position.1 = frontier;
                    }
                });
                // Retried with the next one.
                save.await.ok();
            }));
        }
        let due = schedule
            .queue()
            .next_due()
            .filter(|_| running.len() < 3)
            .unwrap_or_else(|| Instant::now() + Duration::from_secs(1));
        tokio::select! {
            biased;
            () = held.lost() => {
                // A paused instance does not notice, and sends its pending message when it resumes.
                wire.pass().await;
                sleep(Duration::from_millis(sim.random(3))).await;
                return false;
            }
            Some(Ok(outcome)) = running.join_next() => {
                schedule.finish(outcome.lane, outcome.number, &outcome.follow_ups, outcome.keys, Instant::now());
            }
            events = deliver(wire, next), if schedule.queue().has_room() => {
                let batch = schedule.begin(0);
                let mut routed = Routed::default();
                for event in &events {
                    let origin = schedule.route_event(0, batch, event, &mut routed);
                    for request in routed.requests.drain(..) {
                        schedule.enqueue(request, origin);
                    }
                }
                next += events.len();
                schedule.end(0, batch, Position { time: time(next), token: None }, events.len() == FULL);
            }
            () = sleep_until(due) => {}
            () = sleep_until(stops) => {
                // A regular stop: work in flight ends first.
                while running.join_next().await.is_some() {}
                return true;
            }
        }
    }
}

async fn deliver(wire: &Wire, from: usize) -> Vec<ChangeEvent> {
    let mut grown = wire.sim.with(|server| server.grown.subscribe());
    loop {
        // The server exists as long as its history.
        grown.wait_for(|entries| *entries > from).await.ok();
        let found = wire.call(|server| {
            let most = server.random.random_range(1..=FULL);
            server.oplog.iter().skip(from).take(most).cloned().collect::<Vec<_>>()
        });
        if let Ok(events) = found.await {
            return events;
        }
    }
}

async fn run(wire: Wire, fence: Arc<Fence>, batch: Batch) -> Outcome {
    let rule = wire.sim.plan.rule(batch.lane.0).clone();
    let mut follow_ups = Vec::new();
    let result = reconcile(&wire, &fence, &rule, &batch, &mut follow_ups).await;
    let next = match result {
        Ok(()) => Next::Done { pause: Duration::ZERO },
        Err(_) => {
            follow_ups.clear();
            Next::Again { delay: Duration::from_millis(50) }
        }
    };
    let keys = batch.items.into_iter().map(|(key, work)| (key, work, next)).collect();
    Outcome { lane: batch.lane, number: batch.number, follow_ups, keys }
}

/// The equivalent of `reconcile::run` for these rules.
async fn reconcile(
    wire: &Wire,
    fence: &Fence,
    rule: &Rule,
    batch: &Batch,
    follow_ups: &mut Vec<Request>,
) -> Result<()> {
    let after = batch.items.iter().map(|(_, work)| work.after).max().unwrap_or_default();
    let data = wire.read(after).await?;
    let guarded = wire.sim.bug != Bug::NoGuard;
    let mut writes: Vec<Write> = Vec::new();
    for (key, work) in &batch.items {
        let id = number(key);
        match (rule.name.as_str(), batch.lane.1) {
            ("address", Task::Value) => {
                let ip = id.and_then(|id| data.hosts.get(&id).copied());
                let named = named(&work.scope);
                writes.push(Box::new(move |server| {
                    let logs: Vec<i32> = server.now().logs.keys().copied().collect();
                    for log in logs {
                        let refers = server.now().logs[&log].0 == id;
                        let meant = named.as_ref().is_none_or(|named| named.contains(&log));
                        if meant && (refers || (!guarded && named.is_some())) {
                            server.write("logs", log, Change::Update(vec!["ip".to_owned()]), |data| {
                                data.logs.entry(log).and_modify(|(_, copied)| *copied = ip);
                            });
                        }
                    }
                }));
            }
            ("address", Task::LocateTarget) => {
                if let Some((host, _)) = id.and_then(|id| data.logs.get(&id)) {
                    follow_ups.extend(target_requests(rule, key, &doc! {"host": host}));
                }
            }
            ("tasks", Task::Value) => {
                let Some(person) = id else { continue };
                let tasks = data.tasks_of(person);
                writes.push(Box::new(move |server| {
                    server.write("persons", person, Change::Update(vec!["tasks".to_owned()]), |data| {
                        data.persons.entry(person).and_modify(|copied| *copied = tasks);
                    });
                }));
            }
            ("tasks", Task::LocateSource) => {
                if let Some((owner, _)) = id.and_then(|id| data.tasks.get(&id)) {
                    let keys = rule.reference.keys(Role::Source, &doc! {"owner": owner});
                    follow_ups.extend(keys.into_iter().flatten().map(|key| value_request(rule, key)));
                }
            }
            ("tasks", Task::Parents) => {
                let parents = data.persons.iter().filter(|(_, tasks)| id.is_some_and(|id| tasks.contains(&id)));
                for (person, _) in parents {
                    follow_ups.extend(target_requests(rule, &Key::one(Bson::Int32(*person)), &doc! {"_id": person}));
                }
            }
            ("info", Task::Holders) => {
                let holders = data.products.iter().filter(|(_, (parts, _))| id.is_some_and(|id| parts.contains(&id)));
                follow_ups.extend(holders.map(|(product, _)| Request {
                    rule: rule.id,
                    task: Task::Target,
                    key: Key::one(Bson::Int32(*product)),
                    scope: Scope::All,
                }));
            }
            ("info", Task::Target) => {
                let Some((product, (parts, _))) = id.and_then(|id| Some((id, data.products.get(&id)?.clone()))) else {
                    continue;
                };
                let names = data.names_of(&parts);
                writes.push(Box::new(move |server| {
                    if guarded && server.now().products.get(&product).is_none_or(|(now, _)| *now != parts) {
                        return;
                    }
                    server.write("products", product, Change::Update(vec!["info".to_owned()]), |data| {
                        data.products.entry(product).and_modify(|(_, info)| *info = names);
                    });
                }));
            }
            (rule, task) => panic!("{rule} asks for {task:?}"),
        }
    }
    if writes.is_empty() {
        return Ok(());
    }
    wire.write(fence, move |server| writes.into_iter().for_each(|write| write(server))).await
}

fn number(key: &Key) -> Option<i32> {
    key.values().first().and_then(Bson::as_i32)
}

fn named(scope: &Scope) -> Option<BTreeSet<i32>> {
    match scope {
        Scope::All => None,
        Scope::Named(ids) => Some(ids.iter().filter_map(number).collect()),
    }
}

/// One write of the application.
fn operate(server: &mut Server) {
    let id = server.random.random_range(0..DOCUMENTS);
    let other = server.random.random_range(0..DOCUMENTS);
    let value = server.random.random_range(0..1000);
    let insert_or = |there: bool, doc: Document, path: &str| {
        if there { Change::Update(vec![path.to_owned()]) } else { Change::Insert(doc) }
    };
    match server.random.random_range(0..14) {
        0..3 => {
            let change = insert_or(server.now().hosts.contains_key(&id), doc! {}, "ip");
            server.write("hosts", id, change, |data| {
                data.hosts.insert(id, value);
            });
        }
        3 => server.write("hosts", id, Change::Delete, |data| {
            data.hosts.remove(&id);
        }),
        4 | 5 => {
            let host = (value % 4 != 0).then_some(other);
            let change = insert_or(server.now().logs.contains_key(&id), doc! {"host": host}, "host");
            server.write("logs", id, change, |data| {
                data.logs.entry(id).or_insert((None, None)).0 = host;
            });
        }
        6 => server.write("logs", id, Change::Delete, |data| {
            data.logs.remove(&id);
        }),
        7 | 8 => {
            let change = if server.now().tasks.contains_key(&id) {
                Change::Update(vec!["owner".to_owned(), "due".to_owned()])
            } else {
                Change::Insert(doc! {"owner": other})
            };
            server.write("tasks", id, change, |data| {
                data.tasks.insert(id, (other, value % 3));
            });
        }
        9 => server.write("tasks", id, Change::Delete, |data| {
            data.tasks.remove(&id);
        }),
        10 => {
            if !server.now().persons.contains_key(&id) {
                server.write("persons", id, Change::Insert(doc! {"_id": id}), |data| {
                    data.persons.insert(id, Vec::new());
                });
            }
        }
        11 => {
            let change = insert_or(server.now().parts.contains_key(&id), doc! {}, "name");
            server.write("parts", id, change, |data| {
                data.parts.insert(id, value);
            });
        }
        12 => server.write("parts", id, Change::Delete, |data| {
            data.parts.remove(&id);
        }),
        _ => {
            let parts: Vec<i32> = (0..value % 3).map(|n| (other + n) % DOCUMENTS).collect();
            let change = insert_or(server.now().products.contains_key(&id), doc! {"parts": &parts}, "parts");
            server.write("products", id, change, |data| data.products.entry(id).or_default().0 = parts);
        }
    }
}

/// Runs one history; returns the differences at its end, and a hash of all events.
async fn history(seed: u64, bug: Bug) -> (Vec<String>, u64) {
    let sim = Sim::new(seed, bug);
    let wires: Vec<Wire> =
        (0..INSTANCES).map(|_| Wire { sim: sim.clone(), paused_until: Arc::new(Mutex::new(Instant::now())) }).collect();
    let mut instances: Vec<JoinHandle<()>> = wires.iter().map(|wire| tokio::spawn(instance(wire.clone()))).collect();
    for _ in 0..40 {
        match sim.random(20) {
            0 => {
                let nth = usize::try_from(sim.random(INSTANCES as u64)).unwrap();
                instances[nth].abort();
                instances[nth] = tokio::spawn(instance(wires[nth].clone()));
            }
            1 | 2 => {
                let nth = usize::try_from(sim.random(INSTANCES as u64)).unwrap();
                let pause = Duration::from_millis(sim.random(12_000));
                *wires[nth].paused_until.lock().unwrap() = Instant::now() + pause;
            }
            3..7 => sleep(Duration::from_millis(sim.random(3000))).await,
            _ => {
                sim.with(operate);
                sim.delay().await;
            }
        }
    }
    // Paused instances resume and complete their pending actions. The last leader starts at the saved position, and
    // completes everything.
    let woken = wires.iter().map(|wire| *wire.paused_until.lock().unwrap()).max().unwrap();
    sleep_until(woken).await;
    sleep(Duration::from_millis(sim.random(5000))).await;
    for instance in &instances {
        instance.abort();
    }
    let last = Wire { sim: sim.clone(), paused_until: Arc::new(Mutex::new(Instant::now())) };
    let last = tokio::spawn(instance(last));
    let mut quiet = 0;
    let mut before = (0, 0);
    // Idle: the position has reached the end of the oplog, and nothing is written any more.
    for _ in 0..600 {
        sleep(Duration::from_secs(1)).await;
        let now = sim.with(|server| (server.oplog.len(), server.position.1));
        quiet = if now == before && now.0 == now.1 { quiet + 1 } else { 0 };
        before = now;
        if quiet == 30 {
            break;
        }
    }
    last.abort();
    let mut found = sim.with(|server| server.now().differences());
    if quiet < 30 {
        found.push(format!("not at rest: {before:?}"));
    }
    (found, sim.with(|server| server.trace))
}

fn simulate(seed: u64, bug: Bug) -> (Vec<String>, u64) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(history(seed, bug))
}

#[test]
fn whatever_happens_in_whatever_order_every_copy_is_right_in_the_end() {
    let seeds = crate::support::seeds::seeds("DENORMD_SIMULATIONS", 1000);
    println!("simulations {seeds:?}");
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u64;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let seeds = seeds.clone();
            scope.spawn(move || {
                for seed in seeds.skip(usize::try_from(thread).unwrap()).step_by(usize::try_from(threads).unwrap()) {
                    let (found, _) = simulate(seed, Bug::None);
                    assert!(found.is_empty(), "DENORMD_SEED={seed}: {found:#?}");
                }
            });
        }
    });
}

#[test]
fn a_seed_replays() {
    for seed in 0..20 {
        assert_eq!(simulate(seed, Bug::None), simulate(seed, Bug::None), "seed {seed}");
    }
}

#[test]
fn planted_bugs_are_seen() {
    for bug in [Bug::EarlyPosition, Bug::NoFence, Bug::NotWaitedOut, Bug::StaleRead, Bug::NoGuard] {
        let seen = (0..3000).find(|seed| !simulate(*seed, bug).0.is_empty());
        println!("{bug:?} is seen by seed {seen:?}");
        assert!(seen.is_some(), "{bug:?} is not seen");
    }
}
