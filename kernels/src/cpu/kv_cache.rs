//! The paged KV cache in f16, in tiles of sixteen tokens that the vector instructions read as they lie.
//! For: `rope_and_store`, which writes it, and `attention`, which reads it.
//! Invariant: blocks that were never written cost no memory (pages come zeroed from the system on first use).
//! Not here: which block belongs to whom (no kernel knows).

use super::{memory::AlignedBuffer, rope_and_store::Angles, simd::LANES};
use crate::{KernelError, device::KvCacheSpec};

/// Tokens of a tile; a block whose size is no multiple of it leaves the rest of its last tile unused.
pub(super) const TILE_TOKENS: usize = LANES;

/// A paged KV cache. Of each layer, for each block and each of its heads, the tiles of the block:
/// keys `[head_dim, 16]` (one vector holds one element of sixteen keys), values `[16, head_dim rounded up to 16]`.
pub struct CpuKvCache {
    spec: KvCacheSpec,
    layers: Vec<Layer>,
    /// Cosines and sines of the positions of the current step, which all layers share.
    pub(super) angles: Angles,
}

struct Layer {
    keys: AlignedBuffer,
    values: AlignedBuffer,
}

/// Tiles of one layer as vectors of sixteen halves.
pub(super) struct Tiles<'a> {
    pub(super) shape: TileShape,
    pub(super) keys: &'a [[u16; LANES]],
    pub(super) values: &'a [[u16; LANES]],
}

/// The same, to be written.
pub(super) struct TilesMut<'a> {
    pub(super) shape: TileShape,
    pub(super) keys: &'a mut [[u16; LANES]],
    pub(super) values: &'a mut [[u16; LANES]],
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
    /// A zeroed cache.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for a size of 0, [`KernelError::Device`] if memory is short.
    pub fn new(spec: KvCacheSpec) -> Result<Self, KernelError> {
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
        let halves = |vectors: usize| {
            let num_bytes = num_tiles.checked_mul(vectors).and_then(|len| len.checked_mul(2 * LANES));
            AlignedBuffer::sparse(num_bytes.ok_or_else(too_large)?)
        };
        let layer = || Ok(Layer { keys: halves(spec.head_dim)?, values: halves(shape.value_vectors * TILE_TOKENS)? });
        let layers = (0..spec.num_layers).map(|_| layer()).collect::<Result<_, KernelError>>()?;
        Ok(Self { spec, layers, angles: Angles::default() })
    }

    /// Sizes of the cache.
    pub fn spec(&self) -> &KvCacheSpec {
        &self.spec
    }

    /// Key and value of one head in a slot, `[head_dim]` each; `None` for what lies outside the cache.
    pub fn token(&self, layer: usize, slot: usize, head: usize) -> Option<(Vec<f32>, Vec<f32>)> {
        if slot >= self.spec.num_blocks * self.spec.block_size || head >= self.spec.num_key_value_heads {
            return None;
        }
        let tiles = self.tiles(layer)?;
        let (tile, place) = tiles.shape.place(slot, head);
        let widen = |half: u16| half::f16::from_bits(half).to_f32();
        let keys = &tiles.keys[tile * self.spec.head_dim..][..self.spec.head_dim];
        let values = &tiles.values[(tile * TILE_TOKENS + place) * tiles.shape.value_vectors..];
        Some((
            keys.iter().map(|vector| widen(vector[place])).collect(),
            values.as_flattened()[..self.spec.head_dim].iter().map(|half| widen(*half)).collect(),
        ))
    }

    pub(super) fn tiles(&self, layer: usize) -> Option<Tiles<'_>> {
        let layer = self.layers.get(layer)?;
        Some(Tiles { shape: TileShape::new(&self.spec), keys: layer.keys.values(), values: layer.values.values() })
    }

    pub(super) fn tiles_mut(&mut self, layer: usize) -> Option<(TilesMut<'_>, &mut Angles)> {
        let layer = self.layers.get_mut(layer)?;
        let shape = TileShape::new(&self.spec);
        let tiles = TilesMut { shape, keys: layer.keys.values_mut(), values: layer.values.values_mut() };
        Some((tiles, &mut self.angles))
    }
}
