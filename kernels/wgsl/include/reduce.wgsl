// Sums and maxima over a workgroup of THREADS threads; every thread gets the result.
//
// With SUBGROUPS over subgroups first, of any size; without over a tree in workgroup memory. All threads of the workgroup
// call these, from uniform control flow.

var<workgroup> reduce_values: array<f32, THREADS>;

struct Place {
    // Index in the workgroup.
    thread: u32,
#if SUBGROUPS
    subgroup: u32,
    num_subgroups: u32,
    lane: u32,
#endif
}

fn workgroup_sum(place: Place, value: f32) -> f32 {
#if SUBGROUPS
    let sum = subgroupAdd(value);
    if (place.lane == 0u) { reduce_values[place.subgroup] = sum; }
    workgroupBarrier();
    var total = 0.0;
    for (var i = 0u; i < place.num_subgroups; i++) { total += reduce_values[i]; }
    workgroupBarrier();
    return total;
#else
    reduce_values[place.thread] = value;
    workgroupBarrier();
    for (var distance = THREADS / 2u; distance > 0u; distance /= 2u) {
        if (place.thread < distance) { reduce_values[place.thread] += reduce_values[place.thread + distance]; }
        workgroupBarrier();
    }
    let total = reduce_values[0];
    workgroupBarrier();
    return total;
#endif
}

fn workgroup_max(place: Place, value: f32) -> f32 {
#if SUBGROUPS
    let largest = subgroupMax(value);
    if (place.lane == 0u) { reduce_values[place.subgroup] = largest; }
    workgroupBarrier();
    var total = reduce_values[0];
    for (var i = 1u; i < place.num_subgroups; i++) { total = max(total, reduce_values[i]); }
    workgroupBarrier();
    return total;
#else
    reduce_values[place.thread] = value;
    workgroupBarrier();
    for (var distance = THREADS / 2u; distance > 0u; distance /= 2u) {
        if (place.thread < distance) {
            reduce_values[place.thread] = max(reduce_values[place.thread], reduce_values[place.thread + distance]);
        }
        workgroupBarrier();
    }
    let total = reduce_values[0];
    workgroupBarrier();
    return total;
#endif
}
