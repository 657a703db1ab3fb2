//! The rate of backfills: limited by the config, and by the replication lag of the majority.
//!
//! A backfill that writes faster than the secondaries replicate delays the majority commit point. Then all majority
//! writes and reads wait, and finally the server's flow control slows down all writers. So a page waits while the
//! majority lags behind.

use std::time::Duration;

use tokio::time::Instant;

use crate::{reconcile::Context, snapshot::HeldBack};
use denormd_mongo::{error::Result, primary::majority_lag};

/// Maximum lag of the majority behind the primary's last write. Flow control starts at ten seconds.
const BEHIND: Duration = Duration::from_secs(2);
/// Interval between checks of the lag.
const ASK: Duration = Duration::from_millis(500);

/// The pace of one backfill.
#[derive(Debug)]
pub struct Pace<'a> {
    context: &'a Context,
    rule: &'a str,
    /// The earliest time at which the next page may be requested.
    due: Instant,
    asked: Option<Instant>,
}

impl<'a> Pace<'a> {
    /// The pace of a backfill of `rule` that is about to start.
    #[must_use]
    pub fn new(context: &'a Context, rule: &'a str) -> Self {
        Self { context, rule, due: Instant::now(), asked: None }
    }

    fn per_second(&self) -> Option<usize> {
        self.context.limits.backfill_per_second
    }

    fn tell(&self, why: Option<HeldBack>) {
        self.context.published.backfill(self.rule, |progress| progress.held_back = why);
    }

    /// The maximum number of targets in a page. A low limit makes pages smaller, so that they do not exceed the rate.
    #[must_use]
    pub fn page(&self, most: i32) -> i32 {
        let limit = self.per_second().and_then(|limit| i32::try_from(limit).ok());
        limit.map_or(most, |limit| limit.min(most))
    }

    /// Waits until the next page may be requested, after one of `targets`.
    pub async fn keep(&mut self, targets: usize) -> Result<()> {
        let now = Instant::now();
        let mut why = None;
        self.due = self.due.max(now) + self.span(targets);
        if self.due > now && self.per_second().is_some() {
            why = Some(HeldBack::Limit);
            self.tell(why);
            tokio::time::sleep_until(self.due).await;
        }
        while self.is_behind().await? {
            why = Some(HeldBack::MajorityBehind);
            self.tell(why);
            tokio::time::sleep(ASK).await;
            self.asked = None;
        }
        self.tell(why.filter(|why| *why == HeldBack::Limit));
        Ok(())
    }

    fn span(&self, targets: usize) -> Duration {
        let Some(limit) = self.per_second() else { return Duration::ZERO };
        let millis = targets.saturating_mul(1000) / limit.max(1);
        Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX))
    }

    async fn is_behind(&mut self) -> Result<bool> {
        if self.asked.is_some_and(|asked| asked.elapsed() < ASK) {
            return Ok(false);
        }
        self.asked = Some(Instant::now());
        Ok(majority_lag(&self.context.server.hello().await?) > BEHIND)
    }
}
