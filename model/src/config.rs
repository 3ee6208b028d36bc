//! Hyper-parameters of a decoder in the words of `config.json`.

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
