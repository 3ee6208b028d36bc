//! The CPU device: SIMD chosen at run time, a thread team that stays awake during a step.
//! For: machines without a GPU, and CI.
//! Invariant: this file only delegates: each operation is a file of its own over plain slices and the [`team`].
//! Not here: what the operations mean (`ops`), what the blocks mean (`quant`).

pub mod attention;
pub mod gather_rows;
mod info;
pub mod kv_cache;
mod kv_format;
pub mod math;
pub mod matmul;
pub mod memory;
pub mod rms_norm;
pub mod rope_and_store;
pub mod sample;
pub mod simd;
pub mod team;

use std::sync::Arc;

use lockstep_formats::Dtype;

pub use info::available_memory_bytes;
pub use kv_cache::CpuKvCache;
pub use matmul::CpuLinear;
pub use memory::{CpuTensor, return_freed_memory};
pub use simd::Level;
pub use team::{SharedSlice, Team};

use self::matmul::MatmulContext;
use crate::{
    Device, KernelError,
    device::{Abilities, DeviceInfo, KvCacheSpec},
    group::{Collective, NoCommunicator, Sum},
    ops::{Attention, Candidates, Epilogue, HostMatrix, RopeAndStore, RopeTable, SampleRow},
};

/// The CPU: a team of threads and the widest instructions that the processor has.
pub struct CpuDevice {
    name: String,
    level: Level,
    team: Arc<Team>,
    matmul: MatmulContext,
}

impl CpuDevice {
    /// Opens the CPU with so many threads (0: one for each core).
    ///
    /// # Errors
    /// [`KernelError::Device`] if the threads cannot be started.
    pub fn new(num_threads: usize) -> Result<Self, KernelError> {
        Self::with_level(num_threads, Level::detect())
    }

    /// Opens the CPU at a given level of instructions, for tests and comparisons.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the threads cannot be started.
    pub fn with_level(num_threads: usize, level: Level) -> Result<Self, KernelError> {
        let team = Arc::new(Team::new(num_threads)?);
        let name = format!("cpu {} ({} threads, {})", info::processor_name(), team.num_threads(), level.name());
        Ok(Self { name, level, team, matmul: MatmulContext::new(level)? })
    }

    /// Asks the system what the processor is, and measures what it sustains.
    ///
    /// # Errors
    /// [`KernelError::Device`] if memory is short.
    pub fn measure(&mut self) -> Result<DeviceInfo, KernelError> {
        let memory_bytes = info::available_memory_bytes();
        Ok(DeviceInfo {
            name: self.name.clone(),
            memory_bytes,
            host_memory_bytes: Some(memory_bytes),
            memory_bytes_per_second: info::measure_read_bandwidth(&self.team),
            operations_per_second: info::measure_matmul_rate(self)?,
            peer_link: None,
            abilities: Abilities::default(),
        })
    }
}

impl Device for CpuDevice {
    type Tensor = CpuTensor;
    type Linear = CpuLinear;
    type KvCache = CpuKvCache;
    type Communicator = NoCommunicator;

    fn name(&self) -> &str {
        &self.name
    }

    fn tensor(&self, max_tokens: usize, width: usize) -> Result<CpuTensor, KernelError> {
        CpuTensor::zeroed(max_tokens, width)
    }

    fn vector(&self, values: &[f32]) -> Result<CpuTensor, KernelError> {
        let mut tensor = CpuTensor::zeroed(1, values.len())?;
        tensor.values_mut().copy_from_slice(values);
        Ok(tensor)
    }

    fn linear(&self, matrices: Vec<HostMatrix>) -> Result<CpuLinear, KernelError> {
        CpuLinear::new(&self.team, matrices)
    }

    fn kv_cache(&self, spec: KvCacheSpec, dtype: Dtype) -> Result<CpuKvCache, KernelError> {
        CpuKvCache::new(spec, dtype)
    }

    fn collective(
        &mut self,
        _: usize,
        _: &mut CpuTensor,
        _: Collective,
        communicator: &NoCommunicator,
    ) -> Result<(), KernelError> {
        match *communicator {}
    }

