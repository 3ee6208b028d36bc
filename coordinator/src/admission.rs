//! How many requests may be in the coordinator, and whether any may.
//! Invariant: a request holds a [`Permit`] until its stream ends; after [`Admission::close`] no permit is given.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::RequestError;

/// Bounds the requests; cheap to clone.
#[derive(Clone)]
pub struct Admission {
    permits: Arc<Semaphore>,
    is_closed: Arc<AtomicBool>,
    limit: usize,
}

/// The right to run one request.
pub struct Permit {
    _permit: OwnedSemaphorePermit,
}

impl Admission {
    /// Admits up to `limit` requests at once.
    pub fn new(limit: usize) -> Self {
        let limit = limit.clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
        Self { permits: Arc::new(Semaphore::new(limit)), is_closed: Arc::default(), limit }
    }

    /// Admits a request.
    ///
    /// # Errors
    /// [`RequestError::Overloaded`] at the limit, [`RequestError::ShuttingDown`] after [`Self::close`].
    pub fn enter(&self) -> Result<Permit, RequestError> {
        if self.is_closed.load(Ordering::Acquire) {
            return Err(RequestError::ShuttingDown);
        }
        let permit = Arc::clone(&self.permits).try_acquire_owned();
        let permit = permit.map_err(|_| RequestError::Overloaded { limit: self.limit })?;
        Ok(Permit { _permit: permit })
    }

    /// Requests now running.
    pub fn num_running(&self) -> usize {
        self.limit - self.permits.available_permits().min(self.limit)
    }

    /// Most requests at once.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Whether requests are still admitted.
    pub fn is_open(&self) -> bool {
        !self.is_closed.load(Ordering::Acquire)
    }

    /// Admits nothing any more.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    /// Waits until no request runs, or for `limit`; says whether all ended.
    pub async fn drained(&self, limit: Duration) -> bool {
        let all = self.permits.acquire_many(self.limit.try_into().unwrap_or(u32::MAX));
        tokio::time::timeout(limit, all).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn admits_up_to_the_limit_until_closed() {
        let admission = Admission::new(2);
        let (first, _second) = (admission.enter().unwrap(), admission.enter().unwrap());
        assert!(matches!(admission.enter(), Err(RequestError::Overloaded { limit: 2 })));
        drop(first);
        assert_eq!(admission.num_running(), 1);
        admission.close();
        assert!(matches!(admission.enter(), Err(RequestError::ShuttingDown)));
        assert!(!admission.drained(Duration::from_millis(10)).await);
    }
}
