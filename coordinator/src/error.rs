//! What a coordinator can fail at.

/// A failure of the coordinator itself (requests fail with their own errors).
#[derive(Debug, thiserror::Error)]
pub enum CoordinatorError {
    /// An address cannot be bound.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address.
        address: std::net::SocketAddr,
        /// Cause.
        source: std::io::Error,
    },
}
