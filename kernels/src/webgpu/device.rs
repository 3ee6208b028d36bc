//! [`WebGpuDevice`]: the operations of a forward step on a GPU through wgpu.
//! For: the executor of a rank, through the trait [`Device`].
//! Invariant: an operation checks its call, stages its inputs and adds dispatches to the step; what the step came to is
//! read only by `sample`, `with_host` and sums over hosts. Attention of decode tokens takes back the rotation and store that
//! were asked for just before, and makes them itself: the rows themselves then stay as they were. Attention also submits what
//! waits once that is enough for a head start.
//! Not here: the operations themselves, one a file; collecting dispatches ([`commands`](super::commands)).

use std::sync::Arc;

use lockstep_formats::Dtype;

use super::{
    attention::{self, Rotation, StagedItems},
    commands::{Binding, Commands},
    elementwise,
    gpu::Gpu,
    kv_cache::WebGpuKvCache,
    matmul::{self, Target, WebGpuLinear, embed},
    reading::Reading,
    rope_and_store::{self, StagedTokens},
    sample::{self, PendingCandidates},
    tensor::WebGpuTensor,
};
#[cfg(not(target_family = "wasm"))]
use crate::adapter_id::AdapterId;
use crate::{
    Device, KernelError,
    device::{KvCacheSpec, Scratch},
    group::{Collective, NoCommunicator, Sum},
    ops::{Attention, Candidates, Epilogue, HostMatrix, RopeAndStore, RopeTable, SampleRow},
};

/// An opened GPU with its kernels.
pub struct WebGpuDevice {
    commands: Commands,
    /// Where the tokens of the open step go and what they see, as the calls of its first layer said.
    staged: Staged,
    /// Products on their way to a sum over hosts, or to SwiGLU.
    products: WebGpuTensor,
    /// Partial sums of attention, and how many of a token's are there.
    partial: [Binding; 2],
    /// What the sampler leaves to be read.
    candidates: Binding,
}

/// What the layers of a step share, by what identifies it: addresses of what the calls borrow, which stays unchanged
/// until the step ends, and their sizes.
#[derive(Default)]
struct Staged {
    tokens: Option<([usize; 4], StagedTokens)>,
    items: Option<([usize; 3], StagedItems)>,
    rotated: Option<Rotated>,
}

/// The dispatch that rotates and stores rows, in case that attention of these comes next: it can do that itself.
struct Rotated {
    dispatch: u64,
    layer: usize,
    qkv: Binding,
    keys: Option<Binding>,
    places: Arc<[[u32; 2]]>,
    rotation: Rotation,
}

impl WebGpuDevice {
    /// Opens an adapter, whose pipelines come from `cache` as far as they are there.
    ///
    /// # Errors
    /// [`KernelError`] if there is none of that name, or it lacks what is needed.
    #[cfg(not(target_family = "wasm"))]
    pub fn new(id: AdapterId, cache: crate::kernel_cache::KernelCache) -> Result<Self, KernelError> {
        let device = Self::with_options(id, Default::default())?;
        device.gpu().use_cache(cache);
        Ok(device)
    }

    /// Opens an adapter and uses of it what the options allow.
    ///
    /// # Errors
    /// [`KernelError`] if there is none of that name, or it lacks what is needed.
    #[cfg(not(target_family = "wasm"))]
    pub fn with_options(id: AdapterId, options: super::gpu::GpuOptions) -> Result<Self, KernelError> {
        Self::of(&pollster::block_on(Gpu::open(super::adapter::find(id)?, &id.to_string(), options))?)
    }

    /// The device of an opened GPU.
    pub(super) fn of(gpu: &Arc<Gpu>) -> Result<Self, KernelError> {
        Ok(Self {
            products: WebGpuTensor::zeroed(gpu, 0, 0)?,
            partial: [
                Binding::whole(&gpu.buffer("partial sums", 0)?),
                Binding::whole(&gpu.buffer("counts of partial sums", 0)?),
            ],
            candidates: Binding::whole(&gpu.buffer("candidates", 0)?),
            commands: Commands::new(gpu)?,
            staged: Staged::default(),
        })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        self.commands.gpu()
    }

    /// Its dispatches, for tests and benchmarks.
    pub fn commands(&mut self) -> &mut Commands {
        &mut self.commands
    }

