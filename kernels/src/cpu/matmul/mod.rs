//! The fused dequantizing matmul on the CPU: `output = epilogue(input × weightᵀ)`.
//! For: every linear layer, the embedding table and the output head.
//! Invariant: a token's output depends on that token and the weights alone, bit for bit: not on the batch, not on the
//! number of threads. Weights stay quantized in memory and are unpacked in registers, once for up to 8 tokens.
//!
//! - `format`, `pack`: the layout, 16 rows interleaved. `activations`: tiles of tokens, quantized to 8 bits.
//! - `kernel`: the product, generic over `simd` levels (`avx512`, `avx2`, `portable`) and over `sum`, how its terms
//!   are added; `level`: their tables.
//! - `epilogue`: what happens to the product.

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod epilogue;
mod format;
mod kernel;
mod level;
mod pack;
mod portable;
mod simd;
mod sum;

use std::ops::Range;

use lockstep_formats::GgmlType;

pub use level::Level;

use self::{
    activations::TOKEN_BYTES,
    epilogue::{SwiGlu, Target},
    format::{BLOCK, GROUP},
    kernel::Product,
    level::{Kernels, ProductOf},
    pack::PackedMatrix,
};
use super::{
    memory::{AlignedBuffer, CpuTensor, Element},
    team::{SharedSlice, Team},
};
use crate::{
    KernelError,
    device::AllReduce,
    ops::{Epilogue, HostMatrix},
    quant::Encoding,
};

/// Bytes of activations that a block of tokens may take, so that they stay in the second-level cache.
const TOKEN_BLOCK_BYTES: usize = 384 << 10;
/// Pieces of work for each thread, so that a thread that was interrupted does not hold up the others for long.
const PIECES_PER_THREAD: usize = 4;
/// Tokens of the widest tile of any level.
const MAX_TILE: usize = 8;

/// A linear layer: matrices of equal width whose outputs are stacked.
pub struct CpuLinear {
    parts: Vec<PackedMatrix>,
    rows: usize,
    columns: usize,
}

impl CpuLinear {
    /// Repacks the matrices one after the other, each freed when it is done.
    pub(super) fn new(team: &Team, matrices: Vec<HostMatrix>) -> Result<Self, KernelError> {
        let columns = matrices.first().map_or(0, |matrix| matrix.columns);
        if columns == 0 {
            return Err(shape("columns of a linear layer", 0, 1));
        }
        let mut parts = Vec::with_capacity(matrices.len());
        let mut rows = 0;
        for matrix in matrices {
            if matrix.columns != columns {
                return Err(shape("columns of a stacked matrix", matrix.columns, columns));
            }
            let first_row = rows;
            rows += matrix.rows;
            parts.push(PackedMatrix::new(team, matrix, first_row)?);
        }
        Ok(Self { parts, rows, columns })
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes that the weights take in memory.
    pub fn num_bytes(&self) -> usize {
        self.parts.iter().map(PackedMatrix::num_bytes).sum()
    }

    fn has(&self, is_quantized: bool) -> bool {
        self.parts.iter().any(|part| Encoding::of(part.ggml_type).is_some() == is_quantized)
    }

    /// Part and group in it of the layer's group `index`.
    fn group(&self, mut index: usize) -> Option<(&PackedMatrix, usize)> {
        for part in &self.parts {
            if index < part.num_groups() {
                return Some((part, index));
            }
            index -= part.num_groups();
        }
        None
    }
}

fn shape(what: &'static str, got: usize, expected: usize) -> KernelError {
    KernelError::Shape { operation: "matmul", what, got, expected }
}

/// What the operations of this file share: the level's kernels and reusable buffers.
pub(super) struct MatmulContext {
    kernels: &'static Kernels,
    quantized: AlignedBuffer,
    interleaved: AlignedBuffer,
    stacked: AlignedBuffer,
    sums: AlignedBuffer,
}

impl MatmulContext {
    pub(super) fn new(level: Level) -> Result<Self, KernelError> {
        Ok(Self {
            kernels: Kernels::of(level),
            quantized: AlignedBuffer::zeroed(0)?,
            interleaved: AlignedBuffer::zeroed(0)?,
            stacked: AlignedBuffer::zeroed(0)?,
            sums: AlignedBuffer::zeroed(0)?,
        })
    }

