//! The best of many logits: a scan against the worst that still counts, and a small buffer.
//! For: [`sample`](super::sample).
//! Invariant: best first, ties to the smaller id, whatever the buffer's size.

use super::super::simd::{LANES, Simd};

/// Entries that the buffer takes beside the wanted ones before it is cut.
const SPARE: usize = 64;

/// The `wanted` best of `logits` (no NaN, no -0), or all if there are fewer, as `(token_id, logit)`.
#[inline(always)]
pub(super) fn top<S: Simd>(simd: S, logits: &[f32], first_token: u32, wanted: usize) -> Vec<(u32, f32)> {
    let wanted = wanted.min(logits.len());
    if wanted == 0 {
        return Vec::new();
    }
    let capacity = 2 * wanted + SPARE;
    let mut keys: Vec<u64> = Vec::with_capacity(capacity + LANES);
    let mut threshold = f32::NEG_INFINITY;
    let mut cut = |keys: &mut Vec<u64>| {
        if keys.len() > wanted {
            let (_, worst, _) = keys.select_nth_unstable_by(wanted - 1, |one, other| other.cmp(one));
            threshold = logit_of(*worst);
            keys.truncate(wanted);
        }
        threshold
    };
    let mut limit = f32::NEG_INFINITY;
    let (vectors, rest) = logits.as_chunks::<LANES>();
    for (index, vector) in vectors.iter().enumerate() {
        let mut mask = simd.greater(simd.load(vector), simd.splat(limit));
        while mask != 0 {
            let lane = mask.trailing_zeros() as usize;
            keys.push(key((index * LANES + lane) as u32, vector[lane]));
            mask &= mask - 1;
        }
        if keys.len() >= capacity {
            limit = cut(&mut keys);
        }
    }
    let first_of_rest = (vectors.len() * LANES) as u32;
    keys.extend((first_of_rest..).zip(rest).filter(|(_, logit)| **logit > limit).map(|(id, logit)| key(id, *logit)));
    cut(&mut keys);
    if keys.len() < wanted {
        let missing = wanted - keys.len();
        let excluded = (0..).zip(logits).filter(|(_, logit)| **logit == f32::NEG_INFINITY);
        keys.extend(excluded.take(missing).map(|(id, logit)| key(id, *logit)));
    }
    keys.sort_unstable_by(|one, other| other.cmp(one));
    keys.into_iter().map(|key| (first_token + !(key as u32), logit_of(key))).collect()
}

/// A number that grows with the logit and, for equal ones, falls with the id.
fn key(id: u32, logit: f32) -> u64 {
    let bits = logit.to_bits();
    let ordered = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    u64::from(ordered) << 32 | u64::from(!id)
}

fn logit_of(key: u64) -> f32 {
    let ordered = (key >> 32) as u32;
    f32::from_bits(if ordered >> 31 == 1 { ordered & !(1 << 31) } else { !ordered })
}
