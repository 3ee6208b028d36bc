//! Device memory and pinned host memory, freed when dropped.
//! For: weights, KV blocks, activations, communication: memory that lives for long and that peers may read.
//! Invariant: a [`DeviceBuffer`] is one `cuMemAlloc`; copies are checked against its size and ordered by the stream.
//! Not here: scratch of single operations ([`pool`](super::pool)).

use std::{
    ffi::c_void,
    ops::Range,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use bytemuck::{AnyBitPattern, NoUninit};
use cudarc::driver::{
    result,
    sys::{self, CUdeviceptr},
};

use super::{Gpu, probe::describe};
use crate::KernelError;

/// An address on the GPU, as kernels take it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePointer(pub CUdeviceptr);

impl DevicePointer {
    /// The address so many bytes further on.
    pub fn offset_bytes(self, num_bytes: usize) -> Self {
        Self(self.0.wrapping_add(num_bytes as u64))
    }
}

/// Memory of one GPU.
pub struct DeviceBuffer {
    gpu: Arc<Gpu>,
    pointer: DevicePointer,
    num_bytes: usize,
}

impl DeviceBuffer {
    /// So many bytes of unknown content, at least one, on a border of 256 bytes.
    ///
    /// # Errors
    /// [`KernelError::Device`] if memory is short, with what was asked for and what is free.
    pub fn uninit(gpu: &Arc<Gpu>, num_bytes: usize) -> Result<Self, KernelError> {
        Ok(Self { gpu: Arc::clone(gpu), pointer: allocate(gpu, num_bytes)?, num_bytes })
    }

    /// So many bytes of zeros.
    ///
    /// # Errors
    /// [`KernelError::Device`] if memory is short.
    pub fn zeroed(gpu: &Arc<Gpu>, num_bytes: usize) -> Result<Self, KernelError> {
        let buffer = Self::uninit(gpu, num_bytes)?;
        if num_bytes > 0 {
            // SAFETY: inside the allocation.
            unsafe { result::memset_d8_async(buffer.pointer.0, 0, num_bytes, gpu.stream().cu_stream()) }
                .map_err(gpu.failed("cuMemsetD8Async"))?;
        }
        Ok(buffer)
    }

    /// A copy of `values`.
    ///
    /// # Errors
    /// [`KernelError::Device`] if memory is short.
    pub fn from_slice<T: NoUninit>(gpu: &Arc<Gpu>, values: &[T]) -> Result<Self, KernelError> {
        let buffer = Self::uninit(gpu, size_of_val(values))?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// Its address.
    pub fn pointer(&self) -> DevicePointer {
        self.pointer
    }

    /// Its size.
    pub fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// The GPU that it lies on.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Copies `values` to byte `offset`, after all work before. Pageable memory is staged: it may change on return.
    /// Pinned memory must not change before the copy is done; [`PinnedBuffer`] is the way to do that safely.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] if they do not fit, [`KernelError::Device`] if the driver fails.
    pub fn write<T: NoUninit>(&self, offset: usize, values: &[T]) -> Result<(), KernelError> {
        self.check_range("write", offset, size_of_val(values))?;
        if values.is_empty() {
            return Ok(());
        }
        self.gpu.bind()?;
        let bytes: &[u8] = bytemuck::cast_slice(values);
        // SAFETY: the range was checked; the driver stages pageable sources before it returns.
        unsafe { result::memcpy_htod_async(self.pointer.offset_bytes(offset).0, bytes, self.gpu.stream().cu_stream()) }
            .map_err(self.gpu.failed("cuMemcpyHtoDAsync"))
    }

    /// Copies from byte `offset` on into `values` once all work before is done.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] if the buffer is too small, [`KernelError::Device`] if the driver fails.
    pub fn read<T: NoUninit + AnyBitPattern>(&self, offset: usize, values: &mut [T]) -> Result<(), KernelError> {
        self.check_range("read", offset, size_of_val(values))?;
        // The copy to pageable memory waits in the driver, where nobody looks after other GPUs.
        self.gpu.synchronize()?;
        if !values.is_empty() {
            self.gpu.bind()?;
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
            let source = self.pointer.offset_bytes(offset).0;
            // SAFETY: the range was checked; the target is borrowed until the stream is synchronized below.
            unsafe { result::memcpy_dtoh_async(bytes, source, self.gpu.stream().cu_stream()) }
                .map_err(self.gpu.failed("cuMemcpyDtoHAsync"))?;
        }
        self.gpu.synchronize()
    }

    /// Copies `range` of `source` to byte `offset`; the copy runs beside the host.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] if one of them is too small, [`KernelError::Device`] if the driver fails.
    pub fn write_pinned(&self, offset: usize, source: &PinnedBuffer, range: Range<usize>) -> Result<(), KernelError> {
        self.check_range("write", offset, range.len())?;
        let (got, limit) = (range.end, source.num_bytes + 1);
        if got >= limit {
            let what = "end of a range of pinned memory";
            return Err(KernelError::OutOfRange { operation: "write", what, got, limit });
        }
        if range.is_empty() {
            return Ok(());
        }
        self.gpu.bind()?;
        // SAFETY: inside the allocation, which is initialized.
        let bytes = unsafe { std::slice::from_raw_parts(source.start.as_ptr().add(range.start), range.len()) };
        // SAFETY: both ranges were checked; the source is not changed or freed before the copy is done.
        unsafe { result::memcpy_htod_async(self.pointer.offset_bytes(offset).0, bytes, self.gpu.stream().cu_stream()) }
            .map_err(self.gpu.failed("cuMemcpyHtoDAsync"))
    }

    /// Refuses a buffer that is smaller than an operation needs.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    pub fn expect_bytes(
        &self,
        operation: &'static str,
        what: &'static str,
        expected: usize,
    ) -> Result<(), KernelError> {
        let got = self.num_bytes;
        if got < expected { Err(KernelError::Shape { operation, what, got, expected }) } else { Ok(()) }
    }

    /// Copies the first `num_bytes` to pinned memory after all work before; the copy runs beside the host.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] if one of them is too small, [`KernelError::Device`] if the driver fails.
    pub fn read_pinned(&self, target: &PinnedBuffer, num_bytes: usize) -> Result<(), KernelError> {
        self.check_range("read", 0, num_bytes)?;
        if num_bytes > target.num_bytes {
            let (operation, what) = ("read", "end of a range of pinned memory");
            return Err(KernelError::OutOfRange { operation, what, got: num_bytes, limit: target.num_bytes + 1 });
        }
        if num_bytes == 0 {
            return Ok(());
        }
        self.gpu.bind()?;
        let (stream, target) = (self.gpu.stream().cu_stream(), target.start.as_ptr().cast());
        // SAFETY: both ranges were checked; the target is read and freed only after the stream is synchronized, and
        // nobody has a reference into it: `bytes_mut` alone gives one, for as long as nobody else has the buffer.
        unsafe { sys::cuMemcpyDtoHAsync_v2(target, self.pointer.0, num_bytes, stream) }
            .result()
            .map_err(self.gpu.failed("cuMemcpyDtoHAsync"))
    }

    fn check_range(&self, operation: &'static str, offset: usize, num_bytes: usize) -> Result<(), KernelError> {
        match offset.checked_add(num_bytes) {
            Some(end) if end <= self.num_bytes => Ok(()),
            end => Err(KernelError::OutOfRange {
                operation,
                what: "end of a range of device memory",
                got: end.unwrap_or(usize::MAX),
                limit: self.num_bytes + 1,
            }),
        }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `uninit`, freed once. The driver waits for work that uses it.
        unsafe { free(&self.gpu, self.pointer) };
    }
}

/// Plain device memory, at least one byte.
pub(super) fn allocate(gpu: &Gpu, num_bytes: usize) -> Result<DevicePointer, KernelError> {
    gpu.bind()?;
    // SAFETY: the context is bound; the callers free the result once.
    match unsafe { result::malloc_sync(num_bytes.max(1)) } {
        Ok(pointer) => Ok(DevicePointer(pointer)),
        Err(code) => {
            let (free, total) = gpu.memory()?;
            let code = describe(code);
            Err(gpu.error(format!("cuMemAlloc of {num_bytes} bytes: {code}; {free} of {total} bytes are free")))
        }
    }
}

/// Frees memory of [`allocate`].
///
/// # Safety
/// The memory is freed once and used by no work that is still to be launched.
pub(super) unsafe fn free(gpu: &Gpu, pointer: DevicePointer) {
    let freed = gpu.bind().and_then(|()| {
        // SAFETY: the caller's promise.
        unsafe { result::free_sync(pointer.0) }.map_err(gpu.failed("cuMemFree"))
    });
    if let Err(error) = freed {
        tracing::error!(%error, "device memory could not be freed");
    }
}

impl PartialEq for DeviceBuffer {
    /// Whether it is the same memory.
    fn eq(&self, other: &Self) -> bool {
        self.pointer == other.pointer && Arc::ptr_eq(&self.gpu, &other.gpu)
    }
}

impl Eq for DeviceBuffer {}

impl std::fmt::Debug for DeviceBuffer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "DeviceBuffer({:#x}, {} bytes)", self.pointer.0, self.num_bytes)
    }
}

