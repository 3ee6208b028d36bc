//! The matmul and the embedding of the CUDA device against the float64 oracle: every type, shape and target.
//!
//! Inputs are random, by a seed that each test prints. Tolerances are relative to the sum of the absolute terms of an
//! output. Against an oracle that gets the same 8-bit activations only f32 rounding remains: 1e-5. Tensor cores multiply
//! weights that were rounded to f16: `half_rounding`.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, missing_docs, reason = "a failure is what a test reports")]

mod blocks;
mod gpu;
mod tiles;

use std::sync::Arc;

use blocks::{random_matrix, shrink};
use half::{bf16, f16};
use lockstep_formats::GgmlType;
use lockstep_kernels::{
    cuda::{
        Activations, Forms, Gpu, HalfType, StepInputs,
        matmul::{CudaLinear, EmbedCall, Matmul, MatmulCall, Target},
    },
    ops::{Epilogue, HostMatrix},
    quant::dequantize,
    reference::matmul::{finish, matmul, round_activations},
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use tiles::tiles_of;

const ROUNDING: f64 = 1e-5;
/// What rounding to f16 changes, at most, relative to the value.
const HALF_EPSILON: f64 = 1.0 / 2048.0;
/// Products of a launch in a large layer where tests are to be small.
const MOST_FEW_PRODUCTS: usize = 1 << 23;
/// More tokens than this have f16 products (of f16 weights) where they are not added up any further.
const MAX_EXACT_TOKENS: usize = 128;

/// What f16 changes of a sum, relative to its absolute terms. A weight is `quant * scale + min` in one step, of which the
/// scale was rounded before: twice `HALF_EPSILON`. A minimum was rounded too, and may be larger than the weight that it is
/// part of: no bound holds for all blocks, twice as much holds for random ones. Activations are given as f16.
fn half_rounding(matrices: &[HostMatrix], num_tokens: usize) -> f64 {
    let has_minimum = |matrix: &HostMatrix| {
        use GgmlType::{Q2_K, Q4_1, Q4_K, Q5_1, Q5_K};
        matches!(matrix.ggml_type, Q4_1 | Q5_1 | Q2_K | Q4_K | Q5_K)
    };
    let of_weights = if matrices.iter().any(has_minimum) { 4.0 } else { 2.0 };
    let of_products = if num_tokens > MAX_EXACT_TOKENS { 1.0 } else { 0.0 };
    (of_weights + of_products) * HALF_EPSILON
}

/// Says with what the test can be repeated.
fn fresh_seed() -> u64 {
    let seed = rand::rng().random();
    println!("{}: seed {seed}", std::thread::current().name().unwrap_or_default());
    seed
}

/// Random activations, some of them large as real ones are.
fn random_values(len: usize, seed: u64) -> Vec<f32> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut value = || {
        let value = random.random_range(-1.0..1.0_f32);
        if random.random_bool(0.02) { value * 10.0 } else { value }
    };
    (0..len).map(|_| value()).collect()
}

/// What f16 cannot hold becomes its largest number.
fn halves_of(values: &[f32], half_type: HalfType) -> Vec<u16> {
    let largest = f16::MAX.to_f32();
    let convert = |value: &f32| match half_type {
        HalfType::F16 => f16::from_f32(value.clamp(-largest, largest)).to_bits(),
        HalfType::BF16 => bf16::from_f32(*value).to_bits(),
    };
    values.iter().map(convert).collect()
}

/// Activations on the GPU in the forms that a layer wants.
fn activations(gpu: &Arc<Gpu>, values: &[f32], columns: usize, forms: Forms) -> Activations {
    Activations {
        columns,
        tiles: forms.tiles.then(|| Arc::new(gpu::upload(gpu, &tiles_of(values, columns)))),
        halves: forms.halves.map(|kind| (kind, Arc::new(gpu::upload(gpu, &halves_of(values, kind))))),
        values: forms.values.then(|| Arc::new(gpu::upload(gpu, values))),
    }
}

