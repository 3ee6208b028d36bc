//! Whose a sequence is.
//! For: who adds sequences, the scheduler (shares by weight), the prefix cache (what may be shared).
//! Not here: keys, rates and budgets: the coordinator has admitted the sequence.

use std::sync::Arc;

/// Owner of sequences; equal names are one tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// Its name.
    pub name: Arc<str>,
    /// Its share of the replica beside other tenants' weights; at least 1.
    pub weight: u32,
    /// Its KV blocks are not shared with other tenants.
    pub is_isolated: bool,
}

impl Tenant {
    /// Largest weight.
    pub const MAX_WEIGHT: u32 = 1000;
}

impl Default for Tenant {
    fn default() -> Self {
        Self { name: Arc::from("default"), weight: 1, is_isolated: false }
    }
}
