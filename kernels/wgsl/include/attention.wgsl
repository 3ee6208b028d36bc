// What the attention shaders share: parameters, items of work, bindings, where keys and values are. Brings `kv_cache`.
//
// Options: those of the cache; WIDE (its elements are f32), NATIVE (they are f16, and the adapter computes with f16), BLOCK_SIZE,
// QUANTIZE (the output as 8-bit blocks as well; heads are then whole blocks), GROUPS (groups of four elements of a head).

struct Params {
    num_heads: u32, num_key_value_heads: u32, head_dim: u32, group_size: u32, group_offset: u32, scale: f32,
    chunks: u32, part_blocks: u32,
}
#include params

struct Item {
    // First row of `qkv`, rows, where the block table begins, the first key of the range,
    row: u32, num_tokens: u32, table: u32, first_key: u32,
    // its end, the position of the first row, and where to leave partial sums: all ones if there is no need.
    end_key: u32, position: u32, slot: u32, unused: u32,
}

@group(0) @binding(0) var<storage, read> qkv: array<f32>;
@group(0) @binding(1) var<storage, read> items: array<Item>;
@group(0) @binding(2) var<storage, read> tables: array<u32>;
#if NATIVE
alias Stored = vec4<f16>;
#else
#if WIDE
alias Stored = vec4<u32>;
#else
alias Stored = vec2<u32>;
#endif
#endif
@group(0) @binding(3) var<storage, read> keys: array<Stored>;
@group(0) @binding(4) var<storage, read> values: array<Stored>;
@group(0) @binding(5) var<storage, read_write> output: array<f32>;
@group(0) @binding(6) var<storage, read_write> partial: array<vec4<f32>>;
#if QUANTIZE
@group(0) @binding(7) var<storage, read_write> quants: array<u32>;
@group(0) @binding(8) var<storage, read_write> quant_scales: array<vec2<u32>>;
#endif
#if PARTED
@group(0) @binding(9) var<storage, read> keys_1: array<Stored>;
@group(0) @binding(10) var<storage, read> values_1: array<Stored>;
@group(0) @binding(11) var<storage, read> keys_2: array<Stored>;
@group(0) @binding(12) var<storage, read> values_2: array<Stored>;
@group(0) @binding(13) var<storage, read> keys_3: array<Stored>;
@group(0) @binding(14) var<storage, read> values_3: array<Stored>;
#endif
#include kv_cache

const LOWEST = -3.4e38;

fn widen(group: Stored) -> vec4<f32> {
#if NATIVE
    return vec4<f32>(group);
#else
#if WIDE
    return bitcast<vec4<f32>>(group);
#else
    if (DTYPE == 0u) { return vec4<f32>(unpack2x16float(group.x), unpack2x16float(group.y)); }
    return vec4<f32>(unpack_bf16(group.x), unpack_bf16(group.y));
#endif
#endif
}

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

fn load_key(at: u32, part: u32) -> Stored {
#if PARTED
    switch (part) {
        case 1u: { return keys_1[at]; }
        case 2u: { return keys_2[at]; }
        case 3u: { return keys_3[at]; }
        default: {}
    }
#endif
    return keys[at];
}

fn load_value(at: u32, part: u32) -> Stored {
#if PARTED
    switch (part) {
        case 1u: { return values_1[at]; }
        case 2u: { return values_2[at]; }
        case 3u: { return values_3[at]; }
        default: {}
    }
#endif
    return values[at];
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
