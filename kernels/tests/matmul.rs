//! The CPU matmul and embedding against the float64 oracle: every type, level, shape and epilogue.
//!
//! Two tolerances, both relative to the sum of the absolute terms of an output. Against an oracle that gets the same
//! quantized activations only f32 rounding remains: 1e-5. Against the exact activations their quantization is included:
//! half a step of 1/127 of the block's largest value for each term, at worst 1/254 of that for all; 2e-2 covers blocks
//! whose typical value is a fifth of the largest.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod blocks;

use std::ops::Range;

use blocks::random_matrix;
use lockstep_formats::GgmlType;
use lockstep_kernels::{
    Device, KernelError,
    cpu::{CpuDevice, CpuTensor, Level},
    group::Sum,
    ops::{Epilogue, HostMatrix},
    quant::dequantize,
    reference::matmul::{matmul, round_activations},
};
use rand::{Rng, SeedableRng, rngs::StdRng};

const ROUNDING: f64 = 1e-5;
const QUANTIZATION: f64 = 2e-2;

/// Random activations, some of them large as real ones are.
fn random_values(len: usize, seed: u64) -> Vec<f32> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut value = || {
        let value = random.random_range(-1.0..1.0_f32);
        if random.random_bool(0.02) { value * 10.0 } else { value }
    };
    (0..len).map(|_| value()).collect()
}

fn is_plain(ggml_type: GgmlType) -> bool {
    ggml_type.block_elements() == 1
}

fn tensor(device: &CpuDevice, width: usize, values: &[f32]) -> CpuTensor {
    let mut tensor = device.tensor(values.len() / width, width).unwrap();
    tensor.values_mut().copy_from_slice(values);
    tensor
}

/// The device's result.
fn run(device: &mut CpuDevice, matrices: &[HostMatrix], input: &[f32], epilogue: Epilogue) -> Vec<f32> {
    let linear = device.linear(matrices.to_vec()).unwrap();
    let rows = matrices.iter().map(|matrix| matrix.rows).sum::<usize>();
    let width = if epilogue == Epilogue::SwiGlu { rows / 2 } else { rows };
    let columns = matrices[0].columns;
    let input = tensor(device, columns, input);
    let num_tokens = input.max_tokens();
    let mut output = device.tensor(num_tokens, width).unwrap();
    device
        .step(|device| device.matmul(num_tokens, &linear, &input, epilogue, &mut output))
        .map(|()| output.values().to_vec())
        .unwrap()
}

fn check(what: &str, results: &[f32], expected: &[(f64, f64)], tolerance: f64) {
    assert_eq!(results.len(), expected.len(), "{what}");
    for (index, (result, (value, size))) in results.iter().zip(expected).enumerate() {
        let error = (f64::from(*result) - value).abs();
        assert!(error <= tolerance * size + 1e-30, "{what}: output {index} is {result}, expected {value} of {size}");
    }
}

fn check_all(device: &mut CpuDevice, level: Level, matrices: &[HostMatrix], num_tokens: usize, epilogue: Epilogue) {
    let columns = matrices[0].columns;
    let rows = matrices.iter().map(|matrix| matrix.rows).sum::<usize>();
    let input = random_values(num_tokens * columns, 7 + num_tokens as u64);
    let results = run(device, matrices, &input, epilogue);
    let types: Vec<_> = matrices.iter().map(|matrix| matrix.ggml_type).collect();
    let what = format!("{types:?} {} {rows}x{columns} {num_tokens} tokens {epilogue:?}", level.name());
    let exact = matmul(matrices, &input, epilogue);
    if types.iter().all(|ggml_type| is_plain(*ggml_type)) {
        return check(&what, &results, &exact, ROUNDING);
    }
    check(&what, &results, &exact, QUANTIZATION);
    if types.iter().all(|ggml_type| !is_plain(*ggml_type)) {
        check(&what, &results, &matmul(matrices, &round_activations(&input), epilogue), ROUNDING);
    }
}

#[test]
fn every_type_level_and_shape_agrees_with_the_oracle() {
    for level in Level::supported() {
        let mut device = CpuDevice::with_level(2, level).unwrap();
        for ggml_type in GgmlType::all() {
            let block = ggml_type.block_elements();
            for (tokens, rows, blocks) in [
                (1, 1, 1),
                (1, 33, 3),
                (2, 16, 2),
                (3, 7, 1),
                (4, 20, 1),
                (5, 33, 2),
                (8, 16, 1),
                (17, 50, 3),
                (64, 17, 2),
            ] {
                let columns = if block == 1 { blocks * 37 } else { blocks * block };
                let matrix = random_matrix(ggml_type, rows, columns, rows as u64);
                check_all(&mut device, level, &[matrix], tokens, Epilogue::Store);
            }
        }
    }
}

