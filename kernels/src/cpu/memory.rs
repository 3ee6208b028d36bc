//! Memory of the CPU device: buffers straight from the system, and the tensors made of them.
//! For: activations, weights, KV cache and scratch of every operation.
//! Invariant: a buffer starts on a page border and is zeroed; what was never touched takes no memory, and what is freed
//! goes back at once, whatever the allocator would keep. A tensor holds `max_tokens * width` values.

use memmap2::MmapMut;

use super::simd::LANES;
use crate::KernelError;

/// Bytes of a cache line and of the widest vector.
const LINE_BYTES: usize = 64;

/// Zeroed bytes on a page border.
pub(crate) struct AlignedBuffer {
    /// `None`: no bytes.
    pages: Option<MmapMut>,
}

impl AlignedBuffer {
    /// So many zeroed bytes, rounded up to a multiple of 64.
    pub(crate) fn zeroed(num_bytes: usize) -> Result<Self, KernelError> {
        if num_bytes == 0 {
            return Ok(Self { pages: None });
        }
        let pages = num_bytes.checked_next_multiple_of(LINE_BYTES).and_then(|len| MmapMut::map_anon(len).ok());
        match pages {
            Some(pages) => Ok(Self { pages: Some(pages) }),
            None => Err(KernelError::Device {
                device: "cpu".to_owned(),
                what: format!("out of memory for {num_bytes} bytes"),
            }),
        }
    }

    /// The same, to be used here and there: no huge page is filled for the sake of a few bytes.
    pub(crate) fn sparse(num_bytes: usize) -> Result<Self, KernelError> {
        let buffer = Self::zeroed(num_bytes)?;
        #[cfg(target_os = "linux")]
        if let Some(pages) = &buffer.pages {
            // Advice: a kernel without huge pages refuses it, and needs none.
            let _ = pages.advise(memmap2::Advice::NoHugePage);
        }
        Ok(buffer)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.pages.as_deref().unwrap_or_default()
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.pages.as_deref_mut().unwrap_or_default()
    }

    pub(crate) fn values<V: Element>(&self) -> &[V] {
        // SAFETY: every bit pattern is an element.
        let (before, values, _) = unsafe { self.bytes().align_to() };
        debug_assert!(before.is_empty(), "pages are aligned for every element");
        values
    }

    pub(crate) fn values_mut<V: Element>(&mut self) -> &mut [V] {
        // SAFETY: every bit pattern is an element, and every element is plain bytes.
        let (before, values, _) = unsafe { self.bytes_mut().align_to_mut() };
        debug_assert!(before.is_empty(), "pages are aligned for every element");
        values
    }
}

/// Gives memory that was freed, but that the allocator keeps for later, back to the system. Call it when something large
/// was made of many small pieces and is gone; it takes some milliseconds.
pub fn return_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it takes the allocator's own locks and touches only memory that nobody holds.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// What buffers hold.
///
/// # Safety
/// Plain bytes: every bit pattern is a value, none is padding; size and alignment divide 64.
pub(crate) unsafe trait Element: Copy + Send + Sync + 'static {}

// SAFETY: plain numbers of 4 bytes.
unsafe impl Element for f32 {}
// SAFETY: plain numbers of 8 bytes.
unsafe impl Element for f64 {}
// SAFETY: a vector of halves, 32 bytes.
unsafe impl Element for [u16; LANES] {}
// SAFETY: a vector of f32, 64 bytes.
unsafe impl Element for [f32; LANES] {}

/// Row-major f32 `[max_tokens, width]` on a 64-byte border.
pub struct CpuTensor {
    buffer: AlignedBuffer,
    max_tokens: usize,
    width: usize,
}

impl CpuTensor {
    /// A zeroed tensor.
    ///
    /// # Errors
    /// [`KernelError::Device`] if memory is short.
    pub fn zeroed(max_tokens: usize, width: usize) -> Result<Self, KernelError> {
        let num_bytes =
            max_tokens.checked_mul(width).and_then(|len| len.checked_mul(size_of::<f32>())).ok_or_else(|| {
                KernelError::Device {
                    device: "cpu".to_owned(),
                    what: format!("a tensor [{max_tokens}, {width}] is too large"),
                }
            })?;
        Ok(Self { buffer: AlignedBuffer::zeroed(num_bytes)?, max_tokens, width })
    }

    /// Rows.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Values of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// All values, `[max_tokens, width]`.
    pub fn values(&self) -> &[f32] {
        &self.buffer.values()[..self.max_tokens * self.width]
    }

    /// All values, `[max_tokens, width]`.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.buffer.values_mut()[..self.max_tokens * self.width]
    }

    /// The first `num_tokens` rows.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if there are fewer.
    pub fn rows(&self, operation: &'static str, num_tokens: usize) -> Result<&[f32], KernelError> {
        self.check_tokens(operation, num_tokens)?;
        Ok(&self.buffer.values()[..num_tokens * self.width])
    }

    /// The first `num_tokens` rows.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if there are fewer.
    pub fn rows_mut(&mut self, operation: &'static str, num_tokens: usize) -> Result<&mut [f32], KernelError> {
        self.check_tokens(operation, num_tokens)?;
        Ok(&mut self.buffer.values_mut()[..num_tokens * self.width])
    }

    fn check_tokens(&self, operation: &'static str, num_tokens: usize) -> Result<(), KernelError> {
        if num_tokens > self.max_tokens {
            return Err(KernelError::Shape {
                operation,
                what: "rows of a tensor",
                got: self.max_tokens,
                expected: num_tokens,
            });
        }
        Ok(())
    }
}
