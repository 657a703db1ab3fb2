//! Leads an instance's share of the partitions of a deployment, each with a lease and a pipeline. A deployment that is
//! not divided has one partition, so this is plain leader election.
//!
//! An instance takes over partitions without a leader, and hands over partitions when other instances lead fewer, or
//! have newer rules.

use std::{
    collections::BTreeMap,
    hash::{BuildHasher, RandomState},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::watch,
    task::{JoinError, JoinSet},
    time::{Instant, Interval, MissedTickBehavior, interval},
};

use crate::{
    checkpoint::{format, store::Store},
    dead_letter::DeadLetters,
    deployment::{
        identity::Identity,
        instances::{Member, Next, instances, next},
        lease::{self, Held, Lease},
        repartitioning::divide,
    },
    pipeline::{self, Handle},
    reconcile::Context,
};
use denormd_model::partition::Partition;
use denormd_mongo::{
    Connection, code,
    error::{Error, Kind, Result},
    primary::Primary,
};

/// Interval between checks for free partitions, or for too many of its own.
const PARTITION_POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Interval after a read that failed because the state had been created a moment before, by this instance perhaps.
const POLL_OF_NEW_STATE: Duration = Duration::from_millis(20);
/// After this number of such reads in a row, the usual interval and warnings apply.
const NEW_STATE_POLLS: u32 = 25;
/// Time for which an instance that failed to start leading takes no partitions, so that another instance takes them.
const UNFIT: Duration = Duration::from_secs(30);
/// The same for a deployment that is not divided: the others look for a free lease more often than that.
const UNFIT_WHOLE: Duration = Duration::from_secs(1);
/// Time for which the others must lead fewer partitions before one is handed over. This ignores short-lived changes.
const SETTLED: Duration = Duration::from_secs(2);
/// Time for which an instance that stops waits for the answer of a request for the lease.
const LEAVING: Duration = Duration::from_secs(5);
/// The action in the recent errors of an instance that cannot take a free lease.
pub const TAKE_LEASE: &str = "take the lease";
/// Time limit for the request that finds the primary.
const ASKED: Duration = Duration::from_secs(5);

/// A deployment, and the place of its leases.
pub struct Deployment {
    /// The connection, which outlives a config.
    pub connection: Connection,
    /// The state database.
    pub database: String,
    /// The name of the deployment.
    pub name: String,
    /// The validity of a lease.
    pub ttl: Duration,
    /// The number of partitions.
    pub partitions: u32,
    /// This instance, as its leases name it.
    pub instance: Identity,
    /// This instance among the others. A command has none: it leads whatever no other process leads.
    pub member: Option<Member>,
}

/// The partitions without a leader, for which this instance may be due.
#[derive(Debug)]
pub struct Free {
    partitions: Vec<Partition>,
    /// Numbers of partitions that the other instances lead.
    others: Vec<usize>,
}

/// The ways in which the leadership of a partition ends.
#[derive(Debug)]
pub enum Ended {
    /// It was ordered to hand over.
    HandedOver,
    /// The lease was lost: another instance may lead now.
    Lost,
    /// A privilege was missing at the start.
    Unfit(Error),
}

/// An event of an instance's share.
#[derive(Debug)]
pub enum Event {
    /// The leases were read: [`Share::act`] takes over and hands over what is due.
    Free(Free),
    /// The leadership of a partition has ended.
    Ended(Partition, Result<Ended>),
}

/// The orders to the leader of a partition.
#[derive(Debug, Clone)]
enum Order {
    /// Follow changes with these rules.
    Follow(Arc<Context>),
    /// Finish the work in progress, and release the lease.
    HandOver,
}

/// Called with each pipeline that starts, and with true for the first one of a leadership.
type Follows = dyn Fn(&Handle, bool) + Send + Sync;
/// The partitions that this process leads or is about to lead.
type LedPartitions = BTreeMap<Partition, watch::Sender<Order>>;
/// The end of the task of a partition; None if another instance had the lease.
type Over = (Partition, Result<Option<Ended>>);

/// This process's share of the partitions.
pub struct Share {
    deployment: Deployment,
    /// The rules for partitions that are taken from now on.
    context: Arc<Context>,
    follows: Arc<Follows>,
    led: LedPartitions,
    tasks: JoinSet<Over>,
    tick: Interval,
    /// Reads of the state that failed in a row.
    failures: u32,
    /// The time since when the others lead fewer.
    uneven: Option<Instant>,
    /// The time since when partitions for other instances have been free.
    free: Option<Instant>,
    /// The end of the time for which this instance takes no partitions.
    unfit: Option<Instant>,
}

