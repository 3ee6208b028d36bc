//! What clients and operators talk to.
//!
//! - [`grpc`]: Inference. [`intake`]: [`validate`] → [`generation`] ([`output`], [`stop_text`]), which [`placement`] keeps
//!   on a replica, one [`attempt`] after the other.
//! - [`admin`], [`health`], [`http`]: orders, status, probes, metrics.

pub mod admin;
pub mod attempt;
pub mod generation;
pub mod grpc;
pub mod health;
pub mod http;
pub mod intake;
pub mod output;
pub mod placement;
pub mod stop_text;
pub mod validate;
