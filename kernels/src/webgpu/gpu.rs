//! [`Gpu`]: an opened adapter with its queue, its limits and the pipelines that were compiled so far.
//! For: every operation of this device.
//! Invariant: whatever wgpu reports, at once or later, lands in the next `Result`: no call of it can end the process.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use ahash::RandomState;
use wgpu::{
    Adapter, BindGroupLayout, BindGroupLayoutDescriptor, BindGroupLayoutEntry, BindingType, Buffer, BufferBindingType,
    BufferDescriptor, BufferUsages, ComputePipeline, ComputePipelineDescriptor, Device, DeviceDescriptor, DeviceType,
    Features, Limits, MemoryHints, PipelineCompilationOptions, PipelineLayoutDescriptor, PollType, Queue,
    ShaderModuleDescriptor, ShaderRuntimeChecks, ShaderSource, ShaderStages,
};

#[cfg(not(target_family = "wasm"))]
use super::kept_pipelines::KeptPipelines;
use super::{
    matmul::Shape,
    parameters,
    source::{self, Source},
};
use crate::KernelError;
#[cfg(not(target_family = "wasm"))]
use crate::kernel_cache::KernelCache;

/// Longest wait for a GPU; a step takes seconds at worst.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Bytes of parameters that a dispatch takes.
pub const PARAMETER_BYTES: u32 = 64;

/// Edges of the matrices of tensor cores that shaders are written for, and the workgroup memory that these take.
pub const MATRICES: [(u32, u32); 2] = [(16, 45 << 10), (8, 26 << 10)];

/// Which tensor cores are used.
#[derive(Clone, Copy, Debug)]
pub enum Matrices {
    /// None.
    None,
    /// The adapter's, where it has them.
    OfAdapter,
    /// None; in their place, for tests, what a function makes of the shaders for matrices of an edge.
    StandIn(u32, fn(&str) -> String),
}

/// What is used of an adapter, for tests that do without and for benchmarks.
#[derive(Clone, Copy, Debug)]
pub struct GpuOptions {
    /// Reductions over subgroups, where the adapter has them.
    pub use_subgroups: bool,
    /// f16 arithmetic, where the adapter has it.
    pub use_f16: bool,
    /// Tensor cores.
    pub matrices: Matrices,
    /// Memory through which workgroups of a dispatch see what others of it wrote, where the adapter has it.
    pub use_coherent_memory: bool,
    /// Dispatches from which on a step is begun while the host describes the rest of it.
    pub head_start: usize,
    /// Most threads that share a row of a norm.
    pub norm_threads: u32,
    /// Shape of the products that are made as 8-bit blocks; `None`: what suits the adapter.
    pub blocks_shape: Option<Shape>,
    /// Parameters as immediates, where the adapter has them; else they are uniforms.
    pub use_immediates: bool,
    /// No binding of weights or of a KV cache is larger, whatever the adapter allows.
    pub max_binding_bytes: u64,
}

impl Default for GpuOptions {
    fn default() -> Self {
        Self {
            use_subgroups: true,
            use_f16: true,
            matrices: Matrices::OfAdapter,
            use_coherent_memory: true,
            // Of 12 dispatches an H200 was done before the rest was described.
            head_start: 24,
            norm_threads: 512,
            blocks_shape: None,
            use_immediates: true,
            max_binding_bytes: u64::MAX,
        }
    }
}