#[test]
fn epilogues_and_stacks_agree_with_the_oracle() {
    for level in Level::supported() {
        let mut device = CpuDevice::with_level(3, level).unwrap();
        let matrix = |ggml_type, rows| random_matrix(ggml_type, rows, 512, rows as u64 + 1);
        for tokens in [1, 6, 19] {
            let mixed = [matrix(GgmlType::Q4_K, 40), matrix(GgmlType::Q6_K, 24), matrix(GgmlType::Q8_0, 5)];
            check_all(&mut device, level, &mixed, tokens, Epilogue::Store);
            let half_plain = [matrix(GgmlType::Q4_1, 40), matrix(GgmlType::F16, 24)];
            check_all(&mut device, level, &half_plain, tokens, Epilogue::Store);
            for matrices in [
                vec![matrix(GgmlType::Q4_1, 64)],
                vec![matrix(GgmlType::Q4_1, 40)],
                vec![matrix(GgmlType::Q5_0, 23), matrix(GgmlType::Q4_0, 23)],
                vec![matrix(GgmlType::Q5_0, 10), matrix(GgmlType::Q4_0, 20)],
            ] {
                check_all(&mut device, level, &matrices, tokens, Epilogue::SwiGlu);
            }
        }
    }
}

/// A token's outputs are the same bits alone, in any batch, and with any number of threads.
#[test]
fn batches_and_threads_change_no_bit() {
    for level in Level::supported() {
        let mut devices: Vec<_> = [1, 2, 3].map(|threads| CpuDevice::with_level(threads, level).unwrap()).into();
        for ggml_type in GgmlType::all() {
            let matrices = [random_matrix(ggml_type, 70, 512, 3), random_matrix(ggml_type, 70, 512, 4)];
            for epilogue in [Epilogue::Store, Epilogue::SwiGlu] {
                let input = random_values(21 * 512, 5);
                let mut alone = Vec::new();
                for token in input.chunks_exact(512) {
                    alone.extend(run(&mut devices[0], &matrices, token, epilogue));
                }
                for (device, num_tokens) in devices.iter_mut().zip([21, 7, 20]) {
                    let input = &input[..num_tokens * 512];
                    let batch = run(device, &matrices, input, epilogue);
                    assert!(
                        batch.iter().zip(&alone).all(|(left, right)| left.to_bits() == right.to_bits()),
                        "{ggml_type} {} {num_tokens} tokens",
                        level.name()
                    );
                }
            }
        }
    }
}

/// Columns `columns` of a matrix.
fn cut(matrix: &HostMatrix, columns: Range<usize>) -> HostMatrix {
    let bytes_of = |columns| matrix.ggml_type.bytes_of(columns).unwrap();
    let rows = matrix.bytes.chunks_exact(bytes_of(matrix.columns));
    let bytes = rows.flat_map(|row| &row[bytes_of(columns.start)..bytes_of(columns.end)]).copied().collect();
    HostMatrix { columns: columns.len(), bytes, ..matrix.clone() }
}

/// The device's share of the product that columns `columns` give.
fn share(device: &mut CpuDevice, matrix: &HostMatrix, input: &[f32], columns: Range<usize>) -> Vec<f64> {
    let linear = device.linear(vec![cut(matrix, columns.clone())]).unwrap();
    let rows = input.chunks_exact(matrix.columns);
    let values: Vec<f32> = rows.flat_map(|row| &row[columns.clone()]).copied().collect();
    let input = tensor(device, columns.len(), &values);
    let mut hidden = device.tensor(input.max_tokens(), matrix.rows).unwrap();
    let mut share = Vec::new();
    let mut keep = |sums: &mut [f64]| {
        share.extend_from_slice(sums);
        Ok::<_, KernelError>(())
    };
    device.matmul_add(input.max_tokens(), &linear, &input, &mut hidden, Sum::Hosts(&mut keep)).unwrap();
    share
}

