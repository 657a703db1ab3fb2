//! Keys whose reads take too long. A large batch is divided; in a small one, each key runs alone, one at a time
//! ([`crate::workqueue`]), with a longer limit after each timeout, until it becomes a dead letter.

use std::time::Duration;

use crate::reconcile::batch::{End, Ended, Item, Run};
use denormd_mongo::error::Error;

/// Smallest batch that is divided. With fewer keys, each is tried alone. A larger batch may take too long only because
/// of the number of its keys.
const FEW: usize = 16;
/// Divisor of a batch that is divided.
const SHARE: usize = 8;
/// If a read for several keys takes too long, usually only one of them is slow. Each is first tried alone for this
/// fraction of `limits.read_timeout`, so that the others do not wait for it.
const PART: u32 = 16;
/// The longest time limit of a key, in multiples of `limits.read_timeout`.
const LONGEST: u32 = 10;

/// Time limit of a key's next read, after a read for this number of keys took too long; None if the key had the
/// longest. `limit` is the key's last limit, if it is known to be slow.
#[must_use]
pub fn next_limit(limit: Option<Duration>, keys: usize, timeout: Duration) -> Option<Duration> {
    match limit {
        None if keys > 1 => Some(timeout / PART),
        None => Some(timeout * 2),
        Some(limit) if limit >= timeout * LONGEST => None,
        Some(limit) => Some((limit * 2).min(timeout * LONGEST)),
    }
}

/// Keys of a smaller batch, after a read for this number of keys took too long; None if each is tried alone.
fn fewer(keys: usize) -> Option<usize> {
    (keys >= FEW).then_some(keys / SHARE)
}

impl Run<'_> {
    /// Handles a read for all of these keys that took too long. Many keys are divided into smaller batches; few are
    /// tried alone, for longer each time.
    pub(super) async fn too_slow(&self, mut items: Vec<Item>, error: Error) -> Vec<Ended> {
        let (keys, timeout) = (items.len(), self.context.limits.read_timeout);
        let error = error.context(&format!("a read took longer than {:?}", self.limit));
        let at_once = fewer(keys).unwrap_or(1);
        tracing::warn!(rule = %self.rule.name, keys, at_once, error = %error.message, "reads take too long; batches are made smaller");
        self.context.metrics.record_error(Some(&self.rule.name), "read", &error);
        if at_once > 1 {
            for item in &mut items {
                item.work.slowness_mut().batch_keys = Some(at_once);
                item.end = Some(End::Later(Duration::ZERO));
            }
            return items.into_iter().map(Item::ended).collect();
        }
        for item in &mut items {
            item.end = Some(match next_limit(item.work.slowness().read_limit, keys, timeout) {
                Some(limit) => {
                    item.work.slowness_mut().read_limit = Some(limit);
                    End::Later(Duration::ZERO)
                }
                None => self.set_aside(item, &error).await,
            });
        }
        items.into_iter().map(Item::ended).collect()
    }

    /// Removes the limit of keys that were read quickly, even if their result is a dead letter.
    pub(super) fn judge_speed(&self, items: &mut [Item]) {
        if self.started.elapsed() < self.context.limits.read_timeout / PART {
            for item in items.iter_mut().filter(|item| matches!(item.end, None | Some(End::Done | End::DeadLetter))) {
                item.work.clear_read_limit();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_key_is_given_twice_as_long_each_time_and_ten_times_the_limit_at_most() {
        let timeout = Duration::from_secs(60);
        let limits = |first: Option<Duration>| {
            let limits = std::iter::successors(first, |limit| next_limit(Some(*limit), 1, timeout));
            limits.take(20).map(|limit| limit.as_millis() / 10).collect::<Vec<_>>()
        };
        assert_eq!(limits(next_limit(None, 1, timeout)), [12_000, 24_000, 48_000, 60_000]);
        let after_others = limits(next_limit(None, 10, timeout));
        assert_eq!(after_others, [375, 750, 1500, 3000, 6000, 12_000, 24_000, 48_000, 60_000]);
    }

    #[test]
    fn a_batch_is_divided_until_it_is_small_enough_to_try_each_key_alone() {
        let batches = |keys: usize| std::iter::successors(Some(keys), |keys| fewer(*keys)).collect::<Vec<_>>();
        assert_eq!(batches(1000), [1000, 125, 15]);
        assert_eq!(batches(16), [16, 2]);
        assert_eq!(batches(15), [15]);
    }
}
