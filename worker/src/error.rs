//! What a worker can fail at.

use std::net::SocketAddr;

use lockstep_executor::ExecutorError;

/// A failure of this worker, with what it was about.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The checkpoint.
    #[error(transparent)]
    Model(#[from] lockstep_model::ModelError),
    /// The plan.
    #[error(transparent)]
    Plan(#[from] lockstep_sharding::PlanError),
    /// The device.
    #[error(transparent)]
    Kernel(#[from] lockstep_kernels::KernelError),
    /// The engine refused a sequence.
    #[error(transparent)]
    Engine(#[from] crate::engine::EngineError),
    /// Another rank cannot be reached, timed out or sent something else than agreed.
    #[error("rank {peer}: {what}")]
    Link {
        /// The other rank.
        peer: usize,
        /// What happened.
        what: String,
    },
    /// The replica cannot be loaded, since another of its workers does not answer or the path to it is cut.
    #[error("{what}")]
    Unreachable {
        /// The other worker.
        worker_id: String,
        /// Which rank, and what happened.
        what: String,
    },
    /// The plan of the replica and the checkpoint (or this worker) do not belong together.
    #[error("the plan does not fit: {0}")]
    Mismatch(String),
    /// A step that the leader sent cannot be executed.
    #[error("step {step_id}: {problem}")]
    Step {
        /// The step.
        step_id: u64,
        /// What is wrong, expected and got.
        problem: String,
    },
    /// The replica broke earlier.
    #[error("the replica is broken: {0}")]
    ReplicaBroken(String),
    /// An address cannot be bound.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// Cause.
        source: std::io::Error,
    },
    /// Certificates or keys cannot be used.
    #[error(transparent)]
    Tls(#[from] lockstep_transport::TlsError),
    /// The coordinator refused or cannot be reached.
    #[error("coordinator {address}: {what}")]
    Coordinator {
        /// Its address.
        address: String,
        /// What happened.
        what: String,
    },
    /// The registration in etcd is refused.
    #[error("etcd: {0}")]
    Etcd(String),
    /// The process itself failed: its server, a thread.
    #[error("worker: {0}")]
    Server(String),
    /// A metric cannot be what it is defined as.
    #[error("metrics: {0}")]
    Metrics(#[from] lockstep_telemetry::metrics::MetricError),
    /// A setting is wrong.
    #[error("{field}: {problem}")]
    Config {
        /// The setting.
        field: &'static str,
        /// What is wrong, expected and got.
        problem: String,
    },
}

impl From<ExecutorError> for WorkerError {
    fn from(error: ExecutorError) -> Self {
        match error {
            ExecutorError::Model(error) => Self::Model(error),
            ExecutorError::Kernel(error) => Self::Kernel(error),
            ExecutorError::Mismatch(problem) => Self::Mismatch(problem),
            ExecutorError::Step { step_id, problem } => Self::Step { step_id, problem },
            ExecutorError::LoadEnded => Self::ReplicaBroken(error.to_string()),
        }
    }
}
