//! One tenant: its limits, and what its requests use of them.
//! Invariants: a request holds an [`Entry`] for as long as it runs; the most that it may use is reserved before it starts,
//! and what it did use is counted when the entry is dropped, however it ended.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use lockstep_proto::v1;
use tokio::time::Instant;

use super::{bucket::Bucket, budget::Budget, file::TenantSpec};
use crate::error::RequestError;

/// Somebody who may use this coordinator.
#[derive(Debug)]
pub struct Tenant {
    name: Arc<str>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    spec: TenantSpec,
    num_running: usize,
    bucket: Option<Bucket>,
    budget: Budget,
}

/// What a tenant uses now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantUse {
    /// Requests that run.
    pub num_running: usize,
    /// Tokens left of the budget, if there is one.
    pub budget_left: Option<u64>,
}

impl Tenant {
    /// With everything that the file grants unused.
    pub fn new(spec: TenantSpec) -> Self {
        let bucket = spec.tokens_per_minute.map(|per_minute| Bucket::new(per_minute, Instant::now()));
        let name = Arc::from(spec.name.as_str());
        Self { name, state: Mutex::new(State { spec, num_running: 0, bucket, budget: Budget::default() }) }
    }

    /// Its name.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Its part beside others.
    pub fn weight(&self) -> u32 {
        self.state().spec.weight
    }

    /// Whether it may call Admin.
    pub fn is_admin(&self) -> bool {
        self.state().spec.admin
    }

    /// What it uses now.
    pub fn in_use(&self) -> TenantUse {
        let mut state = self.state();
        let State { spec, num_running, budget, .. } = &mut *state;
        let budget_left =
            spec.token_budget.map(|limit| budget.num_left(limit, spec.budget_period(), SystemTime::now()));
        TenantUse { num_running: *num_running, budget_left }
    }

    /// Says in a sequence's request whose it is.
    pub fn mark(&self, sequence: &mut v1::RunSequenceRequest) {
        let state = self.state();
        sequence.tenant = self.name.to_string();
        sequence.weight = state.spec.weight;
        sequence.is_isolated = state.spec.isolated;
    }

    /// Lets a request in.
    ///
    /// # Errors
    /// [`RequestError::TenantBusy`] if as many run as may.
    pub fn enter(self: &Arc<Self>) -> Result<Entry, RequestError> {
        let mut state = self.state();
        if let Some(limit) = state.spec.max_concurrent.filter(|limit| state.num_running >= *limit) {
            return Err(RequestError::TenantBusy { limit });
        }
        state.num_running += 1;
        Ok(Entry { tenant: Arc::clone(self), num_taken: 0, num_reserved: 0, num_used: 0 })
    }

    /// Puts what the file says now in force.
    pub(super) fn change(&self, spec: TenantSpec) {
        let (now, mut state) = (Instant::now(), self.state());
        match (&mut state.bucket, spec.tokens_per_minute) {
            (Some(bucket), Some(per_minute)) => bucket.set_rate(per_minute, now),
            (bucket, per_minute) => *bucket = per_minute.map(|per_minute| Bucket::new(per_minute, now)),
        }
        state.spec = spec;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request of a tenant, as long as it runs.
#[derive(Debug)]
pub struct Entry {
    tenant: Arc<Tenant>,
    /// Out of the bucket.
    num_taken: u64,
    /// Of the budget.
    num_reserved: u64,
    num_used: u64,
}

impl Entry {
    /// Whose it is.
    pub fn tenant(&self) -> &Arc<Tenant> {
        &self.tenant
    }

    /// Sets aside the most tokens that the request may use.
    ///
    /// # Errors
    /// [`RequestError::TokenRate`], [`RequestError::TokenBudget`].
    pub fn reserve(&mut self, num_tokens: u64) -> Result<(), RequestError> {
        let (now, mut state) = (Instant::now(), self.tenant.state());
        let State { spec, bucket, budget, .. } = &mut *state;
        if let Some(limit) = spec.token_budget {
            budget.reserve(limit, spec.budget_period(), num_tokens, SystemTime::now()).map_err(|exhausted| {
                RequestError::TokenBudget {
                    needed: num_tokens,
                    left: exhausted.num_left,
                    renewed_in: exhausted.renewed_in,
                }
            })?;
            self.num_reserved += num_tokens;
        }
        if let (Some(bucket), Some(per_minute)) = (bucket, spec.tokens_per_minute) {
            let refused = |retry_after| RequestError::TokenRate { needed: num_tokens, per_minute, retry_after };
            self.num_taken += bucket.take(num_tokens, now).map_err(refused)?;
        }
        Ok(())
    }

    /// Counts tokens that the request has used.
    pub fn count(&mut self, num_tokens: u64) {
        self.num_used += num_tokens;
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let (now, mut state) = (Instant::now(), self.tenant.state());
        state.num_running -= 1;
        state.budget.settle(self.num_reserved, self.num_used);
        if let Some(bucket) = &mut state.bucket {
            bucket.settle(self.num_taken, self.num_used, now);
        }
    }
}