    /// [`Device::sample`] without waiting for the GPU.
    ///
    /// # Errors
    /// [`KernelError`] if the call does not pass its checks.
    pub fn sample_later(
        &mut self,
        rows: &[SampleRow],
        first_token: u32,
        logits: &mut WebGpuTensor,
    ) -> Result<PendingCandidates, KernelError> {
        sample::sample_later(&mut self.commands, rows, first_token, logits, &mut self.candidates)
    }

    /// The first rows of a tensor, without waiting for the GPU.
    ///
    /// # Errors
    /// [`KernelError`] if there are not as many.
    pub fn rows_later(&mut self, num_tokens: usize, tensor: &WebGpuTensor) -> Result<Reading, KernelError> {
        tensor.expect_tokens("rows_later", num_tokens)?;
        self.commands.read_later(&tensor.rows(num_tokens))
    }

    fn tokens(&mut self, call: &RopeAndStore<'_>, table: &RopeTable) -> Result<StagedTokens, KernelError> {
        let key = [
            call.positions.as_ptr().addr(),
            call.slot_mapping.as_ptr().addr(),
            call.num_tokens(),
            std::ptr::from_ref(table).addr(),
        ];
        match &self.staged.tokens {
            Some((known, tokens)) if *known == key => Ok(tokens.clone()),
            _ => {
                let tokens = rope_and_store::stage(&mut self.commands, call, table)?;
                self.staged.tokens = self.commands.is_step_open().then(|| (key, tokens.clone()));
                Ok(tokens)
            }
        }
    }

    fn items(&mut self, call: &Attention<'_>, cache: &WebGpuKvCache) -> Result<StagedItems, KernelError> {
        let key = [call.sequences.as_ptr().addr(), call.sequences.len(), call.num_tokens()];
        match &self.staged.items {
            Some((known, items)) if *known == key => Ok(items.clone()),
            _ => {
                let items = attention::stage(&mut self.commands, call, cache)?;
                self.staged.items = self.commands.is_step_open().then(|| (key, items.clone()));
                Ok(items)
            }
        }
    }

    /// The rows for attention, whose rotation and store become part of it if they are what was asked for just before.
    fn rows(&mut self, call: &Attention<'_>, qkv: &WebGpuTensor, cache: &WebGpuKvCache) -> attention::Rows {
        let qkv = qkv.values();
        let is_fusible = |rotated: &Rotated| {
            rotated.layer == call.layer
                && rotated.qkv == qkv
                && rotated.keys == cache.layer(call.layer).next()
                && attention::can_store(self.commands.gpu(), call, cache, &rotated.places)
        };
        let rotated = self.staged.rotated.take().filter(is_fusible);
        let rotated = rotated.filter(|rotated| self.commands.take_back(rotated.dispatch));
        attention::Rows { qkv, rotation: rotated.map(|rotated| rotated.rotation) }
    }

    /// The product with its columns on other ranks, whose hosts add the shares.
    fn add_over_hosts<E: From<KernelError>>(
        &mut self,
        num_tokens: usize,
        weight: &WebGpuLinear,
        input: &WebGpuTensor,
        hidden: &mut WebGpuTensor,
        all_reduce: crate::group::AllReduce<'_, E>,
    ) -> Result<(), E> {
        let width = weight.rows();
        hidden.expect_tokens("matmul", num_tokens)?;
        if hidden.width() != width {
            let (got, expected) = (hidden.width(), width);
            return Err(KernelError::Shape { operation: "matmul", what: "output width", got, expected }.into());
        }
        if self.products.width() != width || self.products.max_tokens() < num_tokens {
            self.products = WebGpuTensor::zeroed(self.commands.gpu(), num_tokens, width)?;
        }
        matmul::matmul(&mut self.commands, num_tokens, weight, input, Target::Store, &mut self.products)?;
        if num_tokens == 0 {
            return all_reduce(&mut []);
        }
        let shares: Vec<f32> = self.commands.read(&self.products.rows(num_tokens))?;
        let mut sums: Vec<f64> = shares.into_iter().map(f64::from).collect();
        all_reduce(&mut sums)?;
        let sums: Vec<f32> = sums.into_iter().map(|sum| sum as f32).collect();
        self.commands.write(self.products.overwrite_buffer(), &sums)?;
        elementwise::add(&mut self.commands, num_tokens * width, self.products.values(), hidden)?;
        Ok(())
    }
}

