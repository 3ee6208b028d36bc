//! Repacking: from the checkpoint's blocks to planes of codes, high bits, scales and factors.
//! For: [`linear`](super::linear). The device's half is `wgsl/include/weights.wgsl`.
//! Invariant: what a block says about its values is kept, bit for bit. A row's planes follow those of the row before
//! without a gap, so the blocks of a matrix have one number each.

use half::f16;
use lockstep_formats::GgmlType;
use rayon::prelude::*;

use crate::quant::{ACTIVATION_BLOCK, BlockParts, Encoding, planes};

/// Blocks that share a word of factors.
const SUPER_BLOCK: usize = 8;

/// How scales are stored; the numbers are those of the shader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scales {
    /// f16 d of each block.
    Half = 0,
    /// f16 d and m of each block.
    HalfMin = 1,
    /// f32 d of each block.
    Single = 2,
    /// A byte each for scale and minimum of a block.
    Bytes = 3,
    /// Four bits each for scale and minimum of each half.
    Nibbles = 4,
    /// A signed byte for the scale of each half.
    Signed = 5,
}

/// Layout of a quantized type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    bits: usize,
    offset: u8,
    scales: Scales,
}

/// Words of the planes, in order.
pub(super) type Planes<T> = [T; 4];

impl Layout {
    /// That of a type, or `None` for F32, F16 and BF16.
    pub fn of(ggml_type: GgmlType) -> Option<Self> {
        let encoding = Encoding::of(ggml_type)?;
        let scales = match ggml_type {
            GgmlType::Q4_1 | GgmlType::Q5_1 => Scales::HalfMin,
            GgmlType::Q8_K => Scales::Single,
            GgmlType::Q4_K | GgmlType::Q5_K => Scales::Bytes,
            GgmlType::Q2_K => Scales::Nibbles,
            GgmlType::Q3_K | GgmlType::Q6_K => Scales::Signed,
            _ => Scales::Half,
        };
        // Codes of 8 bits are stored signed.
        let offset = if encoding.bits == 8 { 0 } else { encoding.offset };
        Some(Self { bits: encoding.bits.into(), offset, scales })
    }

    /// Options of the shader's variant.
    pub fn options(self) -> [(&'static str, u32); 6] {
        [
            ("BITS", self.bits as u32),
            ("OFFSET", u32::from(self.offset)),
            ("SCALES", self.scales as u32),
            ("FEW_BITS", u32::from(self.bits < 4)),
            ("SIX_BITS", u32::from(self.bits == 6)),
            ("EIGHT_BITS", u32::from(self.bits == 8)),
        ]
    }

    /// Words of each plane for so many blocks.
    pub(super) fn plane_words(self, num_blocks: usize) -> Planes<usize> {
        let codes = match self.bits {
            8 => 8,
            4.. => 4,
            _ => 2,
        };
        let high = match self.bits {
            6 => 2,
            3 | 5 => 1,
            _ => 0,
        };
        let fine = match self.scales {
            Scales::HalfMin | Scales::Single => num_blocks,
            _ => num_blocks.div_ceil(2),
        };
        let coarse = if self.has_factors() { num_blocks.div_ceil(SUPER_BLOCK) } else { 0 };
        [codes * num_blocks, high * num_blocks, fine, coarse]
    }

    /// Whether scales are small numbers of eight blocks' common factors.
    pub fn has_factors(self) -> bool {
        matches!(self.scales, Scales::Bytes | Scales::Nibbles | Scales::Signed)
    }

    /// The planes of rows `rows` of matrices that are stacked.
    pub(super) fn pack(self, rows: &[(GgmlType, &[u8])], columns: usize) -> Planes<Vec<u32>> {
        let row_blocks = columns / ACTIVATION_BLOCK;
        let num_blocks = rows.len() * row_blocks;
        let [codes, high, fine, coarse] = self.plane_words(num_blocks);
        let (code_words, high_words) = (codes / num_blocks, high / num_blocks);
        let (mut codes, mut high) = (vec![0; codes], vec![0; high]);
        // A word each, of which the 16-bit ones are joined below.
        let (mut singles, mut factors) = (vec![0_u32; num_blocks], vec![0; coarse]);
        let row_factors = coarse / rows.len();
        let mut high_rows: Vec<&mut [u32]> = split(&mut high, row_blocks * high_words, rows.len());
        let mut factor_rows: Vec<&mut [u32]> = split(&mut factors, row_factors, rows.len());
        codes
            .par_chunks_mut(row_blocks * code_words)
            .zip(high_rows.par_iter_mut())
            .zip(singles.par_chunks_mut(row_blocks))
            .zip(factor_rows.par_iter_mut())
            .zip(rows)
            .for_each(|((((codes, high), singles), factors), (ggml_type, bytes))| {
                let blocks = bytes.chunks_exact(ggml_type.block_bytes());
                let step = ggml_type.block_elements() / ACTIVATION_BLOCK;
                for (index, bytes) in blocks.enumerate() {
                    let parts = BlockParts::read(*ggml_type, bytes);
                    for part in 0..step {
                        let block = index * step + part;
                        let codes = &mut codes[block * code_words..][..code_words];
                        let high = &mut high[block * high_words..][..high_words];
                        self.pack_codes(&parts, part, codes, high);
                        singles[block] = self.pack_scale(&parts, part);
                    }
                    if self.has_factors() {
                        factors[index] = pair(parts.d, parts.m);
                    }
                }
            });
        if fine < num_blocks {
            singles = singles.chunks(2).map(|pair| pair[0] | pair.get(1).unwrap_or(&0) << 16).collect();
        }
        [codes, high, singles, factors]
    }

    fn pack_codes(self, parts: &BlockParts, part: usize, codes: &mut [u32], high: &mut [u32]) {
        let mut quants = [0; ACTIVATION_BLOCK];
        quants.copy_from_slice(&parts.quants[part * ACTIVATION_BLOCK..][..ACTIVATION_BLOCK]);
        if self.bits == 8 {
            quants.iter_mut().for_each(|quant| *quant ^= 0x80);
        }
        planes(self.bits, &quants, |index, word| match index.checked_sub(codes.len()) {
            None => codes[index] = word,
            Some(index) => high[index] = word,
        });
    }

    fn pack_scale(self, parts: &BlockParts, part: usize) -> u32 {
        let byte = |value: i8| u32::from(value.cast_unsigned());
        let halves = |values: [u32; 2]| values[0] | values[1] << 8;
        match self.scales {
            Scales::Half => u32::from(f16::from_f32(parts.d).to_bits()),
            Scales::HalfMin => pair(parts.d, parts.m),
            Scales::Single => parts.d.to_bits(),
            Scales::Bytes => halves([byte(parts.scales[part]), u32::from(parts.mins[part])]),
            Scales::Nibbles => halves(
                [0, 1].map(|half| byte(parts.scales[2 * part + half]) | u32::from(parts.mins[2 * part + half]) << 4),
            ),
            Scales::Signed => halves([0, 1].map(|half| byte(parts.scales[2 * part + half]))),
        }
    }
}

/// Two f16, which the values are.
fn pair(first: f32, second: f32) -> u32 {
    u32::from(f16::from_f32(first).to_bits()) | u32::from(f16::from_f32(second).to_bits()) << 16
}

/// `count` rows of `len` words, which may be none.
fn split(mut words: &mut [u32], len: usize, count: usize) -> Vec<&mut [u32]> {
    let mut rows = Vec::with_capacity(count);
    for _ in 0..count {
        let (row, rest) = words.split_at_mut(len);
        rows.push(row);
        words = rest;
    }
    rows
}
