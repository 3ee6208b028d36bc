//! The replica parts that this worker holds, by model, plan epoch and replica.
//! For: the gRPC service (load, find, unload) and the registration (reports).
//! Invariants: a device holds one part of a model: what is to be loaded there waits until every older one is freed; a
//! part is listed as long as it takes memory, also while it is being freed.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use futures::{
    FutureExt,
    future::{BoxFuture, Shared, join_all},
};
use lockstep_kernels::cpu::return_freed_memory;
use lockstep_proto::{status::Class, v1};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::{failures::Failures, wire};
use crate::{
    WorkerError,
    collective::LinkListener,
    replica::{LeaderHandle, Replica, ReplicaSpec},
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

/// What a part is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PartState {
    /// Its weights are read, or it waits for that.
    Loading,
    /// It executes steps.
    Ready,
    /// Its steps do not come back.
    Stalled,
    /// It does not any more, or never could.
    Broken,
    /// Its memory is given back.
    Freeing,
}

impl PartState {
    /// Every state.
    pub const ALL: [Self; 5] = [Self::Loading, Self::Ready, Self::Stalled, Self::Broken, Self::Freeing];

    /// As a label.
    pub fn word(self) -> &'static str {
        match self {
            Self::Loading => "loading",
            Self::Ready => "ready",
            Self::Stalled => "stalled",
            Self::Broken => "broken",
            Self::Freeing => "freeing",
        }
    }
}

/// Names a part on this worker; never used twice.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ReplicaKey {
    /// Name for clients.
    pub model: String,
    /// Version of the plan.
    pub plan_epoch: u64,
    /// Index in the plan.
    pub replica: u32,
}

/// Completes when a part is freed, for everybody who waits for it.
type Freed = Shared<BoxFuture<'static, ()>>;

struct Entry {
    /// Devices of this worker that hold its ranks, by local rank.
    devices: BTreeSet<usize>,
    cancel: CancellationToken,
    state: watch::Receiver<LoadState>,
    /// Set once it is being freed.
    freed: Option<Freed>,
}

type Entries = BTreeMap<ReplicaKey, Entry>;

/// All parts; cheap to clone. Its methods need the async runtime, but for [`Self::reports`] and [`Self::is_empty`].
#[derive(Clone, Default)]
pub(crate) struct Replicas {
    entries: Arc<Mutex<Entries>>,
    failures: Arc<Failures>,
}

impl Replicas {
    /// Starts loading a part once its devices are free of older parts of the model, or finds its load.
    ///
    /// # Errors
    /// `StaleEpoch` if one of its devices holds a part of the model that is not older, or if it is being freed.
    pub fn load(
        &self,
        key: ReplicaKey,
        spec: ReplicaSpec,
        links: Arc<LinkListener>,
    ) -> Result<watch::Receiver<LoadState>, Status> {
        let mut entries = self.lock();
        if let Some(entry) = entries.get(&key) {
            return if entry.freed.is_some() { Err(being_freed(&key)) } else { Ok(entry.state.clone()) };
        }
        let devices: BTreeSet<usize> = spec.local_devices().collect();
        let replaced: Vec<ReplicaKey> = entries
            .iter()
            .filter(|(other, entry)| other.model == key.model && !entry.devices.is_disjoint(&devices))
            .map(|(other, _)| other.clone())
            .collect();
        if let Some(newest) = replaced.iter().map(|other| other.plan_epoch).max().filter(|held| *held >= key.plan_epoch)
        {
            return Err(Class::StaleEpoch.status(format!(
                "model {:?} is held on these devices at plan epoch {newest}, the request names {}",
                key.model, key.plan_epoch
            )));
        }
        let freed: Vec<Freed> = replaced.iter().filter_map(|other| self.free(&mut entries, other)).collect();
        let (sender, state) = watch::channel(LoadState::default());
        let entry = Entry { devices, cancel: spec.cancel.clone(), state: state.clone(), freed: None };
        entries.insert(key, entry);
        drop(entries);
        let failures = Arc::clone(&self.failures);
        tokio::spawn(async move {
            join_all(freed).await;
            // If the load panics, the sender is gone without an outcome, and those who follow it see that.
            let _ = tokio::task::spawn_blocking(move || {
                let progress = |loaded_bytes, total_bytes| {
                    sender.send_modify(|state| (state.loaded_bytes, state.total_bytes) = (loaded_bytes, total_bytes));
                };
                let (model, cancel) = (spec.model.clone(), spec.cancel.clone());
                let loaded = timed_load(spec, links, &progress);
                if !cancel.is_cancelled() {
                    failures.note(&model, &loaded, Instant::now());
                }
                // Slices as they were stored, the vocabulary, and perhaps the weights of a replaced part.
                return_freed_memory();
                let outcome = loaded.map(Arc::new).map_err(|error| wire::status_of(&error));
                sender.send_modify(|state| state.outcome = Some(outcome));
            })
            .await;
        });
        Ok(state)
    }

