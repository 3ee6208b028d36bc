//! Plain-loop oracles of the operations.

pub mod attention;
pub mod matmul;
pub mod rms_norm;
pub mod rope_and_store;
pub mod sample;
