//! A rank's slices of the checkpoint, on its device.
//! Invariant: only the rectangles that the plan gives this rank are read, each once.
//! Not here: which rectangle that is (`ReplicaPlan::slice`), how it is repacked (the device).

use std::ops::ControlFlow;

use lockstep_formats::GgmlType;
use lockstep_kernels::{Device, ops::HostMatrix};
use lockstep_model::Checkpoint;
use lockstep_sharding::{ReplicaPlan, TensorRole, TensorShape, TensorSlice};

use crate::{ExecutorError, RankShape};

/// Everything that a rank multiplies with.
pub struct Weights<D: Device> {
    /// First stage (and the last, if it shares the table as output head): rows of the token embedding.
    pub(crate) embedding: Option<D::Linear>,
    /// Layers of the stage, in order.
    pub(crate) layers: Vec<LayerWeights<D>>,
    /// Last stage.
    pub(crate) output: Option<OutputWeights<D>>,
}

/// One layer.
pub(crate) struct LayerWeights<D: Device> {
    pub attention_norm: D::Tensor,
    /// Query, key and value rows of the heads held here.
    pub qkv: D::Linear,
    pub attention_output: D::Linear,
    pub feed_forward_norm: D::Tensor,
    /// Gate rows, then up rows.
    pub gate_up: D::Linear,
    pub down: D::Linear,
}

/// What turns hidden rows into logits.
pub(crate) struct OutputWeights<D: Device> {
    pub norm: D::Tensor,
    /// `None`: the embedding that this rank holds already.
    pub head: Option<D::Linear>,
}

/// Reads the slices of one rank.
pub struct WeightLoader<'a, D: Device> {
    /// Where they go.
    pub device: &'a D,
    /// Where they come from.
    pub checkpoint: &'a Checkpoint,
    /// Cut of the replica.
    pub plan: &'a ReplicaPlan,
    /// The rank's part.
    pub shape: &'a RankShape,
    /// Called with the bytes of each slice that was read; may end the load.
    pub progress: &'a dyn Fn(u64) -> ControlFlow<()>,
}

impl<D: Device> WeightLoader<'_, D> {
    /// Bytes that [`load`](Self::load) will read.
    pub fn total_bytes(&self) -> u64 {
        self.loaded_tensors().map(|(tensor, slice)| slice_bytes(tensor, &slice)).sum()
    }

    /// Reads and repacks every slice.
    ///
    /// # Errors
    /// [`ExecutorError::Model`] if the file cannot be read, [`ExecutorError::Mismatch`] if a tensor or its slice is missing,
    /// [`ExecutorError::Kernel`] if the device refuses it, [`ExecutorError::LoadEnded`] if `progress` says so.
    pub fn load(&self) -> Result<Weights<D>, ExecutorError> {
        use TensorRole::{Output, OutputNorm, TokenEmbedding};
        let is_tied = self.checkpoint.shape().has_tied_embeddings();
        let (is_first, is_last) = (self.shape.is_first_stage(), self.shape.is_last_stage());
        let embedding = (is_first || (is_last && is_tied)).then(|| self.linear(None, &[TokenEmbedding])).transpose()?;
        let mut layers = Vec::with_capacity(self.shape.layers.len());
        for layer in self.shape.layers.clone() {
            layers.push(self.layer(layer)?);
        }
        let output = if is_last {
            let head = (!is_tied).then(|| self.linear(None, &[Output])).transpose()?;
            Some(OutputWeights { norm: self.vector(None, OutputNorm)?, head })
        } else {
            None
        };
        Ok(Weights { embedding, layers, output })
    }

    fn layer(&self, layer: usize) -> Result<LayerWeights<D>, ExecutorError> {
        use TensorRole::{AttentionNorm, AttentionOutput, Down, FeedForwardNorm, Gate, Key, Query, Up, Value};
        Ok(LayerWeights {
            attention_norm: self.vector(Some(layer), AttentionNorm)?,
            qkv: self.linear(Some(layer), &[Query, Key, Value])?,
            attention_output: self.linear(Some(layer), &[AttentionOutput])?,
            feed_forward_norm: self.vector(Some(layer), FeedForwardNorm)?,
            gate_up: self.linear(Some(layer), &[Gate, Up])?,
            down: self.linear(Some(layer), &[Down])?,
        })
    }

    /// Tensors of the checkpoint that this rank loads; rotary frequencies come with the configuration.
    fn loaded_tensors(&self) -> impl Iterator<Item = (&TensorShape, TensorSlice)> {
        let shape = self.checkpoint.shape();
        shape
            .tensors
            .iter()
            .filter(|tensor| tensor.role != TensorRole::RopeFrequencies)
            .filter_map(|tensor| Some((tensor, self.plan.slice(shape, tensor, self.shape.rank)?)))
    }

    fn linear(&self, layer: Option<usize>, roles: &[TensorRole]) -> Result<D::Linear, ExecutorError> {
        let matrices = roles.iter().map(|role| self.matrix(layer, *role)).collect::<Result<Vec<_>, _>>()?;
        Ok(self.device.linear(matrices)?)
    }

    fn vector(&self, layer: Option<usize>, role: TensorRole) -> Result<D::Tensor, ExecutorError> {
        let matrix = self.matrix(layer, role)?;
        Ok(self.device.vector(&to_f32(&matrix, role)?)?)
    }

    fn matrix(&self, layer: Option<usize>, role: TensorRole) -> Result<HostMatrix, ExecutorError> {
        let place = || layer.map_or_else(|| format!("{role:?}"), |layer| format!("{role:?} of layer {layer}"));
        let shape = self.checkpoint.shape();
        let tensor =
            shape.tensor(role, layer).ok_or_else(|| ExecutorError::Mismatch(format!("{} is missing", place())))?;
        let slice = self
            .plan
            .slice(shape, tensor, self.shape.rank)
            .ok_or_else(|| ExecutorError::Mismatch(format!("it gives rank {} no {}", self.shape.rank, place())))?;
        let bytes = self.checkpoint.read_slice(role, layer, slice.rows.clone(), slice.columns.clone())?;
        if (self.progress)(bytes.len() as u64).is_break() {
            return Err(ExecutorError::LoadEnded);
        }
        Ok(HostMatrix { ggml_type: tensor.ggml_type, rows: slice.rows.len(), columns: slice.columns.len(), bytes })
    }
}

fn slice_bytes(tensor: &TensorShape, slice: &TensorSlice) -> u64 {
    slice.rows.len() as u64 * tensor.ggml_type.bytes_of(slice.columns.len()).unwrap_or(0) as u64
}

/// The values of a norm's weight.
fn to_f32(matrix: &HostMatrix, role: TensorRole) -> Result<Vec<f32>, ExecutorError> {
    let bytes = &matrix.bytes;
    let halves = || bytes.as_chunks::<2>().0.iter();
    match matrix.ggml_type {
        GgmlType::F32 => Ok(bytes.as_chunks::<4>().0.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect()),
        GgmlType::F16 => Ok(halves().map(|chunk| half::f16::from_le_bytes(*chunk).to_f32()).collect()),
        GgmlType::BF16 => Ok(halves().map(|chunk| half::bf16::from_le_bytes(*chunk).to_f32()).collect()),
        other => Err(ExecutorError::Mismatch(format!("{role:?} is of type {other}, expected F32, F16 or BF16"))),
    }
}
