//! One tenant: its limits, and what its requests use of them.
//! Invariants: a request holds an [`Entry`] for as long as it runs; the most that it may use is reserved before it starts,
//! and what it did use is counted when the entry is dropped, however it ended.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use lockstep_proto::v1;
use tokio::time::Instant;

use super::{
    bucket::Bucket,
    budget::{Budget, Spent},
    elsewhere::Elsewhere,
    file::TenantSpec,
};
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
    num_running_elsewhere: u64,
    bucket: Option<Bucket>,
    /// Out of the bucket by this coordinator's requests, less what they gave back.
    num_taken: i64,
    budget: Budget,
}

/// What a tenant uses of this coordinator now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantUse {
    /// Requests that run.
    pub num_running: usize,
    /// Tokens left of the budget, if there is one, after what all coordinators use.
    pub budget_left: Option<u64>,
}

impl Tenant {
    /// With everything that the file grants unused.
    pub fn new(spec: TenantSpec) -> Self {
        let bucket = spec.tokens_per_minute.map(|per_minute| Bucket::new(per_minute, Instant::now()));
        let name = Arc::from(spec.name.as_str());
        let budget = Budget::default();
        let state = State { spec, num_running: 0, num_running_elsewhere: 0, bucket, num_taken: 0, budget };
        Self { name, state: Mutex::new(state) }
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

    /// Checks that so many sequences could ever run at once: those of one request start together.
    ///
    /// # Errors
    /// [`RequestError::Invalid`] with both numbers.
    pub fn check_count(&self, num_sequences: usize) -> Result<(), RequestError> {
        match self.state().spec.max_concurrent {
            Some(limit) if num_sequences > limit => Err(RequestError::invalid(
                "n",
                format!(
                    "with all prompts makes {num_sequences} choices at once; the tenant's max_concurrent is {limit}"
                ),
            )),
            _ => Ok(()),
        }
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
        let num_running = state.num_running_elsewhere.saturating_add(state.num_running as u64);
        if let Some(limit) = state.spec.max_concurrent.filter(|limit| num_running >= *limit as u64) {
            return Err(RequestError::TenantBusy { limit });
        }
        state.num_running += 1;
        Ok(Entry { tenant: Arc::clone(self), num_taken: 0, num_reserved: 0, num_used: 0, num_settled: 0 })
    }

    /// What other coordinators have to know of it: of its requests here, and of its budget. `None` without limits.
    pub(super) fn report(&self) -> Option<(v1::TenantLimitUse, v1::TenantBudgetUse)> {
        let mut state = self.state();
        let State { spec, num_running, num_taken, budget, .. } = &mut *state;
        if spec.max_concurrent.is_none() && spec.tokens_per_minute.is_none() && spec.token_budget.is_none() {
            return None;
        }
        let spent = budget.spent(spec.budget_period(), SystemTime::now());
        let held = v1::TenantLimitUse {
            tenant: self.name.to_string(),
            num_running: *num_running as u64,
            reserved_tokens: budget.num_reserved(),
            taken_tokens: *num_taken,
        };
        let Spent { num_tokens: spent_tokens, renewed_at_ms } = spent;
        Some((held, v1::TenantBudgetUse { tenant: self.name.to_string(), spent_tokens, renewed_at_ms }))
    }

    /// Takes in what other coordinators use of its limits.
    pub(super) fn set_elsewhere(&self, elsewhere: Elsewhere) {
        let (now, mut state) = (Instant::now(), self.state());
        state.num_running_elsewhere = elsewhere.num_running;
        state.budget.set_elsewhere(elsewhere.spent, elsewhere.num_reserved);
        if let Some(bucket) = &mut state.bucket {
            bucket.take_elsewhere(elsewhere.num_taken, now);
        }
    }

    /// What was spent here and is counted elsewhere from now on.
    pub(super) fn hand_over(&self, spent: &v1::TenantBudgetUse) {
        let mut state = self.state();
        let State { spec, budget, .. } = &mut *state;
        budget.hand_over(Spent::of(spent), spec.budget_period(), SystemTime::now());
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
    /// What of that the budget has paid.
    num_settled: u64,
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
        let State { spec, bucket, num_taken, budget, .. } = &mut *state;
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
            let taken = bucket.take(num_tokens, now).map_err(refused)?;
            self.num_taken += taken;
            *num_taken = num_taken.saturating_add_unsigned(taken);
        }
        Ok(())
    }

    /// Counts tokens that the request has used.
    pub fn count(&mut self, num_tokens: u64) {
        self.num_used += num_tokens;
        // A budget pays while the request runs, so that other coordinators know of it should this one end.
        if self.num_reserved > 0 {
            let num_covered = num_tokens.min(self.num_reserved);
            self.tenant.state().budget.settle(num_covered, num_tokens);
            self.num_reserved -= num_covered;
            self.num_settled += num_tokens;
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let (now, mut state) = (Instant::now(), self.tenant.state());
        state.num_running -= 1;
        state.budget.settle(self.num_reserved, self.num_used - self.num_settled);
        let State { bucket, num_taken, .. } = &mut *state;
        if let Some(bucket) = bucket {
            bucket.settle(self.num_taken, self.num_used, now);
            *num_taken = num_taken.saturating_add_unsigned(self.num_used).saturating_sub_unsigned(self.num_taken);
        }
    }
}
