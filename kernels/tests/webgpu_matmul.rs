//! The WebGPU matmul and embedding against the float64 oracle: every type, shape and target, with subgroups and without.
#![cfg(feature = "webgpu")]
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

mod adapter;
mod blocks;

use blocks::random_matrix;
use lockstep_formats::GgmlType;
use lockstep_kernels::{
    Device, KernelError,
    group::Sum,
    ops::{Epilogue, HostMatrix},
    quant::dequantize,
    reference::matmul::{matmul, round_activations},
    webgpu::{
        WebGpuDevice,
        gpu::GpuOptions,
        matmul::{MAX_MATVEC_TOKENS, Shape},
    },
};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Against an oracle that gets the same 8-bit activations, relative to the sum of the absolute terms: f32 rounding, and
/// divisions by a driver that may be wrong by 2.5 units in the last place.
const ROUNDING: f64 = 2e-5;
/// Tensor cores multiply f16: a weight and an 8-bit activation with its scale are each rounded by up to 2^-11 of their size,
/// a product by 2^-10 and some 2^-22. Sums are f32 as everywhere.
const HALF: f64 = 1.0 / 1024.0 + 1e-6 + ROUNDING;
/// Against the exact activations, as for the CPU.
const QUANTIZATION: f64 = 2e-2;

fn random_values(len: usize, seed: u64) -> Vec<f32> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut value = || {
        let value = random.random_range(-1.0..1.0_f32);
        if random.random_bool(0.02) { value * 10.0 } else { value }
    };
    (0..len).map(|_| value()).collect()
}

fn check(what: &str, results: &[f32], expected: &[(f64, f64)], tolerance: f64) {
    assert_eq!(results.len(), expected.len(), "{what}");
    for (index, (result, (value, size))) in results.iter().zip(expected).enumerate() {
        let error = (f64::from(*result) - value).abs();
        assert!(error <= tolerance * size + 1e-30, "{what}: output {index} is {result}, expected {value} of {size}");
    }
}

fn check_all(device: &mut WebGpuDevice, matrices: &[HostMatrix], num_tokens: usize, epilogue: Epilogue) {
    let columns = matrices[0].columns;
    let rows = matrices.iter().map(|matrix| matrix.rows).sum::<usize>();
    let width = if epilogue == Epilogue::SwiGlu { rows / 2 } else { rows };
    let values = random_values(num_tokens * columns, 7 + num_tokens as u64);
    let linear = device.linear(matrices.to_vec()).unwrap();
    let input = adapter::tensor(device, columns, &values);
    let mut output = device.tensor(num_tokens, width).unwrap();
    device.matmul(num_tokens, &linear, &input, epilogue, &mut output).unwrap();
    let results = adapter::rows(device, num_tokens, &mut output);
    let types: Vec<_> = matrices.iter().map(|matrix| matrix.ggml_type).collect();
    let what = format!("{types:?} {rows}x{columns} {num_tokens} tokens {epilogue:?}");
    let exact = matmul(matrices, &values, epilogue);
    let is_plain = |ggml_type: &GgmlType| ggml_type.block_elements() == 1;
    if types.iter().all(is_plain) {
        return check(&what, &results, &exact, ROUNDING);
    }
    check(&what, &results, &exact, QUANTIZATION);
    if types.iter().any(is_plain) {
        return;
    }
    let rounded = round_activations(&values);
    let mut expected = matmul(matrices, &rounded, epilogue);
    let is_half = num_tokens > MAX_MATVEC_TOKENS && device.gpu().matrix_edge().is_some();
    if is_half && epilogue == Epilogue::SwiGlu {
        // With errors a of the gate and b of the up, the output is wrong by 1.1 a up + silu(gate) b, which the oracle's
        // size covers, and by 1.1 a b.
        let products = matmul(matrices, &rounded, Epilogue::Store);
        for (expected, products) in expected.chunks_exact_mut(width).zip(products.chunks_exact(2 * width)) {
            let (gates, ups) = products.split_at(width);
            for ((expected, gate), up) in expected.iter_mut().zip(gates).zip(ups) {
                expected.1 += 1.1 * HALF * gate.1 * up.1;
            }
        }
    }
    check(&what, &results, &expected, if is_half { HALF } else { ROUNDING });
}

