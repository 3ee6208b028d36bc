//! The device side of sampling on CUDA: sums, the best candidates and draws of each row of logits. Device code:
//! `cuda/sample.cu`. Contract: [`ops::sample`](crate::ops::sample).
//! For: [`CudaDevice`](super::CudaDevice).
//! Invariant: what a row comes to depends on its logits and its parameters alone; the noise is the host's, bit for bit.
//! Not here: lists longer than [`MAX_TOP`], which have no [`SamplePlan`] and which the device leaves to the host.

use std::sync::Arc;

use super::{Argument, DeviceBuffer, Gpu, InputSlice, Kernel, Launch, PinnedBuffer, StepInputs, sources::Source};
use crate::{
    KernelError,
    ops::{Candidates, SampleRow},
};

/// Device code.
pub const SOURCE: Source = Source { name: "sample.cu", text: include_str!("../../cuda/sample.cu"), variants: &[] };

/// Most candidates of a row that the kernel can sort.
pub const MAX_TOP: usize = 2048;
/// Tokens that one block reduces, as in the kernel.
const SLICE_TOKENS: usize = 2048;
/// Threads of a block of each kernel.
const REDUCE_THREADS: u32 = 256;
const PENALIZE_THREADS: u32 = 256;
const TOP_THREADS: u32 = 1024;
/// Bits of the kernels' `stages`.
const RAW: u32 = 1;
const SCALED: u32 = 2;
/// Sizes of the kernels' structures.
const RESULT_WORDS: usize = 8;
const PARTIAL_BYTES: usize = 32;

/// What decides the launches: rows with equal plans are reduced by the same kernels in the same memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplePlan {
    num_rows: usize,
    width: usize,
    first_token: u32,
    /// Room for penalties of all rows; 0: there are none.
    num_penalties: usize,
    /// Room for candidates of a row after and before penalties; 0: the best one, which comes with the sums, is enough.
    top: usize,
    raw_top: usize,
}

impl SamplePlan {
    /// The plan of rows of `width` logits, or `None` if a row wants more candidates than the kernel can sort.
    ///
    /// # Errors
    /// [`KernelError`] if a row does not pass its checks or token ids would not fit.
    pub fn new(rows: &[SampleRow], width: usize, first_token: u32) -> Result<Option<Self>, KernelError> {
        rows.iter().try_for_each(SampleRow::check)?;
        if u32::try_from(width).ok().and_then(|width| first_token.checked_add(width)).is_none() {
            return Err(KernelError::OutOfRange {
                operation: "sample",
                what: "last token id",
                got: first_token as usize + width,
                limit: u32::MAX as usize,
            });
        }
        let most = |pick: fn(&SampleRow) -> usize| rows.iter().map(pick).max().unwrap_or(0).min(width);
        let (top, raw_top) = (most(|row| row.top_k), most(|row| row.raw_top_k));
        let num_penalties: usize = rows.iter().map(|row| row.penalties.len()).sum();
        // Powers of two, so that lists that grow from step to step keep their plan for long.
        let room = |len: usize| if len == 0 { 0 } else { len.next_power_of_two() };
        let plan = Self {
            num_rows: rows.len(),
            width,
            first_token,
            num_penalties: room(num_penalties),
            top: if top > 1 { room(top) } else { 0 },
            raw_top: room(raw_top),
        };
        Ok((top <= MAX_TOP && raw_top <= MAX_TOP).then_some(plan))
    }

    fn num_slices(&self) -> usize {
        self.width.div_ceil(SLICE_TOKENS).max(1)
    }

    /// Offsets of the sections of the outputs: results, logits before penalties, candidates, raw candidates, end.
    fn sections(&self) -> [usize; 5] {
        let results = self.num_rows * RESULT_WORDS * size_of::<u32>();
        let before = (self.num_penalties * size_of::<f32>()).next_multiple_of(16);
        let top = self.num_rows * self.top * size_of::<u64>();
        let raw_top = self.num_rows * self.raw_top * size_of::<u64>();
        [0, results, results + before, results + before + top, results + before + top + raw_top]
    }
}

/// Rows to reduce, with everything staged.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleCall {
    plan: SamplePlan,
    logits: Arc<DeviceBuffer>,
    rows: InputSlice,
    penalties: InputSlice,
    results: Arc<PinnedBuffer>,
    outputs: Arc<DeviceBuffer>,
    partials: Arc<DeviceBuffer>,
    counters: Arc<DeviceBuffer>,
}

