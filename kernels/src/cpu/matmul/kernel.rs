//! The product of one row group and one tile of tokens, written once for every type and level.
//! For: `matmul`, through the tables of `kernels`.
//! Invariant: an output is summed over the columns in their order, whatever the tile's width: batches change no bit.

use std::ops::Range;

use super::{
    activations::{MINUS_HALF_SUM, MINUS_SUM, SCALE, SCALED_HALF_SUM, SCALED_SUM, TOKEN_BYTES},
    format::{BLOCK, Format, GROUP, group_bytes, quant_bytes},
    simd::Simd,
};

/// The columns that a product takes, and how it sums them.
#[derive(Clone)]
pub(super) struct Span {
    /// Columns of the group and the tile.
    pub(super) columns: usize,
    /// Those of them to take; they start at a block.
    pub(super) range: Range<usize>,
    /// Columns of one sum, a multiple of the block.
    pub(super) sum_columns: usize,
    /// Whether to ask for the weights that come next meanwhile.
    pub(super) prefetches: bool,
}

/// How far ahead unquantized weights are asked for: past the border of a page, where the processor's own prefetching
/// stops, and near enough to be in the first-level cache still.
const PREFETCH_BYTES: usize = 8 << 10;

/// `(group, span, tile, output)`: writes the products of a packed row group and a tile of `T` tokens, `[T][16]` for each
/// sum of the span.
pub(super) type Product = unsafe fn(*const u8, &Span, *const u8, *mut f32);

/// Product of quantized weights and a quantized tile.
///
/// # Safety
/// The level's instructions are there; `group` is a packed group of the format, `tile` a quantized tile of `T` tokens,
/// both of the span's columns; `output` has room for `T * 16` values for each sum.
#[inline(always)]
pub(super) unsafe fn quantized<S: Simd, F: Format, const T: usize>(
    group: *const u8,
    span: &Span,
    tile: *const u8,
    output: *mut f32,
) {
    let blocks = span.range.start / BLOCK..span.range.end / BLOCK;
    let blocks_each = span.sum_columns / BLOCK;
    let mut lane = 0;
    while lane < GROUP {
        let mut output = output;
        let mut block = blocks.start;
        while block < blocks.end {
            let end = blocks.end.min(block + blocks_each);
            // SAFETY: blocks of the span are inside the group and the tile; outputs below `T * 16` for each sum.
            unsafe {
                let scales = group.add(span.columns / BLOCK * quant_bytes(F::BITS));
                let mut sums = [S::zero(); T];
                while block < end {
                    if lane == 0 && span.prefetches {
                        prefetch_next_group::<S, F>(group, span.columns, block);
                    }
                    let weights = F::unpack::<S>(group.add(block * quant_bytes(F::BITS) + 4 * lane));
                    let scales = F::scales::<S>(scales, block, lane);
                    let activations = tile.add(block * TOKEN_BYTES * T);
                    for (token, sum) in sums.iter_mut().enumerate() {
                        *sum = add_block::<S, F, T>(*sum, &weights, &scales, activations, token);
                    }
                    block += 1;
                }
                for (token, sum) in sums.iter().enumerate() {
                    S::store(output.add(token * GROUP + lane), *sum);
                }
                output = output.add(T * GROUP);
            }
        }
        lane += S::LANES;
    }
}

/// Asks for the same block of the group after this one. The processor's own prefetching starts anew in each group,
/// which is too short for it to get far ahead.
///
/// # Safety
/// The level's instructions are there.
#[inline(always)]
unsafe fn prefetch_next_group<S: Simd, F: Format>(group: *const u8, columns: usize, block: usize) {
    let next = group.wrapping_add(group_bytes(F::BITS, F::SCALES, columns));
    let quants = next.wrapping_add(block * quant_bytes(F::BITS));
    let (unit_blocks, unit_bytes) = F::SCALES.unit();
    let scales = next.wrapping_add(columns / BLOCK * quant_bytes(F::BITS) + block * (unit_bytes / unit_blocks));
    // SAFETY: a prefetch of any address is harmless.
    unsafe {
        for line in 0..F::BITS {
            S::prefetch(quants.wrapping_add(64 * line));
        }
        S::prefetch(scales);
    }
}

