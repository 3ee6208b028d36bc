//! [`CudaDevice`]: the operations of a forward step on an NVIDIA GPU.
//! For: the executor of a rank, through the trait [`Device`].
//! Invariant: an operation checks its call, stages its inputs and adds a launch to the step; what the step came to is
//! read only after [`Steps::flush`]. Tensors, layers and caches are shared with the launches that use them.
//! Not here: the operations themselves, one a file; collecting and replaying launches ([`step`](super::step)).

use std::{cell::RefCell, sync::Arc};

use lockstep_formats::Dtype;

use super::{
    Activations, CollectiveCall, CudaCommunicator, CudaKvCache, CudaTensor, DeviceBuffer, Gpu, HalfType, KernelCache,
    PoolStatistics, Staging,
    add::AddCall,
    attention::{AttentionCall, Batch},
    call::Call,
    convert::ConvertCall,
    gather_rows::GatherRowsCall,
    matmul::{CudaLinear, MatmulCall, Target, embed::EmbedCall},
    rms_norm::RmsNormCall,
    rope_and_store::{CudaRope, Element, RopeAddresses, RopeAndStoreCall, Rows},
    sample::SamplePlan,
    step::Steps,
    tensor::Producer,
};
use crate::{
    Device, KernelError,
    cpu::{self, Team},
    device::{KvCacheSpec, Scratch},
    group::{Collective, Exchange, Group, Sum},
    ops::{Attention, Candidates, Epilogue, HostMatrix, RopeAndStore, RopeTable, SampleRow},
};

/// Values from which on a sum over GPUs takes so long that its products travel in f16: 512 tokens of 8,192. What a long
/// step computes is rounded to 16 bits before and after them, too.
const LONG_SUM: usize = 4 << 20;

/// An opened GPU with its kernels.
pub struct CudaDevice {
    name: String,
    gpu: Arc<Gpu>,
    steps: Steps,
    /// Where the tokens of the open step go and what they see, as the calls of its first layer said.
    staged: Staged,
    /// Tables that were used so far, with their copies.
    ropes: Vec<(RopeTable, CudaRope)>,
    /// This rank's shares of sums over the ranks.
    partial: CudaTensor,
    /// This rank's products of long sums over GPUs, f16.
    products: Arc<DeviceBuffer>,
    /// The way of weights to the GPU, given up when steps begin.
    staging: RefCell<Option<Staging>>,
    /// Samples rows that want more candidates than the GPU can sort.
    team: Team,
}

/// What the layers of a step share, by what identifies it: addresses of what the calls borrow, which stays unchanged
/// until the step ends, and their sizes.
#[derive(Default)]
struct Staged {
    addresses: Option<([usize; 6], RopeAddresses)>,
    batch: Option<([usize; 9], Batch)>,
}

impl CudaDevice {
    /// Opens GPU number `ordinal`; compiled kernels are kept in `cache`.
    ///
    /// # Errors
    /// [`KernelError`] if a library or the GPU is missing, too old or fails.
    pub fn new(ordinal: usize, cache: KernelCache) -> Result<Self, KernelError> {
        let gpu = Gpu::open(ordinal, cache)?;
        Ok(Self {
            name: gpu.device_name(),
            steps: Steps::new(&gpu)?,
            staged: Staged::default(),
            ropes: Vec::new(),
            partial: CudaTensor::zeroed(&gpu, 0, 0)?,
            products: Arc::new(DeviceBuffer::uninit(&gpu, 0)?),
            staging: RefCell::default(),
            team: Team::new(1)?,
            gpu,
        })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }
}

impl CudaDevice {
    /// The matmul of `input`, after the conversion that it needs, if any.
    fn push_matmul(
        &mut self,
        num_tokens: usize,
        weight: &Arc<CudaLinear>,
        input: &CudaTensor,
        target: Target,
        output: Activations,
    ) -> Result<(), KernelError> {
        input.expect_tokens("matmul", num_tokens)?;
        let (activations, missing) = input.request(num_tokens, weight.input_forms(num_tokens))?;
        if let Some(output) = missing {
            self.steps.push(Call::Convert(ConvertCall { num_tokens, input: Arc::clone(input.values()), output }))?;
        }
        let (weight, input) = (Arc::clone(weight), activations);
        self.steps.push(Call::Matmul(MatmulCall { num_tokens, weight, input, target, output }))
    }

