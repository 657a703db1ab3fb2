//! Reads that concurrent requests share.

use std::time::Duration;

use tokio::{sync::Mutex, time::Instant};

use denormd_mongo::error::Result;

/// The last result of a read, which only one request at a time repeats.
#[derive(Debug)]
pub struct SharedRead<T>(Mutex<Option<(Instant, Result<T>)>>);

impl<T> Default for SharedRead<T> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<T: Clone> SharedRead<T> {
    /// The result of a `read` that began at most `age` before this call. An error is shared like any other result, so that those who
    /// wait do not all repeat a read that runs out of time.
    pub async fn get(&self, age: Duration, read: impl Future<Output = Result<T>>) -> Result<T> {
        let asked = Instant::now();
        let mut last = self.0.lock().await;
        if let Some((begun, result)) = &*last
            && *begun + age >= asked
        {
            return result.clone();
        }
        let begun = Instant::now();
        let result = read.await;
        *last = Some((begun, result.clone()));
        result
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    };

    use denormd_mongo::error::Error;
    use futures_util::future::join_all;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn those_who_wait_share_one_read_that_began_after_they_asked() {
        let (shared, reads) = (SharedRead::default(), Arc::new(AtomicU32::new(0)));
        let read = async || {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Ok(reads.fetch_add(1, Ordering::Relaxed))
        };
        let mut first = Box::pin(shared.get(Duration::ZERO, read()));
        assert!(futures_util::poll!(&mut first).is_pending());
        tokio::time::sleep(Duration::from_millis(500)).await;
        let others = join_all((0..50).map(|_| shared.get(Duration::ZERO, read())));
        let (first, others) = tokio::join!(first, others);
        assert_eq!(first.unwrap(), 0);
        assert!(others.into_iter().all(|result| result.unwrap() == 1), "the first read began before they asked");
        assert_eq!(shared.get(Duration::from_secs(2), read()).await.unwrap(), 1, "it is new enough");
        let fails = async { Err(Error::internal("no answer")) };
        assert!(shared.get(Duration::ZERO, fails).await.is_err());
        assert!(shared.get(Duration::from_secs(2), read()).await.is_err(), "nobody repeats it at once");
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(shared.get(Duration::from_secs(2), read()).await.unwrap(), 2);
    }
}
