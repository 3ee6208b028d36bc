//! Kernels, their arguments and their launch.
//! For: the launcher of each operation, which checks the call before.
//! Invariant: every launch lets the GPU overlap it with the kernel before (programmatic dependent launch), so every
//! kernel calls `wait_for_previous` (`launch.cuh`) in every block before it touches what other kernels write.

use std::{ffi::c_void, sync::atomic::Ordering};

use cudarc::driver::{
    CudaFunction,
    sys::{
        CUfunction_attribute, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig,
        cuLaunchKernelEx,
    },
};

use super::{DeviceBuffer, DevicePointer, Gpu, ScratchBuffer};
use crate::KernelError;

/// Most blocks of a launch along each axis.
const MAX_GRID: [u32; 3] = [i32::MAX as u32, u16::MAX as u32, u16::MAX as u32];
/// Shared memory that a block may have without asking, beside some that its kernel declares: 48 KiB for both.
const DEFAULT_SHARED_BYTES: u32 = 32 << 10;

/// One argument of a kernel, of the type that the kernel declares.
#[derive(Clone, Copy, Debug)]
pub enum Argument<'a> {
    /// A pointer.
    Pointer(DevicePointer),
    /// `uint32_t`
    U32(u32),
    /// `int32_t`
    I32(i32),
    /// `uint64_t`
    U64(u64),
    /// `float`
    F32(f32),
    /// A structure by value: its bytes as C lays them out.
    Struct(&'a [u8]),
}

impl Argument<'_> {
    fn address(&self) -> *mut c_void {
        match self {
            Self::Pointer(DevicePointer(value)) | Self::U64(value) => (&raw const *value).cast_mut().cast(),
            Self::U32(value) => (&raw const *value).cast_mut().cast(),
            Self::I32(value) => (&raw const *value).cast_mut().cast(),
            Self::F32(value) => (&raw const *value).cast_mut().cast(),
            Self::Struct(bytes) => bytes.as_ptr().cast_mut().cast(),
        }
    }
}

impl From<DevicePointer> for Argument<'_> {
    fn from(pointer: DevicePointer) -> Self {
        Self::Pointer(pointer)
    }
}

impl From<&DeviceBuffer> for Argument<'_> {
    fn from(buffer: &DeviceBuffer) -> Self {
        Self::Pointer(buffer.pointer())
    }
}

impl From<&ScratchBuffer> for Argument<'_> {
    fn from(buffer: &ScratchBuffer) -> Self {
        Self::Pointer(buffer.pointer())
    }
}

impl From<u32> for Argument<'_> {
    fn from(value: u32) -> Self {
        Self::U32(value)
    }
}

impl From<i32> for Argument<'_> {
    fn from(value: i32) -> Self {
        Self::I32(value)
    }
}

impl From<u64> for Argument<'_> {
    fn from(value: u64) -> Self {
        Self::U64(value)
    }
}

impl From<f32> for Argument<'_> {
    fn from(value: f32) -> Self {
        Self::F32(value)
    }
}

/// Sizes of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks; with a 0 nothing is launched.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block; above 48 KiB the kernel must have been [allowed](Kernel::allow_shared_bytes).
    pub shared_bytes: u32,
}

impl Launch {
    /// `num_blocks` blocks of `num_threads` threads without dynamic shared memory.
    pub fn blocks(num_blocks: u32, num_threads: u32) -> Self {
        Self { grid: [num_blocks, 1, 1], block: [num_threads, 1, 1], shared_bytes: 0 }
    }
}

/// A loaded kernel.
#[derive(Clone, Debug)]
pub struct Kernel {
    name: &'static str,
    /// `None`: given out during a rehearsal, which launches nothing.
    function: Option<CudaFunction>,
}

impl Kernel {
    pub(super) fn new(name: &'static str, function: Option<CudaFunction>) -> Self {
        Self { name, function }
    }

