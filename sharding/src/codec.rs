//! The bytes of a plan: on the wire between coordinator and workers, and in the registry. And of a model shape, which
//! workers report.
//! Invariant: version first, so that a reader refuses what it does not know; damaged bytes give errors, and lengths in
//! them are bounded before anything is allocated.

use serde::{Serialize, de::DeserializeOwned};

use crate::{ModelShape, PlanError, ShardPlan};

/// First bytes of every encoding: what it is, and its version.
const PLAN_MAGIC: [u8; 4] = *b"LKP3";
const SHAPE_MAGIC: [u8; 4] = *b"LKM1";
/// Largest encoding.
const MAX_BYTES: usize = 16 << 20;

/// The plan as versioned bytes.
///
/// # Errors
/// [`PlanError::Codec`] if it cannot be encoded.
pub fn encode(plan: &ShardPlan) -> Result<Vec<u8>, PlanError> {
    encode_value(PLAN_MAGIC, plan)
}

/// The plan of bytes that [`encode`] wrote.
///
/// # Errors
/// [`PlanError::Codec`] for another version or damaged bytes.
pub fn decode(bytes: &[u8]) -> Result<ShardPlan, PlanError> {
    decode_value(PLAN_MAGIC, bytes)
}

/// A model shape as versioned bytes.
///
/// # Errors
/// [`PlanError::Codec`] if it cannot be encoded.
pub fn encode_shape(shape: &ModelShape) -> Result<Vec<u8>, PlanError> {
    encode_value(SHAPE_MAGIC, shape)
}

/// The shape of bytes that [`encode_shape`] wrote.
///
/// # Errors
/// [`PlanError::Codec`] for another version or damaged bytes.
pub fn decode_shape(bytes: &[u8]) -> Result<ModelShape, PlanError> {
    decode_value(SHAPE_MAGIC, bytes)
}

fn encode_value(magic: [u8; 4], value: &impl Serialize) -> Result<Vec<u8>, PlanError> {
    let body = bincode::serde::encode_to_vec(value, config()).map_err(codec_error)?;
    Ok([&magic[..], &body].concat())
}

fn decode_value<T: DeserializeOwned>(magic: [u8; 4], bytes: &[u8]) -> Result<T, PlanError> {
    let Some((found, body)) = bytes.split_first_chunk::<4>() else {
        return Err(codec_error(format!("{} bytes are too few", bytes.len())));
    };
    if *found != magic {
        return Err(codec_error(format!("it begins with {found:?}, this version writes {magic:?}")));
    }
    let (value, used) = bincode::serde::decode_from_slice(body, config()).map_err(codec_error)?;
    if used != body.len() {
        return Err(codec_error(format!("{} bytes are left over", body.len() - used)));
    }
    Ok(value)
}

fn codec_error(reason: impl std::fmt::Display) -> PlanError {
    PlanError::Codec { reason: reason.to_string() }
}

fn config() -> impl bincode::config::Config {
    bincode::config::standard().with_limit::<MAX_BYTES>()
}