/// A processor's adapter without subgroups has workgroups of its own; these are what a GPU has in a browser.
#[test]
fn wide_workgroups_without_subgroups_agree_with_the_oracle() {
    let mut device = adapter::open_with(GpuOptions { use_subgroups: false, ..GpuOptions::default() });
    for ggml_type in [GgmlType::Q4_1, GgmlType::Q6_K, GgmlType::F16] {
        for shape in Shape::ALL {
            device.gpu().choose_matvec_shape(Some(shape));
            let matrix = random_matrix(ggml_type, 34, 2 * ggml_type.block_elements().max(32), 5);
            for (tokens, epilogue) in [(1, Epilogue::Store), (3, Epilogue::SwiGlu)] {
                check_all(&mut device, std::slice::from_ref(&matrix), tokens, epilogue);
            }
        }
    }
}

#[test]
fn every_type_and_shape_agrees_with_the_oracle() {
    for mut device in adapter::open_both() {
        for ggml_type in GgmlType::all() {
            let block = ggml_type.block_elements();
            for (tokens, rows, blocks) in
                [(1, 1, 1), (1, 33, 3), (2, 16, 2), (3, 7, 5), (5, 33, 2), (17, 50, 3), (70, 131, 2)]
            {
                let columns = if block == 1 { blocks * 37 } else { blocks * block };
                let matrix = random_matrix(ggml_type, rows, columns, rows as u64);
                check_all(&mut device, &[matrix], tokens, Epilogue::Store);
            }
        }
    }
}

fn stacks() -> [Vec<HostMatrix>; 3] {
    let matrix = |ggml_type, rows| random_matrix(ggml_type, rows, 512, rows as u64 + 1);
    [
        vec![matrix(GgmlType::Q4_K, 40), matrix(GgmlType::Q6_K, 24), matrix(GgmlType::Q8_0, 5)],
        vec![matrix(GgmlType::Q4_1, 40), matrix(GgmlType::F16, 24)],
        vec![
            matrix(GgmlType::Q4_K, 40),
            matrix(GgmlType::Q4_K, 24),
            matrix(GgmlType::Q8_0, 5),
            matrix(GgmlType::Q8_1, 3),
        ],
    ]
}

#[test]
fn epilogues_and_stacks_agree_with_the_oracle() {
    let matrix = |ggml_type, rows| random_matrix(ggml_type, rows, 512, rows as u64 + 1);
    let pairs = [
        vec![matrix(GgmlType::Q4_1, 64)],
        vec![matrix(GgmlType::Q4_K, 40), matrix(GgmlType::Q4_K, 40)],
        vec![matrix(GgmlType::Q5_0, 23), matrix(GgmlType::Q4_0, 23)],
        vec![matrix(GgmlType::Q5_0, 10), matrix(GgmlType::Q4_0, 20)],
        vec![matrix(GgmlType::F16, 20)],
    ];
    for mut device in adapter::open_both() {
        for tokens in [1, 6, 19, 66] {
            for matrices in &stacks() {
                check_all(&mut device, matrices, tokens, Epilogue::Store);
            }
            for matrices in &pairs {
                check_all(&mut device, matrices, tokens, Epilogue::SwiGlu);
            }
        }
    }
}

