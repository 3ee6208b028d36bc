//! The packed layout: 16 rows interleaved, so that one vector holds four consecutive elements of each row and a
//! product needs no horizontal sum. It is also the B tile (VNNI) layout of matrix units.
//! For: `pack`, which writes it, and `kernel`, which reads it.
//! Invariant: values take about the file's bits. A row group is its quants (bit planes, for each 32 columns), then its
//! scales (for each 32 or 256 columns), 64-byte aligned as a whole; rows past the end are zeros.
//!
//! Element `k` of row `r` in a block of 32 columns is byte `4r + k % 4` of vector `j = k / 4` (of 8). A plane is 64 bytes,
//! 4 of each row: the words that `quant::planes` makes of the row's block.

use lockstep_formats::GgmlType;

use super::simd::Simd;

/// Rows of a group.
pub(super) const GROUP: usize = 16;
/// Columns of a block of quants.
pub(super) const BLOCK: usize = 32;
/// Blocks of a super-block.
pub(super) const SUPER: usize = 8;

/// How the scales of a row group are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaleKind {
    /// Each block: 16 f16 scales.
    Half,
    /// Each block: 16 f16 scales, 16 f16 minima.
    HalfMin,
    /// Each block: 16 f32 scales.
    Single,
    /// Each super-block: f16 scale and f16 minimum factor of 16 rows; each block: 16 scales, 16 minima (u8).
    SixBit,
    /// Each super-block: f16 scale and f16 minimum factor of 16 rows; each half block: scale | minimum << 4 of 16 rows.
    FourBit,
    /// Each super-block: f16 scale of 16 rows; each half block: 16 scales (i8).
    Signed,
}

impl ScaleKind {
    /// Of a quantized type.
    pub(super) fn of(ggml_type: GgmlType) -> Self {
        match ggml_type {
            GgmlType::Q4_1 | GgmlType::Q5_1 => Self::HalfMin,
            GgmlType::Q8_K => Self::Single,
            GgmlType::Q4_K | GgmlType::Q5_K => Self::SixBit,
            GgmlType::Q2_K => Self::FourBit,
            GgmlType::Q3_K | GgmlType::Q6_K => Self::Signed,
            _ => Self::Half,
        }
    }

    /// `(blocks, bytes)` of one unit of scales of a row group.
    pub(super) const fn unit(self) -> (usize, usize) {
        match self {
            Self::Half => (1, 2 * GROUP),
            Self::HalfMin | Self::Single => (1, 4 * GROUP),
            Self::SixBit | Self::FourBit => (SUPER, 4 * GROUP + 2 * SUPER * GROUP),
            Self::Signed => (SUPER, 2 * GROUP + 2 * SUPER * GROUP),
        }
    }

    /// Whether a block has two scales.
    pub(super) const fn is_halved(self) -> bool {
        matches!(self, Self::FourBit | Self::Signed)
    }

    /// Whether there are minima.
    pub(super) const fn has_min(self) -> bool {
        matches!(self, Self::HalfMin | Self::SixBit | Self::FourBit)
    }
}

/// Bytes of the quants of one block of a row group.
pub(super) const fn quant_bytes(bits: usize) -> usize {
    GROUP * BLOCK * bits / 8
}

/// Bytes of a packed row group of a quantized type, a multiple of 64.
pub(super) const fn group_bytes(bits: usize, scales: ScaleKind, columns: usize) -> usize {
    let (unit_blocks, unit_bytes) = scales.unit();
    let num_blocks = columns / BLOCK;
    (num_blocks * quant_bytes(bits) + num_blocks.div_ceil(unit_blocks) * unit_bytes).next_multiple_of(64)
}

/// A quantized type as the kernel sees it.
pub(super) trait Format {
    /// Bits of a quant.
    const BITS: usize;
    /// `offset == 1 << OFFSET_SHIFT`; 0 for types without offset.
    const OFFSET_SHIFT: u32;
    /// Layout of the scales.
    const SCALES: ScaleKind;

    /// The 8 vectors of a block, in its two halves. `block` points at its planes (plus `4 * first row`).
    ///
    /// # Safety
    /// As [`Simd`]; the planes of the block are readable.
    #[inline(always)]
    unsafe fn unpack<S: Simd>(block: *const u8) -> [[S::Bytes; 4]; 2] {
        // SAFETY: the caller's promise.
        unsafe { [unpack_half::<S>(block, Self::BITS, 0), unpack_half::<S>(block, Self::BITS, 4)] }
    }

    /// [`Simd::dot`] for weights of this format.
    ///
    /// # Safety
    /// As [`Simd::dot`].
    unsafe fn dot<S: Simd>(sum: S::Ints, weights: &[S::Bytes; 4], activations: *const i8) -> S::Ints;

    /// Scales and minima of the two halves of a block, for the rows from `lane`. `scales` points at the group's scales.
    ///
    /// # Safety
    /// As [`Simd`]; the scales of the block are readable.
    #[inline(always)]
    unsafe fn scales<S: Simd>(scales: *const u8, block: usize, lane: usize) -> Scales<S> {
        // SAFETY: the caller's promise; offsets are those of the layout.
        unsafe { load_scales::<S>(Self::SCALES, scales, block, lane) }
    }
}

/// Scales and minima of the two halves of a block. Equal where the type has one for 32 columns.
pub(super) struct Scales<S: Simd> {
    pub(super) scale: [S::Floats; 2],
    pub(super) min: [S::Floats; 2],
}

