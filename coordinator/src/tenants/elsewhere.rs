//! What tenants use through other coordinators, as these last said it. Plain state.
//! For: `cluster::etcd`, which carries the words. Limits then hold for all coordinators together, each a moment behind.
//! Invariants: each coordinator says what its own requests use, nobody another's; what was spent of a budget by a
//! coordinator that is gone is taken over by one that is there, and counted once.

use std::collections::BTreeMap;

use lockstep_proto::v1;

use super::{Tenants, budget::Spent};

/// What other coordinators use of one tenant's limits.
#[derive(Debug, Default)]
pub struct Elsewhere {
    /// Requests that run.
    pub num_running: u64,
    /// Tokens set aside of the budget.
    pub num_reserved: u64,
    /// Tokens taken out of the minute's since this was last said; below zero if more came back.
    pub num_taken: i64,
    /// What was spent of the budget, by the period that it was of.
    pub spent: Vec<Spent>,
}

/// All that is known of the other coordinators, by their sessions, and what this one took over.
#[derive(Default)]
pub struct Others {
    uses: BTreeMap<u64, v1::LimitUse>,
    spent: BTreeMap<u64, v1::BudgetUse>,
    adopted: v1::BudgetUse,
    /// Tokens that a coordinator had taken when they were last passed on.
    seen: BTreeMap<(u64, String), i64>,
}

impl Others {
    /// A coordinator's requests hold that. If it is `known` already, what it took before is not counted again.
    pub fn note_use(&mut self, session: u64, held: v1::LimitUse, is_known: bool) {
        for tenant in held.tenants.iter().filter(|_| is_known) {
            self.seen.insert((session, tenant.tenant.clone()), tenant.taken_tokens);
        }
        self.uses.insert(session, held);
    }

    /// A coordinator is gone, or cannot be heard: nothing runs there.
    pub fn forget_use(&mut self, session: u64) {
        self.uses.remove(&session);
        self.seen.retain(|(other, _), _| *other != session);
    }

    /// All that was heard. What was taken over stays.
    pub fn forget_all(&mut self) {
        self.forget_uses();
        self.spent.clear();
    }

    /// Nobody can be heard. What was spent stays spent.
    pub fn forget_uses(&mut self) {
        self.uses.clear();
        self.seen.clear();
    }

    /// That was spent through a coordinator, be it there or gone.
    pub fn note_spent(&mut self, session: u64, spent: v1::BudgetUse) {
        self.spent.insert(session, spent);
    }

    /// What was spent through a coordinator is counted elsewhere now.
    pub fn forget_spent(&mut self, session: u64) {
        self.spent.remove(&session);
    }

    /// Sessions of which only what they have spent is left.
    pub fn gone(&self) -> Vec<u64> {
        self.spent.keys().filter(|session| !self.uses.contains_key(session)).copied().collect()
    }

    /// What this coordinator has to say if it takes over what `session` has spent, having `said` what it has.
    pub fn with(&self, said: &v1::BudgetUse, session: u64) -> v1::BudgetUse {
        let mut sum = said.clone();
        add(&mut sum, self.spent.get(&session).unwrap_or(&v1::BudgetUse::default()));
        sum
    }

    /// Takes over what `session` has spent.
    pub fn adopt(&mut self, session: u64) {
        add(&mut self.adopted, &self.spent.remove(&session).unwrap_or_default());
    }

    /// Another coordinator has taken over all that this one had said.
    pub fn forget_adopted(&mut self) {
        self.adopted = v1::BudgetUse::default();
    }

    /// What is used through this coordinator: what its requests hold, and what was spent.
    pub fn report(&self, tenants: &Tenants) -> (v1::LimitUse, v1::BudgetUse) {
        let (mut held, mut spent): (Vec<_>, Vec<_>) = tenants.all().iter().filter_map(|tenant| tenant.report()).unzip();
        held.retain(|tenant| (tenant.num_running, tenant.reserved_tokens, tenant.taken_tokens) != (0, 0, 0));
        spent.retain(|tenant| tenant.spent_tokens > 0);
        (v1::LimitUse { tenants: held }, v1::BudgetUse { tenants: spent })
    }

    /// What was spent through this coordinator, its `own`, and what it has taken over.
    pub fn with_adopted(&self, own: &v1::BudgetUse) -> v1::BudgetUse {
        let mut sum = own.clone();
        add(&mut sum, &self.adopted);
        sum
    }

    /// Tells the tenants what others use of their limits.
    pub fn tell(&mut self, tenants: &Tenants) {
        let mut all: BTreeMap<String, Elsewhere> = BTreeMap::new();
        for (session, held) in &self.uses {
            for tenant in &held.tenants {
                let elsewhere = all.entry(tenant.tenant.clone()).or_default();
                let seen = self.seen.insert((*session, tenant.tenant.clone()), tenant.taken_tokens).unwrap_or(0);
                elsewhere.num_running = elsewhere.num_running.saturating_add(tenant.num_running);
                elsewhere.num_reserved = elsewhere.num_reserved.saturating_add(tenant.reserved_tokens);
                elsewhere.num_taken = elsewhere.num_taken.saturating_add(tenant.taken_tokens.saturating_sub(seen));
            }
        }
        for tenant in self.spent.values().chain([&self.adopted]).flat_map(|spent| &spent.tenants) {
            all.entry(tenant.tenant.clone()).or_default().spent.push(Spent::of(tenant));
        }
        for tenant in tenants.all() {
            tenant.set_elsewhere(all.remove(&**tenant.name()).unwrap_or_default());
        }
    }
}