/// SwiGLU makes the 8-bit blocks that a matmul has asked for in its own dispatch: those of the rows that it leaves.
#[test]
fn blocks_are_made_with_the_products() {
    let cases = [(GgmlType::Q4_K, 1), (GgmlType::Q4_0, 3), (GgmlType::Q6_K, MAX_MATVEC_TOKENS)];
    for (shape, (ggml_type, tokens)) in Shape::BLOCKS.into_iter().flat_map(|shape| cases.map(|case| (shape, case))) {
        let mut device = adapter::open_with(GpuOptions { blocks_shape: Some(shape), ..GpuOptions::default() });
        if shape.threads > device.gpu().limits().max_compute_invocations_per_workgroup {
            continue;
        }
        let (gate_up, down) = (random_matrix(ggml_type, 192, 512, 3), random_matrix(GgmlType::Q8_0, 40, 96, 4));
        let values = random_values(tokens * 512, 11);
        let layers = [&gate_up, &down].map(|matrix| device.linear(vec![matrix.clone()]).unwrap());
        let input = adapter::tensor(&mut device, 512, &values);
        let [mut gated, mut output] = [96, 40].map(|width| device.tensor(tokens, width).unwrap());
        device.matmul(tokens, &layers[1], &gated, Epilogue::Store, &mut output).unwrap();
        let before = device.commands().last_dispatch();
        device.matmul(tokens, &layers[0], &input, Epilogue::SwiGlu, &mut gated).unwrap();
        device.matmul(tokens, &layers[1], &gated, Epilogue::Store, &mut output).unwrap();
        // The blocks of the input, and two products.
        assert_eq!(device.commands().last_dispatch() - before, 3);
        let results = adapter::rows(&mut device, tokens, &mut output);
        let rows = adapter::rows(&mut device, tokens, &mut gated);
        let expected = matmul(&[gate_up], &round_activations(&values), Epilogue::SwiGlu);
        check(&format!("{ggml_type}, rows"), &rows, &expected, ROUNDING);
        let expected = matmul(&[down], &round_activations(&rows), Epilogue::Store);
        check(&format!("{ggml_type}, blocks"), &results, &expected, ROUNDING);
    }
}

#[test]
fn products_agree_with_subgroups_of_four() {
    adapter::run_with_subgroups_of_four(&[
        "blocks_are_made_with_the_products",
        "embeddings_are_the_dequantized_rows",
        "layers_larger_than_a_binding_are_split",
        "products_are_added_to_the_stream_over_all_ranks",
    ]);
}

/// The shaders for tensor cores, with what stands in for these.
#[test]
fn products_of_matrices_agree_with_the_oracle() {
    for edge in adapter::matrices::EDGES {
        let mut device = adapter::open_with(adapter::matrices::stand_in(edge));
        // The other types are unpacked as for other shaders; compiling one takes seconds.
        for (ggml_type, tokens, rows) in [(GgmlType::Q4_1, 9, 131), (GgmlType::Q6_K, 131, 17)] {
            let columns = 3 * ggml_type.block_elements();
            check_all(&mut device, &[random_matrix(ggml_type, rows, columns, 5)], tokens, Epilogue::Store);
        }
        let matrix = |ggml_type, rows| random_matrix(ggml_type, rows, 512, rows as u64 + 1);
        check_all(&mut device, &[matrix(GgmlType::Q4_K, 70), matrix(GgmlType::Q4_K, 70)], 40, Epilogue::SwiGlu);
    }
}

/// A layer larger than a binding is cut into parts of whole rows, and computes what it would in one.
#[test]
fn layers_larger_than_a_binding_are_split() {
    let mut device = adapter::open_with(GpuOptions { max_binding_bytes: 80 << 10, ..GpuOptions::default() });
    let matrix = random_matrix(GgmlType::Q4_K, 1000, 512, 3);
    let table = device.linear(vec![matrix.clone()]).unwrap();
    assert!(table.parts().len() > 3, "{}", table.parts().len());
    for tokens in [1, 5, 12] {
        check_all(&mut device, std::slice::from_ref(&matrix), tokens, Epilogue::Store);
        check_all(&mut device, &[random_matrix(GgmlType::Q6_K, 400, 512, 4)], tokens, Epilogue::SwiGlu);
    }
    let mut output = device.tensor(3, 512).unwrap();
    device.embed(&table, 0, &[0, 999, 500], &mut output).unwrap();
    let rows = adapter::rows(&mut device, 3, &mut output);
    for (id, row) in [0, 999, 500].into_iter().zip(rows.chunks_exact(512)) {
        let mut expected = vec![0.0; 512];
        dequantize(GgmlType::Q4_K, &matrix.bytes[id * 288..][..288], &mut expected);
        check(
            "embed",
            row,
            &expected.iter().map(|value| (f64::from(*value), f64::from(value.abs()) + 1.0)).collect::<Vec<_>>(),
            1e-6,
        );
    }
}

