//! Quantized weights as the CUDA kernels read them; `cuda/include/weights.cuh` describes the layout.
//! For: `linear`, which packs matrices when a model is loaded.
//! Invariant: a tile is 8 rows × 256 columns, takes (nearly) the bytes of its blocks in the file, and ends on a border of
//! 32 bytes. Rows and columns past the end are zeros.

use half::f16;
use lockstep_formats::GgmlType;

use crate::quant::{ACTIVATION_BLOCK, BlockParts, Encoding, planes};

/// Rows of a group.
pub(super) const GROUP_ROWS: usize = 8;
/// Columns of a tile.
pub(super) const TILE_COLUMNS: usize = 256;
/// Threads of a warp: each holds two blocks of 32 columns.
const WARP: usize = 32;

/// How a tile stores its scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scales {
    Half,
    HalfMin,
    Single,
    SixBit,
    FourBit,
    Signed,
}

/// A quantized format of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Its name in the kernels.
    pub(super) name: &'static str,
    bits: usize,
    scales: Scales,
}

impl Layout {
    /// Of a quantized type; `None` for F32, F16 and BF16.
    pub(super) fn of(ggml_type: GgmlType) -> Option<Self> {
        let bits = usize::from(Encoding::of(ggml_type)?.bits);
        let (name, scales) = match ggml_type {
            // What tells Q8_1 from Q8_0 is no part of the values.
            GgmlType::Q8_1 => ("Q8_0", Scales::Half),
            GgmlType::Q4_1 | GgmlType::Q5_1 => (ggml_type.name(), Scales::HalfMin),
            GgmlType::Q8_K => (ggml_type.name(), Scales::Single),
            GgmlType::Q4_K | GgmlType::Q5_K => (ggml_type.name(), Scales::SixBit),
            GgmlType::Q2_K => (ggml_type.name(), Scales::FourBit),
            GgmlType::Q3_K | GgmlType::Q6_K => (ggml_type.name(), Scales::Signed),
            _ => (ggml_type.name(), Scales::Half),
        };
        Some(Self { name, bits, scales })
    }

    /// Bytes of a tile.
    pub(super) fn tile_bytes(self) -> usize {
        let end = match self.scales {
            Scales::Half | Scales::SixBit => self.factors_at(),
            Scales::HalfMin => self.scales_at() + 8 * WARP,
            Scales::Single => self.scales_at() + 4 * GROUP_ROWS,
            Scales::FourBit => self.factors_at() + 4 * GROUP_ROWS,
            Scales::Signed => self.factors_at() + 2 * GROUP_ROWS,
        };
        end.next_multiple_of(32)
    }

    fn scales_at(self) -> usize {
        self.bits * GROUP_ROWS * TILE_COLUMNS / 8
    }

    fn factors_at(self) -> usize {
        self.scales_at() + 4 * WARP
    }

    /// Packs up to 8 rows of a matrix into a zeroed group of tiles.
    pub(super) fn pack_group(self, ggml_type: GgmlType, row_bytes: usize, rows: &[u8], group: &mut [u8]) {
        let blocks_each = ggml_type.block_elements() / ACTIVATION_BLOCK;
        let tile_bytes = self.tile_bytes();
        for (row, bytes) in rows.chunks_exact(row_bytes).enumerate() {
            for (index, bytes) in bytes.chunks_exact(ggml_type.block_bytes()).enumerate() {
                let parts = BlockParts::read(ggml_type, bytes);
                for part in 0..blocks_each {
                    let block = index * blocks_each + part;
                    let tile = &mut group[block / 8 * tile_bytes..][..tile_bytes];
                    self.pack_block(row, block % 8, part, &parts, tile);
                }
            }
        }
    }