    /// See [`Device::matmul`](crate::Device::matmul).
    pub(super) fn matmul(
        &mut self,
        team: &Team,
        num_tokens: usize,
        weight: &CpuLinear,
        input: &CpuTensor,
        epilogue: Epilogue,
        output: &mut CpuTensor,
    ) -> Result<(), KernelError> {
        let width = match epilogue {
            Epilogue::SwiGlu if weight.rows % 2 == 1 => {
                return Err(shape("rows of gate and up", weight.rows, weight.rows + 1));
            }
            Epilogue::SwiGlu => weight.rows / 2,
            Epilogue::Store => weight.rows,
        };
        let output = self.prepare(team, num_tokens, weight, input, output, width)?;
        let call = Call::new(self, weight, num_tokens);
        match epilogue {
            _ if output.is_empty() => {}
            Epilogue::Store => call.run(team, output, self.kernels.product),
            Epilogue::SwiGlu if call.num_paired_groups().is_some() => call.run_paired(team, output, width),
            Epilogue::SwiGlu => return self.swiglu_stacked(team, weight, num_tokens, output),
        }
        Ok(())
    }

    /// See [`Device::matmul_add`](crate::Device::matmul_add). Each value of the stream is rounded once, after the sum over
    /// all columns of all ranks, which is taken in f64 of products of blocks of 32 columns.
    pub(super) fn matmul_add<E: From<KernelError>>(
        &mut self,
        team: &Team,
        num_tokens: usize,
        weight: &CpuLinear,
        input: &CpuTensor,
        hidden: &mut CpuTensor,
        all_reduce: Option<AllReduce<'_, E>>,
    ) -> Result<(), E> {
        let hidden = self.prepare(team, num_tokens, weight, input, hidden, weight.rows)?;
        let mut buffer = std::mem::replace(&mut self.sums, AlignedBuffer::zeroed(0)?);
        grow(&mut buffer, size_of_val(hidden) * (size_of::<f64>() / size_of::<f32>()))?;
        let sums = &mut buffer.values_mut::<f64>()[..hidden.len()];
        if !sums.is_empty() {
            Call::new(self, weight, num_tokens).run(team, sums, self.kernels.partial_product);
        }
        if let Some(all_reduce) = all_reduce {
            all_reduce(sums)?;
        }
        team.for_rows(hidden, weight.rows, 1, &|row, hidden| {
            for (value, sum) in hidden.iter_mut().zip(&sums[row * weight.rows..]) {
                *value = (f64::from(*value) + sum) as f32;
            }
        });
        self.sums = buffer;
        Ok(())
    }

    /// Checks the shapes, lays the activations out in tiles, and returns the outputs.
    fn prepare<'a>(
        &mut self,
        team: &Team,
        num_tokens: usize,
        weight: &CpuLinear,
        input: &CpuTensor,
        output: &'a mut CpuTensor,
        width: usize,
    ) -> Result<&'a mut [f32], KernelError> {
        if input.width() != weight.columns {
            return Err(shape("width of the input", input.width(), weight.columns));
        }
        if output.width() != width {
            return Err(shape("width of the output", output.width(), width));
        }
        let input = input.rows("matmul", num_tokens)?;
        let output = output.rows_mut("matmul", num_tokens)?;
        self.lay_out(team, weight, num_tokens, input)?;
        Ok(output)
    }

    /// Lays the activations out in tiles, in the forms that the layer's types need.
    fn lay_out(
        &mut self,
        team: &Team,
        weight: &CpuLinear,
        num_tokens: usize,
        input: &[f32],
    ) -> Result<(), KernelError> {
        let (columns, kernels) = (weight.columns, self.kernels);
        let tiles = Tiles::new(num_tokens, kernels.max_tile);
        let padded = tiles.padded_tokens();
        let rows_of = |tile: usize| {
            let tokens = tiles.tokens(tile);
            &input[tokens.start * columns..tokens.end * columns]
        };
        if weight.has(true) {
            let token_bytes = columns / BLOCK * TOKEN_BYTES;
            grow(&mut self.quantized, padded * token_bytes)?;
            let shared = SharedSlice::new(self.quantized.bytes_mut());
            team.for_chunks(tiles.len(), 1, &|range| {
                for tile in range {
                    let start = tiles.start(tile) * token_bytes;
                    // SAFETY: tiles do not overlap.
                    let target = unsafe { shared.range_mut(start..start + tiles.width(tile) * token_bytes) };
                    // SAFETY: the table is that of a supported level.
                    unsafe { (kernels.quantize_tile)(rows_of(tile), columns, tiles.width(tile), target) };
                }
            });
        }
        if weight.has(false) {
            grow(&mut self.interleaved, padded * columns * 4)?;
            let shared = SharedSlice::new(self.interleaved.values_mut());
            team.for_chunks(tiles.len(), 1, &|range| {
                for tile in range {
                    let start = tiles.start(tile) * columns;
                    // SAFETY: tiles do not overlap.
                    let target = unsafe { shared.range_mut(start..start + tiles.width(tile) * columns) };
                    // SAFETY: the table is that of a supported level.
                    unsafe { (kernels.interleave_tile)(rows_of(tile), columns, tiles.width(tile), target) };
                }
            });
        }
        Ok(())
    }

    /// SwiGLU of a layer whose halves do not begin at row groups: the whole product first, then the combination.
    fn swiglu_stacked(
        &mut self,
        team: &Team,
        weight: &CpuLinear,
        num_tokens: usize,
        output: &mut [f32],
    ) -> Result<(), KernelError> {
        let width = weight.rows / 2;
        let mut stacked = std::mem::replace(&mut self.stacked, AlignedBuffer::zeroed(0)?);
        grow(&mut stacked, num_tokens * weight.rows * 4)?;
        Call::new(self, weight, num_tokens).run(
            team,
            &mut stacked.values_mut()[..num_tokens * weight.rows],
            self.kernels.product,
        );
        let products = stacked.values::<f32>();
        let simd_level = super::simd::Level::detect();
        team.for_rows(output, width, 1, &|token, outputs| {
            let (gate, up) = products[token * weight.rows..][..weight.rows].split_at(width);
            outputs.copy_from_slice(gate);
            simd_level.run(SwiGlu { gate: outputs, up });
        });
        self.stacked = stacked;
        Ok(())
    }

    /// See [`Device::embed`](crate::Device::embed).
    pub(super) fn embed(
        &self,
        team: &Team,
        table: &CpuLinear,
        first_row: u32,
        token_ids: &[u32],
        output: &mut CpuTensor,
    ) -> Result<(), KernelError> {
        if output.width() != table.columns {
            return Err(KernelError::Shape {
                operation: "embed",
                what: "width of the output",
                got: output.width(),
                expected: table.columns,
            });
        }
        let output = output.rows_mut("embed", token_ids.len())?;
        team.for_rows(output, table.columns, 1, &|token, values| {
            let row = token_ids[token].checked_sub(first_row).map_or(usize::MAX, |row| row as usize);
            let part = table.parts.iter().find(|part| (part.first_row..part.first_row + part.rows).contains(&row));
            match part {
                None => values.fill(0.0),
                Some(part) => {
                    let row = row - part.first_row;
                    let group = part.group(row / GROUP).as_ptr();
                    // SAFETY: the table is that of a supported level; the group is of this type and width.
                    unsafe { (self.kernels.read_row)(part.ggml_type, group, row % GROUP, values) };
                }
            }
        });
        Ok(())
    }
}

