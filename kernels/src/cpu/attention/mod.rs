//! Paged flash attention on the CPU: the tasks of a call and their threads.
//! For: [`CpuDevice`](super::CpuDevice). Contract: [`ops::attention`](crate::ops::attention).
//! Invariant: what is computed for one query, and in which order, depends on its position alone: keys are taken in
//! tiles from position 0 on, and every [`PARTITION_TILES`] tiles the result is merged into the total, whether one
//! thread does all of them or several share them. So prefill in any chunks and decode agree bit for bit.
//! Not here: the arithmetic of one task (`tile`).

mod tile;

use std::{
    ops::Range,
    sync::atomic::{AtomicUsize, Ordering},
};

use super::{
    kv_cache::{CpuKvCache, TILE_TOKENS, TileShape},
    kv_format::{KvFormat, with_format},
    memory::Element,
    simd::{LANES, Level},
    team::{SharedSlice, Team},
};
use crate::{KernelError, ops::Attention};
use tile::{QueryTile, State};

/// Tiles after which partial results are merged: the smallest share of a thread.
const PARTITION_TILES: usize = 16;
/// Query rows (token, head) that are computed together in prefill; enough to reuse each key from the caches.
const QUERY_ROWS: usize = 48;
/// Tasks for each thread below which long sequences are cut into partitions.
const TASKS_PER_THREAD: usize = 4;

/// A query tile and the partitions of its keys that one thread computes.
struct Task {
    tile: usize,
    partitions: Range<usize>,
}

/// Partial results of a tile that is cut: one state for each partition, merged by whoever finishes last.
struct Cut {
    first_state: usize,
    num_unfinished: AtomicUsize,
}

/// Causal attention of the queries in `qkv` (whole rows) over the cache, into `output`
/// (`[num_tokens, num_heads * head_dim]`).
///
/// # Errors
/// [`KernelError`] if the call does not pass its checks.
pub fn attention(
    team: &Team,
    level: Level,
    call: &Attention<'_>,
    qkv: &[f32],
    cache: &CpuKvCache,
    output: &mut [f32],
) -> Result<(), KernelError> {
    let num_tokens = call.num_tokens();
    if num_tokens == 0 {
        return Ok(());
    }
    call.check(cache.spec(), qkv.len() / num_tokens, output.len() / num_tokens)?;
    with_format!(cache.dtype(), |Format| attend_to::<Format>(team, level, call, qkv, cache, output));
    Ok(())
}

/// The call, which was checked, over a cache of this format.
fn attend_to<F: KvFormat>(
    team: &Team,
    level: Level,
    call: &Attention<'_>,
    qkv: &[f32],
    cache: &CpuKvCache,
    output: &mut [f32],
) where
    [F::Stored; LANES]: Element,
{
    let Some(tiles) = cache.tiles::<F>(call.layer) else { return };
    let query_tiles = query_tiles(call);
    let (tasks, cuts, num_states) = tasks(&query_tiles, &tiles.shape, team.num_threads());
    let mut states: Vec<Option<State>> = (0..num_states).map(|_| None).collect();
    let states = SharedSlice::new(&mut states);
    let output = SharedSlice::new(output);
    let work = |index: usize| {
        let task = &tasks[index];
        let tile = &query_tiles[task.tile];
        let result = level.run(tile::Compute { call, tile, tiles: &tiles, qkv, partitions: task.partitions.clone() });
        let Some(cut) = &cuts[task.tile] else {
            return level.run(tile::Finish { call, tile, state: &result, output: &output });
        };
        let place = cut.first_state + task.partitions.start;
        // SAFETY: each partition of a cut tile is computed once.
        let own = unsafe { states.range_mut(place..place + 1) };
        own[0] = Some(result);
        if cut.num_unfinished.fetch_sub(1, Ordering::AcqRel) == 1 {
            let num_partitions = tile.num_partitions(&tiles.shape);
            // SAFETY: this was the last partition of the tile; the others were published by their decrements.
            let parts = unsafe { states.range_mut(cut.first_state..cut.first_state + num_partitions) };
            let merged = parts.iter_mut().filter_map(Option::take).reduce(|mut total, part| {
                level.run(tile::Merge { total: &mut total, part: &part, first_row: 0 });
                total
            });
            if let Some(state) = merged {
                level.run(tile::Finish { call, tile, state: &state, output: &output });
            }
        }
    };
    team.for_chunks(tasks.len(), 1, &|range| range.for_each(work));
}

/// The queries of the call in tiles: consecutive tokens of one sequence, with all query heads of one key/value head.
fn query_tiles<'a>(call: &Attention<'a>) -> Vec<QueryTile<'a>> {
    let mut query_tiles = Vec::new();
    let mut first_row = 0;
    for sequence in call.sequences {
        for key_value_head in 0..call.num_key_value_heads {
            let heads = call.query_heads(key_value_head);
            if heads.is_empty() {
                continue;
            }
            let tile_tokens = (QUERY_ROWS / heads.len()).max(1);
            query_tiles.extend((0..sequence.num_tokens).step_by(tile_tokens).map(|first| QueryTile {
                key_value_head,
                heads: heads.clone(),
                first_row: first_row + first,
                num_tokens: tile_tokens.min(sequence.num_tokens - first),
                first_position: sequence.first_position + first,
                block_table: sequence.block_table,
            }));
        }
        first_row += sequence.num_tokens;
    }
    query_tiles
}

/// Tasks in order of falling cost, the cuts (one entry for each tile) and the number of partial states.
fn tasks(query_tiles: &[QueryTile<'_>], shape: &TileShape, num_threads: usize) -> (Vec<Task>, Vec<Option<Cut>>, usize) {
    let is_cut = num_threads > 1 && query_tiles.len() < TASKS_PER_THREAD * num_threads;
    let mut tasks = Vec::with_capacity(query_tiles.len());
    let mut num_states = 0;
    let mut cuts = Vec::with_capacity(query_tiles.len());
    for (index, tile) in query_tiles.iter().enumerate() {
        let num_partitions = tile.num_partitions(shape);
        if is_cut && num_partitions > 1 {
            tasks.extend((0..num_partitions).map(|first| Task { tile: index, partitions: first..first + 1 }));
            cuts.push(Some(Cut { first_state: num_states, num_unfinished: AtomicUsize::new(num_partitions) }));
            num_states += num_partitions;
        } else {
            tasks.push(Task { tile: index, partitions: 0..num_partitions });
            cuts.push(None);
        }
    }
    if num_threads > 1 {
        let cost = |task: &Task| query_tiles[task.tile].num_rows() * task.partitions.len();
        tasks.sort_by_key(|task| std::cmp::Reverse(cost(task)));
    }
    (tasks, cuts, num_states)
}

impl QueryTile<'_> {
    /// Partitions that hold the keys which its last token sees.
    fn num_partitions(&self, shape: &TileShape) -> usize {
        let num_keys = self.first_position + self.num_tokens;
        let blocks = num_keys / shape.block_size * shape.tiles_per_block;
        let rest = (num_keys % shape.block_size).div_ceil(TILE_TOKENS);
        (blocks + rest).div_ceil(PARTITION_TILES)
    }
}
