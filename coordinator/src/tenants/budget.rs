//! Tokens in all, or in each period. Periods are counted from 1970, so that all coordinators mean the same ones.
//! Invariant: what is used and what running requests may still use never exceeds the budget, as far as it is known here:
//! other coordinators' use is as old as their last word.
//! Not here: a memory beyond the life of this process ([`elsewhere`](super::elsewhere)).

use std::time::{Duration, SystemTime};

use lockstep_proto::v1;

/// What is used of a budget.
#[derive(Clone, Debug, Default)]
pub struct Budget {
    period_index: u64,
    num_used: u64,
    num_reserved: u64,
    /// By other coordinators, and what they have set aside.
    spent_elsewhere: Vec<Spent>,
    reserved_elsewhere: u64,
}

/// Tokens that were used of a period's budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// How many.
    pub num_tokens: u64,
    /// When the period ends, milliseconds since 1970; 0: never.
    pub renewed_at_ms: u64,
}

impl Spent {
    /// As another coordinator says it.
    pub fn of(spent: &v1::TenantBudgetUse) -> Self {
        Self { num_tokens: spent.spent_tokens, renewed_at_ms: spent.renewed_at_ms }
    }
}

/// A budget that cannot pay for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exhausted {
    /// Tokens that it could pay for.
    pub num_left: u64,
    /// When it is there again, if it will be.
    pub renewed_in: Option<Duration>,
}

impl Budget {
    /// Sets the most that a request may use aside.
    ///
    /// # Errors
    /// [`Exhausted`].
    pub fn reserve(
        &mut self,
        limit: u64,
        period: Option<Duration>,
        num_tokens: u64,
        now: SystemTime,
    ) -> Result<(), Exhausted> {
        let renewed_in = self.renew(period, now);
        let num_left = self.num_left(limit, period, now);
        if num_tokens > num_left {
            return Err(Exhausted { num_left, renewed_in });
        }
        self.num_reserved += num_tokens;
        Ok(())
    }

    /// Replaces what was set aside for a request by what it used.
    pub fn settle(&mut self, num_reserved: u64, num_used: u64) {
        self.num_reserved = self.num_reserved.saturating_sub(num_reserved);
        self.num_used = self.num_used.saturating_add(num_used);
    }

    /// Tokens left of `limit`.
    pub fn num_left(&mut self, limit: u64, period: Option<Duration>, now: SystemTime) -> u64 {
        self.renew(period, now);
        let period_end = period_end_ms(period, now);
        let is_of_now = |spent: &&Spent| spent.renewed_at_ms == period_end;
        let elsewhere = self.spent_elsewhere.iter().filter(is_of_now).map(|spent| spent.num_tokens);
        let in_use = elsewhere.chain([self.num_used, self.num_reserved, self.reserved_elsewhere]);
        limit.saturating_sub(in_use.fold(0, u64::saturating_add))
    }

    /// What was used here in this period.
    pub fn spent(&mut self, period: Option<Duration>, now: SystemTime) -> Spent {
        self.renew(period, now);
        Spent { num_tokens: self.num_used, renewed_at_ms: period_end_ms(period, now) }
    }

    /// Tokens set aside here.
    pub fn num_reserved(&self) -> u64 {
        self.num_reserved
    }

    /// Puts what other coordinators use in the place of what was known of it.
    pub fn set_elsewhere(&mut self, spent: Vec<Spent>, num_reserved: u64) {
        (self.spent_elsewhere, self.reserved_elsewhere) = (spent, num_reserved);
    }

    /// What was used here and is counted elsewhere from now on.
    pub fn hand_over(&mut self, spent: Spent, period: Option<Duration>, now: SystemTime) {
        if self.spent(period, now).renewed_at_ms == spent.renewed_at_ms {
            self.num_used = self.num_used.saturating_sub(spent.num_tokens);
        }
    }

    /// Forgets the use of earlier periods; says when this one ends.
    fn renew(&mut self, period: Option<Duration>, now: SystemTime) -> Option<Duration> {
        let period_millis = period?.as_millis().max(1) as u64;
        let millis = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
        let period_index = millis / period_millis;
        if period_index > self.period_index {
            (self.period_index, self.num_used) = (period_index, 0);
        }
        Some(Duration::from_millis(period_millis - millis % period_millis))
    }
}

/// When the present period ends, milliseconds since 1970; 0: never.
fn period_end_ms(period: Option<Duration>, now: SystemTime) -> u64 {
    let Some(period) = period else { return 0 };
    let period_millis = period.as_millis().max(1) as u64;
    let millis = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
    millis - millis % period_millis + period_millis
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_pays_for_what_is_used() {
        let (mut budget, now) = (Budget::default(), SystemTime::now());
        budget.reserve(100, None, 60, now).unwrap();
        let exhausted = Exhausted { num_left: 40, renewed_in: None };
        assert_eq!(budget.reserve(100, None, 41, now), Err(exhausted));
        budget.settle(60, 10);
        budget.reserve(100, None, 90, now).unwrap();
        budget.settle(90, 90);
        assert_eq!(budget.num_left(100, None, now), 0);
    }

    #[test]
    fn a_period_renews_it_and_running_requests_stay_reserved() {
        let period = Some(Duration::from_secs(3600));
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(7200 + 600);
        let mut budget = Budget::default();
        budget.reserve(100, period, 70, now).unwrap();
        budget.settle(70, 70);
        budget.reserve(100, period, 20, now).unwrap();
        let exhausted = Exhausted { num_left: 10, renewed_in: Some(Duration::from_secs(3000)) };
        assert_eq!(budget.reserve(100, period, 11, now), Err(exhausted));
        let later = now + Duration::from_secs(3000);
        assert_eq!(budget.num_left(100, period, later), 80);
    }
}