    /// `hidden += sum over all ranks of input × weightᵀ` with the products in f16, which take half the time on the way.
    fn add_long_sum(
        &mut self,
        num_tokens: usize,
        weight: &Arc<CudaLinear>,
        input: &CudaTensor,
        hidden: &mut CudaTensor,
        communicator: &Arc<CudaCommunicator>,
    ) -> Result<(), KernelError> {
        let (width, len) = (weight.rows(), num_tokens * weight.rows());
        if self.products.num_bytes() < len * size_of::<u16>() {
            self.products = Arc::new(DeviceBuffer::uninit(&self.gpu, len * size_of::<u16>())?);
        }
        let (communicator, values) = (Arc::clone(communicator), Arc::clone(&self.products));
        let halves = Some((HalfType::F16, Arc::clone(&values)));
        let output = Activations { columns: width, tiles: None, halves, values: None };
        self.push_matmul(num_tokens, weight, input, Target::Store, output)?;
        let collective = Collective::AllReduce;
        let addend = Arc::clone(&values);
        self.steps.push(Call::Collective(CollectiveCall { communicator, collective, len, values, is_half: true }))?;
        let hidden = Arc::clone(hidden.overwrite());
        self.steps.push(Call::Add(AddCall { len, is_half: true, addend, hidden }))
    }

    fn rope_addresses(
        &mut self,
        call: &RopeAndStore<'_>,
        table: &RopeTable,
        qkv_width: usize,
        cache: &CudaKvCache,
    ) -> Result<RopeAddresses, KernelError> {
        let key = [
            call.positions.as_ptr().addr(),
            call.slot_mapping.as_ptr().addr(),
            call.num_tokens(),
            call.num_heads,
            call.num_key_value_heads,
            qkv_width,
        ];
        match &self.staged.addresses {
            Some((known, addresses)) if *known == key => Ok(addresses.clone()),
            _ => {
                call.check(table, cache.spec(), qkv_width)?;
                let Steps { launchers, inputs, .. } = &mut self.steps;
                let addresses = launchers.rope_and_store.stage(inputs, call, table, cache)?;
                self.staged.addresses = self.steps.is_open().then(|| (key, addresses.clone()));
                Ok(addresses)
            }
        }
    }

    fn batch(&mut self, call: &Attention<'_>, widths: [usize; 2], cache: &CudaKvCache) -> Result<Batch, KernelError> {
        let key = [
            call.sequences.as_ptr().addr(),
            call.sequences.len(),
            call.num_heads,
            call.num_key_value_heads,
            call.group_size,
            call.group_offset,
            call.scale.to_bits() as usize,
            widths[0],
            widths[1],
        ];
        match &self.staged.batch {
            Some((known, batch)) if *known == key => Ok(batch.clone()),
            _ => {
                call.check(cache.spec(), widths[0], widths[1])?;
                let Steps { launchers, inputs, .. } = &mut self.steps;
                let batch = launchers.attention.stage(inputs, call, cache)?;
                self.staged.batch = self.steps.is_open().then(|| (key, batch.clone()));
                Ok(batch)
            }
        }
    }

    fn rope(&mut self, table: &RopeTable) -> Result<CudaRope, KernelError> {
        if let Some((_, rope)) = self.ropes.iter().find(|(known, _)| known == table) {
            return Ok(rope.clone());
        }
        let rope = CudaRope::new(&self.gpu, table)?;
        self.ropes.push((table.clone(), rope.clone()));
        Ok(rope)
    }

    /// The first `num_tokens` rows, once everything before is done.
    fn download(&mut self, num_tokens: usize, buffer: &DeviceBuffer, width: usize) -> Result<Vec<f32>, KernelError> {
        self.steps.flush()?;
        let mut values = vec![0.0; num_tokens * width];
        buffer.read(0, &mut values)?;
        Ok(values)
    }
}

impl Device for CudaDevice {
    type Tensor = CudaTensor;
    type Linear = Arc<CudaLinear>;
    type KvCache = CudaKvCache;
    type Communicator = Arc<CudaCommunicator>;

    fn name(&self) -> &str {
        &self.name
    }