/// A source and the values of its options, whose names and order are the source's.
type PipelineKey = (&'static str, Vec<u32>);

/// An opened GPU.
#[derive(Debug)]
pub struct Gpu {
    name: String,
    options: GpuOptions,
    #[cfg_attr(target_family = "wasm", expect(dead_code, reason = "pages measure nothing"))]
    pub(super) adapter: Adapter,
    pub(super) device: Device,
    pub(super) queue: Queue,
    limits: Limits,
    features: Features,
    matrix_edge: Option<u32>,
    most_threads: u32,
    subgroup_threads: u32,
    /// Of the parameters, if they are uniforms.
    parameter_layout: Option<BindGroupLayout>,
    matvec_shape: Mutex<Option<Shape>>,
    pipelines: Mutex<HashMap<PipelineKey, Arc<Pipeline>, RandomState>>,
    #[cfg(not(target_family = "wasm"))]
    kept: std::sync::OnceLock<KeptPipelines>,
    failure: Arc<Mutex<Option<String>>>,
}

/// A compiled variant.
#[derive(Debug, PartialEq, Eq)]
pub struct Pipeline {
    pub(super) pipeline: ComputePipeline,
    pub(super) layout: BindGroupLayout,
    /// Numbers of its bindings, in order.
    pub(super) bindings: Arc<[u32]>,
    pub(super) name: &'static str,
}

impl std::hash::Hash for Pipeline {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        // The rest belongs to it.
        self.pipeline.hash(state);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What the mutexes here hold is whole at any time.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gpu {
    /// Opens an adapter that settings and reports call `id`.
    ///
    /// # Errors
    /// [`KernelError::Device`] if it does not open.
    pub async fn open(adapter: Adapter, id: &str, options: GpuOptions) -> Result<Arc<Self>, KernelError> {
        let info = adapter.get_info();
        // A browser keeps both to itself.
        let driver = if info.driver.is_empty() { String::new() } else { format!(" ({})", info.driver) };
        let name = format!("{id} {}{driver}", info.name).trim_end().to_owned();
        let mut wanted = Features::TIMESTAMP_QUERY | Features::PIPELINE_CACHE;
        if options.use_immediates {
            wanted |= Features::IMMEDIATES;
        }
        if options.use_subgroups {
            wanted |= Features::SUBGROUP;
        }
        // In Metal barriers of a workgroup order nothing for the others.
        if options.use_coherent_memory && info.backend == wgpu::Backend::Vulkan {
            wanted |= Features::MEMORY_DECORATION_COHERENT;
        }
        if options.use_f16 {
            wanted |= Features::SHADER_F16;
        }
        if matches!(options.matrices, Matrices::OfAdapter) {
            wanted |= Features::EXPERIMENTAL_COOPERATIVE_MATRIX;
        }
        let features = adapter.features() & wanted;
        let limits = adapter.limits();
        // SAFETY: shaders use the experimental feature, matrices, as its documentation demands; with it they were tested on an
        // H200, and elsewhere with plain arithmetic in its place.
        let experimental_features = unsafe { wgpu::ExperimentalFeatures::enabled() };
        let descriptor = DeviceDescriptor {
            label: Some("lockstep"),
            required_features: features,
            required_limits: limits.clone(),
            experimental_features,
            memory_hints: MemoryHints::Performance,
            ..DeviceDescriptor::default()
        };
        let opened = adapter.request_device(&descriptor).await;
        let failed =
            |error: wgpu::RequestDeviceError| KernelError::Device { device: name.clone(), what: error.to_string() };
        let (device, queue) = opened.map_err(failed)?;
        let failure: Arc<Mutex<Option<String>>> = Arc::default();
        let uncaptured = Arc::clone(&failure);
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            lock(&uncaptured).get_or_insert_with(|| error.to_string());
        }));
        let lost = Arc::clone(&failure);
        device.set_device_lost_callback(move |reason, message| {
            lock(&lost).get_or_insert_with(|| format!("the device is lost ({reason:?}): {message}"));
        });
        let pipelines = Mutex::default();
        let matrix_edge = match options.matrices {
            Matrices::StandIn(edge, _) => Some(edge),
            Matrices::None | Matrices::OfAdapter => matrix_edge(&adapter, features),
        };
        // Metal has fewer threads for kernels that take many registers, and says so for compiled ones alone.
        let most_threads = limits.max_compute_invocations_per_workgroup;
        let most_threads = if info.backend == wgpu::Backend::Metal { most_threads.min(256) } else { most_threads };
        let is_narrow = info.device_type == DeviceType::Cpu && !features.contains(Features::SUBGROUP);
        let subgroup_threads = if features.contains(Features::SUBGROUP) { subgroup_sizes(&info)[0].max(1) } else { 1 };
        let has_immediates = features.contains(Features::IMMEDIATES);
        let parameter_layout = (!has_immediates).then(|| parameters::layout(&device));
        let gpu = Self {
            name,
            options,
            adapter,
            device,
            queue,
            limits,
            features,
            matrix_edge,
            most_threads,
            subgroup_threads,
            parameter_layout,
            matvec_shape: Mutex::new(is_narrow.then_some(Shape::NARROW)),
            pipelines,
            #[cfg(not(target_family = "wasm"))]
            kept: std::sync::OnceLock::new(),
            failure,
        };
        Ok(Arc::new(gpu))
    }

    /// Kind and model, such as `vulkan:0 NVIDIA H200 (NVIDIA)`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether kernels reduce over subgroups.
    pub fn has_subgroups(&self) -> bool {
        self.features.contains(Features::SUBGROUP)
    }

    /// Threads of the smallest subgroup; 1 if kernels do without subgroups.
    pub fn subgroup_threads(&self) -> u32 {
        self.subgroup_threads
    }

    /// Chooses the shape of the products of few tokens, for benchmarks; `None`: what suits the layer.
    pub fn choose_matvec_shape(&self, shape: Option<Shape>) {
        *lock(&self.matvec_shape) = shape;
    }

    /// Shape of the products of few tokens, if it was chosen.
    pub(super) fn matvec_shape(&self) -> Option<Shape> {
        *lock(&self.matvec_shape)
    }

    /// What is used of the adapter.
    pub fn options(&self) -> &GpuOptions {
        &self.options
    }

    /// Whether kernels compute with f16.
    pub fn has_f16(&self) -> bool {
        self.features.contains(Features::SHADER_F16)
    }

    /// Whether workgroups of a dispatch can see what others of it wrote.
    pub fn has_coherent_memory(&self) -> bool {
        self.features.contains(Features::MEMORY_DECORATION_COHERENT)
    }

    /// Edge of the matrices of its tensor cores, of f16 and summed in f32, if it has such and the memory that their kernels
    /// take.
    pub fn matrix_edge(&self) -> Option<u32> {
        self.matrix_edge
    }

    /// Threads of a workgroup that every kernel may have.
    pub(super) fn most_threads(&self) -> u32 {
        self.most_threads
    }

    /// What pipelines expect as their second group of bindings, if parameters are no immediates.
    pub(super) fn parameter_layout(&self) -> Option<&BindGroupLayout> {
        self.parameter_layout.as_ref()
    }

    /// The device's limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Most bytes of a binding of weights or of a KV cache.
    pub fn max_binding_bytes(&self) -> u64 {
        let buffer = self.limits.max_buffer_size.min(self.limits.max_storage_buffer_binding_size);
        // Bindings of whole vectors.
        buffer.min(self.options.max_binding_bytes) / 16 * 16
    }

    /// An error that names this device.
    pub fn error(&self, what: impl Into<String>) -> KernelError {
        KernelError::Device { device: self.name.clone(), what: what.into() }
    }

    /// What wgpu reported since, if anything.
    ///
    /// # Errors
    /// [`KernelError::Device`] with the report.
    pub fn check(&self) -> Result<(), KernelError> {
        match lock(&self.failure).take() {
            Some(what) => Err(self.error(what)),
            None => Ok(()),
        }
    }

    /// A zeroed storage buffer of at least so many bytes, a multiple of 16.
    ///
    /// # Errors
    /// [`KernelError::Device`] if memory is short or the adapter's limit lower.
    pub fn buffer(&self, what: &str, num_bytes: u64) -> Result<Arc<Buffer>, KernelError> {
        let size = num_bytes.max(16).next_multiple_of(16);
        if size > self.limits.max_buffer_size {
            let limit = self.limits.max_buffer_size;
            return Err(self.error(format!("{what} takes {size} bytes, a buffer holds {limit}")));
        }
        let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST | BufferUsages::COPY_SRC;
        let buffer = self.device.create_buffer(&BufferDescriptor {
            label: Some("lockstep"),
            size,
            usage,
            mapped_at_creation: false,
        });
        self.check()?;
        Ok(Arc::new(buffer))
    }

    /// Sends what was written, and waits until its copies are freed.
    ///
    /// # Errors
    /// [`KernelError::Device`] if wgpu refuses it or the GPU does not answer.
    pub fn finish_uploads(&self) -> Result<(), KernelError> {
        self.queue.submit([]);
        self.wait()
    }

    /// Waits until the GPU has done all that was submitted.
    ///
    /// # Errors
    /// [`KernelError::Device`] if it fails, or does not within two minutes.
    pub fn wait(&self) -> Result<(), KernelError> {
        let waited = self.device.poll(PollType::Wait { submission_index: None, timeout: Some(TIMEOUT) });
        self.check()?;
        waited.map(drop).map_err(|error| self.error(format!("waiting for it: {error}")))
    }

    /// The pipeline of a variant, compiled at its first use. The options of a source always come in the same order.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the driver refuses it.
    pub fn pipeline(
        &self,
        source: &'static Source,
        options: &[(&'static str, u32)],
    ) -> Result<Arc<Pipeline>, KernelError> {
        let key = (source.name, options.iter().map(|(_, value)| *value).collect());
        if let Some(known) = lock(&self.pipelines).get(&key) {
            return Ok(Arc::clone(known));
        }
        let pipeline = Arc::new(self.compile(source, options)?);
        lock(&self.pipelines).insert(key, Arc::clone(&pipeline));
        Ok(pipeline)
    }

    fn compile(&self, source: &'static Source, options: &[(&'static str, u32)]) -> Result<Pipeline, KernelError> {
        let mut options = options.to_vec();
        options.push(("SUBGROUPS", u32::from(self.has_subgroups())));
        options.push(("IMMEDIATES", u32::from(self.parameter_layout.is_none())));
        let mut text = source.variant(&options).map_err(|what| self.error(format!("{} {what}", source.name)))?;
        if let Matrices::StandIn(_, rewrite) = self.options.matrices
            && options.contains(&("COOPERATIVE", 1))
        {
            text = rewrite(&text);
        }
        let bindings = source::bindings(&text);
        let layout = self.layout(source.name, &bindings);
        let descriptor = ShaderModuleDescriptor { label: Some(source.name), source: ShaderSource::Wgsl(text.into()) };
        // SAFETY: the shader is this crate's own: each operation checks before a dispatch that its parameters keep every
        // access inside the bound ranges, and its loops end.
        let module = unsafe { self.device.create_shader_module_trusted(descriptor, ShaderRuntimeChecks::unchecked()) };
        let groups: Vec<_> = [&layout].into_iter().chain(self.parameter_layout()).map(Some).collect();
        let pipeline_layout = self.device.create_pipeline_layout(&PipelineLayoutDescriptor {
            label: Some(source.name),
            bind_group_layouts: &groups,
            immediate_size: if self.parameter_layout.is_none() { PARAMETER_BYTES } else { 0 },
        });
        let pipeline = self.device.create_compute_pipeline(&ComputePipelineDescriptor {
            label: Some(source.name),
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: PipelineCompilationOptions { constants: &[], zero_initialize_workgroup_memory: false },
            cache: self.pipeline_cache(),
        });
        self.check()?;
        let bindings = bindings.into_iter().map(|(number, _)| number).collect();
        Ok(Pipeline { pipeline, layout, bindings, name: source.name })
    }

    #[cfg(target_family = "wasm")]
    fn pipeline_cache(&self) -> Option<&wgpu::PipelineCache> {
        None
    }

    fn layout(&self, name: &str, bindings: &[(u32, bool)]) -> BindGroupLayout {
        let entry = |&(binding, read_only): &(u32, bool)| BindGroupLayoutEntry {
            binding,
            visibility: ShaderStages::COMPUTE,
            ty: BindingType::Buffer {
                ty: BufferBindingType::Storage { read_only },
                has_dynamic_offset: false,
                min_binding_size: None,
            },
            count: None,
        };
        let entries: Vec<_> = bindings.iter().map(entry).collect();
        self.device.create_bind_group_layout(&BindGroupLayoutDescriptor { label: Some(name), entries: &entries })
    }
}

