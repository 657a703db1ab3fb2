//! Work for the leader: another process, or this one where nobody leads.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::{
    commands::{Failure, notice, plan::refusal, run},
    config::Loaded,
    error::Error,
    lease::Lease,
    preflight,
    reconcile::Context,
};

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

/// Stands by, and leads whenever nobody else does, until `stop`.
async fn lead(loaded: &Loaded, context: &Arc<Context>, stop: CancellationToken) -> Result<(), Failure> {
    let config = &loaded.config;
    let lease = Lease::new(context.server.unfenced(), &config.state.database, &config.name, config.lease.ttl);
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
        notice("no daemon leads: doing it here");
        let context = Arc::new(context.under(held.fence()));
        let handle = tokio::select! {
            started = run::start(loaded, &context) => started?,
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