    fn scratch(&self) -> Scratch {
        let PoolStatistics { used_bytes, high_water_bytes, num_requests, num_hits, .. } = self.gpu.pool_statistics();
        Scratch { used_bytes, high_water_bytes, num_requests, num_hits }
    }

    fn tensor(&self, max_tokens: usize, width: usize) -> Result<CudaTensor, KernelError> {
        CudaTensor::zeroed(&self.gpu, max_tokens, width)
    }

    fn vector(&self, values: &[f32]) -> Result<CudaTensor, KernelError> {
        let tensor = CudaTensor::zeroed(&self.gpu, 1, values.len())?;
        tensor.values().write(0, values)?;
        Ok(tensor)
    }

    fn linear(&self, matrices: Vec<HostMatrix>) -> Result<Arc<CudaLinear>, KernelError> {
        let mut staging = self.staging.borrow_mut();
        let staging = staging.get_or_insert_with(|| Staging::new(&self.gpu));
        Ok(Arc::new(CudaLinear::upload(staging, matrices)?))
    }

    fn kv_cache(&self, spec: KvCacheSpec, dtype: Dtype) -> Result<CudaKvCache, KernelError> {
        let half_type = match dtype {
            Dtype::F16 => HalfType::F16,
            Dtype::Bf16 => HalfType::BF16,
            Dtype::F32 => {
                let what = "keys and values in f32 (f16 and bf16 are what its tensor cores take)".to_owned();
                return Err(KernelError::Unsupported { operation: "kv_cache", what, device: self.name.clone() });
            }
        };
        CudaKvCache::new(&self.gpu, spec, half_type)
    }

    fn join<E: From<KernelError>>(
        &mut self,
        group: &Group,
        exchange: Exchange<'_, E>,
    ) -> Result<Option<Arc<CudaCommunicator>>, E> {
        CudaCommunicator::join(&self.gpu, group, exchange)
    }

    fn collective(
        &mut self,
        num_tokens: usize,
        tensor: &mut CudaTensor,
        collective: Collective,
        communicator: &Arc<CudaCommunicator>,
    ) -> Result<(), KernelError> {
        tensor.expect_tokens("collective", num_tokens)?;
        let len = num_tokens * tensor.width();
        let values = if let Collective::Send { .. } = collective { tensor.values() } else { tensor.overwrite() };
        let (communicator, values) = (Arc::clone(communicator), Arc::clone(values));
        self.steps.push(Call::Collective(CollectiveCall { communicator, collective, len, values, is_half: false }))
    }

    fn prepare<E: From<KernelError>>(&mut self, body: impl FnOnce(&mut Self) -> Result<(), E>) -> Result<(), E> {
        let gpu = Arc::clone(&self.gpu);
        gpu.rehearse(|| body(self))
    }

    fn step<T, E: From<KernelError>>(&mut self, body: impl FnOnce(&mut Self) -> Result<T, E>) -> Result<T, E> {
        self.staging.take();
        self.steps.open();
        self.staged = Staged::default();
        let outcome = body(self);
        self.staged = Staged::default();
        match outcome {
            Ok(result) => {
                self.steps.close()?;
                Ok(result)
            }
            Err(error) => {
                self.steps.abandon();
                Err(error)
            }
        }
    }

    fn embed(
        &mut self,
        table: &Arc<CudaLinear>,
        first_row: u32,
        token_ids: &[u32],
        output: &mut CudaTensor,
    ) -> Result<(), KernelError> {
        expect_width("embed", output.width(), table.columns())?;
        output.expect_tokens("embed", token_ids.len())?;
        let num_tokens = token_ids.len();
        let token_ids = self.steps.inputs.stage(token_ids)?;
        let (table, output) = (Arc::clone(table), Arc::clone(output.overwrite()));
        self.steps.push(Call::Embed(EmbedCall { num_tokens, table, first_row, token_ids, output }))
    }

