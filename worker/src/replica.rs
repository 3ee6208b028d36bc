//! This worker's part of one replica: rank threads, their links, and, on the leader, the engine's thread.

use std::{net::SocketAddr, path::PathBuf, sync::Arc};

use lockstep_sharding::ReplicaPlan;
use tokio::sync::{mpsc, watch};

use crate::{
    WorkerError,
    engine::{EngineStatus, SequenceOutput, SequenceRequest},
};

/// What to load.
#[derive(Clone, Debug)]
pub struct ReplicaSpec {
    /// This worker's id; it runs the ranks whose `worker_id` it is.
    pub worker_id: String,
    /// Model file.
    pub source: PathBuf,
    /// Version of the plan; links of another epoch are refused.
    pub plan_epoch: u64,
    /// Index of the replica in its plan.
    pub replica: usize,
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
    /// Shared secret of the replica's links.
    pub secret: Vec<u8>,
    /// Where each rank's links are reached, by rank.
    pub rank_addresses: Vec<SocketAddr>,
    /// Threads of each rank's CPU device; 0: all cores divided by the ranks of this worker.
    pub threads_per_rank: usize,
    /// Longest wait for another rank inside a step before the replica is taken for broken.
    pub collective_timeout: std::time::Duration,
}

/// A running part of a replica. Dropping it stops its threads and closes its links.
pub struct Replica {}

impl Replica {
    /// Loads weights, connects the ranks, starts the threads. Blocks; call it off the async runtime.
    /// `links` accepts connections of other ranks; `progress` is called with `(loaded_bytes, total_bytes)`.
    ///
    /// # Errors
    /// [`WorkerError`] naming the tensor, rank or address.
    pub fn load(
        _spec: ReplicaSpec,
        _links: Arc<crate::collective::LinkListener>,
        _progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self, WorkerError> {
        todo!()
    }

    /// The engine, if this worker leads the replica.
    pub fn leader(&self) -> Option<&LeaderHandle> {
        todo!()
    }

    /// Becomes `Some(reason)` when the replica breaks; it never recovers.
    pub fn problem(&self) -> watch::Receiver<Option<String>> {
        todo!()
    }
}

/// Submits sequences to the engine's thread.
#[derive(Clone)]
pub struct LeaderHandle {}

/// A submitted sequence. Dropping it cancels the sequence.
pub struct RunningSequence {
    /// Its outputs; closed without `Finished` if the replica broke (see [`Replica::problem`]).
    pub outputs: mpsc::Receiver<SequenceOutput>,
}

impl LeaderHandle {
    /// Hands a sequence to the engine.
    ///
    /// # Errors
    /// [`WorkerError::Engine`] if it is refused, [`WorkerError::ReplicaBroken`].
    pub async fn submit(&self, _request: SequenceRequest) -> Result<RunningSequence, WorkerError> {
        todo!()
    }

    /// The engine's last numbers.
    pub fn status(&self) -> EngineStatus {
        todo!()
    }
}
