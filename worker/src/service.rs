//! The worker's gRPC service and its life: bind, register, serve, drain.

use tokio_util::sync::CancellationToken;

use crate::{WorkerConfig, WorkerError};

/// Runs a worker until `shutdown` fires; then drains and returns.
///
/// # Errors
/// [`WorkerError`] if it cannot start or lost its registration for good.
pub async fn run(_config: WorkerConfig, _shutdown: CancellationToken) -> Result<(), WorkerError> {
    todo!()
}
