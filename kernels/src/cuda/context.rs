//! An opened GPU: its context and stream, its limits, its loaded kernels.
//! For: everything in this module; a [`Gpu`] is shared by the buffers and kernels that live on it.
//! Invariant: all work goes to one stream, in the order of the calls, so memory that an operation gives back may be
//! reused by the next without waiting.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use cudarc::{
    driver::{CudaContext, CudaModule, CudaStream, DriverError, sys::CUdevice_attribute},
    nvrtc::Ptx,
};

use super::{
    KernelCache,
    communicator::Membership,
    compiler::{Compiler, architecture},
    launch::Kernel,
    memory,
    pool::{Pool, PoolStatistics},
    probe,
    rehearsal::Rehearsal,
    sources::Source,
};
use crate::KernelError;

/// What a GPU is and how much fits where.
#[derive(Clone, Debug)]
pub struct GpuLimits {
    /// Name, such as `NVIDIA H200`.
    pub name: String,
    /// Major and minor number.
    pub compute_capability: (i32, i32),
    /// Streaming multiprocessors.
    pub num_multiprocessors: u32,
    /// Largest shared memory of a block, after it was asked for.
    pub max_shared_bytes: u32,
    /// Second-level cache.
    pub l2_bytes: u64,
}

impl GpuLimits {
    /// Whether a kernel may start while the one before it still runs.
    pub fn has_overlapped_launch(&self) -> bool {
        self.compute_capability >= (9, 0)
    }

    /// Whether blocks form clusters that read each other's shared memory.
    pub fn has_clusters(&self) -> bool {
        self.compute_capability >= (9, 0)
    }
}

