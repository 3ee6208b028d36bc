// The queries of one token in workgroup memory, and its own key and value if they are not yet stored.
//
// Needs `attention` and, of who includes it, `queries` and `own_key_value`. Options: STORES, HEAD_DIM, GROUP, GROUPS, THREADS.

#include rotation

// A group of four elements of the head that begins at `start`, zeros past its end.
fn load_group(start: u32, row: u32, group: u32, is_rotated: bool) -> vec4<f32> {
    var elements: vec4<f32>;
    for (var i = 0u; i < 4u; i++) {
        let element = min(4u * group + i, HEAD_DIM - 1u);
        var value = qkv[start + element];
#if STORES
        let pairs = params.rotary_dim / 2u;
        let is_interleaved = params.is_interleaved != 0u;
        let is_second = select(element >= pairs, element % 2u == 1u, is_interleaved);
        let distance = select(pairs, 1u, is_interleaved);
        let is_moved = is_rotated && element < params.rotary_dim;
        let other_element = select(element + distance, element - distance, is_second);
        let pair = select(element - select(0u, pairs, is_second), element / 2u, is_interleaved);
        let other = qkv[start + select(element, other_element, is_moved)];
        let angle = angles[select(0u, row * pairs + pair, is_moved)];
        value = select(value, rotated(value, select(-other, other, is_second), angle), is_moved);
#endif
        elements[i] = select(0.0, value, 4u * group + i < HEAD_DIM);
    }
    return elements;
}

// Rotates the queries, and with STORES the token's own key, which it keeps and stores with the value.
fn load_rows(item: Item, heads: Heads, thread: u32, is_storing: bool) {
    let head = heads.key_value_head;
    for (var i = thread; i < (GROUP + 2u * STORES) * GROUPS; i += THREADS) {
        let row = i / GROUPS;
        // Queries past the heads repeat the last one, and are not kept.
        var row_head = min(heads.first + row, max(heads.end, 1u) - 1u);
        if (row >= GROUP) { row_head = params.num_heads + (row - GROUP) * params.num_key_value_heads + head; }
        let start = item.row * qkv_width() + row_head * HEAD_DIM;
        let elements = load_group(start, item.row, i % GROUPS, row <= GROUP);
        if (row < GROUP) { queries[i] = elements * params.scale; }
#if STORES
        if (row >= GROUP && item.end_key > item.position) {
            let own = narrow(elements);
            own_key_value[i - GROUP * GROUPS] = own;
            let at = key_at(item, head, item.position) + vec2<u32>(i % GROUPS, 0u);
            if (is_storing && row == GROUP) { store_key(at.x, at.y, own); }
            if (is_storing && row > GROUP) { store_value(at.x, at.y, own); }
        }
#endif
    }
}
