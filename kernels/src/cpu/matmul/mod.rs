//! The fused dequantizing matmul on the CPU: `output = epilogue(input × weightᵀ)`.
//! For: every linear layer, the embedding table and the output head.
//! Invariant: a token's output depends on that token and the weights alone, bit for bit: not on the batch, not on the
//! number of threads. Weights stay quantized in memory and are unpacked in registers, once for up to 8 tokens.
//!
//! - `format`, `pack`: the layout, 16 rows interleaved. `activations`: tiles of tokens, quantized to 8 bits.
//! - `kernel`: the product, generic over `simd` levels (`avx512`, `avx2`, `portable`); `kernels`: their tables.
//! - `call`: one product over all rows and tokens; `epilogue`: what happens to it.

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod call;
mod epilogue;
mod format;
mod kernel;
mod kernels;
mod pack;
mod pairs;
mod portable;
mod simd;

use self::{
    activations::TOKEN_BYTES,
    call::{Call, Tiles},
    epilogue::{SwiGlu, Total},
    format::{BLOCK, GROUP},
    kernels::Kernels,
    pack::PackedMatrix,
};
use super::{
    memory::{AlignedBuffer, CpuTensor},
    simd::Level,
    team::{SharedSlice, Team},
};
use crate::{
    KernelError,
    group::{NoCommunicator, Sum},
    ops::{
        Epilogue, HostMatrix,
        matmul::{shape, stacked_columns},
    },
    quant::Encoding,
};

/// A linear layer: matrices of equal width whose outputs are stacked.
pub struct CpuLinear {
    parts: Vec<PackedMatrix>,
    rows: usize,
    columns: usize,
}

impl CpuLinear {
    /// Repacks the matrices one after the other, each freed when it is done.
    pub(super) fn new(team: &Team, matrices: Vec<HostMatrix>) -> Result<Self, KernelError> {
        let columns = stacked_columns(&matrices)?;
        let mut parts = Vec::with_capacity(matrices.len());
        let mut rows = 0;
        for matrix in matrices {
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

/// What the operations of this file share: the level's kernels and reusable buffers.
pub(super) struct MatmulContext {
    level: Level,
    kernels: &'static Kernels,
    quantized: AlignedBuffer,
    interleaved: AlignedBuffer,
    stacked: AlignedBuffer,
    sums: AlignedBuffer,
}

impl MatmulContext {
    pub(super) fn new(level: Level) -> Result<Self, KernelError> {
        Ok(Self {
            level,
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
            Epilogue::Store => call.store(team, output),
            Epilogue::SwiGlu if call.num_paired_groups().is_some() => call.run_paired(team, output, width),
            Epilogue::SwiGlu => return self.swiglu_stacked(team, weight, num_tokens, output),
        }
        Ok(())
    }

    /// See [`Device::matmul_add`](crate::Device::matmul_add). Each value of the stream is rounded once, after the sum over
    /// all columns of all ranks, which is taken in f64 over f32 sums of [`GgmlType::sum_columns`](lockstep_formats::GgmlType).
    pub(super) fn matmul_add<E: From<KernelError>>(
        &mut self,
        team: &Team,
        num_tokens: usize,
        weight: &CpuLinear,
        input: &CpuTensor,
        hidden: &mut CpuTensor,
        sum: Sum<'_, NoCommunicator, E>,
    ) -> Result<(), E> {
        let hidden = self.prepare(team, num_tokens, weight, input, hidden, weight.rows)?;
        if hidden.is_empty() {
            return Ok(());
        }
        let all_reduce = match sum {
            Sum::Own => {
                Call::new(self, weight, num_tokens).add_up(team, hidden);
                return Ok(());
            }
            Sum::Hosts(all_reduce) => all_reduce,
            Sum::Devices(communicator) => match *communicator {},
        };
        let mut buffer = std::mem::replace(&mut self.sums, AlignedBuffer::zeroed(0)?);
        grow(&mut buffer, size_of_val(hidden) * (size_of::<f64>() / size_of::<f32>()))?;
        let sums = &mut buffer.values_mut::<f64>()[..hidden.len()];
        Call::new(self, weight, num_tokens).add_up(team, sums);
        all_reduce(sums)?;
        team.for_rows(hidden, weight.rows, 1, &|row, hidden| {
            hidden.iter_mut().zip(&sums[row * weight.rows..]).for_each(|(value, sum)| value.take(*sum));
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
                    // SAFETY: the level proves the instructions.
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
                    // SAFETY: the level proves the instructions.
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
        Call::new(self, weight, num_tokens).store(team, &mut stacked.values_mut()[..num_tokens * weight.rows]);
        let products = stacked.values::<f32>();
        let level = self.level;
        team.for_rows(output, width, 1, &|token, outputs| {
            let (gate, up) = products[token * weight.rows..][..weight.rows].split_at(width);
            outputs.copy_from_slice(gate);
            level.run(SwiGlu { gate: outputs, up });
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
                    // SAFETY: the level proves the instructions; the group is of this type and width.
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
