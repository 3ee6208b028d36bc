//! Oracle of the RMS norm, in f64.

/// `input[t] / sqrt(mean(input[t]²) + epsilon) * weight`, rows of `weight.len()` values.
pub fn rms_norm(input: &[f32], weight: &[f32], epsilon: f32) -> Vec<f64> {
    let mut output = Vec::with_capacity(input.len());
    for row in input.chunks_exact(weight.len()) {
        let mean = row.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>() / row.len() as f64;
        let root = (mean + f64::from(epsilon)).sqrt();
        output.extend(row.iter().zip(weight).map(|(value, weight)| f64::from(*value) / root * f64::from(*weight)));
    }
    output
}
