//! For each level of the processor the table of kernels compiled with its instructions.
//! For: `matmul`.
//! Invariant: a table is handed out only for a [`Level`], which proves that the processor has the instructions.

use lockstep_formats::GgmlType;

use super::{
    activations::{interleave_tile, quantize_tile},
    format::{Format, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, Q8_K},
    kernel::{self, BF16, F16, F32, Plain, Product, Span},
    portable::Portable,
};
use crate::cpu::simd::{Kind, Level};

/// The kernels of one level. The functions are unsafe only for the contract of their pointers and lengths
/// (see `kernel`); that the instructions exist was checked when the table was handed out.
pub(super) struct Kernels {
    /// Tokens of the widest tile.
    pub(super) max_tile: usize,
    /// The product for a type and a tile width of 1, 2, 4 or (where `max_tile` is) 8.
    pub(super) product: fn(GgmlType, usize) -> Product,
    /// See `activations::quantize_tile`.
    pub(super) quantize_tile: unsafe fn(&[f32], usize, usize, &mut [u8]),
    /// See `activations::interleave_tile`.
    pub(super) interleave_tile: unsafe fn(&[f32], usize, usize, &mut [f32]),
    /// Dequantizes a row of a group.
    pub(super) read_row: unsafe fn(GgmlType, *const u8, usize, &mut [f32]),
}

impl Kernels {
    /// The kernels of a level.
    pub(super) fn of(level: Level) -> &'static Self {
        match level.kind() {
            Kind::Portable => &portable_level::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => &avx2_level::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Vnni => &avx512_level::KERNELS,
        }
    }
}

/// A quantized or plain format of a type, for the tables.
macro_rules! by_type {
    ($ggml_type:expr, $quantized:ident, $plain:ident $(, $more:tt)*) => {
        match $ggml_type {
            GgmlType::F32 => $plain!(F32 $(, $more)*),
            GgmlType::F16 => $plain!(F16 $(, $more)*),
            GgmlType::BF16 => $plain!(BF16 $(, $more)*),
            GgmlType::Q4_0 => $quantized!(Q4_0 $(, $more)*),
            GgmlType::Q4_1 => $quantized!(Q4_1 $(, $more)*),
            GgmlType::Q5_0 => $quantized!(Q5_0 $(, $more)*),
            GgmlType::Q5_1 => $quantized!(Q5_1 $(, $more)*),
            GgmlType::Q8_0 | GgmlType::Q8_1 => $quantized!(Q8_0 $(, $more)*),
            GgmlType::Q2_K => $quantized!(Q2_K $(, $more)*),
            GgmlType::Q3_K => $quantized!(Q3_K $(, $more)*),
            GgmlType::Q4_K => $quantized!(Q4_K $(, $more)*),
            GgmlType::Q5_K => $quantized!(Q5_K $(, $more)*),
            GgmlType::Q6_K => $quantized!(Q6_K $(, $more)*),
            GgmlType::Q8_K => $quantized!(Q8_K $(, $more)*),
        }
    };
}

/// Compiles every kernel for a level.
macro_rules! level {
    ($module:ident, $simd:ty, $max_tile:literal, $(#[$features:meta])?) => {
        mod $module {
            use super::*;

            pub(super) static KERNELS: Kernels = Kernels {
                max_tile: $max_tile,
                product,
                quantize_tile,
                interleave_tile,
                read_row,
            };

            /// # Safety
            /// See [`kernel::quantized`].
            $(#[$features])?
            unsafe fn quantized<F: Format, const T: usize>(
                group: *const u8,
                span: &Span,
                tile: *const u8,
                output: *mut f32,
            ) {
                // SAFETY: the caller's promise.
                unsafe { kernel::quantized::<$simd, F, T>(group, span, tile, output) }
            }

            /// # Safety
            /// See [`kernel::plain`].
            $(#[$features])?
            unsafe fn plain<P: Plain, const T: usize>(
                group: *const u8,
                span: &Span,
                tile: *const u8,
                output: *mut f32,
            ) {
                // SAFETY: the caller's promise.
                unsafe { kernel::plain::<$simd, P, T>(group, span, tile, output) }
            }

            fn of_width(tile: usize, products: [Product; 4]) -> Product {
                products[tile.min($max_tile).ilog2() as usize]
            }

            fn product(ggml_type: GgmlType, tile: usize) -> Product {
                macro_rules! quantized_product {
                    ($format:ty) => {
                        of_width(tile, [
                            quantized::<$format, 1>,
                            quantized::<$format, 2>,
                            quantized::<$format, 4>,
                            quantized::<$format, $max_tile>,
                        ])
                    };
                }
                macro_rules! plain_product {
                    ($format:ty) => {
                        of_width(tile, [
                            plain::<$format, 1>,
                            plain::<$format, 2>,
                            plain::<$format, 4>,
                            plain::<$format, $max_tile>,
                        ])
                    };
                }
                by_type!(ggml_type, quantized_product, plain_product)
            }

            /// # Safety
            /// The level's instructions are there.
            $(#[$features])?
            unsafe fn quantize_tile(rows: &[f32], columns: usize, width: usize, tile: &mut [u8]) {
                super::quantize_tile(rows, columns, width, tile);
            }

            /// # Safety
            /// The level's instructions are there.
            $(#[$features])?
            unsafe fn interleave_tile(rows: &[f32], columns: usize, width: usize, tile: &mut [f32]) {
                super::interleave_tile(rows, columns, width, tile);
            }

            /// # Safety
            /// See [`kernel::dequantize_row`].
            $(#[$features])?
            unsafe fn read_row(ggml_type: GgmlType, group: *const u8, row: usize, output: &mut [f32]) {
                macro_rules! quantized_row {
                    ($format:ty) => {
                        // SAFETY: the caller's promise.
                        unsafe { kernel::dequantize_row::<$simd, $format>(group, row, output) }
                    };
                }
                macro_rules! plain_row {
                    ($format:ty) => {
                        // SAFETY: the caller's promise.
                        unsafe { kernel::plain_row::<$simd, $format>(group, row, output) }
                    };
                }
                by_type!(ggml_type, quantized_row, plain_row)
            }
        }
    };
}

level!(portable_level, Portable, 4,);
#[cfg(target_arch = "x86_64")]
level!(avx2_level, super::super::avx2::Avx2, 4, #[target_feature(enable = "avx2,fma,f16c")]);
#[cfg(target_arch = "x86_64")]
level!(
    avx512_level,
    super::super::avx512::Avx512,
    8,
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
);
