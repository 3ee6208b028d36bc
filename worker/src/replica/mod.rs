//! This worker's part of one replica: rank threads, their links, and, on the leader, the engine's thread.
//!
//! ```text
//!               ┌ rank thread 0 ◀─ channel ─┐
//! leader ───────┤ rank thread 1 ◀─ channel ─┼─ engine thread ◀─ LeaderHandle::submit
//!               └ results ──────────────────┘      │  ▲ reader threads
//! other worker ── rank thread 2 ◀─ MessageLink ────┘  └ results of the last stage
//! ```
//!
//! Invariant: a failure anywhere (an error, a panic, a lost link) aborts every link of the part with one reason, ends its
//! threads and closes its sequences; nothing waits on what will not come.

mod health;
mod leader;
mod pulse;
mod rank_thread;
mod receive;
mod step_results;
mod step_trace;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use lockstep_executor::{StepLimits, step::StepPlan};
use lockstep_kernels::device::Scratch;
use lockstep_model::Checkpoint;
use lockstep_sharding::{RankPlan, ReplicaPlan};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use self::leader::{LeaderHandle, Prefixes, RunningSequence};
use self::{
    health::Health,
    leader::{EngineThread, Event, RemoteRank},
    rank_thread::{LoadEvent, Orders, RankMessage, RankThread},
};
use crate::{
    WorkerError,
    collective::{LinkListener, MessageLink},
    devices::LocalDevices,
    engine::EngineConfig,
    metrics::{LastScratch, Metrics},
};

/// The rank whose worker leads.
const LEADER_RANK: usize = 0;
/// How often a load looks whether it was cancelled.
const CANCEL_INTERVAL: Duration = Duration::from_millis(50);
/// How often it looks whether the first step has come back.
const FIRST_STEP_POLL: Duration = Duration::from_millis(1);

/// What to load.
#[derive(Clone, Debug)]
pub struct ReplicaSpec {
    /// This worker's id; it runs the ranks whose `worker_id` it is.
    pub worker_id: String,
    /// Name of the model for clients; with epoch and index it names the replica's links.
    pub model: String,
    /// Model file.
    pub source: PathBuf,
    /// Version of the plan; links of another epoch are refused.
    pub plan_epoch: u64,
    /// Index of the replica in its plan.
    pub replica: usize,
    /// Its number among the live replicas of the model, of whatever plan: what metrics and traces name it by.
    pub index: usize,
    /// Cut of this replica.
    pub plan: ReplicaPlan,
    /// Tokens in a KV block, and the other limits of the plan.
    pub block_size: usize,
    /// Longest sequence.
    pub max_sequence_tokens: usize,
    /// Most sequences in a step.
    pub max_num_sequences: usize,
    /// Most tokens in a step.
    pub max_step_tokens: usize,
    /// Most sequences waiting for admission.
    pub max_waiting_sequences: usize,
    /// Whether sequences with equal beginnings share KV blocks.
    pub is_prefix_caching: bool,
    /// Shared secret of the replica's links.
    pub secret: Vec<u8>,
    /// Where each rank's links are reached, by rank.
    pub rank_addresses: Vec<SocketAddr>,
    /// Devices of this worker, by local rank.
    pub devices: LocalDevices,
    /// Longest wait for the others inside an all-reduce before the replica is taken for broken.
    pub collective_timeout: Duration,
    /// Where the part is counted.
    pub metrics: Arc<Metrics>,
    /// Ends a load that nobody wants any more.
    pub cancel: CancellationToken,
}

impl ReplicaSpec {
    fn ranks(&self) -> impl Iterator<Item = &RankPlan> {
        self.plan.stages.iter().flat_map(|stage| &stage.ranks)
    }

    fn local_ranks(&self) -> Vec<usize> {
        self.ranks().filter(|rank| rank.worker_id == self.worker_id).map(|rank| rank.rank).collect()
    }

    /// Local ranks of the devices of this worker that the replica uses.
    pub(crate) fn local_devices(&self) -> impl Iterator<Item = usize> {
        self.ranks().filter(|rank| rank.worker_id == self.worker_id).map(|rank| rank.local_rank)
    }

    fn limits(&self, vocab_size: usize) -> StepLimits {
        StepLimits {
            vocab_size,
            num_kv_blocks: self.plan.num_kv_blocks,
            block_size: self.block_size,
            max_num_sequences: self.max_num_sequences,
            max_step_tokens: self.max_step_tokens,
            max_sequence_tokens: self.max_sequence_tokens,
        }
    }

    /// The other worker that runs a rank.
    fn worker_of(&self, rank: Option<usize>) -> Option<String> {
        let worker_id = &self.plan.find_rank(rank?)?.1.worker_id;
        (*worker_id != self.worker_id).then(|| worker_id.clone())
    }

