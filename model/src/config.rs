//! Hyper-parameters of a decoder in the words of `config.json`, from GGUF metadata.
//! For: the executor, the planner's shape and the checkpoint readers.
//! Invariant: a [`ModelConfig`] that a reader returns passed [`ModelConfig::check`]; `RopeConfig::frequencies` are final.
//! Not here: `config.json` itself ([`crate::safetensors`]); how scaled frequencies are computed ([`crate::rope`]).

use std::path::Path;

use lockstep_sharding::{ModelShape, TensorShape};

use crate::{
    ModelError,
    gguf::Metadata,
    rope::{RopeScaling, rope_config},
};

/// Which two elements of a head form a rotated pair (GGUF `llama` files interleave, HF checkpoints use halves).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Elements `2i` and `2i + 1`.
    Interleaved,
    /// Elements `i` and `i + rotary_dim / 2`.
    Halves,
}

/// Rotary embedding after theta, scaling and frequency divisors are applied.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Pairing.
    pub style: RopeStyle,
    /// Elements of a head that are rotated.
    pub rotary_dim: usize,
    /// `[rotary_dim / 2]` radians per position.
    pub frequencies: Vec<f32>,
    /// Factor on cosine and sine (1 but for YaRN).
    pub magnitude: f32,
}

/// What the forward pass needs to know beside the weights.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names are those of config.json")]
pub struct ModelConfig {
    /// GGUF architecture name, such as `llama`.
    pub architecture: String,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub vocab_size: usize,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f32,
    pub rope: RopeConfig,
}

/// No dimension is larger; products of two then fit in 64 bits with room to spare.
const MAX_DIMENSION: usize = 1 << 28;

/// Nor a head: rotary tables are sized by it.
pub(crate) const MAX_HEAD_DIM: usize = 1 << 16;

impl ModelConfig {
    /// Reads the keys of the `llama` architecture. `embedding_rows` is the number of rows of the token embedding,
    /// `frequency_divisors` the content of `rope_freqs.weight`.
    ///
    /// # Errors
    /// [`ModelError`] naming the key that is missing, wrong or not supported.
    pub fn from_gguf(
        metadata: &Metadata,
        embedding_rows: usize,
        frequency_divisors: Option<&[f32]>,
    ) -> Result<Self, ModelError> {
        check_architecture(metadata)?;
        let required = |key: &str| metadata.require::<usize>(&format!("llama.{key}"));
        let optional = |key: &str| metadata.get::<usize>(&format!("llama.{key}"));
        let hidden_size = required("embedding_length")?;
        let num_attention_heads = required("attention.head_count")?;
        let head_dim = match optional("attention.key_length")? {
            Some(head_dim) => head_dim,
            None => hidden_size.checked_div(num_attention_heads).unwrap_or(0),
        };
        if let Some(value_length) = optional("attention.value_length")?.filter(|&length| length != head_dim) {
            let value = format!("{value_length} (attention.key_length is {head_dim})");
            return Err(metadata.unsupported("llama.attention.value_length", value));
        }
        let context = required("context_length")?;
        let rotary_dim = optional("rope.dimension_count")?.unwrap_or(head_dim);
        let mut config = Self {
            architecture: "llama".into(),
            hidden_size,
            intermediate_size: required("feed_forward_length")?,
            num_hidden_layers: required("block_count")?,
            num_attention_heads,
            num_key_value_heads: optional("attention.head_count_kv")?.unwrap_or(num_attention_heads),
            head_dim,
            vocab_size: embedding_rows,
            max_position_embeddings: context,
            rms_norm_eps: metadata.require("llama.attention.layer_norm_rms_epsilon")?,
            rope: RopeConfig { style: RopeStyle::Interleaved, rotary_dim, frequencies: Vec::new(), magnitude: 1.0 },
        };
        config.check(metadata.path())?;
        let theta = metadata.get("llama.rope.freq_base")?.unwrap_or(10_000.0);
        let scaling = gguf_rope_scaling(metadata, context)?;
        config.rope = rope_config(config.rope.style, rotary_dim, theta, &scaling)
            .map_err(|problem| metadata.invalid("llama.rope.freq_base", problem))?;
        if let Some(divisors) = frequency_divisors {
            crate::rope::divide(&mut config.rope.frequencies, divisors)
                .map_err(|problem| metadata.invalid("rope_freqs.weight", problem))?;
        }
        Ok(config)
    }

