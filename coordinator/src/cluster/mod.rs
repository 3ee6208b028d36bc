//! Which workers live, and what several coordinators share. For: the planner watches it, the admin service shows it.
//! Invariant: a worker process that starts anew, even under its old id, has a new session: what it held before is gone.
//! [`reach`]: how they are reached. [`memory`] and [`registration`] serve the only coordinator of a cluster, `etcd` any number of them.
//! Not here: what the workers do ([`crate::planner`]).

#[cfg(feature = "etcd")]
pub mod etcd;
pub mod memory;
pub mod reach;
pub mod registration;
pub mod store;

#[cfg(feature = "etcd")]
pub use etcd::{EtcdRegistry, Joining};
pub use memory::MemoryRegistry;
pub use reach::worker_client;
pub use store::PlanStore;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use lockstep_proto::v1;
use tokio::{sync::watch, time::Instant};

/// A live worker as it last reported itself.
#[derive(Clone, Debug)]
pub struct WorkerRecord {
    /// What it said when it registered.
    pub hello: Arc<v1::WorkerHello>,
    /// Distinguishes this registration from every other one.
    pub session: u64,
    /// When it was last heard of.
    pub last_heartbeat: Instant,
    /// It is to be relieved of its parts.
    pub draining: bool,
    /// If so: how long, from its last heartbeat on, sequences may run on it.
    pub drain_left: Duration,
    /// Its first heartbeat has come: only from then on is it known what it holds.
    pub has_reported: bool,
    /// The replica parts that it holds.
    pub replicas: Vec<v1::ReplicaReport>,
}

impl WorkerRecord {
    /// When what runs on it has to go on elsewhere; `None` if it does not drain.
    pub fn drain_deadline(&self) -> Option<Instant> {
        self.draining.then(|| self.last_heartbeat + self.drain_left)
    }
}

/// Live workers by id.
pub type Workers = Arc<BTreeMap<String, Arc<WorkerRecord>>>;

/// Where live workers are known.
pub trait Registry: Send + Sync + 'static {
    /// The live workers now and after every change; a watcher that lags sees the newest state, not each step to it.
    fn watch(&self) -> watch::Receiver<Workers>;
}
