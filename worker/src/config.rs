//! Settings of a worker process.

use std::{net::SocketAddr, time::Duration};

/// Checked settings.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// Unique in the cluster.
    pub worker_id: String,
    /// Coordinator's gRPC address, `http://host:port`.
    pub coordinator: String,
    /// Where the Worker service listens (port 0: any).
    pub listen: SocketAddr,
    /// Where rank links listen (port 0: any).
    pub rank_listen: SocketAddr,
    /// Host name or address under which others reach this worker.
    pub advertise_host: String,
    /// CPU devices (ranks) of this worker.
    pub num_devices: usize,
    /// Threads of each device; 0: all cores divided by the devices.
    pub threads_per_device: usize,
    /// Memory that this worker's devices may use together; `None`: 90 % of what is available at start.
    pub memory_bytes: Option<u64>,
    /// Longest wait for another rank inside a step.
    pub collective_timeout: Duration,
    /// Most sequences waiting in an engine.
    pub max_waiting_sequences: usize,
    /// Longest drain at shutdown.
    pub drain_timeout: Duration,
}
