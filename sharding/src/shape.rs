//! What the planner knows of a model: its dimensions and the size of every tensor.
//! For: `model` produces it from a checkpoint (or from a made-up shape), the planner consumes it.
//! Invariant: pure data; two equal shapes give equal plans.

use lockstep_formats::{Dtype, GgmlType};
use serde::{Deserialize, Serialize};

use crate::PlanError;

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

    /// Multiply-adds of the layers for one token.
    pub(crate) fn multiply_adds(&self) -> u64 {
        let of_layers = self.tensors.iter().filter(|tensor| tensor.layer.is_some() && tensor.rows > 1);
        of_layers.map(|tensor| tensor.rows as u64 * tensor.columns as u64).sum()
    }

    /// The type in which a device holds keys and values, and why: the one it is asked for, if any; else bf16 where the
    /// weights of keys and values are BF16, because their products may lie outside of f16's range, and f16 elsewhere.
    pub fn dtype(&self, asked: Option<Dtype>) -> (Dtype, &'static str) {
        let makes_keys_or_values = |tensor: &&TensorShape| matches!(tensor.role, TensorRole::Key | TensorRole::Value);
        let mut weights = self.tensors.iter().filter(makes_keys_or_values);
        match asked {
            Some(dtype) => (dtype, "asked for"),
            None if weights.any(|tensor| tensor.ggml_type == GgmlType::BF16) => (Dtype::Bf16, "auto: BF16 checkpoint"),
            None => (Dtype::F16, "auto"),
        }
    }

    /// Query heads that share one key/value head.
    pub fn group_size(&self) -> usize {
        self.num_attention_heads / self.num_key_value_heads.max(1)
    }

    /// Accepts a shape whose numbers agree with each other, so that the planner can rely on them.
    ///
    /// # Errors
    /// [`PlanError::Shape`] naming the field.
    pub fn check(&self) -> Result<(), PlanError> {
        let sizes = [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        let refuse = |field, problem| Err(PlanError::Shape { field, problem });
        if let Some((field, size)) = sizes.into_iter().find(|(_, size)| !(1..=1 << 24).contains(size)) {
            return refuse(field, format!("{size} is not within 1..=2^24"));
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            let problem = format!(
                "{} does not divide num_attention_heads {}",
                self.num_key_value_heads, self.num_attention_heads
            );
            return refuse("num_key_value_heads", problem);
        }
        for tensor in &self.tensors {
            let expected = self.expected_size(tensor.role);
            if expected != (tensor.rows, tensor.columns) && tensor.role != TensorRole::RopeFrequencies {
                let problem = format!("{tensor:?} should be {} × {}", expected.0, expected.1);
                return refuse("tensors", problem);
            }
            if tensor.ggml_type.bytes_of(tensor.columns).is_none() {
                return refuse("tensors", format!("{tensor:?}: columns are no whole number of blocks"));
            }
            if tensor.layer.is_some_and(|layer| layer >= self.num_hidden_layers) {
                return refuse("tensors", format!("{tensor:?}: the model has {} layers", self.num_hidden_layers));
            }
        }
        Ok(())
    }

    /// Rows and columns of a tensor of that role.
    fn expected_size(&self, role: TensorRole) -> (usize, usize) {
        let queries = self.num_attention_heads * self.head_dim;
        let keys = self.num_key_value_heads * self.head_dim;
        match role {
            TensorRole::TokenEmbedding | TensorRole::Output => (self.vocab_size, self.hidden_size),
            TensorRole::AttentionNorm | TensorRole::FeedForwardNorm | TensorRole::OutputNorm => (1, self.hidden_size),
            TensorRole::Query => (queries, self.hidden_size),
            TensorRole::Key | TensorRole::Value => (keys, self.hidden_size),
            TensorRole::AttentionOutput => (self.hidden_size, queries),
            TensorRole::Gate | TensorRole::Up => (self.intermediate_size, self.hidden_size),
            TensorRole::Down => (self.hidden_size, self.intermediate_size),
            TensorRole::RopeFrequencies => (1, self.head_dim / 2),
        }
    }
}
