//! Requests of the pipeline to a job that runs beside it.

use std::{collections::HashMap, hash::Hash};

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Requests that are not taken yet, at most one for each key: a newer one replaces an older one. Adding never waits,
/// because the pipeline must not wait for a job that waits for the pipeline.
#[derive(Debug)]
pub struct Mailbox<K, V> {
    requests: Mutex<HashMap<K, V>>,
    added: Notify,
}

impl<K, V> Default for Mailbox<K, V> {
    fn default() -> Self {
        Self { requests: Mutex::default(), added: Notify::new() }
    }
}

impl<K: Eq + Hash, V> Mailbox<K, V> {
    /// Adds a request, in place of an older one of the same key.
    pub fn put(&self, key: K, request: V) {
        self.requests.lock().insert(key, request);
        self.added.notify_one();
    }

    /// Takes all requests.
    #[must_use]
    pub fn take(&self) -> Vec<V> {
        self.requests.lock().drain().map(|(_, request)| request).collect()
    }

    /// Waits until there are requests, and takes them. Cancellation loses none.
    pub async fn wait(&self) -> Vec<V> {
        loop {
            let requests = self.take();
            if !requests.is_empty() {
                return requests;
            }
            self.added.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_the_newest_request_of_a_key_is_taken() {
        let mailbox = Mailbox::default();
        for request in 0..1000 {
            mailbox.put("a", request);
        }
        mailbox.put("b", 1);
        let mut taken = mailbox.wait().await;
        taken.sort_unstable();
        assert_eq!(taken, [1, 999]);
        let (taken, ()) = tokio::join!(mailbox.wait(), async { mailbox.put("a", 7) });
        assert_eq!(taken, [7]);
    }
}
