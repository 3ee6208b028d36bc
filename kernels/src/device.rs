//! Trait `Device`: the operations that a fast backend fuses, not tensor algebra.
//! For: the executor of a rank, which is written once and generic over it.
//! Invariant: a device belongs to one OS thread; calls execute in order; outputs may be read after `step` returns.

use lockstep_formats::{Dtype, PeerLink};

use crate::{
    KernelError,
    group::{Collective, Exchange, Group, NO_OFFER, Sum},
    ops::{Attention, Candidates, Epilogue, HostMatrix, RopeAndStore, RopeTable, SampleRow},
};

/// What a device can do, for reports.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Abilities {
    /// What it can do beyond the least, by name.
    pub features: Vec<String>,
    /// Its limits, by name.
    pub limits: Vec<(String, u64)>,
}

/// What a device is, for reports and for planning.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceInfo {
    /// Kind and model, such as `cpu AMD EPYC (2 threads, avx512-vnni)`.
    pub name: String,
    /// Memory that weights, KV blocks and activations may use.
    pub memory_bytes: u64,
    /// What is free of the machine's memory, if that is where it takes its own, as other devices do.
    pub host_memory_bytes: Option<u64>,
    /// Sustained memory read bandwidth (measured briefly at start).
    pub memory_bytes_per_second: f64,
    /// Sustained rate of quantized matmul, two operations per multiply-add (measured briefly at start).
    pub operations_per_second: f64,
    /// What joins it with other devices of its host, if they exchange values without their processes.
    pub peer_link: Option<PeerLink>,
    /// What it can do.
    pub abilities: Abilities,
}

/// Memory that operations take for the time of a step, beside tensors, weights and KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scratch {
    /// Taken now.
    pub used_bytes: usize,
    /// Most that was ever taken at a time.
    pub high_water_bytes: usize,
    /// Times that an operation took some.
    pub num_requests: u64,
    /// Of these, times that what earlier operations had given back was large enough.
    pub num_hits: u64,
}

/// Sizes of a paged KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvCacheSpec {
    /// Layers held here.
    pub num_layers: usize,
    /// Blocks of each layer.
    pub num_blocks: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Key/value heads held here.
    pub num_key_value_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