/// The loaded kernels and the memory of their results.
pub struct Sample {
    gpu: Arc<Gpu>,
    reduce: Kernel,
    penalize: Kernel,
    top: Kernel,
    results: Arc<PinnedBuffer>,
    outputs: Arc<DeviceBuffer>,
    partials: Arc<DeviceBuffer>,
    counters: Arc<DeviceBuffer>,
}

impl Sample {
    /// Loads them.
    ///
    /// # Errors
    /// [`KernelError::Device`] if they do not compile.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, KernelError> {
        let kernel = |name| gpu.kernel(&SOURCE, &[], name);
        let empty = || DeviceBuffer::zeroed(gpu, 0).map(Arc::new);
        Ok(Self {
            gpu: Arc::clone(gpu),
            reduce: kernel("sample_reduce")?,
            penalize: kernel("sample_penalize")?,
            top: kernel("sample_top")?,
            results: Arc::new(PinnedBuffer::zeroed(gpu, 0)?),
            outputs: empty()?,
            partials: empty()?,
            counters: empty()?,
        })
    }

    /// Stages the parameters of `rows`, whose plan is `plan`, for the logits `[rows.len(), width]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if there are too few logits, [`KernelError::Device`] if memory is short.
    pub fn prepare(
        &mut self,
        plan: SamplePlan,
        rows: &[SampleRow],
        logits: &Arc<DeviceBuffer>,
        inputs: &mut StepInputs,
    ) -> Result<SampleCall, KernelError> {
        logits.expect_bytes("sample", "bytes of the logits", plan.num_rows * plan.width * size_of::<f32>())?;
        let [.., num_bytes] = plan.sections();
        self.reserve(num_bytes, plan.num_rows, plan.num_slices())?;
        let (rows, mut penalties) = words(rows);
        penalties.resize(3 * plan.num_penalties, 0);
        Ok(SampleCall {
            plan,
            logits: Arc::clone(logits),
            rows: inputs.stage(&rows)?,
            penalties: inputs.stage(&penalties)?,
            results: Arc::clone(&self.results),
            outputs: Arc::clone(&self.outputs),
            partials: Arc::clone(&self.partials),
            counters: Arc::clone(&self.counters),
        })
    }

    fn reserve(&mut self, num_bytes: usize, num_rows: usize, num_slices: usize) -> Result<(), KernelError> {
        if self.results.num_bytes() < num_bytes {
            self.results = Arc::new(PinnedBuffer::zeroed(&self.gpu, num_bytes.next_power_of_two())?);
        }
        let sizes = [num_bytes, num_rows * num_slices * PARTIAL_BYTES, num_rows * size_of::<u32>()];
        let buffers = [&mut self.outputs, &mut self.partials, &mut self.counters];
        for (buffer, num_bytes) in buffers.into_iter().zip(sizes) {
            if buffer.num_bytes() < num_bytes {
                *buffer = Arc::new(DeviceBuffer::zeroed(&self.gpu, num_bytes.next_power_of_two())?);
            }
        }
        Ok(())
    }

    /// Starts the kernels and the copy of their results. The logits of penalized tokens are changed.
    ///
    /// # Errors
    /// [`KernelError::Device`] if a launch fails.
    pub fn launch(&self, call: &SampleCall) -> Result<(), KernelError> {
        let plan = &call.plan;
        if plan.num_penalties == 0 {
            self.launch_reduce(call, RAW | SCALED)?;
            self.launch_top(call, RAW)?;
        } else {
            self.launch_reduce(call, RAW)?;
            self.launch_top(call, RAW)?;
            let arguments = call.argument();
            let launch = Launch::blocks(plan.num_rows as u32, PENALIZE_THREADS);
            // SAFETY: the kernel's argument; it changes logits inside the rows and writes one value a penalty.
            unsafe { self.penalize.launch(&self.gpu, launch, &[Argument::Struct(bytemuck::bytes_of(&arguments))]) }?;
            self.launch_reduce(call, SCALED)?;
        }
        self.launch_top(call, SCALED)?;
        let [.., num_bytes] = plan.sections();
        call.outputs.read_pinned(&call.results, num_bytes)
    }

    fn launch_reduce(&self, call: &SampleCall, stages: u32) -> Result<(), KernelError> {
        let (slices, rows) = (call.plan.num_slices() as u32, call.plan.num_rows as u32);
        let launch = Launch { grid: [slices, rows, 1], ..Launch::blocks(0, REDUCE_THREADS) };
        let arguments = call.argument();
        let arguments = [Argument::Struct(bytemuck::bytes_of(&arguments)), stages.into()];
        // SAFETY: the kernel's arguments; the buffers were reserved for the plan.
        unsafe { self.reduce.launch(&self.gpu, launch, &arguments) }
    }

    fn launch_top(&self, call: &SampleCall, stage: u32) -> Result<(), KernelError> {
        let [_, _, top, raw_top, _] = call.plan.sections();
        let (stride, offset) = if stage == RAW { (call.plan.raw_top, raw_top) } else { (call.plan.top, top) };
        if stride == 0 {
            return Ok(());
        }
        let argument = call.argument();
        let arguments = [
            Argument::Struct(bytemuck::bytes_of(&argument)),
            stage.into(),
            (stride as u32).into(),
            call.outputs.pointer().offset_bytes(offset).into(),
        ];
        let launch = Launch::blocks(call.plan.num_rows as u32, TOP_THREADS);
        // SAFETY: the kernel's arguments; the outputs have room for `stride` candidates of each row.
        unsafe { self.top.launch(&self.gpu, launch, &arguments) }
    }

    /// Waits for the kernels of `call`, made of `rows`, and returns what the rows came to.
    ///
    /// # Errors
    /// [`KernelError::Device`] if something went wrong on the GPU.
    pub fn finish(&self, call: &SampleCall, rows: &[SampleRow]) -> Result<Vec<Candidates>, KernelError> {
        let plan = &call.plan;
        let [_, _, top, raw_top, end] = plan.sections();
        let mut outputs = vec![0_u64; end / size_of::<u64>()];
        call.results.read(&mut outputs)?;
        let words: &[u32] = bytemuck::cast_slice(&outputs);
        let keys = |offset: usize, stride: usize, row: usize, wanted: usize| {
            let keys = &outputs[offset / size_of::<u64>() + row * stride..];
            keys[..wanted.min(plan.width)].iter().map(|key| candidate(*key, plan.first_token)).collect::<Vec<_>>()
        };
        let candidates = rows.iter().enumerate().map(|(index, row)| {
            let result = &words[index * RESULT_WORDS..][..RESULT_WORDS];
            let float = |word: usize| f32::from_bits(result[word]);
            let best = (plan.first_token + result[3], float(2));
            let is_drawn = row.noise_seed.is_some() && best.1 > f32::NEG_INFINITY;
            Candidates {
                top: if plan.top == 0 { vec![best] } else { keys(top, plan.top, index, row.top_k) },
                scaled_log_sum_exp: float(0),
                raw_top: if plan.raw_top == 0 { vec![] } else { keys(raw_top, plan.raw_top, index, row.raw_top_k) },
                raw_log_sum_exp: float(1),
                drawn: is_drawn.then(|| (plan.first_token + result[4], float(5), float(6))),
            }
        });
        Ok(candidates.collect())
    }
}