/// A module is known by its source and the options that it was compiled with.
type ModuleKey = (&'static str, Vec<String>);

/// An opened GPU.
pub struct Gpu {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    limits: GpuLimits,
    architecture: String,
    compiler: Compiler,
    modules: Mutex<HashMap<ModuleKey, Arc<CudaModule>>>,
    pub(super) rehearsal: Rehearsal,
    pub(super) pool: Pool,
    pub(super) num_launches: AtomicU64,
    /// Groups of GPUs that its work may wait for.
    pub(super) memberships: Mutex<Vec<Weak<Membership>>>,
}

impl Gpu {
    /// Opens GPU number `ordinal`; kernels come from `cache` where it has them.
    ///
    /// # Errors
    /// [`KernelError::Device`] if a library or the GPU is missing or fails, [`KernelError::OutOfRange`] for an ordinal
    /// that the driver does not show, [`KernelError::Unsupported`] if the GPU is too old.
    pub fn open(ordinal: usize, cache: KernelCache) -> Result<Arc<Self>, KernelError> {
        let num_devices = probe::num_devices()?;
        if ordinal >= num_devices {
            let (operation, what) = ("open", "cuda device");
            return Err(KernelError::OutOfRange { operation, what, got: ordinal, limit: num_devices });
        }
        let fail = |call: &'static str| move |code| failure(ordinal, call, code);
        let context = CudaContext::new(ordinal).map_err(fail("cuDevicePrimaryCtxRetain"))?;
        // SAFETY: no event is tracked yet; all work goes to one stream, which orders it.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(fail("cuStreamCreate"))?;
        let limits = read_limits(&context).map_err(fail("cuDeviceGetAttribute"))?;
        Ok(Arc::new(Self {
            architecture: architecture(limits.compute_capability)?,
            compiler: Compiler::new(cache)?,
            modules: Mutex::default(),
            rehearsal: Rehearsal::default(),
            pool: Pool::default(),
            num_launches: AtomicU64::default(),
            memberships: Mutex::default(),
            context,
            stream,
            limits,
        }))
    }

    /// What it is.
    pub fn limits(&self) -> &GpuLimits {
        &self.limits
    }

    /// Its number among the GPUs that the driver shows.
    pub fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    /// The stream that orders all of its work.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Free and total memory in bytes, as the driver sees them now.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the driver fails.
    pub fn memory(&self) -> Result<(usize, usize), KernelError> {
        self.context.mem_get_info().map_err(self.failed("cuMemGetInfo"))
    }

    /// What the pool of scratch memory did so far.
    pub fn pool_statistics(&self) -> PoolStatistics {
        self.pool.statistics()
    }

    /// Kernels that were launched or recorded so far, those of libraries not counted.
    pub fn num_launches(&self) -> u64 {
        self.num_launches.load(Ordering::Relaxed)
    }

    /// What tells it from every other GPU.
    pub(super) fn uuid(&self) -> Result<[u8; 16], KernelError> {
        let uuid = self.context.uuid().map_err(self.failed("cuDeviceGetUuid"))?;
        Ok(uuid.bytes.map(|byte| byte.to_ne_bytes()[0]))
    }

    /// The kernel `name` of `source`, compiled with `options` (`-DNAME=VALUE`). Modules are compiled or read once.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the source does not compile or lacks the kernel.
    pub fn kernel(
        &self,
        source: &'static Source,
        options: &[String],
        name: &'static str,
    ) -> Result<Kernel, KernelError> {
        if self.rehearsal.note(source, options) {
            return Ok(Kernel::new(name, None));
        }
        let function = self.load(source, options)?.load_function(name).map_err(self.failed(name))?;
        Ok(Kernel::new(name, Some(function)))
    }

    /// Modules that are loaded.
    pub fn num_modules(&self) -> usize {
        self.modules().len()
    }

    /// The module of `source`. Several threads may load different ones at a time.
    pub(super) fn load(&self, source: &'static Source, options: &[String]) -> Result<Arc<CudaModule>, KernelError> {
        let key = (source.name, options.to_vec());
        if let Some(module) = self.modules().get(&key) {
            return Ok(Arc::clone(module));
        }
        self.bind()?;
        let cubin = self.compiler.cubin(source, &self.architecture, options)?;
        let module = self.context.load_module(Ptx::from_binary(cubin)).map_err(self.failed(source.name))?;
        Ok(Arc::clone(self.modules().entry(key).or_insert(module)))
    }

    fn modules(&self) -> MutexGuard<'_, HashMap<ModuleKey, Arc<CudaModule>>> {
        // What the map holds is whole at any time, so a panic elsewhere does not spoil it.
        self.modules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the GPU's context the calling thread's: calls of the driver need that.
    pub(super) fn bind(&self) -> Result<(), KernelError> {
        self.context.bind_to_thread().map_err(self.failed("cuCtxSetCurrent"))
    }

    /// Turns a code of the driver into an error that names the GPU and the call.
    pub(super) fn failed(&self, call: &'static str) -> impl Fn(DriverError) -> KernelError {
        let ordinal = self.ordinal();
        move |code| failure(ordinal, call, code)
    }

    /// An error of this GPU.
    pub(super) fn error(&self, what: String) -> KernelError {
        KernelError::Device { device: format!("cuda:{}", self.ordinal()), what }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let mut pool = std::mem::take(&mut self.pool);
        let PoolStatistics { reserved_bytes, high_water_bytes, num_requests, num_hits, .. } = pool.statistics();
        tracing::debug!(
            ordinal = self.ordinal(),
            reserved_bytes,
            high_water_bytes,
            num_requests,
            num_hits,
            "a GPU is closed until ranks open it again"
        );
        // SAFETY: nobody but the pool knows this memory, and no work can be launched any more.
        pool.close(|pointer| unsafe { memory::free(self, pointer) });
    }
}

fn failure(ordinal: usize, call: &'static str, code: DriverError) -> KernelError {
    KernelError::Device { device: format!("cuda:{ordinal}"), what: format!("{call}: {}", probe::describe(code)) }
}

fn read_limits(context: &CudaContext) -> Result<GpuLimits, DriverError> {
    let attribute = |which| context.attribute(which).map(|value| u32::try_from(value).unwrap_or(0));
    Ok(GpuLimits {
        name: context.name()?,
        compute_capability: context.compute_capability()?,
        num_multiprocessors: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        max_shared_bytes: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        l2_bytes: u64::from(attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?),
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::GpuLimits;

    /// Shared memory and multiprocessors of the kinds of GPUs that there are, of Ampere and later.
    pub fn limits_of_every_kind() -> Vec<GpuLimits> {
        [((8, 0), 163), ((8, 9), 99), ((9, 0), 227), ((10, 0), 227), ((12, 0), 99)]
            .map(|(compute_capability, shared_kib)| GpuLimits {
                name: "test".to_owned(),
                compute_capability,
                num_multiprocessors: 132,
                max_shared_bytes: shared_kib << 10,
                l2_bytes: 50 << 20,
            })
            .into()
    }
}