/// Vectors `first..first + 4` of a block.
///
/// # Safety
/// As [`Format::unpack`].
#[inline(always)]
unsafe fn unpack_half<S: Simd>(block: *const u8, bits: usize, first: usize) -> [S::Bytes; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        [
            unpack_vector::<S>(block, bits, first),
            unpack_vector::<S>(block, bits, first + 1),
            unpack_vector::<S>(block, bits, first + 2),
            unpack_vector::<S>(block, bits, first + 3),
        ]
    }
}

/// Vector `j` of a block.
///
/// # Safety
/// As [`Format::unpack`].
#[inline(always)]
unsafe fn unpack_vector<S: Simd>(block: *const u8, bits: usize, j: usize) -> S::Bytes {
    // SAFETY: planes are 64 bytes apart, and a type has as many as it has bits.
    unsafe {
        let index = j as i32;
        if bits == 8 {
            return S::load_bytes(block.add(64 * j));
        }
        let low = if bits >= 4 {
            S::field(S::load_bytes(block.add(64 * (j % 4))), index / 4 * 4, 15)
        } else {
            S::field(S::load_bytes(block.add(64 * (j % 2))), index / 2 * 2, 3)
        };
        match bits {
            3 => S::or(low, S::field(S::load_bytes(block.add(128)), index - 2, 4)),
            5 => S::or(low, S::field(S::load_bytes(block.add(256)), index - 4, 16)),
            6 => S::or(low, S::field(S::load_bytes(block.add(256 + 64 * (j % 2))), index / 2 * 2 - 4, 48)),
            _ => low,
        }
    }
}

/// # Safety
/// As [`Format::scales`].
#[inline(always)]
unsafe fn load_scales<S: Simd>(kind: ScaleKind, scales: *const u8, block: usize, lane: usize) -> Scales<S> {
    let (unit_blocks, unit_bytes) = kind.unit();
    // SAFETY: offsets stay inside the unit of the block.
    unsafe {
        let unit = scales.add(block / unit_blocks * unit_bytes);
        let (d, m) = (unit.add(2 * lane), unit.add(2 * GROUP + 2 * lane));
        let index = block % unit_blocks;
        match kind {
            ScaleKind::Half => Scales { scale: [S::load_f16(d); 2], min: [S::zero(); 2] },
            ScaleKind::HalfMin => Scales { scale: [S::load_f16(d); 2], min: [S::load_f16(m); 2] },
            ScaleKind::Single => Scales { scale: [S::load_f32(unit.add(4 * lane)); 2], min: [S::zero(); 2] },
            ScaleKind::SixBit => {
                let bytes = unit.add(4 * GROUP + 2 * GROUP * index + lane);
                let scale = S::mul(S::load_f16(d), S::load_u8(bytes, 0, 255));
                let min = S::mul(S::load_f16(m), S::load_u8(bytes.add(GROUP), 0, 255));
                Scales { scale: [scale; 2], min: [min; 2] }
            }
            ScaleKind::FourBit => {
                let bytes = unit.add(4 * GROUP + 2 * GROUP * index + lane);
                let (d, m) = (S::load_f16(d), S::load_f16(m));
                let second = bytes.add(GROUP);
                Scales {
                    scale: [S::mul(d, S::load_u8(bytes, 0, 15)), S::mul(d, S::load_u8(second, 0, 15))],
                    min: [S::mul(m, S::load_u8(bytes, 4, 15)), S::mul(m, S::load_u8(second, 4, 15))],
                }
            }
            ScaleKind::Signed => {
                let bytes = unit.add(2 * GROUP + 2 * GROUP * index + lane);
                let d = S::load_f16(d);
                let scale = [S::mul(d, S::load_i8(bytes)), S::mul(d, S::load_i8(bytes.add(GROUP)))];
                Scales { scale, min: [S::zero(); 2] }
            }
        }
    }
}

/// The quantized types as the kernel sees them.
macro_rules! formats {
    ($($name:ident: $bits:literal bits, offset shift $shift:literal, $scales:ident;)*) => {
        $(
            #[allow(non_camel_case_types, reason = "the names are GGUF's")]
            pub(super) struct $name;

            impl Format for $name {
                const BITS: usize = $bits;
                const OFFSET_SHIFT: u32 = $shift;
                const SCALES: ScaleKind = ScaleKind::$scales;

                #[inline(always)]
                unsafe fn dot<S: Simd>(sum: S::Ints, weights: &[S::Bytes; 4], activations: *const i8) -> S::Ints {
                    // SAFETY: the caller's promise.
                    unsafe { S::dot::<$bits>(sum, weights, activations) }
                }
            }
        )*
    };
}

formats! {
    Q4_0: 4 bits, offset shift 3, Half;
    Q4_1: 4 bits, offset shift 0, HalfMin;
    Q5_0: 5 bits, offset shift 4, Half;
    Q5_1: 5 bits, offset shift 0, HalfMin;
    Q8_0: 8 bits, offset shift 7, Half;
    Q2_K: 2 bits, offset shift 0, FourBit;
    Q3_K: 3 bits, offset shift 2, Signed;
    Q4_K: 4 bits, offset shift 0, SixBit;
    Q5_K: 5 bits, offset shift 0, SixBit;
    Q6_K: 6 bits, offset shift 5, Signed;
    Q8_K: 8 bits, offset shift 7, Single;
}
