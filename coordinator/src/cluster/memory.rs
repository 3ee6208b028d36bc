//! The embedded registry: workers of this process's registration streams.
//! Invariant: a worker is in the map exactly as long as its [`Lease`] lives.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use lockstep_proto::v1;
use tokio::{sync::watch, time::Instant};

use super::{Registry, WorkerRecord, Workers};

/// Live workers in memory; cheap to clone.
#[derive(Clone)]
pub struct MemoryRegistry {
    workers: watch::Sender<Workers>,
    next_session: Arc<AtomicU64>,
}

/// A worker's entry; it goes when this is dropped.
pub struct Lease {
    registry: MemoryRegistry,
    worker_id: String,
}

impl Default for MemoryRegistry {
    fn default() -> Self {
        Self { workers: watch::Sender::new(Arc::new(BTreeMap::new())), next_session: Arc::new(AtomicU64::new(1)) }
    }
}

impl Registry for MemoryRegistry {
    fn watch(&self) -> watch::Receiver<Workers> {
        self.workers.subscribe()
    }
}

impl MemoryRegistry {
    /// Enters a worker; `None` if its id is taken by a live one.
    pub fn register(&self, hello: v1::WorkerHello) -> Option<Lease> {
        let worker_id = hello.worker_id.clone();
        let record = WorkerRecord {
            hello: Arc::new(hello),
            session: self.next_session.fetch_add(1, Ordering::Relaxed),
            last_heartbeat: Instant::now(),
            draining: false,
            drain_left: Duration::ZERO,
            has_reported: false,
            replicas: Vec::new(),
        };
        let entered = self.workers.send_if_modified(|workers| {
            if workers.contains_key(&worker_id) {
                return false;
            }
            Arc::make_mut(workers).insert(worker_id.clone(), Arc::new(record));
            true
        });
        entered.then(|| Lease { registry: self.clone(), worker_id })
    }
}

impl Lease {
    /// Renews it with what the worker reports.
    pub fn renew(&self, heartbeat: v1::Heartbeat) {
        self.registry.workers.send_modify(|workers| {
            if let Some(record) = Arc::make_mut(workers).get_mut(&self.worker_id) {
                let record = Arc::make_mut(record);
                record.last_heartbeat = Instant::now();
                record.draining = heartbeat.draining;
                record.drain_left = Duration::from_millis(heartbeat.drain_left_ms);
                record.has_reported = true;
                record.replicas = heartbeat.replicas;
            }
        });
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.registry.workers.send_modify(|workers| {
            Arc::make_mut(workers).remove(&self.worker_id);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(worker_id: &str) -> v1::WorkerHello {
        v1::WorkerHello { worker_id: worker_id.into(), ..Default::default() }
    }

    #[test]
    fn live_ids_are_unique_and_sessions_differ() {
        let registry = MemoryRegistry::default();
        let workers = registry.watch();
        let lease = registry.register(hello("w0")).unwrap();
        assert!(registry.register(hello("w0")).is_none());
        let first = workers.borrow()["w0"].session;
        drop(lease);
        assert!(workers.borrow().is_empty());
        let _lease = registry.register(hello("w0")).unwrap();
        assert_ne!(workers.borrow()["w0"].session, first);
    }

    #[test]
    fn heartbeats_show_in_the_record() {
        let registry = MemoryRegistry::default();
        let lease = registry.register(hello("w0")).unwrap();
        lease.renew(v1::Heartbeat { replicas: vec![Default::default()], draining: true, drain_left_ms: 700 });
        let workers = registry.watch();
        assert!(workers.borrow()["w0"].drain_deadline().is_some_and(|deadline| deadline > Instant::now()));
        assert_eq!(workers.borrow()["w0"].replicas.len(), 1);
    }
}
