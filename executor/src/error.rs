//! What a rank can fail at by itself.

/// A failure of a rank, with what it was about.
#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    /// The checkpoint.
    #[error(transparent)]
    Model(#[from] lockstep_model::ModelError),
    /// The device.
    #[error(transparent)]
    Kernel(#[from] lockstep_kernels::KernelError),
    /// The plan of the replica and the checkpoint do not belong together.
    #[error("the plan does not fit: {0}")]
    Mismatch(String),
    /// A step cannot be executed.
    #[error("step {step_id}: {problem}")]
    Step {
        /// The step.
        step_id: u64,
        /// What is wrong, expected and got.
        problem: String,
    },
    /// Whoever followed the load ended it.
    #[error("nobody follows its load any more")]
    LoadEnded,
}