fn grow(buffer: &mut AlignedBuffer, num_bytes: usize) -> Result<(), KernelError> {
    if buffer.bytes().len() < num_bytes {
        *buffer = AlignedBuffer::zeroed(num_bytes)?;
    }
    Ok(())
}

/// Tokens cut into tiles: as many of the widest as fit, then one of the next power of two.
#[derive(Clone, Copy)]
struct Tiles {
    num_tokens: usize,
    max_tile: usize,
}

impl Tiles {
    fn new(num_tokens: usize, max_tile: usize) -> Self {
        Self { num_tokens, max_tile }
    }

    fn len(self) -> usize {
        self.num_tokens.div_ceil(self.max_tile)
    }

    fn start(self, tile: usize) -> usize {
        tile * self.max_tile
    }

    fn tokens(self, tile: usize) -> Range<usize> {
        self.start(tile)..self.num_tokens.min(self.start(tile + 1))
    }

    fn width(self, tile: usize) -> usize {
        self.tokens(tile).len().next_power_of_two()
    }

    fn padded_tokens(self) -> usize {
        self.num_tokens.next_multiple_of(self.max_tile)
    }
}

/// One matmul whose activations are prepared.
struct Call<'a> {
    kernels: &'static Kernels,
    weight: &'a CpuLinear,
    tiles: Tiles,
    quantized: &'a [u8],
    interleaved: &'a [f32],
}

impl<'a> Call<'a> {
    fn new(context: &'a MatmulContext, weight: &'a CpuLinear, num_tokens: usize) -> Self {
        Self {
            kernels: context.kernels,
            weight,
            tiles: Tiles::new(num_tokens, context.kernels.max_tile),
            quantized: context.quantized.bytes(),
            interleaved: context.interleaved.values(),
        }
    }

    /// Runs `work(group, tiles)` over `num_groups` row groups and all tiles: tiles in blocks that fit a cache, groups
    /// in chunks for the threads.
    fn for_groups(&self, team: &Team, num_groups: usize, work: &(dyn Fn(usize, Range<usize>) + Sync)) {
        let tile_bytes = self.weight.columns * self.kernels.max_tile * 2;
        let tiles_each = (TOKEN_BLOCK_BYTES / tile_bytes.max(1)).max(1);
        let num_blocks = self.tiles.len().div_ceil(tiles_each);
        let groups_each = match team.num_threads() {
            1 => num_groups,
            num_threads => num_groups.div_ceil(num_threads * PIECES_PER_THREAD),
        };
        let num_chunks = num_groups.div_ceil(groups_each.max(1));
        team.for_chunks(num_blocks * num_chunks, 1, &|pieces| {
            for piece in pieces {
                let (block, chunk) = (piece / num_chunks, piece % num_chunks);
                let tiles = block * tiles_each..self.tiles.len().min((block + 1) * tiles_each);
                for group in chunk * groups_each..num_groups.min((chunk + 1) * groups_each) {
                    work(group, tiles.clone());
                }
            }
        });
    }

