//! A GGUF block taken apart: `value = d * scale * (quant - offset) + m * min`, for every quantized type.
//! For: repacking into a device's layout, and reference dequantization.
//! Invariant: `BlockParts` loses nothing that the file's block says about its values.

use half::{bf16, f16};
use lockstep_formats::GgmlType;

/// Elements of the largest block.
const MAX_BLOCK: usize = 256;
/// Sub-blocks of the largest block.
const MAX_SUB_BLOCKS: usize = 16;

/// How a quantized type stores a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoding {
    /// Bits of an unsigned quant.
    pub bits: u8,
    /// Subtracted from each quant: 0 or a power of two.
    pub offset: u8,
    /// Elements that share a scale: 16 or 32.
    pub sub_block: usize,
}

impl Encoding {
    /// The encoding of a quantized type, or `None` for F32, F16 and BF16.
    pub fn of(ggml_type: GgmlType) -> Option<Self> {
        let (bits, offset, sub_block) = match ggml_type {
            GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => return None,
            GgmlType::Q4_0 => (4, 8, 32),
            GgmlType::Q4_1 | GgmlType::Q4_K => (4, 0, 32),
            GgmlType::Q5_0 => (5, 16, 32),
            GgmlType::Q5_1 | GgmlType::Q5_K => (5, 0, 32),
            GgmlType::Q8_0 | GgmlType::Q8_1 | GgmlType::Q8_K => (8, 128, 32),
            GgmlType::Q2_K => (2, 0, 16),
            GgmlType::Q3_K => (3, 4, 16),
            GgmlType::Q6_K => (6, 32, 16),
        };
        Some(Self { bits, offset, sub_block })
    }
}

/// One block of a quantized type. Types without sub-block scales or minima have 1 there.
#[derive(Clone, Debug)]
pub struct BlockParts {
    /// Unsigned quants, the first `block_elements` of them.
    pub quants: [u8; MAX_BLOCK],
    /// Scale of the block.
    pub d: f32,
    /// Factor of the minima, with the sign that makes them summands; 0 for types without minima.
    pub m: f32,
    /// Scale of each sub-block.
    pub scales: [i8; MAX_SUB_BLOCKS],
    /// Minimum of each sub-block.
    pub mins: [u8; MAX_SUB_BLOCKS],
}

impl BlockParts {
    /// Takes one block apart. `bytes` are `block_bytes` of the type; missing ones read as 0.
    pub fn read(ggml_type: GgmlType, bytes: &[u8]) -> Self {
        let mut parts =
            Self { quants: [0; MAX_BLOCK], d: 0.0, m: 0.0, scales: [1; MAX_SUB_BLOCKS], mins: [1; MAX_SUB_BLOCKS] };
        parts.read_into(ggml_type, bytes);
        parts
    }

    fn read_into(&mut self, ggml_type: GgmlType, bytes: &[u8]) {
        let block = Bytes(bytes);
        match ggml_type {
            GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => {}
            GgmlType::Q4_0 => self.read_nibbles(block.f16(0), 0.0, block.tail(2), 0),
            GgmlType::Q4_1 => self.read_nibbles(block.f16(0), block.f16(2), block.tail(4), 0),
            GgmlType::Q5_0 => self.read_nibbles(block.f16(0), 0.0, block.tail(6), block.u32(2)),
            GgmlType::Q5_1 => self.read_nibbles(block.f16(0), block.f16(2), block.tail(8), block.u32(4)),
            GgmlType::Q8_0 => self.read_bytes(block.f16(0), block.tail(2)),
            // The second field of Q8_1 is d times the sum of the quants, an aid to the product and no part of the value.
            GgmlType::Q8_1 => self.read_bytes(block.f16(0), block.tail(4)),
            GgmlType::Q8_K => self.read_bytes(f32::from_bits(block.u32(0)), block.tail(4)),
            GgmlType::Q2_K => self.read_q2_k(block),
            GgmlType::Q3_K => self.read_q3_k(block),
            GgmlType::Q4_K => self.read_q4_k(block),
            GgmlType::Q5_K => self.read_q5_k(block),
            GgmlType::Q6_K => self.read_q6_k(block),
        }
    }

    /// Q4_0, Q4_1, Q5_0, Q5_1: byte `i` holds elements `i` and `i + 16`; bit `i` of `high` is the fifth of element `i`.
    fn read_nibbles(&mut self, d: f32, m: f32, quants: Bytes<'_>, high: u32) {
        (self.d, self.m) = (d, m);
        for (index, byte) in quants.array::<16>(0).into_iter().enumerate() {
            self.quants[index] = byte & 15 | (high >> index << 4) as u8 & 16;
            self.quants[index + 16] = byte >> 4 | (high >> (index + 16) << 4) as u8 & 16;
        }
    }

    /// Q8_0, Q8_1, Q8_K: signed bytes.
    fn read_bytes(&mut self, d: f32, quants: Bytes<'_>) {
        self.d = d;
        for (quant, byte) in self.quants.iter_mut().zip(quants.0) {
            *quant = byte ^ 0x80;
        }
    }

