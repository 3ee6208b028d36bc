//! The adapter of tests: the first one of Vulkan, in CI a software one. A test that finds none fails.

#[allow(dead_code, reason = "not every test needs tensor cores")]
pub mod matrices;

use lockstep_formats::Dtype;
use lockstep_kernels::{
    Device, KernelError,
    ops::{RopeStyle, RopeTable},
    webgpu::{AdapterId, Backend, WebGpuDevice, WebGpuTensor, adapter, gpu::GpuOptions},
};

use rand::{Rng, SeedableRng, rngs::StdRng};

/// Set where an adapter with subgroups of so many threads is to be found.
const SUBGROUP_THREADS: &str = "LOCKSTEP_TEST_SUBGROUP_THREADS";

/// The adapter with what the options allow.
pub fn open_with(options: GpuOptions) -> WebGpuDevice {
    if let Ok(threads) = std::env::var(SUBGROUP_THREADS) {
        let found = adapter::list().swap_remove(0);
        let expected = ("most threads of a subgroup".to_owned(), threads.parse().unwrap());
        assert!(found.abilities.limits.contains(&expected), "{found:?}");
    }
    WebGpuDevice::with_options(AdapterId { backend: Backend::Vulkan, ordinal: 0 }, options).unwrap()
}

/// Whether the adapter is the slow one with subgroups of four threads.
#[allow(dead_code, reason = "not every test takes long")]
pub fn is_slow() -> bool {
    std::env::var_os(SUBGROUP_THREADS).is_some()
}

/// Runs tests of this file once more, on the software adapter of Chromium: its subgroups have four threads.
#[allow(dead_code, reason = "not every test needs it")]
pub fn run_with_subgroups_of_four(tests: &[&str]) {
    let driver = std::env::var("LOCKSTEP_TEST_SWIFTSHADER");
    let driver = driver.unwrap_or_else(|_| "/usr/lib/chromium/vk_swiftshader_icd.json".to_owned());
    assert!(std::path::Path::new(&driver).exists(), "no {driver}: it comes with Chromium");
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(tests).arg("--exact").env("VK_ICD_FILENAMES", driver).env(SUBGROUP_THREADS, "4");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains(&format!(" {} passed", tests.len())));
}

/// The adapter with all that it has, and as a browser gives it: without subgroups, immediates and coherent memory.
#[allow(dead_code, reason = "not every test needs both")]
pub fn open_both() -> [WebGpuDevice; 2] {
    [true, false].map(|has| {
        open_with(GpuOptions {
            use_subgroups: has,
            use_immediates: has,
            use_coherent_memory: has,
            ..GpuOptions::default()
        })
    })
}

/// A tensor of these rows.
#[allow(dead_code, reason = "not every test needs tensors")]
pub fn tensor(device: &mut WebGpuDevice, width: usize, values: &[f32]) -> WebGpuTensor {
    let mut tensor = device.tensor(values.len() / width, width).unwrap();
    let fill = |rows: &mut [f32]| {
        rows.copy_from_slice(values);
        Ok::<_, KernelError>(())
    };
    device.with_host(values.len() / width, &mut tensor, fill).unwrap();
    tensor
}

/// Its first rows.
#[allow(dead_code, reason = "not every test needs tensors")]
pub fn rows(device: &mut WebGpuDevice, num_tokens: usize, tensor: &mut WebGpuTensor) -> Vec<f32> {
    device.with_host(num_tokens, tensor, |rows| Ok::<_, KernelError>(rows.to_vec())).unwrap()
}

/// Random numbers of a seed that is printed.
#[allow(dead_code, reason = "not every test draws its inputs so")]
pub fn random() -> StdRng {
    let seed = rand::rng().random();
    println!("seed {seed}");
    StdRng::seed_from_u64(seed)
}

/// Numbers within `size` of zero.
#[allow(dead_code, reason = "not every test draws its inputs so")]
pub fn values(random: &mut StdRng, len: usize, size: f32) -> Vec<f32> {
    (0..len).map(|_| random.random_range(-size..size)).collect()
}

/// Frequencies as models have them.
#[allow(dead_code, reason = "not every test draws its inputs so")]
pub fn table(style: RopeStyle, rotary_dim: usize, magnitude: f32) -> RopeTable {
    let frequency = |pair: usize| 10_000_f32.powf(-2.0 * pair as f32 / rotary_dim as f32);
    RopeTable { style, rotary_dim, frequencies: (0..rotary_dim / 2).map(frequency).collect(), magnitude }
}

/// A value as a cache of that type holds it.
#[allow(dead_code, reason = "not every test draws its inputs so")]
pub fn stored(dtype: Dtype, value: f32) -> f32 {
    match dtype {
        Dtype::F16 => half::f16::from_f32(value).to_f32(),
        Dtype::Bf16 => half::bf16::from_f32(value).to_f32(),
        Dtype::F32 => value,
    }
}
