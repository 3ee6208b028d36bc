//! Why a plan was refused.

/// A plan that cannot be made; each variant carries the numbers that disagree.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The policy text is not understood.
    #[error("sharding policy {text:?} is none of auto, tensor=N, pipeline=N, hybrid=TPxPP, replicas=N")]
    Policy {
        /// What was given.
        text: String,
    },
    /// The encoded plan is damaged or of another version.
    #[error("shard plan cannot be decoded: {reason}")]
    Codec {
        /// What is wrong with it.
        reason: String,
    },
}
