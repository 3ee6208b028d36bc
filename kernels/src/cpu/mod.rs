//! The CPU device: SIMD chosen at run time, a thread team that stays awake during a step.
//! For: machines without a GPU, and CI.
//! Invariant: this file only delegates: each operation is a file of its own over plain slices and the [`team`].
//! Not here: what the operations mean (`ops`), what the blocks mean (`quant`).

mod info;
pub mod matmul;
pub mod memory;
pub mod team;

use std::sync::Arc;

pub use matmul::CpuLinear;
pub use memory::CpuTensor;
pub use team::{SharedSlice, Team};

use crate::{
    Device, KernelError,
    device::{DeviceInfo, KvCacheSpec},
    ops::{Attention, Candidates, Epilogue, HostMatrix, RopeAndStore, RopeTable, SampleRow},
};

/// The CPU: a team of threads and the widest instructions that the processor has.
pub struct CpuDevice {
    info: DeviceInfo,
    team: Arc<Team>,
}

impl CpuDevice {
    /// Opens the CPU with so many threads (0: one for each core).
    ///
    /// # Errors
    /// [`KernelError::Device`] if the threads cannot be started.
    pub fn new(num_threads: usize) -> Result<Self, KernelError> {
        let team = Arc::new(Team::new(num_threads)?);
        let info = DeviceInfo {
            name: format!("cpu {} ({} threads)", info::processor_name(), team.num_threads()),
            memory_bytes: info::available_memory_bytes(),
            memory_bytes_per_second: info::measure_read_bandwidth(&team),
            operations_per_second: 1e11 * team.num_threads() as f64,
        };
        Ok(Self { info, team })
    }
}

/// A paged KV cache.
pub struct CpuKvCache;

#[allow(unused_variables, reason = "skeleton")]
impl Device for CpuDevice {
    type Tensor = CpuTensor;
    type Linear = CpuLinear;
    type KvCache = CpuKvCache;

    fn info(&self) -> &DeviceInfo {
        &self.info
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
        todo!()
    }

    fn kv_cache(&self, spec: KvCacheSpec) -> Result<CpuKvCache, KernelError> {
        todo!()
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
        todo!()
    }

    fn rms_norm(
        &mut self,
        num_tokens: usize,
        input: &CpuTensor,
        weight: &CpuTensor,
        epsilon: f32,
        output: &mut CpuTensor,
    ) -> Result<(), KernelError> {
        todo!()
    }

    fn matmul(
        &mut self,
        num_tokens: usize,
        weight: &CpuLinear,
        input: &CpuTensor,
        epilogue: Epilogue,
        output: &mut CpuTensor,
    ) -> Result<(), KernelError> {
        todo!()
    }

    fn rope_and_store(
        &mut self,
        call: &RopeAndStore<'_>,
        table: &RopeTable,
        qkv: &mut CpuTensor,
        cache: &mut CpuKvCache,
    ) -> Result<(), KernelError> {
        todo!()
    }

    fn attention(
        &mut self,
        call: &Attention<'_>,
        qkv: &CpuTensor,
        cache: &CpuKvCache,
        output: &mut CpuTensor,
    ) -> Result<(), KernelError> {
        todo!()
    }

    fn gather_rows(&mut self, rows: &[u32], input: &CpuTensor, output: &mut CpuTensor) -> Result<(), KernelError> {
        todo!()
    }

    fn sample(
        &mut self,
        rows: &[SampleRow],
        first_token: u32,
        logits: &mut CpuTensor,
    ) -> Result<Vec<Candidates>, KernelError> {
        todo!()
    }

    fn with_host<T, E: From<KernelError>>(
        &mut self,
        num_tokens: usize,
        tensor: &mut CpuTensor,
        body: impl FnOnce(&mut [f32]) -> Result<T, E>,
    ) -> Result<T, E> {
        todo!()
    }
}