/// Zeroed, page-locked host memory, which copies to and from the GPU without staging.
pub struct PinnedBuffer {
    gpu: Arc<Gpu>,
    start: NonNull<u8>,
    num_bytes: usize,
}

// SAFETY: plain memory of this process, owned by the buffer.
unsafe impl Send for PinnedBuffer {}
// SAFETY: shared access gives no reference to the memory: it copies out of it, or lets the GPU copy in the order of its
// stream.
unsafe impl Sync for PinnedBuffer {}

impl PartialEq for PinnedBuffer {
    /// Whether it is the same memory.
    fn eq(&self, other: &Self) -> bool {
        self.start == other.start
    }
}

impl Eq for PinnedBuffer {}

impl std::fmt::Debug for PinnedBuffer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "PinnedBuffer({:p}, {} bytes)", self.start, self.num_bytes)
    }
}

impl PinnedBuffer {
    /// So many zeroed bytes, on a border of a page.
    ///
    /// # Errors
    /// [`KernelError::Device`] if memory is short.
    pub fn zeroed(gpu: &Arc<Gpu>, num_bytes: usize) -> Result<Self, KernelError> {
        gpu.bind()?;
        // SAFETY: the context is bound; the result is freed once, on drop.
        let memory = unsafe { result::malloc_host(num_bytes.max(1), 0) }.map_err(gpu.failed("cuMemHostAlloc"))?;
        let start =
            NonNull::new(memory.cast::<u8>()).ok_or_else(|| gpu.error("cuMemHostAlloc gave null".to_owned()))?;
        // SAFETY: so many bytes were allocated.
        unsafe { start.write_bytes(0, num_bytes) };
        Ok(Self { gpu: Arc::clone(gpu), start, num_bytes })
    }

