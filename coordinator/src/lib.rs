//! The coordinator: registry, plan driver, router, gRPC and HTTP front.

pub mod config;
pub mod error;

pub use config::CoordinatorConfig;
pub use error::CoordinatorError;

use tokio_util::sync::CancellationToken;

/// Runs a coordinator until `shutdown` fires; then stops admission, drains and returns.
/// `ready` is called once with the bound gRPC and HTTP addresses.
///
/// # Errors
/// [`CoordinatorError`] if it cannot start.
pub async fn run(
    _config: CoordinatorConfig,
    _shutdown: CancellationToken,
    _ready: impl FnOnce(std::net::SocketAddr, std::net::SocketAddr) + Send,
) -> Result<(), CoordinatorError> {
    todo!()
}
