//! Contract of paged flash attention: query tokens of several sequences, each against the KV blocks of its own.
//! For: the attention layers, decode (one query token) and prefill chunks (many) in the same call.
//! Source: FlashAttention-2 (Dao 2023), PagedAttention (Kwon et al. 2023).
//! Invariant: a call that passes `check` stays inside its tensors and inside the cache.
//! Not here: writing keys and values (`rope_and_store`); choosing blocks (no kernel ever does).

use std::ops::Range;

use super::{HeadLayout, expect_below, expect_equal};
use crate::{KernelError, device::KvCacheSpec};

const OPERATION: &str = "attention";

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

impl Attention<'_> {
    /// Query tokens of all sequences.
    pub fn num_tokens(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.num_tokens).sum()
    }

    /// Query heads held here that read this key/value head.
    pub fn query_heads(&self, key_value_head: usize) -> Range<usize> {
        let first = |head: usize| (head * self.group_size).saturating_sub(self.group_offset).min(self.num_heads);
        first(key_value_head)..first(key_value_head + 1)
    }

    /// Accepts the call or names the number that is wrong: `qkv_width` and `output_width` are the values of a row of the
    /// two tensors, `spec` the sizes of the cache.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if two lengths disagree or a block table is too short, [`KernelError::OutOfRange`] for a
    /// layer, head or block id outside the cache.
    pub fn check(&self, spec: &KvCacheSpec, qkv_width: usize, output_width: usize) -> Result<(), KernelError> {
        let heads = HeadLayout {
            operation: OPERATION,
            num_heads: self.num_heads,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
        };
        heads.check(spec, self.layer, qkv_width)?;
        expect_equal(OPERATION, "output width", output_width, self.num_heads * self.head_dim)?;
        expect_below(OPERATION, "group_offset", self.group_offset, self.group_size)?;
        let last_key_value_head =
            (self.num_heads - 1).checked_add(self.group_offset).map_or(usize::MAX, |place| place / self.group_size);
        expect_below(
            OPERATION,
            "key/value head of the last query head",
            last_key_value_head,
            self.num_key_value_heads,
        )?;
        self.sequences.iter().try_for_each(|sequence| sequence.check(spec))
    }
}

impl AttentionSequence<'_> {
    fn check(&self, spec: &KvCacheSpec) -> Result<(), KernelError> {
        let shape = |what, got, expected| KernelError::Shape { operation: OPERATION, what, got, expected };
        if self.num_tokens == 0 {
            return Err(shape("num_tokens of a sequence", 0, 1));
        }
        let num_keys = self.first_position.checked_add(self.num_tokens).ok_or(shape(
            "first_position",
            self.first_position,
            usize::MAX - self.num_tokens,
        ))?;
        let num_blocks = num_keys.div_ceil(spec.block_size);
        if self.block_table.len() < num_blocks {
            return Err(shape("blocks in a block table", self.block_table.len(), num_blocks));
        }
        self.block_table[..num_blocks]
            .iter()
            .try_for_each(|block| expect_below(OPERATION, "block id", *block as usize, spec.num_blocks))
    }
}
