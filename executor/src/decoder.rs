//! One decoder layer of the `llama` architecture on one rank: attention, then the gated feed-forward, each closed by
//! the sum of all ranks' products, which is added to the residual stream.
//! Invariant: before and after a layer `hidden` is the same on every rank of the tensor-parallel group, and but for
//! rare last bits the same as on one rank alone: on processors sums over columns, and over the ranks that share them, are
//! taken in f64 and rounded once. A last bit that differed would flip roundings of int8 activations and grow layer by
//! layer, as it does between GPUs.

use lockstep_kernels::{
    Device, KernelError,
    ops::{Attention, Epilogue, RopeAndStore, RopeTable},
};

use crate::{Batch, Peers, RankShape, weights::LayerWeights};

/// Activations of a rank, `[max_step_tokens, width]` each; every layer reuses them.
pub(crate) struct Activations<D: Device> {
    /// Residual stream, `hidden_size` wide.
    pub hidden: D::Tensor,
    /// Normalized stream, `hidden_size` wide.
    pub normed: D::Tensor,
    /// Queries, keys and values of the heads held here.
    pub qkv: D::Tensor,
    /// What attention yields for the query heads held here.
    pub attention: D::Tensor,
    /// Gated feed-forward columns held here.
    pub feed_forward: D::Tensor,
}

impl<D: Device> Activations<D> {
    /// Zeroed activations.
    pub fn new(device: &D, shape: &RankShape, max_step_tokens: usize) -> Result<Self, KernelError> {
        let tensor = |width| device.tensor(max_step_tokens, width);
        Ok(Self {
            hidden: tensor(shape.hidden_size)?,
            normed: tensor(shape.hidden_size)?,
            qkv: tensor(shape.qkv_size())?,
            attention: tensor(shape.num_heads * shape.head_dim)?,
            feed_forward: tensor(shape.intermediate_size)?,
        })
    }
}

/// What a step's layers share.
pub(crate) struct LayerContext<'a> {
    pub shape: &'a RankShape,
    pub rope: &'a RopeTable,
    pub batch: &'a Batch<'a>,
}

impl LayerContext<'_> {
    /// Runs layer number `layer`, counted from the first held here.
    pub fn run<D: Device, P: Peers<D>>(
        &self,
        device: &mut D,
        layer: usize,
        weights: &LayerWeights<D>,
        cache: &mut D::KvCache,
        activations: &mut Activations<D>,
        peers: &mut P,
    ) -> Result<(), P::Error> {
        self.attention(device, layer, weights, cache, activations, peers)?;
        self.feed_forward(device, weights, activations, peers)
    }

    fn attention<D: Device, P: Peers<D>>(
        &self,
        device: &mut D,
        layer: usize,
        weights: &LayerWeights<D>,
        cache: &mut D::KvCache,
        activations: &mut Activations<D>,
        peers: &mut P,
    ) -> Result<(), P::Error> {
        let Self { shape, rope, batch } = self;
        let num_tokens = batch.num_tokens();
        let Activations { hidden, normed, qkv, attention, .. } = activations;
        device.rms_norm(num_tokens, hidden, &weights.attention_norm, shape.rms_norm_eps, normed)?;
        device.matmul(num_tokens, &weights.qkv, normed, Epilogue::Store, qkv)?;
        let rope_and_store = RopeAndStore {
            num_heads: shape.num_heads,
            num_key_value_heads: shape.num_key_value_heads,
            head_dim: shape.head_dim,
            layer,
            positions: &batch.positions,
            slot_mapping: &batch.slot_mapping,
        };
        device.rope_and_store(&rope_and_store, rope, qkv, cache)?;
        let call = Attention {
            num_heads: shape.num_heads,
            num_key_value_heads: shape.num_key_value_heads,
            head_dim: shape.head_dim,
            group_size: shape.group_size,
            group_offset: shape.group_offset,
            scale: (shape.head_dim as f32).sqrt().recip(),
            layer,
            sequences: &batch.sequences,
        };
        device.attention(&call, qkv, cache, attention)?;
        self.add_product(device, &weights.attention_output, attention, hidden, peers)
    }

    fn feed_forward<D: Device, P: Peers<D>>(
        &self,
        device: &mut D,
        weights: &LayerWeights<D>,
        activations: &mut Activations<D>,
        peers: &mut P,
    ) -> Result<(), P::Error> {
        let num_tokens = self.batch.num_tokens();
        let Activations { hidden, normed, feed_forward, .. } = activations;
        device.rms_norm(num_tokens, hidden, &weights.feed_forward_norm, self.shape.rms_norm_eps, normed)?;
        device.matmul(num_tokens, &weights.gate_up, normed, Epilogue::SwiGlu, feed_forward)?;
        self.add_product(device, &weights.down, feed_forward, hidden, peers)
    }

    /// `hidden += input × weightᵀ`, summed over the ranks that share the columns.
    fn add_product<D: Device, P: Peers<D>>(
        &self,
        device: &mut D,
        weight: &D::Linear,
        input: &D::Tensor,
        hidden: &mut D::Tensor,
        peers: &mut P,
    ) -> Result<(), P::Error> {
        let num_tokens = self.batch.num_tokens();
        peers.with_sum(num_tokens, |sum| device.matmul_add(num_tokens, weight, input, hidden, sum))
    }
}
