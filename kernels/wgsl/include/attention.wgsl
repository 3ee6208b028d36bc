// What the attention shaders share: parameters, items of work, bindings, where keys and values are. Brings `cached`.
//
// Options: those of `cached`, BLOCK_SIZE, QUANTIZE (the output as 8-bit blocks as well; heads are then whole blocks), GROUPS
// (groups of four elements of a head), DECODE (items are of one token, and may leave partial sums), STORES (the rows are not yet
// rotated, the last ones' keys and values not yet stored), JOINS (ranges of a token are joined by the workgroup that is done last).

struct Params {
    num_heads: u32, num_key_value_heads: u32, head_dim: u32, group_size: u32, group_offset: u32, scale: f32,
    chunks: u32, part_blocks: u32, rotary_dim: u32, is_interleaved: u32,
}
#include params

struct Item {
    // First row of `qkv`, rows, where the block table begins, the first key of the range,
    row: u32, num_tokens: u32, table: u32, first_key: u32,
    // its end, the position of the first row, and where to leave partial sums: all ones if there is no need.
    end_key: u32, position: u32, slot: u32,
    // Of one token: index of the range and, times MAX_RANGES, how many there are.
    range: u32,
}

@group(0) @binding(0) var<storage, read> qkv: array<f32>;
@group(0) @binding(1) var<storage, read> items: array<Item>;
@group(0) @binding(2) var<storage, read> tables: array<u32>;
#include cached
@group(0) @binding(5) var<storage, read_write> output: array<f32>;
#if DECODE
#if JOINS
@group(0) @binding(6) @coherent var<storage, read_write> partial: array<vec4<f32>>;
#else
@group(0) @binding(6) var<storage, read_write> partial: array<vec4<f32>>;
#endif
#endif
#if QUANTIZE
@group(0) @binding(7) var<storage, read_write> quants: array<u32>;
@group(0) @binding(8) var<storage, read_write> quant_scales: array<vec2<u32>>;
#endif
#if STORES
// Cosine and sine of each rotated pair of each row.
@group(0) @binding(15) var<storage, read> angles: array<vec2<f32>>;
#endif
#if JOINS
// Of the ranges of a token, those that are done, for each key/value head's chunks of query heads; 0 between dispatches.
@group(0) @binding(16) var<storage, read_write> arrivals: array<atomic<u32>>;
#endif

const LOWEST = -3.4e38;

// Where the elements of a key begin, in groups, and in which part of the cache.
fn key_at(item: Item, head: u32, key: u32) -> vec2<u32> {
    var block = tables[item.table + key / BLOCK_SIZE];
    var part = 0u;
#if PARTED
    part = block / params.part_blocks;
    block %= params.part_blocks;
#endif
    let row = (block * params.num_key_value_heads + head) * BLOCK_SIZE + key % BLOCK_SIZE;
    return vec2<u32>(row * GROUPS, part);
}

// A key/value head, and of its query heads those of a workgroup: the first one and, not included, the last. None if they are
// not this device's.
struct Heads { key_value_head: u32, first: u32, end: u32 }

fn heads_of(index: u32, count: u32) -> Heads {
    let key_value_head = index / params.chunks;
    let group_start = key_value_head * params.group_size;
    let start = max(group_start, params.group_offset) - params.group_offset;
    let end = min(group_start + params.group_size - min(params.group_offset, group_start + params.group_size),
        params.num_heads);
    let first = start + index % params.chunks * count;
    return Heads(key_value_head, first, min(end, first + count));
}

fn qkv_width() -> u32 {
    return (params.num_heads + 2u * params.num_key_value_heads) * params.head_dim;
}