/// What the activations of those forms stand for.
fn rounded(values: &[f32], forms: Forms) -> Vec<f32> {
    match forms {
        Forms { tiles: true, .. } => round_activations(values),
        Forms { halves: Some(HalfType::F16), .. } => {
            values.iter().map(|value| f16::from_f32(*value).to_f32()).collect()
        }
        Forms { halves: Some(HalfType::BF16), .. } => {
            values.iter().map(|value| bf16::from_f32(*value).to_f32()).collect()
        }
        _ => values.to_vec(),
    }
}

/// The form that weights of this type read, of those that a stack of several types wants.
fn read_by(ggml_type: GgmlType, forms: Forms) -> Forms {
    let own = match ggml_type {
        GgmlType::F32 => None,
        GgmlType::F16 => Some(HalfType::F16),
        GgmlType::BF16 => Some(HalfType::BF16),
        _ if forms.tiles => return Forms { tiles: true, ..Forms::default() },
        _ => Some(HalfType::F16),
    };
    Forms { halves: own.filter(|_| own == forms.halves), ..Forms::default() }
}

/// The oracle's outputs, every matrix multiplied with what it reads.
fn expect(matrices: &[HostMatrix], input: &[f32], forms: Forms, epilogue: Epilogue) -> Vec<(f64, f64)> {
    let product = |matrix: &HostMatrix| {
        let products =
            matmul(std::slice::from_ref(matrix), &rounded(input, read_by(matrix.ggml_type, forms)), Epilogue::Store);
        (matrix.rows, products)
    };
    let products: Vec<_> = matrices.iter().map(product).collect();
    let of_token = |token: usize| {
        let rows = products.iter().flat_map(|(rows, products)| &products[token * rows..][..*rows]);
        finish(rows.copied().collect(), epilogue)
    };
    (0..input.len() / matrices[0].columns).flat_map(of_token).collect()
}

fn check(what: &str, results: &[f32], expected: &[(f64, f64)], tolerance: f64) {
    assert_eq!(results.len(), expected.len(), "{what}");
    let mut worst = (0.0, String::new());
    for (index, (result, (value, size))) in results.iter().zip(expected).enumerate() {
        let error = (f64::from(*result) - value).abs() / (size + 1e-30);
        if error.is_nan() || error > worst.0 {
            worst = (error, format!("output {index} is {result}, expected {value} of {size}"));
        }
    }
    assert!(worst.0 <= tolerance, "{what}: {} ({:e})", worst.1, worst.0);
}

struct Case<'a> {
    gpu: &'a Arc<Gpu>,
    matrices: &'a [HostMatrix],
    num_tokens: usize,
    seed: u64,
}