#[cfg(not(target_family = "wasm"))]
impl Gpu {
    /// Takes pipelines from `cache` that earlier starts have left there, and leaves there what is compiled from now on.
    pub fn use_cache(&self, cache: KernelCache) {
        if let Some(kept) = KeptPipelines::load(&self.device, &self.adapter.get_info(), cache) {
            // What is there already stays.
            let _ = self.kept.set(kept);
        }
    }

    /// Leaves what was compiled so far to the next start.
    pub fn store_pipelines(&self) {
        if let Some(kept) = self.kept.get() {
            kept.store();
        }
    }

    fn pipeline_cache(&self) -> Option<&wgpu::PipelineCache> {
        self.kept.get().map(KeptPipelines::for_pipeline)
    }
}

#[cfg(not(target_family = "wasm"))]
impl Drop for Gpu {
    fn drop(&mut self) {
        self.store_pipelines();
    }
}

/// Threads of the smallest and of the largest subgroup. Metal does not say: wgpu names what any GPU of it may have, while Apple's
/// have 32.
fn subgroup_sizes(info: &wgpu::AdapterInfo) -> [u32; 2] {
    if info.backend == wgpu::Backend::Metal { [32; 2] } else { [info.subgroup_min_size, info.subgroup_max_size] }
}

/// Edge of the matrices that the shaders for tensor cores use with these features.
fn matrix_edge(adapter: &Adapter, features: Features) -> Option<u32> {
    use wgpu::CooperativeScalarType::{F16, F32};
    let (info, limits) = (adapter.get_info(), adapter.limits());
    let needed = Features::EXPERIMENTAL_COOPERATIVE_MATRIX | Features::SHADER_F16 | Features::SUBGROUP;
    if !features.contains(needed) || subgroup_sizes(&info) != [32, 32] {
        return None;
    }
    let known = adapter.cooperative_matrix_properties();
    let is_there = |(edge, num_bytes): &(u32, u32)| {
        let is_known = |entry: &wgpu::CooperativeMatrixProperties| {
            [entry.m_size, entry.n_size, entry.k_size] == [*edge; 3] && (entry.ab_type, entry.cr_type) == (F16, F32)
        };
        limits.max_compute_workgroup_storage_size >= *num_bytes && known.iter().any(is_known)
    };
    MATRICES.iter().find(|entry| is_there(entry)).map(|(edge, _)| *edge)
}
