//! What compilers do not find by themselves, for the portable level: integer products of 4 rows, as two vectors of 128
//! bits with two summands of each row side by side, and the widening of u16.
//! For: `portable`. One implementation for each architecture that has such vectors, and one for the others.
//! Invariant: sums are exact, so all of them agree. Only instructions that the target always has.

pub(super) use arch::{Pairs, add_dot, fold, widen};

#[cfg(target_arch = "x86_64")]
mod arch {
    use std::{arch::x86_64::*, mem::transmute};

    /// Two summands of two rows.
    pub(in super::super) type Pairs = __m128i;

    /// As `Simd::dot`.
    ///
    /// # Safety
    /// 16 activations are readable.
    #[inline(always)]
    pub(in super::super) unsafe fn add_dot<const BITS: usize>(
        sum: [Pairs; 2],
        weights: &[[u8; 16]; 4],
        activations: *const i8,
    ) -> [Pairs; 2] {
        // SAFETY: SSE2 belongs to x86-64; the caller's promise for the load.
        unsafe {
            let zero = _mm_setzero_si128();
            let activations = _mm_loadu_si128(activations.cast());
            let signs = _mm_cmpgt_epi8(zero, activations);
            let (first, second) = (_mm_unpacklo_epi8(activations, signs), _mm_unpackhi_epi8(activations, signs));
            let twice = [
                _mm_unpacklo_epi64(first, first),
                _mm_unpackhi_epi64(first, first),
                _mm_unpacklo_epi64(second, second),
                _mm_unpackhi_epi64(second, second),
            ];
            let [mut low, mut high] = sum;
            for (weight, twice) in weights.iter().zip(twice) {
                let weight = transmute::<[u8; 16], __m128i>(*weight);
                low = _mm_add_epi32(low, _mm_madd_epi16(_mm_unpacklo_epi8(weight, zero), twice));
                high = _mm_add_epi32(high, _mm_madd_epi16(_mm_unpackhi_epi8(weight, zero), twice));
            }
            [low, high]
        }
    }

    /// The sums of the 4 rows.
    #[inline(always)]
    pub(in super::super) fn fold(sums: [Pairs; 2]) -> [i32; 4] {
        // SAFETY: SSE2 belongs to x86-64; vectors and arrays have the same bits.
        unsafe {
            let [low, high] = [_mm_castsi128_ps(sums[0]), _mm_castsi128_ps(sums[1])];
            let even = _mm_castps_si128(_mm_shuffle_ps::<0b10_00_10_00>(low, high));
            let odd = _mm_castps_si128(_mm_shuffle_ps::<0b11_01_11_01>(low, high));
            transmute(_mm_add_epi32(even, odd))
        }
    }

    /// Four u16 as u32.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    pub(in super::super) unsafe fn widen(source: *const u8) -> [u32; 4] {
        // SAFETY: SSE2 belongs to x86-64; the caller's promise for the load.
        unsafe { transmute(_mm_unpacklo_epi16(_mm_loadl_epi64(source.cast()), _mm_setzero_si128())) }
    }
}

#[cfg(target_arch = "aarch64")]
mod arch {
    use std::{arch::aarch64::*, mem::transmute};

    /// Two summands of two rows.
    pub(in super::super) type Pairs = int32x4_t;

    /// As `Simd::dot`.
    ///
    /// # Safety
    /// 16 activations are readable.
    #[inline(always)]
    pub(in super::super) unsafe fn add_dot<const BITS: usize>(
        sum: [Pairs; 2],
        weights: &[[u8; 16]; 4],
        activations: *const i8,
    ) -> [Pairs; 2] {
        // SAFETY: NEON belongs to aarch64; the caller's promise for the load; vectors and arrays have the same bits.
        unsafe {
            let activations = vreinterpretq_s32_s8(vld1q_s8(activations));
            let twice = [
                vreinterpretq_s8_s32(vdupq_laneq_s32::<0>(activations)),
                vreinterpretq_s8_s32(vdupq_laneq_s32::<1>(activations)),
                vreinterpretq_s8_s32(vdupq_laneq_s32::<2>(activations)),
                vreinterpretq_s8_s32(vdupq_laneq_s32::<3>(activations)),
            ];
            let [mut low, mut high] = sum;
            if BITS <= 6 {
                // Four products of 6-bit weights and activations up to 127 come to 32,004, which an i16 holds.
                let (mut low_products, mut high_products) = (vdupq_n_s16(0), vdupq_n_s16(0));
                for (weight, twice) in weights.iter().zip(twice) {
                    let weight = transmute::<[u8; 16], int8x16_t>(*weight);
                    low_products = vmlal_s8(low_products, vget_low_s8(weight), vget_low_s8(twice));
                    high_products = vmlal_high_s8(high_products, weight, twice);
                }
                return [vpadalq_s16(low, low_products), vpadalq_s16(high, high_products)];
            }
            for (weight, twice) in weights.iter().zip(twice) {
                let weight = transmute::<[u8; 16], uint8x16_t>(*weight);
                let twice = vmovl_s8(vget_low_s8(twice));
                let products = |weight: int16x8_t| {
                    let first = vmull_s16(vget_low_s16(weight), vget_low_s16(twice));
                    vpaddq_s32(first, vmull_high_s16(weight, twice))
                };
                low = vaddq_s32(low, products(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(weight)))));
                high = vaddq_s32(high, products(vreinterpretq_s16_u16(vmovl_high_u8(weight))));
            }
            [low, high]
        }
    }

    /// The sums of the 4 rows.
    #[inline(always)]
    pub(in super::super) fn fold(sums: [Pairs; 2]) -> [i32; 4] {
        // SAFETY: NEON belongs to aarch64; vectors and arrays have the same bits.
        unsafe { transmute(vpaddq_s32(sums[0], sums[1])) }
    }

    /// Four u16 as u32.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    pub(in super::super) unsafe fn widen(source: *const u8) -> [u32; 4] {
        // SAFETY: NEON belongs to aarch64; the caller's promise for the load.
        unsafe { transmute(vmovl_u16(vreinterpret_u16_u8(vld1_u8(source)))) }
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod arch {
    /// Two summands of two rows.
    pub(in super::super) type Pairs = [i32; 4];

    /// As `Simd::dot`.
    ///
    /// # Safety
    /// 16 activations are readable.
    #[inline(always)]
    pub(in super::super) unsafe fn add_dot<const BITS: usize>(
        mut sum: [Pairs; 2],
        weights: &[[u8; 16]; 4],
        activations: *const i8,
    ) -> [Pairs; 2] {
        // SAFETY: the caller's promise.
        let activations = unsafe { activations.cast::<[i8; 16]>().read_unaligned() };
        for (weight, four) in weights.iter().zip(activations.as_chunks::<4>().0) {
            for (index, byte) in weight.iter().enumerate() {
                sum[index / 8][index % 8 / 2] += i32::from(*byte) * i32::from(four[index % 4]);
            }
        }
        sum
    }

    /// The sums of the 4 rows.
    #[inline(always)]
    pub(in super::super) fn fold(sums: [Pairs; 2]) -> [i32; 4] {
        std::array::from_fn(|row| sums[row / 2][row % 2 * 2] + sums[row / 2][row % 2 * 2 + 1])
    }

    /// Four u16 as u32.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    pub(in super::super) unsafe fn widen(source: *const u8) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { source.cast::<[u16; 4]>().read_unaligned() }.map(u32::from)
    }
}
