// A layer's keys and values as bindings 3 and 4, or in four parts (PARTED) 9 to 14 as well. Brings `kv_cache`.
//
// Options: those of the cache; WIDE (its elements are f32), NATIVE (they are f16, and the adapter computes with f16), STORES (they
// are stored as well as read).

#if NATIVE
alias Stored = vec4<f16>;
#else
#if WIDE
alias Stored = vec4<u32>;
#else
alias Stored = vec2<u32>;
#endif
#endif
#if STORES
@group(0) @binding(3) var<storage, read_write> keys: array<Stored>;
@group(0) @binding(4) var<storage, read_write> values: array<Stored>;
#if PARTED
@group(0) @binding(9) var<storage, read_write> keys_1: array<Stored>;
@group(0) @binding(10) var<storage, read_write> values_1: array<Stored>;
@group(0) @binding(11) var<storage, read_write> keys_2: array<Stored>;
@group(0) @binding(12) var<storage, read_write> values_2: array<Stored>;
@group(0) @binding(13) var<storage, read_write> keys_3: array<Stored>;
@group(0) @binding(14) var<storage, read_write> values_3: array<Stored>;
#endif
#else
@group(0) @binding(3) var<storage, read> keys: array<Stored>;
@group(0) @binding(4) var<storage, read> values: array<Stored>;
#if PARTED
@group(0) @binding(9) var<storage, read> keys_1: array<Stored>;
@group(0) @binding(10) var<storage, read> values_1: array<Stored>;
@group(0) @binding(11) var<storage, read> keys_2: array<Stored>;
@group(0) @binding(12) var<storage, read> values_2: array<Stored>;
@group(0) @binding(13) var<storage, read> keys_3: array<Stored>;
@group(0) @binding(14) var<storage, read> values_3: array<Stored>;
#endif
#endif
#include kv_cache

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

#if STORES
// As the cache holds it: what is too large becomes its largest finite value.
fn narrow(elements: vec4<f32>) -> Stored {
    let limit = vec4<f32>(cache_limit());
    let finite = clamp(elements, -limit, limit);
#if WIDE
    return bitcast<vec4<u32>>(finite);
#else
    var words = vec2<u32>(pack2x16float(finite.xy), pack2x16float(finite.zw));
#if NATIVE
    return vec4<f16>(vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)));
#else
    if (DTYPE == 1u) { words = vec2<u32>(pack_bf16(finite.xy), pack_bf16(finite.zw)); }
    return words;
#endif
#endif
}

fn store_key(at: u32, part: u32, group: Stored) {
    switch (part) {
#if PARTED
        case 1u: { keys_1[at] = group; }
        case 2u: { keys_2[at] = group; }
        case 3u: { keys_3[at] = group; }
#endif
        default: { keys[at] = group; }
    }
}

fn store_value(at: u32, part: u32, group: Stored) {
    switch (part) {
#if PARTED
        case 1u: { values_1[at] = group; }
        case 2u: { values_2[at] = group; }
        case 3u: { values_3[at] = group; }
#endif
        default: { values[at] = group; }
    }
}
#endif
