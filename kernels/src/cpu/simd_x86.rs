//! The x86-64 levels of [`Simd`](super::Simd): AVX-512, and AVX2 with FMA and F16C.
//! For: [`Level::run`](super::Level::run) only, which knows what the processor has.
//! Invariant: `Avx2` and `Avx512` exist only inside `run_avx2` and `run_avx512`.

use std::arch::x86_64::*;

use super::{LANES, Simd, Vectorized};

/// # Safety
/// The processor has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run_avx2<V: Vectorized>(work: V) -> V::Output {
    work.run(Avx2(()))
}

/// # Safety
/// The processor has AVX-512 F, BW, VL and VNNI, AVX2, FMA and F16C.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn run_avx512<V: Vectorized>(work: V) -> V::Output {
    work.run(Avx512(()))
}

/// One 512-bit register.
#[derive(Clone, Copy)]
pub struct Avx512(());

/// Two 256-bit registers: lanes 0–7 and 8–15.
#[derive(Clone, Copy)]
pub struct Avx2(());

/// Calls intrinsics.
macro_rules! simd {
    ($($call:tt)*) => {
        // SAFETY: `self` proves that the processor has the instructions; loads and stores are of whole arrays.
        unsafe { $($call)* }
    };
}

/// An expression for each of the two halves. It is no closure: those are compiled without the instructions.
macro_rules! halves {
    (|$half:ident| $value:expr) => {
        [
            {
                let $half = 0;
                $value
            },
            {
                let $half = 1;
                $value
            },
        ]
    };
}

impl Simd for Avx512 {
    type Vector = __m512;
    const ACCUMULATORS: usize = 24;

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        simd!(_mm512_set1_ps(value))
    }
    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> __m512 {
        simd!(_mm512_loadu_ps(values.as_ptr()))
    }
    #[inline(always)]
    fn load_f16(self, values: &[u16; LANES]) -> __m512 {
        simd!(_mm512_cvtph_ps(_mm256_loadu_si256(values.as_ptr().cast())))
    }
    #[inline(always)]
    fn store(self, vector: __m512, values: &mut [f32; LANES]) {
        simd!(_mm512_storeu_ps(values.as_mut_ptr(), vector))
    }
    #[inline(always)]
    fn store_f16(self, vector: __m512, values: &mut [u16; LANES]) {
        simd!(_mm256_storeu_si256(values.as_mut_ptr().cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(vector)))
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        simd!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        simd!(_mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(a))
    }
    #[inline(always)]
    fn scale_by_power(self, a: __m512, n: __m512) -> __m512 {
        let shifted = simd!(_mm512_slli_epi32::<23>(_mm512_cvtps_epi32(n)));
        simd!(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), shifted)))
    }
    #[inline(always)]
    fn greater(self, a: __m512, b: __m512) -> u16 {
        simd!(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b))
    }
    #[inline(always)]
    fn select(self, mask: u16, a: __m512, b: __m512) -> __m512 {
        simd!(_mm512_mask_blend_ps(mask, b, a))
    }
    #[inline(always)]
    fn largest(self, a: __m512) -> f32 {
        simd!(_mm512_reduce_max_ps(a))
    }
}

impl Avx2 {
    /// All bits of a lane where the bit of `mask` is set.
    #[inline(always)]
    fn widen_mask(self, mask: u16) -> [__m256; 2] {
        let bits = simd!(_mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128));
        halves!(|half| {
            let byte = simd!(_mm256_set1_epi32(i32::from(mask >> (8 * half) & 0xff)));
            simd!(_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(byte, bits), bits)))
        })
    }
}

impl Simd for Avx2 {
    type Vector = [__m256; 2];
    const ACCUMULATORS: usize = 6;

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Vector {
        [simd!(_mm256_set1_ps(value)); 2]
    }
    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> Self::Vector {
        let (low, high) = values.split_at(LANES / 2);
        [simd!(_mm256_loadu_ps(low.as_ptr())), simd!(_mm256_loadu_ps(high.as_ptr()))]
    }
    #[inline(always)]
    fn load_f16(self, values: &[u16; LANES]) -> Self::Vector {
        let (values, _) = values.as_chunks::<{ LANES / 2 }>();
        halves!(|half| simd!(_mm256_cvtph_ps(_mm_loadu_si128(values[half].as_ptr().cast()))))
    }
    #[inline(always)]
    fn store(self, vector: Self::Vector, values: &mut [f32; LANES]) {
        let (low, high) = values.split_at_mut(LANES / 2);
        simd!(_mm256_storeu_ps(low.as_mut_ptr(), vector[0]));
        simd!(_mm256_storeu_ps(high.as_mut_ptr(), vector[1]));
    }
    #[inline(always)]
    fn store_f16(self, vector: Self::Vector, values: &mut [u16; LANES]) {
        for (half, values) in vector.into_iter().zip(values.chunks_exact_mut(LANES / 2)) {
            let narrow = simd!(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(half));
            simd!(_mm_storeu_si128(values.as_mut_ptr().cast(), narrow));
        }
    }
    #[inline(always)]
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        halves!(|half| simd!(_mm256_add_ps(a[half], b[half])))
    }
    #[inline(always)]
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        halves!(|half| simd!(_mm256_sub_ps(a[half], b[half])))
    }
    #[inline(always)]
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        halves!(|half| simd!(_mm256_mul_ps(a[half], b[half])))
    }
    #[inline(always)]
    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        halves!(|half| simd!(_mm256_div_ps(a[half], b[half])))
    }
    #[inline(always)]
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        halves!(|half| simd!(_mm256_fmadd_ps(a[half], b[half], c[half])))
    }
    #[inline(always)]
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        halves!(|half| simd!(_mm256_max_ps(a[half], b[half])))
    }
    #[inline(always)]
    fn min(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        halves!(|half| simd!(_mm256_min_ps(a[half], b[half])))
    }
    #[inline(always)]
    fn round(self, a: Self::Vector) -> Self::Vector {
        halves!(|half| simd!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a[half])))
    }
    #[inline(always)]
    fn scale_by_power(self, a: Self::Vector, n: Self::Vector) -> Self::Vector {
        halves!(|half| {
            let shifted = simd!(_mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n[half])));
            simd!(_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a[half]), shifted)))
        })
    }
    #[inline(always)]
    fn greater(self, a: Self::Vector, b: Self::Vector) -> u16 {
        let bytes = halves!(|half| simd!(_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(a[half], b[half]))) as u16);
        bytes[0] | bytes[1] << 8
    }
    #[inline(always)]
    fn select(self, mask: u16, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        let lanes = self.widen_mask(mask);
        halves!(|half| simd!(_mm256_blendv_ps(b[half], a[half], lanes[half])))
    }
    #[inline(always)]
    fn largest(self, a: Self::Vector) -> f32 {
        let eight = simd!(_mm256_max_ps(a[0], a[1]));
        let four = simd!(_mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight)));
        let two = simd!(_mm_max_ps(four, _mm_movehl_ps(four, four)));
        simd!(_mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two))))
    }
}
