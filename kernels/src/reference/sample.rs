//! Oracle of the device side of sampling: sorts everything, sums in f64. It does not draw.

use crate::ops::{Candidates, SampleRow};

/// What one row comes to; the first logit is that of token `first_token`.
pub fn sample(row: &SampleRow, first_token: u32, logits: &[f32]) -> Candidates {
    let raw: Vec<(u32, f32)> = (first_token..).zip(logits.iter().map(|logit| clean(*logit))).collect();
    let mut changed = raw.clone();
    for penalty in &row.penalties {
        for (_, logit) in changed.iter_mut().filter(|(id, _)| *id == penalty.token_id) {
            let scaled = if *logit > 0.0 { *logit / penalty.repetition } else { *logit * penalty.repetition };
            *logit = clean(scaled - penalty.subtract);
        }
    }
    Candidates {
        scaled_log_sum_exp: log_sum_exp(&changed, row.temperature),
        raw_log_sum_exp: log_sum_exp(&raw, 1.0),
        top: best(changed, row.top_k),
        raw_top: best(raw, row.raw_top_k),
        drawn: None,
    }
}

fn clean(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { logit }
}

fn best(mut candidates: Vec<(u32, f32)>, wanted: usize) -> Vec<(u32, f32)> {
    candidates.sort_by(|one, other| other.1.total_cmp(&one.1).then(one.0.cmp(&other.0)));
    candidates.truncate(wanted);
    candidates
}

fn log_sum_exp(candidates: &[(u32, f32)], temperature: f32) -> f32 {
    let scaled = |logit: f32| f64::from(logit) / f64::from(temperature);
    let largest = candidates.iter().map(|(_, logit)| scaled(*logit)).fold(f64::NEG_INFINITY, f64::max);
    if largest.is_infinite() {
        return largest as f32;
    }
    (largest + candidates.iter().map(|(_, logit)| (scaled(*logit) - largest).exp()).sum::<f64>().ln()) as f32
}
