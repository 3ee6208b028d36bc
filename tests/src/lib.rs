//! Harness of the end-to-end tests: real processes of the one binary, a real model, clients over gRPC.
//!
//! - [`environment`]: where the binary, the model and Python are. [`cluster`]: `lockstep up`. [`etcd`]: etcd.
//!   [`shared`]: several coordinators over it. [`network`]: a network that can be cut. [`ports`]: where they listen. [`process`]: programs that end by themselves. [`client`]: requests.
//!   [`http`]: plain HTTP. [`collector`]: of traces. [`certificates`]: for TLS. [`tenants`]: files of them. [`agreement`]: two implementations fed the
//!   same tokens.
//!
//! The scenarios are in `tests/tests/scenarios`. `tests/run.sh` sets up what they need.
//! Invariants: every process that a test starts ends with the test; one cluster runs at a time in a checkout, so that
//! times mean something; what is missing fails a test, nothing is skipped.

#![forbid(unsafe_code)]

pub mod agreement;
pub mod certificates;
pub mod client;
pub mod cluster;
pub mod collector;
pub mod environment;
pub mod etcd;
pub mod http;
pub mod network;
pub mod ports;
pub mod process;
pub mod shared;
pub mod tenants;

pub use client::{Client, Output};
pub use cluster::{Cluster, Layout};
pub use etcd::Etcd;
pub use shared::SharedCluster;
