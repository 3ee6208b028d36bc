//! The paged KV cache in the memory of a GPU: `[block, head, offset, head_dim]`, a buffer each for the keys and the values
//! of a layer, or four where one would be larger than a binding may be.
//! For: `rope_and_store`, which writes it, and `attention`, which reads it. Device code: `wgsl/include/kv_cache.wgsl`.
//! Invariant: a head's elements are rounded up to whole groups of four.
//! Not here: which block belongs to whom (no kernel knows).

use std::sync::Arc;

use lockstep_formats::Dtype;
use wgpu::Buffer;

use super::{
    commands::{Binding, Commands},
    gpu::Gpu,
    matmul::dtype_option,
};
use crate::{KernelError, device::KvCacheSpec};

/// Keys and values of all layers.
pub struct WebGpuKvCache {
    spec: KvCacheSpec,
    dtype: Dtype,
    /// Blocks of a part.
    part_blocks: usize,
    /// Keys and values of each part.
    layers: Vec<Vec<[Arc<Buffer>; 2]>>,
}

/// Parts of a layer that is too large for one.
const PARTS: usize = 4;
/// Buffers that attention over such a layer binds.
const PARTED_BUFFERS: u32 = 15;

impl WebGpuKvCache {
    /// A zeroed cache.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for a size of 0, [`KernelError::Device`] if memory is short or a layer larger than a
    /// binding.
    pub(super) fn new(gpu: &Gpu, spec: KvCacheSpec, dtype: Dtype) -> Result<Self, KernelError> {
        let sizes = [
            ("block_size", spec.block_size),
            ("num_key_value_heads", spec.num_key_value_heads),
            ("head_dim", spec.head_dim),
        ];
        if let Some((what, got)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(KernelError::Shape { operation: "kv_cache", what, got, expected: 1 });
        }
        let head_bytes = spec.head_dim.next_multiple_of(4) * dtype.element_bytes();
        let too_large = || {
            let limit = gpu.max_binding_bytes();
            gpu.error(format!("the keys of a layer of {spec:?} are larger than {PARTS} bindings of {limit} bytes"))
        };
        let block_bytes = [spec.num_key_value_heads, spec.block_size]
            .iter()
            .try_fold(head_bytes, |product, factor| product.checked_mul(*factor))
            .ok_or_else(too_large)?;
        let most_blocks = gpu.max_binding_bytes() / block_bytes as u64;
        let num_parts = if spec.num_blocks as u64 <= most_blocks { 1 } else { PARTS };
        let num_buffers = gpu.limits().max_storage_buffers_per_shader_stage;
        if num_parts > 1 && num_buffers < PARTED_BUFFERS {
            let limit = gpu.max_binding_bytes();
            return Err(gpu.error(format!(
                "the keys of a layer of {spec:?} are larger than a binding of {limit} bytes, and a shader has \
                 {num_buffers} buffers, where several bindings need {PARTED_BUFFERS}"
            )));
        }
        let part_blocks = spec.num_blocks.div_ceil(num_parts).max(1);
        if part_blocks as u64 > most_blocks {
            return Err(too_large());
        }
        let num_bytes = (part_blocks * block_bytes) as u64;
        let part = |_| Ok([gpu.buffer("keys", num_bytes)?, gpu.buffer("values", num_bytes)?]);
        let layer = |_| (0..num_parts).map(part).collect::<Result<_, KernelError>>();
        let layers = (0..spec.num_layers).map(layer).collect::<Result<_, KernelError>>()?;
        Ok(Self { spec, dtype, part_blocks, layers })
    }

    /// Sizes of the cache.
    pub fn spec(&self) -> &KvCacheSpec {
        &self.spec
    }

    /// Type of its elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Blocks of each part.
    pub(super) fn part_blocks(&self) -> usize {
        self.part_blocks
    }

    /// Whether layers are in four parts.
    pub fn is_parted(&self) -> bool {
        self.layers.first().is_some_and(|parts| parts.len() > 1)
    }

    /// Keys and values of each part of a layer that was checked.
    pub(super) fn layer(&self, layer: usize) -> impl Iterator<Item = Binding> {
        self.layers[layer].iter().flatten().map(Binding::whole)
    }

    /// Groups of four elements of a head.
    pub(super) fn head_groups(&self) -> usize {
        self.spec.head_dim.div_ceil(4)
    }

    /// Key and value of one head in a slot; `None` for what lies outside the cache.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the GPU fails.
    pub fn token(
        &self,
        commands: &mut Commands,
        layer: usize,
        slot: usize,
        head: usize,
    ) -> Result<Option<[Vec<f32>; 2]>, KernelError> {
        let KvCacheSpec { num_blocks, block_size, num_key_value_heads, head_dim, .. } = self.spec;
        let (block, place) = (slot / block_size, slot % block_size);
        let parts = self.layers.get(layer).filter(|_| block < num_blocks && head < num_key_value_heads);
        let Some(buffers) = parts.and_then(|parts| parts.get(block / self.part_blocks)) else { return Ok(None) };
        let row_bytes = self.head_groups() * 4 * self.dtype.element_bytes();
        let at = ((block % self.part_blocks * num_key_value_heads + head) * block_size + place) * row_bytes;
        let mut read = |buffer: &Arc<Buffer>| {
            let binding = Binding { buffer: Arc::clone(buffer), offset: at as u64, num_bytes: row_bytes as u64 };
            let bytes: Vec<u8> = commands.read(&binding)?;
            let halves = || bytes.as_chunks::<2>().0.iter().copied();
            Ok::<_, KernelError>(match self.dtype {
                Dtype::F16 => halves().map(|bits| half::f16::from_le_bytes(bits).to_f32()).take(head_dim).collect(),
                Dtype::Bf16 => halves().map(|bits| half::bf16::from_le_bytes(bits).to_f32()).take(head_dim).collect(),
                Dtype::F32 => {
                    let words = bytes.as_chunks::<4>().0.iter();
                    words.map(|bits| f32::from_le_bytes(*bits)).take(head_dim).collect()
                }
            })
        };
        Ok(Some([read(&buffers[0])?, read(&buffers[1])?]))
    }
}

/// Options of the shaders that use a cache of a type.
pub fn options(dtype: Dtype, is_parted: bool) -> [(&'static str, u32); 3] {
    [("DTYPE", dtype_option(dtype)), ("WIDE", u32::from(dtype == Dtype::F32)), ("PARTED", u32::from(is_parted))]
}
