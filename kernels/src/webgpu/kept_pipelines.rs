//! [`KeptPipelines`]: what a driver has made of shaders, on disk between two starts.
//! For: [`Gpu`](super::Gpu), on adapters that let it be kept (Vulkan).
//! Invariant: what is loaded was stored whole, by the same shaders on the same kind of adapter and driver; a driver that does
//! not know it compiles.
//! Not here: files ([`kernel_cache`](crate::kernel_cache)).

use std::sync::atomic::{AtomicBool, Ordering};

use sha2::{Digest, Sha256};
use wgpu::{AdapterInfo, Device, Features, PipelineCache, PipelineCacheDescriptor};

use super::variants;
use crate::kernel_cache::{KernelCache, Key, Kind};

/// Pipelines of a device.
#[derive(Debug)]
pub(super) struct KeptPipelines {
    pipelines: PipelineCache,
    cache: KernelCache,
    key: Key,
    /// Whether some were compiled since they were stored.
    is_changed: AtomicBool,
}

impl KeptPipelines {
    /// Those of earlier starts, if the device lets them be kept.
    pub fn load(device: &Device, info: &AdapterInfo, cache: KernelCache) -> Option<Self> {
        if !device.features().contains(Features::PIPELINE_CACHE) {
            return None;
        }
        let key = key(info);
        let data = cache.load(Kind::Pipelines, &key);
        let descriptor = PipelineCacheDescriptor { label: Some("lockstep"), data: data.as_deref(), fallback: true };
        // SAFETY: the data, if any, was returned by `get_data` of such a cache: the entry's digest is right.
        let pipelines = unsafe { device.create_pipeline_cache(&descriptor) };
        Some(Self { pipelines, cache, key, is_changed: AtomicBool::new(false) })
    }

    /// For a pipeline that is compiled, or found, now.
    pub fn for_pipeline(&self) -> &PipelineCache {
        self.is_changed.store(true, Ordering::Relaxed);
        &self.pipelines
    }

    /// Stores them, if there are others than were stored.
    pub fn store(&self) {
        if self.is_changed.swap(false, Ordering::Relaxed)
            && let Some(data) = self.pipelines.get_data()
        {
            self.cache.store(Kind::Pipelines, &self.key, &data);
        }
    }
}

/// All that decides what a driver makes of shaders, and the shaders.
fn key(info: &AdapterInfo) -> Key {
    let mut digest = Sha256::new();
    let adapter = (info.backend, info.vendor, info.device, &info.name, &info.driver, &info.driver_info);
    digest.update(format!("{adapter:?}"));
    for (source, _) in variants::all() {
        digest.update(source.name);
        digest.update(source.text);
    }
    for (_, text) in super::source::INCLUDES {
        digest.update(text);
    }
    digest.finalize().into()
}
