//! Contracts of the operations: parameters, shapes, `check()`. An operation has one name in every backend.

pub mod attention;
pub mod matmul;
pub mod rope_and_store;
pub mod sample;

pub use attention::{Attention, AttentionSequence};
pub use matmul::{Epilogue, HostMatrix};
pub use rope_and_store::{RopeAndStore, RopeStyle, RopeTable};
pub use sample::{Candidates, SampleRow, TokenPenalty};
