//! RMS norm on the CPU.
//! For: [`CpuDevice`](super::CpuDevice). Source: Zhang and Sennrich 2019.
//! Invariant: the sum of squares runs in an order that depends on the width alone.

use super::{
    simd::{LANES, Level, Simd, Vectorized},
    team::Team,
};

/// Tokens that one thread takes at a time.
const CHUNK_TOKENS: usize = 8;
/// Sums that run side by side.
const NUM_SUMS: usize = 4;

/// `output[t] = input[t] / sqrt(mean(input[t]²) + epsilon) * weight`; both tensors are `[num_tokens, weight.len()]`.
pub fn rms_norm(team: &Team, level: Level, input: &[f32], weight: &[f32], epsilon: f32, output: &mut [f32]) {
    let width = weight.len();
    if width == 0 {
        return;
    }
    team.for_rows(output, width, CHUNK_TOKENS, &|first_row, rows| {
        for (row, output) in (first_row..).zip(rows.chunks_exact_mut(width)) {
            level.run(Row { input: &input[row * width..][..width], weight, epsilon, output });
        }
    });
}

/// One row.
struct Row<'a> {
    input: &'a [f32],
    weight: &'a [f32],
    epsilon: f32,
    output: &'a mut [f32],
}

impl Vectorized for Row<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (vectors, rest) = self.input.as_chunks::<LANES>();
        let mut last = [0.0; LANES];
        last[..rest.len()].copy_from_slice(rest);
        let mut sums = [simd.splat(0.0); NUM_SUMS];
        let (groups, remaining) = vectors.as_chunks::<NUM_SUMS>();
        for group in groups {
            for (sum, vector) in sums.iter_mut().zip(group) {
                let x = simd.load(vector);
                *sum = simd.mul_add(x, x, *sum);
            }
        }
        for vector in remaining.iter().chain([&last]) {
            let x = simd.load(vector);
            sums[0] = simd.mul_add(x, x, sums[0]);
        }
        let sum = simd.sum(simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3])));
        let factor = 1.0 / (sum / self.input.len() as f32 + self.epsilon).sqrt();
        for ((output, input), weight) in self.output.iter_mut().zip(self.input).zip(self.weight) {
            *output = input * factor * weight;
        }
    }
}