impl Device for WebGpuDevice {
    type Tensor = WebGpuTensor;
    type Linear = WebGpuLinear;
    type KvCache = WebGpuKvCache;
    type Communicator = NoCommunicator;

    fn name(&self) -> &str {
        self.commands.gpu().name()
    }

    fn scratch(&self) -> Scratch {
        let products = self.products.max_tokens() * self.products.width() * size_of::<f32>();
        let used_bytes = products + self.partial.iter().map(|binding| binding.num_bytes as usize).sum::<usize>();
        Scratch { used_bytes, high_water_bytes: used_bytes, num_requests: 0, num_hits: 0 }
    }

    fn tensor(&self, max_tokens: usize, width: usize) -> Result<WebGpuTensor, KernelError> {
        WebGpuTensor::zeroed(self.gpu(), max_tokens, width)
    }

    fn vector(&self, values: &[f32]) -> Result<WebGpuTensor, KernelError> {
        let mut tensor = WebGpuTensor::zeroed(self.gpu(), 1, values.len())?;
        self.gpu().queue.write_buffer(tensor.overwrite_buffer(), 0, bytemuck::cast_slice(values));
        self.gpu().finish_uploads()?;
        Ok(tensor)
    }

    fn linear(&self, matrices: Vec<HostMatrix>) -> Result<WebGpuLinear, KernelError> {
        WebGpuLinear::new(self.gpu(), &matrices)
    }

    fn kv_cache(&self, spec: KvCacheSpec, dtype: Dtype) -> Result<WebGpuKvCache, KernelError> {
        WebGpuKvCache::new(self.gpu(), spec, dtype)
    }

    fn collective(
        &mut self,
        _: usize,
        _: &mut WebGpuTensor,
        _: Collective,
        communicator: &NoCommunicator,
    ) -> Result<(), KernelError> {
        match *communicator {}
    }

    fn prepare<E: From<KernelError>>(&mut self, body: impl FnOnce(&mut Self) -> Result<(), E>) -> Result<(), E> {
        self.commands.rehearse(true);
        let outcome = body(self);
        self.commands.rehearse(false);
        #[cfg(not(target_family = "wasm"))]
        self.gpu().store_pipelines();
        outcome
    }

    fn step<T, E: From<KernelError>>(&mut self, body: impl FnOnce(&mut Self) -> Result<T, E>) -> Result<T, E> {
        self.staged = Staged::default();
        self.commands.open_step();
        let outcome = body(self);
        self.staged = Staged::default();
        match outcome {
            Ok(result) => {
                self.commands.close_step()?;
                Ok(result)
            }
            Err(error) => {
                self.commands.abandon_step();
                Err(error)
            }
        }
    }

    fn embed(
        &mut self,
        table: &WebGpuLinear,
        first_row: u32,
        token_ids: &[u32],
        output: &mut WebGpuTensor,
    ) -> Result<(), KernelError> {
        embed::embed(&mut self.commands, table, first_row, token_ids, output)
    }

    fn rms_norm(
        &mut self,
        num_tokens: usize,
        input: &WebGpuTensor,
        weight: &WebGpuTensor,
        epsilon: f32,
        output: &mut WebGpuTensor,
    ) -> Result<(), KernelError> {
        let operation = "rms_norm";
        expect_width(operation, weight.width(), input.width())?;
        expect_width(operation, output.width(), input.width())?;
        input.expect_tokens(operation, num_tokens)?;
        output.expect_tokens(operation, num_tokens)?;
        elementwise::rms_norm(&mut self.commands, num_tokens, input, weight, epsilon, output)
    }

    fn matmul(
        &mut self,
        num_tokens: usize,
        weight: &WebGpuLinear,
        input: &WebGpuTensor,
        epilogue: Epilogue,
        output: &mut WebGpuTensor,
    ) -> Result<(), KernelError> {
        let target = match epilogue {
            Epilogue::Store => Target::Store,
            Epilogue::SwiGlu => Target::SwiGlu,
        };
        matmul::matmul(&mut self.commands, num_tokens, weight, input, target, output)
    }

