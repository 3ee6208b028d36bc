//! Memory of the CPU device: buffers on cache-line borders, and the tensors made of them.
//! For: activations, weights and scratch of every operation.
//! Invariant: a buffer starts on a 64-byte border and is initialized; a tensor holds `max_tokens * width` values.

use crate::KernelError;

/// Bytes of a cache line and of the widest vector.
const LINE_BYTES: usize = 64;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE_BYTES]);

/// Zeroed bytes on a 64-byte border.
pub(crate) struct AlignedBuffer {
    lines: Vec<Line>,
}

impl AlignedBuffer {
    /// So many zeroed bytes, rounded up to a multiple of 64.
    pub(crate) fn zeroed(num_bytes: usize) -> Result<Self, KernelError> {
        let num_lines = num_bytes.div_ceil(LINE_BYTES);
        let mut lines = Vec::new();
        lines.try_reserve_exact(num_lines).map_err(|_| KernelError::Device {
            device: "cpu".to_owned(),
            what: format!("out of memory for {num_bytes} bytes"),
        })?;
        lines.resize(num_lines, Line([0; LINE_BYTES]));
        Ok(Self { lines })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: lines are plain bytes, `LINE_BYTES` each, without padding.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.lines.len() * LINE_BYTES) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.lines.len() * LINE_BYTES) }
    }

    pub(crate) fn values<V: Element>(&self) -> &[V] {
        // SAFETY: initialized and aligned; every bit pattern is an element, and lines are whole numbers of elements.
        unsafe {
            std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.lines.len() * (LINE_BYTES / size_of::<V>()))
        }
    }

    pub(crate) fn values_mut<V: Element>(&mut self) -> &mut [V] {
        // SAFETY: as in `values`; borrowed exclusively.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.lines.as_mut_ptr().cast(),
                self.lines.len() * (LINE_BYTES / size_of::<V>()),
            )
        }
    }
}

/// What buffers hold.
///
/// # Safety
/// Every bit pattern is a value; size and alignment divide 64.
pub(crate) unsafe trait Element: Copy + Send + Sync + 'static {}

// SAFETY: plain numbers of 4 bytes.
unsafe impl Element for f32 {}
// SAFETY: plain numbers of 8 bytes.
unsafe impl Element for f64 {}

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