    /// The loaded part.
    ///
    /// # Errors
    /// `StaleEpoch` if it is not held, `NotReady` while it loads, or why it did not load.
    pub fn find(&self, key: &ReplicaKey) -> Result<Arc<Replica>, Status> {
        let entries = self.lock();
        let ReplicaKey { model, plan_epoch, replica } = key;
        let entry = entries.get(key).ok_or_else(|| {
            Class::StaleEpoch
                .status(format!("replica {replica} of model {model:?} at plan epoch {plan_epoch} is not held here"))
        })?;
        if entry.freed.is_some() {
            return Err(being_freed(key));
        }
        match &entry.state.borrow().outcome {
            Some(Ok(replica)) => Ok(replica.clone()),
            Some(Err(status)) => Err(status.clone()),
            None => Err(Class::NotReady.status(format!("replica {replica} of model {model:?} is loading"))),
        }
    }

    /// Frees a part if it is held; returns when its threads have ended.
    pub async fn unload(&self, key: &ReplicaKey) {
        let freed = self.free(&mut self.lock(), key);
        if let Some(freed) = freed {
            freed.await;
        }
    }

    /// Frees everything, as [`unload`](Self::unload).
    pub async fn unload_all(&self) {
        let freed: Vec<Freed> = {
            let mut entries = self.lock();
            let keys: Vec<ReplicaKey> = entries.keys().cloned().collect();
            keys.iter().filter_map(|key| self.free(&mut entries, key)).collect()
        };
        join_all(freed).await;
    }

    /// Whether no part is held.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// What a heartbeat says.
    pub fn reports(&self) -> Vec<v1::ReplicaReport> {
        let report = |(key, entry): (&ReplicaKey, &Entry)| {
            let replica = loaded(&entry.state);
            let leader = replica.as_ref().and_then(|replica| replica.leader());
            // Before the problem: it may become one.
            let stall = leader.and_then(LeaderHandle::stall);
            let problem = match &replica {
                _ if entry.freed.is_some() => Some("it is being unloaded".to_owned()),
                Some(replica) => replica.problem().borrow().clone(),
                None => None,
            };
            let unreachable = replica.as_ref().filter(|_| problem.is_some()).and_then(|it| it.unreachable_worker());
            v1::ReplicaReport {
                model: key.model.clone(),
                plan_epoch: key.plan_epoch,
                replica: key.replica,
                problem: problem.unwrap_or_default(),
                unreachable_worker: unreachable.unwrap_or_default(),
                engine: leader
                    .map(|leader| wire::engine_status(leader.status(), leader.last_step_age().unwrap_or_default())),
                stall: stall.unwrap_or_default(),
                ranks: replica.iter().flat_map(|replica| replica.scratch()).map(wire::rank_report).collect(),
            }
        };
        self.lock().iter().map(report).collect()
    }

    /// What every part is doing.
    pub fn states(&self) -> Vec<PartState> {
        let state = |entry: &Entry| match &entry.state.borrow().outcome {
            _ if entry.freed.is_some() => PartState::Freeing,
            None => PartState::Loading,
            Some(Ok(replica)) if replica.problem().borrow().is_some() => PartState::Broken,
            Some(Ok(replica)) if replica.leader().and_then(LeaderHandle::stall).is_some() => PartState::Stalled,
            Some(Ok(_)) => PartState::Ready,
            Some(Err(_)) => PartState::Broken,
        };
        self.lock().values().map(state).collect()
    }

    /// Which load failed here, and why, as long as that makes the worker unfit; see [`Failures`].
    pub fn failure(&self) -> Option<String> {
        self.failures.standing(Instant::now())
    }

    /// Forgets which loads failed, as whoever asked for them is gone.
    pub fn forget_failures(&self) {
        self.failures.forget();
    }

    /// Starts freeing a part, once; it leaves the list when that is done.
    fn free(&self, entries: &mut Entries, key: &ReplicaKey) -> Option<Freed> {
        let entry = entries.get_mut(key)?;
        let (replicas, key, state) = (self.clone(), key.clone(), entry.state.clone());
        let freed = entry.freed.get_or_insert_with(|| {
            entry.cancel.cancel();
            // A task of its own: it goes on if nobody waits for it.
            let task = tokio::spawn(async move {
                stop(state).await;
                replicas.lock().remove(&key);
            });
            task.map(drop).boxed().shared()
        });
        Some(freed.clone())
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Loads a part and counts that.
fn timed_load(
    spec: ReplicaSpec,
    links: Arc<LinkListener>,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Replica, WorkerError> {
    let (start, metrics, model) = (Instant::now(), Arc::clone(&spec.metrics), spec.model.clone());
    let loaded = Replica::load(spec, links, progress);
    let outcome = if loaded.is_ok() { "ready" } else { "failed" };
    metrics.loads.with_label_values(&[&model, outcome]).inc();
    if loaded.is_ok() {
        metrics.load_seconds.with_label_values(&[&model]).observe(start.elapsed().as_secs_f64());
    }
    loaded
}

fn loaded(state: &watch::Receiver<LoadState>) -> Option<Arc<Replica>> {
    state.borrow().outcome.as_ref()?.as_ref().ok().cloned()
}

/// Waits for the end of a cancelled load, then stops what it loaded.
async fn stop(mut state: watch::Receiver<LoadState>) {
    // An error says that the load ended without an outcome.
    let _ = state.wait_for(|state| state.outcome.is_some()).await;
    if let Some(replica) = loaded(&state) {
        // A panic there leaves nothing to stop.
        let _ = tokio::task::spawn_blocking(move || replica.stop("the replica was unloaded")).await;
    }
}

fn being_freed(key: &ReplicaKey) -> Status {
    Class::StaleEpoch.status(format!("replica {} of model {:?} is being unloaded", key.replica, key.model))
}
