//! Transport security: who is on the other end of a connection, and that nobody else reads it.
//!
//! - [`files`]: certificates and keys in PEM files, read and checked. [`reload`]: read again when they change.
//! - [`cluster`]: mutual TLS between the members of a cluster. [`client`]: TLS between clients and coordinators. [`verify`]:
//!   servers whose names say nothing.
//! - [`accept`]: who may come in on a port. [`connection`]: what comes in, with what is known of its [`Peer`]. [`http`]: HTTP/1
//!   on it. [`connect`]: connections that go out, for tonic. [`stream`]: both. [`link`]: streams of threads that block or
//!   spin, for ranks.
//! - [`error`]: what is wrong with files; [`explain`] says why a connection failed.
//!
//! Knows no other crate of the workspace: whom to let in where is decided by its users. Invariants: a connection that was
//! to be secured is never used in clear text; no handshake outlasts [`HANDSHAKE_TIMEOUT`]; of what a stranger sends
//! nothing but TLS itself is read before he is known.

#![forbid(unsafe_code)]

pub mod accept;
pub mod client;
pub mod cluster;
pub mod connect;
pub mod connection;
pub mod error;
pub mod files;
pub mod http;
pub mod link;
pub mod reload;
pub mod stream;
mod verify;

pub use accept::{Gate, Incoming};
pub use client::{ClientTls, ServerTls};
pub use cluster::ClusterTls;
pub use connect::{Connector, Outbound};
pub use connection::{Connection, Peer, Security};
pub use error::{AddressError, TlsError, explain};
pub use files::TlsFiles;
pub use link::LinkStream;
pub use stream::Stream;

use std::{net::IpAddr, sync::Arc, time::Duration};

use rustls::crypto::{CryptoProvider, ring};

/// Longest handshake.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Whether only processes of this machine reach what listens on `ip`.
pub fn is_local(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

/// The one provider of cryptography.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}