/// One compute device. Tensors are row-major f32 `[num_tokens, width]`; a call uses the first `num_tokens` rows.
pub trait Device: Send + 'static {
    /// Activations, `[max_tokens, width]`.
    type Tensor: Send;
    /// A linear layer (or an embedding table): one or more quantized matrices in the device's own layout.
    type Linear: Send;
    /// Keys and values of all layers held here.
    type KvCache: Send;
    /// The devices of a group of ranks, this one among them.
    type Communicator: Send;

    /// Kind and model, as in [`DeviceInfo::name`].
    fn name(&self) -> &str;

    /// Scratch memory of its operations, if it counts that.
    fn scratch(&self) -> Scratch {
        Scratch::default()
    }

    /// A zeroed tensor `[max_tokens, width]`.
    ///
    /// # Errors
    /// [`KernelError::Device`] if memory is short.
    fn tensor(&self, max_tokens: usize, width: usize) -> Result<Self::Tensor, KernelError>;

    /// A vector `[1, values.len()]`, such as a norm's weight.
    ///
    /// # Errors
    /// [`KernelError::Device`] if memory is short.
    fn vector(&self, values: &[f32]) -> Result<Self::Tensor, KernelError>;

    /// Repacks matrices of equal `columns` into one linear layer whose output stacks theirs.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if lengths disagree, [`KernelError::Unsupported`] for a type the device lacks.
    fn linear(&self, matrices: Vec<HostMatrix>) -> Result<Self::Linear, KernelError>;

    /// A zeroed KV cache of elements of this type.
    ///
    /// # Errors
    /// [`KernelError::Device`] if memory is short, [`KernelError::Unsupported`] for a type that the device lacks.
    fn kv_cache(&self, spec: KvCacheSpec, dtype: Dtype) -> Result<Self::KvCache, KernelError>;

    /// Meets the devices of the other ranks of `group`, if every one of them can; `None` otherwise, on all ranks alike.
    ///
    /// # Errors
    /// What `exchange` returns, or [`KernelError::Device`] if the group ends while its devices meet.
    fn join<E: From<KernelError>>(
        &mut self,
        _group: &Group,
        exchange: Exchange<'_, E>,
    ) -> Result<Option<Self::Communicator>, E> {
        exchange(&NO_OFFER).map(|_| None)
    }

    /// Does something with the first `num_tokens` rows together with the other devices of a group.
    ///
    /// # Errors
    /// [`KernelError`] if the call does not pass its checks, or the group has ended.
    fn collective(
        &mut self,
        num_tokens: usize,
        tensor: &mut Self::Tensor,
        collective: Collective,
        communicator: &Self::Communicator,
    ) -> Result<(), KernelError>;

    /// Makes ready what steps like those of `body` need beside memory, such as compiled kernels, so that no later step
    /// waits for it. A device that has nothing to make ready does not run `body`; one that has runs it, but its operations
    /// compute nothing: what they return and leave in tensors means nothing, and no other device takes part.
    ///
    /// # Errors
    /// What `body` returns, or the device's own failure.
    fn prepare<E: From<KernelError>>(&mut self, _body: impl FnOnce(&mut Self) -> Result<(), E>) -> Result<(), E> {
        Ok(())
    }

    /// Brackets the operations of one forward step, so that a device can keep its threads awake or replay a graph. What
    /// calls of a step borrow beside tensors (positions, slots, sequences) stays unchanged until the step ends.
    ///
    /// # Errors
    /// What `body` returns, or the device's own failure.
    fn step<T, E: From<KernelError>>(&mut self, body: impl FnOnce(&mut Self) -> Result<T, E>) -> Result<T, E>;

    /// `output[t] = table[token_ids[t] - first_row]`, or zeros for an id outside the table's rows (another rank's).
    ///
    /// # Errors
    /// [`KernelError`] if the call does not pass its checks.
    fn embed(
        &mut self,
        table: &Self::Linear,
        first_row: u32,
        token_ids: &[u32],
        output: &mut Self::Tensor,
    ) -> Result<(), KernelError>;

    /// `output[t] = input[t] / sqrt(mean(input[t]²) + epsilon) * weight`.
    ///
    /// # Errors
    /// [`KernelError`] if the call does not pass its checks.
    fn rms_norm(
        &mut self,
        num_tokens: usize,
        input: &Self::Tensor,
        weight: &Self::Tensor,
        epsilon: f32,
        output: &mut Self::Tensor,
    ) -> Result<(), KernelError>;

    /// `output = epilogue(input × weightᵀ)` for the first `num_tokens` rows.
    ///
    /// # Errors
    /// [`KernelError`] if the call does not pass its checks.
    fn matmul(
        &mut self,
        num_tokens: usize,
        weight: &Self::Linear,
        input: &Self::Tensor,
        epilogue: Epilogue,
        output: &mut Self::Tensor,
    ) -> Result<(), KernelError>;

    /// `hidden += input × weightᵀ` for the first `num_tokens` rows, the product added up as `sum` says: a row-parallel
    /// layer and the residual. Before and after, `hidden` is the same on all ranks.
    ///
    /// # Errors
    /// What the hosts' all-reduce returns, or [`KernelError`] if the call does not pass its checks.
    fn matmul_add<E: From<KernelError>>(
        &mut self,
        num_tokens: usize,
        weight: &Self::Linear,
        input: &Self::Tensor,
        hidden: &mut Self::Tensor,
        sum: Sum<'_, Self::Communicator, E>,
    ) -> Result<(), E>;

    /// Rotates queries (in place) and keys, and stores keys and values in the cache.
    ///
    /// # Errors
    /// [`KernelError`] if the call does not pass its checks.
    fn rope_and_store(
        &mut self,
        call: &RopeAndStore<'_>,
        table: &RopeTable,
        qkv: &mut Self::Tensor,
        cache: &mut Self::KvCache,
    ) -> Result<(), KernelError>;

    /// Causal attention of the queries in `qkv` over the cache.
    ///
    /// # Errors
    /// [`KernelError`] if the call does not pass its checks.
    fn attention(
        &mut self,
        call: &Attention<'_>,
        qkv: &Self::Tensor,
        cache: &Self::KvCache,
        output: &mut Self::Tensor,
    ) -> Result<(), KernelError>;

    /// `output[i] = input[rows[i]]`: the rows whose logits are wanted.
    ///
    /// # Errors
    /// [`KernelError`] if the call does not pass its checks.
    fn gather_rows(&mut self, rows: &[u32], input: &Self::Tensor, output: &mut Self::Tensor)
    -> Result<(), KernelError>;

    /// Reduces row `i` of this rank's logits `[rows.len(), rows of the vocabulary held here]` as `rows[i]` asks.
    /// The first column is token `first_token`. The logits may be changed.
    ///
    /// # Errors
    /// [`KernelError`] if the call does not pass its checks.
    fn sample(
        &mut self,
        rows: &[SampleRow],
        first_token: u32,
        logits: &mut Self::Tensor,
    ) -> Result<Vec<Candidates>, KernelError>;

    /// Hands the first `num_tokens` rows to the host and takes back what it leaves there: a host collective,
    /// an upload, a download. Where memory is shared nothing is copied.
    ///
    /// # Errors
    /// What `body` returns, or the device's own failure.
    fn with_host<T, E: From<KernelError>>(
        &mut self,
        num_tokens: usize,
        tensor: &mut Self::Tensor,
        body: impl FnOnce(&mut [f32]) -> Result<T, E>,
    ) -> Result<T, E>;
}
