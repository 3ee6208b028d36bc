//! Products of prompts: cuBLASLt, over weights of 16 and 32 bits as they are, and over quantized ones that become f16 piece
//! by piece. Device code: `cuda/dequantize.cu`, `cuda/products.cu`.
//! For: so many tokens that writing the weights once more costs less than slower tensor cores. Never on the path of a
//! usual decode. Invariant: pieces are small enough to stay in the second-level cache until they are used, as far as the
//! products stay large enough to fill the GPU.

use std::{ops::Range, sync::Arc};

use cudarc::cublaslt::sys::cudaDataType;
use lockstep_formats::GgmlType;

use super::{
    Target,
    arguments::{ActivationView, LayerView, PartView},
    blas::{Blas, Gemm},
    layout::{GROUP_ROWS, Layout},
    linear::Format,
    products::{self, Products},
};
use crate::{
    KernelError,
    cuda::{DevicePointer, Gpu, HalfType, Launch, ScratchBuffer, sources::Source},
};

/// Device code.
pub const SOURCE: Source = Source {
    name: "dequantize.cu",
    text: include_str!("../../../cuda/dequantize.cu"),
    variants: &["-DFORMATS=Q4_K", "-DFORMATS=Q6_K", "-DFORMATS=Q8_0", "-DFORMATS=Q2_K"],
};

const NUM_THREADS: u32 = 256;
/// Tiles that a block makes.
const BLOCK_TILES: usize = 8;
/// Bytes of f16 weights of a piece, unless the GPU would not be filled.
const PIECE_BYTES: usize = 32 << 20;
/// Rows and tokens that a block of cuBLAS makes, about, and blocks that a multiprocessor should have.
const BLOCK_OUTPUTS: usize = 128 * 128;
const BLOCKS_EACH: usize = 2;
/// Rows of a piece are a multiple of it: whole blocks of cuBLAS.
const ROW_BORDER: usize = 128;

/// One product of a layer by cuBLAS.
pub(super) struct Dense<'a> {
    pub(super) gpu: &'a Arc<Gpu>,
    pub(super) blas: &'a Blas,
    pub(super) layer: &'a LayerView,
    pub(super) num_tokens: usize,
    pub(super) input: ActivationView,
    pub(super) output: ActivationView,
}

/// Whether there is a product for weights of this type (`None`: quantized) and these activations.
pub(super) fn takes(plain_type: Option<GgmlType>, input: &ActivationView) -> bool {
    match plain_type {
        None => input.half_type == Some(HalfType::F16),
        Some(GgmlType::F16) => input.half_type == Some(HalfType::F16),
        Some(GgmlType::BF16) => input.half_type == Some(HalfType::BF16),
        _ => true,
    }
}