    fn rms_norm(
        &mut self,
        num_tokens: usize,
        input: &CudaTensor,
        weight: &CudaTensor,
        epsilon: f32,
        output: &mut CudaTensor,
    ) -> Result<(), KernelError> {
        let operation = "rms_norm";
        expect_width(operation, weight.width(), input.width())?;
        expect_width(operation, output.width(), input.width())?;
        input.expect_tokens(operation, num_tokens)?;
        output.expect_tokens(operation, num_tokens)?;
        let producer = Producer { make_tiles: true, make_halves: true };
        let norm = RmsNormCall {
            num_tokens,
            input: Arc::clone(input.values()),
            weight: Arc::clone(weight.values()),
            epsilon,
            output: output.produce(num_tokens, producer),
        };
        // The sum over ranks that was asked for just before happens in the same kernel.
        match self.steps.pop_if(|before| matches!(before, Call::Collective(sum) if sum.takes_norm(&norm))) {
            Some(Call::Collective(sum)) => self.steps.push(Call::SumAndNorm(sum, norm)),
            _ => self.steps.push(Call::RmsNorm(norm)),
        }
    }

    fn matmul(
        &mut self,
        num_tokens: usize,
        weight: &Arc<CudaLinear>,
        input: &CudaTensor,
        epilogue: Epilogue,
        output: &mut CudaTensor,
    ) -> Result<(), KernelError> {
        output.expect_tokens("matmul", num_tokens)?;
        let (target, make_tiles) = match epilogue {
            Epilogue::Store => (Target::Store, false),
            Epilogue::SwiGlu => (Target::SwiGlu, true),
        };
        let output = output.produce(num_tokens, Producer { make_tiles, make_halves: true });
        self.push_matmul(num_tokens, weight, input, target, output)
    }

    fn matmul_add<E: From<KernelError>>(
        &mut self,
        num_tokens: usize,
        weight: &Arc<CudaLinear>,
        input: &CudaTensor,
        hidden: &mut CudaTensor,
        sum: Sum<'_, Arc<CudaCommunicator>, E>,
    ) -> Result<(), E> {
        let (operation, width) = ("matmul_add", weight.rows());
        expect_width(operation, hidden.width(), width)?;
        hidden.expect_tokens(operation, num_tokens)?;
        let all_reduce = match sum {
            Sum::Own => {
                let output = values_of(hidden.overwrite(), width);
                return Ok(self.push_matmul(num_tokens, weight, input, Target::Add, output)?);
            }
            Sum::Hosts(all_reduce) => all_reduce,
            Sum::Devices(communicator) if num_tokens * width >= LONG_SUM => {
                return Ok(self.add_long_sum(num_tokens, weight, input, hidden, communicator)?);
            }
            Sum::Devices(communicator) => {
                // The residual stream travels in the first rank's share.
                let target = if communicator.rank() == 0 { Target::Add } else { Target::Store };
                let output = values_of(hidden.overwrite(), width);
                self.push_matmul(num_tokens, weight, input, target, output)?;
                return Ok(self.collective(num_tokens, hidden, Collective::AllReduce, communicator)?);
            }
        };
        if self.partial.width() != width || self.partial.expect_tokens(operation, num_tokens).is_err() {
            self.partial = CudaTensor::zeroed(&self.gpu, num_tokens.next_power_of_two(), width)?;
        }
        let partial = Arc::clone(self.partial.values());
        self.push_matmul(num_tokens, weight, input, Target::Store, values_of(&partial, width))?;
        let shares = self.download(num_tokens, &partial, width)?;
        let mut sums: Vec<f64> = shares.into_iter().map(f64::from).collect();
        all_reduce(&mut sums)?;
        let sums: Vec<f32> = sums.into_iter().map(|sum| sum as f32).collect();
        partial.write(0, &sums)?;
        let hidden = Arc::clone(hidden.overwrite());
        Ok(self.steps.push(Call::Add(AddCall { len: num_tokens * width, is_half: false, addend: partial, hidden }))?)
    }

    fn rope_and_store(
        &mut self,
        call: &RopeAndStore<'_>,
        table: &RopeTable,
        qkv: &mut CudaTensor,
        cache: &mut CudaKvCache,
    ) -> Result<(), KernelError> {
        qkv.expect_tokens("rope_and_store", call.num_tokens())?;
        let rope = self.rope(table)?;
        let addresses = self.rope_addresses(call, table, qkv.width(), cache)?;
        let width = qkv.width();
        let rows = rows_of(qkv.overwrite(), width);
        let (qkv, queries) = (rows.clone(), rows);
        let (layer, cache) = (call.layer, cache.clone());
        self.steps.push(Call::RopeAndStore(RopeAndStoreCall { addresses, layer, rope, qkv, queries, cache }))
    }

