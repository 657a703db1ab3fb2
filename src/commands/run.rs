//! `denormd run`

use crate::{
    checkpoint::store::Store,
    commands::{Failure, compile, context},
    config::Loaded,
    error::Error,
    logging, pipeline, preflight,
};

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
    let store = Store { database: config.state.database.clone(), deployment: config.name.clone() };
    let mut signals = Signals::listen()?;
    let handle = pipeline::start(context, store).await?;
    tracing::info!(rules = config.rules.len(), deployment = %config.name, "following changes");
    signals.next().await;
    tracing::info!("stopping: what is in flight is finished, then the position is saved");
    tokio::select! {
        () = handle.stop() => {}
        () = signals.next() => return Err(Error::internal("stopped at once by a second signal").into()),
    }
    tracing::info!("stopped");
    Ok(())
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
