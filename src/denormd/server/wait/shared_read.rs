//! Reads that concurrent requests share.

use std::time::Duration;

use tokio::{sync::Mutex, time::Instant};

/// The last result of a read, which only one request at a time repeats.
#[derive(Debug)]
pub struct SharedRead<T>(Mutex<Option<(Instant, T)>>);

impl<T> Default for SharedRead<T> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<T: Clone> SharedRead<T> {
    /// The result of a `read` that began at most `age` before this call.
    pub async fn get<E>(&self, age: Duration, read: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        let asked = Instant::now();
        let mut last = self.0.lock().await;
        if let Some((begun, result)) = &*last
            && *begun + age >= asked
        {
            return Ok(result.clone());
        }
        let begun = Instant::now();
        let result = read.await?;
        *last = Some((begun, result.clone()));
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    };

    use futures_util::future::join_all;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn those_who_wait_share_one_read_that_began_after_they_asked() {
        let (shared, reads) = (SharedRead::default(), Arc::new(AtomicU32::new(0)));
        let read = async || {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Ok::<_, ()>(reads.fetch_add(1, Ordering::Relaxed))
        };
        let mut first = Box::pin(shared.get(Duration::ZERO, read()));
        assert!(futures_util::poll!(&mut first).is_pending());
        tokio::time::sleep(Duration::from_millis(500)).await;
        let others = join_all((0..50).map(|_| shared.get(Duration::ZERO, read())));
        let (first, others) = tokio::join!(first, others);
        assert_eq!(first, Ok(0));
        assert_eq!(others, vec![Ok(1); 50], "the first read began before they asked");
        assert_eq!(shared.get(Duration::from_secs(2), read()).await, Ok(1), "it is new enough");
        assert_eq!(shared.get(Duration::ZERO, async { Err(()) }).await, Err(()));
        assert_eq!(shared.get(Duration::from_secs(60), read()).await, Ok(1), "an error replaces nothing");
    }
}