    fn attention(
        &mut self,
        call: &Attention<'_>,
        qkv: &CudaTensor,
        cache: &CudaKvCache,
        output: &mut CudaTensor,
    ) -> Result<(), KernelError> {
        qkv.expect_tokens("attention", call.num_tokens())?;
        output.expect_tokens("attention", call.num_tokens())?;
        let batch = self.batch(call, [qkv.width(), output.width()], cache)?;
        let has_prompt = call.sequences.iter().any(|sequence| sequence.num_tokens > 1);
        let make_tiles = !has_prompt && call.head_dim.is_multiple_of(32);
        let attention = AttentionCall {
            batch,
            layer: call.layer,
            queries: rows_of(qkv.values(), qkv.width()),
            cache: cache.clone(),
            output: output.produce(call.num_tokens(), Producer { make_tiles, make_halves: true }),
        };
        // One token a sequence, each in its place: the rotation and the store that were asked for just before happen in the
        // same kernel.
        let is_fusible = |before: &Call| matches!(before, Call::RopeAndStore(store) if store.is_part_of(&attention));
        match self.steps.pop_if(is_fusible) {
            Some(Call::RopeAndStore(store)) => self.steps.push(Call::FusedAttention(attention, store.rope)),
            _ => self.steps.push(Call::Attention(attention)),
        }
    }

    fn gather_rows(&mut self, rows: &[u32], input: &CudaTensor, output: &mut CudaTensor) -> Result<(), KernelError> {
        let (operation, width) = ("gather_rows", input.width());
        expect_width(operation, output.width(), width)?;
        output.expect_tokens(operation, rows.len())?;
        for row in rows {
            input.expect_tokens(operation, *row as usize + 1)?;
        }
        let rows_on_gpu = self.steps.inputs.stage(rows)?;
        self.steps.push(Call::GatherRows(GatherRowsCall {
            num_rows: rows.len(),
            width,
            input: Arc::clone(input.values()),
            rows: rows_on_gpu,
            output: Arc::clone(output.overwrite()),
        }))
    }

    fn sample(
        &mut self,
        rows: &[SampleRow],
        first_token: u32,
        logits: &mut CudaTensor,
    ) -> Result<Vec<Candidates>, KernelError> {
        logits.expect_tokens("sample", rows.len())?;
        let Some(plan) = SamplePlan::new(rows, logits.width(), first_token)? else {
            let mut values = self.download(rows.len(), logits.values(), logits.width())?;
            return cpu::sample::sample(&self.team, cpu::simd::Level::detect(), rows, first_token, &mut values);
        };
        let Steps { launchers, inputs, .. } = &mut self.steps;
        let call = launchers.sample.prepare(plan, rows, logits.overwrite(), inputs)?;
        self.steps.push(Call::Sample(call.clone()))?;
        self.steps.flush()?;
        if self.gpu.is_rehearsing() {
            return Ok(vec![Candidates::default(); rows.len()]);
        }
        self.steps.launchers.sample.finish(&call, rows)
    }

    fn with_host<T, E: From<KernelError>>(
        &mut self,
        num_tokens: usize,
        tensor: &mut CudaTensor,
        body: impl FnOnce(&mut [f32]) -> Result<T, E>,
    ) -> Result<T, E> {
        tensor.expect_tokens("with_host", num_tokens)?;
        let mut values = self.download(num_tokens, tensor.values(), tensor.width())?;
        let result = body(&mut values)?;
        tensor.overwrite().write(0, &values)?;
        Ok(result)
    }
}

fn expect_width(operation: &'static str, got: usize, expected: usize) -> Result<(), KernelError> {
    let what = "width of a tensor";
    if got == expected { Ok(()) } else { Err(KernelError::Shape { operation, what, got, expected }) }
}

/// Rows in f32 alone.
fn values_of(buffer: &Arc<DeviceBuffer>, columns: usize) -> Activations {
    Activations { columns, tiles: None, halves: None, values: Some(Arc::clone(buffer)) }
}

/// Rows of f32 queries, keys and values.
fn rows_of(buffer: &Arc<DeviceBuffer>, stride: usize) -> Rows {
    Rows { buffer: Arc::clone(buffer), element: Element::F32, stride }
}
