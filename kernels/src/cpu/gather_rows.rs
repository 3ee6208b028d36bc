//! Copies the rows whose logits are wanted.
//! For: [`CpuDevice`](super::CpuDevice).
//! Invariant: a row outside the input is refused before anything is written.

use crate::KernelError;

/// `output[i] = input[rows[i]]`; rows are `width` values.
///
/// # Errors
/// [`KernelError::Shape`] if the output is too small, [`KernelError::OutOfRange`] for a row that the input lacks.
pub fn gather_rows(rows: &[u32], width: usize, input: &[f32], output: &mut [f32]) -> Result<(), KernelError> {
    let operation = "gather_rows";
    let num_rows = input.len().checked_div(width).unwrap_or(0);
    let expected = rows.len() * width;
    if output.len() < expected {
        return Err(KernelError::Shape { operation, what: "length of the output", got: output.len(), expected });
    }
    if let Some(row) = rows.iter().find(|row| **row as usize >= num_rows) {
        return Err(KernelError::OutOfRange { operation, what: "row", got: *row as usize, limit: num_rows });
    }
    if width > 0 {
        for (row, output) in rows.iter().zip(output.chunks_exact_mut(width)) {
            output.copy_from_slice(&input[*row as usize * width..][..width]);
        }
    }
    Ok(())
}
