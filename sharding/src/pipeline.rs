//! Cuts the layers over pipeline stages.
//! Invariant: contiguous ranges that partition the layers, none empty; the slowest stage is as fast as possible.

use std::ops::Range;

use crate::{ModelShape, PlanError, TensorRole};

/// Bytes that a decode step reads of each layer, and of the output head.
pub(crate) struct LayerBytes {
    pub layers: Vec<u64>,
    pub head: u64,
}

impl LayerBytes {
    pub fn of(shape: &ModelShape) -> Self {
        let mut layers = vec![0; shape.num_hidden_layers];
        for tensor in &shape.tensors {
            if let Some(layer) = tensor.layer.and_then(|layer| layers.get_mut(layer)) {
                *layer += tensor.bytes();
            }
        }
        let output = shape.tensor(TensorRole::Output, None).or(shape.tensor(TensorRole::TokenEmbedding, None));
        Self { layers, head: output.map_or(0, crate::TensorShape::bytes) }
    }
}

/// Layers by stage, for stages of relative speeds `speeds`: minimises the slowest stage's time, by dynamic programming.
///
/// # Errors
/// [`PlanError::Degree`] if there are more stages than layers.
pub(crate) fn split_layers(bytes: &LayerBytes, speeds: &[f64]) -> Result<Vec<Range<usize>>, PlanError> {
    let num_layers = bytes.layers.len();
    let num_stages = speeds.len();
    if num_stages > num_layers {
        return Err(PlanError::Degree {
            degree: "pipeline_parallel_size",
            asked: num_stages,
            possible: num_layers,
            parts: "layers".to_owned(),
            cause: String::new(),
        });
    }
    let mut before = vec![0u64];
    for layer in &bytes.layers {
        before.push(before[before.len() - 1] + layer);
    }
    // `table[stage][end]`: slowest time and start of the last stage, with `end` layers on `stage` stages.
    let mut table = vec![vec![None; num_layers + 1]; num_stages + 1];
    table[0][0] = Some((0.0, 0));
    for (stage, speed) in speeds.iter().enumerate() {
        let is_last = stage + 1 == num_stages;
        let head = if is_last { bytes.head } else { 0 };
        for end in stage + 1..=num_layers - (num_stages - stage - 1) {
            let cuts = (stage..end).filter_map(|start| {
                let (slowest, _): (f64, usize) = table[stage][start]?;
                Some((slowest.max((before[end] - before[start] + head) as f64 / speed), start))
            });
            // Of equal cuts the one whose last stage is shortest: the last stage also samples.
            table[stage + 1][end] = cuts.min_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
        }
    }
    let mut ranges = Vec::with_capacity(num_stages);
    let mut end = num_layers;
    for row in table.iter().skip(1).rev() {
        let start = row[end].map_or(0, |(_, start)| start);
        ranges.push(start..end);
        end = start;
    }
    ranges.reverse();
    Ok(ranges)
}