    /// The whole product.
    fn run<V: Element + Default>(&self, team: &Team, output: &mut [V], product_of: ProductOf<V>) {
        let shared = SharedSlice::new(output);
        let num_groups = self.weight.parts.iter().map(PackedMatrix::num_groups).sum();
        self.for_groups(team, num_groups, &|group, tiles| {
            let Some((part, group)) = self.weight.group(group) else { return };
            let target = Target {
                start: shared.as_mut_ptr(),
                width: self.weight.rows,
                column: part.first_row + group * GROUP,
                rows: GROUP.min(part.rows - group * GROUP),
            };
            let products = self.products(product_of, part.ggml_type);
            let mut values = [[V::default(); GROUP]; MAX_TILE];
            for tile in tiles {
                self.product(&products, part, group, tile, &mut values);
                let tokens = self.tiles.tokens(tile);
                // SAFETY: tokens and columns are inside the output; no other piece of work has this group and tile.
                unsafe { target.write(tokens.start, &values[..tokens.len()]) };
            }
        });
    }

    /// Row groups of gate and up that lie side by side: `(of the gate, from gate to up)`, if the halves begin at groups.
    fn num_paired_groups(&self) -> Option<usize> {
        let half = self.weight.rows / 2;
        match self.weight.parts.as_slice() {
            [whole] if whole.rows == self.weight.rows && half.is_multiple_of(GROUP) => Some(half / GROUP),
            [gate, up] if gate.rows == up.rows => Some(gate.num_groups()),
            _ => None,
        }
    }

    /// SwiGLU: the groups of gate and up together.
    fn run_paired(&self, team: &Team, output: &mut [f32], width: usize) {
        let Some(num_groups) = self.num_paired_groups() else { return };
        let simd_level = super::simd::Level::detect();
        let shared = SharedSlice::new(output);
        self.for_groups(team, num_groups, &|group, tiles| {
            let (Some(gate), Some(up)) = (self.weight.group(group), self.weight.group(group + num_groups)) else {
                return;
            };
            let rows = GROUP.min(width - group * GROUP);
            let target = Target { start: shared.as_mut_ptr(), width, column: group * GROUP, rows };
            let (gate_products, up_products) =
                [gate, up].map(|(part, _)| self.products(self.kernels.product, part.ggml_type)).into();
            let mut values = [[[0.0_f32; GROUP]; MAX_TILE]; 2];
            for tile in tiles {
                let [gates, ups] = &mut values;
                self.product(&gate_products, gate.0, gate.1, tile, gates);
                self.product(&up_products, up.0, up.1, tile, ups);
                let tokens = self.tiles.tokens(tile);
                let (gates, ups) = (&mut gates[..tokens.len()], &ups[..tokens.len()]);
                simd_level.run(SwiGlu { gate: gates.as_flattened_mut(), up: ups.as_flattened() });
                // SAFETY: tokens and columns are inside the output; no other piece of work has this group and tile.
                unsafe { target.write(tokens.start, gates) };
            }
        });
    }

    /// The products for the widest tile and for the last one.
    fn products<V>(&self, product_of: ProductOf<V>, ggml_type: GgmlType) -> [Product<V>; 2] {
        [self.kernels.max_tile, self.tiles.width(self.tiles.len() - 1)].map(|width| product_of(ggml_type, width))
    }

    fn product<V>(
        &self,
        products: &[Product<V>; 2],
        part: &PackedMatrix,
        group: usize,
        tile: usize,
        values: &mut [[V; GROUP]; MAX_TILE],
    ) {
        let product = products[usize::from(tile + 1 == self.tiles.len())];
        let columns = part.columns;
        let activations = match Encoding::of(part.ggml_type) {
            Some(_) => self.quantized[self.tiles.start(tile) * (columns / BLOCK * TOKEN_BYTES)..].as_ptr(),
            None => self.interleaved[self.tiles.start(tile) * columns..].as_ptr().cast(),
        };
        // SAFETY: the table is that of a supported level; the group is packed for this type and width, the tile was
        // prepared in its form and has the width of the product; `values` holds the widest tile.
        unsafe { product(part.group(group).as_ptr(), columns, activations, values.as_mut_ptr().cast()) };
    }
}