impl Dense<'_> {
    pub(super) fn launch(&self, target: Target) -> Result<(), KernelError> {
        match target {
            Target::SwiGlu => self.swiglu(),
            Target::Store | Target::Add => self.products(target == Target::Add),
        }
    }

    fn products(&self, is_added: bool) -> Result<(), KernelError> {
        let Self { gpu, layer, num_tokens, output, .. } = *self;
        // f16 weights and activations are multiplied into f16 as well.
        let is_half = output.values.0 == 0
            && output.half_type == Some(HalfType::F16)
            && matches!(layer.plain_type(), None | Some(GgmlType::F16));
        let element_bytes = if is_half { size_of::<u16>() } else { size_of::<f32>() };
        let scratch;
        let mut values = if is_half { output.halves } else { output.values };
        if values.0 == 0 {
            scratch = ScratchBuffer::new(gpu, num_tokens * output.columns * size_of::<f32>())?;
            values = scratch.pointer();
        }
        let piece_rows = self.piece_rows();
        for part in layer.parts() {
            for first in (0..part.rows).step_by(piece_rows) {
                let rows = first..part.rows.min(first + piece_rows);
                let weights = Weights::new(self, &[(part, rows.clone())])?;
                let offset = (part.first_row + first) * element_bytes;
                self.multiply(
                    weights.pointers[0],
                    rows.len(),
                    Output { pointer: values.offset_bytes(offset), columns: output.columns, is_half, is_added },
                )?;
            }
        }
        if output.halves.0 == 0 || is_half || is_added {
            return Ok(());
        }
        let products = Products { pointer: values, is_half: false, columns: output.columns, first_column: 0 };
        let halves = ActivationView { values: DevicePointer(0), ..output };
        products::store(gpu, num_tokens, products, false, halves)
    }

    fn swiglu(&self) -> Result<(), KernelError> {
        let Self { gpu, layer, num_tokens, output, .. } = *self;
        let [gate, up] = layer.parts() else { return Ok(()) };
        // bf16 and f32 products are only added up to bf16 and f32.
        let is_half = matches!(layer.plain_type(), None | Some(GgmlType::F16));
        let element_bytes = if is_half { size_of::<u16>() } else { size_of::<f32>() };
        let piece_outputs = (self.piece_rows() / 2).next_multiple_of(ROW_BORDER).min(gate.rows);
        let scratch = ScratchBuffer::new(gpu, num_tokens * 2 * piece_outputs * element_bytes)?;
        for first in (0..gate.rows).step_by(piece_outputs) {
            let rows = first..gate.rows.min(first + piece_outputs);
            let width = rows.len();
            let weights = Weights::new(self, &[(gate, rows.clone()), (up, rows)])?;
            let rows_each = 2 * width / weights.pointers.len();
            for (index, weight) in weights.pointers.iter().enumerate() {
                let pointer = scratch.pointer().offset_bytes(index * rows_each * element_bytes);
                let target = Output { pointer, columns: 2 * width, is_half, is_added: false };
                self.multiply(*weight, rows_each, target)?;
            }
            let products = Products { pointer: scratch.pointer(), is_half, columns: width, first_column: first };
            products::store(gpu, num_tokens, products, true, output)?;
        }
        Ok(())
    }

    /// Rows of a piece.
    fn piece_rows(&self) -> usize {
        let in_cache = PIECE_BYTES / (self.input.columns * size_of::<u16>());
        let num_blocks = BLOCKS_EACH * self.gpu.limits().num_multiprocessors as usize;
        in_cache.max(num_blocks * BLOCK_OUTPUTS / self.num_tokens).next_multiple_of(ROW_BORDER)
    }

    fn multiply(&self, weight: DevicePointer, rows: usize, output: Output) -> Result<(), KernelError> {
        let (element, input) = match self.layer.plain_type() {
            None | Some(GgmlType::F16) => (cudaDataType::CUDA_R_16F, self.input.halves),
            Some(GgmlType::BF16) => (cudaDataType::CUDA_R_16BF, self.input.halves),
            Some(_) => (cudaDataType::CUDA_R_32F, self.input.values),
        };
        let gemm = Gemm {
            rows,
            num_tokens: self.num_tokens,
            columns: self.input.columns,
            element,
            weight,
            input,
            output: output.pointer,
            output_columns: output.columns,
            output_element: if output.is_half { cudaDataType::CUDA_R_16F } else { cudaDataType::CUDA_R_32F },
            is_added: output.is_added,
        };
        // SAFETY: the weights are rows of the layer or of scratch; the caller checked that activations have so many
        // tokens, and scratch was taken for them.
        unsafe { self.blas.launch(&gemm) }
    }
}

/// Where products go.
struct Output {
    pointer: DevicePointer,
    columns: usize,
    is_half: bool,
    is_added: bool,
}

/// Rows of weights that cuBLAS reads.
struct Weights {
    /// Quantized ones one below the other, hence one; others each where they are.
    pointers: Vec<DevicePointer>,
    _scratch: Option<ScratchBuffer>,
}

impl Weights {
    fn new(dense: &Dense<'_>, ranges: &[(&PartView, Range<usize>)]) -> Result<Self, KernelError> {
        let columns = dense.input.columns;
        if dense.layer.plain_type().is_some() {
            let pointers = ranges.iter().map(|(part, rows)| part.row(rows.start, dense.layer.num_tiles(), columns));
            return Ok(Self { pointers: pointers.collect(), _scratch: None });
        }
        let num_rows: usize = ranges.iter().map(|(_, rows)| rows.len()).sum();
        let row_bytes = columns * size_of::<u16>();
        // The last group of a part may reach past its rows.
        let scratch = ScratchBuffer::new(dense.gpu, (num_rows + GROUP_ROWS) * row_bytes)?;
        let mut target = scratch.pointer();
        for (part, rows) in ranges {
            let tiles = part.row(rows.start, dense.layer.num_tiles(), columns);
            if let Format::Tiles(layout) = part.format {
                let num_groups = rows.len().div_ceil(GROUP_ROWS);
                dequantize(dense, layout, tiles, num_groups, target)?;
            }
            target = target.offset_bytes(rows.len() * row_bytes);
        }
        Ok(Self { pointers: vec![scratch.pointer()], _scratch: Some(scratch) })
    }
}

fn dequantize(
    dense: &Dense<'_>,
    layout: Layout,
    tiles: DevicePointer,
    num_groups: usize,
    target: DevicePointer,
) -> Result<(), KernelError> {
    let (num_tiles, columns) = (dense.layer.num_tiles(), dense.input.columns);
    let kernel = dense.gpu.kernel(&SOURCE, &[format!("-DFORMATS={}", layout.name)], "dequantize")?;
    let grid = [num_tiles.div_ceil(BLOCK_TILES) as u32, num_groups as u32, 1];
    let launch = Launch { grid, ..Launch::blocks(0, NUM_THREADS) };
    let arguments = [tiles.into(), (num_tiles as u32).into(), (columns as u32).into(), target.into()];
    // SAFETY: the kernel's arguments; the part has so many groups, and the scratch room for their rows.
    unsafe { kernel.launch(dense.gpu, launch, &arguments) }
}
