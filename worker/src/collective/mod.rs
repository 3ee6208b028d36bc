//! How ranks meet.

/// Accepts the rank links of this worker: checks the handshake and hands each connection to the replica and rank that it names.
pub struct LinkListener {}

impl LinkListener {
    /// Listens on `address` (port 0: any).
    ///
    /// # Errors
    /// [`WorkerError::Bind`](crate::WorkerError).
    pub fn bind(_address: std::net::SocketAddr) -> Result<Self, crate::WorkerError> {
        todo!()
    }

    /// Where it listens.
    pub fn local_addr(&self) -> std::net::SocketAddr {
        todo!()
    }
}
