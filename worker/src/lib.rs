//! A worker process: one or more ranks, each a thread that owns a device.
//!
//! - [`engine`]: on the replica's leader: which sequences run in the next step, which KV blocks they use, which token
//!   comes next. Plain state, no device, no network.
//! - [`rank`]: the other ranks that a rank meets inside a step. The step itself is the executor's.
//! - [`collective`]: how ranks meet: TCP links, all-reduce, send/receive, with deadlines and epochs.
//! - [`replica`]: puts the above together for one plan.
//! - [`devices`]: which devices the ranks own.
//! - [`metrics`]: what is counted.
//! - [`service`], [`registration`], [`config`]: gRPC, lease, settings.

#![forbid(unsafe_code)]

pub mod collective;
pub mod config;
pub mod devices;
pub mod engine;
pub mod error;
pub mod metrics;
pub mod rank;
pub mod registration;
pub mod replica;
pub mod service;

pub use config::WorkerConfig;
pub use error::WorkerError;
pub use service::run;