impl SampleCall {
    /// The structure `SampleCall` of the kernels.
    fn argument(&self) -> [u64; 8] {
        let [results, before, ..] = self.plan.sections();
        let output = |offset| self.outputs.pointer().offset_bytes(offset).0;
        [
            self.logits.pointer().0,
            self.rows.pointer().0,
            self.penalties.pointer().0,
            output(before),
            self.partials.pointer().0,
            self.counters.pointer().0,
            output(results),
            self.plan.width as u64 | u64::from(self.plan.first_token) << 32,
        ]
    }
}

/// The structures `Row` and `Penalty` of the kernels.
fn words(rows: &[SampleRow]) -> (Vec<u32>, Vec<u32>) {
    let (mut row_words, mut penalty_words) = (Vec::new(), Vec::new());
    for row in rows {
        let seed = row.noise_seed.unwrap_or(0);
        let first_penalty = penalty_words.len() / 3;
        row_words.extend([
            (1.0 / row.temperature).to_bits(),
            u32::from(row.noise_seed.is_some()),
            seed as u32,
            (seed >> 32) as u32,
            row.top_k.min(MAX_TOP) as u32,
            row.raw_top_k.min(MAX_TOP) as u32,
            first_penalty as u32,
            row.penalties.len() as u32,
        ]);
        for penalty in &row.penalties {
            penalty_words.extend([penalty.token_id, penalty.repetition.to_bits(), penalty.subtract.to_bits()]);
        }
    }
    (row_words, penalty_words)
}

/// Token id and logit of a key (`ordered.cuh`).
fn candidate(key: u64, first_token: u32) -> (u32, f32) {
    let ordered = (key >> 32) as u32;
    let bits = if ordered >> 31 == 1 { ordered & !(1 << 31) } else { !ordered };
    (first_token + !(key as u32), f32::from_bits(bits))
}