    fn step<T, E: From<KernelError>>(&mut self, body: impl FnOnce(&mut Self) -> Result<T, E>) -> Result<T, E> {
        let team = Arc::clone(&self.team);
        team.stay_awake(|| body(self))
    }

    fn embed(
        &mut self,
        table: &CpuLinear,
        first_row: u32,
        token_ids: &[u32],
        output: &mut CpuTensor,
    ) -> Result<(), KernelError> {
        self.matmul.embed(&self.team, table, first_row, token_ids, output)
    }

    fn rms_norm(
        &mut self,
        num_tokens: usize,
        input: &CpuTensor,
        weight: &CpuTensor,
        epsilon: f32,
        output: &mut CpuTensor,
    ) -> Result<(), KernelError> {
        let operation = "rms_norm";
        for (what, got) in [("width of the weight", weight.width()), ("output width", output.width())] {
            if got != input.width() {
                return Err(KernelError::Shape { operation, what, got, expected: input.width() });
            }
        }
        let (input, weight) = (input.rows(operation, num_tokens)?, weight.rows(operation, 1)?);
        rms_norm::rms_norm(&self.team, self.level, input, weight, epsilon, output.rows_mut(operation, num_tokens)?);
        Ok(())
    }

    fn matmul(
        &mut self,
        num_tokens: usize,
        weight: &CpuLinear,
        input: &CpuTensor,
        epilogue: Epilogue,
        output: &mut CpuTensor,
    ) -> Result<(), KernelError> {
        self.matmul.matmul(&self.team, num_tokens, weight, input, epilogue, output)
    }

    fn matmul_add<E: From<KernelError>>(
        &mut self,
        num_tokens: usize,
        weight: &CpuLinear,
        input: &CpuTensor,
        hidden: &mut CpuTensor,
        sum: Sum<'_, NoCommunicator, E>,
    ) -> Result<(), E> {
        self.matmul.matmul_add(&self.team, num_tokens, weight, input, hidden, sum)
    }

    fn rope_and_store(
        &mut self,
        call: &RopeAndStore<'_>,
        table: &RopeTable,
        qkv: &mut CpuTensor,
        cache: &mut CpuKvCache,
    ) -> Result<(), KernelError> {
        let rows = qkv.rows_mut("rope_and_store", call.num_tokens())?;
        rope_and_store::rope_and_store(&self.team, self.level, call, table, rows, cache)
    }

    fn attention(
        &mut self,
        call: &Attention<'_>,
        qkv: &CpuTensor,
        cache: &CpuKvCache,
        output: &mut CpuTensor,
    ) -> Result<(), KernelError> {
        let qkv = qkv.rows("attention", call.num_tokens())?;
        let output = output.rows_mut("attention", call.num_tokens())?;
        attention::attention(&self.team, self.level, call, qkv, cache, output)
    }

    fn gather_rows(&mut self, rows: &[u32], input: &CpuTensor, output: &mut CpuTensor) -> Result<(), KernelError> {
        let (width, expected) = (output.width(), input.width());
        if width != expected {
            return Err(KernelError::Shape { operation: "gather_rows", what: "output width", got: width, expected });
        }
        gather_rows::gather_rows(rows, width, input.values(), output.rows_mut("gather_rows", rows.len())?)
    }

    fn sample(
        &mut self,
        rows: &[SampleRow],
        first_token: u32,
        logits: &mut CpuTensor,
    ) -> Result<Vec<Candidates>, KernelError> {
        let logits = logits.rows_mut("sample", rows.len())?;
        sample::sample(&self.team, self.level, rows, first_token, logits)
    }

    fn with_host<T, E: From<KernelError>>(
        &mut self,
        num_tokens: usize,
        tensor: &mut CpuTensor,
        body: impl FnOnce(&mut [f32]) -> Result<T, E>,
    ) -> Result<T, E> {
        body(tensor.rows_mut("with_host", num_tokens)?)
    }
}
