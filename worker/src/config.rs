//! Settings of a worker process.

use std::{net::SocketAddr, num::NonZero, time::Duration};

use lockstep_etcd::EtcdSettings;
use lockstep_transport::{TlsFiles, is_local};

use crate::{WorkerError, devices::DeviceSettings};

/// See [`spin`].
const SPIN: Duration = Duration::from_micros(50);
/// See [`engine_spin`].
const ENGINE_SPIN: Duration = Duration::from_millis(20);

/// Checked settings.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// Unique in the cluster.
    pub worker_id: String,
    /// Where it registers.
    pub registry: RegistryAddress,
    /// Where the Worker service listens (port 0: any).
    pub listen: SocketAddr,
    /// Where rank links listen (port 0: any).
    pub rank_listen: SocketAddr,
    /// Where liveness, readiness and metrics are asked for over HTTP (port 0: any).
    pub http_listen: SocketAddr,
    /// Host name or address under which others reach this worker.
    pub advertise_host: String,
    /// Devices (ranks) of this worker.
    pub devices: DeviceSettings,
    /// Memory that this worker's devices may use together; `None`: 90 % of what is free at start, of a GPU or of
    /// the machine.
    pub memory_bytes: Option<u64>,
    /// Longest wait for the others inside an all-reduce.
    pub collective_timeout: Duration,
    /// Most sequences waiting in an engine.
    pub max_waiting_sequences: usize,
    /// Whether sequences with equal beginnings share KV blocks.
    pub is_prefix_caching: bool,
    /// Longest drain at shutdown.
    pub drain_timeout: Duration,
    /// Certificate, key and authority of this member of the cluster; `None`: clear text between members.
    pub cluster_tls: Option<TlsFiles>,
    /// Clear text is spoken with other machines too.
    pub allow_insecure: bool,
}

/// Where a worker makes itself known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegistryAddress {
    /// At the only coordinator: its gRPC address, `http://host:port`.
    Coordinator(String),
    /// In etcd, where any number of coordinators find it.
    Etcd(EtcdSettings),
}

impl WorkerConfig {
    /// Accepts the settings or names the one that is wrong.
    ///
    /// # Errors
    /// [`WorkerError::Config`].
    pub fn check(&self) -> Result<(), WorkerError> {
        let wrong = |field, problem: &str| Err(WorkerError::Config { field, problem: problem.to_owned() });
        if self.worker_id.is_empty() {
            return wrong("worker_id", "is empty");
        }
        if self.advertise_host.is_empty() {
            return wrong("advertise_host", "is empty");
        }
        if self.devices.num_cpu_devices == 0 {
            return wrong("num_devices", "is 0, expected at least 1");
        }
        if matches!(self.registry, RegistryAddress::Etcd(_)) && !cfg!(feature = "etcd") {
            return wrong("etcd", "is given, but this build has no etcd client: build with the feature `etcd`");
        }
        if self.memory_bytes == Some(0) {
            return wrong("memory_bytes", "is 0, expected at least 1");
        }
        if self.collective_timeout.is_zero() {
            return wrong("collective_timeout", "is 0, expected more");
        }
        if self.max_waiting_sequences == 0 {
            return wrong("max_waiting_sequences", "is 0, expected at least 1");
        }
        let listens = [("listen", self.listen), ("rank_listen", self.rank_listen), ("http_listen", self.http_listen)];
        match listens.into_iter().find(|(_, address)| !is_local(address.ip())) {
            Some((field, address)) if self.cluster_tls.is_none() && !self.allow_insecure => wrong(
                field,
                &format!(
                    "is {address}, which other machines reach, and there is no TLS: set cluster_ca, cluster_cert and \
                     cluster_key, listen on 127.0.0.1, or ask for clear text with insecure"
                ),
            ),
            _ => Ok(()),
        }
    }
}

/// `threads`, or for 0 an equal share of the cores for each of `num_devices` devices.
pub(crate) fn threads_per_device(threads: usize, num_devices: usize) -> usize {
    if threads > 0 { threads } else { (num_cores() / num_devices.max(1)).max(1) }
}

/// How long a waiting rank looks again before it sleeps, if its replica has so many threads on this machine: a peer on
/// another core answers faster than a thread wakes; one that needs this core waits until it is given away.
pub(crate) fn spin(num_threads: usize) -> Duration {
    if num_threads <= num_cores() { SPIN } else { Duration::ZERO }
}

/// How long the engine's thread looks again while steps are under way, if the ranks beside it have so many threads: the
/// whole step, as whatever passes between two steps is time in which no rank computes. A core is left to the others.
pub(crate) fn engine_spin(num_threads: usize) -> Duration {
    if num_threads + 2 <= num_cores() { ENGINE_SPIN } else { Duration::ZERO }
}

fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_spin_only_where_each_thread_has_a_core() {
        assert_eq!((spin(1), spin(num_cores())), (SPIN, SPIN));
        assert_eq!(spin(num_cores() + 1), Duration::ZERO);
        assert_eq!(engine_spin(num_cores()), Duration::ZERO);
        assert_eq!((threads_per_device(3, 2), threads_per_device(0, 1)), (3, num_cores()));
    }
}