/// Adds one block's product for one token of the tile.
///
/// # Safety
/// As [`quantized`]; `block` is a block of the tile.
#[inline(always)]
unsafe fn add_block<S: Simd, F: Format, const T: usize>(
    sum: S::Floats,
    weights: &[[S::Bytes; 4]; 2],
    scales: &super::format::Scales<S>,
    block: *const u8,
    token: usize,
) -> S::Floats {
    // SAFETY: offsets are those of a tile of `T` tokens.
    unsafe {
        let quants = block.add(32 * token).cast::<i8>();
        let scale = S::splat(block.add(SCALE * T).cast::<f32>().add(token));
        if F::SCALES.is_halved() {
            let second = T + token;
            let mut first_half = start::<S, F>(block.add(MINUS_HALF_SUM * T).cast::<i32>().add(token));
            let mut second_half = start::<S, F>(block.add(MINUS_HALF_SUM * T).cast::<i32>().add(second));
            first_half = F::dot::<S>(first_half, &weights[0], quants);
            second_half = F::dot::<S>(second_half, &weights[1], quants.add(16));
            let scaled = S::mul(S::to_floats(first_half), scales.scale[0]);
            let scaled = S::mul_add(S::to_floats(second_half), scales.scale[1], scaled);
            let sum = S::mul_add(scaled, scale, sum);
            if !F::SCALES.has_min() {
                return sum;
            }
            let sums = block.add(SCALED_HALF_SUM * T).cast::<f32>();
            let sum = S::mul_add(scales.min[0], S::splat(sums.add(token)), sum);
            return S::mul_add(scales.min[1], S::splat(sums.add(second)), sum);
        }
        let dot = start::<S, F>(block.add(MINUS_SUM * T).cast::<i32>().add(token));
        let dot = F::dot::<S>(dot, &weights[0], quants);
        let dot = F::dot::<S>(dot, &weights[1], quants.add(16));
        let sum = S::mul_add(S::to_floats(dot), S::mul(scales.scale[0], scale), sum);
        if !F::SCALES.has_min() {
            return sum;
        }
        S::mul_add(scales.min[0], S::splat(block.add(SCALED_SUM * T).cast::<f32>().add(token)), sum)
    }
}

/// What the sum of products starts from: minus the offset's share.
///
/// # Safety
/// As [`quantized`]; `minus_sum` is readable.
#[inline(always)]
unsafe fn start<S: Simd, F: Format>(minus_sum: *const i32) -> S::Ints {
    // SAFETY: the caller's promise.
    unsafe {
        match F::OFFSET_SHIFT {
            0 => S::zero_ints(),
            shift => S::shift_left(S::splat_int(minus_sum), shift),
        }
    }
}

/// An unquantized type of weights.
pub(super) trait Plain {
    /// Bytes of a value.
    const BYTES: usize;

    /// Loads one value of each row.
    ///
    /// # Safety
    /// As [`Simd`].
    unsafe fn load<S: Simd>(source: *const u8) -> S::Floats;
}

macro_rules! plain {
    ($($name:ident: $bytes:literal bytes, $load:ident;)*) => {
        $(
            pub(super) struct $name;

            impl Plain for $name {
                const BYTES: usize = $bytes;

                #[inline(always)]
                unsafe fn load<S: Simd>(source: *const u8) -> S::Floats {
                    // SAFETY: the caller's promise.
                    unsafe { S::$load(source) }
                }
            }
        )*
    };
}

plain! {
    F32: 4 bytes, load_f32;
    F16: 2 bytes, load_f16;
    BF16: 2 bytes, load_bf16;
}