    /// Its name in the source.
    pub fn name(&self) -> &'static str {
        self.name
    }

    fn function(&self, gpu: &Gpu) -> Result<&CudaFunction, KernelError> {
        self.function.as_ref().ok_or_else(|| gpu.error(format!("{} is a kernel of a rehearsal", self.name)))
    }

    /// Registers of a thread and bytes that a thread spills to local memory.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the driver fails.
    pub fn resources(&self, gpu: &Gpu) -> Result<(i32, i32), KernelError> {
        let function = self.function(gpu)?;
        let registers = function.num_regs().map_err(gpu.failed(self.name))?;
        Ok((registers, function.local_size_bytes().map_err(gpu.failed(self.name))?))
    }

    /// Allows launches with so much dynamic shared memory.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] if the GPU has less.
    pub fn allow_shared_bytes(&self, gpu: &Gpu, num_bytes: u32) -> Result<(), KernelError> {
        let limit = gpu.limits().max_shared_bytes;
        if num_bytes > limit {
            return Err(KernelError::Unsupported {
                operation: self.name,
                what: format!("{num_bytes} bytes of shared memory (a block has {limit})"),
                device: gpu.limits().name.clone(),
            });
        }
        if num_bytes <= DEFAULT_SHARED_BYTES || gpu.is_rehearsing() {
            return Ok(());
        }
        let value = i32::try_from(num_bytes).unwrap_or(i32::MAX);
        self.function(gpu)?
            .set_attribute(CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, value)
            .map_err(gpu.failed(self.name))
    }

    /// Starts it after all work before, overlapping the end of the kernel before.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] for more blocks than a GPU takes, [`KernelError::Device`] if the driver refuses the
    /// launch. What goes wrong while it runs is reported by a later
    /// call, at the latest by [`Gpu::synchronize`].
    ///
    /// # Safety
    /// The arguments are those that the kernel declares, and with them it stays inside memory that lives until the
    /// work is done.
    pub unsafe fn launch(&self, gpu: &Gpu, launch: Launch, arguments: &[Argument<'_>]) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.start(gpu, launch, arguments, gpu.limits().has_overlapped_launch()) }
    }

    /// Starts it when all work before is done: what a benchmark compares overlapped launches with.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    pub unsafe fn launch_alone(
        &self,
        gpu: &Gpu,
        launch: Launch,
        arguments: &[Argument<'_>],
    ) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.start(gpu, launch, arguments, false) }
    }

    /// # Safety
    /// As [`launch`](Self::launch).
    unsafe fn start(
        &self,
        gpu: &Gpu,
        launch: Launch,
        arguments: &[Argument<'_>],
        overlaps: bool,
    ) -> Result<(), KernelError> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        if let Some((got, limit)) = launch.grid.into_iter().zip(MAX_GRID).find(|(got, limit)| got > limit) {
            let (what, got, limit) = ("blocks of a launch", got as usize, limit as usize + 1);
            return Err(KernelError::OutOfRange { operation: self.name, what, got, limit });
        }
        if gpu.is_rehearsing() {
            return Ok(());
        }
        let function = self.function(gpu)?.cu_function();
        gpu.bind()?;
        let mut parameters: Vec<*mut c_void> = arguments.iter().map(Argument::address).collect();
        let mut overlap = overlap_attribute();
        let config = CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block[0],
            blockDimY: launch.block[1],
            blockDimZ: launch.block[2],
            sharedMemBytes: launch.shared_bytes,
            hStream: gpu.stream().cu_stream(),
            attrs: &raw mut overlap,
            numAttrs: u32::from(overlaps),
        };
        // SAFETY: `config` and the arguments live until the call returns, which copies them; the rest is the caller's
        // promise.
        unsafe { cuLaunchKernelEx(&raw const config, function, parameters.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(gpu.failed(self.name))?;
        gpu.num_launches.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

fn overlap_attribute() -> CUlaunchAttribute {
    CUlaunchAttribute {
        id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    }
}
