//! Contract of paged flash attention: query tokens of several sequences, each against the KV blocks of its own.
//! For: the attention layers, decode (one query token) and prefill chunks (many) in the same call.
//! Source: FlashAttention-2 (Dao 2023), PagedAttention (Kwon et al. 2023).
//! Not here: writing keys and values (`rope_and_store`); choosing blocks (no kernel ever does).

/// One sequence of the call.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSequence<'a> {
    /// Its query tokens in this call, at least one; they are consecutive rows of `qkv` and of the output.
    pub num_tokens: usize,
    /// Position of the first of them: so many tokens are in the cache before it. Token `i` sees keys `0..=first_position + i`.
    pub first_position: usize,
    /// KV blocks in order of position.
    pub block_table: &'a [u32],
}

/// Sizes of one call. `qkv` is laid out as in [`RopeAndStore`](super::RopeAndStore) (only the queries are read);
/// the output is `[num_tokens, num_heads * head_dim]`.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Query heads held here.
    pub num_heads: usize,
    /// Key/value heads held here.
    pub num_key_value_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Query heads that share a key/value head in the whole model.
    pub group_size: usize,
    /// Place of the first query head inside its group: query head `h` reads key/value head `(h + group_offset) / group_size`.
    pub group_offset: usize,
    /// Factor on the scores, usually `head_dim^-0.5`.
    pub scale: f32,
    /// Layer of the cache, counted from the first layer held here.
    pub layer: usize,
    /// Sequences in the order of their rows.
    pub sequences: &'a [AttentionSequence<'a>],
}
