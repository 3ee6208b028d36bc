//! The GPUs that Vulkan, Metal and DX12 show.
//! For: choosing devices and opening one.
//! Invariant: numbers count the adapters of one backend in the order in which the system shows them, software ones
//! included; whether an adapter computes on the processor is always said.

use std::sync::Mutex;

use wgpu::{Adapter, Backends, DeviceType, Features, Instance, InstanceDescriptor, InstanceFlags};

use crate::{
    KernelError,
    adapter_id::{AdapterId, Backend},
    device::Abilities,
};

fn backends(backend: Backend) -> Backends {
    match backend {
        Backend::Vulkan => Backends::VULKAN,
        Backend::Metal => Backends::METAL,
        Backend::Dx12 => Backends::DX12,
    }
}

/// What an adapter is, for lists.
#[derive(Clone, Debug)]
pub struct FoundAdapter {
    /// Its name in settings.
    pub id: AdapterId,
    /// What it calls itself.
    pub name: String,
    /// Its driver and the driver's version.
    pub driver: String,
    /// Whether it computes on the processor.
    pub is_software: bool,
    /// Memory that it may use, as far as the system tells.
    pub memory_bytes: u64,
    /// What it can do.
    pub abilities: Abilities,
}

/// Drivers are not made to be asked by several threads at the same time.
static ENUMERATION: Mutex<()> = Mutex::new(());

/// Every adapter of a backend; none if the machine lacks it.
pub(super) fn adapters(backend: Backend) -> Vec<Adapter> {
    let _guard = ENUMERATION.lock();
    let instance = Instance::new(InstanceDescriptor {
        backends: backends(backend),
        flags: InstanceFlags::empty(),
        ..InstanceDescriptor::new_without_display_handle()
    });
    pollster::block_on(instance.enumerate_adapters(backends(backend)))
}

/// The adapter of that name.
///
/// # Errors
/// [`KernelError::Device`] if there is none.
pub(super) fn find(id: AdapterId) -> Result<Adapter, KernelError> {
    let mut adapters = adapters(id.backend);
    if id.ordinal < adapters.len() {
        return Ok(adapters.swap_remove(id.ordinal));
    }
    let hint = match id.backend {
        Backend::Metal if !cfg!(target_vendor = "apple") => ", as Apple's systems alone have it",
        Backend::Dx12 if !cfg!(windows) => ", as Windows alone has it",
        Backend::Vulkan if adapters.is_empty() => ": it takes the loader (libvulkan.so.1) and a driver",
        _ => "",
    };
    let what = format!("{} shows {} adapters{hint}", id.backend.name(), adapters.len());
    Err(KernelError::Device { device: id.to_string(), what })
}

/// Whether it computes on the processor.
pub(super) fn is_software(adapter: &Adapter) -> bool {
    adapter.get_info().device_type == DeviceType::Cpu
}

/// Features of use here, by the names that reports give them.
const FEATURES: [(Features, &str); 5] = [
    (Features::SUBGROUP, "subgroups"),
    (Features::SHADER_F16, "f16"),
    (Features::IMMEDIATES, "immediates"),
    (Features::TIMESTAMP_QUERY, "timestamps"),
    (Features::EXPERIMENTAL_COOPERATIVE_MATRIX, "cooperative matrices"),
];

/// The adapters of all backends.
pub fn list() -> Vec<FoundAdapter> {
    let of_backend = |backend| {
        let found = adapters(backend).into_iter().enumerate();
        found.map(move |(ordinal, adapter)| describe(AdapterId { backend, ordinal }, &adapter))
    };
    Backend::ALL.into_iter().flat_map(of_backend).collect()
}

fn describe(id: AdapterId, adapter: &Adapter) -> FoundAdapter {
    let info = adapter.get_info();
    FoundAdapter {
        id,
        name: info.name,
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
        is_software: is_software(adapter),
        memory_bytes: super::info::memory_bytes(adapter),
        abilities: abilities(adapter),
    }
}

/// What an adapter can do.
pub(super) fn abilities(adapter: &Adapter) -> Abilities {
    let (info, limits, features) = (adapter.get_info(), adapter.limits(), adapter.features());
    let there = FEATURES.iter().filter(|(feature, _)| features.contains(*feature));
    let limits = [
        ("bytes of a binding", limits.max_storage_buffer_binding_size),
        ("bytes of a buffer", limits.max_buffer_size),
        ("bytes of workgroup memory", u64::from(limits.max_compute_workgroup_storage_size)),
        ("threads of a workgroup", u64::from(limits.max_compute_invocations_per_workgroup)),
        ("least threads of a subgroup", u64::from(info.subgroup_min_size)),
        ("most threads of a subgroup", u64::from(info.subgroup_max_size)),
    ];
    Abilities {
        features: there.map(|(_, name)| (*name).to_owned()).collect(),
        limits: limits.map(|(name, value)| (name.to_owned(), value)).into(),
    }
}