/// Adds what was spent in the same period; of two periods the later one counts.
fn add(sum: &mut v1::BudgetUse, more: &v1::BudgetUse) {
    for spent in &more.tenants {
        match sum.tenants.iter_mut().find(|known| known.tenant == spent.tenant) {
            None => sum.tenants.push(spent.clone()),
            Some(known) if known.renewed_at_ms == spent.renewed_at_ms => {
                known.spent_tokens = known.spent_tokens.saturating_add(spent.spent_tokens);
            }
            Some(known) if known.renewed_at_ms < spent.renewed_at_ms => *known = spent.clone(),
            Some(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        error::RequestError,
        tenants::tests::{tenants, text},
    };

    fn limited(limits: &str) -> Tenants {
        tenants(&text(&[("a", "k", limits)]))
    }

    fn enter(tenants: &Tenants) -> Result<crate::tenants::Entry, RequestError> {
        tenants.authenticate(Some(b"Bearer k")).unwrap().enter()
    }

    /// What the first coordinator says, told to the second.
    fn pass_on(first: &(Tenants, Others), second: &mut (Tenants, Others)) {
        let (held, own) = first.1.report(&first.0);
        second.1.note_use(1, held, false);
        second.1.note_spent(1, first.1.with_adopted(&own));
        second.1.tell(&second.0);
    }

    #[test]
    fn two_coordinators_hold_one_limit() {
        let pair = || (limited("max_concurrent = 2\ntokens_per_minute = 600\ntoken_budget = 1000"), Others::default());
        let (first, mut second) = (pair(), pair());
        let mut running = enter(&first.0).unwrap();
        running.reserve(500).unwrap();
        pass_on(&first, &mut second);
        let mut own = enter(&second.0).unwrap();
        assert!(matches!(enter(&second.0), Err(RequestError::TenantBusy { limit: 2 })));
        assert!(matches!(own.reserve(200), Err(RequestError::TokenRate { .. })), "100 are left of the minute");
        drop(own);
        let mut own = enter(&second.0).unwrap();
        assert!(matches!(own.reserve(501), Err(RequestError::TokenBudget { left: 500, .. })));
        drop(own);
        // What it uses is known while it runs, what it does not use comes back.
        running.count(100);
        assert_eq!(first.1.report(&first.0).1.tenants[0].spent_tokens, 100);
        drop(running);
        pass_on(&first, &mut second);
        pass_on(&first, &mut second);
        let left = second.0.all()[0].in_use().budget_left;
        assert_eq!(left, Some(900));
        enter(&second.0).unwrap().reserve(490).unwrap();
    }

    #[test]
    fn what_was_spent_outlives_who_spent_it_and_is_counted_once() {
        let pair = || (limited("token_budget = 1000"), Others::default());
        let (first, mut second, mut third) = (pair(), pair(), pair());
        let mut entry = enter(&first.0).unwrap();
        entry.reserve(300).unwrap();
        entry.count(300);
        drop(entry);
        pass_on(&first, &mut second);
        assert!(second.1.gone().is_empty());
        second.1.forget_use(1);
        assert_eq!(second.1.gone(), [1]);
        let (_, own) = second.1.report(&second.0);
        assert_eq!(second.1.with(&own, 1).tenants[0].spent_tokens, 300);
        second.1.adopt(1);
        second.1.tell(&second.0);
        assert_eq!(second.0.all()[0].in_use().budget_left, Some(700));
        pass_on(&second, &mut third);
        assert_eq!(third.0.all()[0].in_use().budget_left, Some(700));

        // It was there after all: it finds that its use is another's now.
        first.0.hand_over(&first.1.report(&first.0).1);
        let mut first = first;
        pass_on(&second, &mut first);
        assert_eq!(first.0.all()[0].in_use().budget_left, Some(700));
    }

    #[test]
    fn periods_are_not_mixed() {
        let of = |tokens, renewed_at_ms| v1::BudgetUse {
            tenants: vec![v1::TenantBudgetUse { tenant: "a".into(), spent_tokens: tokens, renewed_at_ms }],
        };
        let mut sum = of(5, 100);
        add(&mut sum, &of(7, 100));
        add(&mut sum, &of(9, 50));
        assert_eq!(sum, of(12, 100));
        add(&mut sum, &of(1, 200));
        assert_eq!(sum, of(1, 200));

        let tenants = limited("token_budget = 1000\nbudget_period_hours = 1");
        let mut others = Others::default();
        others.note_spent(1, of(400, 1));
        others.tell(&tenants);
        assert_eq!(tenants.all()[0].in_use().budget_left, Some(1000), "that period is over");
    }
}
