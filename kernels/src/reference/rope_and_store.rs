//! Oracle of the rotary embedding, in f64. What is stored is the rotated key and the value, rounded to f16.

use crate::ops::{RopeAndStore, RopeStyle, RopeTable};

/// `qkv` (whole rows) with queries and keys rotated.
pub fn rope(call: &RopeAndStore<'_>, table: &RopeTable, qkv: &[f32]) -> Vec<f64> {
    let mut output: Vec<f64> = qkv.iter().map(|value| f64::from(*value)).collect();
    let width = (call.num_heads + 2 * call.num_key_value_heads) * call.head_dim;
    for (row, position) in output.chunks_exact_mut(width).zip(call.positions) {
        for head in row.chunks_exact_mut(call.head_dim).take(call.num_heads + call.num_key_value_heads) {
            for (pair, frequency) in table.frequencies.iter().enumerate() {
                let (first, second) = match table.style {
                    RopeStyle::Interleaved => (2 * pair, 2 * pair + 1),
                    RopeStyle::Halves => (pair, pair + table.rotary_dim / 2),
                };
                let (sine, cosine) = (f64::from(*position) * f64::from(*frequency)).sin_cos();
                let (x, y) = (head[first], head[second]);
                head[first] = (x * cosine - y * sine) * f64::from(table.magnitude);
                head[second] = (x * sine + y * cosine) * f64::from(table.magnitude);
            }
        }
    }
    output
}
