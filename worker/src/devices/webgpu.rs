//! The GPUs that Metal, Vulkan and DX12 show: which of them are chosen, and what they are.
//! For: choosing devices, and `lockstep devices`.
//! Invariant: an adapter that computes on the processor is used only if somebody named it.

use lockstep_kernels::webgpu::{AdapterId, Backend, adapter};

pub use lockstep_kernels::webgpu::FoundAdapter;

use crate::WorkerError;

/// Every adapter of this machine.
pub fn list() -> Vec<FoundAdapter> {
    adapter::list()
}

/// Refuses adapters that are not there.
pub(super) fn expect(adapters: &[AdapterId]) -> Result<(), WorkerError> {
    let found = list();
    match adapters.iter().find(|id| !found.iter().any(|adapter| adapter.id == **id)) {
        Some(missing) => {
            let names: Vec<String> = found.iter().map(|adapter| adapter.id.to_string()).collect();
            let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            let problem = format!("{missing} is asked for, this machine shows {names}");
            Err(WorkerError::Config { field: "device", problem })
        }
        None => Ok(()),
    }
}

/// The GPUs for at least so many ranks, or none, and why.
pub(super) fn choose(num_ranks: usize) -> (Option<Vec<AdapterId>>, String) {
    choose_of(&list(), num_ranks)
}

/// Of one backend: several show the same GPUs.
fn choose_of(found: &[FoundAdapter], num_ranks: usize) -> (Option<Vec<AdapterId>>, String) {
    let gpus_of = |backend: Backend| -> Vec<AdapterId> {
        let own = found.iter().filter(|adapter| adapter.id.backend == backend && !adapter.is_software);
        own.map(|adapter| adapter.id).collect()
    };
    let order = [Backend::Metal, Backend::Vulkan, Backend::Dx12];
    let best = order.into_iter().map(|backend| (backend, gpus_of(backend))).find(|(_, gpus)| !gpus.is_empty());
    let software: Vec<String> =
        found.iter().filter(|adapter| adapter.is_software).map(|adapter| adapter.id.to_string()).collect();
    match best {
        Some((backend, gpus)) if gpus.len() >= num_ranks => (Some(gpus), format!("{} works here", backend.name())),
        Some((backend, gpus)) => {
            (None, format!("{num_ranks} GPUs are needed, {} shows {}", backend.name(), gpus.len()))
        }
        None if !software.is_empty() => {
            (None, format!("no GPU is found, only software, which must be named ({})", software.join(", ")))
        }
        None => (None, "no GPU is found through Metal, Vulkan or DX12".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter(name: &str, is_software: bool) -> FoundAdapter {
        FoundAdapter {
            id: name.parse().unwrap(),
            name: name.to_owned(),
            driver: String::new(),
            is_software,
            memory_bytes: 0,
            abilities: Default::default(),
        }
    }

    #[test]
    fn software_is_never_chosen_in_silence() {
        let software = [adapter("vulkan:0", true)];
        let (chosen, reason) = choose_of(&software, 1);
        assert!(chosen.is_none() && reason.contains("must be named (vulkan:0)"), "{reason}");
        assert!(choose_of(&[], 1).0.is_none());
        let both = [adapter("vulkan:0", true), adapter("vulkan:1", false), adapter("dx12:0", false)];
        assert_eq!(choose_of(&both, 1).0, Some(vec!["vulkan:1".parse().unwrap()]));
        assert!(choose_of(&both, 2).0.is_none());
        let apple = [adapter("vulkan:0", false), adapter("metal:0", false)];
        assert_eq!(choose_of(&apple, 1).0, Some(vec!["metal:0".parse().unwrap()]));
    }
}
