//! The coordinator's front against stub workers: real sockets, the real protocol, no computation.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

#[path = "../stub/mod.rs"]
mod stub;

mod admin;
mod browser;
mod drain;
#[cfg(feature = "etcd")]
mod etcd;
mod failover;
mod generate;
mod http;
mod liveness;
mod openai;
mod replan;
mod resume;
mod routing;
#[cfg(feature = "etcd")]
mod settings;
#[cfg(feature = "etcd")]
mod shared_limits;
mod slow_readers;
mod tenants;
mod tls;
