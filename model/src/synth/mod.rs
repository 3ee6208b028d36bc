//! Random but valid checkpoints of any shape and quantized type, for benchmarks, tests and plans.
//! For: `lockstep synth`, `lockstep plan` on models that are not at hand, tests that need a small model.
//! Invariant: the same spec gives the same bytes on every machine; a written file opens and serves end to end.
//! Not here: quantizing real weights; the blocks are made of random bits and never were floats.

mod blocks;
mod mixture;
mod vocabulary;
mod write;

use std::path::Path;

use lockstep_formats::GgmlType;
use lockstep_sharding::{ModelShape, TensorRole, TensorShape};

pub use self::{
    mixture::Quantization,
    write::{partial_path, synth},
};
use crate::{
    ModelConfig, ModelError, RopeConfig, RopeStyle,
    rope::{RopeScaling, rope_config},
    tensor_names::expected_tensors,
};

/// Shape, types and seed of a checkpoint to be made up.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names are those of config.json")]
pub struct SynthSpec {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    /// At least [`SynthSpec::MIN_VOCAB_SIZE`].
    pub vocab_size: usize,
    pub max_position_embeddings: usize,
    pub rope_theta: f32,
    pub rms_norm_eps: f32,
    pub tie_word_embeddings: bool,
    /// Types of the matrices; vectors are F32.
    pub quantization: Quantization,
    /// Every seed gives other weights.
    pub seed: u64,
}

impl SynthSpec {
    /// Special tokens, bytes and merges that the tokenizer of every synthesized checkpoint has.
    pub const MIN_VOCAB_SIZE: usize = vocabulary::NUM_FIXED_TOKENS;

    /// Names that [`SynthSpec::preset`] knows.
    pub const PRESETS: [&'static str; 5] = ["tiny", "smollm2-135m", "llama-1b", "llama-8b", "llama-70b"];

    /// A known shape: `tiny` (for tests; in any type it can be cut over four ranks), `smollm2-135m`, `llama-1b` (Llama 3.2), `llama-8b`, `llama-70b` (Llama 3.1).
    pub fn preset(name: &str, quantization: Quantization) -> Option<Self> {
        // layers, hidden, intermediate, heads, key/value heads, head_dim, vocabulary, context, theta, tied
        let (layers, hidden, intermediate, heads, key_value, head_dim, vocab, context, theta, tied) = match name {
            "tiny" => (2, 256, 1024, 16, 4, 64, 512, 512, 10_000.0, true),
            "smollm2-135m" => (30, 576, 1536, 9, 3, 64, 49_152, 8192, 100_000.0, true),
            "llama-1b" => (16, 2048, 8192, 32, 8, 64, 128_256, 131_072, 500_000.0, true),
            "llama-8b" => (32, 4096, 14_336, 32, 8, 128, 128_256, 131_072, 500_000.0, false),
            "llama-70b" => (80, 8192, 28_672, 64, 8, 128, 128_256, 131_072, 500_000.0, false),
            _ => return None,
        };
        Some(Self {
            hidden_size: hidden,
            intermediate_size: intermediate,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: key_value,
            head_dim,
            vocab_size: vocab,
            max_position_embeddings: context,
            rope_theta: theta,
            rms_norm_eps: 1e-5,
            tie_word_embeddings: tied,
            quantization,
            seed: 0,
        })
    }

    /// Hyper-parameters as the written file will give them.
    ///
    /// # Errors
    /// [`ModelError::Invalid`] naming the dimension that no model can have.
    pub fn config(&self) -> Result<ModelConfig, ModelError> {
        let path = Path::new("synth");
        let invalid =
            |field: &str, problem| ModelError::Invalid { path: path.to_owned(), field: field.to_owned(), problem };
        let rope = RopeConfig {
            style: RopeStyle::Interleaved,
            rotary_dim: self.head_dim,
            frequencies: Vec::new(),
            magnitude: 1.0,
        };
        let mut config = ModelConfig {
            architecture: "llama".into(),
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            vocab_size: self.vocab_size,
            max_position_embeddings: self.max_position_embeddings,
            rms_norm_eps: self.rms_norm_eps,
            rope,
        };
        config.check(path)?;
        if self.vocab_size < Self::MIN_VOCAB_SIZE {
            let problem = format!("expected at least {}, got {}", Self::MIN_VOCAB_SIZE, self.vocab_size);
            return Err(invalid("vocab_size", problem));
        }
        let scaling = RopeScaling::Linear { factor: 1.0, magnitude: 1.0 };
        config.rope = rope_config(config.rope.style, self.head_dim, self.rope_theta, &scaling)
            .map_err(|problem| invalid("rope_theta", problem))?;
        Ok(config)
    }

    /// Dimensions and tensors, without writing anything.
    ///
    /// # Errors
    /// As [`SynthSpec::config`].
    pub fn shape(&self) -> Result<ModelShape, ModelError> {
        let config = self.config()?;
        let expected = expected_tensors(&config);
        let expected = expected.filter(|tensor| !(self.tie_word_embeddings && tensor.role == TensorRole::Output));
        let tensors = expected.map(|tensor| TensorShape {
            role: tensor.role,
            layer: tensor.layer,
            rows: tensor.rows,
            columns: tensor.columns,
            ggml_type: match tensor.rows {
                1 => GgmlType::F32,
                _ => self.quantization.type_of(self, tensor.role, tensor.layer, tensor.columns),
            },
        });
        let tensors = tensors.collect();
        Ok(config.shape(tensors))
    }
}
