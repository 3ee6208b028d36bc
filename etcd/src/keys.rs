//! The keys of a cluster, each under its prefix. The only place that knows them.

/// Everything under it belongs to one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    prefix: String,
}

impl Keys {
    /// Keys under `prefix`, which has no slash at its end.
    pub fn new(prefix: &str) -> Self {
        Self { prefix: format!("{prefix}/") }
    }

    /// What all keys of the cluster begin with.
    pub fn all(&self) -> &str {
        &self.prefix
    }

    /// A worker's registration, a `WorkerEntry` that goes with the worker's lease.
    pub fn worker(&self, worker_id: &str) -> String {
        format!("{}workers/{worker_id}", self.prefix)
    }

    /// The worker whose registration `key` is.
    pub fn worker_of<'a>(&self, key: &'a str) -> Option<&'a str> {
        key.strip_prefix(&self.prefix)?.strip_prefix("workers/")
    }

    /// The coordinator that plans: its id, which goes with its lease.
    pub fn leader(&self) -> String {
        format!("{}leader", self.prefix)
    }

    /// What is to be served, a `DesiredState`; any coordinator changes it.
    pub fn desired(&self) -> String {
        format!("{}desired", self.prefix)
    }

    /// What serves it, a `PlanState`; the leader alone changes it.
    pub fn plan(&self) -> String {
        format!("{}plan", self.prefix)
    }

    /// What the requests of a coordinator's session hold of tenants' limits, a `LimitUse` that goes with its lease.
    pub fn limit_use(&self, session: u64) -> String {
        format!("{}limits/use/{session:016x}", self.prefix)
    }

    /// The session whose `LimitUse` `key` is.
    pub fn limit_use_of(&self, key: &str) -> Option<u64> {
        self.session_of(key, "limits/use/")
    }

    /// What was spent of tenants' budgets through a coordinator's session, a `BudgetUse` that outlives it.
    pub fn budget_use(&self, session: u64) -> String {
        format!("{}limits/budget/{session:016x}", self.prefix)
    }

    /// The session whose `BudgetUse` `key` is.
    pub fn budget_use_of(&self, key: &str) -> Option<u64> {
        self.session_of(key, "limits/budget/")
    }

    fn session_of(&self, key: &str, kind: &str) -> Option<u64> {
        u64::from_str_radix(key.strip_prefix(&self.prefix)?.strip_prefix(kind)?, 16).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_found_by_its_key() {
        let keys = Keys::new("/lockstep");
        assert_eq!(keys.worker_of(&keys.worker("a/b")), Some("a/b"));
        assert_eq!(keys.worker_of(&keys.plan()), None);
        assert_eq!(keys.worker_of("/lockstep2/workers/a"), None);
        assert_eq!(keys.limit_use_of(&keys.limit_use(7)), Some(7));
        assert_eq!(keys.budget_use_of(&keys.budget_use(u64::MAX)), Some(u64::MAX));
        assert_eq!(keys.budget_use_of(&keys.limit_use(7)), None);
    }
}