    /// Packs 32 columns, number `part` of a block of the file, as block `block` of a row of a tile.
    fn pack_block(self, row: usize, block: usize, part: usize, parts: &BlockParts, tile: &mut [u8]) {
        let (half, lane) = (block / 4, 4 * row + block % 4);
        let Some(source) = parts.quants.as_chunks::<ACTIVATION_BLOCK>().0.get(part) else { return };
        let sign = if self.bits == 8 { 0x80 } else { 0 };
        let quants = std::array::from_fn(|place| source[element_at(place)] ^ sign);
        let (bits, low) = (self.bits, 16 * lane);
        planes(bits, &quants, |plane, word| {
            let at = match (bits, plane) {
                (8, _) => (2 * half + plane / 4) * 16 * WARP + low + 4 * (plane % 4),
                (4..=6, 0..4) => half * 16 * WARP + low + 4 * plane,
                (5, _) => 32 * WARP + 8 * lane + 4 * half,
                (6, _) => 32 * WARP + low + 8 * half + 4 * (plane - 4),
                (_, 0..2) => low + 8 * half + 4 * plane,
                _ => 16 * WARP + 8 * lane + 4 * half,
            };
            tile[at..at + 4].copy_from_slice(&word.to_le_bytes());
        });
        self.pack_scales(row, block, part, parts, tile);
    }

    fn pack_scales(self, row: usize, block: usize, part: usize, parts: &BlockParts, tile: &mut [u8]) {
        let (half, lane) = (block / 4, 4 * row + block % 4);
        let (scales_at, factors_at) = (self.scales_at(), self.factors_at());
        let mut put = |at: usize, bytes: &[u8]| tile[at..at + bytes.len()].copy_from_slice(bytes);
        // Exact: `d` and `m` were f16 in the file (but for Q8_K).
        let [[d0, d1], [m0, m1]] = [parts.d, parts.m].map(|value| f16::from_f32(value).to_le_bytes());
        match self.scales {
            Scales::Half => put(scales_at + 4 * lane + 2 * half, &[d0, d1]),
            Scales::HalfMin => put(scales_at + 8 * lane + 4 * half, &[d0, d1, m0, m1]),
            Scales::Single => put(scales_at + 4 * row, &parts.d.to_le_bytes()),
            Scales::SixBit => {
                let header = scales_at + 16 * row;
                put(header, &[d0, d1, m0, m1]);
                let at = header + 4 + 3 * (block % 4);
                let [first, second] = [part % 4, part % 4 + 4]
                    .map(|block| u32::from(parts.scales[block] as u8) | u32::from(parts.mins[block]) << 6);
                put(at, &(first | second << 12).to_le_bytes()[..3]);
            }
            Scales::FourBit => {
                let both = |index: usize| parts.scales[index] as u8 | parts.mins[index] << 4;
                put(scales_at + 4 * lane + 2 * half, &[both(2 * part), both(2 * part + 1)]);
                put(factors_at + 4 * row, &[d0, d1, m0, m1]);
            }
            Scales::Signed => {
                let scales = [parts.scales[2 * part] as u8, parts.scales[2 * part + 1] as u8];
                put(scales_at + 4 * lane + 2 * half, &scales);
                put(factors_at + 2 * row, &[d0, d1]);
            }
        }
    }
}

/// The element of a block that is byte `place % 4` of word `place / 4`.
fn element_at(place: usize) -> usize {
    place / 16 * 16 + place % 16 / 4 * 2 + place % 4 / 2 * 8 + place % 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_take_the_bytes_of_the_file() {
        for ggml_type in GgmlType::all() {
            let Some(layout) = Layout::of(ggml_type) else { continue };
            let in_file = ggml_type.bytes_of(TILE_COLUMNS).unwrap() * GROUP_ROWS;
            let got = layout.tile_bytes();
            // Q3_K's scales grow from 6 bits to 8, and some tiles are padded.
            assert!(got <= in_file + in_file / 16, "{ggml_type}: {got} bytes, {in_file} in the file");
            assert!(ggml_type != GgmlType::Q4_K || got == in_file, "{got}");
        }
    }
}
