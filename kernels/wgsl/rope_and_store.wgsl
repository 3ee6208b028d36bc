// Rotates queries and keys in place, and stores keys and values in the cache.
//
// A workgroup takes one head of one token: x is the head (queries, keys, values), y the token. Options: those of `cached`,
// which stores; THREADS, INTERLEAVED (pairs 2i and 2i + 1, else i and i + rotary_dim / 2).

struct Params {
    num_heads: u32, num_key_value_heads: u32, head_dim: u32, rotary_dim: u32, block_size: u32, head_groups: u32,
    part_blocks: u32,
}
#include params

@group(0) @binding(0) var<storage, read_write> qkv: array<f32>;
// Cosine and sine of each pair of each token.
@group(0) @binding(1) var<storage, read> angles: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> slots: array<u32>;
#include cached
#include rotation

fn rotate(start: u32, token: u32, pair: u32) {
    let pairs = params.rotary_dim / 2u;
#if INTERLEAVED
    let first = start + 2u * pair;
    let second = first + 1u;
#else
    let first = start + pair;
    let second = first + pairs;
#endif
    let angle = angles[token * pairs + pair];
    let x = qkv[first];
    let y = qkv[second];
    qkv[first] = rotated(x, -y, angle);
    qkv[second] = rotated(y, x, angle);
}

// The group of four elements of the head from `start` on, zeros past its end.
fn load_group(start: u32, group: u32) -> vec4<f32> {
    var elements: vec4<f32>;
    for (var i = 0u; i < 4u; i++) {
        let element = 4u * group + i;
        elements[i] = select(0.0, qkv[start + min(element, params.head_dim - 1u)], element < params.head_dim);
    }
    return elements;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let head = group.x;
    let token = group.y;
    let all_heads = params.num_heads + 2u * params.num_key_value_heads;
    let start = (token * all_heads + head) * params.head_dim;
    let is_value = head >= params.num_heads + params.num_key_value_heads;
    if (!is_value) {
        for (var pair = thread; pair < params.rotary_dim / 2u; pair += THREADS) { rotate(start, token, pair); }
    }
    if (head < params.num_heads) { return; }
    storageBarrier();
    var key_value_head = head - params.num_heads;
    if (is_value) { key_value_head -= params.num_key_value_heads; }
    let slot = slots[token];
    var block = slot / params.block_size;
    let part = block / params.part_blocks;
    block %= params.part_blocks;
    let row = (block * params.num_key_value_heads + key_value_head) * params.block_size + slot % params.block_size;
    for (var i = thread; i < params.head_groups; i += THREADS) {
        let elements = narrow(load_group(start, i));
        let at = row * params.head_groups + i;
        if (is_value) { store_value(at, part, elements); } else { store_key(at, part, elements); }
    }
}
