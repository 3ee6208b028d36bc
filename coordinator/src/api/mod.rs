//! What clients and operators talk to.
//!
//! - [`grpc`]: Inference. [`intake`]: [`validate`], [`tokenizing`] → [`generation`] ([`output`], [`stop_text`]), which
//!   [`placement`] keeps on a replica, one [`attempt`] after the other ([`suspicion`]: whether it breaks them);
//!   [`delivery`]: to clients that read in time. [`span`]: what traces say of that.
//! - [`openai`]: the OpenAI API over the same intake.
//! - [`auth`]: whose a call is, for all of them.
//! - [`admin`], [`status`], [`page`]: orders and what operators see. [`browser`]: a model in the visitor's browser. [`health`], [`probe`], [`http`]: probes, metrics.

pub mod admin;
pub mod arrival;
pub mod attempt;
pub mod auth;
pub mod browser;
pub mod delivery;
pub mod generation;
pub mod grpc;
pub mod health;
pub mod http;
pub mod intake;
pub mod openai;
pub mod output;
pub mod page;
pub mod placement;
pub mod probe;
pub mod span;
pub mod status;
pub mod stop_text;
pub mod suspicion;
pub mod tokenizing;
pub mod validate;

/// Largest request of a client: a prompt of some million tokens.
pub const MAX_REQUEST_BYTES: usize = 16 << 20;
