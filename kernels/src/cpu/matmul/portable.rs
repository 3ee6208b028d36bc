//! Level portable: plain loops over arrays, in a form that compilers turn into the vectors of any processor (NEON).

use half::f16;

use super::simd::{Simd, simd_methods};

/// Rows in a vector.
const LANES: usize = 8;

#[derive(Clone, Copy)]
pub(super) struct Portable;

#[inline(always)]
fn lanes<T: Copy + Default>(value: impl Fn(usize) -> T) -> [T; LANES] {
    let mut vector = [T::default(); LANES];
    for (lane, element) in vector.iter_mut().enumerate() {
        *element = value(lane);
    }
    vector
}

impl Simd for Portable {
    const LANES: usize = LANES;
    type Bytes = [u8; 4 * LANES];
    type Ints = [i32; LANES];
    type Floats = [f32; LANES];
    type Doubles = [f64; LANES];

    simd_methods! {
        fn prefetch(_address: *const u8) {}
        fn load_bytes(source: *const u8) -> [u8; 4 * LANES] { source.cast::<[u8; 4 * LANES]>().read_unaligned() }
        fn store_bytes(target: *mut u8, value: [u8; 4 * LANES]) {
            target.cast::<[u8; 4 * LANES]>().write_unaligned(value);
        }
        fn field(value: [u8; 4 * LANES], shift: i32, mask: u8) -> [u8; 4 * LANES] {
            let mut fields = value;
            for byte in &mut fields {
                *byte = if shift >= 0 { *byte >> shift } else { *byte << -shift } & mask;
            }
            fields
        }
        fn or(left: [u8; 4 * LANES], right: [u8; 4 * LANES]) -> [u8; 4 * LANES] {
            let mut both = left;
            for (byte, other) in both.iter_mut().zip(right) {
                *byte |= other;
            }
            both
        }
        fn dot<const BITS: usize>(sum: [i32; LANES], weights: &[[u8; 4 * LANES]; 4], activations: *const i8)
        -> [i32; LANES] {
            let activations = activations.cast::<[i8; 16]>().read_unaligned();
            let mut sum = sum;
            for (weight, four) in weights.iter().zip(activations.as_chunks::<4>().0) {
                for (row, total) in weight.as_chunks::<4>().0.iter().zip(&mut sum) {
                    *total += i32::from(row[0]) * i32::from(four[0])
                        + i32::from(row[1]) * i32::from(four[1])
                        + i32::from(row[2]) * i32::from(four[2])
                        + i32::from(row[3]) * i32::from(four[3]);
                }
            }
            sum
        }
        fn splat_int(source: *const i32) -> [i32; LANES] { [source.read_unaligned(); LANES] }
        fn zero_ints() -> [i32; LANES] { [0; LANES] }
        fn shift_left(value: [i32; LANES], shift: u32) -> [i32; LANES] { lanes(|lane| value[lane] << shift) }
        fn to_floats(value: [i32; LANES]) -> [f32; LANES] { lanes(|lane| value[lane] as f32) }
        fn splat(source: *const f32) -> [f32; LANES] { [source.read_unaligned(); LANES] }
        fn zero() -> [f32; LANES] { [0.0; LANES] }
        fn add(left: [f32; LANES], right: [f32; LANES]) -> [f32; LANES] { lanes(|lane| left[lane] + right[lane]) }
        fn mul(left: [f32; LANES], right: [f32; LANES]) -> [f32; LANES] { lanes(|lane| left[lane] * right[lane]) }
        fn mul_add(left: [f32; LANES], right: [f32; LANES], sum: [f32; LANES]) -> [f32; LANES] {
            lanes(|lane| left[lane] * right[lane] + sum[lane])
        }
        fn load_f32(source: *const u8) -> [f32; LANES] { source.cast::<[f32; LANES]>().read_unaligned() }
        fn load_f16(source: *const u8) -> [f32; LANES] {
            let bits = source.cast::<[u16; LANES]>().read_unaligned();
            lanes(|lane| f16::from_bits(bits[lane]).to_f32_const())
        }
        fn load_bf16(source: *const u8) -> [f32; LANES] {
            let bits = source.cast::<[u16; LANES]>().read_unaligned();
            lanes(|lane| f32::from_bits(u32::from(bits[lane]) << 16))
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
        fn zero_doubles() -> [f64; LANES] { [0.0; LANES] }
        fn add_wide(sum: [f64; LANES], value: [f32; LANES]) -> [f64; LANES] {
            lanes(|lane| sum[lane] + f64::from(value[lane]))
        }
        fn store_doubles(target: *mut f64, value: [f64; LANES]) {
            target.cast::<[f64; LANES]>().write_unaligned(value);
        }
    }
}
