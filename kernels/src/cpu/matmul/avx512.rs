//! Level AVX-512 with VNNI: 16 rows in a vector, four products a lane and instruction.

use std::arch::x86_64::*;

use super::simd::{Simd, simd_methods};

#[derive(Clone, Copy)]
pub(super) struct Avx512;

impl Simd for Avx512 {
    const LANES: usize = 16;
    type Bytes = __m512i;
    type Ints = __m512i;
    type Floats = __m512;

    simd_methods! {
        fn prefetch(address: *const u8) { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
        fn load_bytes(source: *const u8) -> __m512i { _mm512_loadu_si512(source.cast()) }
        fn store_bytes(target: *mut u8, value: __m512i) { _mm512_storeu_si512(target.cast(), value) }
        fn field(value: __m512i, shift: i32, mask: u8) -> __m512i {
            let shifted = match shift {
                0 => value,
                1.. => _mm512_srl_epi16(value, _mm_cvtsi32_si128(shift)),
                _ => _mm512_sll_epi16(value, _mm_cvtsi32_si128(-shift)),
            };
            _mm512_and_si512(shifted, _mm512_set1_epi8(mask as i8))
        }
        fn or(left: __m512i, right: __m512i) -> __m512i { _mm512_or_si512(left, right) }
        fn dot<const BITS: usize>(sum: __m512i, weights: &[__m512i; 4], activations: *const i8) -> __m512i {
            let four = activations.cast::<i32>();
            let sum = _mm512_dpbusd_epi32(sum, weights[0], _mm512_set1_epi32(four.read_unaligned()));
            let sum = _mm512_dpbusd_epi32(sum, weights[1], _mm512_set1_epi32(four.add(1).read_unaligned()));
            let sum = _mm512_dpbusd_epi32(sum, weights[2], _mm512_set1_epi32(four.add(2).read_unaligned()));
            _mm512_dpbusd_epi32(sum, weights[3], _mm512_set1_epi32(four.add(3).read_unaligned()))
        }
        fn splat_int(source: *const i32) -> __m512i { _mm512_set1_epi32(source.read_unaligned()) }
        fn zero_ints() -> __m512i { _mm512_setzero_si512() }
        fn shift_left(value: __m512i, shift: u32) -> __m512i { _mm512_sll_epi32(value, _mm_cvtsi32_si128(shift as i32)) }
        fn to_floats(value: __m512i) -> __m512 { _mm512_cvtepi32_ps(value) }
        fn splat(source: *const f32) -> __m512 { _mm512_set1_ps(source.read_unaligned()) }
        fn zero() -> __m512 { _mm512_setzero_ps() }
        fn add(left: __m512, right: __m512) -> __m512 { _mm512_add_ps(left, right) }
        fn mul(left: __m512, right: __m512) -> __m512 { _mm512_mul_ps(left, right) }
        fn mul_add(left: __m512, right: __m512, sum: __m512) -> __m512 { _mm512_fmadd_ps(left, right, sum) }
        fn load_f32(source: *const u8) -> __m512 { _mm512_loadu_ps(source.cast()) }
        fn load_f16(source: *const u8) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(source.cast())) }
        fn load_bf16(source: *const u8) -> __m512 {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(source.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
        fn load_u8(source: *const u8, shift: u32, mask: i32) -> __m512 {
            let wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(source.cast()));
            let shifted = _mm512_srl_epi32(wide, _mm_cvtsi32_si128(shift as i32));
            _mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(mask)))
        }
        fn load_i8(source: *const u8) -> __m512 {
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(source.cast())))
        }
        fn store(target: *mut f32, value: __m512) { _mm512_storeu_ps(target, value) }
    }
}
