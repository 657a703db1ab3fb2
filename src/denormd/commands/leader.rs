//! Work for the leader: another process, or this one where nobody leads.

use std::{pin::pin, sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::commands::{Failure, notice, plan::refusal, run::signals::Signals};
use denormd_engine::{
    checkpoint::{format, requests::RequestedWork, rule_record::RuleRecord, store::Store},
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
/// cannot run here, and a request that fails or is interrupted is withdrawn: the leader stops its work, and no later leader carries
/// it out. `gone` are rules that the command is about, which need not be in this config.
pub async fn request(
    loaded: &Loaded,
    context: &Arc<Context>,
    store: &Store,
    (rule, work): (&str, RequestedWork),
    gone: &[&str],
    signals: &mut Signals,
) -> Result<(), Failure> {
    let server = &context.server;
    let is_led = lease::is_held(server, store.database(), store.ids()).await?;
    if !is_led {
        ready(loaded, context, gone).await?;
    }
    let mut again = Signals::listen(&[])?;
    let asked = store.request(server, rule, &work).await?;
    let withdrawn = async || {
        if let Err(error) = store.withdraw(server, asked).await {
            notice(&format!(
                "the request could not be withdrawn, so a leader may work on it for another minute: {error}"
            ));
        }
    };
    let work = async {
        tokio::select! {
            done = store.until_done(server, asked) => done.map(|()| true),
            () = signals.any() => {
                withdrawn().await;
                Ok(false)
            }
        }
    };
    let twice = async {
        again.any().await;
        again.any().await;
    };
    let done = tokio::select! {
        done = lead(loaded, context, (gone, !is_led), work) => done,
        // The second signal does not wait for writes in flight.
        () = twice => Ok(false),
    };
    if done.is_err() {
        withdrawn().await;
    }
    if done? { Ok(()) } else { Err(interrupted(rule)) }
}

/// Runs a part of a command that reads only, until a signal ends it.
pub async fn unless_interrupted<T>(
    rule: &str,
    signals: &mut Signals,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Failure> {
    tokio::select! {
        done = work => Ok(done?),
        () = signals.any() => Err(interrupted(rule)),
    }
}

fn interrupted(rule: &str) -> Failure {
    Failure::Interrupted(format!(
        "{rule}: interrupted; a leader that works on it stops at its next page, and what is done so far stays"
    ))
}

/// Refuses to lead with a config that lacks rules of the deployment, which would remove them, or with rules that
/// cannot run.
pub async fn ready(loaded: &Loaded, context: &Arc<Context>, gone: &[&str]) -> Result<(), Failure> {
    let config = &loaded.config;
    let store = Store::open(&context.server, &config.state.database, &config.name).await?;
    let is_planned = |name: &str| context.plan.named(name).is_some();
    let known = store.rules(&context.server).await?.into_iter();
    // A leader without a rule that was blocked before its first write removes nothing of it.
    let has_written = |record: &RuleRecord| !record.state.awaits_agreement() || !record.retired.is_empty();
    let runs = known.filter(|(_, record)| record.state != RuleState::Removed && has_written(record));
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
