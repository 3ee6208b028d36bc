//! Oracle of the matmul: float64 over dequantized weights.

use rayon::prelude::*;

use crate::{
    ops::{Epilogue, HostMatrix},
    quant::{ACTIVATION_BLOCK, dequantize, quantize_block},
};

/// Activations as an integer backend sees them: quantized to 8 bits in blocks of 32, and back.
pub fn round_activations(input: &[f32]) -> Vec<f32> {
    let rounded = input.as_chunks::<ACTIVATION_BLOCK>().0.iter().flat_map(|block| {
        let (scale, quants) = quantize_block(block);
        quants.map(|quant| scale * f32::from(quant))
    });
    rounded.collect()
}

/// `epilogue(input × weightᵀ)` for `input` `[num_tokens, columns]`.
/// Beside each output comes the sum of the absolute values of its terms, to which rounding errors are in proportion.
pub fn matmul(matrices: &[HostMatrix], input: &[f32], epilogue: Epilogue) -> Vec<(f64, f64)> {
    let columns = matrices[0].columns;
    // The products of one row of weights with every token.
    let products_of = |ggml_type, row: &[u8]| -> Vec<(f64, f64)> {
        let mut weights = vec![0.0_f32; columns];
        dequantize(ggml_type, row, &mut weights);
        let product = |activations: &[f32]| {
            let terms = weights.iter().zip(activations).map(|(weight, value)| f64::from(*weight) * f64::from(*value));
            terms.fold((0.0, 0.0), |(sum, size), term: f64| (sum + term, size + term.abs()))
        };
        input.chunks_exact(columns).map(product).collect()
    };
    let rows: Vec<Vec<(f64, f64)>> = matrices
        .iter()
        .flat_map(|matrix| {
            let rows = matrix.bytes.par_chunks_exact(matrix.bytes.len() / matrix.rows);
            rows.map(|row| products_of(matrix.ggml_type, row)).collect::<Vec<_>>()
        })
        .collect();
    let of_token = |token: usize| finish(rows.iter().map(|products| products[token]).collect(), epilogue);
    (0..input.len() / columns).flat_map(of_token).collect()
}

/// What the epilogue makes of the products of one token.
pub fn finish(products: Vec<(f64, f64)>, epilogue: Epilogue) -> Vec<(f64, f64)> {
    match epilogue {
        Epilogue::Store => products,
        Epilogue::SwiGlu => {
            let (gate, up) = products.split_at(products.len() / 2);
            // |silu'| is at most 1.1 and |silu(x)| at most |x|.
            let finish = |((gate, gate_size), (up, up_size)): (&(f64, f64), &(f64, f64))| {
                (gate / (1.0 + (-gate).exp()) * up, 1.1 * gate_size * up.abs() + gate.abs() * up_size)
            };
            gate.iter().zip(up).map(finish).collect()
        }
    }
}
