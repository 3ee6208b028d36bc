//! The wire contract `lockstep.v1`: everything two processes must agree on, and nothing else.
//!
//! - [`v1`]: generated messages, clients and servers.
//! - [`prefix`]: names of KV blocks.
//! - [`sampling`]: what sampling parameters may hold.
//! - [`status`]: the only code that builds or reads a [`tonic::Status`].

#![forbid(unsafe_code)]

pub mod prefix;
pub mod sampling;
pub mod status;

/// Messages to bytes and back, for values that are kept in etcd.
pub use prost::Message;

/// Generated from `proto/lockstep/v1/*.proto`; documented there.
#[allow(missing_docs, clippy::all, reason = "generated code")]
pub mod v1 {
    tonic::include_proto!("lockstep.v1");
}

/// The compiled descriptors, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/lockstep_descriptor.bin"));

/// Largest message that our clients and servers accept: a tokenizer of a large vocabulary is some 20 MB.
pub const MAX_MESSAGE_BYTES: usize = 128 << 20;
