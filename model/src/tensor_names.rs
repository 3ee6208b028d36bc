//! What tensors a decoder has, their shapes, and their names in GGUF files and in Hugging Face checkpoints.
//! For: checkpoint readers and the synthesizer.
//! Invariant: one table row a role; a name is written nowhere else.

use lockstep_sharding::TensorRole;

use crate::ModelConfig;

/// `(role, GGUF name, Hugging Face name)`; names of layer tensors are those inside a layer.
const LAYER_NAMES: [(TensorRole, &str, &str); 9] = [
    (TensorRole::AttentionNorm, "attn_norm", "input_layernorm"),
    (TensorRole::Query, "attn_q", "self_attn.q_proj"),
    (TensorRole::Key, "attn_k", "self_attn.k_proj"),
    (TensorRole::Value, "attn_v", "self_attn.v_proj"),
    (TensorRole::AttentionOutput, "attn_output", "self_attn.o_proj"),
    (TensorRole::FeedForwardNorm, "ffn_norm", "post_attention_layernorm"),
    (TensorRole::Gate, "ffn_gate", "mlp.gate_proj"),
    (TensorRole::Up, "ffn_up", "mlp.up_proj"),
    (TensorRole::Down, "ffn_down", "mlp.down_proj"),
];

/// The same outside the layers; `rope_freqs` has no counterpart in Hugging Face checkpoints.
const MODEL_NAMES: [(TensorRole, &str, &str); 4] = [
    (TensorRole::TokenEmbedding, "token_embd", "model.embed_tokens"),
    (TensorRole::OutputNorm, "output_norm", "model.norm"),
    (TensorRole::Output, "output", "lm_head"),
    (TensorRole::RopeFrequencies, "rope_freqs", ""),
];

/// Which family of names a checkpoint uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// `blk.0.attn_q.weight`
    Gguf,
    /// `model.layers.0.self_attn.q_proj.weight`
    HuggingFace,
}

impl Naming {
    /// The name of a tensor; `None` if this family has no such tensor.
    pub fn name(self, role: TensorRole, layer: Option<usize>) -> Option<String> {
        let table: &[(TensorRole, &str, &str)] = if layer.is_some() { &LAYER_NAMES } else { &MODEL_NAMES };
        let &(_, gguf, hugging_face) = table.iter().find(|entry| entry.0 == role)?;
        let stem = if self == Self::Gguf { gguf } else { hugging_face };
        match (self, layer) {
            _ if stem.is_empty() => None,
            (_, None) => Some(format!("{stem}.weight")),
            (Self::Gguf, Some(layer)) => Some(format!("blk.{layer}.{stem}.weight")),
            (Self::HuggingFace, Some(layer)) => Some(format!("model.layers.{layer}.{stem}.weight")),
        }
    }
}

/// A tensor that the forward pass needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpectedTensor {
    /// Its part in the model.
    pub role: TensorRole,
    /// Its layer.
    pub layer: Option<usize>,
    /// Output features, 1 for vectors.
    pub rows: usize,
    /// Input features.
    pub columns: usize,
}

/// Every tensor that the forward pass of a model needs, in the order of execution; an untied `Output` last.
pub fn expected_tensors(config: &ModelConfig) -> impl Iterator<Item = ExpectedTensor> {
    let hidden = config.hidden_size;
    let query = config.num_attention_heads * config.head_dim;
    let key_value = config.num_key_value_heads * config.head_dim;
    let (intermediate, vocab) = (config.intermediate_size, config.vocab_size);
    let layers = config.num_hidden_layers;
    let shape = move |role| match role {
        TensorRole::TokenEmbedding | TensorRole::Output => (vocab, hidden),
        TensorRole::Query => (query, hidden),
        TensorRole::Key | TensorRole::Value => (key_value, hidden),
        TensorRole::AttentionOutput => (hidden, query),
        TensorRole::Gate | TensorRole::Up => (intermediate, hidden),
        TensorRole::Down => (hidden, intermediate),
        TensorRole::AttentionNorm
        | TensorRole::FeedForwardNorm
        | TensorRole::OutputNorm
        | TensorRole::RopeFrequencies => (1, hidden),
    };
    let expected = move |role, layer| {
        let (rows, columns) = shape(role);
        ExpectedTensor { role, layer, rows, columns }
    };
    let in_layers = (0..layers).flat_map(move |layer| LAYER_NAMES.map(|entry| expected(entry.0, Some(layer))));
    std::iter::once(expected(TensorRole::TokenEmbedding, None))
        .chain(in_layers)
        .chain([TensorRole::OutputNorm, TensorRole::Output].map(|role| expected(role, None)))
}
