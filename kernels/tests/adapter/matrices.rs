//! Stands in for the matrices of tensor cores, which no adapter of CI has: the shaders for them with plain arithmetic in the
//! place of each operation on matrices. Everything else of these shaders then runs, and is compared with the oracles.
//!
//! Subgroup `n` is threads 32 n..; of a matrix of sums a thread holds some columns of one row, of a left factor that row, and
//! of a right factor where it lies.

use std::fmt::Write;

use lockstep_kernels::webgpu::gpu::{GpuOptions, Matrices};

/// What stands in for matrices of an edge.
pub fn stand_in(edge: u32) -> GpuOptions {
    GpuOptions { matrices: Matrices::StandIn(edge, rewrite), ..GpuOptions::default() }
}

/// The edges for which there are shaders.
pub const EDGES: [u32; 2] = [16, 8];

fn rewrite(text: &str) -> String {
    let text = text.replace("enable wgpu_cooperative_matrix;", "").replace("coopMultiplyAdd(", "multiply_add(");
    let mut output = String::new();
    for line in text.lines() {
        let alias = ["Left", "Right", "Sums"].into_iter().find(|name| line.starts_with(&format!("alias {name} =")));
        match alias {
            Some("Left") => output.push_str("alias Left = array<f32, EDGE>;"),
            Some("Right") => output.push_str("struct Right { at: u32, stride: u32, source: u32 }"),
            Some(_) => output.push_str("alias Sums = array<f32, EDGE * EDGE / 32u>;"),
            None => output.push_str(line),
        }
        output.push('\n');
    }
    let parameters = ",\n        @builtin(subgroup_id) team: u32, @builtin(subgroup_invocation_id) lane: u32) {";
    assert!(output.contains(parameters), "the entry point has other parameters");
    let output = output.replace(parameters, ") {\n    let team = thread / 32u;\n    let lane = thread % 32u;");
    let arrays = arrays(&output);
    let mut output = operations(&output, &arrays);
    functions(&arrays, &mut output);
    output
}

/// The arrays of numbers in workgroup memory, each with whether its elements are vectors of four.
fn arrays(text: &str) -> Vec<(String, bool)> {
    let is_small = text.contains("const EDGE = 8u;");
    let array = |line: &str| {
        let (name, rest) = line.strip_prefix("var<workgroup> ")?.split_once(": array<")?;
        let is_half = rest.starts_with("Half,");
        (is_half || rest.starts_with("f32,")).then(|| (name.to_owned(), is_half && !is_small))
    };
    text.lines().filter_map(array).collect()
}

/// Loads and stores as calls of functions of the array that they are of.
fn operations(text: &str, arrays: &[(String, bool)]) -> String {
    let mut text = text.to_owned();
    // A store goes by way of a name, which may be given again.
    while let Some((before, rest)) = text.split_once(" = &") {
        let name = before.rsplit(' ').next().unwrap().to_owned();
        let array = rest.split('[').next().unwrap().to_owned();
        let (place, after) = rest[array.len() + 1..].split_once("];").unwrap();
        let uses = after.split(" = &").next().unwrap().matches(&format!(", {name}, ")).count();
        let after = after.replacen(&format!(", {name}, "), &format!(", &{array}, {name}, "), uses);
        text = format!("{before} = {place};{after}");
    }
    for (name, suffix) in [("coopStoreT(", "_rows"), ("coopStore(", "_columns")] {
        while let Some((before, rest)) = text.split_once(name) {
            let (matrix, rest) = rest.split_once(", &").unwrap();
            let (array, rest) = rest.split_once(", ").unwrap();
            text = format!("{before}store_{array}{suffix}(thread, {matrix}, {rest}");
        }
    }
    for (name, suffix) in [("coopLoadT<", "_rows"), ("coopLoad<", "_columns")] {
        while let Some((before, rest)) = text.split_once(name) {
            let (kind, rest) = rest.split_once(">(").unwrap();
            let (array, rest) = rest.trim_start().strip_prefix('&').unwrap().split_once('[').unwrap();
            let (place, rest) = rest.split_once("],").unwrap();
            if kind == "Right" {
                let source =
                    2 * arrays.iter().position(|(name, _)| name == array).unwrap() + usize::from(suffix == "_rows");
                let (stride, rest) = rest.split_once(");").unwrap();
                text = format!("{before}Right({place},{stride}, {source}u);{rest}");
            } else {
                text = format!("{before}load_{kind}_{array}{suffix}(thread, {place}, {rest}");
            }
        }
    }
    text.replace("multiply_add(", "multiply_add(thread, ")
}

fn functions(arrays: &[(String, bool)], output: &mut String) {
    let mut sources = String::new();
    for (index, (name, is_vector)) in arrays.iter().enumerate() {
        for (is_row_major, suffix) in [(false, "columns"), (true, "rows")] {
            let (major, minor) = if is_row_major { ("row", "column") } else { ("column", "row") };
            let element = if *is_vector {
                format!("{name}[at + {major} * stride + {minor} / 4u][{minor} % 4u]")
            } else {
                format!("{name}[at + {major} * stride + {minor}]")
            };
            let source = 2 * index + usize::from(is_row_major);
            if output.contains(&format!(", {source}u);")) {
                let _ = writeln!(sources, "        case {source}u: {{ return f32({element}); }}");
            }
            let _ = write!(
                output,
                "
fn load_Left_{name}_{suffix}(thread: u32, at: u32, stride: u32) -> Left {{
    var matrix: Left;
    let row = place_of(thread).x;
    for (var column = 0u; column < edge_of(thread); column++) {{ matrix[column] = f32({element}); }}
    return matrix;
}}
fn load_Sums_{name}_{suffix}(thread: u32, at: u32, stride: u32) -> Sums {{
    var matrix: Sums;
    let row = place_of(thread).x;
    for (var i = 0u; i < sums_of(thread); i++) {{
        let column = place_of(thread).y + i;
        matrix[i] = f32({element});
    }}
    return matrix;
}}
"
            );
            if !is_vector && !output.contains(&format!("var<workgroup> {name}: array<Half")) {
                let _ = write!(
                    output,
                    "
fn store_{name}_{suffix}(thread: u32, sums: Sums, at: u32, stride: u32) {{
    var matrix = sums;
    let row = place_of(thread).x;
    for (var i = 0u; i < sums_of(thread); i++) {{
        let column = place_of(thread).y + i;
        {element} = matrix[i];
    }}
}}
"
                );
            }
        }
    }
    let _ = write!(
        output,
        "
// Loops that a compiler does not unroll: there are many.
fn edge_of(thread: u32) -> u32 {{ return EDGE + (thread >> 16u); }}
fn sums_of(thread: u32) -> u32 {{ return EDGE * EDGE / 32u + (thread >> 16u); }}
// Row and first column of the thread's sums.
fn place_of(thread: u32) -> vec2<u32> {{
    let sharers = 32u / EDGE;
    return vec2<u32>(thread % 32u / sharers, thread % sharers * (EDGE / sharers));
}}
fn load_right(at: u32, stride: u32, source: u32, row: u32, column: u32) -> f32 {{
    switch (source) {{
{sources}        default: {{ return 0.0; }}
    }}
}}
fn multiply_add(thread: u32, left: Left, right: Right, sums: Sums) -> Sums {{
    var factors = left;
    var result = sums;
    for (var i = 0u; i < sums_of(thread); i++) {{
        for (var k = 0u; k < edge_of(thread); k++) {{
            result[i] += factors[k] * load_right(right.at, right.stride, right.source, k, place_of(thread).y + i);
        }}
    }}
    return result;
}}
"
    );
}
