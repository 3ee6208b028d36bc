//! Levels of the processor, and for each the table of kernels compiled with its instructions.
//! For: `matmul`; the level is chosen once, when the device is opened.
//! Invariant: `Kernels` of a level exist only where `Level::is_supported` is true.

use lockstep_formats::GgmlType;

use super::{
    activations::{interleave_tile, quantize_tile},
    format::{Format, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, Q8_K},
    kernel::{self, BF16, F16, F32, Plain, Product},
    portable::Portable,
    sum::{Double, Single, Sum},
};

/// Instructions that the kernels use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// What the compiler makes of plain loops.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and VNNI.
    Avx512Vnni,
}

impl Level {
    /// Every level, the widest last.
    pub const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512Vnni];

    /// The widest that this processor has.
    pub fn detect() -> Self {
        Self::ALL.into_iter().rev().find(|level| level.is_supported()).unwrap_or(Self::Portable)
    }

    /// Whether this processor has the instructions.
    pub fn is_supported(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let has_avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            match self {
                Self::Portable => true,
                Self::Avx2 => has_avx2,
                Self::Avx512Vnni => {
                    has_avx2
                        && is_x86_feature_detected!("avx512f")
                        && is_x86_feature_detected!("avx512bw")
                        && is_x86_feature_detected!("avx512vl")
                        && is_x86_feature_detected!("avx512vnni")
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Portable
        }
    }

    /// Name for reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512Vnni => "avx512-vnni",
        }
    }
}

/// The product for a type and a width of tiles.
pub(super) type ProductOf<V> = fn(GgmlType, usize) -> Product<V>;

/// The kernels of one level. The functions are unsafe only for the contract of their pointers and lengths
/// (see `kernel`); that the instructions exist was checked when the table was handed out.
pub(super) struct Kernels {
    /// Tokens of the widest tile.
    pub(super) max_tile: usize,
    /// The product for a type and a tile width of 1, 2, 4 or (where `max_tile` is) 8.
    pub(super) product: ProductOf<f32>,
    /// The same, summed so that cuts between blocks of columns do not show.
    pub(super) partial_product: ProductOf<f64>,
    /// See `activations::quantize_tile`.
    pub(super) quantize_tile: unsafe fn(&[f32], usize, usize, &mut [u8]),
    /// See `activations::interleave_tile`.
    pub(super) interleave_tile: unsafe fn(&[f32], usize, usize, &mut [f32]),
    /// Dequantizes a row of a group.
    pub(super) read_row: unsafe fn(GgmlType, *const u8, usize, &mut [f32]),
}

impl Kernels {
    /// The kernels of a level, or of the portable one where the processor lacks it.
    pub(super) fn of(level: Level) -> &'static Self {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Vnni if level.is_supported() => &avx512_level::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 if level.is_supported() => &avx2_level::KERNELS,
            _ => &portable_level::KERNELS,
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
                product: product::<Single<$simd>>,
                partial_product: product::<Double<$simd>>,
                quantize_tile,
                interleave_tile,
                read_row,
            };

            /// # Safety
            /// See [`kernel::quantized`].
            $(#[$features])?
            unsafe fn quantized<A: Sum<$simd>, F: Format, const T: usize>(
                group: *const u8,
                columns: usize,
                tile: *const u8,
                output: *mut A::Value,
            ) {
                // SAFETY: the caller's promise.
                unsafe { kernel::quantized::<$simd, A, F, T>(group, columns, tile, output) }
            }

            /// # Safety
            /// See [`kernel::plain`].
            $(#[$features])?
            unsafe fn plain<A: Sum<$simd>, P: Plain, const T: usize>(
                group: *const u8,
                columns: usize,
                tile: *const u8,
                output: *mut A::Value,
            ) {
                // SAFETY: the caller's promise.
                unsafe { kernel::plain::<$simd, A, P, T>(group, columns, tile, output) }
            }

            fn of_width<V>(tile: usize, products: [Product<V>; 4]) -> Product<V> {
                products[tile.min($max_tile).ilog2() as usize]
            }

            fn product<A: Sum<$simd>>(ggml_type: GgmlType, tile: usize) -> Product<A::Value> {
                macro_rules! quantized_product {
                    ($format:ty) => {
                        of_width(tile, [
                            quantized::<A, $format, 1>,
                            quantized::<A, $format, 2>,
                            quantized::<A, $format, 4>,
                            quantized::<A, $format, $max_tile>,
                        ])
                    };
                }
                macro_rules! plain_product {
                    ($format:ty) => {
                        of_width(tile, [
                            plain::<A, $format, 1>,
                            plain::<A, $format, 2>,
                            plain::<A, $format, 4>,
                            plain::<A, $format, $max_tile>,
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
