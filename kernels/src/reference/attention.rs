//! Oracle of attention: the whole row of scores, then softmax, in f64.

use crate::ops::Attention;

/// Output `[num_tokens, num_heads, head_dim]` of the queries in `qkv`. `token(sequence, position, head)` gives the key
/// and the value `[head_dim]` as the cache holds them.
pub fn attention(
    call: &Attention<'_>,
    qkv: &[f32],
    token: impl Fn(usize, usize, usize) -> (Vec<f32>, Vec<f32>),
) -> Vec<f64> {
    let head_dim = call.head_dim;
    let width = (call.num_heads + 2 * call.num_key_value_heads) * head_dim;
    let mut rows = qkv.chunks_exact(width);
    let mut output = Vec::new();
    for (index, sequence) in call.sequences.iter().enumerate() {
        for (position, row) in (sequence.first_position..).zip(rows.by_ref().take(sequence.num_tokens)) {
            for (head, query) in row.chunks_exact(head_dim).take(call.num_heads).enumerate() {
                let key_value_head = (head + call.group_offset) / call.group_size;
                let tokens: Vec<_> = (0..=position).map(|key| token(index, key, key_value_head)).collect();
                let dot = |key: &[f32]| query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>();
                let scores: Vec<f64> = tokens.iter().map(|(key, _)| dot(key) * f64::from(call.scale)).collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
                let sum: f64 = weights.iter().sum();
                output.extend((0..head_dim).map(|element| {
                    let weighted = weights.iter().zip(&tokens).map(|(weight, (_, v))| weight * f64::from(v[element]));
                    weighted.sum::<f64>() / sum
                }));
            }
        }
    }
    output
}
