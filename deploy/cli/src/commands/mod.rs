//! One file a subcommand: `Args` is its command line, `run` carries it out.

pub mod bench;
pub mod coordinator;
pub mod devices;
pub mod drain;
#[cfg(feature = "etcd")]
pub mod etcd_member;
pub mod generate;
pub mod health;
pub mod load;
pub mod plan;
pub mod pull;
pub mod status;
pub mod synth;
pub mod tenant;
pub mod unload;
pub mod up;
pub mod worker;
