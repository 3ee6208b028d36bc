//! Activations as the kernels read them: tiles of 1, 2, 4 or 8 tokens, block by block.
//! For: `matmul`, before the product, in parallel over tiles.
//! Invariant: what a token's values come to depends on that token alone.
//!
//! A tile of `T` tokens is, for each block of 32 columns, `64 T` bytes: quants `[T][32]` i8, scale `[T]` f32, then of the
//! quants: `-sum [T]` i32, `scale * sum [T]` f32, and the same for the two halves of the block: `-sum [2][T]` i32,
//! `scale * sum [2][T]` f32. For unquantized weights a tile is `[columns][T]` f32.

use crate::quant::{ACTIVATION_BLOCK, quantize_block};

/// Bytes of a token in a block of a quantized tile.
pub(super) const TOKEN_BYTES: usize = 64;
/// Offsets in a block, in units of the tile's width.
pub(super) const SCALE: usize = 32;
pub(super) const MINUS_SUM: usize = 36;
pub(super) const SCALED_SUM: usize = 40;
pub(super) const MINUS_HALF_SUM: usize = 44;
pub(super) const SCALED_HALF_SUM: usize = 52;

/// Quantizes rows (`[num_rows, columns]`, at most `width`) into a tile; tokens past the rows are zeros.
#[inline(always)]
pub(super) fn quantize_tile(rows: &[f32], columns: usize, width: usize, tile: &mut [u8]) {
    let num_rows = rows.len() / columns;
    let blocks = tile.chunks_exact_mut(TOKEN_BYTES * width);
    for (index, block) in blocks.take(columns / ACTIVATION_BLOCK).enumerate() {
        for token in 0..width {
            let start = token * columns + index * ACTIVATION_BLOCK;
            let values = match rows.get(start..).and_then(|rest| rest.first_chunk::<ACTIVATION_BLOCK>()) {
                Some(values) if token < num_rows => values,
                _ => &[0.0; ACTIVATION_BLOCK],
            };
            quantize_token(values, width, token, block);
        }
    }
}

#[inline(always)]
fn quantize_token(values: &[f32; ACTIVATION_BLOCK], width: usize, token: usize, block: &mut [u8]) {
    let (scale, quants) = quantize_block(values);
    let mut halves = [0_i32; 2];
    for (half, sum) in halves.iter_mut().enumerate() {
        *sum = quants[16 * half..16 * half + 16].iter().map(|&quant| i32::from(quant)).sum();
    }
    let sum = halves[0] + halves[1];
    let start = 32 * token;
    for (target, quant) in block[start..start + 32].iter_mut().zip(quants) {
        *target = quant as u8;
    }
    let mut put = |offset: usize, index: usize, bytes: [u8; 4]| {
        let at = offset * width + 4 * index;
        block[at..at + 4].copy_from_slice(&bytes);
    };
    put(SCALE, token, scale.to_ne_bytes());
    put(MINUS_SUM, token, (-sum).to_ne_bytes());
    put(SCALED_SUM, token, (scale * sum as f32).to_ne_bytes());
    for (half, sum) in halves.into_iter().enumerate() {
        put(MINUS_HALF_SUM, half * width + token, (-sum).to_ne_bytes());
        put(SCALED_HALF_SUM, half * width + token, (scale * sum as f32).to_ne_bytes());
    }
}

/// Lays rows (`[num_rows, columns]`, at most `width`) out as `[columns][width]`; tokens past the rows are zeros.
#[inline(always)]
pub(super) fn interleave_tile(rows: &[f32], columns: usize, width: usize, tile: &mut [f32]) {
    for (column, values) in tile.chunks_exact_mut(width).take(columns).enumerate() {
        for (token, value) in values.iter_mut().enumerate() {
            *value = rows.get(token * columns + column).copied().unwrap_or(0.0);
        }
    }
}