/// Product of unquantized weights and an interleaved tile: in each sum two chains, of the even columns and of the odd ones.
///
/// # Safety
/// As [`quantized`], for a group of the plain type and a tile `[columns][T]` of f32.
#[inline(always)]
pub(super) unsafe fn plain<S: Simd, P: Plain, const T: usize>(
    group: *const u8,
    span: &Span,
    tile: *const u8,
    output: *mut f32,
) {
    let tile = tile.cast::<f32>();
    let mut lane = 0;
    while lane < GROUP {
        let rows = group.wrapping_add(P::BYTES * lane);
        let mut output = output;
        let mut column = span.range.start;
        while column < span.range.end {
            let end = span.range.end.min(column + span.sum_columns);
            // SAFETY: columns of the span are inside the group and the tile; outputs below `T * 16` for each sum.
            unsafe {
                let (mut even, mut odd) = ([S::zero(); T], [S::zero(); T]);
                while column + 1 < end {
                    let pair = rows.add(column * GROUP * P::BYTES);
                    if lane == 0 && span.prefetches {
                        (0..2 * P::BYTES / 4)
                            .for_each(|line| S::prefetch(pair.wrapping_add(PREFETCH_BYTES + 64 * line)));
                    }
                    add_column::<S, P, T>(&mut even, pair, tile.add(column * T));
                    add_column::<S, P, T>(&mut odd, pair.add(GROUP * P::BYTES), tile.add((column + 1) * T));
                    column += 2;
                }
                if column < end {
                    add_column::<S, P, T>(&mut even, rows.add(column * GROUP * P::BYTES), tile.add(column * T));
                    column += 1;
                }
                for (token, (even, odd)) in even.iter().zip(&odd).enumerate() {
                    S::store(output.add(token * GROUP + lane), S::add(*even, *odd));
                }
                output = output.add(T * GROUP);
            }
        }
        lane += S::LANES;
    }
}

/// Adds the products of one column.
///
/// # Safety
/// As [`plain`], for the weights of the column and the values of its `T` tokens.
#[inline(always)]
unsafe fn add_column<S: Simd, P: Plain, const T: usize>(
    sums: &mut [S::Floats; T],
    weights: *const u8,
    values: *const f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let weights = P::load::<S>(weights);
        for (token, sum) in sums.iter_mut().enumerate() {
            *sum = S::mul_add(weights, S::splat(values.add(token)), *sum);
        }
    }
}

/// Dequantizes one row of a packed group of a quantized type.
///
/// # Safety
/// The level's instructions are there; `group` is a packed group of the format with `output.len()` columns.
#[inline(always)]
pub(super) unsafe fn dequantize_row<S: Simd, F: Format>(group: *const u8, row: usize, output: &mut [f32]) {
    let lane = row / S::LANES * S::LANES;
    let inside = row - lane;
    let num_blocks = output.len() / BLOCK;
    let offset = if F::OFFSET_SHIFT == 0 { 0 } else { 1_i32 << F::OFFSET_SHIFT };
    for (block, values) in output.chunks_exact_mut(BLOCK).enumerate() {
        let mut quants = [[0_u8; 4 * GROUP]; 8];
        let mut factors = [[[0.0_f32; GROUP]; 2]; 2];
        // SAFETY: the block is inside the group; the arrays hold a vector of any level.
        unsafe {
            let weights = F::unpack::<S>(group.add(block * quant_bytes(F::BITS) + 4 * lane));
            for (index, target) in quants.iter_mut().enumerate() {
                S::store_bytes(target.as_mut_ptr(), weights[index / 4][index % 4]);
            }
            let scales = F::scales::<S>(group.add(num_blocks * quant_bytes(F::BITS)), block, lane);
            for (half, target) in factors.iter_mut().enumerate() {
                S::store(target[0].as_mut_ptr(), scales.scale[half]);
                S::store(target[1].as_mut_ptr(), scales.min[half]);
            }
        }
        for (k, value) in values.iter_mut().enumerate() {
            let quant = i32::from(quants[k / 4][4 * inside + k % 4]) - offset;
            let factor = &factors[k / 16];
            *value = factor[0][inside] * quant as f32 + factor[1][inside];
        }
    }
}

/// Copies one row of a packed group of a plain type.
///
/// # Safety
/// As [`dequantize_row`].
#[inline(always)]
pub(super) unsafe fn plain_row<S: Simd, P: Plain>(group: *const u8, row: usize, output: &mut [f32]) {
    let lane = row / S::LANES * S::LANES;
    for (column, value) in output.iter_mut().enumerate() {
        let mut values = [0.0_f32; GROUP];
        // SAFETY: the column is inside the group; the array holds a vector of any level.
        unsafe { S::store(values.as_mut_ptr(), P::load::<S>(group.add((column * GROUP + lane) * P::BYTES))) };
        *value = values[row - lane];
    }
}
