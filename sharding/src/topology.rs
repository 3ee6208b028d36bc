//! The devices of a cluster and how fast they are, as the planner sees them.
//! For: built from worker registrations, from `--devices`, or from a topology file of a cluster that does not exist.

use serde::{Deserialize, Serialize};

/// A cluster: devices in a fixed order, and the links between hosts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Devices; a plan refers to them by their index here.
    pub devices: Vec<DeviceSpec>,
    /// Links between two devices of one host.
    pub intra_host: LinkSpec,
    /// Links between hosts.
    pub inter_host: LinkSpec,
}

/// One device that can hold a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceSpec {
    /// Worker process that owns the device.
    pub worker_id: String,
    /// Index of the device within its worker.
    pub local_rank: usize,
    /// Host name; ranks of one tensor-parallel group prefer one host.
    pub host: String,
    /// Kind and model, such as `cpu` or `cuda NVIDIA H200`.
    pub name: String,
    /// Memory that weights, KV blocks and activations may use.
    pub memory_bytes: u64,
    /// Sustained memory read bandwidth.
    pub memory_bytes_per_second: f64,
    /// Sustained multiply-add rate in quantized matmul, in floating-point operations (two per multiply-add).
    pub operations_per_second: f64,
}

/// Cost of moving a message.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkSpec {
    /// One-way time of an empty message, seconds.
    pub latency_seconds: f64,
    /// Sustained bandwidth in each direction.
    pub bytes_per_second: f64,
}
