//! An instance's share of a partitioned deployment. It leads its share of the partitions, each with a lease and a
//! pipeline. It takes over partitions without a leader, and hands over partitions when other instances lead fewer.

use std::{
    collections::BTreeMap,
    hash::{BuildHasher, RandomState},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{sync::watch, task::JoinSet};

use crate::{commands::Failure, status::Board};
use denormd_engine::{
    deployment::{
        instances::{Next, next},
        lease::{self, Held, Lease},
    },
    reconcile::Context,
};
use denormd_model::partition::Partition;
use denormd_mongo::error::{Error, Kind};

use super::{
    Rules, finished, service,
    signals::{Signals, Wake},
    start,
};

/// Interval between checks for free partitions, or for too many of its own.
const POLL: Duration = Duration::from_millis(500);
/// Time for which an instance that failed to start leading takes no partitions.
const UNFIT: Duration = Duration::from_secs(30);
/// Time for which the others must lead fewer partitions before one is handed over. This ignores short-lived changes.
const SETTLED: Duration = Duration::from_secs(2);

/// The orders to the leader of a partition.
#[derive(Debug, Clone)]
enum Order {
    /// Follow changes with these rules.
    Lead(Arc<Context>),
    /// Finish the work in progress, and release the lease.
    HandOver,
}

/// The ways in which the leadership of a partition ends.
#[derive(Debug)]
enum Ended {
    /// Another instance had the lease.
    NotTaken,
    /// It was ordered to hand over.
    HandedOver,
    /// The lease was lost.
    Lost,
    /// A privilege was missing at the start.
    Unfit,
}

/// The partitions that this instance leads or is about to lead.
struct Share {
    led: BTreeMap<Partition, watch::Sender<Order>>,
    tasks: JoinSet<(Partition, Result<Ended, Error>)>,
    /// The time since when the others lead fewer.
    uneven: Option<Instant>,
    /// The time since when partitions for other instances have been free.
    free: Option<Instant>,
    /// The time since when this instance is known to be unable to lead.
    unfit: Option<Instant>,
}

/// Leads its share of the partitions, until it receives a stop signal.
pub(super) async fn share(paths: &[PathBuf], rules: &mut Rules, signals: &mut Signals) -> Result<(), Failure> {
    let of = rules.loaded.config.lease.partitions;
    tracing::info!(deployment = %rules.loaded.config.name, partitions = of, "standing by");
    let mut share = Share { led: BTreeMap::new(), tasks: JoinSet::new(), uneven: None, free: None, unfit: None };
    let mut tick = tokio::time::interval(POLL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let result = loop {
        tokio::select! {
            Some(ended) = share.tasks.join_next() => if let Err(error) = share.ended(rules, ended) {
                break Err(error);
            },
            _ = tick.tick() => match share.look(rules).await {
                Err(error) if error.is_transient() || error.kind == Kind::Privilege => {
                    tracing::debug!(error = %error.message, "the state cannot be read; trying again");
                }
                Err(error) => break Err(error),
                Ok(()) => {}
            },
            wake = signals.next() => match wake {
                Wake::Stop => break Ok(()),
                Wake::Reload | Wake::Yield => if rules.reload(paths, signals).await {
                    for orders in share.led.values() {
                        orders.send_replace(Order::Lead(rules.context.clone()));
                    }
                }
            },
        }
    };
    service::stopping();
    tracing::info!("stopping: what is in flight is finished, then the positions are saved");
    share.hand_over_all();
    while !share.tasks.is_empty() {
        tokio::select! {
            Some(ended) = share.tasks.join_next() => if let Err(error) = share.ended(rules, ended) {
                tracing::error!(error = %error.message, "a partition did not stop in good order");
            },
            () = signals.stop() => return Err(Error::internal("stopped at once by a second signal").into()),
        }
    }
    rules.board.detach();
    Ok(result?)
}

impl Share {
    /// Takes over or hands over partitions if that is due.
    async fn look(&mut self, rules: &Rules) -> Result<(), Error> {
        if rules.member.is_outdated().await? {
            if !self.led.is_empty() {
                tracing::info!("an instance with newer rules is there: handing over to it");
                self.hand_over_all();
            }
            return Ok(());
        }
        let unfit = self.unfit.is_some_and(|since| since.elapsed() < UNFIT);
        if unfit || (self.led.is_empty() && !rules.divide().await?) {
            return Ok(());
        }
        let config = &rules.loaded.config;
        let others = rules.member.others().await?;
        let free = self.free(rules).await?;
        self.free = if free.is_empty() { None } else { self.free.or_else(|| Some(Instant::now())) };
        // The instances that should take it are unable to.
        let abandoned = self.free.is_some_and(|since| since.elapsed() > config.lease.ttl);
        let of = usize::try_from(config.lease.partitions).unwrap_or(usize::MAX);
        for partition in free {
            match next(self.led.len(), &others, of) {
                Next::Take => self.lead(rules, partition),
                Next::Keep | Next::HandOver if abandoned => self.lead(rules, partition),
                Next::Keep | Next::HandOver => break,
            }
        }
        rules.member.leads(Some(self.led.len()));
        let uneven = self.free.is_none() && next(self.led.len(), &others, of) == Next::HandOver;
        self.uneven = if uneven { self.uneven.or_else(|| Some(Instant::now())) } else { None };
        if self.uneven.is_some_and(|since| since.elapsed() >= SETTLED) {
            self.uneven = None;
            if let Some((partition, orders)) = self.led.last_key_value() {
                tracing::info!(
                    partition = partition.place(),
                    "another instance leads less: handing this partition over"
                );
                orders.send_replace(Order::HandOver);
            }
        }
        Ok(())
    }

    /// The partitions without a leader. Each instance starts at a random place, so that several instances do not
    /// compete for the same partition.
    async fn free(&self, rules: &Rules) -> Result<Vec<Partition>, Error> {
        let config = &rules.loaded.config;
        let of = config.lease.partitions;
        let ids: Vec<String> = Partition::all(of).map(|partition| partition.id(&config.name)).collect();
        let held = lease::held(&rules.connection.now(), &config.state.database, &ids).await?;
        let first = usize::try_from(RandomState::new().hash_one(of) % u64::from(of)).unwrap_or_default();
        let from_first = Partition::all(of).chain(Partition::all(of)).skip(first);
        let free = from_first
            .take(ids.len())
            .filter(|partition| !self.led.contains_key(partition) && !held.contains(&partition.id(&config.name)));
        Ok(free.collect())
    }

    fn lead(&mut self, rules: &Rules, partition: Partition) {
        let config = &rules.loaded.config;
        let id = partition.id(&config.name);
        let lease = Lease::new(rules.connection.clone(), &config.state.database, &id, config.lease.ttl);
        let (orders, told) = watch::channel(Order::Lead(rules.context.clone()));
        self.led.insert(partition, orders);
        let board = rules.board.clone();
        self.tasks.spawn(async move { (partition, take(&lease, &board, partition, told).await) });
    }

    fn hand_over_all(&self) {
        for orders in self.led.values() {
            orders.send_replace(Order::HandOver);
        }
    }

    fn ended(
        &mut self,
        rules: &Rules,
        ended: Result<(Partition, Result<Ended, Error>), tokio::task::JoinError>,
    ) -> Result<(), Error> {
        let (partition, ended) =
            ended.map_err(|error| Error::internal(format!("the leader of a partition has ended: {error}")))?;
        self.led.remove(&partition);
        rules.board.detach_partition(partition);
        if matches!(ended, Ok(Ended::Unfit)) {
            self.unfit = Some(Instant::now());
        }
        rules.member.leads(self.unfit.is_none_or(|since| since.elapsed() >= UNFIT).then_some(self.led.len()));
        let place = partition.place();
        match &ended {
            Ok(Ended::NotTaken) => return Ok(()),
            Ok(Ended::HandedOver) => tracing::info!(partition = place, "handed over"),
            Ok(Ended::Lost | Ended::Unfit) => {
                tracing::warn!(partition = place, "this instance leads this partition no more");
            }
            Err(error) => tracing::error!(partition = place, error = %error.message, "this partition has failed"),
        }
        rules
            .board
            .happened("standby", &format!("this instance leads partition {place} of {} no more", partition.of()));
        ended.map(drop)
    }
}

/// Takes the lease of a partition if it is free, and leads while it has the lease.
async fn take(
    lease: &Lease,
    board: &Board,
    partition: Partition,
    mut told: watch::Receiver<Order>,
) -> Result<Ended, Error> {
    let held = tokio::select! {
        held = lease.try_lead() => held,
        () = handing_over(&mut told) => return Ok(Ended::NotTaken),
    };
    match held {
        Ok(Some(held)) => lead(held, board, partition, told).await,
        Ok(None) => Ok(Ended::NotTaken),
        Err(error) => {
            tracing::warn!(partition = partition.place(), error = %error.message, "the lease cannot be read; trying again");
            Ok(Ended::NotTaken)
        }
    }
}

async fn lead(
    held: Held,
    board: &Board,
    partition: Partition,
    mut told: watch::Receiver<Order>,
) -> Result<Ended, Error> {
    let mut new = true;
    loop {
        let order = told.borrow_and_update().clone();
        let Order::Lead(context) = order else {
            held.release().await;
            return Ok(Ended::HandedOver);
        };
        let context = Arc::new(context.under(held.fence()).within(partition));
        let started = tokio::select! {
            started = start(&context) => started,
            () = held.lost() => return Ok(Ended::Lost),
            () = handing_over(&mut told) => continue,
        };
        let handle = match started {
            Ok(handle) => handle,
            // The privilege existed at startup, so the password is probably being changed and its file will follow.
            Err(error) if error.kind == Kind::Privilege => {
                tracing::warn!(error = %error.message, "following changes cannot begin; standing by again");
                held.release().await;
                return Ok(Ended::Unfit);
            }
            Err(error) => {
                held.release().await;
                return Err(error);
            }
        };
        board.attach(handle.context.clone(), handle.progress.clone());
        let (place, of, term) = (partition.place(), partition.of(), held.term());
        if std::mem::take(&mut new) {
            board.happened("leader", &format!("this instance leads partition {place} of {of}, term {term}"));
        }
        tracing::info!(partition = place, term, "following changes");
        tokio::select! {
            () = held.lost() => {
                handle.abort();
                return Ok(Ended::Lost);
            }
            // The lease is left to expire, because writes in progress may still be applied until then.
            () = finished(&handle) => return Err(Error::internal("the pipeline has ended by itself")),
            // The sender exists until the process ends.
            _ = told.changed() => {}
        }
        tokio::select! {
            () = handle.stop() => {}
            // Deadlines end the work in progress.
            () = held.lost() => return Ok(Ended::Lost),
        }
    }
}

/// Waits for the order to hand over.
async fn handing_over(told: &mut watch::Receiver<Order>) {
    if told.wait_for(|order| matches!(order, Order::HandOver)).await.is_err() {
        std::future::pending::<()>().await;
    }
}
