//! From the hidden rows of the last stage to the logits of each sampled token, on this rank's part of the vocabulary.
//! Not here: reducing them to candidates (the device), merging the parts and choosing a token (the leader).

use lockstep_kernels::{
    Device, KernelError,
    ops::{Epilogue, SampleRow},
};

use crate::{Batch, RankShape};

/// Buffers of the output head, one row for each sampled token.
pub(crate) struct LogitBuffers<D: Device> {
    gathered: D::Tensor,
    normed: D::Tensor,
    logits: D::Tensor,
}

/// The logits of a step, on the device.
pub struct Logits<'a, D: Device> {
    /// How each row is to be reduced; there may be none.
    pub rows: &'a [SampleRow],
    /// The token of the first column.
    pub first_token: u32,
    /// `[rows.len(), rows of the vocabulary held here]`
    pub values: &'a mut D::Tensor,
}

impl<D: Device> LogitBuffers<D> {
    /// Zeroed buffers for so many sampled tokens.
    pub fn new(device: &D, shape: &RankShape, max_num_sequences: usize) -> Result<Self, KernelError> {
        Ok(Self {
            gathered: device.tensor(max_num_sequences, shape.hidden_size)?,
            normed: device.tensor(max_num_sequences, shape.hidden_size)?,
            logits: device.tensor(max_num_sequences, shape.vocabulary.len())?,
        })
    }

    /// Logits of each sampled row of the batch.
    pub fn compute<'a>(
        &'a mut self,
        device: &mut D,
        shape: &RankShape,
        batch: &'a Batch<'_>,
        norm: &D::Tensor,
        head: &D::Linear,
        hidden: &D::Tensor,
    ) -> Result<Logits<'a, D>, KernelError> {
        let num_rows = batch.sampled_rows.len();
        if num_rows > 0 {
            device.gather_rows(&batch.sampled_rows, hidden, &mut self.gathered)?;
            device.rms_norm(num_rows, &self.gathered, norm, shape.rms_norm_eps, &mut self.normed)?;
            device.matmul(num_rows, head, &self.normed, Epilogue::Store, &mut self.logits)?;
        }
        Ok(Logits { rows: &batch.samples, first_token: shape.vocabulary.start as u32, values: &mut self.logits })
    }
}