    /// Each 32 bytes hold 128 elements: bits `2j..` of byte `i` are element `32j + i`.
    fn read_two_bits(&mut self, quants: Bytes<'_>) {
        let source = quants.array::<64>(0);
        for (part, target) in self.quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (bytes, shift) = (&source[part / 4 * 32..][..32], part % 4 * 2);
            target.iter_mut().zip(bytes).for_each(|(quant, byte)| *quant = byte >> shift & 3);
        }
    }

    /// Each bit of 32 bytes is the next bit of 32 elements: bit `j` of byte `i` becomes bit `to` of element `32j + i`.
    fn read_high_bits(&mut self, bits: Bytes<'_>, to: u32) {
        let source = bits.array::<32>(0);
        for (part, target) in self.quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            target.iter_mut().zip(source).for_each(|(quant, byte)| *quant |= (byte >> part & 1) << to);
        }
    }

    fn read_q2_k(&mut self, block: Bytes<'_>) {
        self.read_two_bits(block.tail(16));
        (self.d, self.m) = (block.f16(80), -block.f16(82));
        for index in 0..16 {
            self.scales[index] = (block.u8(index) & 15) as i8;
            self.mins[index] = block.u8(index) >> 4;
        }
    }

    fn read_q3_k(&mut self, block: Bytes<'_>) {
        self.read_two_bits(block.tail(32));
        self.read_high_bits(block, 2);
        let scales = block.tail(96);
        for index in 0..16 {
            let low = scales.u8(index % 8) >> (index / 8 * 4) & 15;
            let high = scales.u8(8 + index % 4) >> (index / 4 * 2) & 3;
            self.scales[index] = (low | high << 4) as i8 - 32;
        }
        self.d = block.f16(108);
    }

    /// Q4_K and Q5_K: eight scales and eight minima of six bits in twelve bytes.
    fn read_six_bit_scales(&mut self, block: Bytes<'_>) {
        (self.d, self.m) = (block.f16(0), -block.f16(2));
        let packed = block.tail(4);
        for index in 0..4 {
            self.scales[index] = (packed.u8(index) & 63) as i8;
            self.mins[index] = packed.u8(index + 4) & 63;
            self.scales[index + 4] = (packed.u8(index + 8) & 15 | packed.u8(index) >> 6 << 4) as i8;
            self.mins[index + 4] = packed.u8(index + 8) >> 4 | packed.u8(index + 4) >> 6 << 4;
        }
    }

    /// Each 32 bytes hold 64 elements: the low nibbles 32 and the high nibbles the next 32.
    fn read_four_bits(&mut self, quants: Bytes<'_>) {
        let source = quants.array::<128>(0);
        for (part, target) in self.quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (bytes, shift) = (&source[part / 2 * 32..][..32], part % 2 * 4);
            target.iter_mut().zip(bytes).for_each(|(quant, byte)| *quant = byte >> shift & 15);
        }
    }

    fn read_q4_k(&mut self, block: Bytes<'_>) {
        self.read_six_bit_scales(block);
        self.read_four_bits(block.tail(16));
    }

    fn read_q5_k(&mut self, block: Bytes<'_>) {
        self.read_six_bit_scales(block);
        self.read_four_bits(block.tail(48));
        self.read_high_bits(block.tail(16), 4);
    }

    /// Each 64 low bytes and 32 high bytes hold 128 elements.
    fn read_q6_k(&mut self, block: Bytes<'_>) {
        let (low, high) = (block.array::<128>(0), block.array::<64>(128));
        for (part, target) in self.quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let (half, quarter) = (part / 4, part % 4);
            let (low, low_shift) = (&low[half * 64 + quarter % 2 * 32..][..32], quarter / 2 * 4);
            let (high, high_shift) = (&high[half * 32..][..32], quarter * 2);
            for ((quant, low), high) in target.iter_mut().zip(low).zip(high) {
                *quant = low >> low_shift & 15 | (high >> high_shift & 3) << 4;
            }
        }
        for index in 0..16 {
            self.scales[index] = block.u8(192 + index) as i8;
        }
        self.d = block.f16(208);
    }
}

/// Little-endian fields of a block; what lies outside reads as 0.
#[derive(Clone, Copy)]
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn u8(self, index: usize) -> u8 {
        self.0.get(index).copied().unwrap_or(0)
    }

    fn f16(self, index: usize) -> f32 {
        f16::from_le_bytes([self.u8(index), self.u8(index + 1)]).to_f32()
    }

    fn u32(self, index: usize) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|byte| self.u8(index + byte)))
    }

    fn array<const N: usize>(self, start: usize) -> [u8; N] {
        self.0.get(start..).and_then(|rest| rest.first_chunk().copied()).unwrap_or([0; N])
    }

    fn tail(self, start: usize) -> Bytes<'a> {
        Bytes(self.0.get(start..).unwrap_or_default())
    }
}

/// Dequantizes consecutive blocks (`bytes`) to as many values as `output` has room for.
pub fn dequantize(ggml_type: GgmlType, bytes: &[u8], output: &mut [f32]) {
    let blocks = bytes.chunks_exact(ggml_type.block_bytes()).zip(output.chunks_mut(ggml_type.block_elements()));
    for (block, values) in blocks {
        let fields = Bytes(block);
        match (ggml_type, Encoding::of(ggml_type)) {
            (_, Some(encoding)) => {
                let parts = BlockParts::read(ggml_type, block);
                for (index, value) in values.iter_mut().enumerate() {
                    let sub_block = index / encoding.sub_block;
                    let quant = f32::from(i16::from(parts.quants[index]) - i16::from(encoding.offset));
                    let scale = parts.d * f32::from(parts.scales[sub_block]);
                    *value = scale * quant + parts.m * f32::from(parts.mins[sub_block]);
                }
            }
            (GgmlType::F16, _) => values[0] = fields.f16(0),
            (GgmlType::BF16, _) => values[0] = bf16::from_le_bytes([fields.u8(0), fields.u8(1)]).to_f32(),
            _ => values[0] = f32::from_bits(fields.u32(0)),
        }
    }
}