    /// The same dimensions with the given tensors, for the planner.
    pub fn shape(&self, tensors: Vec<TensorShape>) -> ModelShape {
        ModelShape {
            architecture: self.architecture.clone(),
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            vocab_size: self.vocab_size,
            max_position_embeddings: self.max_position_embeddings,
            tensors,
        }
    }

    /// Refuses dimensions that no model has; `path` stands in the error.
    ///
    /// # Errors
    /// [`ModelError::Invalid`] naming the field, what was expected and what it is.
    pub fn check(&self, path: &Path) -> Result<(), ModelError> {
        let invalid =
            |field: &str, problem| ModelError::Invalid { path: path.to_owned(), field: field.to_owned(), problem };
        let dimensions = [
            ("hidden_size", self.hidden_size, MAX_DIMENSION),
            ("intermediate_size", self.intermediate_size, MAX_DIMENSION),
            ("num_hidden_layers", self.num_hidden_layers, MAX_DIMENSION),
            ("num_attention_heads", self.num_attention_heads, MAX_DIMENSION),
            ("num_key_value_heads", self.num_key_value_heads, MAX_DIMENSION),
            ("head_dim", self.head_dim, MAX_HEAD_DIM),
            ("vocab_size", self.vocab_size, MAX_DIMENSION),
            ("max_position_embeddings", self.max_position_embeddings, u32::MAX as usize),
        ];
        for (field, value, largest) in dimensions {
            if !(1..=largest).contains(&value) {
                return Err(invalid(field, format!("expected 1 to {largest}, got {value}")));
            }
        }
        let (heads, key_value_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if !heads.is_multiple_of(key_value_heads) {
            let problem = format!("expected a divisor of num_attention_heads {heads}, got {key_value_heads}");
            return Err(invalid("num_key_value_heads", problem));
        }
        let rotary_dim = self.rope.rotary_dim;
        if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) || rotary_dim > self.head_dim {
            let problem = format!("expected an even number up to head_dim {}, got {rotary_dim}", self.head_dim);
            return Err(invalid("rope.dimension_count", problem));
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps >= 0.0) {
            return Err(invalid("rms_norm_eps", format!("expected a number of at least 0, got {}", self.rms_norm_eps)));
        }
        Ok(())
    }
}

fn check_architecture(metadata: &Metadata) -> Result<(), ModelError> {
    let architecture = metadata.require::<&str>("general.architecture")?;
    if architecture != "llama" {
        return Err(metadata.unsupported("general.architecture", architecture));
    }
    match metadata.get::<usize>("llama.expert_count")? {
        Some(experts) if experts > 0 => Err(metadata.unsupported("llama.expert_count", experts.to_string())),
        _ => Ok(()),
    }
}

/// Scaling as llama.cpp reads it: a factor without a type is linear.
fn gguf_rope_scaling(metadata: &Metadata, context: usize) -> Result<RopeScaling, ModelError> {
    let number = |key: &str| metadata.get::<f32>(&format!("llama.rope.{key}"));
    let kind = metadata.get::<&str>("llama.rope.scaling.type")?.unwrap_or("linear");
    let factor = match number("scaling.factor")? {
        Some(factor) => Some(factor),
        None => number("scale_linear")?,
    };
    // llama.cpp takes 0 for "not set".
    let factor = factor.filter(|&factor| factor != 0.0).unwrap_or(1.0);
    if factor < 0.0 {
        return Err(metadata.invalid("llama.rope.scaling.factor", format!("expected more than 0, got {factor}")));
    }
    let attention_factor = number("scaling.attn_factor")?.unwrap_or(1.0);
    match kind {
        "none" => Ok(RopeScaling::Linear { factor: 1.0, magnitude: attention_factor }),
        "linear" => Ok(RopeScaling::Linear { factor, magnitude: attention_factor }),
        "yarn" => Ok(RopeScaling::Yarn {
            factor,
            original_context: metadata.get::<usize>("llama.rope.scaling.original_context_length")?.unwrap_or(context)
                as f32,
            beta_fast: number("scaling.yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: number("scaling.yarn_beta_slow")?.unwrap_or(1.0),
            magnitude: attention_factor * (1.0 + 0.1 * factor.max(1.0).ln()),
        }),
        other => Err(metadata.unsupported("llama.rope.scaling.type", other)),
    }
}
