//! The coordinator: registry, plan driver, router, gRPC and HTTP front.
//!
//! - [`cluster`]: which workers live, by their leases.
//! - [`planner`]: desired models × live workers → plans, loads, unloads; publishes what is [`served`].
//! - [`router`], [`admission`]: which replica serves a request, and whether any may.
//! - [`api`]: gRPC Inference and Admin, health, HTTP. [`metrics`]: what Prometheus reads.
//! - [`server`]: the life of the process: bind, serve, drain, close. [`security`]: who may connect, and ask for what.
//!
//! Depends on `proto`, `model` (tokenizer and chat template), `sharding` and `transport`; never on a device or a model file.
//! Invariants: one task owns all planning state and others read its published table; nothing accepted is lost in
//! silence (every stream ends with a finish or a status); every queue is bounded.

#![forbid(unsafe_code)]

pub mod admission;
pub mod api;
pub mod cluster;
pub mod config;
pub mod error;
pub mod metrics;
pub mod planner;
pub mod router;
pub mod security;
pub mod served;
pub mod server;
pub mod tenants;

pub use config::{CoordinatorConfig, ModelSpec};
pub use error::CoordinatorError;
pub use server::run;