    /// Its size.
    pub fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// Copies its first bytes into `values` once copies to it are done.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] if it is too small, [`KernelError::Device`] if work before failed: it waits for the
    /// stream.
    pub fn read<T: NoUninit + AnyBitPattern>(&self, values: &mut [T]) -> Result<(), KernelError> {
        let num_bytes = size_of_val(values);
        if num_bytes > self.num_bytes {
            let (operation, what) = ("read", "end of a range of pinned memory");
            return Err(KernelError::OutOfRange { operation, what, got: num_bytes, limit: self.num_bytes + 1 });
        }
        self.gpu.synchronize()?;
        let target: &mut [u8] = bytemuck::cast_slice_mut(values);
        // SAFETY: initialized in `zeroed`, and so many bytes long. No copy is under way, and the one thread that drives
        // the GPU is here, so none begins.
        unsafe { std::ptr::copy_nonoverlapping(self.start.as_ptr(), target.as_mut_ptr(), num_bytes) };
        Ok(())
    }

    /// Its content, to be changed once copies from it are done.
    ///
    /// # Errors
    /// [`KernelError::Device`] if work before failed: it waits for the stream.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8], KernelError> {
        self.gpu.synchronize()?;
        // SAFETY: the stream was synchronized.
        Ok(unsafe { self.bytes_mut_idle() })
    }

    /// Its content, to be changed, without waiting.
    ///
    /// # Safety
    /// All copies to and from what is changed or read of it are done.
    pub(super) unsafe fn bytes_mut_idle(&mut self) -> &mut [u8] {
        // SAFETY: initialized in `zeroed`; borrowed exclusively, and no copy of what is touched is under way.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.num_bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let start = self.start.as_ptr().cast::<c_void>();
        let freed = self.gpu.drain().and_then(|()| {
            // SAFETY: allocated in `zeroed`, freed once, and no copy is under way.
            unsafe { result::free_host(start) }.map_err(self.gpu.failed("cuMemFreeHost"))
        });
        if let Err(error) = freed {
            tracing::error!(%error, num_bytes = self.num_bytes, "pinned memory could not be freed");
        }
    }
}

/// A word of host memory that running kernels read: how the host tells them something.
pub struct PinnedFlag(PinnedBuffer);

impl PinnedFlag {
    /// A flag that is not raised.
    ///
    /// # Errors
    /// [`KernelError::Device`] if memory is short.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, KernelError> {
        Ok(Self(PinnedBuffer::zeroed(gpu, size_of::<u32>())?))
    }

    /// Where kernels read a `uint32_t` that is not 0 once the flag is raised.
    pub fn pointer(&self) -> DevicePointer {
        // Pinned memory has one address for host and GPU.
        DevicePointer(self.0.start.as_ptr().addr() as CUdeviceptr)
    }

    /// Raises it, for good.
    pub fn raise(&self) {
        self.word().store(1, Ordering::Release);
    }

    /// Whether it was raised.
    pub fn is_raised(&self) -> bool {
        self.word().load(Ordering::Acquire) != 0
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: four bytes on the border of a page, initialized in `zeroed`, which live as long as `self`; the host
        // accesses them by this alone, and the GPU reads.
        unsafe { AtomicU32::from_ptr(self.0.start.as_ptr().cast()) }
    }
}

impl std::fmt::Debug for PinnedFlag {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "PinnedFlag({})", self.is_raised())
    }
}
