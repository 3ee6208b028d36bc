//! What the processor is and what it sustains, for reports and for planning.
//! For: [`CpuDevice::measure`](super::CpuDevice::measure).
//! Invariant: measuring takes at most some 50 ms and never fails: unknown facts get cautious values.

use std::time::Instant;

use lockstep_formats::GgmlType;

use super::{CpuDevice, memory::AlignedBuffer, team::Team};
use crate::{
    Device, KernelError,
    ops::{Epilogue, HostMatrix},
};

/// Memory assumed where the system does not tell.
const FALLBACK_MEMORY_BYTES: u64 = 4 << 30;
/// Bytes read to measure bandwidth: more than the caches of one core, little enough to be quick.
const PROBE_BYTES: usize = 64 << 20;

/// The processor's name as the system reports it, else its architecture.
pub(super) fn processor_name() -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

/// Memory that is free now, within the limit of the control group if there is one.
pub fn available_memory_bytes() -> u64 {
    let free = free_memory_bytes().unwrap_or(FALLBACK_MEMORY_BYTES);
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limit = |max: &str, used: &str| Some(number(max)?.saturating_sub(number(used)?));
    let group = limit("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current").or_else(|| {
        limit("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes")
    });
    group.map_or(free, |group| group.min(free))
}

/// What the machine has free, as far as the system tells.
#[cfg(any(target_os = "linux", target_family = "wasm"))]
fn free_memory_bytes() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kibibytes: u64 =
        meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.split_whitespace().next()?.parse().ok())?;
    Some(kibibytes << 10)
}

/// What the machine has free, as far as the system tells.
#[cfg(not(any(target_os = "linux", target_family = "wasm")))]
fn free_memory_bytes() -> Option<u64> {
    let mut system = sysinfo::System::new();
    system.refresh_memory_specifics(sysinfo::MemoryRefreshKind::nothing().with_ram());
    Some(system.available_memory()).filter(|bytes| *bytes > 0)
}

/// Bytes a second that the whole team reads from memory.
pub(super) fn measure_read_bandwidth(team: &Team) -> f64 {
    /// Reported when there is not even memory to measure with.
    const FALLBACK: f64 = 1e10;
    let Ok(mut buffer) = AlignedBuffer::zeroed(PROBE_BYTES) else { return FALLBACK };
    // Pages that were never written are all one page, which the caches hold.
    buffer.bytes_mut().fill(1);
    let values = buffer.values::<f32>();
    team.stay_awake(|| {
        let mut best = f64::INFINITY;
        // The first pass wakes the team, and others may disturb any of them.
        for _ in 0..3 {
            let start = Instant::now();
            team.for_chunks(values.len(), 1 << 16, &|range| {
                std::hint::black_box(sum_bits(&values[range]));
            });
            best = best.min(start.elapsed().as_secs_f64().max(1e-9));
        }
        PROBE_BYTES as f64 / best
    })
}

/// Operations a second of the whole team in a quantized matmul of a prompt batch.
pub(super) fn measure_matmul_rate(device: &mut CpuDevice) -> Result<f64, KernelError> {
    const TYPE: GgmlType = GgmlType::Q4_0;
    const ROWS: usize = 512;
    const COLUMNS: usize = 1024;
    const TOKENS: usize = 64;
    const OPERATIONS: usize = 2 * ROWS * COLUMNS * TOKENS;
    let bytes = vec![0; TYPE.bytes_of(COLUMNS).unwrap_or(0) * ROWS];
    let linear = device.linear(vec![HostMatrix { ggml_type: TYPE, rows: ROWS, columns: COLUMNS, bytes }])?;
    let input = device.tensor(TOKENS, COLUMNS)?;
    let mut output = device.tensor(TOKENS, ROWS)?;
    device.step(|device| {
        let mut best = f64::INFINITY;
        for _ in 0..3 {
            let start = Instant::now();
            device.matmul(TOKENS, &linear, &input, Epilogue::Store, &mut output)?;
            best = best.min(start.elapsed().as_secs_f64().max(1e-9));
        }
        Ok(OPERATIONS as f64 / best)
    })
}

/// Reads every value, in a form that the compiler turns into wide loads.
fn sum_bits(values: &[f32]) -> u32 {
    values.iter().fold(0, |sum, value| sum ^ value.to_bits())
}
