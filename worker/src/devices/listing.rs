//! Every device of this machine that a worker could own, for `lockstep devices`.
//! Invariant: what cannot be used is listed with its reason; nothing is measured and nothing stays open.

pub use lockstep_kernels::device::Abilities;
use lockstep_kernels::{
    Device, KernelError,
    cpu::{CpuDevice, available_memory_bytes},
};
use serde::Serialize;

/// A device.
#[derive(Clone, Debug, Serialize)]
pub struct ListedDevice {
    /// What `--device` calls it.
    pub device: String,
    /// What it calls itself.
    pub name: String,
    /// How it is reached.
    pub backend: String,
    /// Memory that it may use.
    pub memory_bytes: u64,
    /// What it can do.
    #[serde(flatten)]
    pub abilities: Abilities,
    /// Why it cannot be used, or is not used unless it is named.
    pub remark: Option<String>,
}

/// The processor, the GPUs that CUDA shows, and those that Vulkan, Metal and DX12 show.
///
/// # Errors
/// [`KernelError::Device`] if the processor's threads cannot be started.
pub fn list() -> Result<Vec<ListedDevice>, KernelError> {
    let devices = std::iter::once(processor()?);
    #[cfg(feature = "cuda")]
    let devices = devices.chain(cuda_devices());
    #[cfg(feature = "webgpu")]
    let devices = devices.chain(super::webgpu::list().into_iter().map(adapter));
    Ok(devices.collect())
}

fn processor() -> Result<ListedDevice, KernelError> {
    Ok(ListedDevice {
        device: "cpu".to_owned(),
        name: CpuDevice::new(0)?.name().to_owned(),
        backend: "cpu".to_owned(),
        memory_bytes: available_memory_bytes(),
        abilities: Abilities::default(),
        remark: None,
    })
}

#[cfg(feature = "cuda")]
fn cuda_devices() -> Vec<ListedDevice> {
    use lockstep_kernels::cuda::{Gpu, KernelCache, probe::num_devices};
    let device = |ordinal: usize| {
        let listed = ListedDevice {
            device: format!("cuda:{ordinal}"),
            name: String::new(),
            backend: "cuda".to_owned(),
            memory_bytes: 0,
            abilities: Abilities::default(),
            remark: None,
        };
        let opened = Gpu::open(ordinal, KernelCache::default()).and_then(|gpu| Ok((gpu.memory()?.0, gpu)));
        match opened {
            Ok((free_bytes, gpu)) => ListedDevice {
                name: gpu.limits().name.clone(),
                memory_bytes: free_bytes as u64,
                abilities: gpu.abilities(),
                ..listed
            },
            Err(problem) => ListedDevice { remark: Some(problem.to_string()), ..listed },
        }
    };
    // Without CUDA there are none.
    (0..num_devices().unwrap_or(0)).map(device).collect()
}

#[cfg(feature = "webgpu")]
fn adapter(found: super::webgpu::FoundAdapter) -> ListedDevice {
    ListedDevice {
        device: found.id.to_string(),
        name: format!("{} ({})", found.name, found.driver),
        backend: found.id.backend.name().to_owned(),
        memory_bytes: found.memory_bytes,
        abilities: found.abilities,
        remark: found.is_software.then(|| "computes on the processor: used only if it is named".to_owned()),
    }
}
