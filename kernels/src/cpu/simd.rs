//! The levels of instructions, and sixteen f32 lanes on every one: AVX-512, AVX2, or arrays that the compiler vectorizes.
//! For: attention, the norms, sampling, the SwiGLU epilogue; `matmul` chooses its kernels by the level.
//! Invariant: an operation means the same on every level, lane for lane and in the same order of sums, so that levels
//! differ at most by the fusing of multiply and add where the portable one has no FMA instruction.
//! Not here: integer dot products (`matmul`).

/// Lanes of a vector.
pub const LANES: usize = 16;

/// A set of instructions that this processor has; a value of it is the proof. Chosen once, when the device is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level(Kind);

/// What a level consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// What the target always has: SSE2, NEON.
    Portable,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, VL and VNNI, beside AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
}

/// Work that is compiled once for each level.
pub trait Vectorized {
    /// What it returns.
    type Output;
    /// Does the work. Implementations, and what they call with `simd`, are `#[inline(always)]`: only so are they
    /// compiled for the level. A closure (also one given to `map` or `array::from_fn`) is not, so none uses `simd`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

impl Level {
    /// The level that needs nothing.
    pub const PORTABLE: Self = Self(Kind::Portable);

    /// Every level of this processor, the best last.
    pub fn supported() -> impl DoubleEndedIterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let wider = {
            use std::arch::is_x86_feature_detected as has;
            let avx2 = (has!("avx2") && has!("fma") && has!("f16c")).then_some(Self(Kind::Avx2));
            let has_avx512 = has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512vnni");
            [avx2, avx2.filter(|_| has_avx512).map(|_| Self(Kind::Avx512Vnni))]
        };
        #[cfg(not(target_arch = "x86_64"))]
        let wider: [Option<Self>; 0] = [];
        std::iter::once(Self::PORTABLE).chain(wider.into_iter().flatten())
    }

    /// The best level of this processor.
    pub fn detect() -> Self {
        Self::supported().next_back().unwrap_or(Self::PORTABLE)
    }

    pub(super) fn kind(self) -> Kind {
        self.0
    }

    /// Name for reports.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Vnni => "avx512-vnni",
        }
    }

    /// Does the work with the instructions of this level.
    pub fn run<V: Vectorized>(self, work: V) -> V::Output {
        match self.0 {
            Kind::Portable => work.run(Portable),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: only `supported` makes a `Level` of this kind, when the processor has the instructions.
            Kind::Avx2 => unsafe { x86::run_avx2(work) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Kind::Avx512Vnni => unsafe { x86::run_avx512(work) },
        }
    }
}

/// Operations on vectors of [`LANES`] f32. A value of an implementing type is the proof that the processor has them.
pub trait Simd: Copy {
    /// The vector.
    type Vector: Copy;
    /// Vectors that the registers hold at once beside the operands of one multiply-add: the size of register tiles.
    const ACCUMULATORS: usize;

