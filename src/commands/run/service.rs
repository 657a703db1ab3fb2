//! What systemd is told (`Type=notify`). Without it, nothing is said to anybody.

use std::sync::Arc;

use sd_notify::NotifyState;

use crate::status::Board;

/// Says it.
pub fn say(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::debug!(%error, "the service manager cannot be told");
    }
}

/// Says that a reload has begun; [`NotifyState::Ready`] ends it.
pub fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => say(&[NotifyState::Reloading, now]),
        Err(error) => tracing::debug!(%error, "no clock"),
    }
}

/// Says that the loop turns, twice as often as the unit demands, for as long as it does.
pub async fn watchdog(board: Arc<Board>) {
    let Some(limit) = sd_notify::watchdog_enabled() else { return };
    let mut tick = tokio::time::interval(limit / 2);
    loop {
        tick.tick().await;
        if board.is_live() {
            // It may block: a service manager that does not read must not hold up the runtime.
            let said = tokio::task::spawn_blocking(|| say(&[NotifyState::Watchdog]));
            if let Err(error) = said.await {
                tracing::debug!(%error, "the service manager cannot be told");
            }
        }
    }
}
