//! The replica parts that this worker holds, by model and replica.
//! For: the gRPC service (load, find, unload) and the registration (reports).
//! Invariant: of each part at most one epoch is held; a newer epoch evicts every older part of its model before it
//! loads, so that the memory of both is never needed at once.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use lockstep_kernels::cpu::return_freed_memory;
use lockstep_proto::{status::Class, v1};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::wire;
use crate::{
    collective::LinkListener,
    replica::{Replica, ReplicaSpec},
};

/// How far the loading of a part is.
#[derive(Clone, Default)]
pub(crate) struct LoadState {
    /// Bytes read by all ranks of this worker.
    pub loaded_bytes: u64,
    /// Bytes to read.
    pub total_bytes: u64,
    /// Set once, at the end.
    pub outcome: Option<Result<Arc<Replica>, Status>>,
}

/// Names a part on this worker.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ReplicaKey {
    /// Name for clients.
    pub model: String,
    /// Index in the plan.
    pub replica: u32,
}

struct Entry {
    plan_epoch: u64,
    cancel: CancellationToken,
    state: watch::Receiver<LoadState>,
}

/// All parts.
#[derive(Default)]
pub(crate) struct Replicas {
    entries: Mutex<BTreeMap<ReplicaKey, Entry>>,
}

impl Replicas {
    /// Starts loading a part, or finds the load of the same epoch that runs or is done. Call it on the async runtime.
    ///
    /// # Errors
    /// `StaleEpoch` if a newer epoch is held.
    pub fn load(
        &self,
        key: ReplicaKey,
        spec: ReplicaSpec,
        links: Arc<LinkListener>,
    ) -> Result<watch::Receiver<LoadState>, Status> {
        let mut entries = self.lock();
        let newest =
            entries.iter().filter(|(other, _)| other.model == key.model).map(|(_, entry)| entry.plan_epoch).max();
        if let Some(newest) = newest.filter(|newest| *newest > spec.plan_epoch) {
            return Err(stale(&key.model, newest, spec.plan_epoch));
        }
        if let Some(entry) = entries.get(&key).filter(|entry| entry.plan_epoch == spec.plan_epoch)
            && !matches!(entry.state.borrow().outcome, Some(Err(_)))
        {
            return Ok(entry.state.clone());
        }
        let is_evicted = |other: &ReplicaKey, entry: &Entry| {
            *other == key || (other.model == key.model && entry.plan_epoch < spec.plan_epoch)
        };
        let evicted = remove(&mut entries, is_evicted);
        let (sender, receiver) = watch::channel(LoadState::default());
        entries
            .insert(key, Entry { plan_epoch: spec.plan_epoch, cancel: spec.cancel.clone(), state: receiver.clone() });
        drop(entries);
        tokio::task::spawn_blocking(move || {
            evicted.into_iter().for_each(stop);
            let progress = |loaded_bytes, total_bytes| {
                sender.send_modify(|state| (state.loaded_bytes, state.total_bytes) = (loaded_bytes, total_bytes));
            };
            let loaded = Replica::load(spec, links, &progress);
            // Slices as they were stored, the vocabulary, and perhaps the weights of an evicted part.
            return_freed_memory();
            let outcome = loaded.map(Arc::new).map_err(|error| wire::status_of(&error));
            sender.send_modify(|state| state.outcome = Some(outcome));
        });
        Ok(receiver)
    }

    /// The loaded part of that epoch.
    ///
    /// # Errors
    /// `NotFound`, `StaleEpoch`, `NotReady`, or why it did not load.
    pub fn find(&self, key: &ReplicaKey, plan_epoch: u64) -> Result<Arc<Replica>, Status> {
        let entries = self.lock();
        let entry = entries.get(key).ok_or_else(|| {
            Class::StaleEpoch.status(format!("replica {} of model {:?} is not held here", key.replica, key.model))
        })?;
        if entry.plan_epoch != plan_epoch {
            return Err(stale(&key.model, entry.plan_epoch, plan_epoch));
        }
        match &entry.state.borrow().outcome {
            Some(Ok(replica)) => Ok(replica.clone()),
            Some(Err(status)) => Err(status.clone()),
            None => Err(Class::NotReady.status(format!("replica {} of model {:?} is loading", key.replica, key.model))),
        }
    }

    /// Frees every part of `model` of that epoch or an older one. Blocks until their threads have ended.
    pub fn unload(&self, model: &str, plan_epoch: u64) {
        let is_removed = |key: &ReplicaKey, entry: &Entry| key.model == model && entry.plan_epoch <= plan_epoch;
        let removed = remove(&mut self.lock(), is_removed);
        removed.into_iter().for_each(stop);
    }

    /// Frees everything. Blocks as [`unload`](Self::unload).
    pub fn unload_all(&self) {
        let removed = std::mem::take(&mut *self.lock());
        removed.into_values().for_each(stop);
    }

    /// Whether no part is held.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// What a heartbeat says; parts that still load are not in it.
    pub fn reports(&self) -> Vec<v1::ReplicaReport> {
        let report = |(key, entry): (&ReplicaKey, &Entry)| {
            let replica = loaded(entry)?;
            Some(v1::ReplicaReport {
                model: key.model.clone(),
                plan_epoch: entry.plan_epoch,
                replica: key.replica,
                problem: replica.problem().borrow().clone().unwrap_or_default(),
                engine: replica.leader().map(|leader| wire::engine_status(leader.status())),
            })
        };
        self.lock().iter().filter_map(report).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<ReplicaKey, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn remove(entries: &mut BTreeMap<ReplicaKey, Entry>, is_removed: impl Fn(&ReplicaKey, &Entry) -> bool) -> Vec<Entry> {
    let (removed, kept): (BTreeMap<_, _>, _) =
        std::mem::take(entries).into_iter().partition(|(key, entry)| is_removed(key, entry));
    *entries = kept;
    removed.into_values().collect()
}

fn loaded(entry: &Entry) -> Option<Arc<Replica>> {
    entry.state.borrow().outcome.as_ref()?.as_ref().ok().cloned()
}

/// Stops a part. One that still loads ends soon, and is dropped by its loader since nobody holds it then.
fn stop(entry: Entry) {
    entry.cancel.cancel();
    if let Some(replica) = loaded(&entry) {
        replica.stop("the replica was unloaded");
    }
}

fn stale(model: &str, held: u64, asked: u64) -> Status {
    Class::StaleEpoch.status(format!("model {model:?} is held here at plan epoch {held}, the request names {asked}"))
}
