// The matrices of tensor cores: EDGE x EDGE of f16 as factors, of f32 as sums. What they are made of lies in workgroup memory.
//
// The shapes that adapters have are 16 x 16 and, in Metal, 8 x 8 (option SMALL). Metal copies matrices from arrays of numbers
// alone, others faster from arrays of vectors of four: UNIT is how many elements of such an array are a group of four.
//
// For shaders with matrices the translator declares Vulkan's memory model, but marks neither their accesses nor their barriers as
// that model wants (wgpu issue 8805). An H200 computes them right; other drivers were not tried.

#if SMALL
const EDGE = 8u;
const UNIT = 4u;
alias Half = f16;
alias Left = coop_mat8x8<f16, A>;
alias Right = coop_mat8x8<f16, B>;
alias Sums = coop_mat8x8<f32, C>;
#else
const EDGE = 16u;
const UNIT = 1u;
alias Half = vec4<f16>;
alias Left = coop_mat16x16<f16, A>;
alias Right = coop_mat16x16<f16, B>;
alias Sums = coop_mat16x16<f32, C>;
#endif
// Groups of four along an edge.
const EDGE_GROUPS = EDGE / 4u;
// Threads of a subgroup, which holds a matrix together.
const LANES = 32u;
