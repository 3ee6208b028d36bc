//! Random blocks of every element type with a chosen spread.
//! For: the streaming writer.
//! Invariant: dequantized values are finite, centred on 0, and have the standard deviation asked for; the fields that a
//! format derives from others (sums) agree with them.
//! How: a buffer of random bits is all quants; then the scales of each block are set for the spread of uniform quants.

use half::{bf16, f16};
use lockstep_formats::GgmlType;

/// Different values of a random float.
const NUM_LEVELS: usize = 4096;

/// Random 64-bit numbers, one from each position of a counter (SplitMix64).
pub(super) struct Random(u64);

impl Random {
    /// A stream of its own for each seed and number.
    pub(super) fn new(seed: u64, stream: u64) -> Self {
        Self(mix(mix(seed) ^ stream))
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let random = self.next().to_le_bytes();
            chunk.copy_from_slice(&random[..chunk.len()]);
        }
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }
}

fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Fills `bytes`, whole blocks of `ggml_type`, with values of standard deviation `deviation`.
pub(super) fn fill_blocks(bytes: &mut [u8], ggml_type: GgmlType, deviation: f32, random: &mut Random) {
    random.fill(bytes);
    let blocks = bytes.chunks_exact_mut(ggml_type.block_bytes());
    // Root mean square of uniform quants of so many values about their centre, and about the integer above it.
    let centred = |values: f32| ((values * values - 1.0) / 12.0).sqrt();
    let offset = |values: f32| ((values * values - 1.0) / 12.0 + 0.25).sqrt();
    match ggml_type {
        GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => fill_floats(bytes, ggml_type, deviation),
        GgmlType::Q4_0 => blocks.for_each(|block| put_signed(block, 0, deviation / offset(16.0))),
        GgmlType::Q5_0 => blocks.for_each(|block| put_signed(block, 0, deviation / offset(32.0))),
        GgmlType::Q8_0 => blocks.for_each(|block| put_signed(block, 0, deviation / offset(256.0))),
        GgmlType::Q4_1 => {
            let scale = deviation / centred(16.0);
            blocks.for_each(|block| put_pair(block, 0, scale, -7.5 * scale));
        }
        GgmlType::Q5_1 => {
            let scale = deviation / centred(32.0);
            blocks.for_each(|block| put_pair(block, 0, scale, -15.5 * scale));
        }
        GgmlType::Q8_1 => blocks.for_each(|block| put_q8_1(block, deviation / offset(256.0))),
        GgmlType::Q8_K => blocks.for_each(|block| put_q8_k(block, deviation / offset(256.0))),
        GgmlType::Q2_K => blocks.for_each(|block| put_q2_k(block, deviation / centred(4.0))),
        // Scales are signed here, so that random bits serve for them too.
        GgmlType::Q3_K => blocks.for_each(|block| put_signed(block, 108, deviation / (offset(8.0) * offset(64.0)))),
        GgmlType::Q6_K => blocks.for_each(|block| put_signed(block, 208, deviation / (offset(64.0) * offset(256.0)))),
        GgmlType::Q4_K => blocks.for_each(|block| put_q45_k(block, deviation / centred(16.0), 7.5)),
        GgmlType::Q5_K => blocks.for_each(|block| put_q45_k(block, deviation / centred(32.0), 15.5)),
    }
}

/// Uniform floats out of the random bits that are there.
fn fill_floats(bytes: &mut [u8], ggml_type: GgmlType, deviation: f32) {
    let width = deviation * 12f32.sqrt();
    let uniform = |index: usize| ((index as f32 + 0.5) / NUM_LEVELS as f32 - 0.5) * width;
    let level = |chunk: &[u8]| usize::from(u16::from_le_bytes([chunk[0], chunk[1]])) % NUM_LEVELS;
    if ggml_type == GgmlType::F32 {
        bytes.as_chunks_mut::<4>().0.iter_mut().for_each(|chunk| *chunk = uniform(level(chunk)).to_le_bytes());
        return;
    }
    // Converting each value costs many times the look-up.
    let halves: Vec<[u8; 2]> = (0..NUM_LEVELS)
        .map(|index| match ggml_type {
            GgmlType::F16 => f16::from_f32(uniform(index)).to_le_bytes(),
            _ => bf16::from_f32(uniform(index)).to_le_bytes(),
        })
        .collect();
    bytes.as_chunks_mut::<2>().0.iter_mut().for_each(|chunk| *chunk = halves[level(chunk)]);
}

fn put_f16(block: &mut [u8], at: usize, value: f32) {
    block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

/// A scale of random sign: quants reach one further down than up, and the signs take that off the mean.
fn put_signed(block: &mut [u8], at: usize, scale: f32) {
    let sign = if block[at] & 1 == 0 { 1.0 } else { -1.0 };
    put_f16(block, at, sign * scale);
}

fn put_pair(block: &mut [u8], at: usize, first: f32, second: f32) {
    put_f16(block, at, first);
    put_f16(block, at + 2, second);
}

/// Scale, scale times the sum of quants, 32 quants.
fn put_q8_1(block: &mut [u8], scale: f32) {
    let sum: i32 = block[4..36].iter().map(|&quant| i32::from(quant as i8)).sum();
    // The sum has to be that of the scale as stored.
    let stored = f16::from_f32(scale).to_f32();
    put_pair(block, 0, scale, stored * sum as f32);
}

/// Scale (32-bit), 256 quants, the sum of each 16 quants.
fn put_q8_k(block: &mut [u8], scale: f32) {
    let sign = if block[0] & 1 == 0 { 1.0 } else { -1.0 };
    block[..4].copy_from_slice(&(sign * scale).to_le_bytes());
    let (quants, sums) = block[4..].split_at_mut(256);
    for (quants, sum) in quants.chunks_exact(16).zip(sums.chunks_exact_mut(2)) {
        let total: i16 = quants.iter().map(|&quant| i16::from(quant as i8)).sum();
        sum.copy_from_slice(&total.to_le_bytes());
    }
}

/// Sixteen bytes of scale and minimum, 64 bytes of quants, then both super-scales.
/// Scale and minimum of a sub-block are equal, so that the minimum takes off exactly the mean.
fn put_q2_k(block: &mut [u8], scale: f32) {
    for byte in &mut block[..16] {
        let level = 8 | (*byte & 7);
        *byte = level | (level << 4);
    }
    // Levels are uniform from 8 to 15.
    let scale = scale / root_mean_square(8, 15);
    put_pair(block, 80, scale, 1.5 * scale);
}

/// Both super-scales, twelve bytes of eight 6-bit scales and minima, quants. Scale and minimum of a sub-block are equal.
fn put_q45_k(block: &mut [u8], scale: f32, centre: f32) {
    // Levels are uniform from 32 to 63.
    let scale = scale / root_mean_square(32, 63);
    put_pair(block, 0, scale, centre * scale);
    let packed = &mut block[4..16];
    for index in 0..4 {
        let low = 32 | (packed[index] & 31);
        let high = 32 | (packed[index + 4] & 31);
        packed[index] = low | (high >> 4 << 6);
        packed[index + 4] = low | (high >> 4 << 6);
        packed[index + 8] = (high & 15) | (high << 4);
    }
}

fn root_mean_square(from: u32, to: u32) -> f32 {
    let squares: u32 = (from..=to).map(|level| level * level).sum();
    (squares as f32 / (to - from + 1) as f32).sqrt()
}
