//! Adds the reduced sums to the residual stream.
//! For: [`CpuDevice`](super::CpuDevice).
//! Invariant: each value is rounded to f32 once, after the sum over all columns of all ranks.

use super::Team;

/// `hidden = round(hidden + sums)` for rows of `width` values; equal lengths.
pub fn add_partial(team: &Team, sums: &[f64], width: usize, hidden: &mut [f32]) {
    team.for_rows(hidden, width, 1, &|row, hidden| {
        for (value, sum) in hidden.iter_mut().zip(&sums[row * width..]) {
            *value = (f64::from(*value) + sum) as f32;
        }
    });
}
