//! The device side of sampling on the CPU.
//! For: [`CpuDevice`](super::CpuDevice). Contract: [`ops::sample`](crate::ops::sample).
//! Invariant: a row is reduced in slices of [`SLICE_TOKENS`] that are merged as those of ranks are, so the number of
//! threads changes nothing.
//! Not here: merging (`ops::sample`), choosing (the leader).

mod noise;
mod top;

use super::{
    math::exp,
    simd::{LANES, Level, Simd, Vectorized},
    team::{SharedSlice, Team},
};
use crate::{
    KernelError,
    ops::{Candidates, SampleRow},
};

/// Logits that one thread reduces at a time; it fits into the first-level caches.
const SLICE_TOKENS: usize = 8192;

/// Reduces each row of `logits` (`[rows.len(), vocabulary held here]`) as `rows` asks; the first column is token
/// `first_token`.
///
/// # Errors
/// [`KernelError`] if a row does not pass its checks.
pub fn sample(
    team: &Team,
    level: Level,
    rows: &[SampleRow],
    first_token: u32,
    logits: &mut [f32],
) -> Result<Vec<Candidates>, KernelError> {
    rows.iter().try_for_each(SampleRow::check)?;
    let width = logits.len().checked_div(rows.len()).unwrap_or(0);
    if u32::try_from(width).ok().and_then(|width| first_token.checked_add(width)).is_none() {
        return Err(KernelError::OutOfRange {
            operation: "sample",
            what: "last token id",
            got: first_token as usize + width,
            limit: u32::MAX as usize,
        });
    }
    let slices = width.div_ceil(SLICE_TOKENS).max(1);
    let mut results: Vec<Candidates> = vec![Candidates::default(); rows.len() * slices];
    let shared = SharedSlice::new(logits);
    team.for_rows(&mut results, 1, 1, &|index, result| {
        let (row, start) = (index / slices, index % slices * SLICE_TOKENS);
        let range = row * width + start..row * width + width.min(start + SLICE_TOKENS);
        // SAFETY: each index has a slice of its own.
        let logits = unsafe { shared.range_mut(range) };
        result[0] = level.run(Slice { row: &rows[row], first_token: first_token + start as u32, logits });
    });
    let mut results = results.into_iter();
    Ok(rows.iter().map(|row| Candidates::merge(row, results.by_ref().take(slices))).collect())
}

/// A slice of one row.
struct Slice<'a> {
    row: &'a SampleRow,
    first_token: u32,
    logits: &'a mut [f32],
}

impl Vectorized for Slice<'_> {
    type Output = Candidates;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Candidates {
        let Self { row, first_token, logits } = self;
        let raw_maximum = sanitize(simd, logits);
        let raw_log_sum_exp = log_sum_exp(simd, logits, raw_maximum, 1.0);
        let raw_top = top::top(simd, logits, first_token, row.raw_top_k);
        let before = apply_penalties(row, first_token, logits);
        let is_changed = !before.is_empty();
        let maximum = if is_changed { sanitize(simd, logits) } else { raw_maximum };
        let scaled_log_sum_exp = if is_changed || row.temperature != 1.0 {
            log_sum_exp(simd, logits, maximum, 1.0 / row.temperature)
        } else {
            raw_log_sum_exp
        };
        let top = top::top(simd, logits, first_token, row.top_k);
        let drawn = row.noise_seed.and_then(|seed| {
            let (index, value) = noise::draw(seed, first_token, logits, 1.0 / row.temperature)?;
            let raw = before.iter().find(|(changed, _)| *changed == index).map_or(logits[index], |(_, raw)| *raw);
            Some((first_token + index as u32, value, raw))
        });
        Candidates { top, scaled_log_sum_exp, raw_top, raw_log_sum_exp, drawn }
    }
}

/// Changes the logits of penalized tokens and returns those of them that are here, as `(index, logit before)`.
fn apply_penalties(row: &SampleRow, first_token: u32, logits: &mut [f32]) -> Vec<(usize, f32)> {
    let mut before = Vec::new();
    for penalty in &row.penalties {
        let Some(index) = penalty.token_id.checked_sub(first_token).map(|index| index as usize) else { continue };
        let Some(logit) = logits.get_mut(index) else { continue };
        before.push((index, *logit));
        *logit = if *logit > 0.0 { *logit / penalty.repetition } else { *logit * penalty.repetition };
        *logit -= penalty.subtract;
    }
    before
}

/// Turns NaN into minus infinity and -0 into 0, and returns the largest logit.
#[inline(always)]
fn sanitize<S: Simd>(simd: S, logits: &mut [f32]) -> f32 {
    let lowest = simd.splat(f32::NEG_INFINITY);
    let mut maxima = [lowest; 4];
    let (vectors, rest) = logits.as_chunks_mut::<LANES>();
    for (index, vector) in vectors.iter_mut().enumerate() {
        let cleaned = clean(simd, simd.load(vector));
        simd.store(cleaned, vector);
        maxima[index % 4] = simd.max(cleaned, maxima[index % 4]);
    }
    let mut last = [f32::NEG_INFINITY; LANES];
    last[..rest.len()].copy_from_slice(rest);
    let cleaned = clean(simd, simd.load(&last));
    rest.copy_from_slice(&simd.to_array(cleaned)[..rest.len()]);
    let [a, b, c, d] = maxima;
    simd.largest(simd.max(simd.max(simd.max(a, b), simd.max(c, d)), cleaned))
}

#[inline(always)]
fn clean<S: Simd>(simd: S, logits: S::Vector) -> S::Vector {
    simd.max(simd.add(logits, simd.splat(0.0)), simd.splat(f32::NEG_INFINITY))
}

/// `ln Σ exp(logit * factor)`; `maximum` is the largest logit.
#[inline(always)]
fn log_sum_exp<S: Simd>(simd: S, logits: &[f32], maximum: f32, factor: f32) -> f32 {
    if !maximum.is_finite() {
        return maximum;
    }
    let maxima = simd.splat(maximum);
    let factors = simd.splat(factor);
    let (vectors, rest) = logits.as_chunks::<LANES>();
    let mut last = [f32::NEG_INFINITY; LANES];
    last[..rest.len()].copy_from_slice(rest);
    let mut sums = [simd.splat(0.0); 4];
    for (index, vector) in vectors.iter().chain([&last]).enumerate() {
        let terms = exp(simd, simd.mul(simd.sub(simd.load(vector), maxima), factors));
        sums[index % 4] = simd.add(sums[index % 4], terms);
    }
    let [a, b, c, d] = sums;
    maximum * factor + simd.sum(simd.add(simd.add(a, b), simd.add(c, d))).ln()
}