/// Ranks that hold parts of the columns add up to the same bits as one that holds all, alone and in batches.
#[test]
fn cuts_of_the_columns_change_no_bit_of_the_stream() {
    const COLUMNS: usize = 1280;
    for level in Level::supported() {
        let mut device = CpuDevice::with_level(2, level).unwrap();
        for ggml_type in GgmlType::all() {
            let matrix = random_matrix(ggml_type, 37, COLUMNS, 3);
            let input = random_values(13 * COLUMNS, 5);
            let stream = random_values(13 * 37, 6);
            let block = ggml_type.sum_columns();
            let whole = share(&mut device, &matrix, &input, 0..COLUMNS);
            let exact = matmul(std::slice::from_ref(&matrix), &input, Epilogue::Store);
            let what = format!("{ggml_type} {}", level.name());
            let products: Vec<f32> = whole.iter().map(|value| *value as f32).collect();
            check(&what, &products, &exact, QUANTIZATION);
            let alone = share(&mut device, &matrix, &input[..COLUMNS], 0..COLUMNS);
            assert_eq!(alone, &whole[..37], "{what}: batches");
            let expected: Vec<f32> =
                stream.iter().zip(&whole).map(|(value, sum)| (f64::from(*value) + sum) as f32).collect();
            for num_ranks in 1..=5 {
                let columns = |rank: usize| {
                    let bound = |rank: usize| COLUMNS / block * rank / num_ranks * block;
                    bound(rank)..bound(rank + 1)
                };
                let shares: Vec<_> =
                    (1..num_ranks).map(|rank| share(&mut device, &matrix, &input, columns(rank))).collect();
                let mut all_reduce = |sums: &mut [f64]| {
                    for share in &shares {
                        sums.iter_mut().zip(share).for_each(|(sum, value)| *sum += value);
                    }
                    Ok::<_, KernelError>(())
                };
                let linear = device.linear(vec![cut(&matrix, columns(0))]).unwrap();
                let own: Vec<f32> = input.chunks_exact(COLUMNS).flat_map(|row| &row[columns(0)]).copied().collect();
                let own = tensor(&device, columns(0).len(), &own);
                let mut hidden = tensor(&device, 37, &stream);
                let others = if num_ranks > 1 { Sum::Hosts(&mut all_reduce) } else { Sum::Own };
                device.matmul_add(13, &linear, &own, &mut hidden, others).unwrap();
                assert_eq!(hidden.values(), expected, "{what}: {num_ranks} ranks");
            }
        }
    }
}

#[test]
fn embeddings_are_the_dequantized_rows() {
    for level in Level::supported() {
        let mut device = CpuDevice::with_level(2, level).unwrap();
        for ggml_type in GgmlType::all() {
            let matrices = vec![random_matrix(ggml_type, 37, 256, 1), random_matrix(GgmlType::Q8_0, 3, 256, 2)];
            let table = device.linear(matrices.clone()).unwrap();
            let ids = [100, 136, 99, 137, 139, 140, 115, 116, 124, u32::MAX, 0];
            let mut output = tensor(&device, 256, &vec![9.0; ids.len() * 256]);
            device.embed(&table, 100, &ids, &mut output).unwrap();
            for (id, values) in ids.iter().zip(output.values().chunks_exact(256)) {
                let mut expected = vec![0.0; 256];
                let row = (*id as usize).wrapping_sub(100);
                let (matrix, row) = if row < 37 { (&matrices[0], row) } else { (&matrices[1], row.wrapping_sub(37)) };
                if row < matrix.rows {
                    let row_bytes = matrix.bytes.len() / matrix.rows;
                    dequantize(matrix.ggml_type, &matrix.bytes[row * row_bytes..][..row_bytes], &mut expected);
                }
                assert_eq!(values, expected, "{ggml_type} {} id {id}", level.name());
            }
        }
    }
}

#[test]
fn wrong_shapes_are_refused() {
    let mut device = CpuDevice::new(1).unwrap();
    let matrix = || random_matrix(GgmlType::Q4_0, 3, 64, 1);
    let refuses = |matrices| matches!(device.linear(matrices), Err(KernelError::Shape { .. }));
    assert!(refuses(vec![]));
    assert!(refuses(vec![matrix(), random_matrix(GgmlType::Q4_0, 3, 32, 1)]));
    assert!(refuses(vec![HostMatrix { columns: 48, ..matrix() }]));
    assert!(refuses(vec![HostMatrix { rows: 4, ..matrix() }]));
    assert!(refuses(vec![HostMatrix { rows: usize::MAX, ..matrix() }]));
    let linear = device.linear(vec![matrix()]).unwrap();
    let input = device.tensor(2, 64).unwrap();
    let narrow = device.tensor(2, 32).unwrap();
    let mut output = device.tensor(2, 3).unwrap();
    assert!(device.matmul(3, &linear, &input, Epilogue::Store, &mut output).is_err());
    assert!(device.matmul(1, &linear, &narrow, Epilogue::Store, &mut output).is_err());
    assert!(device.matmul(1, &linear, &input, Epilogue::SwiGlu, &mut output).is_err());
    let mut wide = device.tensor(2, 4).unwrap();
    let mut add = |num_tokens, input: &CpuTensor, hidden: &mut CpuTensor| {
        device.matmul_add::<KernelError>(num_tokens, &linear, input, hidden, Sum::Own)
    };
    assert!(add(3, &input, &mut output).is_err());
    assert!(add(1, &narrow, &mut output).is_err());
    assert!(add(2, &input, &mut wide).is_err());
    assert!(add(2, &input, &mut output).is_ok());
    assert!(device.embed(&linear, 0, &[0], &mut output).is_err());
    assert!(device.matmul(0, &linear, &input, Epilogue::Store, &mut output).is_ok());
    assert!(device.matmul(2, &linear, &input, Epilogue::Store, &mut output).is_ok());
}
