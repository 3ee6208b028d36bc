//! The paged KV cache on a GPU, in the layout of `cuda/include/kv_cache.cuh`.
//! For: `rope_and_store`, which writes it, and `attention`, which reads it.
//! Invariant: head and block sizes are multiples of 16, as tensor cores take them; a layer is one buffer.
//! Not here: which block belongs to whom (no kernel knows).

use std::sync::Arc;

use super::{DeviceBuffer, Gpu, HalfType};
use crate::{KernelError, device::KvCacheSpec};

const OPERATION: &str = "kv_cache";
/// Rows and columns of a product on tensor cores.
const TILE: usize = 16;
/// Largest head whose sums fit the registers of the attention kernels.
const MAX_HEAD_DIM: usize = 256;
/// Elements of 16 bytes, which are permuted as one.
const CHUNK: usize = 8;

/// A paged KV cache: of each layer `[num_blocks][num_key_value_heads][keys, values][block_size × head_dim]`.
#[derive(Clone, Debug, PartialEq)]
pub struct CudaKvCache {
    spec: KvCacheSpec,
    half_type: HalfType,
    /// Shared by the calls of a step, of which there are many.
    layers: Arc<[Arc<DeviceBuffer>]>,
}

impl CudaKvCache {
    /// A zeroed cache.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] for head or block sizes that the kernels do not take, [`KernelError::Device`] if
    /// memory is short.
    pub fn new(gpu: &Arc<Gpu>, spec: KvCacheSpec, half_type: HalfType) -> Result<Self, KernelError> {
        let refuse =
            |what| Err(KernelError::Unsupported { operation: OPERATION, what, device: gpu.limits().name.clone() });
        let KvCacheSpec { head_dim, block_size, .. } = spec;
        if head_dim == 0 || !head_dim.is_multiple_of(TILE) || head_dim > MAX_HEAD_DIM {
            return refuse(format!("a head_dim of {head_dim} (a multiple of {TILE} up to {MAX_HEAD_DIM})"));
        }
        if block_size == 0 || !block_size.is_multiple_of(TILE) {
            return refuse(format!("a block_size of {block_size} (a multiple of {TILE})"));
        }
        let layer_bytes = [spec.num_key_value_heads, block_size, head_dim, 2 * size_of::<u16>()]
            .iter()
            .try_fold(spec.num_blocks, |product, factor| product.checked_mul(*factor))
            .ok_or_else(|| gpu.error(format!("out of memory for a kv cache of {spec:?}")))?;
        let layers = (0..spec.num_layers)
            .map(|_| DeviceBuffer::zeroed(gpu, layer_bytes).map(Arc::new))
            .collect::<Result<_, _>>()?;
        Ok(Self { spec, half_type, layers })
    }

    /// Sizes of the cache.
    pub fn spec(&self) -> &KvCacheSpec {
        &self.spec
    }

    /// Type of keys and values.
    pub fn half_type(&self) -> HalfType {
        self.half_type
    }

    /// Memory of a layer.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] for a layer that is not held here.
    pub fn layer(&self, layer: usize) -> Result<&Arc<DeviceBuffer>, KernelError> {
        let (got, limit) = (layer, self.layers.len());
        self.layers.get(layer).ok_or(KernelError::OutOfRange { operation: OPERATION, what: "layer", got, limit })
    }

    /// Refuses a cache of other sizes than those that addresses were checked against.
    pub(super) fn expect_spec(&self, operation: &'static str, spec: &KvCacheSpec) -> Result<(), KernelError> {
        if self.spec == *spec {
            return Ok(());
        }
        let what = format!("a cache of {:?} with addresses for {spec:?}", self.spec);
        Err(KernelError::Unsupported { operation, what, device: "cuda".to_owned() })
    }

    /// Options with which kernels that touch this cache are compiled.
    pub(super) fn options(&self) -> Vec<String> {
        vec![
            format!("-DHEAD_DIM={}", self.spec.head_dim),
            format!("-DBLOCK_SIZE={}", self.spec.block_size),
            format!("-DBFLOAT={}", u8::from(self.half_type == HalfType::BF16)),
        ]
    }

    /// What a layer holds, once all work before is done.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`] for a layer that is not there, [`KernelError::Device`] if work before failed.
    pub fn download(&self, layer: usize) -> Result<HostKvLayer, KernelError> {
        let buffer = self.layer(layer)?;
        let mut elements = vec![0; buffer.num_bytes() / size_of::<u16>()];
        buffer.read(0, &mut elements)?;
        Ok(HostKvLayer { spec: self.spec, half_type: self.half_type, elements })
    }
}

/// A copy of a layer's keys and values.
pub struct HostKvLayer {
    spec: KvCacheSpec,
    half_type: HalfType,
    elements: Vec<u16>,
}

impl HostKvLayer {
    /// Key and value of one head in a slot, `[head_dim]` each; `None` for what lies outside the cache.
    pub fn token(&self, slot: usize, head: usize) -> Option<(Vec<f32>, Vec<f32>)> {
        let KvCacheSpec { block_size, head_dim, num_key_value_heads, .. } = self.spec;
        let (block, row) = (slot / block_size, slot % block_size);
        let tile = block_size * head_dim;
        let tiles = self.elements.chunks_exact(2 * tile).nth(block * num_key_value_heads + head)?;
        let element = |tile: &[u16], column: usize| match self.half_type {
            HalfType::F16 => half::f16::from_bits(tile[self.place(row, column)]).to_f32(),
            HalfType::BF16 => half::bf16::from_bits(tile[self.place(row, column)]).to_f32(),
        };
        let (keys, values) = tiles.split_at(tile);
        Some([keys, values].map(|tile| (0..head_dim).map(|column| element(tile, column)).collect()).into())
    }

    /// Place of an element in a tile: `chunk_offset` of the device code.
    fn place(&self, row: usize, column: usize) -> usize {
        let piece = [64, 32].into_iter().find(|piece| self.spec.head_dim.is_multiple_of(*piece)).unwrap_or(TILE);
        let permuted = (column % piece / CHUNK) ^ ((row * piece / 64) & (piece / CHUNK - 1));
        (column / piece * self.spec.block_size + row) * piece + permuted * CHUNK + column % CHUNK
    }
}
