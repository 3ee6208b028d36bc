//! Repacking: from the checkpoint's rows to row groups in the layout of `format`.
//! For: `CpuDevice::linear`.
//! Invariant: group by group, so that beside the packed matrix only the host's copy of it is alive.

use half::f16;
use lockstep_formats::GgmlType;

use super::format::{BLOCK, GROUP, SUPER, ScaleKind, group_bytes, quant_bytes};
use crate::{
    KernelError,
    cpu::{memory::AlignedBuffer, team::Team},
    ops::HostMatrix,
    quant::{BlockParts, Encoding, planes},
};

/// A matrix in row groups: one part of a linear layer.
pub(super) struct PackedMatrix {
    pub(super) ggml_type: GgmlType,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Its first row in the output of the layer.
    pub(super) first_row: usize,
    group_bytes: usize,
    data: AlignedBuffer,
}

impl PackedMatrix {
    /// Repacks a matrix, all threads side by side.
    pub(super) fn new(team: &Team, matrix: HostMatrix, first_row: usize) -> Result<Self, KernelError> {
        let row_bytes = matrix.row_bytes()?;
        let HostMatrix { ggml_type, rows, columns, bytes } = matrix;
        let group_bytes = group_bytes_of(ggml_type, columns);
        let num_groups = rows.div_ceil(GROUP);
        let mut data = AlignedBuffer::zeroed(num_groups * group_bytes)?;
        if !data.bytes().is_empty() && row_bytes > 0 {
            let chunk = (1_usize << 16).div_ceil(group_bytes);
            team.for_rows(data.bytes_mut(), group_bytes, chunk, &|first_group, groups| {
                for (index, group) in groups.chunks_exact_mut(group_bytes).enumerate() {
                    let start = (first_group + index) * GROUP * row_bytes;
                    let end = bytes.len().min(start + GROUP * row_bytes);
                    pack_group(ggml_type, columns, &bytes[start..end], group);
                }
            });
        }
        Ok(Self { ggml_type, rows, columns, first_row, group_bytes, data })
    }

    pub(super) fn num_groups(&self) -> usize {
        self.rows.div_ceil(GROUP)
    }

    pub(super) fn group(&self, index: usize) -> &[u8] {
        &self.data.bytes()[index * self.group_bytes..(index + 1) * self.group_bytes]
    }

    pub(super) fn num_bytes(&self) -> usize {
        self.data.bytes().len()
    }
}

/// Bytes of a packed row group, a multiple of 64.
fn group_bytes_of(ggml_type: GgmlType, columns: usize) -> usize {
    match Encoding::of(ggml_type) {
        None => (GROUP * columns * ggml_type.block_bytes()).next_multiple_of(64),
        Some(encoding) => group_bytes(usize::from(encoding.bits), ScaleKind::of(ggml_type), columns),
    }
}

/// Packs up to 16 rows into a zeroed group.
fn pack_group(ggml_type: GgmlType, columns: usize, rows: &[u8], group: &mut [u8]) {
    let row_bytes = ggml_type.bytes_of(columns).unwrap_or(rows.len());
    let Some(encoding) = Encoding::of(ggml_type) else {
        return match ggml_type.block_bytes() {
            2 => interleave_rows::<2>(rows, row_bytes, group),
            _ => interleave_rows::<4>(rows, row_bytes, group),
        };
    };
    let bits = usize::from(encoding.bits);
    let block_bytes = quant_bytes(bits);
    let (quants, scales) = group.split_at_mut(columns / BLOCK * block_bytes);
    let blocks_each = ggml_type.block_elements() / BLOCK;
    for (row, bytes) in rows.chunks_exact(row_bytes).enumerate() {
        for (index, bytes) in bytes.chunks_exact(ggml_type.block_bytes()).enumerate() {
            let parts = BlockParts::read(ggml_type, bytes);
            let targets = quants[index * blocks_each * block_bytes..].chunks_exact_mut(block_bytes);
            for (target, source) in targets.zip(parts.quants.as_chunks::<BLOCK>().0.iter().take(blocks_each)) {
                let put = |plane, word: u32| target[64 * plane + 4 * row..][..4].copy_from_slice(&word.to_le_bytes());
                planes(bits, source, put);
            }
            pack_scales(ScaleKind::of(ggml_type), row, index, blocks_each, &parts, scales);
        }
    }
}

/// Packs up to 16 rows of values of `SIZE` bytes, in stretches of columns that stay in the first-level cache.
fn interleave_rows<const SIZE: usize>(rows: &[u8], row_bytes: usize, group: &mut [u8]) {
    const STRETCH: usize = 64;
    let columns = group.as_chunks_mut::<SIZE>().0.chunks_mut(GROUP * STRETCH);
    for (index, stretch) in columns.enumerate() {
        for (row, values) in rows.chunks_exact(row_bytes).enumerate() {
            let values = values.as_chunks::<SIZE>().0.iter().skip(index * STRETCH);
            stretch.iter_mut().skip(row).step_by(GROUP).zip(values).for_each(|(target, value)| *target = *value);
        }
    }
}

/// Packs the scales of one row's file block, which is block `index` of its row and `blocks_each` blocks of 32 long.
fn pack_scales(kind: ScaleKind, row: usize, index: usize, blocks_each: usize, parts: &BlockParts, scales: &mut [u8]) {
    let (_, unit_bytes) = kind.unit();
    let mut put = |at: usize, bytes: &[u8]| scales[at..at + bytes.len()].copy_from_slice(bytes);
    // Exact: `d` and `m` were f16 in the file (but for Q8_K).
    let half = |value: f32| f16::from_f32(value).to_le_bytes();
    let (d, m) = (half(parts.d), half(parts.m));
    let unit = index * unit_bytes;
    match kind {
        ScaleKind::Half => put(unit + 2 * row, &d),
        ScaleKind::HalfMin => {
            put(unit + 2 * row, &d);
            put(unit + 2 * GROUP + 2 * row, &m);
        }
        ScaleKind::Single => {
            for block in 0..blocks_each {
                put((index * blocks_each + block) * unit_bytes + 4 * row, &parts.d.to_le_bytes());
            }
        }
        ScaleKind::SixBit => {
            put(unit + 2 * row, &d);
            put(unit + 2 * GROUP + 2 * row, &m);
            for sub in 0..SUPER {
                let at = unit + 4 * GROUP + 2 * GROUP * sub + row;
                put(at, &[parts.scales[sub] as u8]);
                put(at + GROUP, &[parts.mins[sub]]);
            }
        }
        ScaleKind::FourBit => {
            put(unit + 2 * row, &d);
            put(unit + 2 * GROUP + 2 * row, &m);
            for sub in 0..2 * SUPER {
                let both = parts.scales[sub] as u8 | parts.mins[sub] << 4;
                put(unit + 4 * GROUP + GROUP * sub + row, &[both]);
            }
        }
        ScaleKind::Signed => {
            put(unit + 2 * row, &d);
            for sub in 0..2 * SUPER {
                put(unit + 2 * GROUP + GROUP * sub + row, &[parts.scales[sub] as u8]);
            }
        }
    }
}