impl Case<'_> {
    fn run(&self, target: Target) {
        let Self { gpu, matrices, num_tokens, seed } = *self;
        let columns = matrices[0].columns;
        let linear = CudaLinear::new(gpu, matrices.to_vec()).unwrap();
        let types: Vec<_> = matrices.iter().map(|matrix| matrix.ggml_type).collect();
        let what = format!("{types:?} {}x{columns} {num_tokens} tokens {target:?}", linear.rows());
        let input = random_values(num_tokens * columns, seed.rotate_left(32));
        let forms = linear.input_forms(num_tokens);
        let width = if target == Target::SwiGlu { linear.rows() / 2 } else { linear.rows() };
        let residual = random_values(num_tokens * width, !seed);
        let before = if target == Target::Add { residual.clone() } else { vec![f32::NAN; num_tokens * width] };
        let mut output = activations(gpu, &before, width, Forms { values: true, ..Forms::default() });
        if target != Target::Add {
            let mut others = Forms { halves: Some(HalfType::F16), ..Forms::default() };
            others.tiles = target == Target::SwiGlu && width.is_multiple_of(32);
            let others = Activations::zeroed(gpu, num_tokens, width, others).unwrap();
            (output.tiles, output.halves) = (others.tiles, others.halves);
        }
        let weight = Arc::new(linear);
        let input_on_gpu = activations(gpu, &input, columns, forms);
        let call = MatmulCall { num_tokens, weight, input: input_on_gpu, target, output: output.clone() };
        Matmul::new(gpu).unwrap().launch(&call).unwrap();
        let results: Vec<f32> = gpu::download(output.values.as_ref().unwrap(), num_tokens * width);
        let epilogue = if target == Target::SwiGlu { Epilogue::SwiGlu } else { Epilogue::Store };
        let mut expected = expect(matrices, &input, forms, epilogue);
        if target == Target::Add {
            expected.iter_mut().zip(&residual).for_each(|((value, size), before)| {
                *value += f64::from(*before);
                *size += f64::from(before.abs());
            });
        }
        let is_half = num_tokens > 1 && forms.halves.is_some();
        let tolerance = if is_half { half_rounding(matrices, num_tokens) } else { ROUNDING };
        if is_half && target == Target::SwiGlu {
            // With errors a of the gate and b of the up, each at most the tolerance times its size, silu(gate + a) is
            // silu(gate) + 1.1 a at most, and the output is wrong by 1.1 a up + silu(gate) b, which the oracle's size
            // covers, and by 1.1 a b, which counts where gate and up both nearly cancel.
            let products = expect(matrices, &input, forms, Epilogue::Store);
            for (expected, products) in expected.chunks_exact_mut(width).zip(products.chunks_exact(2 * width)) {
                let (gates, ups) = products.split_at(width);
                for ((expected, gate), up) in expected.iter_mut().zip(gates).zip(ups) {
                    expected.1 += 1.1 * tolerance * gate.1 * up.1;
                }
            }
        }
        check(&what, &results, &expected, tolerance);
        if let Some((_, halves)) = &output.halves {
            let halves: Vec<u16> = gpu::download(halves, num_tokens * width);
            assert!(halves == halves_of(&results, HalfType::F16), "{what}: halves");
        }
        if let Some(tiles) = &output.tiles {
            let tiles: Vec<u8> = gpu::download(tiles, tiles.num_bytes());
            assert!(tiles == tiles_of(&results, width), "{what}: tiles");
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn every_type_and_shape_agrees_with_the_oracle() {
    let seed = fresh_seed();
    gpu::side_by_side(GgmlType::all(), |gpu, ggml_type| {
        let block = ggml_type.block_elements();
        for (num_tokens, rows, blocks) in gpu::cases([
            (1, 1, 1),
            (1, 33, 3),
            (1, 70, 40),
            (2, 16, 2),
            (3, 7, 1),
            (4, 20, 9),
            (5, 33, 2),
            (8, 16, 5),
            (9, 40, 17),
            (17, 50, 3),
            (33, 129, 2),
            (64, 17, 2),
            (130, 136, 7),
            (300, 41, 3),
            (1030, 41, 3),
        ]) {
            let columns = if block == 1 { blocks * 37 } else { blocks * block };
            let matrices = [random_matrix(ggml_type, rows, columns, seed)];
            Case { gpu, matrices: &matrices, num_tokens, seed }.run(Target::Store);
            if block == 1 {
                let matrices = [random_matrix(ggml_type, rows, 8 * blocks, seed)];
                Case { gpu, matrices: &matrices, num_tokens, seed }.run(Target::Add);
            }
        }
    });
}

/// Shapes of real layers, of which different numbers of rows and columns are launched differently.
#[test]
#[ignore = "needs a CUDA GPU"]
fn large_layers_agree_with_the_oracle() {
    let seed = fresh_seed();
    let few_or = |few, usual| if gpu::is_few() { few } else { usual };
    let layers = [
        (GgmlType::Q4_K, 64, few_or(3584, 14336)),
        (GgmlType::Q6_K, 64, 14336),
        (GgmlType::Q3_K, 64, 14336),
        (GgmlType::Q4_K, 9800, few_or(256, 512)),
        (GgmlType::Q8_0, 4096, 1056),
        (GgmlType::BF16, 4096, 1024),
    ];
    gpu::side_by_side(gpu::cases(layers), |gpu, (ggml_type, rows, columns)| {
        let matrices = [random_matrix(ggml_type, rows, columns, seed)];
        let is_tested = |num_tokens: &usize| !gpu::is_few() || num_tokens * rows * columns <= MOST_FEW_PRODUCTS;
        for num_tokens in gpu::cases([1, 2, 8, 20, 100, 130]).filter(is_tested) {
            Case { gpu, matrices: &matrices, num_tokens, seed }.run(Target::Store);
            Case { gpu, matrices: &matrices, num_tokens, seed }.run(Target::SwiGlu);
        }
    });
}

/// Scales that lie where f16 has few bits lose none of them.
#[test]
#[ignore = "needs a CUDA GPU"]
fn small_weights_agree_with_the_oracle() {
    let seed = fresh_seed();
    gpu::side_by_side(gpu::cases(GgmlType::all().filter(|kind| kind.block_elements() > 1)), |gpu, ggml_type| {
        let small = |rows, factor| {
            let mut matrix = random_matrix(ggml_type, rows, 512, seed.wrapping_add(rows as u64));
            shrink(&mut matrix, factor);
            matrix
        };
        let matrices = [small(40, 1.0 / 1024.0), small(24, 1.0 / 256.0)];
        for num_tokens in gpu::cases([1, 8, 40, 1050]) {
            Case { gpu, matrices: &matrices, num_tokens, seed }.run(Target::Store);
            Case { gpu, matrices: &matrices[..1], num_tokens, seed }.run(Target::SwiGlu);
        }
    });
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn targets_and_stacks_agree_with_the_oracle() {
    let seed = fresh_seed();
    let matrix = |ggml_type, rows| random_matrix(ggml_type, rows, 512, seed.wrapping_add(rows as u64));
    let stacks = [
        vec![matrix(GgmlType::Q4_K, 40), matrix(GgmlType::Q6_K, 24), matrix(GgmlType::Q8_0, 5)],
        GgmlType::all().filter(|kind| kind.block_elements() > 1).map(|kind| matrix(kind, 9)).collect(),
        vec![matrix(GgmlType::F16, 40), matrix(GgmlType::BF16, 24)],
        vec![matrix(GgmlType::Q4_1, 40), matrix(GgmlType::F16, 24)],
        vec![matrix(GgmlType::BF16, 16), matrix(GgmlType::Q6_K, 8), matrix(GgmlType::F32, 24)],
    ];
    let pairs = [
        vec![matrix(GgmlType::Q4_1, 64)],
        vec![matrix(GgmlType::Q4_1, 40)],
        vec![matrix(GgmlType::Q2_K, 48), matrix(GgmlType::Q3_K, 48)],
        vec![matrix(GgmlType::Q4_K, 160), matrix(GgmlType::Q6_K, 160)],
        vec![matrix(GgmlType::Q4_K, 320), matrix(GgmlType::Q4_K, 320)],
        vec![matrix(GgmlType::Q5_0, 23), matrix(GgmlType::Q4_0, 23)],
        vec![matrix(GgmlType::Q5_0, 10), matrix(GgmlType::Q4_0, 20)],
        vec![matrix(GgmlType::BF16, 96), matrix(GgmlType::BF16, 96)],
        vec![matrix(GgmlType::F32, 33), matrix(GgmlType::F32, 33)],
        vec![matrix(GgmlType::Q8_0, 32), matrix(GgmlType::Q2_K, 32)],
        vec![matrix(GgmlType::F16, 64), matrix(GgmlType::BF16, 64)],
        vec![matrix(GgmlType::Q4_1, 32), matrix(GgmlType::F16, 32)],
    ];
    gpu::side_by_side(gpu::cases([1, 2, 6, 19, 150, 1050]), |gpu, num_tokens| {
        for matrices in &stacks {
            Case { gpu, matrices, num_tokens, seed }.run(Target::Store);
            Case { gpu, matrices, num_tokens, seed }.run(Target::Add);
        }
        for matrices in &pairs {
            Case { gpu, matrices, num_tokens, seed }.run(Target::SwiGlu);
        }
    });
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn embeddings_are_the_dequantized_rows() {
    let seed = fresh_seed();
    let gpu = &gpu::open();
    for ggml_type in GgmlType::all() {
        let matrices = vec![random_matrix(ggml_type, 37, 4352, seed), random_matrix(GgmlType::Q8_0, 3, 4352, !seed)];
        let table = Arc::new(CudaLinear::new(gpu, matrices.clone()).unwrap());
        let ids = [100, 136, 99, 137, 139, 140, 115, 116, 124, u32::MAX, 0];
        let output = Arc::new(gpu::upload(gpu, &vec![9.0_f32; ids.len() * 4352]));
        let mut inputs = StepInputs::new(gpu).unwrap();
        let token_ids = inputs.stage(&ids).unwrap();
        inputs.send().unwrap();
        let call = EmbedCall { num_tokens: ids.len(), table, first_row: 100, token_ids, output: output.clone() };
        Matmul::new(gpu).unwrap().embed(&call).unwrap();
        let got: Vec<f32> = gpu::download(&output, ids.len() * 4352);
        for (id, values) in ids.iter().zip(got.chunks_exact(4352)) {
            let mut expected = vec![0.0; 4352];
            let row = (*id as usize).wrapping_sub(100);
            let (matrix, row) = if row < 37 { (&matrices[0], row) } else { (&matrices[1], row.wrapping_sub(37)) };
            if row < matrix.rows {
                let row_bytes = matrix.bytes.len() / matrix.rows;
                dequantize(matrix.ggml_type, &matrix.bytes[row * row_bytes..][..row_bytes], &mut expected);
            }
            assert_eq!(values, expected, "{ggml_type} id {id}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn wrong_shapes_are_refused() {
    let gpu = &gpu::open();
    let matrix = || random_matrix(GgmlType::Q4_0, 3, 64, 1);
    assert!(CudaLinear::new(gpu, vec![]).is_err());
    assert!(CudaLinear::new(gpu, vec![matrix(), random_matrix(GgmlType::Q4_0, 3, 32, 1)]).is_err());
    assert!(CudaLinear::new(gpu, vec![HostMatrix { columns: 48, ..matrix() }]).is_err());
    assert!(CudaLinear::new(gpu, vec![HostMatrix { rows: 4, ..matrix() }]).is_err());
    assert!(CudaLinear::new(gpu, vec![HostMatrix { rows: usize::MAX, ..matrix() }]).is_err());
    let weight = Arc::new(CudaLinear::new(gpu, vec![matrix()]).unwrap());
    let values = Forms { values: true, ..Forms::default() };
    let forms = weight.input_forms(1);
    let zeroed = |columns, forms| Activations::zeroed(gpu, 2, columns, forms).unwrap();
    let call =
        |num_tokens, input, target, output| MatmulCall { num_tokens, weight: weight.clone(), input, target, output };
    let matmul = Matmul::new(gpu).unwrap();
    for (is_right, call) in [
        (false, call(3, zeroed(64, forms), Target::Store, zeroed(3, values))),
        (false, call(1, zeroed(32, forms), Target::Store, zeroed(3, values))),
        (false, call(1, zeroed(64, values), Target::Store, zeroed(3, values))),
        (false, call(1, zeroed(64, forms), Target::SwiGlu, zeroed(3, values))),
        (false, call(1, zeroed(64, forms), Target::Store, zeroed(4, values))),
        (false, call(1, zeroed(64, forms), Target::Add, zeroed(3, Forms::default()))),
        (true, call(0, zeroed(64, forms), Target::Store, zeroed(3, values))),
        (true, call(2, zeroed(64, forms), Target::Store, zeroed(3, values))),
    ] {
        assert_eq!(matmul.launch(&call).is_ok(), is_right, "{call:?}");
    }
    let mut inputs = StepInputs::new(gpu).unwrap();
    let token_ids = inputs.stage(&[0_u32]).unwrap();
    let call = |num_tokens, len: usize| EmbedCall {
        num_tokens,
        table: weight.clone(),
        first_row: 0,
        token_ids: token_ids.clone(),
        output: Arc::new(gpu::upload(gpu, &vec![0.0_f32; len])),
    };
    assert!(matmul.embed(&call(1, 63)).is_err());
    assert!(matmul.embed(&call(2, 128)).is_err());
    assert!(matmul.embed(&call(1, 64)).is_ok());
}
