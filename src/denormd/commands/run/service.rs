//! Notifications to systemd (`Type=notify`). Without systemd, none are sent.

use std::sync::Arc;

use sd_notify::NotifyState;

use crate::status::Board;

/// Reports that the daemon is ready, or has taken in a new config.
pub fn ready() {
    say(&[NotifyState::Ready]);
}

/// Reports that the daemon is stopping.
pub fn stopping() {
    say(&[NotifyState::Stopping]);
}

fn say(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::debug!(%error, "systemd could not be notified");
    }
}

/// Reports that a reload has started; [`ready`] ends it.
pub fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => say(&[NotifyState::Reloading, now]),
        Err(error) => tracing::debug!(%error, "no clock"),
    }
}

/// Reports that the loop is running, twice as often as the unit requires, while that is true.
pub async fn watchdog(board: Arc<Board>) {
    let Some(limit) = sd_notify::watchdog_enabled() else { return };
    let mut tick = tokio::time::interval(limit / 2);
    loop {
        tick.tick().await;
        if board.is_live() {
            // The call may block: a service manager that does not read must not block the runtime.
            let said = tokio::task::spawn_blocking(|| say(&[NotifyState::Watchdog]));
            if let Err(error) = said.await {
                tracing::debug!(%error, "systemd could not be notified");
            }
        }
    }
}
