//! How many requests may be in the coordinator, and whether any may.
//! Invariants: a request holds a [`Permit`] until its stream ends; after [`Admission::close`] no permit is given; what one
//! tenant has running never keeps another from its share of the limit.
//! Not here: limits of a tenant's own ([`crate::tenants`]).

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{
    error::RequestError,
    tenants::{Entry, Tenant, Tenants},
};

/// Bounds the requests; cheap to clone.
#[derive(Clone)]
pub struct Admission {
    permits: Arc<Semaphore>,
    /// For tenants that have less than their share when the others have all.
    spare: Arc<Semaphore>,
    is_closed: Arc<AtomicBool>,
    limit: usize,
}

/// The right to run one request.
pub struct Permit {
    /// Its tenant's side.
    pub entry: Entry,
    _permit: OwnedSemaphorePermit,
}

impl Admission {
    /// Admits up to `limit` requests at once.
    pub fn new(limit: usize) -> Self {
        let limit = limit.clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
        let semaphore = || Arc::new(Semaphore::new(limit));
        Self { permits: semaphore(), spare: semaphore(), is_closed: Arc::default(), limit }
    }

    /// Checks that so many sequences could ever run at once: those of one request start together.
    ///
    /// # Errors
    /// [`RequestError::Invalid`] with both numbers.
    pub fn check_count(&self, num_sequences: usize) -> Result<(), RequestError> {
        if num_sequences <= self.limit {
            return Ok(());
        }
        let limit = self.limit;
        let problem =
            format!("with all prompts makes {num_sequences} choices at once; this server runs at most {limit}");
        Err(RequestError::invalid("n", problem))
    }

    /// Admits a request of a tenant.
    ///
    /// # Errors
    /// [`RequestError::ShuttingDown`] after [`Self::close`], the tenant's own, [`RequestError::Overloaded`] at the limit.
    pub fn enter(&self, tenants: &Tenants, tenant: &Arc<Tenant>) -> Result<Permit, RequestError> {
        if self.is_closed.load(Ordering::Acquire) {
            return Err(RequestError::ShuttingDown);
        }
        let entry = tenant.enter()?;
        let has_less = || tenant.in_use().num_running <= tenants.share(tenant, self.limit);
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok();
        let permit = permit.or_else(|| has_less().then(|| Arc::clone(&self.spare).try_acquire_owned().ok()).flatten());
        let permit = permit.ok_or(RequestError::Overloaded { limit: self.limit })?;
        Ok(Permit { entry, _permit: permit })
    }

    /// Requests now running.
    pub fn num_running(&self) -> usize {
        let num_free = self.permits.available_permits() + self.spare.available_permits();
        (2 * self.limit).saturating_sub(num_free)
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
        let count = self.limit.try_into().unwrap_or(u32::MAX);
        let all = async { tokio::join!(self.permits.acquire_many(count), self.spare.acquire_many(count)) };
        tokio::time::timeout(limit, all).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn admits_up_to_the_limit_until_closed() {
        let tenants = Tenants::open(None).unwrap();
        let tenant = tenants.authenticate(None).unwrap();
        let admission = Admission::new(2);
        let enter = || admission.enter(&tenants, &tenant);
        let (first, _second) = (enter().unwrap(), enter().unwrap());
        assert!(matches!(enter(), Err(RequestError::Overloaded { limit: 2 })));
        assert_eq!((admission.num_running(), tenant.in_use().num_running), (2, 2));
        assert!(admission.check_count(2).is_ok());
        let refused = admission.check_count(3).unwrap_err().to_string();
        assert_eq!(refused, "n: with all prompts makes 3 choices at once; this server runs at most 2");
        drop(first);
        assert_eq!((admission.num_running(), tenant.in_use().num_running), (1, 1));
        admission.close();
        assert!(matches!(enter(), Err(RequestError::ShuttingDown)));
        assert!(!admission.drained(Duration::from_millis(10)).await);
    }
}