impl Free {
    /// True if no partition is free.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.partitions.is_empty()
    }
}

impl Deployment {
    fn lease(&self, partition: Partition) -> Lease {
        Lease::new(self.connection.clone(), &self.database, &partition.id(&self.name), &self.instance, self.ttl)
    }

    /// Reads the leases. None while this instance cannot take any. Hands over to an instance with newer rules.
    async fn look(&self, led: &LedPartitions, unfit: bool) -> Result<Option<Free>> {
        let Some(member) = &self.member else {
            // A partition is free for a moment while daemons hand it over: a command with other rules must not take it.
            if !instances(&self.connection.now(), &self.database, &self.name, self.ttl).await?.is_empty() {
                return Ok(None);
            }
            return Ok(Some(Free { partitions: self.free(led).await?, others: Vec::new() }));
        };
        if member.is_outdated().await? {
            if hand_over_all(led) {
                tracing::info!("another instance has newer rules: handing over to it");
            }
            return Ok(None);
        }
        if unfit || (led.is_empty() && !self.divide().await?) {
            return Ok(None);
        }
        Ok(Some(Free { others: member.others().await?, partitions: self.free(led).await? }))
    }

    /// Divides the deployment into the config's number of partitions. Returns false while leaders for another number
    /// are running.
    async fn divide(&self) -> Result<bool> {
        match divide(&self.connection.now(), &self.database, &self.name, self.partitions, self.ttl).await {
            // Once this instance leads, it meets the same error and exits.
            Err(error) if error.kind == Kind::Topology => Ok(true),
            divided => divided,
        }
    }

    /// The partitions without a leader. Each instance starts at a random place, so that several instances do not
    /// compete for the same partition.
    async fn free(&self, led: &LedPartitions) -> Result<Vec<Partition>> {
        let mut free: Vec<Partition> =
            Partition::all(self.partitions).filter(|partition| !led.contains_key(partition)).collect();
        if free.is_empty() {
            return Ok(free);
        }
        let ids: Vec<String> = free.iter().map(|partition| partition.id(&self.name)).collect();
        let held = lease::held(&self.connection.now(), &self.database, &ids).await?;
        free.retain(|partition| !held.contains(&partition.id(&self.name)));
        let first = RandomState::new().hash_one(free.len()) % u64::try_from(free.len()).unwrap_or_default().max(1);
        free.rotate_left(usize::try_from(first).unwrap_or_default());
        Ok(free)
    }
}

impl Share {
    /// Leads nothing yet. Calls `follows` with each pipeline that starts.
    pub fn new(
        deployment: Deployment,
        context: Arc<Context>,
        follows: impl Fn(&Handle, bool) + Send + Sync + 'static,
    ) -> Self {
        let mut tick = interval(PARTITION_POLL_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            deployment,
            context,
            follows: Arc::new(follows),
            led: BTreeMap::new(),
            tasks: JoinSet::new(),
            tick,
            failures: 0,
            uneven: None,
            free: None,
            unfit: None,
        }
    }

    /// Waits for the next event. Cancellation loses none.
    pub async fn next(&mut self) -> Result<Event> {
        loop {
            let unfit = self.unfit.is_some_and(|until| Instant::now() < until);
            let look = async {
                self.tick.tick().await;
                self.deployment.look(&self.led, unfit).await
            };
            let looked = tokio::select! {
                Some(over) = self.tasks.join_next() => match self.over(over) {
                    Some(ended) => return ended.map(|(partition, ended)| Event::Ended(partition, ended)),
                    None => continue,
                },
                looked = look => looked,
            };
            self.failures = if looked.is_err() { self.failures + 1 } else { 0 };
            match looked {
                Ok(Some(free)) => return Ok(Event::Free(free)),
                Err(error) if error.code == Some(code::SNAPSHOT_UNAVAILABLE) && self.failures <= NEW_STATE_POLLS => {
                    self.tick.reset_after(POLL_OF_NEW_STATE);
                }
                Err(error) => {
                    if self.failures.is_power_of_two() {
                        tracing::warn!(error = %error.message, "cannot look for partitions to lead; trying again");
                    }
                    self.context.metrics.record_error(None, "look for partitions to lead", &error);
                }
                Ok(None) => {}
            }
        }
    }

