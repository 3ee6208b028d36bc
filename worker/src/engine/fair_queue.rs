//! Sequences that wait, by tenant, and how much each tenant was served.
//! For: the scheduler. Fairness is that of virtual token counters (Sheng et al., "Fairness in Serving Large Language
//! Models", OSDI 2024): every token that is computed for a tenant adds `1 / weight` to its counter, and the tenant with the
//! lowest counter goes first.
//! Invariant: a tenant that got all that it asked for has nothing to claim later: after every step it is lifted to the
//! lowest counter of those that did not, or, if there are none, to the highest of all.
//! Not here: which sequence a step takes, and who loses blocks (the scheduler).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{SequenceId, Tenant, sequence::Sequence};

/// Waiting sequences and the tenants' counters.
#[derive(Debug, Default)]
pub(super) struct FairQueue {
    accounts: BTreeMap<Arc<str>, Account>,
    num_waiting: usize,
    /// Where a tenant begins that has nothing to claim: no counter of an active tenant is lower.
    floor: f64,
}

/// What is known of a tenant.
#[derive(Debug)]
struct Account {
    weight: u32,
    /// Tokens computed for it, divided by its weight.
    served: f64,
    /// In the order of arrival.
    waiting: BTreeMap<SequenceId, Sequence>,
    num_running: usize,
}

impl Account {
    fn is_active(&self) -> bool {
        self.num_running > 0 || !self.waiting.is_empty()
    }
}

impl FairQueue {
    /// Sequences that wait.
    pub(super) fn len(&self) -> usize {
        self.num_waiting
    }

    /// All sequences that wait, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.accounts.values().flat_map(|account| account.waiting.values())
    }

    /// Puts a sequence in its place by arrival among those of its tenant.
    pub(super) fn push(&mut self, sequence: Sequence) {
        let Tenant { name, weight, .. } = &sequence.tenant;
        let floor = self.floor;
        if !self.accounts.contains_key(name) {
            // They would begin at the floor again.
            self.accounts.retain(|_, account| account.is_active() || account.served > floor);
        }
        let new = || Account { weight: 1, served: floor, waiting: BTreeMap::new(), num_running: 0 };
        let account = self.accounts.entry(Arc::clone(name)).or_insert_with(new);
        // The newest word counts: weights change while a tenant's sequences run.
        account.weight = (*weight).max(1);
        account.served = account.served.max(floor);
        account.waiting.insert(sequence.id, sequence);
        self.num_waiting += 1;
    }

    /// Forgets a sequence that waits.
    pub(super) fn remove(&mut self, id: SequenceId) {
        let is_found = self.accounts.values_mut().any(|account| account.waiting.remove(&id).is_some());
        self.num_waiting -= usize::from(is_found);
    }

    /// The tenant's first sequence.
    pub(super) fn first_mut(&mut self, tenant: &str) -> Option<&mut Sequence> {
        self.accounts.get_mut(tenant)?.waiting.values_mut().next()
    }

    /// Takes the tenant's first sequence out, to run it.
    pub(super) fn start_first(&mut self, tenant: &str) -> Option<Sequence> {
        let account = self.accounts.get_mut(tenant)?;
        let (_, sequence) = account.waiting.pop_first()?;
        account.num_running += 1;
        self.num_waiting -= 1;
        Some(sequence)
    }

    /// Notes that a running sequence of the tenant runs no more.
    pub(super) fn note_end(&mut self, tenant: &str) {
        if let Some(account) = self.accounts.get_mut(tenant) {
            account.num_running -= 1;
        }
    }

    /// Sequences of the tenant that wait.
    pub(super) fn num_waiting_of(&self, tenant: &str) -> usize {
        self.accounts.get(tenant).map_or(0, |account| account.waiting.len())
    }

    /// Sequences of the tenant that run.
    pub(super) fn num_running_of(&self, tenant: &str) -> usize {
        self.accounts.get(tenant).map_or(0, |account| account.num_running)
    }

    /// The part of `total` things that a tenant with sequences has among all such tenants: one at least.
    pub(super) fn share(&self, tenant: &str, total: usize) -> usize {
        let weight = self.accounts.get(tenant).map_or(1, |account| account.weight as usize);
        let active = self.accounts.values().filter(|account| account.is_active());
        let weights: usize = active.map(|account| account.weight as usize).sum();
        (total.saturating_mul(weight) / weights.max(1)).max(1)
    }

    /// The tenant's counter after `num_tokens` more tokens.
    pub(super) fn served_after(&self, tenant: &str, num_tokens: usize) -> f64 {
        self.accounts
            .get(tenant)
            .map_or(self.floor, |account| account.served + num_tokens as f64 / f64::from(account.weight))
    }

    /// Counts tokens computed for a tenant.
    pub(super) fn charge(&mut self, tenant: &str, num_tokens: usize) {
        if let Some(account) = self.accounts.get_mut(tenant) {
            account.served += num_tokens as f64 / f64::from(account.weight);
        }
    }

    /// The tenants with sequences that wait, and `others`: who was served least first, among equals who has the least
    /// running.
    pub(super) fn in_turn(&self, others: &BTreeSet<Arc<str>>) -> Vec<Arc<str>> {
        let wants = |name: &Arc<str>, account: &Account| !account.waiting.is_empty() || others.contains(name);
        let mut wanting: Vec<_> = self.accounts.iter().filter(|(name, account)| wants(name, account)).collect();
        wanting.sort_by(|(_, left), (_, right)| {
            left.served.total_cmp(&right.served).then(left.num_running.cmp(&right.num_running))
        });
        wanting.into_iter().map(|(name, _)| Arc::clone(name)).collect()
    }

    /// Ends a step: `unserved` are the tenants with running sequences that the step left out or cut short.
    pub(super) fn settle(&mut self, unserved: &BTreeSet<Arc<str>>) {
        let has_claim = |name: &Arc<str>, account: &Account| !account.waiting.is_empty() || unserved.contains(name);
        let active = || self.accounts.iter().filter(|(_, account)| account.is_active());
        let claims = active().filter(|(name, account)| has_claim(name, account)).map(|(_, account)| account.served);
        let level = claims.reduce(f64::min).or_else(|| active().map(|(_, account)| account.served).reduce(f64::max));
        self.floor = level.map_or(self.floor, |level| level.max(self.floor));
        for (name, account) in &mut self.accounts {
            if account.is_active() && !has_claim(name, account) {
                account.served = account.served.max(self.floor);
            }
        }
    }
}
