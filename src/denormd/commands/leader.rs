//! Work for the leader: another process, or this one where nobody leads.

use std::sync::Arc;

use futures_util::future::try_join_all;
use tokio_util::sync::CancellationToken;

use crate::commands::{Failure, notice, plan::refusal, run};
use denormd_engine::{checkpoint::format, deployment::lease::Lease, preflight, reconcile::Context};
use denormd_model::partition::Partition;
use denormd_mongo::error::Error;
use denormd_rules::config::Loaded;

/// Runs `work`, which asks the leader for something and waits until it is done. While nobody leads, this process does: it
/// takes the lease, and follows changes as the daemon would, until the work is done.
pub async fn with_a_leader<T>(
    loaded: &Loaded,
    context: &Arc<Context>,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Failure> {
    let stop = CancellationToken::new();
    let (mut work, mut leading) = (Box::pin(work), Box::pin(lead(loaded, context, stop.clone())));
    let result = tokio::select! {
        result = &mut work => result,
        Err(failure) = &mut leading => return Err(failure),
    };
    stop.cancel();
    leading.await?;
    Ok(result?)
}

/// Stands by, and leads whatever nobody else does, until `stop`: in the partitions that the deployment is divided into,
/// whatever the config says.
async fn lead(loaded: &Loaded, context: &Arc<Context>, stop: CancellationToken) -> Result<(), Failure> {
    let config = &loaded.config;
    let of = format::check(&context.server, &config.state.database, &config.name).await?;
    let partitions = Partition::all(of).map(|partition| lead_one(loaded, context, partition, stop.clone()));
    try_join_all(partitions).await?;
    Ok(())
}

async fn lead_one(
    loaded: &Loaded,
    context: &Arc<Context>,
    partition: Partition,
    stop: CancellationToken,
) -> Result<(), Failure> {
    let config = &loaded.config;
    let id = partition.id(&config.name);
    let lease = Lease::new(context.server.unfenced(), &config.state.database, &id, config.lease.ttl);
    while !stop.is_cancelled() {
        let held = tokio::select! {
            held = lease.stand_by() => held,
            () = stop.cancelled() => break,
        };
        let mut findings = preflight::privileges(&context.server, &context.plan, &config.state.database).await?;
        if findings.is_empty() {
            findings = preflight::check(&context.server, &context.plan).await?;
        }
        if !findings.is_empty() {
            held.release().await;
            return Err(Failure::Refused(refusal(&findings)));
        }
        if partition.place() == 0 {
            notice("no daemon leads: doing it here");
        }
        let context = Arc::new(context.under(held.fence()).within(partition));
        let handle = tokio::select! {
            started = run::start(&context) => started?,
            () = held.lost() => continue,
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = held.lost() => {
                handle.abort();
                continue;
            }
            () = run::finished(&handle) => return Err(Error::internal("the pipeline has ended by itself").into()),
        }
        tokio::select! {
            () = handle.stop() => held.release().await,
            // What is in flight ends by its deadlines.
            () = held.lost() => {}
        }
    }
    Ok(())
}
