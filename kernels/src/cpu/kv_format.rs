//! How the CPU stores an element of keys and values: f16, bf16 or f32; arithmetic is f32 with each.
//! For: the cache and those who write and read it, which are compiled once for each.
//! Invariant: a finite value is stored as a finite one, so that a weight of 0 makes it 0.

use super::simd::{LANES, Simd};

/// A format; its type is the proof.
pub(super) trait KvFormat: 'static {
    /// What an element is stored as.
    type Stored: Copy + Default + Send + Sync + 'static;

    /// Reads sixteen elements.
    fn load<S: Simd>(simd: S, from: &[Self::Stored; LANES]) -> S::Vector;
    /// Writes sixteen elements, rounded to nearest even; what is too large becomes the largest that is finite.
    fn store<S: Simd>(simd: S, from: &[f32; LANES], to: &mut [Self::Stored; LANES]);
}

/// IEEE half precision.
pub(super) struct Half;
/// The upper half of an f32.
pub(super) struct Bfloat;
/// Single precision.
pub(super) struct Single;

/// `value` within the finite range of a format.
#[inline(always)]
fn clamp<S: Simd>(simd: S, from: &[f32; LANES], largest: f32) -> S::Vector {
    simd.max(simd.splat(-largest), simd.min(simd.splat(largest), simd.load(from)))
}

impl KvFormat for Half {
    type Stored = u16;

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[u16; LANES]) -> S::Vector {
        simd.load_f16(from)
    }
    #[inline(always)]
    fn store<S: Simd>(simd: S, from: &[f32; LANES], to: &mut [u16; LANES]) {
        let finite = clamp(simd, from, half::f16::MAX.to_f32_const());
        simd.store_f16(finite, to);
    }
}

impl KvFormat for Bfloat {
    type Stored = u16;

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[u16; LANES]) -> S::Vector {
        let mut wide = [0.0; LANES];
        for lane in 0..LANES {
            wide[lane] = f32::from_bits(u32::from(from[lane]) << 16);
        }
        simd.load(&wide)
    }
    #[inline(always)]
    fn store<S: Simd>(simd: S, from: &[f32; LANES], to: &mut [u16; LANES]) {
        let finite = simd.to_array(clamp(simd, from, half::bf16::MAX.to_f32_const()));
        for lane in 0..LANES {
            to[lane] = half::bf16::from_f32(finite[lane]).to_bits();
        }
    }
}

impl KvFormat for Single {
    type Stored = f32;

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[f32; LANES]) -> S::Vector {
        simd.load(from)
    }
    #[inline(always)]
    fn store<S: Simd>(simd: S, from: &[f32; LANES], to: &mut [f32; LANES]) {
        simd.store(clamp(simd, from, f32::MAX), to);
    }
}

/// Calls `$call` with `$format` as the type of the format that keeps elements of `$dtype`.
macro_rules! with_format {
    ($dtype:expr, |$format:ident| $call:expr) => {{
        use lockstep_formats::Dtype;
        use $crate::cpu::kv_format::{Bfloat, Half, Single};
        match $dtype {
            Dtype::F16 => {
                type $format = Half;
                $call
            }
            Dtype::Bf16 => {
                type $format = Bfloat;
                $call
            }
            Dtype::F32 => {
                type $format = Single;
                $call
            }
        }
    }};
}
pub(super) use with_format;