    fn matmul_add<E: From<KernelError>>(
        &mut self,
        num_tokens: usize,
        weight: &WebGpuLinear,
        input: &WebGpuTensor,
        hidden: &mut WebGpuTensor,
        sum: Sum<'_, NoCommunicator, E>,
    ) -> Result<(), E> {
        match sum {
            Sum::Own => Ok(matmul::matmul(&mut self.commands, num_tokens, weight, input, Target::Add, hidden)?),
            Sum::Hosts(all_reduce) => self.add_over_hosts(num_tokens, weight, input, hidden, all_reduce),
            Sum::Devices(communicator) => match *communicator {},
        }
    }

    fn rope_and_store(
        &mut self,
        call: &RopeAndStore<'_>,
        table: &RopeTable,
        qkv: &mut WebGpuTensor,
        cache: &mut WebGpuKvCache,
    ) -> Result<(), KernelError> {
        call.check(table, cache.spec(), qkv.width())?;
        qkv.expect_tokens("rope_and_store", call.num_tokens())?;
        let staged = self.tokens(call, table)?;
        let StagedTokens { angles, places, .. } = &staged;
        let rotation = Rotation { angles: angles.clone(), rotary_dim: table.rotary_dim, style: table.style };
        let (qkv, places) = (qkv.overwrite(), Arc::clone(places));
        rope_and_store::push(&mut self.commands, call, table, &staged, qkv.clone(), cache)?;
        let (dispatch, keys) = (self.commands.last_dispatch(), cache.layer(call.layer).next());
        self.staged.rotated = Some(Rotated { dispatch, layer: call.layer, qkv, keys, places, rotation });
        Ok(())
    }

    fn attention(
        &mut self,
        call: &Attention<'_>,
        qkv: &WebGpuTensor,
        cache: &WebGpuKvCache,
        output: &mut WebGpuTensor,
    ) -> Result<(), KernelError> {
        call.check(cache.spec(), qkv.width(), output.width())?;
        qkv.expect_tokens("attention", call.num_tokens())?;
        output.expect_tokens("attention", call.num_tokens())?;
        let staged = self.items(call, cache)?;
        let needed = [attention::partial_bytes(call, &staged), attention::arrival_bytes(call, &staged)];
        let names = ["partial sums", "counts of partial sums"];
        for ((binding, num_bytes), name) in self.partial.iter_mut().zip(needed).zip(names) {
            if binding.num_bytes < num_bytes {
                *binding = Binding::whole(&self.commands.gpu().buffer(name, num_bytes.next_power_of_two())?);
            }
        }
        let partial = self.partial.clone();
        let rows = self.rows(call, qkv, cache);
        attention::push(&mut self.commands, call, &staged, cache, rows, output, partial)?;
        self.commands.start()
    }

    fn gather_rows(
        &mut self,
        rows: &[u32],
        input: &WebGpuTensor,
        output: &mut WebGpuTensor,
    ) -> Result<(), KernelError> {
        let operation = "gather_rows";
        expect_width(operation, output.width(), input.width())?;
        output.expect_tokens(operation, rows.len())?;
        if let Some(row) = rows.iter().find(|row| **row as usize >= input.max_tokens()) {
            let (got, limit) = (*row as usize, input.max_tokens());
            return Err(KernelError::OutOfRange { operation, what: "row", got, limit });
        }
        elementwise::gather_rows(&mut self.commands, rows, input, output)
    }

    fn sample(
        &mut self,
        rows: &[SampleRow],
        first_token: u32,
        logits: &mut WebGpuTensor,
    ) -> Result<Vec<Candidates>, KernelError> {
        sample::sample(&mut self.commands, rows, first_token, logits, &mut self.candidates)
    }

    fn with_host<T, E: From<KernelError>>(
        &mut self,
        num_tokens: usize,
        tensor: &mut WebGpuTensor,
        body: impl FnOnce(&mut [f32]) -> Result<T, E>,
    ) -> Result<T, E> {
        tensor.expect_tokens("with_host", num_tokens)?;
        if num_tokens * tensor.width() == 0 {
            return body(&mut []);
        }
        let mut rows: Vec<f32> = self.commands.read(&tensor.rows(num_tokens))?;
        let result = body(&mut rows)?;
        self.commands.write(tensor.overwrite_buffer(), &rows)?;
        Ok(result)
    }
}

fn expect_width(operation: &'static str, got: usize, expected: usize) -> Result<(), KernelError> {
    if got == expected { Ok(()) } else { Err(KernelError::Shape { operation, what: "width", got, expected }) }
}
