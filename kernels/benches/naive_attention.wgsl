// Attention as it is written first, for comparison: all scores in memory, their softmax, the weighted values; causal, one
// sequence, keys and values beside the queries in f32. Scores and weighted values go by tiles of 16 x 16 through workgroup
// memory, and what no query sees is skipped.
//
// A pass has one of the options SCORES, SOFTMAX, WEIGHTED. Workgroup z is a query head, counted from `first_head`.

struct Params { num_tokens: u32, num_heads: u32, num_key_value_heads: u32, first_head: u32, scale: f32 }
var<immediate> params: Params;

@group(0) @binding(0) var<storage, read> qkv: array<f32>;
// [head, query, key]
@group(0) @binding(1) var<storage, read_write> scores: array<f32>;
@group(0) @binding(2) var<storage, read_write> output: array<f32>;

const HEAD_DIM = 128u;
const SIDE = 16u;

#if SOFTMAX
var<workgroup> shared_values: array<f32, 256>;

fn reduce(thread: u32, value: f32, is_sum: bool) -> f32 {
    shared_values[thread] = value;
    workgroupBarrier();
    for (var distance = 128u; distance > 0u; distance /= 2u) {
        if (thread < distance) {
            let other = shared_values[thread + distance];
            let mine = shared_values[thread];
            shared_values[thread] = select(max(mine, other), mine + other, is_sum);
        }
        workgroupBarrier();
    }
    let result = shared_values[0];
    workgroupBarrier();
    return result;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let query = group.x;
    let start = (group.z * params.num_tokens + query) * params.num_tokens;
    var largest = -3.4e38;
    for (var key = thread; key <= query; key += 256u) { largest = max(largest, scores[start + key]); }
    largest = reduce(thread, largest, false);
    var sum = 0.0;
    for (var key = thread; key <= query; key += 256u) {
        let weight = exp(scores[start + key] - largest);
        scores[start + key] = weight;
        sum += weight;
    }
    sum = reduce(thread, sum, true);
    for (var key = thread; key <= query; key += 256u) { scores[start + key] /= sum; }
}
#else
var<workgroup> left: array<f32, SIDE * SIDE>;
var<workgroup> right: array<f32, SIDE * (SIDE + 1u)>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let x = thread % SIDE;
    let y = thread / SIDE;
    let head = params.first_head + group.z;
    let key_value_head = head / (params.num_heads / params.num_key_value_heads);
    let width = (params.num_heads + 2u * params.num_key_value_heads) * HEAD_DIM;
    let query = group.y * SIDE + y;
    let scores_at = (group.z * params.num_tokens + query) * params.num_tokens;
    var sum = 0.0;
#if SCORES
    if (group.x > group.y) { return; }
    let keys = (params.num_heads + key_value_head) * HEAD_DIM;
    for (var first = 0u; first < HEAD_DIM; first += SIDE) {
        left[thread] = qkv[query * width + head * HEAD_DIM + first + x];
        right[y * (SIDE + 1u) + x] = qkv[(group.x * SIDE + y) * width + keys + first + x];
        workgroupBarrier();
        for (var i = 0u; i < SIDE; i++) { sum += left[y * SIDE + i] * right[x * (SIDE + 1u) + i]; }
        workgroupBarrier();
    }
    let key = group.x * SIDE + x;
    if (key <= query) { scores[scores_at + key] = sum * params.scale; }
#else
    let values = (params.num_heads + params.num_key_value_heads + key_value_head) * HEAD_DIM;
    for (var first = 0u; first <= group.y * SIDE; first += SIDE) {
        let weight = scores[scores_at + first + x];
        left[thread] = select(0.0, weight, first + x <= query);
        right[y * (SIDE + 1u) + x] = qkv[(first + y) * width + values + group.x * SIDE + x];
        workgroupBarrier();
        for (var i = 0u; i < SIDE; i++) { sum += left[y * SIDE + i] * right[i * (SIDE + 1u) + x]; }
        workgroupBarrier();
    }
    output[(query * params.num_heads + head) * HEAD_DIM + group.x * SIDE + x] = sum;
#endif
}
#endif
