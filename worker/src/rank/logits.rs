//! From the hidden rows of the last stage to the candidates of each sampled token, on this rank's part of the vocabulary.
//! Not here: merging the parts and choosing a token (the leader).

use lockstep_kernels::{
    Device,
    ops::{Candidates, Epilogue},
};

use super::{Batch, RankShape};
use crate::WorkerError;

/// Buffers of the output head, one row for each sampled token.
pub(super) struct LogitBuffers<D: Device> {
    gathered: D::Tensor,
    normed: D::Tensor,
    logits: D::Tensor,
}

impl<D: Device> LogitBuffers<D> {
    /// Zeroed buffers for so many sampled tokens.
    pub fn new(device: &D, shape: &RankShape, max_num_sequences: usize) -> Result<Self, WorkerError> {
        Ok(Self {
            gathered: device.tensor(max_num_sequences, shape.hidden_size)?,
            normed: device.tensor(max_num_sequences, shape.hidden_size)?,
            logits: device.tensor(max_num_sequences, shape.vocabulary.len())?,
        })
    }

    /// Candidates of each sampled row of the batch.
    pub fn candidates(
        &mut self,
        device: &mut D,
        shape: &RankShape,
        batch: &Batch<'_>,
        norm: &D::Tensor,
        head: &D::Linear,
        hidden: &D::Tensor,
    ) -> Result<Vec<Candidates>, WorkerError> {
        let num_rows = batch.sampled_rows.len();
        if num_rows == 0 {
            return Ok(Vec::new());
        }
        device.gather_rows(&batch.sampled_rows, hidden, &mut self.gathered)?;
        device.rms_norm(num_rows, &self.gathered, norm, shape.rms_norm_eps, &mut self.normed)?;
        device.matmul(num_rows, head, &self.normed, Epilogue::Store, &mut self.logits)?;
        Ok(device.sample(&batch.samples, shape.vocabulary.start as u32, &mut self.logits)?)
    }
}
