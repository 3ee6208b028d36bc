//! What the planner knows of a model: its dimensions and the size of every tensor.
//! For: `model` produces it from a checkpoint (or from a made-up shape), the planner consumes it.
//! Invariant: pure data; two equal shapes give equal plans.

use lockstep_formats::GgmlType;
use serde::{Deserialize, Serialize};

/// The part that a tensor plays in a decoder. Names follow `config.json` words, not file names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum TensorRole {
    /// `[vocab_size, hidden_size]`
    TokenEmbedding,
    /// `[hidden_size]`
    AttentionNorm,
    /// `[num_attention_heads * head_dim, hidden_size]`
    Query,
    /// `[num_key_value_heads * head_dim, hidden_size]`
    Key,
    /// `[num_key_value_heads * head_dim, hidden_size]`
    Value,
    /// `[hidden_size, num_attention_heads * head_dim]`
    AttentionOutput,
    /// `[hidden_size]`
    FeedForwardNorm,
    /// `[intermediate_size, hidden_size]`
    Gate,
    /// `[intermediate_size, hidden_size]`
    Up,
    /// `[hidden_size, intermediate_size]`
    Down,
    /// `[hidden_size]`
    OutputNorm,
    /// `[vocab_size, hidden_size]`; absent when tied to the token embedding
    Output,
    /// `[head_dim / 2]` divisors of the rotary frequencies (Llama 3.1 and later)
    RopeFrequencies,
}

/// One tensor of the checkpoint, row-major `[rows, columns]`; a vector has one row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorShape {
    /// Its part in the model.
    pub role: TensorRole,
    /// Index of its layer, if it belongs to one.
    pub layer: Option<usize>,
    /// Output features (matrices) or 1 (vectors).
    pub rows: usize,
    /// Input features, a multiple of the type's block.
    pub columns: usize,
    /// Element type as stored.
    pub ggml_type: GgmlType,
}

impl TensorShape {
    /// Bytes of the whole tensor as stored.
    pub fn bytes(&self) -> u64 {
        self.rows as u64 * self.row_bytes()
    }

    /// Bytes of one row as stored.
    pub fn row_bytes(&self) -> u64 {
        (self.columns / self.ggml_type.block_elements() * self.ggml_type.block_bytes()) as u64
    }
}

/// The dimensions of a decoder-only transformer and its tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are those of config.json")]
pub struct ModelShape {
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
    /// Every tensor that the model's forward pass uses.
    pub tensors: Vec<TensorShape>,
}

impl ModelShape {
    /// The tensor of that role and layer.
    pub fn tensor(&self, role: TensorRole, layer: Option<usize>) -> Option<&TensorShape> {
        self.tensors.iter().find(|tensor| tensor.role == role && tensor.layer == layer)
    }

    /// Whether the logits are computed with the token embedding.
    pub fn has_tied_embeddings(&self) -> bool {
        self.tensor(TensorRole::Output, None).is_none()
    }

    /// Query heads that share one key/value head.
    pub fn group_size(&self) -> usize {
        self.num_attention_heads / self.num_key_value_heads.max(1)
    }
}
