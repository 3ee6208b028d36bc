//! The CPU device.

use lockstep_formats::GgmlType;

use crate::{
    Device, KernelError,
    device::{DeviceInfo, KvCacheSpec},
    ops::{Attention, Candidates, Epilogue, HostMatrix, RopeAndStore, RopeTable, SampleRow},
};

/// The CPU: a team of threads and the widest instructions that the processor has.
pub struct CpuDevice {
    info: DeviceInfo,
}

impl CpuDevice {
    /// Opens the CPU with so many threads (0: one for each core).
    ///
    /// # Errors
    /// [`KernelError::Device`] if the threads cannot be started.
    pub fn new(_num_threads: usize) -> Result<Self, KernelError> {
        todo!()
    }
}

/// Activations.
pub struct CpuTensor;
/// A linear layer.
pub struct CpuLinear {
    /// Types of the stacked matrices.
    pub types: Vec<GgmlType>,
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
        todo!()
    }
    fn vector(&self, values: &[f32]) -> Result<CpuTensor, KernelError> {
        todo!()
    }
    fn linear(&self, matrices: Vec<HostMatrix>) -> Result<CpuLinear, KernelError> {
        todo!()
    }
    fn kv_cache(&self, spec: KvCacheSpec) -> Result<CpuKvCache, KernelError> {
        todo!()
    }
    fn step<T, E: From<KernelError>>(&mut self, body: impl FnOnce(&mut Self) -> Result<T, E>) -> Result<T, E> {
        body(self)
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
