//! Oracle of the matmul: float64 over dequantized weights.

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
    let mut results = Vec::new();
    for activations in input.chunks_exact(columns) {
        let mut products = Vec::new();
        for matrix in matrices {
            let row_bytes = matrix.bytes.len() / matrix.rows;
            let mut weights = vec![0.0_f32; columns];
            for row in matrix.bytes.chunks_exact(row_bytes) {
                dequantize(matrix.ggml_type, row, &mut weights);
                let terms =
                    weights.iter().zip(activations).map(|(weight, value)| f64::from(*weight) * f64::from(*value));
                products.push(terms.fold((0.0, 0.0), |(sum, size), term: f64| (sum + term, size + term.abs())));
            }
        }
        results.extend(finish(products, epilogue));
    }
    results
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
