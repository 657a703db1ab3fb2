//! `denormd run`: stand by, lead, follow changes; and again when the lease is lost.

use std::{sync::Arc, time::Duration};

use crate::{
    checkpoint::store::Store,
    commands::{Failure, compile, context},
    config::{Config, Loaded},
    error::Error,
    lease::{Held, Lease},
    logging,
    pipeline::{self, Handle},
    preflight,
    reconcile::Context,
};

/// How often a running pipeline is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// Runs the daemon until SIGTERM or SIGINT.
pub async fn run(loaded: &Loaded) -> Result<(), Failure> {
    let config = &loaded.config;
    logging::start(&config.log);
    let plan = compile(loaded).await?;
    let context = context(loaded, plan).await?;
    let findings = preflight::check(&context.server, &context.plan).await?;
    if !findings.is_empty() {
        return Err(Failure::Refused(super::plan::refusal(&findings)));
    }
    let mut signals = Signals::listen()?;
    let lease = Lease::new(context.server.unfenced(), &config.state.database, &config.name, config.lease.ttl);
    loop {
        tracing::info!(rules = config.rules.len(), deployment = %config.name, "standing by");
        let held = tokio::select! {
            held = lease.stand_by() => held,
            () = signals.next() => break,
        };
        if lead(config, &context, held, &mut signals).await? == Ended::Stopped {
            break;
        }
    }
    tracing::info!("stopped");
    Ok(())
}

/// How a leadership ended.
#[derive(Debug, PartialEq)]
enum Ended {
    /// By a signal: everything is saved and the lease is given back.
    Stopped,
    /// Another instance may lead now.
    Lost,
}

/// Follows changes while the lease lasts.
async fn lead(config: &Config, context: &Context, held: Held, signals: &mut Signals) -> Result<Ended, Failure> {
    let context = Arc::new(context.under(held.fence()));
    let started = tokio::select! {
        started = start(config, &context) => started,
        () = held.lost() => return Ok(Ended::Lost),
        () = signals.next() => {
            held.release().await;
            return Ok(Ended::Stopped);
        }
    };
    let handle = match started {
        Ok(handle) => handle,
        Err(error) => {
            held.release().await;
            return Err(error.into());
        }
    };
    tracing::info!(term = held.term(), "following changes");
    tokio::select! {
        () = held.lost() => {
            handle.abort();
            return Ok(Ended::Lost);
        }
        // The lease runs out by itself: what was in flight when the pipeline broke may still be written until then.
        () = finished(&handle) => {
            return Err(Error::internal("the pipeline has ended by itself").into());
        }
        () = signals.next() => {}
    }
    tracing::info!("stopping: what is in flight is finished, then the position is saved");
    tokio::select! {
        () = handle.stop() => {}
        // What is in flight ends by its deadlines.
        () = held.lost() => return Ok(Ended::Stopped),
        () = signals.next() => return Err(Error::internal("stopped at once by a second signal").into()),
    }
    held.release().await;
    Ok(Ended::Stopped)
}

/// Opens the state and starts the pipeline, through everything that passes by itself.
async fn start(config: &Config, context: &Arc<Context>) -> Result<Handle, Error> {
    loop {
        let attempt = async {
            let store = Store::open(&context.server, &config.state.database, &config.name).await?;
            pipeline::start(context.clone(), store).await
        };
        match attempt.await {
            Err(error) if error.is_transient() => {
                tracing::warn!(error = %error.message, "following changes cannot begin yet; trying again");
                tokio::time::sleep(LOOK / 2).await;
            }
            result => return result,
        }
    }
}

async fn finished(handle: &Handle) {
    while !handle.is_finished() {
        tokio::time::sleep(LOOK).await;
    }
}

struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    fn listen() -> Result<Self, Error> {
        use tokio::signal::unix::{SignalKind, signal};
        let listen =
            |kind| signal(kind).map_err(|error| Error::internal(format!("signals cannot be handled: {error}")));
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
