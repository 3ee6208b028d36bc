//! Contract of rotary embedding and KV store in one: rotates the queries in place, rotates the keys,
//! and writes keys and values to their slots of the paged cache.
//! Source: RoFormer (Su et al. 2021); the two pairings are those of GGUF `llama` (interleaved) and NEOX (halves) files.

/// Which two elements of a head form a rotated pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Elements `2i` and `2i + 1`.
    Interleaved,
    /// Elements `i` and `i + rotary_dim / 2`.
    Halves,
}

/// Angles by position: what theta, scaling and frequency divisors come to.
#[derive(Clone, Debug)]
pub struct RopeTable {
    /// Pairing.
    pub style: RopeStyle,
    /// Elements of a head that are rotated, even, at most `head_dim`.
    pub rotary_dim: usize,
    /// `[rotary_dim / 2]` radians per position.
    pub frequencies: Vec<f32>,
    /// Factor on cosine and sine (1 but for YaRN).
    pub magnitude: f32,
}

/// Sizes and addresses of one call. `qkv` is `[num_tokens, (num_heads + 2 * num_key_value_heads) * head_dim]`: the
/// query heads, the key heads, the value heads of each token.
#[derive(Clone, Copy, Debug)]
pub struct RopeAndStore<'a> {
    /// Query heads held here.
    pub num_heads: usize,
    /// Key/value heads held here.
    pub num_key_value_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Layer of the cache, counted from the first layer held here.
    pub layer: usize,
    /// Position of each token in its sequence, `[num_tokens]`.
    pub positions: &'a [u32],
    /// Slot of each token: `block * block_size + offset`, `[num_tokens]`.
    pub slot_mapping: &'a [u32],
}
