//! [`WebGpuLinear`]: a linear layer or an embedding table in the memory of a GPU.
//! For: the matmul and the embedding.
//! Invariant: the parts hold all rows in order, each row in one part; no part is larger than a binding may be.

use lockstep_formats::{Dtype, GgmlType};

use super::layout::Layout;
use crate::{
    KernelError,
    ops::{HostMatrix, matmul::stacked_columns},
    webgpu::{Gpu, commands::Binding},
};

/// Planes begin at multiples of it, as bindings must.
const ALIGNMENT: u64 = 256;

/// How a part is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Quantized, in planes.
    Planes(Layout),
    /// Values of 16 or 32 bits, rows padded to 16 bytes.
    Plain(Dtype),
}

/// Rows of one format.
#[derive(Debug)]
pub struct Part {
    /// Their format.
    pub format: Format,
    /// How many there are.
    pub rows: usize,
    /// Rows of the layer before them.
    pub first_row: usize,
    /// Their planes: codes, high bits, scales, factors; of values that are not quantized the first is all.
    pub planes: [Binding; 4],
}

/// A row as the checkpoint stores it.
pub(super) type Row<'a> = (GgmlType, &'a [u8]);

/// Matrices of equal columns, stacked.
#[derive(Debug)]
pub struct WebGpuLinear {
    parts: Vec<Part>,
    rows: usize,
    columns: usize,
}

impl Format {
    fn of(ggml_type: GgmlType) -> Self {
        match (Layout::of(ggml_type), ggml_type) {
            (Some(layout), _) => Self::Planes(layout),
            (None, GgmlType::F16) => Self::Plain(Dtype::F16),
            (None, GgmlType::BF16) => Self::Plain(Dtype::Bf16),
            (None, _) => Self::Plain(Dtype::F32),
        }
    }
}

impl WebGpuLinear {
    /// Packs the matrices.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if lengths disagree, [`KernelError::Device`] if memory is short.
    pub fn new(gpu: &Gpu, matrices: &[HostMatrix]) -> Result<Self, KernelError> {
        let columns = stacked_columns(matrices)?;
        // Neighbours of one format are one part.
        let mut runs: Vec<(Format, Vec<Row<'_>>)> = Vec::new();
        for matrix in matrices {
            let format = Format::of(matrix.ggml_type);
            let rows = rows_of(matrix)?;
            match runs.last_mut() {
                Some((last, run)) if *last == format => run.extend(rows),
                _ => runs.push((format, rows)),
            }
        }
        let mut linear = Self { parts: Vec::new(), rows: 0, columns };
        for (format, rows) in &runs {
            for rows in rows.chunks(most_rows(gpu, *format, columns)?) {
                linear.parts.push(Part::new(gpu, *format, rows, columns, linear.rows)?);
                linear.rows += rows.len();
            }
        }
        Ok(linear)
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The parts in the order of their rows.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Bytes that the weights take.
    pub fn num_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.planes[0].buffer.size()).sum()
    }
}

/// The rows of a matrix, each with its type.
fn rows_of(matrix: &HostMatrix) -> Result<Vec<Row<'_>>, KernelError> {
    let row_bytes = matrix.row_bytes()?;
    Ok(matrix.bytes.chunks_exact(row_bytes).map(|row| (matrix.ggml_type, row)).collect())
}

/// Rows whose planes a binding holds, an even number so that words of 16-bit scales are not cut.
fn most_rows(gpu: &Gpu, format: Format, columns: usize) -> Result<usize, KernelError> {
    let two_rows = match format {
        Format::Planes(layout) => {
            layout.plane_words(2 * columns / crate::quant::ACTIVATION_BLOCK).iter().sum::<usize>()
        }
        Format::Plain(dtype) => 2 * plain_row_bytes(dtype, columns) / size_of::<u32>(),
    };
    let limit = gpu.max_binding_bytes().saturating_sub(4 * ALIGNMENT);
    let pairs = limit / (two_rows * size_of::<u32>()) as u64;
    if pairs == 0 {
        return Err(gpu.error(format!("two rows of {columns} columns are larger than the {limit} bytes of a binding")));
    }
    Ok(2 * pairs as usize)
}

fn plain_row_bytes(dtype: Dtype, columns: usize) -> usize {
    (columns * dtype.element_bytes()).next_multiple_of(16)
}

impl Part {
    fn new(gpu: &Gpu, format: Format, rows: &[Row<'_>], columns: usize, first_row: usize) -> Result<Self, KernelError> {
        let planes = match format {
            Format::Planes(layout) => layout.pack(rows, columns),
            Format::Plain(dtype) => {
                let mut words = Vec::with_capacity(rows.len() * plain_row_bytes(dtype, columns) / 4);
                for (_, row) in rows {
                    let mut padded = row.to_vec();
                    padded.resize(plain_row_bytes(dtype, columns), 0);
                    words.extend(padded.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)));
                }
                [words, vec![], vec![], vec![]]
            }
        };
        let planes = upload(gpu, &planes)?;
        Ok(Self { format, rows: rows.len(), first_row, planes })
    }
}

/// Planes side by side in one buffer. One that is empty is bound to the first: nothing reads it.
fn upload(gpu: &Gpu, planes: &[Vec<u32>; 4]) -> Result<[Binding; 4], KernelError> {
    let bytes_of = |plane: &Vec<u32>| size_of_val(plane.as_slice()) as u64;
    let num_bytes = planes.iter().map(|plane| bytes_of(plane).next_multiple_of(ALIGNMENT)).sum();
    let buffer = gpu.buffer("weights", num_bytes)?;
    let mut offset = 0;
    let bindings = planes.each_ref().map(|plane| {
        let num_bytes = bytes_of(plane);
        if num_bytes == 0 {
            return Binding { buffer: buffer.clone(), offset: 0, num_bytes: ALIGNMENT.min(buffer.size()) };
        }
        gpu.queue.write_buffer(&buffer, offset, bytemuck::cast_slice(plane));
        let binding = Binding { buffer: buffer.clone(), offset, num_bytes: num_bytes.next_multiple_of(16) };
        offset += num_bytes.next_multiple_of(ALIGNMENT);
        binding
    });
    gpu.finish_uploads()?;
    Ok(bindings)
}
