//! What a GPU is and what it sustains, for reports and for planning.
//! For: whoever chooses devices and plans with them.
//! Invariant: measuring takes some milliseconds, and what it needs is freed again.

use std::sync::Arc;

use cudarc::driver::result;
use lockstep_formats::GgmlType;

use super::{
    Activations, DeviceBuffer, Forms, Gpu,
    matmul::{CudaLinear, Matmul, MatmulCall, Target},
    probe,
};
use crate::{
    KernelError,
    device::{Abilities, DeviceInfo},
    ops::HostMatrix,
};

/// Memory that is left to the driver, to libraries and to scratch.
const RESERVED_BYTES: u64 = 1 << 30;
/// Bytes that are copied to measure bandwidth, read and written.
const PROBE_BYTES: usize = 256 << 20;

/// Least memory that must be free for a GPU to be of use: what is left alone, and something to measure with.
const LEAST_BYTES: u64 = RESERVED_BYTES + PROBE_BYTES as u64;

impl Gpu {
    /// Kind and model, such as `cuda:0 NVIDIA H200 (sm_90, 132 multiprocessors)`.
    pub fn device_name(&self) -> String {
        let limits = self.limits();
        let (major, minor) = limits.compute_capability;
        let (ordinal, name) = (self.ordinal(), &limits.name);
        format!("cuda:{ordinal} {name} (sm_{major}{minor}, {} multiprocessors)", limits.num_multiprocessors)
    }

    /// Its architecture, and the limits that kernels meet.
    pub fn abilities(&self) -> Abilities {
        let limits = self.limits();
        let (major, minor) = limits.compute_capability;
        Abilities {
            features: vec![format!("sm_{major}{minor}")],
            limits: vec![
                ("multiprocessors".to_owned(), u64::from(limits.num_multiprocessors)),
                ("bytes of shared memory of a block".to_owned(), u64::from(limits.max_shared_bytes)),
            ],
        }
    }

    /// Refuses a GPU whose memory is taken by others.
    ///
    /// # Errors
    /// [`KernelError::Device`] with the numbers.
    pub fn expect_memory(&self) -> Result<(), KernelError> {
        let (free, total) = self.memory()?;
        missing_memory(free as u64, total as u64).map_or(Ok(()), |what| Err(self.error(what)))
    }

    /// Asks the driver what the GPU is, and measures what it sustains.
    ///
    /// # Errors
    /// [`KernelError::Device`] if its memory is taken by others, or it fails.
    pub fn measure(self: &Arc<Self>) -> Result<DeviceInfo, KernelError> {
        self.expect_memory()?;
        let (free, _) = self.memory()?;
        Ok(DeviceInfo {
            name: self.device_name(),
            memory_bytes: (free as u64).saturating_sub(RESERVED_BYTES),
            host_memory_bytes: None,
            memory_bytes_per_second: measure_bandwidth(self)?,
            operations_per_second: measure_matmul_rate(self)?,
            peer_link: probe::peer_link(self.ordinal())?,
            abilities: self.abilities(),
        })
    }
}

/// What to say of a GPU with so much free memory if that is too little.
fn missing_memory(free: u64, total: u64) -> Option<String> {
    let [free_mib, total_mib, least_mib] = [free, total, LEAST_BYTES].map(|bytes| bytes >> 20);
    let is_missing = free < LEAST_BYTES;
    is_missing.then(|| format!("{free_mib} MiB of {total_mib} MiB are free, at least {least_mib} MiB are needed"))
}

/// Bytes a second of a copy on the GPU, read and written.
fn measure_bandwidth(gpu: &Arc<Gpu>) -> Result<f64, KernelError> {
    let [from, to] = [DeviceBuffer::zeroed(gpu, PROBE_BYTES / 2)?, DeviceBuffer::zeroed(gpu, PROBE_BYTES / 2)?];
    let copy = || {
        let (stream, len) = (gpu.stream().cu_stream(), PROBE_BYTES / 2);
        // SAFETY: both buffers have so many bytes.
        unsafe { result::memcpy_dtod_async(to.pointer().0, from.pointer().0, len, stream) }
            .map_err(gpu.failed("cuMemcpyDtoDAsync"))
    };
    Ok(PROBE_BYTES as f64 / best_seconds(gpu, copy)?)
}

/// Operations a second of a quantized matmul of a prompt batch.
fn measure_matmul_rate(gpu: &Arc<Gpu>) -> Result<f64, KernelError> {
    const TYPE: GgmlType = GgmlType::Q4_0;
    const SIZE: usize = 4096;
    const TOKENS: usize = 512;
    let bytes = vec![0; TYPE.bytes_of(SIZE).unwrap_or(0) * SIZE];
    let linear = CudaLinear::new(gpu, vec![HostMatrix { ggml_type: TYPE, rows: SIZE, columns: SIZE, bytes }])?;
    let input = Activations::zeroed(gpu, TOKENS, SIZE, linear.input_forms(TOKENS))?;
    let output = Activations::zeroed(gpu, TOKENS, SIZE, Forms { values: true, ..Forms::default() })?;
    let matmul = Matmul::new(gpu)?;
    let call = MatmulCall { num_tokens: TOKENS, weight: Arc::new(linear), input, target: Target::Store, output };
    let seconds = best_seconds(gpu, || matmul.launch(&call))?;
    Ok((2 * SIZE * SIZE * TOKENS) as f64 / seconds)
}

/// The best of a few runs, after one that does not count.
fn best_seconds(gpu: &Gpu, run: impl Fn() -> Result<(), KernelError>) -> Result<f64, KernelError> {
    run()?;
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        best = best.min(f64::from(gpu.elapsed_ms(&run)?) / 1e3);
    }
    Ok(best.max(1e-9))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_memory_is_said_with_the_numbers() {
        assert_eq!(missing_memory(LEAST_BYTES, 4 << 30), None);
        let message = missing_memory(300 << 20, 80 << 30).unwrap();
        assert_eq!(message, "300 MiB of 81920 MiB are free, at least 1280 MiB are needed");
    }
}