    /// Takes over or hands over partitions if that is due.
    pub fn act(&mut self, Free { partitions: free, others }: Free) {
        self.free = if free.is_empty() { None } else { self.free.or_else(|| Some(Instant::now())) };
        // The instances that should take it are unable to.
        let abandoned = self.free.is_some_and(|since| since.elapsed() > self.deployment.ttl);
        let of = usize::try_from(self.deployment.partitions).unwrap_or(usize::MAX);
        for partition in free {
            if next(self.led.len(), &others, of) != Next::Take && !abandoned {
                break;
            }
            self.lead(partition);
        }
        self.announce();
        let uneven = self.free.is_none() && next(self.led.len(), &others, of) == Next::HandOver;
        self.uneven = if uneven { self.uneven.or_else(|| Some(Instant::now())) } else { None };
        if self.uneven.is_some_and(|since| since.elapsed() >= SETTLED) {
            self.uneven = None;
            if let Some((partition, orders)) = self.led.last_key_value() {
                tracing::info!(
                    partition = partition.place(),
                    "another instance leads fewer partitions: handing this one over"
                );
                hand_over(orders);
            }
        }
    }

    fn lead(&mut self, partition: Partition) {
        let (orders, received) = watch::channel(Order::Follow(self.context.clone()));
        self.led.insert(partition, orders);
        let (lease, follows) = (self.deployment.lease(partition), self.follows.clone());
        self.tasks.spawn(async move { (partition, take(&lease, partition, &*follows, received).await) });
    }

    /// Replaces the rules, also in the running pipelines.
    pub fn replace(&mut self, context: Arc<Context>) {
        if let Some(member) = &self.deployment.member {
            member.has_plan(&context.plan);
        }
        for orders in self.led.values() {
            let replaced = orders.send_if_modified(|order| match order {
                Order::Follow(old) => {
                    old.clone_from(&context);
                    true
                }
                Order::HandOver => false,
            });
            if replaced {
                tracing::info!("replacing the rules once the work in flight is finished");
            }
        }
        self.context = context;
    }

    /// Orders the leaders of all partitions to hand over.
    pub fn hand_over(&self) {
        hand_over_all(&self.led);
    }

    /// Waits until the leadership of a partition has ended. None if this process leads no partition.
    pub async fn ended(&mut self) -> Option<Result<(Partition, Result<Ended>)>> {
        while let Some(over) = self.tasks.join_next().await {
            if let Some(ended) = self.over(over) {
                return Some(ended);
            }
        }
        None
    }

    /// Removes the announcement of this instance.
    pub async fn leave(&self) {
        if let Some(member) = &self.deployment.member {
            member.leave().await;
        }
    }

    fn over(&mut self, over: Result<Over, JoinError>) -> Option<Result<(Partition, Result<Ended>)>> {
        let died = |error| Error::internal(format!("the leader of a partition has ended: {error}"));
        let (partition, ended) = match over.map_err(died) {
            Ok(over) => over,
            Err(error) => return Some(Err(error)),
        };
        self.led.remove(&partition);
        if matches!(ended, Ok(Some(Ended::Unfit(_)))) {
            let pause = if self.deployment.partitions > 1 { UNFIT } else { UNFIT_WHOLE };
            self.unfit = Some(Instant::now() + pause);
        }
        self.announce();
        ended.transpose().map(|ended| Ok((partition, ended)))
    }

    fn announce(&self) {
        let fit = self.unfit.is_none_or(|until| Instant::now() >= until);
        if let Some(member) = &self.deployment.member {
            member.leads(fit.then_some(self.led.len()));
        }
    }
}

/// Orders a leader to hand over. Returns false if it has had that order.
fn hand_over(orders: &watch::Sender<Order>) -> bool {
    orders.send_if_modified(|order| !matches!(std::mem::replace(order, Order::HandOver), Order::HandOver))
}

/// Orders the leaders of all partitions to hand over. Returns false if they have had that order.
fn hand_over_all(led: &LedPartitions) -> bool {
    led.values().filter(|orders| hand_over(orders)).count() > 0
}

/// Takes the lease of a partition if it is free, and leads while it has the lease.
async fn take(
    lease: &Lease,
    partition: Partition,
    follows: &Follows,
    mut orders: watch::Receiver<Order>,
) -> Result<Option<Ended>> {
    let mut attempt = pin!(lease.try_lead());
    let held = tokio::select! {
        held = &mut attempt => held,
        () = handing_over(&mut orders) => {
            // It may have been granted already, and nobody else could lead until it expires.
            if let Ok(Ok(Some(held))) = tokio::time::timeout(LEAVING, attempt).await {
                held.release().await;
            }
            return Ok(None);
        }
    };
    match held {
        Ok(Some(held)) => lead(held, partition, follows, orders).await.map(Some),
        Ok(None) => Ok(None),
        Err(error) => {
            tracing::warn!(error = %error.message, "the lease cannot be taken; trying again");
            if let Order::Follow(context) = &*orders.borrow() {
                context.metrics.record_error(None, TAKE_LEASE, &error);
            }
            Ok(None)
        }
    }
}

