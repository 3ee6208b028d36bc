//! What several coordinators share: what is to be served, and the plan that serves it.
//! For: the planner, which does without where it is the only coordinator.
//! Invariant: a value is replaced only by who has seen it (compare-and-swap on its revision), the plan only by the
//! coordinator that leads.

use std::sync::Arc;

use futures::future::BoxFuture;
use lockstep_proto::v1;
use tokio::{sync::watch, time::Instant};

/// A value as it was last read.
#[derive(Clone, Debug, Default)]
pub struct Versioned<T> {
    /// The value; empty if there is none.
    pub value: Arc<T>,
    /// Its revision; 0 if there is none.
    pub revision: i64,
}

/// Whether the store can be reached.
#[derive(Clone, Debug)]
pub enum Link {
    /// It answers; where.
    Connected(String),
    /// It does not: what was last read stays in force and nothing is planned.
    Away {
        /// For so long.
        since: Instant,
        /// Why.
        reason: String,
    },
}

/// What is known of the store.
#[derive(Clone, Debug)]
pub struct StoreState {
    /// What is to be served.
    pub desired: Versioned<v1::DesiredState>,
    /// What serves it.
    pub plan: Versioned<v1::PlanState>,
    /// Id of the coordinator that leads.
    pub leader: Option<String>,
    /// This coordinator leads, for certain until then.
    pub leads_until: Option<Instant>,
    /// Whether it can be reached.
    pub link: Link,
    /// It was read at least once.
    pub is_read: bool,
}

impl StoreState {
    /// Nothing read yet.
    pub fn new() -> Self {
        Self {
            desired: Versioned::default(),
            plan: Versioned::default(),
            leader: None,
            leads_until: None,
            link: Link::Away { since: Instant::now(), reason: "it was not read yet".to_owned() },
            is_read: false,
        }
    }

    /// Whether it can be reached.
    pub fn is_connected(&self) -> bool {
        matches!(self.link, Link::Connected(_))
    }

    /// Whether this coordinator may plan.
    pub fn leads(&self, now: Instant) -> bool {
        self.is_connected() && self.leads_until.is_some_and(|until| now < until)
    }
}

/// The store as operators see it.
pub fn status(store: &dyn PlanStore) -> v1::RegistryStatus {
    let changes = store.watch();
    let state = changes.borrow();
    let (endpoint, problem, away_ms) = match &state.link {
        Link::Connected(endpoint) => (endpoint.clone(), String::new(), 0.0),
        Link::Away { since, reason } => (String::new(), reason.clone(), since.elapsed().as_secs_f64() * 1e3),
    };
    let leader_id = state.leader.clone().unwrap_or_default();
    v1::RegistryStatus { coordinator_id: store.id().to_owned(), leader_id, endpoint, problem, away_ms }
}

impl Default for StoreState {
    fn default() -> Self {
        Self::new()
    }
}

/// A new value for a key, if the key still has the revision `expected`.
#[derive(Clone, Debug)]
pub enum Write {
    /// What is to be served.
    Desired {
        /// The revision that was seen.
        expected: i64,
        /// Its successor.
        value: v1::DesiredState,
    },
    /// What serves it; refused unless this coordinator leads.
    Plan {
        /// The revision that was seen.
        expected: i64,
        /// Its successor.
        value: v1::PlanState,
    },
}

/// Why a value was not written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// Someone else has written, or leads.
    #[error("another coordinator was faster, or leads")]
    Conflict,
    /// The store does not take it as it is, or is full.
    #[error("etcd refuses it: {0}")]
    Refused(String),
    /// The store cannot be reached. The value may have been written all the same.
    #[error("etcd is away: {0}")]
    Away(String),
}

/// Where several coordinators meet.
pub trait PlanStore: Send + Sync + 'static {
    /// Id of this coordinator.
    fn id(&self) -> &str;

    /// What is known of it, now and after every change.
    fn watch(&self) -> watch::Receiver<StoreState>;

    /// The workers that are registered there and cannot be reached, with the reason for each.
    fn unreachable(&self) -> Vec<(Arc<v1::WorkerHello>, String)> {
        Vec::new()
    }

    /// Writes a value. Once this is done the state shows it.
    fn write(&self, write: Write) -> BoxFuture<'static, Result<(), StoreError>>;
}
