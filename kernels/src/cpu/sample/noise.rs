//! Draws from a softmax by the Gumbel-max trick, with noise that each token's id and the seed alone decide.
//! For: [`sample`](super::sample), and whoever must draw as it does.
//! Source: Gumbel-max (Gumbel 1954; Maddison et al. 2014); the hash is two rounds of MurmurHash3's finalizer.
//! Invariant: every backend computes the same hash; logarithms may differ in the last bits.

/// Tokens whose noise is computed together.
const BATCH: usize = 16;

/// The index of the largest `logit * factor + noise` and that value, or `None` if all logits are minus infinity.
#[inline(always)]
pub(super) fn draw(seed: u64, first_token: u32, logits: &[f32], factor: f32) -> Option<(usize, f32)> {
    let mut best: Option<(usize, f32)> = None;
    for (batch, logits) in logits.chunks(BATCH).enumerate() {
        let start = batch * BATCH;
        let first = first_token.wrapping_add(start as u32);
        let mut noise = [0.0; BATCH];
        for (place, noise) in noise.iter_mut().enumerate() {
            *noise = gumbel(hash(seed, first.wrapping_add(place as u32)));
        }
        for (place, (logit, noise)) in logits.iter().zip(noise).enumerate() {
            let value = logit * factor + noise;
            if *logit > f32::NEG_INFINITY && best.is_none_or(|(_, best)| value > best) {
                best = Some((start + place, value));
            }
        }
    }
    best
}

/// 32 well mixed bits.
#[inline(always)]
fn hash(seed: u64, token_id: u32) -> u32 {
    let mixed = mix(token_id.wrapping_mul(0x9e37_79b9) ^ seed as u32);
    mix(mixed.wrapping_add(0x85eb_ca6b) ^ (seed >> 32) as u32)
}

#[inline(always)]
fn mix(mut bits: u32) -> u32 {
    bits = (bits ^ bits >> 16).wrapping_mul(0x85eb_ca6b);
    bits = (bits ^ bits >> 13).wrapping_mul(0xc2b2_ae35);
    bits ^ bits >> 16
}

/// A standard Gumbel variable `-ln(-ln(1 - w))` from the uniform `w = (bits + 1/2) / 2^32`. Taking it from `1 - w` keeps
/// the large values, which decide, exact to 2^-33.
#[inline(always)]
fn gumbel(bits: u32) -> f32 {
    let w = (bits as f32 + 0.5) * (1.0 / 4_294_967_296.0);
    // Next to 1 the logarithm would lose what w still has.
    let small = w * (1.0 + w * (0.5 + w * (1.0 / 3.0)));
    let large = -ln((1.0 - w).max(1.0 / 8_589_934_592.0));
    -ln(if w < 1.0 / 1024.0 { small } else { large })
}

/// Natural logarithm of a positive normal number, relative error some 1e-7. Source: Cephes `logf` (Moshier).
#[inline(always)]
fn ln(x: f32) -> f32 {
    let bits = x.to_bits();
    // The mantissa in [sqrt(1/2), sqrt(2)).
    let shifted = bits.wrapping_sub(0x3f35_04f3);
    let exponent = (shifted as i32 >> 23) as f32;
    let m = f32::from_bits((shifted & 0x007f_ffff) + 0x3f35_04f3) - 1.0;
    let mut sum = 7.037_683_6e-2_f32;
    for coefficient in [
        -1.151_461e-1,
        1.167_699_9e-1,
        -1.242_014_1e-1,
        1.424_932_3e-1,
        -1.666_805_8e-1,
        2.000_071_5e-1,
        -2.499_999_4e-1,
        3.333_333e-1,
    ] {
        sum = sum * m + coefficient;
    }
    let square = m * m;
    m + (m * square * sum - 0.5 * square) + exponent * std::f32::consts::LN_2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithm_is_exact_enough() {
        for step in 1..200_000_u32 {
            let x = f32::from_bits(0x2f00_0000 + step * 2003);
            let expected = f64::from(x).ln();
            assert!((f64::from(ln(x)) - expected).abs() <= 2e-7 * expected.abs().max(0.5), "{x}");
        }
    }

    #[test]
    fn noise_has_the_moments_of_the_gumbel_distribution() {
        for seed in [0, 1, u64::MAX, 0x1234_5678_9abc_def0] {
            let values: Vec<f64> = (0..400_000).map(|id| f64::from(gumbel(hash(seed, id)))).collect();
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64;
            assert!((mean - 0.577_216).abs() < 0.01, "seed {seed}: mean {mean}");
            assert!((variance - 1.644_934).abs() < 0.03, "seed {seed}: variance {variance}");
        }
        assert!([gumbel(0), gumbel(u32::MAX)].iter().all(|value| value.is_finite()));
    }
}
