// Makes blocks of 8-bit activations, with the same rounding as the host's. Needs `activations`; THREADS is a multiple of 8.

var<workgroup> group_sizes: array<f32, THREADS>;
var<workgroup> group_sums: array<i32, THREADS>;

// Four of a block's values, with what the whole block has.
struct QuantizedGroup { word: u32, scale: u32, sums: u32 }

// Each eight neighbouring threads hold a block. All threads of the workgroup call it, from uniform control flow.
fn quantize_group(thread: u32, value: vec4<f32>) -> QuantizedGroup {
    let size = abs(value);
    group_sizes[thread] = max(max(size.x, size.y), max(size.z, size.w));
    workgroupBarrier();
    let first = thread / 8u * 8u;
    var largest = group_sizes[first];
    for (var i = 1u; i < 8u; i++) { largest = max(largest, group_sizes[first + i]); }
    var inverse = 0.0;
    if (largest > 0.0) { inverse = 127.0 / largest; }
    let quants = vec4<i32>(round(value * inverse));
    group_sums[thread] = quants.x + quants.y + quants.z + quants.w;
    workgroupBarrier();
    var sums = vec2<i32>(0, 0);
    for (var i = 0u; i < 4u; i++) {
        sums.x += group_sums[first + i];
        sums.y += group_sums[first + 4u + i];
    }
    return QuantizedGroup(pack4xI8(quants), bitcast<u32>(largest * (1.0 / 127.0)), pack_sums(sums));
}
