//! Tiles of 8-bit activations as the host makes them, for tests of the kernels that write or read them.

use lockstep_kernels::{cuda::activations::TILE_COLUMNS, quant::quantize_block};

const TILE_BYTES: usize = 320;

/// Rows of tiles, as `cuda/include/activations.cuh` lays them out.
pub fn tiles_of(values: &[f32], columns: usize) -> Vec<u8> {
    let row_bytes = columns.div_ceil(TILE_COLUMNS) * TILE_BYTES;
    let mut tiles = vec![0; values.len() / columns * row_bytes];
    for (row, values) in tiles.chunks_exact_mut(row_bytes).zip(values.chunks_exact(columns)) {
        for (index, block) in values.as_chunks::<32>().0.iter().enumerate() {
            let tile = &mut row[index / 8 * TILE_BYTES..][..TILE_BYTES];
            let (scale, quants) = quantize_block(block);
            let scales_at = 256 + index % 8 * 8;
            tile[scales_at..scales_at + 4].copy_from_slice(&scale.to_le_bytes());
            for half in 0..2 {
                let quants = &quants[16 * half..][..16];
                let sum: i16 = quants.iter().map(|quant| i16::from(*quant)).sum();
                tile[scales_at + 4 + 2 * half..][..2].copy_from_slice(&sum.to_le_bytes());
                for (element, quant) in quants.iter().enumerate() {
                    let place = element % 8 / 2 * 4 + element / 8 * 2 + element % 2;
                    tile[128 * half + index % 8 * 16 + place] = *quant as u8;
                }
            }
        }
    }
    tiles
}
