//! The vector operations that the matmul kernels are written in, one implementation for each level of the processor.
//! For: `kernel`, which is generic over it and written once.
//! Invariant: a level is used only where a [`Level`](crate::cpu::simd::Level) proves its instructions; integer results are exact and equal at every level.
//! Not here: the levels themselves (`avx512`, `avx2`, `portable`).

/// Vectors of `LANES` rows of a row group: 4 bytes, one i32 or one f32 of each row.
///
/// # Safety
/// Every method needs the instructions of the level, and pointers to as many readable (or writable) elements as its
/// vector has; no alignment is needed.
pub(super) trait Simd: Copy + 'static {
    /// Rows in a vector: 16, or 8 (a row group is then done in two passes).
    const LANES: usize;
    /// Four consecutive elements of each row.
    type Bytes: Copy;
    /// One i32 of each row.
    type Ints: Copy;
    /// One f32 of each row.
    type Floats: Copy;

    /// Asks for a cache line ahead of its use; any address will do.
    unsafe fn prefetch(address: *const u8);
    /// Loads `4 * LANES` bytes.
    unsafe fn load_bytes(source: *const u8) -> Self::Bytes;
    /// Stores `4 * LANES` bytes.
    unsafe fn store_bytes(target: *mut u8, value: Self::Bytes);
    /// Each byte shifted right by `shift` (left if negative, by less than 8), then masked.
    unsafe fn field(value: Self::Bytes, shift: i32, mask: u8) -> Self::Bytes;
    /// Bitwise or.
    unsafe fn or(left: Self::Bytes, right: Self::Bytes) -> Self::Bytes;
    /// Adds to each row's sum the product of its 16 unsigned weights (below `1 << BITS`) and the 16 signed activations.
    unsafe fn dot<const BITS: usize>(sum: Self::Ints, weights: &[Self::Bytes; 4], activations: *const i8)
    -> Self::Ints;

    /// The i32 at `source`, in each row.
    unsafe fn splat_int(source: *const i32) -> Self::Ints;
    /// Zeros.
    unsafe fn zero_ints() -> Self::Ints;
    /// Each multiplied by `1 << shift`.
    unsafe fn shift_left(value: Self::Ints, shift: u32) -> Self::Ints;
    /// Converts to f32.
    unsafe fn to_floats(value: Self::Ints) -> Self::Floats;

    /// The f32 at `source`, in each row.
    unsafe fn splat(source: *const f32) -> Self::Floats;
    /// Zeros.
    unsafe fn zero() -> Self::Floats;
    /// Sum.
    unsafe fn add(left: Self::Floats, right: Self::Floats) -> Self::Floats;
    /// Product.
    unsafe fn mul(left: Self::Floats, right: Self::Floats) -> Self::Floats;
    /// `left * right + sum`.
    unsafe fn mul_add(left: Self::Floats, right: Self::Floats, sum: Self::Floats) -> Self::Floats;
    /// Loads f32.
    unsafe fn load_f32(source: *const u8) -> Self::Floats;
    /// Loads f16.
    unsafe fn load_f16(source: *const u8) -> Self::Floats;
    /// Loads bf16.
    unsafe fn load_bf16(source: *const u8) -> Self::Floats;
    /// Loads unsigned bytes and converts them, after a shift right and a mask.
    unsafe fn load_u8(source: *const u8, shift: u32, mask: i32) -> Self::Floats;
    /// Loads signed bytes and converts them.
    unsafe fn load_i8(source: *const u8) -> Self::Floats;
    /// Stores f32.
    unsafe fn store(target: *mut f32, value: Self::Floats);
}

/// Methods of a [`Simd`] level: inlined into the kernel, which has the level's instructions enabled.
macro_rules! simd_methods {
    ($(fn $name:ident $(<const $bits:ident: usize>)? ($($argument:ident: $type:ty),*) $(-> $result:ty)? $body:block)*) => {
        $(
            #[inline(always)]
            unsafe fn $name $(<const $bits: usize>)? ($($argument: $type),*) $(-> $result)? {
                // SAFETY: the caller promises the level's instructions and valid pointers (see the trait).
                #[allow(unused_unsafe, reason = "some bodies are safe at some levels")]
                unsafe {
                    $body
                }
            }
        )*
    };
}
pub(super) use simd_methods;
