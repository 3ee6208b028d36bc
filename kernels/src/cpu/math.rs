//! Exponential and logistic functions on vectors of [`LANES`](super::simd::LANES) f32.
//! For: attention (base 2), sampling and the SwiGLU epilogue (base e).
//! Invariant: relative error below 2e-7 where the result is a normal number; NaN in, NaN out.
//! Source: the polynomial is that of Cephes `expf` (Moshier).

use super::simd::Simd;

/// Below it the results are 0 rather than subnormal.
const LEAST_EXPONENT: f32 = -126.0;
/// Above it the results stay where they are, some 2.4e38: finite, so that quotients of them are numbers.
const LARGEST_EXPONENT: f32 = 127.49;

/// `2^x`; 0 below -126 (also for minus infinity), constant above 127.49.
#[inline(always)]
pub fn exp2<S: Simd>(simd: S, x: S::Vector) -> S::Vector {
    let clamped = simd.max(simd.splat(LEAST_EXPONENT), simd.min(simd.splat(LARGEST_EXPONENT), x));
    let n = simd.round(clamped);
    let rest = simd.mul(simd.sub(clamped, n), simd.splat(std::f32::consts::LN_2));
    let power = simd.scale_by_power(exp_near_zero(simd, rest), n);
    simd.select(simd.greater(simd.splat(LEAST_EXPONENT), x), simd.splat(0.0), power)
}

/// `e^x`; 0 below -87.3 (also for minus infinity), constant above 88.3.
#[inline(always)]
pub fn exp<S: Simd>(simd: S, x: S::Vector) -> S::Vector {
    /// `ln 2` in two parts, the first with few bits, so that `n` times it is exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let least = simd.splat(LEAST_EXPONENT * std::f32::consts::LN_2);
    let largest = simd.splat(LARGEST_EXPONENT * std::f32::consts::LN_2);
    let clamped = simd.max(least, simd.min(largest, x));
    let n = simd.round(simd.mul(clamped, simd.splat(std::f32::consts::LOG2_E)));
    let rest = simd.mul_add(n, simd.splat(-LN_2_HIGH), clamped);
    let rest = simd.mul_add(n, simd.splat(-LN_2_LOW), rest);
    let power = simd.scale_by_power(exp_near_zero(simd, rest), n);
    simd.select(simd.greater(least, x), simd.splat(0.0), power)
}

/// `x / (1 + e^-x)`, the activation of SwiGLU.
#[inline(always)]
pub fn silu<S: Simd>(simd: S, x: S::Vector) -> S::Vector {
    let negated = simd.sub(simd.splat(0.0), x);
    simd.div(x, simd.add(simd.splat(1.0), exp(simd, negated)))
}

/// `e^x` for `|x| <= ln 2 / 2`.
#[inline(always)]
fn exp_near_zero<S: Simd>(simd: S, x: S::Vector) -> S::Vector {
    let mut sum = simd.splat(1.987_569_1e-4);
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        sum = simd.mul_add(sum, x, simd.splat(coefficient));
    }
    simd.add(simd.mul_add(sum, simd.mul(x, x), x), simd.splat(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{LANES, Level, Vectorized};

    struct Apply(fn(f64) -> f64, u8);

    impl Vectorized for Apply {
        type Output = f64;
        /// The largest relative error over a dense grid.
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> f64 {
            let mut worst = 0.0_f64;
            for step in -43_500..43_500 {
                let inputs: [f32; LANES] = std::array::from_fn(|lane| step as f32 * 2e-3 + lane as f32 * 1.1e-4);
                let x = simd.load(&inputs);
                let outputs = simd.to_array(match self.1 {
                    0 => exp(simd, x),
                    1 => exp2(simd, x),
                    _ => silu(simd, x),
                });
                for (input, output) in inputs.into_iter().zip(outputs) {
                    let expected = self.0(f64::from(input));
                    worst = worst.max(((f64::from(output) - expected) / expected).abs());
                }
            }
            worst
        }
    }

    struct AtTheEnds;

    impl Vectorized for AtTheEnds {
        type Output = Vec<f32>;
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Vec<f32> {
            [f32::NEG_INFINITY, -1e30, 0.0, 1e30, f32::INFINITY, f32::NAN]
                .iter()
                .flat_map(|&x| {
                    let x = simd.splat(x);
                    [exp(simd, x), exp2(simd, x), silu(simd, x)].map(|vector| simd.to_array(vector)[5])
                })
                .collect()
        }
    }

    #[test]
    fn relative_error_is_below_2e_7() {
        for level in Level::supported() {
            // The quotient adds rounding errors of its own.
            for (index, limit) in [2e-7, 2e-7, 4e-7].into_iter().enumerate() {
                let exact = [f64::exp, f64::exp2, |x: f64| if x == 0.0 { 0.0 } else { x / (1.0 + (-x).exp()) }][index];
                let worst = level.run(Apply(exact, index as u8));
                assert!(worst < limit, "function {index} on {level:?}: {worst}");
            }
        }
    }

    #[test]
    fn the_ends_are_zero_or_finite_and_nan_stays() {
        for level in Level::supported() {
            let ends = level.run(AtTheEnds);
            assert_eq!(ends[..2], [0.0, 0.0], "{level:?}");
            assert_eq!(ends[3..5], [0.0, 0.0], "{level:?}");
            assert!(ends[5].abs() < 1e-8, "{level:?} {ends:?}");
            assert_eq!(ends[6..9], [1.0, 1.0, 0.0], "{level:?}");
            assert!(ends[9..11].iter().all(|value| *value > 2e38 && value.is_finite()), "{level:?} {ends:?}");
            assert_eq!(ends[11], 1e30, "{level:?}");
            assert!(ends[15..].iter().all(|value| value.is_nan()), "{level:?} {ends:?}");
        }
    }
}
