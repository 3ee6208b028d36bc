//! The bytes of a plan: on the wire between coordinator and workers, and in the registry.

use crate::{ModelShape, PlanError, ShardPlan};

/// The plan as versioned bytes.
///
/// # Errors
/// [`PlanError::Codec`] if it cannot be encoded.
pub fn encode(_plan: &ShardPlan) -> Result<Vec<u8>, PlanError> {
    todo!()
}

/// The plan of bytes that [`encode`] wrote.
///
/// # Errors
/// [`PlanError::Codec`] for another version or damaged bytes.
pub fn decode(_bytes: &[u8]) -> Result<ShardPlan, PlanError> {
    todo!()
}

/// The shape of a model as versioned bytes.
///
/// # Errors
/// [`PlanError::Codec`] if it cannot be encoded.
pub fn encode_shape(_shape: &ModelShape) -> Result<Vec<u8>, PlanError> {
    todo!()
}

/// The shape of bytes that [`encode_shape`] wrote.
///
/// # Errors
/// [`PlanError::Codec`] for another version or damaged bytes.
pub fn decode_shape(_bytes: &[u8]) -> Result<ModelShape, PlanError> {
    todo!()
}
