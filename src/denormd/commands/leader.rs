//! Work for the leader: another process, or this one where nobody leads.

use std::{pin::pin, sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::commands::{Failure, notice, plan::refusal};
use denormd_engine::{
    checkpoint::{format, requests::RequestedWork, store::Store},
    deployment::{identity::Identity, lease},
    leadership::{Deployment, Ended, Event, Share},
    preflight,
    reconcile::Context,
};
use denormd_model::{partition::Partition, rule_state::RuleState};
use denormd_mongo::error::{Error, Kind};
use denormd_rules::config::Loaded;

/// Interval between looks at the number of partitions and at their leases.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// Time limit for a partition without a leader, beyond three lease times: a running daemon that can lead it takes over earlier.
const UNLED: Duration = Duration::from_secs(10);

/// The hint for a config that lacks rules of the deployment.
pub(super) const LACKING: &str =
    "use the config of the daemon; if the rules are to go, start `denormd run` with this config first";

/// Has the leader do `work` for a rule, and waits until it is done. Nothing is requested if no daemon leads and the rules
/// cannot run here, and a request that fails is withdrawn: no later leader carries it out. `gone` are rules that the
/// command is about, which need not be in this config.
pub async fn request(
    loaded: &Loaded,
    context: &Arc<Context>,
    store: &Store,
    (rule, work): (&str, RequestedWork),
    gone: &[&str],
) -> Result<(), Failure> {
    let server = &context.server;
    let is_led = lease::is_held(server, store.database(), store.ids()).await?;
    if !is_led {
        ready(loaded, context, gone).await?;
    }
    let asked = store.request(server, rule, &work).await?;
    let done = lead(loaded, context, (gone, !is_led), store.until_done(server, asked)).await;
    if done.is_err() {
        store.withdraw(server, asked).await.ok();
    }
    done
}

/// Refuses to lead with a config that lacks rules of the deployment, which would remove them, or with rules that
/// cannot run.
pub async fn ready(loaded: &Loaded, context: &Arc<Context>, gone: &[&str]) -> Result<(), Failure> {
    let config = &loaded.config;
    let store = Store::open(&context.server, &config.state.database, &config.name).await?;
    let is_planned = |name: &str| context.plan.named(name).is_some();
    let known = store.standing(&context.server).await?.into_iter();
    // A rule that is blocked before its first write is not removed with the others: it has written nothing.
    let runs = known.filter(|(_, record)| record.state != RuleState::Removed && !record.state.awaits_agreement());
    let runs = runs.map(|(name, _)| name);
    let lacking: Vec<String> = runs.filter(|name| !is_planned(name) && !gone.contains(&name.as_str())).collect();
    if !lacking.is_empty() {
        let message = format!(
            "no daemon leads, and this config lacks rules of the deployment `{}`: {}",
            config.name,
            lacking.join(", ")
        );
        return Err(Error::new(Kind::State, message).hint(LACKING).into());
    }
    let findings = preflight::all(&context.server, &context.plan, &config.state.database).await?;
    if findings.is_empty() { Ok(()) } else { Err(Failure::Refused(refusal(&findings))) }
}

/// Runs `work`, which asks the leader for something and waits until it is done. While nobody leads, this process does: it
/// takes the lease, and follows changes as the daemon would, until the work is done. Leads whatever nobody else does, in the
/// partitions that the deployment is divided into, whatever the config says.
pub async fn with_a_leader<T>(
    loaded: &Loaded,
    context: &Arc<Context>,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Failure> {
    lead(loaded, context, (&[], false), work).await
}

/// The same. `checked` is true if this process was found ready to lead without the rules that are `gone`.
async fn lead<T>(
    loaded: &Loaded,
    context: &Arc<Context>,
    (gone, mut checked): (&[&str], bool),
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Failure> {
    let config = &loaded.config;
    let deployment = Deployment {
        connection: context.server.unfenced().into(),
        database: config.state.database.clone(),
        name: config.name.clone(),
        ttl: config.lease.ttl,
        partitions: format::check(&context.server, &config.state.database, &config.name).await?,
        instance: Identity::of_this_process(),
        member: None,
    };
    let divided = deployment.partitions;
    let mut share = Share::new(deployment, context.clone(), |handle, first| {
        if first && handle.context.partition.place() == 0 {
            notice("no daemon leads: this command takes the lease and does the work");
        }
    });
    let mut work = pin!(work);
    let mut look = tokio::time::interval_at(Instant::now() + POLL_INTERVAL, POLL_INTERVAL);
    let ids: Vec<String> = Partition::all(divided).map(|partition| partition.id(&config.name)).collect();
    let mut unled: Option<Instant> = None;
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
                let held = lease::held(&context.server, &config.state.database, &ids).await;
                unled = if held.is_ok_and(|held| held.len() < ids.len()) { unled.or(Some(Instant::now())) } else { None };
                if unled.is_some_and(|since| since.elapsed() > config.lease.ttl * 3 + UNLED) {
                    break Err(Error::new(Kind::State, "a daemon runs, but at least one partition has no leader")
                        .hint("`denormd status` and the daemon's log say why"));
                }
            }
            event = share.next() => match event? {
                Event::Free(free) => {
                    if !checked && !free.is_empty() {
                        ready(loaded, context, gone).await?;
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
