//! End-to-end scenarios on real processes and a real model; run them with `tests/run.sh`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

mod architecture;
mod bad_input;
mod cancellation;
mod chaos;
mod continuous_batching;
mod coordinators;
mod deployment;
mod foreign_client;
mod gpu;
mod gpu_script;
mod hugging_face;
mod memory;
mod metrics;
mod openai;
mod oracle;
mod prefix_cache;
mod prompts;
mod replanning;
mod rolling_restart;
mod security;
mod sharded_parity;
mod smoke;
mod start_up;
mod streams;
mod tenants;
mod traces;
mod webgpu;
mod worker_loss;
