//! Level AVX2 with FMA and F16C: 8 rows in a vector.
//! Invariant: `maddubs` adds two products in 16 bits, which overflows for 8-bit weights: those are split in two.

use std::arch::x86_64::*;

use super::simd::{Simd, simd_methods};

#[derive(Clone, Copy)]
pub(super) struct Avx2;

impl Simd for Avx2 {
    const LANES: usize = 8;
    type Bytes = __m256i;
    type Ints = __m256i;
    type Floats = __m256;

    simd_methods! {
        fn prefetch(address: *const u8) { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
        fn load_bytes(source: *const u8) -> __m256i { _mm256_loadu_si256(source.cast()) }
        fn store_bytes(target: *mut u8, value: __m256i) { _mm256_storeu_si256(target.cast(), value) }
        fn field(value: __m256i, shift: i32, mask: u8) -> __m256i {
            let shifted = match shift {
                0 => value,
                1.. => _mm256_srl_epi16(value, _mm_cvtsi32_si128(shift)),
                _ => _mm256_sll_epi16(value, _mm_cvtsi32_si128(-shift)),
            };
            _mm256_and_si256(shifted, _mm256_set1_epi8(mask as i8))
        }
        fn or(left: __m256i, right: __m256i) -> __m256i { _mm256_or_si256(left, right) }
        fn dot<const BITS: usize>(sum: __m256i, weights: &[__m256i; 4], activations: *const i8) -> __m256i {
            let four = activations.cast::<i32>();
            let splat = [
                _mm256_set1_epi32(four.read_unaligned()),
                _mm256_set1_epi32(four.add(1).read_unaligned()),
                _mm256_set1_epi32(four.add(2).read_unaligned()),
                _mm256_set1_epi32(four.add(3).read_unaligned()),
            ];
            dot_bits::<BITS>(sum, weights, &splat)
        }
        fn splat_int(source: *const i32) -> __m256i { _mm256_set1_epi32(source.read_unaligned()) }
        fn zero_ints() -> __m256i { _mm256_setzero_si256() }
        fn shift_left(value: __m256i, shift: u32) -> __m256i { _mm256_sll_epi32(value, _mm_cvtsi32_si128(shift as i32)) }
        fn to_floats(value: __m256i) -> __m256 { _mm256_cvtepi32_ps(value) }
        fn splat(source: *const f32) -> __m256 { _mm256_set1_ps(source.read_unaligned()) }
        fn zero() -> __m256 { _mm256_setzero_ps() }
        fn add(left: __m256, right: __m256) -> __m256 { _mm256_add_ps(left, right) }
        fn mul(left: __m256, right: __m256) -> __m256 { _mm256_mul_ps(left, right) }
        fn mul_add(left: __m256, right: __m256, sum: __m256) -> __m256 { _mm256_fmadd_ps(left, right, sum) }
        fn load_f32(source: *const u8) -> __m256 { _mm256_loadu_ps(source.cast()) }
        fn load_f16(source: *const u8) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(source.cast())) }
        fn load_bf16(source: *const u8) -> __m256 {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(source.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
        fn load_u8(source: *const u8, shift: u32, mask: i32) -> __m256 {
            let wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(source.cast()));
            let shifted = _mm256_srl_epi32(wide, _mm_cvtsi32_si128(shift as i32));
            _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(mask)))
        }
        fn load_i8(source: *const u8) -> __m256 {
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(source.cast())))
        }
        fn store(target: *mut f32, value: __m256) { _mm256_storeu_ps(target, value) }
    }
}

simd_methods! {
    // Two products of b-bit weights and activations up to 127 come to 254 * (2^b - 1): in the 32767 of an i16 there is
    // room for four such sums up to 5 bits (31,496), for two at 6 bits (32,004), for one at 7 bits (32,258).
    fn dot_bits<const BITS: usize>(sum: __m256i, weights: &[__m256i; 4], activations: &[__m256i; 4]) -> __m256i {
        let ones = _mm256_set1_epi16(1);
        if BITS == 8 {
            let low = _mm256_set1_epi8(0x7f);
            let mut sum = sum;
            for (weight, four) in weights.iter().zip(activations) {
                let rest = _mm256_maddubs_epi16(_mm256_and_si256(*weight, low), *four);
                let top = _mm256_maddubs_epi16(_mm256_andnot_si256(low, *weight), *four);
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(rest, ones));
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(top, ones));
            }
            return sum;
        }
        let first = _mm256_add_epi16(
            _mm256_maddubs_epi16(weights[0], activations[0]),
            _mm256_maddubs_epi16(weights[1], activations[1]),
        );
        let second = _mm256_add_epi16(
            _mm256_maddubs_epi16(weights[2], activations[2]),
            _mm256_maddubs_epi16(weights[3], activations[3]),
        );
        if BITS == 6 {
            let both = _mm256_add_epi32(_mm256_madd_epi16(first, ones), _mm256_madd_epi16(second, ones));
            return _mm256_add_epi32(sum, both);
        }
        _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_add_epi16(first, second), ones))
    }
}
