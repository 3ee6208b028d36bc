//! Contract of rotary embedding and KV store in one: rotates the queries in place, rotates the keys,
//! and writes keys and values to their slots of the paged cache.
//! Source: RoFormer (Su et al. 2021); the two pairings are those of GGUF `llama` (interleaved) and NEOX (halves) files.
//! Invariant: a call that passes `check` stays inside `qkv` and the cache, and writes no slot twice.

use super::{HeadLayout, expect_below, expect_equal};
use crate::{KernelError, device::KvCacheSpec};

const OPERATION: &str = "rope_and_store";

/// Which two elements of a head form a rotated pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Elements `2i` and `2i + 1`.
    Interleaved,
    /// Elements `i` and `i + rotary_dim / 2`.
    Halves,
}

/// Angles by position: what theta, scaling and frequency divisors come to.
#[derive(Clone, Debug, PartialEq)]
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

impl RopeAndStore<'_> {
    /// Tokens of the call.
    pub fn num_tokens(&self) -> usize {
        self.positions.len()
    }

    /// Accepts the call or names the number that is wrong: `spec` are the sizes of the cache, `qkv_width` the values of
    /// a row of `qkv`.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if two lengths disagree, [`KernelError::OutOfRange`] for a layer or slot outside the cache
    /// or a rotary size above the head's, [`KernelError::Duplicate`] for a slot that two tokens would write.
    pub fn check(&self, table: &RopeTable, spec: &KvCacheSpec, qkv_width: usize) -> Result<(), KernelError> {
        let heads = HeadLayout {
            operation: OPERATION,
            num_heads: self.num_heads,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
        };
        heads.check(spec, self.layer, qkv_width)?;
        expect_below(OPERATION, "rotary_dim", table.rotary_dim, self.head_dim + 1)?;
        expect_equal(OPERATION, "twice the number of frequencies", 2 * table.frequencies.len(), table.rotary_dim)?;
        expect_equal(OPERATION, "length of slot_mapping", self.slot_mapping.len(), self.positions.len())?;
        let num_slots = spec.num_blocks * spec.block_size;
        self.slot_mapping.iter().try_for_each(|slot| expect_below(OPERATION, "slot", *slot as usize, num_slots))?;
        if self.slot_mapping.is_sorted_by(|left, right| left < right) {
            return Ok(());
        }
        let mut sorted = self.slot_mapping.to_vec();
        sorted.sort_unstable();
        match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(KernelError::Duplicate { operation: OPERATION, what: "slot", got: pair[0] as usize }),
            None => Ok(()),
        }
    }
}
