//! The worker crate from outside: whole replicas and a whole worker, on the real model.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod cluster;
mod replica;
mod service;
