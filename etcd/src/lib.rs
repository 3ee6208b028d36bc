//! What the processes of a cluster share through etcd.
//!
//! - [`EtcdSettings`]: where etcd answers, and the prefix of the cluster's keys. [`keys`]: the keys themselves.
//! - [`Connection`]: one endpoint at a time, every call with a limit. [`Lease`]: kept alive by whoever holds it.
//! - [`membership`]: how a member of etcd itself starts. [`founding`]: when it may found a cluster.
//!
//! For: the worker's registration and the coordinator's registry. Without the feature `client` there are only settings
//! and keys, so that a build without protoc can still say what it lacks.
//! Not here: what the values mean (messages of `lockstep.v1`).

#![forbid(unsafe_code)]

#[cfg(feature = "client")]
mod connection;
#[cfg(feature = "client")]
pub mod founding;
pub mod keys;
#[cfg(feature = "client")]
mod lease;
#[cfg(feature = "client")]
pub mod membership;
mod settings;

#[cfg(feature = "client")]
pub use etcd_client;
pub use settings::EtcdSettings;

#[cfg(feature = "client")]
pub use self::{
    connection::{Connection, Endpoints, EtcdError, REQUEST_TIMEOUT},
    lease::Lease,
};
