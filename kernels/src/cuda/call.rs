//! Every launch that a forward step can be made of.
//! For: [`Steps`](super::step::Steps), which collects, compares and records them.
//! Invariant: a call holds all that decides its launch and shares the memory that it touches; equal calls are equal
//! launches.

use std::sync::Arc;

use super::{
    CollectiveCall, CudaCommunicator, Gpu,
    add::{Add, AddCall},
    attention::{Attention, AttentionCall},
    convert::{Convert, ConvertCall},
    gather_rows::{GatherRows, GatherRowsCall},
    matmul::{Matmul, MatmulCall, embed::EmbedCall},
    rms_norm::{RmsNorm, RmsNormCall},
    rope_and_store::{CudaRope, CudaRopeAndStore, RopeAndStoreCall},
    sample::{Sample, SampleCall},
};
use crate::KernelError;

/// A launch.
#[derive(Debug, PartialEq)]
pub(super) enum Call {
    Add(AddCall),
    Attention(AttentionCall),
    Collective(CollectiveCall),
    Convert(ConvertCall),
    Embed(EmbedCall),
    /// Rotation, store and attention in one, of one token a sequence.
    FusedAttention(AttentionCall, CudaRope),
    GatherRows(GatherRowsCall),
    Matmul(MatmulCall),
    RmsNorm(RmsNormCall),
    RopeAndStore(RopeAndStoreCall),
    Sample(SampleCall),
    /// A sum over ranks and the norm of it in one.
    SumAndNorm(CollectiveCall, RmsNormCall),
}

/// The launcher of every operation.
pub(super) struct Launchers {
    pub add: Add,
    pub attention: Attention,
    pub convert: Convert,
    pub gather_rows: GatherRows,
    pub matmul: Matmul,
    pub rms_norm: RmsNorm,
    pub rope_and_store: CudaRopeAndStore,
    pub sample: Sample,
}

impl Launchers {
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, KernelError> {
        Ok(Self {
            add: Add::new(gpu),
            attention: Attention::new(gpu)?,
            convert: Convert::new(gpu)?,
            gather_rows: GatherRows::new(gpu)?,
            matmul: Matmul::new(gpu)?,
            rms_norm: RmsNorm::new(gpu),
            rope_and_store: CudaRopeAndStore::new(gpu),
            sample: Sample::new(gpu)?,
        })
    }

    pub fn launch(&self, call: &Call) -> Result<(), KernelError> {
        match call {
            Call::Add(call) => self.add.launch(call),
            Call::Attention(call) => self.attention.launch(call),
            Call::Collective(call) => CudaCommunicator::launch(call),
            Call::Convert(call) => self.convert.launch(call),
            Call::Embed(call) => self.matmul.embed(call),
            Call::FusedAttention(call, rope) => self.attention.launch_fused(call, rope),
            // SAFETY: the device checks the rows before it makes the call.
            Call::GatherRows(call) => unsafe { self.gather_rows.launch(call) },
            Call::Matmul(call) => self.matmul.launch(call),
            Call::RmsNorm(call) => self.rms_norm.launch(call),
            Call::RopeAndStore(call) => self.rope_and_store.launch(call),
            Call::Sample(call) => self.sample.launch(call),
            Call::SumAndNorm(call, norm) => CudaCommunicator::launch_with_norm(call, norm),
        }
    }
}
