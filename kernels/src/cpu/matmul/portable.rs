//! Level portable: arrays of 128 bits, which compilers turn into the vectors that x86-64 (SSE2) and aarch64 (NEON)
//! always have. What they do not find by themselves is written for each (`pairs`).

use std::mem::transmute;

use super::{
    pairs::{self, Pairs},
    simd::{Simd, simd_methods},
};

/// Rows in a vector.
const LANES: usize = 4;

#[derive(Clone, Copy)]
pub(super) struct Portable;

#[inline(always)]
fn lanes<T: Copy + Default, const N: usize>(value: impl Fn(usize) -> T) -> [T; N] {
    let mut vector = [T::default(); N];
    for (lane, element) in vector.iter_mut().enumerate() {
        *element = value(lane);
    }
    vector
}

#[inline(always)]
fn widen_half(half: u32) -> f32 {
    /// Exponent bias of f32 less that of f16, as a factor.
    const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
    // The product also turns subnormal halves into normal numbers.
    let finite = (f32::from_bits((half & 0x7fff) << 13) * REBIAS).to_bits();
    let infinite = if half & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(finite | infinite | (half & 0x8000) << 16)
}

impl Simd for Portable {
    const LANES: usize = LANES;
    type Bytes = [u8; 4 * LANES];
    type Ints = [Pairs; 2];
    type Floats = [f32; LANES];

    simd_methods! {
        fn prefetch(_address: *const u8) {}
        fn load_bytes(source: *const u8) -> [u8; 4 * LANES] { source.cast::<[u8; 4 * LANES]>().read_unaligned() }
        fn store_bytes(target: *mut u8, value: [u8; 4 * LANES]) {
            target.cast::<[u8; 4 * LANES]>().write_unaligned(value);
        }
        fn field(value: [u8; 4 * LANES], shift: i32, mask: u8) -> [u8; 4 * LANES] {
            lanes(|byte| if shift >= 0 { value[byte] >> shift } else { value[byte] << -shift } & mask)
        }
        fn or(left: [u8; 4 * LANES], right: [u8; 4 * LANES]) -> [u8; 4 * LANES] {
            lanes(|byte| left[byte] | right[byte])
        }
        fn dot<const BITS: usize>(sum: [Pairs; 2], weights: &[[u8; 4 * LANES]; 4], activations: *const i8)
        -> [Pairs; 2] {
            pairs::add_dot::<BITS>(sum, weights, activations)
        }
        fn splat_int(source: *const i32) -> [Pairs; 2] {
            let value = source.read_unaligned();
            transmute::<[i32; 2 * LANES], _>(lanes(|pair| if pair % 2 == 0 { value } else { 0 }))
        }
        fn zero_ints() -> [Pairs; 2] { transmute([0_i32; 2 * LANES]) }
        fn shift_left(value: [Pairs; 2], shift: u32) -> [Pairs; 2] {
            let value: [i32; 2 * LANES] = transmute(value);
            transmute::<[i32; 2 * LANES], _>(lanes(|pair| value[pair] << shift))
        }
        fn to_floats(value: [Pairs; 2]) -> [f32; LANES] {
            let sums = pairs::fold(value);
            lanes(|lane| sums[lane] as f32)
        }
        fn splat(source: *const f32) -> [f32; LANES] { [source.read_unaligned(); LANES] }
        fn zero() -> [f32; LANES] { [0.0; LANES] }
        fn add(left: [f32; LANES], right: [f32; LANES]) -> [f32; LANES] { lanes(|lane| left[lane] + right[lane]) }
        fn mul(left: [f32; LANES], right: [f32; LANES]) -> [f32; LANES] { lanes(|lane| left[lane] * right[lane]) }
        fn mul_add(left: [f32; LANES], right: [f32; LANES], sum: [f32; LANES]) -> [f32; LANES] {
            lanes(|lane| left[lane] * right[lane] + sum[lane])
        }
        fn load_f32(source: *const u8) -> [f32; LANES] { source.cast::<[f32; LANES]>().read_unaligned() }
        fn load_f16(source: *const u8) -> [f32; LANES] {
            let bits = pairs::widen(source);
            lanes(|lane| widen_half(bits[lane]))
        }
        fn load_bf16(source: *const u8) -> [f32; LANES] {
            let bits = pairs::widen(source);
            lanes(|lane| f32::from_bits(bits[lane] << 16))
        }
        fn load_u8(source: *const u8, shift: u32, mask: i32) -> [f32; LANES] {
            let bytes = source.cast::<[u8; LANES]>().read_unaligned();
            lanes(|lane| (i32::from(bytes[lane]) >> shift & mask) as f32)
        }
        fn load_i8(source: *const u8) -> [f32; LANES] {
            let bytes = source.cast::<[i8; LANES]>().read_unaligned();
            lanes(|lane| f32::from(bytes[lane]))
        }
        fn store(target: *mut f32, value: [f32; LANES]) { target.cast::<[f32; LANES]>().write_unaligned(value) }
    }
}