#[test]
fn products_are_added_to_the_stream_over_all_ranks() {
    for mut device in adapter::open_both() {
        let matrix = random_matrix(GgmlType::Q4_K, 37, 512, 3);
        let linear = device.linear(vec![matrix.clone()]).unwrap();
        let (values, stream) = (random_values(5 * 512, 4), random_values(5 * 37, 5));
        let input = adapter::tensor(&mut device, 512, &values);
        let products = matmul(&[matrix], &round_activations(&values), Epilogue::Store);
        for num_ranks in [1, 2] {
            let mut hidden = adapter::tensor(&mut device, 37, &stream);
            let mut double = |sums: &mut [f64]| {
                sums.iter_mut().for_each(|sum| *sum *= 2.0);
                Ok::<_, KernelError>(())
            };
            let sum = if num_ranks == 1 { Sum::Own } else { Sum::Hosts(&mut double) };
            device.matmul_add(5, &linear, &input, &mut hidden, sum).unwrap();
            let expected: Vec<_> = products
                .iter()
                .zip(&stream)
                .map(|((product, size), value)| {
                    (
                        product * f64::from(num_ranks) + f64::from(*value),
                        f64::from(num_ranks) * size + f64::from(value.abs()),
                    )
                })
                .collect();
            check(&format!("{num_ranks} ranks"), &adapter::rows(&mut device, 5, &mut hidden), &expected, ROUNDING);
        }
    }
}

#[test]
fn embeddings_are_the_dequantized_rows() {
    let [mut device, _] = adapter::open_both();
    for ggml_type in GgmlType::all() {
        let matrices = vec![random_matrix(ggml_type, 37, 256, 1), random_matrix(GgmlType::Q8_0, 3, 256, 2)];
        let table = device.linear(matrices.clone()).unwrap();
        let ids = [100, 136, 99, 137, 139, 140, 115, 116, 124, u32::MAX, 0];
        let mut output = adapter::tensor(&mut device, 256, &vec![9.0; ids.len() * 256]);
        device.embed(&table, 100, &ids, &mut output).unwrap();
        let rows = adapter::rows(&mut device, ids.len(), &mut output);
        for (id, values) in ids.iter().zip(rows.chunks_exact(256)) {
            let mut expected = vec![0.0; 256];
            let row = (*id as usize).wrapping_sub(100);
            let (matrix, row) = if row < 37 { (&matrices[0], row) } else { (&matrices[1], row.wrapping_sub(37)) };
            if row < matrix.rows {
                let row_bytes = matrix.bytes.len() / matrix.rows;
                dequantize(matrix.ggml_type, &matrix.bytes[row * row_bytes..][..row_bytes], &mut expected);
            }
            // A driver may round a product and a sum once instead of twice.
            for (got, want) in values.iter().zip(&expected) {
                assert!((got - want).abs() <= 2e-7 * (1.0 + want.abs()), "{ggml_type} id {id}: {got} {want}");
            }
        }
    }
}

#[test]
fn wrong_shapes_are_refused() {
    let [mut device, _] = adapter::open_both();
    let matrix = || random_matrix(GgmlType::Q4_0, 3, 64, 1);
    for matrices in [
        vec![],
        vec![matrix(), random_matrix(GgmlType::Q4_0, 3, 32, 1)],
        vec![HostMatrix { columns: 48, ..matrix() }],
        vec![HostMatrix { rows: 4, ..matrix() }],
        vec![HostMatrix { rows: usize::MAX, ..matrix() }],
    ] {
        assert!(matches!(device.linear(matrices), Err(KernelError::Shape { .. })));
    }
    let linear = device.linear(vec![matrix()]).unwrap();
    let (input, narrow) = (device.tensor(2, 64).unwrap(), device.tensor(2, 32).unwrap());
    let mut output = device.tensor(2, 3).unwrap();
    assert!(device.matmul(3, &linear, &input, Epilogue::Store, &mut output).is_err());
    assert!(device.matmul(1, &linear, &narrow, Epilogue::Store, &mut output).is_err());
    assert!(device.matmul(1, &linear, &input, Epilogue::SwiGlu, &mut output).is_err());
    assert!(device.embed(&linear, 0, &[0], &mut output).is_err());
    assert!(device.matmul(0, &linear, &input, Epilogue::Store, &mut output).is_ok());
    assert!(device.matmul(2, &linear, &input, Epilogue::Store, &mut output).is_ok());
}