    /// All lanes equal.
    fn splat(self, value: f32) -> Self::Vector;
    /// Reads sixteen values.
    fn load(self, values: &[f32; LANES]) -> Self::Vector;
    /// Reads sixteen IEEE half-precision values.
    fn load_f16(self, values: &[u16; LANES]) -> Self::Vector;
    /// Writes sixteen values.
    fn store(self, vector: Self::Vector, values: &mut [f32; LANES]);
    /// Writes sixteen values in half precision, rounded to nearest even.
    fn store_f16(self, vector: Self::Vector, values: &mut [u16; LANES]);
    /// `a + b`
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a - b`
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b`
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a / b`
    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b + c`
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// `a` where it is greater than `b`, else (also where either is NaN) `b`.
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a` where it is less than `b`, else (also where either is NaN) `b`.
    fn min(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// The nearest whole number, halves to even.
    fn round(self, a: Self::Vector) -> Self::Vector;
    /// `a * 2^n` for whole numbers `n` in -126..=127 where the result is a normal number.
    fn scale_by_power(self, a: Self::Vector, n: Self::Vector) -> Self::Vector;
    /// Bit `i` says whether lane `i` of `a` is greater than that of `b`.
    fn greater(self, a: Self::Vector, b: Self::Vector) -> u16;
    /// Lane `i` of `a` where bit `i` is set, else of `b`.
    fn select(self, mask: u16, a: Self::Vector, b: Self::Vector) -> Self::Vector;

    /// The lanes folded in halves: 8 with 8, 4 with 4, 2 with 2, 1 with 1.
    #[inline(always)]
    fn sum(self, a: Self::Vector) -> f32 {
        fold(self.to_array(a), |left, right| left + right)
    }

    /// The largest lane; NaN may be passed over.
    #[inline(always)]
    fn largest(self, a: Self::Vector) -> f32 {
        fold(self.to_array(a), |left, right| if left > right { left } else { right })
    }

    /// The lanes.
    #[inline(always)]
    fn to_array(self, a: Self::Vector) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        self.store(a, &mut lanes);
        lanes
    }
}

#[inline(always)]
fn fold(mut lanes: [f32; LANES], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = combine(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// Arrays; the compiler vectorizes the loops for whatever the target always has.
#[derive(Clone, Copy, Debug)]
pub struct Portable;

/// Whether the target's multiply-add is one instruction everywhere.
const HAS_FMA: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));

impl Simd for Portable {
    type Vector = [f32; LANES];
    const ACCUMULATORS: usize = 4;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Vector {
        [value; LANES]
    }
    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> Self::Vector {
        *values
    }
    #[inline(always)]
    fn load_f16(self, values: &[u16; LANES]) -> Self::Vector {
        /// Exponent bias of f32 less that of f16, as a factor.
        const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
        values.map(|half| {
            let half = u32::from(half);
            // The product also turns subnormal halves into normal numbers.
            let finite = (f32::from_bits((half & 0x7fff) << 13) * REBIAS).to_bits();
            let infinite = if half & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
            f32::from_bits(finite | infinite | (half & 0x8000) << 16)
        })
    }
    #[inline(always)]
    fn store(self, vector: Self::Vector, values: &mut [f32; LANES]) {
        *values = vector;
    }
    #[inline(always)]
    fn store_f16(self, vector: Self::Vector, values: &mut [u16; LANES]) {
        *values = vector.map(|value| half::f16::from_f32(value).to_bits());
    }
    #[inline(always)]
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| a[lane] + b[lane])
    }
    #[inline(always)]
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| a[lane] - b[lane])
    }
    #[inline(always)]
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| a[lane] * b[lane])
    }
    #[inline(always)]
    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| a[lane] / b[lane])
    }
    #[inline(always)]
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        if HAS_FMA {
            std::array::from_fn(|lane| a[lane].mul_add(b[lane], c[lane]))
        } else {
            std::array::from_fn(|lane| a[lane] * b[lane] + c[lane])
        }
    }
    #[inline(always)]
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| if a[lane] > b[lane] { a[lane] } else { b[lane] })
    }
    #[inline(always)]
    fn min(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| if a[lane] < b[lane] { a[lane] } else { b[lane] })
    }
    #[inline(always)]
    fn round(self, a: Self::Vector) -> Self::Vector {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    fn scale_by_power(self, a: Self::Vector, n: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| f32::from_bits(a[lane].to_bits().wrapping_add((n[lane] as i32 as u32) << 23)))
    }
    #[inline(always)]
    fn greater(self, a: Self::Vector, b: Self::Vector) -> u16 {
        (0..LANES).fold(0, |mask, lane| mask | u16::from(a[lane] > b[lane]) << lane)
    }
    #[inline(always)]
    fn select(self, mask: u16, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|lane| if mask >> lane & 1 == 1 { a[lane] } else { b[lane] })
    }
}

#[cfg(target_arch = "x86_64")]
#[path = "simd_x86.rs"]
mod x86;

#[cfg(test)]
mod tests {
    use super::*;

    /// One lane-wise result of every operation, as bits.
    struct Everything;

    impl Vectorized for Everything {
        type Output = Vec<u32>;
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Vec<u32> {
            let a: [f32; LANES] = std::array::from_fn(|lane| (lane as f32 - 7.3) * 1.7);
            let b: [f32; LANES] = std::array::from_fn(|lane| if lane == 3 { f32::NAN } else { 5.0 - lane as f32 });
            let halves: [u16; LANES] =
                std::array::from_fn(|lane| [0, 1, 0x3ff, 0x400, 0x7bff, 0x7c00, 0xfc00, 0x8001][lane % 8]);
            let (x, y) = (simd.load(&a), simd.load(&b));
            let mut narrowed = [0; LANES];
            simd.store_f16(simd.mul(x, simd.splat(1e-5)), &mut narrowed);
            let mask = simd.greater(x, y);
            let vectors = [
                simd.add(x, x),
                simd.sub(x, simd.splat(0.1)),
                simd.mul(x, x),
                simd.div(x, simd.splat(3.0)),
                simd.max(x, y),
                simd.max(y, x),
                simd.min(x, y),
                simd.round(x),
                simd.scale_by_power(x, simd.round(x)),
                simd.select(mask, x, y),
                simd.load_f16(&halves),
            ];
            let mut bits: Vec<u32> =
                vectors.iter().flat_map(|vector| simd.to_array(*vector)).map(f32::to_bits).collect();
            bits.extend(narrowed.map(u32::from));
            bits.extend([u32::from(mask), simd.sum(x).to_bits(), simd.largest(x).to_bits()]);
            bits
        }
    }

    #[test]
    fn every_level_gives_the_same_bits() {
        let expected = Level::PORTABLE.run(Everything);
        for level in Level::supported() {
            assert_eq!(level.run(Everything), expected, "{level:?}");
        }
    }
}
