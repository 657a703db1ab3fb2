//! Work for the leader: another process, or this one where nobody leads.

use std::{pin::pin, sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::commands::{Failure, notice, plan::refusal};
use denormd_engine::{
    checkpoint::format,
    leadership::{Deployment, Ended, Event, Share},
    preflight,
    reconcile::Context,
};
use denormd_mongo::error::{Error, Kind};
use denormd_rules::config::Loaded;

/// Interval between looks at the number of partitions.
const LOOK: Duration = Duration::from_secs(5);

/// Runs `work`, which asks the leader for something and waits until it is done. While nobody leads, this process does: it
/// takes the lease, and follows changes as the daemon would, until the work is done. Leads whatever nobody else does, in the
/// partitions that the deployment is divided into, whatever the config says.
pub async fn with_a_leader<T>(
    loaded: &Loaded,
    context: &Arc<Context>,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Failure> {
    let config = &loaded.config;
    let deployment = Deployment {
        connection: context.server.unfenced().into(),
        database: config.state.database.clone(),
        name: config.name.clone(),
        ttl: config.lease.ttl,
        partitions: format::check(&context.server, &config.state.database, &config.name).await?,
        member: None,
    };
    let divided = deployment.partitions;
    let mut share = Share::new(deployment, context.clone(), |handle, first| {
        if first && handle.context.partition.place() == 0 {
            notice("no daemon leads: doing it here");
        }
    });
    let (mut work, mut checked) = (pin!(work), false);
    let mut look = tokio::time::interval_at(Instant::now() + LOOK, LOOK);
    let result = loop {
        tokio::select! {
            result = &mut work => break result,
            _ = look.tick() => {
                let now = format::check(&context.server, &config.state.database, &config.name).await;
                // Without an answer the number is not known, and the work says what is wrong.
                if now.is_ok_and(|now| now != divided) {
                    break Err(Error::new(Kind::State, "the number of partitions was changed meanwhile")
                        .hint("run the command again"));
                }
            }
            event = share.next() => match event? {
                Event::Free(free) => {
                    if !checked && !free.is_empty() {
                        let findings = preflight::all(&context.server, &context.plan, &config.state.database).await?;
                        if !findings.is_empty() {
                            return Err(Failure::Refused(refusal(&findings)));
                        }
                        checked = true;
                    }
                    share.act(free);
                }
                Event::Ended(_, ended) => if let Ended::Unfit(error) = ended? {
                    return Err(error.into());
                },
            },
        }
    };
    share.hand_over();
    while let Some((_, ended)) = share.ended().await.transpose()? {
        ended?;
    }
    Ok(result?)
}