    fn engine_config(&self) -> EngineConfig {
        EngineConfig {
            num_kv_blocks: self.plan.num_kv_blocks,
            block_size: self.block_size,
            max_num_sequences: self.max_num_sequences,
            max_step_tokens: self.max_step_tokens,
            max_sequence_tokens: self.max_sequence_tokens,
            max_waiting_sequences: self.max_waiting_sequences,
            max_steps_in_flight: self.plan.stages.len(),
            is_prefix_caching: self.is_prefix_caching,
        }
    }

    fn check(&self) -> Result<(), WorkerError> {
        let mismatch = |problem: String| Err(WorkerError::Mismatch(problem));
        let world_size = self.plan.world_size();
        if self.rank_addresses.len() != world_size {
            return mismatch(format!("{} rank addresses for {world_size} ranks", self.rank_addresses.len()));
        }
        let sizes = [
            ("block_size", self.block_size),
            ("num_kv_blocks", self.plan.num_kv_blocks),
            ("max_sequence_tokens", self.max_sequence_tokens),
            ("max_num_sequences", self.max_num_sequences),
            ("max_step_tokens", self.max_step_tokens),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return mismatch(format!("{name} is 0"));
        }
        if self.plan.num_kv_blocks.checked_mul(self.block_size).is_none_or(|slots| slots > u32::MAX as usize) {
            return mismatch(format!(
                "{} kv blocks of {} tokens are too many",
                self.plan.num_kv_blocks, self.block_size
            ));
        }
        if self.local_ranks().is_empty() {
            return mismatch(format!("it has no rank on worker {:?}", self.worker_id));
        }
        Ok(())
    }
}

/// A running part of a replica. Dropping it stops its threads and closes its links.
pub struct Replica {
    spec: Arc<ReplicaSpec>,
    health: Health,
    leader: Option<LeaderHandle>,
    vocab_size: usize,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Of the ranks of this worker, by rank.
    last_scratch: BTreeMap<usize, Arc<LastScratch>>,
}

impl Replica {
    /// Loads weights, connects the ranks, starts the threads. Blocks; call it off the async runtime.
    /// `links` accepts connections of other ranks; `progress` is called with `(loaded_bytes, total_bytes)`.
    ///
    /// # Errors
    /// [`WorkerError`] naming the tensor, rank or address.
    pub fn load(
        spec: ReplicaSpec,
        links: Arc<LinkListener>,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self, WorkerError> {
        spec.check()?;
        let checkpoint = Arc::new(Checkpoint::open(&spec.source)?);
        let vocab_size = checkpoint.config().vocab_size;
        let (inbox, events) = leader::inbox(&spec);
        let health = Health::new({
            let inbox = inbox.clone();
            // A full inbox wakes the engine as well.
            move || drop(inbox.try_send(Event::Wake))
        });
        let last_scratch = spec.local_ranks().into_iter().map(|rank| (rank, Arc::default())).collect();
        let spec = Arc::new(spec);
        let mut replica = Self {
            spec: spec.clone(),
            health: health.clone(),
            leader: None,
            vocab_size,
            threads: Mutex::default(),
            last_scratch,
        };
        let last_scratch = &replica.last_scratch;
        let mut loading =
            Loading { spec: &spec, checkpoint: &checkpoint, links: &links, health: &health, last_scratch };
        let started =
            loading.start(&inbox, replica.threads.get_mut().unwrap_or_else(PoisonError::into_inner), progress);
        let failed = |error: WorkerError| {
            health.fail(&error.to_string());
            match replica.spec.worker_of(health.unreachable()) {
                Some(worker_id) => WorkerError::Unreachable { worker_id, what: error.to_string() },
                None => error,
            }
        };
        let (local, remote) = started.map_err(failed)?;
        if spec.local_ranks().contains(&LEADER_RANK) {
            let (engine, handle) = EngineThread::new(&spec, health.clone(), local, (inbox, events));
            let threads = replica.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
            engine.start(remote, threads).inspect_err(|error| replica.health.fail(&error.to_string()))?;
            loading.wait_for_step(&handle)?;
            replica.leader = Some(handle);
        }
        Ok(replica)
    }

    /// The engine, if this worker leads the replica.
    pub fn leader(&self) -> Option<&LeaderHandle> {
        self.leader.as_ref()
    }

    /// Becomes `Some(reason)` when the replica breaks; it never recovers.
    pub fn problem(&self) -> watch::Receiver<Option<String>> {
        self.health.problem()
    }

    /// The worker that could not be reached, if that is why it broke.
    pub fn unreachable_worker(&self) -> Option<String> {
        self.spec.worker_of(self.health.unreachable())
    }

    /// Scratch memory of each rank of this worker after its last step.
    pub fn scratch(&self) -> impl Iterator<Item = (usize, Scratch)> {
        self.last_scratch.iter().map(|(rank, last)| (*rank, last.get()))
    }

    /// Token ids of the model.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Ends the threads and closes the links; running sequences end with `reason` as the problem. Blocks until the step
    /// that is being computed reaches its next collective or its end.
    pub fn stop(&self, reason: &str) {
        self.health.end(reason);
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // A panic there was reported by its guard.
            let _ = thread.join();
        }
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.stop("the replica was unloaded");
    }
}

