//! Trait [`Peers`]: the other ranks that a rank meets inside a step, and [`Alone`], which has none.
//! For: whoever connects ranks; [`Executor`](crate::Executor) calls it at the same places of every step on every rank.
//! Invariant: all ranks of a group decide alike whether their devices or their hosts meet; a call of the other kind does
//! nothing.

use lockstep_kernels::{Device, KernelError, group::Sum};

use crate::ExecutorError;

/// What a rank does together with others. What is not said is what a rank does that has no others.
pub trait Peers<D: Device> {
    /// What it can fail at.
    type Error: From<ExecutorError> + From<KernelError>;

    /// Hosts exchange nothing from now on, or do again: the rank prepares alone.
    fn silence(&mut self, _are_silent: bool) {}

    /// Runs `body` with the way in which the tensor-parallel group adds up hidden rows.
    ///
    /// # Errors
    /// What `body` returns.
    fn with_sum<T>(
        &mut self,
        _num_tokens: usize,
        body: impl FnOnce(Sum<'_, D::Communicator, Self::Error>) -> Result<T, Self::Error>,
    ) -> Result<T, Self::Error> {
        body(Sum::Own)
    }

    /// Sums the first rows of `tensor` over the tensor-parallel group: the same bits on every rank.
    ///
    /// # Errors
    /// If another rank did not come in time, or the device fails.
    fn all_reduce(&mut self, _device: &mut D, _num_tokens: usize, _tensor: &mut D::Tensor) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Takes the hidden rows of the stage before where hosts hand them over: before the step, while threads sleep that
    /// compute within it. Other stages compute meanwhile, perhaps on this machine.
    ///
    /// # Errors
    /// If another rank did not come in time, or the device fails.
    fn receive_on_host(
        &mut self,
        _device: &mut D,
        _num_tokens: usize,
        _hidden: &mut D::Tensor,
    ) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Takes them where devices hand them over: within the step.
    ///
    /// # Errors
    /// If the device fails.
    fn receive_on_device(
        &mut self,
        _device: &mut D,
        _num_tokens: usize,
        _hidden: &mut D::Tensor,
    ) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Hands the hidden rows to the ranks of the stage after whose devices take them: within the step.
    ///
    /// # Errors
    /// If the device fails.
    fn send_on_device(
        &mut self,
        _device: &mut D,
        _num_tokens: usize,
        _hidden: &mut D::Tensor,
    ) -> Result<(), Self::Error> {
        Ok(())
    }

    /// Hands them to those whose hosts take them: after the step.
    ///
    /// # Errors
    /// If another rank did not come in time, or the device fails.
    fn send_on_host(
        &mut self,
        _device: &mut D,
        _num_tokens: usize,
        _hidden: &mut D::Tensor,
    ) -> Result<(), Self::Error> {
        Ok(())
    }
}

/// No others: the rank has the whole model.
#[derive(Clone, Copy, Debug)]
pub struct Alone;

impl<D: Device> Peers<D> for Alone {
    type Error = ExecutorError;
}
