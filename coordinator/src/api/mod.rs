//! What clients and operators talk to.
//!
//! - [`grpc`]: Inference. [`intake`]: [`validate`] → route → [`generation`] ([`output`], [`stop_text`]).
//! - [`admin`], [`health`], [`http`]: orders, status, probes, metrics.

pub mod admin;
pub mod generation;
pub mod grpc;
pub mod health;
pub mod http;
pub mod intake;
pub mod output;
pub mod stop_text;
pub mod validate;
