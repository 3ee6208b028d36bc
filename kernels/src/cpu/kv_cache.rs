//! The paged KV cache, in tiles of sixteen tokens that the vector instructions read as they lie.
//! For: `rope_and_store`, which writes it, and `attention`, which reads it.
//! Invariant: blocks that were never written cost no memory (pages come zeroed from the system on first use).
//! Not here: which block belongs to whom (no kernel knows).

use lockstep_formats::Dtype;

use super::{
    kv_format::{KvFormat, with_format},
    memory::{AlignedBuffer, Element},
    rope_and_store::Angles,
    simd::{LANES, Portable},
};
use crate::{KernelError, device::KvCacheSpec};

/// Tokens of a tile; a block whose size is no multiple of it leaves the rest of its last tile unused.
pub(super) const TILE_TOKENS: usize = LANES;

/// A paged KV cache. Of each layer, for each block and each of its heads, the tiles of the block:
/// keys `[head_dim, 16]` (one vector holds one element of sixteen keys), values `[16, head_dim rounded up to 16]`.
pub struct CpuKvCache {
    spec: KvCacheSpec,
    dtype: Dtype,
    layers: Vec<Layer>,
    /// Cosines and sines of the positions of the current step, which all layers share.
    pub(super) angles: Angles,
}

struct Layer {
    keys: AlignedBuffer,
    values: AlignedBuffer,
}

/// Tiles of one layer as vectors of sixteen elements.
pub(super) struct Tiles<'a, F: KvFormat> {
    pub(super) shape: TileShape,
    pub(super) keys: &'a [[F::Stored; LANES]],
    pub(super) values: &'a [[F::Stored; LANES]],
}

/// The same, to be written.
pub(super) struct TilesMut<'a, F: KvFormat> {
    pub(super) shape: TileShape,
    pub(super) keys: &'a mut [[F::Stored; LANES]],
    pub(super) values: &'a mut [[F::Stored; LANES]],
}

/// Where things are.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileShape {
    pub(super) block_size: usize,
    pub(super) tiles_per_block: usize,
    pub(super) num_key_value_heads: usize,
    /// Vectors of a tile of keys.
    pub(super) head_dim: usize,
    /// Vectors of one token's values.
    pub(super) value_vectors: usize,
}

impl TileShape {
    fn new(spec: &KvCacheSpec) -> Self {
        Self {
            block_size: spec.block_size,
            tiles_per_block: spec.block_size.div_ceil(TILE_TOKENS),
            num_key_value_heads: spec.num_key_value_heads,
            head_dim: spec.head_dim,
            value_vectors: spec.head_dim.div_ceil(LANES),
        }
    }

    /// Index of a tile among all of its layer.
    pub(super) fn tile(&self, block: usize, head: usize, tile_of_block: usize) -> usize {
        (block * self.num_key_value_heads + head) * self.tiles_per_block + tile_of_block
    }

    /// Tile and place inside it of a slot.
    pub(super) fn place(&self, slot: usize, head: usize) -> (usize, usize) {
        let (block, offset) = (slot / self.block_size, slot % self.block_size);
        (self.tile(block, head, offset / TILE_TOKENS), offset % TILE_TOKENS)
    }
}

impl CpuKvCache {
    /// A zeroed cache of elements of this type.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for a size of 0, [`KernelError::Device`] if memory is short.
    pub fn new(spec: KvCacheSpec, dtype: Dtype) -> Result<Self, KernelError> {
        let sizes = [
            ("block_size", spec.block_size),
            ("num_key_value_heads", spec.num_key_value_heads),
            ("head_dim", spec.head_dim),
        ];
        if let Some((what, got)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(KernelError::Shape { operation: "kv_cache", what, got, expected: 1 });
        }
        let shape = TileShape::new(&spec);
        let too_large = || KernelError::Device {
            device: "cpu".to_owned(),
            what: format!("out of memory for a kv cache of {spec:?}"),
        };
        let num_tiles = [spec.num_key_value_heads, shape.tiles_per_block]
            .iter()
            .try_fold(spec.num_blocks, |product, factor| product.checked_mul(*factor))
            .ok_or_else(too_large)?;
        let tiles = |vectors: usize| {
            let vector_bytes = dtype.element_bytes() * LANES;
            let num_bytes = num_tiles.checked_mul(vectors).and_then(|len| len.checked_mul(vector_bytes));
            AlignedBuffer::sparse(num_bytes.ok_or_else(too_large)?)
        };
        let layer = || Ok(Layer { keys: tiles(spec.head_dim)?, values: tiles(shape.value_vectors * TILE_TOKENS)? });
        let layers = (0..spec.num_layers).map(|_| layer()).collect::<Result<_, KernelError>>()?;
        Ok(Self { spec, dtype, layers, angles: Angles::default() })
    }

    /// Sizes of the cache.
    pub fn spec(&self) -> &KvCacheSpec {
        &self.spec
    }

    /// Type of its elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Key and value of one head in a slot, `[head_dim]` each; `None` for what lies outside the cache.
    pub fn token(&self, layer: usize, slot: usize, head: usize) -> Option<(Vec<f32>, Vec<f32>)> {
        if slot >= self.spec.num_blocks * self.spec.block_size || head >= self.spec.num_key_value_heads {
            return None;
        }
        with_format!(self.dtype, |Format| {
            let tiles = self.tiles::<Format>(layer)?;
            let (tile, place) = tiles.shape.place(slot, head);
            let widen = |vector: &[_; LANES]| <Format as KvFormat>::load(Portable, vector);
            let keys = &tiles.keys[tile * self.spec.head_dim..][..self.spec.head_dim];
            let values = &tiles.values[(tile * TILE_TOKENS + place) * tiles.shape.value_vectors..];
            let values = values.iter().take(tiles.shape.value_vectors).flat_map(widen);
            Some((keys.iter().map(|vector| widen(vector)[place]).collect(), values.take(self.spec.head_dim).collect()))
        })
    }

    /// Tiles of a layer; the format is that of [`dtype`](Self::dtype).
    pub(super) fn tiles<F: KvFormat>(&self, layer: usize) -> Option<Tiles<'_, F>>
    where
        [F::Stored; LANES]: Element,
    {
        let layer = self.layers.get(layer)?;
        Some(Tiles { shape: TileShape::new(&self.spec), keys: layer.keys.values(), values: layer.values.values() })
    }

    /// The same, to be written.
    pub(super) fn tiles_mut<F: KvFormat>(&mut self, layer: usize) -> Option<(TilesMut<'_, F>, &mut Angles)>
    where
        [F::Stored; LANES]: Element,
    {
        let layer = self.layers.get_mut(layer)?;
        let shape = TileShape::new(&self.spec);
        let tiles = TilesMut { shape, keys: layer.keys.values_mut(), values: layer.values.values_mut() };
        Some((tiles, &mut self.angles))
    }
}