/// Senders of orders to this worker's ranks, and the control links of the others' (on the leader only).
type Started = (Vec<SyncSender<Arc<StepPlan>>>, Vec<RemoteRank>);

/// The first half of [`Replica::load`]: rank threads up to the point where all of them can execute steps.
struct Loading<'a> {
    spec: &'a Arc<ReplicaSpec>,
    checkpoint: &'a Arc<Checkpoint>,
    links: &'a Arc<LinkListener>,
    health: &'a Health,
    last_scratch: &'a BTreeMap<usize, Arc<LastScratch>>,
}

impl Loading<'_> {
    fn start(
        &mut self,
        inbox: &SyncSender<Event>,
        threads: &mut Vec<JoinHandle<()>>,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Started, WorkerError> {
        let local_ranks = self.spec.local_ranks();
        let leads = local_ranks.contains(&LEADER_RANK);
        let (events, loaded) = sync_channel(local_ranks.len() * 16);
        let mut orders_of_local = Vec::new();
        for rank in &local_ranks {
            let orders = if leads {
                let (sender, plans) = sync_channel(self.spec.plan.stages.len() + 1);
                orders_of_local.push(sender);
                Orders::Local { plans, results: inbox.clone() }
            } else {
                Orders::Remote
            };
            let thread = RankThread {
                rank: *rank,
                spec: self.spec.clone(),
                listener: self.links.clone(),
                health: self.health.clone(),
                last_scratch: self.last_scratch.get(rank).cloned().unwrap_or_default(),
            };
            threads.push(thread.spawn(self.checkpoint.clone(), orders, events.clone())?);
        }
        drop(events);
        let (control, bytes) = self.follow(&loaded, local_ranks.len(), progress)?;
        let mut remote = Vec::with_capacity(control.len());
        for link in control {
            self.wait_ready(&link, || progress(bytes, bytes))?;
            remote.push(RemoteRank { rank: link.peer(), link: Arc::new(link) });
        }
        Ok((orders_of_local, remote))
    }

    /// Follows the ranks until all are loaded; returns the leader's control links and the bytes loaded.
    fn follow(
        &self,
        events: &Receiver<LoadEvent>,
        num_ranks: usize,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<(Vec<MessageLink>, u64), WorkerError> {
        let (mut loaded_bytes, mut total_bytes, mut num_ready) = (0, 0, 0);
        let mut control = Vec::new();
        while num_ready < num_ranks {
            match events.recv_timeout(CANCEL_INTERVAL) {
                Ok(LoadEvent::Total(bytes)) => total_bytes += bytes,
                Ok(LoadEvent::Loaded(bytes)) => loaded_bytes += bytes,
                Ok(LoadEvent::Ready(links)) => {
                    num_ready += 1;
                    control.extend(links);
                }
                Ok(LoadEvent::Failed(error)) => return Err(error),
                Err(RecvTimeoutError::Timeout) => self.check_cancelled()?,
                // Every sender is gone: a rank thread panicked, and its guard has said so.
                Err(RecvTimeoutError::Disconnected) => return Err(WorkerError::ReplicaBroken(self.health.reason())),
            }
            progress(loaded_bytes, total_bytes);
        }
        Ok((control, loaded_bytes))
    }

    /// Waits for a rank of another worker as long as it lives, since a large model takes its time, and calls `waiting`
    /// again and again: whoever follows this load must not take it for dead.
    fn wait_ready(&self, link: &MessageLink, waiting: impl Fn()) -> Result<(), WorkerError> {
        loop {
            match link.try_receive()? {
                Some(RankMessage::Ready) => return Ok(()),
                Some(RankMessage::Result(_)) => {
                    let what = "sent a result before it was ready".to_owned();
                    return Err(WorkerError::Link { peer: link.peer(), what });
                }
                None => std::thread::sleep(CANCEL_INTERVAL),
            }
            self.check_cancelled()?;
            waiting();
        }
    }

    /// Waits until the first canary has passed every rank: before that nobody knows whether they work together.
    fn wait_for_step(&self, leader: &LeaderHandle) -> Result<(), WorkerError> {
        while leader.last_step_age().is_none() {
            self.check_cancelled()?;
            // Breaks the part at last if nothing comes.
            leader.stall();
            std::thread::sleep(FIRST_STEP_POLL);
        }
        Ok(())
    }

    fn check_cancelled(&self) -> Result<(), WorkerError> {
        if self.health.is_broken() {
            return Err(WorkerError::ReplicaBroken(self.health.reason()));
        }
        if self.spec.cancel.is_cancelled() {
            return Err(WorkerError::ReplicaBroken("its load was cancelled".to_owned()));
        }
        Ok(())
    }
}