/// Follows changes while it has the lease.
async fn lead(
    held: Held,
    partition: Partition,
    follows: &Follows,
    mut orders: watch::Receiver<Order>,
) -> Result<Ended> {
    let mut first = true;
    loop {
        let Order::Follow(context) = orders.borrow_and_update().clone() else {
            held.release().await;
            return Ok(Ended::HandedOver);
        };
        let context = Arc::new(context.under(held.fence()).within(partition));
        let started = tokio::select! {
            started = start(&context) => started,
            () = held.lost() => return Ok(Ended::Lost),
            // A newer config ends the start of an older one, which may take minutes.
            Ok(()) = orders.changed() => continue,
        };
        let handle = match started {
            Ok(Some(handle)) => handle,
            Ok(None) => {
                held.release().await;
                return Ok(Ended::HandedOver);
            }
            Err(error) => {
                held.release().await;
                // The privilege existed at startup, so the password is probably being changed and its file will follow.
                return if error.kind == Kind::Privilege { Ok(Ended::Unfit(error)) } else { Err(error) };
            }
        };
        follows(&handle, std::mem::take(&mut first));
        tokio::select! {
            () = held.lost() => {
                handle.abort();
                return Ok(Ended::Lost);
            }
            // The lease is left to expire, because writes in progress may still be applied until then.
            () = handle.ended() => if !handle.is_rewound() {
                return Err(Error::internal("the pipeline has ended by itself"));
            },
            () = replaced(&held, partition, &mut orders) => {}
        }
        tokio::select! {
            () = handle.stop() => {}
            // Deadlines end the work in progress.
            () = held.lost() => return Ok(Ended::Lost),
        }
    }
}

/// Waits for another order. The effect of new rules on existing data is counted while the old ones still run, because that
/// may take minutes.
async fn replaced(held: &Held, partition: Partition, orders: &mut watch::Receiver<Order>) {
    // The sender exists until the task ends.
    orders.changed().await.ok();
    loop {
        let Order::Follow(context) = orders.borrow_and_update().clone() else { return };
        let context = context.under(held.fence()).within(partition);
        tokio::select! {
            decided = attended(&context, pipeline::decide(&context)) => {
                if let Err(error) = decided {
                    // The start of the pipeline repeats it.
                    tracing::debug!(error = %error.message, "the effect of the new rules cannot be counted yet");
                }
                return;
            }
            _ = orders.changed() => {}
        }
    }
}

/// Opens the state and starts the pipeline, retrying after temporary failures. None if the deployment has another number of
/// partitions now.
async fn start(context: &Arc<Context>) -> Result<Option<Handle>> {
    let DeadLetters { database, deployment, .. } = &context.dead_letters;
    loop {
        let attempt = async {
            // A delete that an earlier start has sent must not remove what this one records.
            context.server.abandoned_writes_are_over().await;
            let partitions = format::check(&context.server, database, deployment).await?;
            if partitions != context.partition.of() {
                tracing::info!(partitions, "the deployment was repartitioned: its number of partitions has changed");
                return Ok(None);
            }
            let store = Store::open_partition(&context.server, database, deployment, context.partition).await?;
            pipeline::start(context.clone(), store).await.map(Some)
        };
        match attended(context, attempt).await {
            Err(error) if error.is_transient() => {
                tracing::warn!(error = %error.message, "the pipeline cannot start yet; retrying");
                tokio::time::sleep(PARTITION_POLL_INTERVAL).await;
            }
            result => return result,
        }
    }
}

/// Returns the result of `work`, or an error once another server is the primary: some requests have no time limit, and a frozen
/// server never answers them.
async fn attended<T>(context: &Context, work: impl Future<Output = Result<T>>) -> Result<T> {
    let primary = Primary::of(context.server.client());
    // Records which server is the primary now.
    primary.hello(ASKED).await?;
    primary.attend(work).await?
}

/// Waits for the order to hand over.
async fn handing_over(orders: &mut watch::Receiver<Order>) {
    if orders.wait_for(|order| matches!(order, Order::HandOver)).await.is_err() {
        std::future::pending::<()>().await;
    }
}
