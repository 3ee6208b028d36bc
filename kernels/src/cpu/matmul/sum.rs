//! How the contributions of a row's blocks of 32 columns are summed: in f32, or in f64 over f32 contributions.
//! For: `kernel`, which is generic over it and written once.
//! Invariant: a [`Double`] sum does not show where the columns were cut: each contribution is rounded to f32 by itself,
//! and of such numbers f64 adds hundreds without loss unless their sizes are 2^20 apart.

use super::simd::Simd;

/// A sum of each row, which takes one block after the other.
///
/// # Safety
/// As [`Simd`].
pub(super) trait Sum<S: Simd>: Copy {
    /// What is stored.
    type Value: Copy + Send;

    /// Zeros.
    unsafe fn zero() -> Self;
    /// What a block's products are added to.
    unsafe fn begin_block(self) -> S::Floats;
    /// The sum with a block whose products were added to what it began with.
    unsafe fn end_block(self, block: S::Floats) -> Self;
    /// Stores the sums.
    unsafe fn store(self, target: *mut Self::Value);
}

/// One chain of f32 additions through all blocks: fastest.
#[derive(Clone, Copy)]
pub(super) struct Single<S: Simd>(S::Floats);

impl<S: Simd> Sum<S> for Single<S> {
    type Value = f32;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { S::zero() })
    }

    #[inline(always)]
    unsafe fn begin_block(self) -> S::Floats {
        self.0
    }

    #[inline(always)]
    unsafe fn end_block(self, block: S::Floats) -> Self {
        Self(block)
    }

    #[inline(always)]
    unsafe fn store(self, target: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { S::store(target, self.0) }
    }
}

/// Each block by itself in f32, their sum in f64: the same for any cut between blocks.
#[derive(Clone, Copy)]
pub(super) struct Double<S: Simd>(S::Doubles);

impl<S: Simd> Sum<S> for Double<S> {
    type Value = f64;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { S::zero_doubles() })
    }

    #[inline(always)]
    unsafe fn begin_block(self) -> S::Floats {
        // SAFETY: the caller's promise.
        unsafe { S::zero() }
    }

    #[inline(always)]
    unsafe fn end_block(self, block: S::Floats) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { S::add_wide(self.0, block) })
    }

    #[inline(always)]
    unsafe fn store(self, target: *mut f64) {
        // SAFETY: the caller's promise.
        unsafe { S::store_doubles(target, self.0) }
    }
}
