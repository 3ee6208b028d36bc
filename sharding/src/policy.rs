//! What the operator asks of the planner.
//! Invariant: `Display` writes what `FromStr` reads.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{DeviceSpec, ModelShape, PlanError, Topology};

/// How to cut the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Parallelism {
    /// The planner chooses the degrees with the best estimate.
    Auto,
    /// Every replica has these degrees.
    Fixed {
        /// Ranks that share each layer.
        tensor_parallel_size: usize,
        /// Stages of layers.
        pipeline_parallel_size: usize,
    },
}

/// A sharding policy: `auto`, `tensor=N`, `pipeline=N`, `hybrid=TPxPP`, each optionally with `,replicas=N`; or `replicas=N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Degrees of a replica.
    pub parallelism: Parallelism,
    /// Number of replicas; `None`: as many as the devices allow.
    pub replicas: Option<usize>,
}

/// What is understood, in words.
const FORMS: &str =
    "expected auto, tensor=N, pipeline=N or hybrid=TPxPP, each optionally with ,replicas=N; or replicas=N";

impl Policy {
    /// The planner chooses.
    pub const AUTO: Self = Self { parallelism: Parallelism::Auto, replicas: None };
}

impl FromStr for Policy {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, PlanError> {
        let error = || PlanError::Policy { text: text.to_owned(), problem: FORMS };
        let number = |number: &str| match number.trim().parse::<usize>() {
            Ok(0) => Err(PlanError::Policy { text: text.to_owned(), problem: "N is at least 1" }),
            Ok(number) => Ok(number),
            Err(_) => Err(error()),
        };
        let mut parallelism = None;
        let mut replicas = None;
        for term in text.split(',') {
            let (name, value) = term.split_once('=').map_or((term, None), |(name, value)| (name, Some(value)));
            let degrees = match (name.trim(), value) {
                ("auto", None) => Parallelism::Auto,
                ("tensor", Some(value)) => fixed(number(value)?, 1),
                ("pipeline", Some(value)) => fixed(1, number(value)?),
                ("hybrid", Some(value)) => {
                    let (tensor, pipeline) = value.split_once('x').ok_or_else(error)?;
                    fixed(number(tensor)?, number(pipeline)?)
                }
                ("replicas", Some(value)) if replicas.is_none() => {
                    replicas = Some(number(value)?);
                    continue;
                }
                _ => return Err(error()),
            };
            if parallelism.replace(degrees).is_some() {
                return Err(error());
            }
        }
        Ok(Self { parallelism: parallelism.unwrap_or(Parallelism::Auto), replicas })
    }
}

fn fixed(tensor_parallel_size: usize, pipeline_parallel_size: usize) -> Parallelism {
    Parallelism::Fixed { tensor_parallel_size, pipeline_parallel_size }
}

impl fmt::Display for Policy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.parallelism {
            Parallelism::Auto => formatter.write_str("auto")?,
            Parallelism::Fixed { tensor_parallel_size, pipeline_parallel_size: 1 } => {
                write!(formatter, "tensor={tensor_parallel_size}")?;
            }
            Parallelism::Fixed { tensor_parallel_size: 1, pipeline_parallel_size } => {
                write!(formatter, "pipeline={pipeline_parallel_size}")?;
            }
            Parallelism::Fixed { tensor_parallel_size, pipeline_parallel_size } => {
                write!(formatter, "hybrid={tensor_parallel_size}x{pipeline_parallel_size}")?;
            }
        }
        match self.replicas {
            Some(replicas) => write!(formatter, ",replicas={replicas}"),
            None => Ok(()),
        }
    }
}

/// Sizes that a plan must leave room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanOptions {
    /// Tokens in a KV block.
    pub block_size: usize,
    /// Longest sequence served, refused if it does not fit; `None`: the model's `max_position_embeddings`, less if memory
    /// does not hold one such sequence.
    pub max_sequence_tokens: Option<usize>,
    /// Most sequences in one step.
    pub max_num_sequences: usize,
    /// Most tokens in one step; `None`: 2,048 if the cluster has GPUs alone, which multiply long batches faster, else 512,
    /// and fewer where they would keep the slowest device for more than two seconds.
    pub max_step_tokens: Option<usize>,
    /// KV blocks of a replica; `None`: what memory has room for (of a host's memory half, as others use it too), but no
    /// more than `max_num_sequences` of the longest sequences need.
    pub num_kv_blocks: Option<usize>,
}

/// Tokens in a step of GPUs, and of clusters with processors.
const GPU_STEP_TOKENS: usize = 2048;
const STEP_TOKENS: usize = 512;
/// Those of the slowest clusters: with fewer a step waits for the weights all the same.
const LEAST_STEP_TOKENS: usize = 64;
/// Seconds that the products of a step may take: sequences that decode wait for as long, and so do signs of life.
const STEP_SECONDS: f64 = 2.0;

impl PlanOptions {
    /// These, with what `shape` and `topology` decide.
    pub(crate) fn over(&self, shape: &ModelShape, topology: &Topology) -> Self {
        let has_processor = topology.devices.iter().any(DeviceSpec::is_processor);
        let most = if has_processor { STEP_TOKENS } else { GPU_STEP_TOKENS };
        let rate = topology.devices.iter().map(|device| device.operations_per_second).fold(f64::INFINITY, f64::min);
        let in_time = STEP_SECONDS * rate / (2.0 * shape.multiply_adds() as f64);
        // Measured rates scatter; powers of two seldom do.
        let in_time = (in_time as usize).checked_ilog2().map_or(0, |log| 1 << log);
        let step_tokens = in_time.max(LEAST_STEP_TOKENS).max(self.max_num_sequences).min(most);
        Self { max_step_tokens: self.max_step_tokens.or(Some(step_tokens)), ..*self }
    }

    /// Most tokens in one step.
    pub(crate) fn step_tokens(&self) -> usize {
        self.max_step_tokens.unwrap_or(STEP_TOKENS)
    }
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            block_size: 32,
            max_sequence_tokens: None,
            max_num_sequences: 64,
            max_step_tokens: None,
            num_kv_blocks: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_policy_agree() {
        for text in ["auto", "tensor=3", "pipeline=2", "hybrid=2x4", "auto,replicas=2", "tensor=2,replicas=3"] {
            assert_eq!(text.parse::<Policy>().unwrap().to_string(), text);
        }
        assert_eq!("replicas=2".parse::<Policy>().unwrap().to_string(), "auto,replicas=2");
        assert_eq!("hybrid=2x1".parse::<Policy>().unwrap().to_string(), "tensor=2");
        let message = "tensor=0".parse::<Policy>().unwrap_err().to_string();
        assert_eq!(message, "sharding policy \"tensor=0\": N is at least 1");
        for text in [
            "",
            "tensor",
            "hybrid=2x0",
            "tensor=-1",
            "hybrid=2",
            "tensor=2,pipeline=2",
            "replicas=1,replicas=2",
            "auto=1",
        ] {
            assert!(text.parse::<Policy>().is_err(), "{text}");
        }
    }
}
