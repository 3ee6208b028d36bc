//! What both roles say about themselves while they run.
//!
//! - [`metrics`]: Prometheus metrics, each defined once. [`http`]: where they, liveness and readiness are asked for.
//! - [`trace`]: spans, and how they go on in the next process. [`otlp`]: how they leave.
//! - [`rarely`]: log lines that do not come with every attempt.
//!
//! Depends on nothing of the workspace. Invariants: labels come from sets that do not grow with the traffic; no prompt
//! and no output appears anywhere.

#![forbid(unsafe_code)]

pub mod http;
pub mod metrics;
pub mod otlp;
pub mod rarely;
pub mod trace;
