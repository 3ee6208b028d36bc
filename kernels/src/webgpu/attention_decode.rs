//! How attention of one token is cut: ranges of its keys, and what the threads of a workgroup take of one. Device code:
//! `wgsl/attention_decode.wgsl`, `attention_combine.wgsl`.
//! For: [`attention`](super::attention), which stages and dispatches it.
//! Invariant: ranges depend on the token's position alone; what threads take of one, on the cache's type, on heads and groups, and
//! on the adapter. Neither depends on what else is in the batch.

use lockstep_formats::Dtype;

use super::source::Options;

/// Threads of a workgroup: as many as every adapter has; one each for the groups of four elements of its query heads.
const THREADS: u32 = 256;
/// Threads that share four keys, at most.
const MAX_KEY_LANES: u32 = 8;
/// Vectors of scores or sums in workgroup memory for each query head: with four heads of 128 elements, or two of 512, all takes
/// less than 16 KiB, which every adapter has.
const HEAD_POOL: u32 = 128;
/// Bytes of keys, and of values, that a thread has under way.
const LOAD_BYTES: usize = 128;
/// Keys of a range, or a multiple: as many as a workgroup with eight key lanes takes at once.
pub const RANGE_KEYS: usize = 128;
/// Ranges of a token, at most: with eight key/value heads, two workgroups for each multiprocessor of an H200.
pub const MAX_RANGES: usize = 33;

/// Keys of each range of a token that sees so many.
pub fn range_keys(num_keys: usize) -> usize {
    num_keys.div_ceil(MAX_RANGES).next_multiple_of(RANGE_KEYS)
}

/// Query heads that share a workgroup: each takes registers for its scores and sums.
pub fn query_heads(head_dim: usize, group_size: usize) -> usize {
    group_size.next_power_of_two().min(if head_dim <= 128 { 4 } else { 2 })
}

/// Threads that share four keys, on an adapter whose subgroups have so many threads at least; 1 without subgroups.
pub fn key_lanes(subgroup_threads: u32) -> u32 {
    subgroup_threads.min(MAX_KEY_LANES)
}

/// Vectors of scores or sums in workgroup memory.
fn pool(head_dim: usize, query_heads: u32) -> u32 {
    let groups = head_dim.div_ceil(4) as u32;
    // Of shares of the threads, each with all groups, half are added to the other half before they are kept.
    let kept = (THREADS / groups).div_ceil(2) * groups;
    (query_heads * kept.max(HEAD_POOL)).max(THREADS)
}

/// Keys of a range whose scores a workgroup holds at once; it takes more of them in rounds.
pub fn round_keys(head_dim: usize, group_size: usize) -> usize {
    let heads = query_heads(head_dim, group_size);
    4 * (pool(head_dim, heads as u32) as usize / heads)
}

/// The options of `attention_decode.wgsl` beside those of the cache and of all attention.
pub fn options(dtype: Dtype, head_dim: usize, query_heads: usize, key_lanes: u32) -> Options {
    let (groups, heads) = (head_dim.div_ceil(4) as u32, query_heads as u32);
    // Loads of a group of four elements, of four keys each.
    let num_loads = (LOAD_BYTES / (4 * dtype.element_bytes())) as u32 / 4;
    let halvings = key_lanes.min(heads).ilog2();
    vec![
        ("HEAD_DIM", head_dim as u32),
        ("THREADS", THREADS),
        ("KEY_LANES", key_lanes),
        ("LANE_STEPS", key_lanes.ilog2()),
        ("HALVINGS", halvings),
        ("MORE_STEPS", key_lanes.ilog2() - halvings),
        ("SLICE", groups.div_ceil(key_lanes).min(num_loads)),
        ("LOADED_QUADS", num_loads),
        ("POOL", pool(head_dim, heads)),
        // Counts for `#repeat` alone.
        ("QUAD", 4),
        ("MAX_RANGES", MAX_RANGES as u32),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_few_and_whole() {
        for num_keys in (1..3000).chain([4224, 4225, 8192, 8193, 131_072]) {
            let range = range_keys(num_keys);
            assert!(range.is_multiple_of(RANGE_KEYS) && num_keys.div_ceil(range) <= MAX_RANGES, "{num_keys}: {range}");
        }
        assert_eq!([1, 128, 129, 4224, 4225].map(range_keys), [128, 128, 128, 128, 256]);
    }
}
