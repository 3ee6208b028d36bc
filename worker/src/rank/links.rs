//! The other ranks that a rank meets inside a step.

use crate::WorkerError;

/// Links of one rank: its tensor-parallel group, the stage before and the stage after.
pub struct RankLinks {}

impl RankLinks {
    /// Sums `values` over the tensor-parallel group: the same bits on every rank.
    ///
    /// # Errors
    /// [`WorkerError::Link`] naming the rank that did not come in time.
    pub fn all_reduce_sum(&mut self, _values: &mut [f32]) -> Result<(), WorkerError> {
        Ok(())
    }

    /// Takes the hidden rows of the stage before.
    ///
    /// # Errors
    /// [`WorkerError::Link`].
    pub fn receive(&mut self, _values: &mut [f32]) -> Result<(), WorkerError> {
        Ok(())
    }

    /// Hands the hidden rows to the stage after.
    ///
    /// # Errors
    /// [`WorkerError::Link`].
    pub fn send(&mut self, _values: &[f32]) -> Result<(), WorkerError> {
        Ok(())
    }
}
