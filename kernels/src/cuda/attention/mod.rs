//! Paged flash attention on CUDA: what both kernels share.
//! For: [`CudaDevice`](super). A step's sequences of few tokens go to [`decode`], the others to [`prefill`].
//! Invariant: a [`Batch`] is made from a checked call alone, so no block id and no position on the GPU leads outside the
//! cache that it was checked against.
//! Not here: writing keys and values (`rope_and_store`), but for [`Attention::launch_fused`].

pub mod decode;
pub mod prefill;

use std::sync::Arc;

use super::{
    Activations, CudaKvCache, Gpu, InputSlice, StepInputs,
    rope_and_store::{CudaRope, Element, Rows, TokenSlots},
};
use crate::{KernelError, device::KvCacheSpec, ops};

const OPERATION: &str = "attention";
/// Sequences of at most so many query tokens are decoded.
const MAX_DECODE_TOKENS: usize = 8;
/// Room for block tables is a power of two, of at least so many blocks a sequence, so that a recorded step lasts as
/// sequences grow.
const MIN_TABLE_BLOCKS: usize = 16;
/// Least room for all block tables: `MIN_TABLE` of the device code.
const MIN_TABLE: usize = 128;
/// Values of a block of 8-bit activations.
const QUANTIZED_BLOCK: usize = 32;
/// `MAX_SEQUENCES` of the device code of decode.
const MAX_SEQUENCES: usize = 1024;

/// The sequences of a step, on their way to the GPU. It stays the same while their number and the size of all block tables
/// stay in the same power of two, so a recorded step can be replayed with new content.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    token_offsets: InputSlice,
    first_positions: InputSlice,
    table_offsets: InputSlice,
    /// One after the other.
    block_tables: InputSlice,
    /// Where [`Attention::launch_fused`] puts the tokens, if every sequence has one.
    pub(super) tokens: Option<TokenSlots>,
    num_sequences: usize,
    num_tokens: usize,
    /// Most query tokens of a sequence that is decoded; 0: none is.
    max_decode_tokens: usize,
    /// Blocks of each cluster that decodes a sequence and head; 1: all blocks share them.
    cluster: usize,
    /// Tiles of the prefill kernel.
    num_prefill_tiles: usize,
    num_heads: usize,
    group_size: usize,
    group_offset: usize,
    scale: f32,
    spec: KvCacheSpec,
}

/// One call.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionCall {
    /// Its sequences.
    pub batch: Batch,
    /// Layer of the cache.
    pub layer: usize,
    /// Rotated queries; for [`Attention::launch_fused`] whole rows of qkv, not rotated.
    pub queries: Rows,
    /// The cache.
    pub cache: CudaKvCache,
    /// `[num_tokens, num_heads * head_dim]`.
    pub output: Activations,
}

/// Starts the kernels.
pub struct Attention {
    gpu: Arc<Gpu>,
    workspace: decode::Workspace,
}

impl Attention {
    /// On this GPU. Kernels are loaded when they are first used.
    ///
    /// # Errors
    /// [`KernelError::Device`] if memory is short.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, KernelError> {
        Ok(Self { gpu: Arc::clone(gpu), workspace: decode::Workspace::new(gpu)? })
    }

    /// Checks a call and stages its sequences for all layers.
    ///
    /// # Errors
    /// Those of [`ops::Attention::check`], [`KernelError::OutOfRange`] for more sequences than a launch takes, or
    /// [`KernelError::Device`] if memory is short.
    pub fn stage(
        &self,
        inputs: &mut StepInputs,
        call: &ops::Attention<'_>,
        cache: &CudaKvCache,
    ) -> Result<Batch, KernelError> {
        let row = call.num_heads * call.head_dim;
        call.check(cache.spec(), row + 2 * call.num_key_value_heads * call.head_dim, row)?;
        let (got, limit) = (call.sequences.len(), MAX_SEQUENCES + 1);
        if got >= limit {
            return Err(KernelError::OutOfRange { operation: OPERATION, what: "number of sequences", got, limit });
        }
        let num_sequences = got.next_power_of_two();
        let mut token_offsets = vec![0_u32];
        let mut first_positions = Vec::with_capacity(num_sequences);
        let mut table_offsets = Vec::with_capacity(num_sequences);
        let mut block_tables = Vec::new();
        let mut num_tokens = 0;
        for sequence in call.sequences {
            num_tokens += sequence.num_tokens;
            token_offsets.push(num_tokens as u32);
            first_positions.push(sequence.first_position as u32);
            table_offsets.push(block_tables.len() as u32);
            block_tables.extend_from_slice(&sequence.block_table[..num_blocks(sequence, cache.spec())]);
        }
        let (got, limit) = (block_tables.len(), u32::MAX as usize);
        if got >= limit {
            return Err(KernelError::OutOfRange { operation: OPERATION, what: "blocks of all sequences", got, limit });
        }
        block_tables.resize(got.max(MIN_TABLE_BLOCKS * num_sequences).max(MIN_TABLE).next_power_of_two(), 0);
        first_positions.resize(num_sequences, 0);
        table_offsets.resize(num_sequences, 0);
        // Sequences of no tokens fill the batch up.
        token_offsets.resize(num_sequences + 1, num_tokens as u32);
        let is_decode = call.sequences.iter().all(|sequence| sequence.num_tokens == 1);
        let positions = || call.sequences.iter().map(|sequence| sequence.first_position as u32);
        let slots = || call.sequences.iter().map(|sequence| slot(sequence, cache.spec()));
        let tokens =
            is_decode.then(|| TokenSlots::stage(inputs, &Vec::from_iter(positions()), &Vec::from_iter(slots())));
        let lengths = || call.sequences.iter().map(|sequence| sequence.num_tokens);
        let tile_rows = prefill::tile_rows(&self.gpu, call.head_dim);
        Ok(Batch {
            token_offsets: inputs.stage(&token_offsets)?,
            first_positions: inputs.stage(&first_positions)?,
            table_offsets: inputs.stage(&table_offsets)?,
            block_tables: inputs.stage(&block_tables)?,
            tokens: tokens.transpose()?,
            num_sequences,
            num_tokens,
            max_decode_tokens: lengths().filter(|tokens| *tokens <= MAX_DECODE_TOKENS).max().unwrap_or(0),
            cluster: decode::cluster(self.gpu.limits(), call, num_sequences),
            num_prefill_tiles: lengths()
                .filter(|tokens| *tokens > MAX_DECODE_TOKENS)
                .map(|tokens| (tokens * call.group_size).div_ceil(tile_rows))
                .sum(),
            num_heads: call.num_heads,
            group_size: call.group_size,
            group_offset: call.group_offset,
            scale: call.scale,
            spec: *cache.spec(),
        })
    }

    /// Attention of rotated queries over the cache, which holds their own keys and values already.
    ///
    /// # Errors
    /// [`KernelError::Shape`] or [`KernelError::OutOfRange`] if the call does not fit its buffers,
    /// [`KernelError::Unsupported`] for a form of output that the kernels do not write, [`KernelError::Device`] if a
    /// launch fails.
    pub fn launch(&self, call: &AttentionCall) -> Result<(), KernelError> {
        self.check(call, call.batch.num_heads * call.batch.spec.head_dim)?;
        if call.batch.max_decode_tokens > 0 {
            self.workspace.launch(&self.gpu, call, None)?;
        }
        if call.batch.num_prefill_tiles > 0 {
            prefill::launch(&self.gpu, call)?;
        }
        Ok(())
    }

    /// Rotation of queries and keys, KV store and attention in one launch, where every sequence has one token: the
    /// queries of the call are rows of qkv. Each row's key and value go to the slot of its position.
    ///
    /// # Errors
    /// Those of [`launch`](Self::launch), or [`KernelError::OutOfRange`] if a sequence has more tokens.
    pub fn launch_fused(&self, call: &AttentionCall, rope: &CudaRope) -> Result<(), KernelError> {
        let spec = &call.batch.spec;
        self.check(call, (call.batch.num_heads + 2 * spec.num_key_value_heads) * spec.head_dim)?;
        rope.check(OPERATION, spec.head_dim)?;
        if call.batch.max_decode_tokens > 1 || call.batch.num_prefill_tiles > 0 {
            let got = call.batch.max_decode_tokens.max(2);
            let what = "tokens of a sequence of a fused call";
            return Err(KernelError::OutOfRange { operation: OPERATION, what, got, limit: 2 });
        }
        self.workspace.launch(&self.gpu, call, Some(rope))
    }

    fn check(&self, call: &AttentionCall, columns: usize) -> Result<(), KernelError> {
        let batch = &call.batch;
        call.cache.expect_spec(OPERATION, &batch.spec)?;
        call.queries.check(OPERATION, "bytes of queries", batch.num_tokens, columns)?;
        let (got, expected) = (call.output.columns, batch.num_heads * batch.spec.head_dim);
        if got != expected {
            return Err(KernelError::Shape { operation: OPERATION, what: "output width", got, expected });
        }
        call.output.expect_tokens(OPERATION, batch.num_tokens)?;
        let refuse = |what| {
            let device = self.gpu.limits().name.clone();
            Err(KernelError::Unsupported { operation: OPERATION, what, device })
        };
        match call.output.tiles {
            Some(_) if batch.num_prefill_tiles > 0 => refuse("8-bit output of a prompt".to_owned()),
            Some(_) if !batch.spec.head_dim.is_multiple_of(QUANTIZED_BLOCK) => {
                refuse(format!("8-bit output of heads of {}", batch.spec.head_dim))
            }
            _ => Ok(()),
        }
    }
}

fn num_blocks(sequence: &ops::AttentionSequence<'_>, spec: &KvCacheSpec) -> usize {
    (sequence.first_position + sequence.num_tokens).div_ceil(spec.block_size)
}

/// The slot of a sequence's first new token.
fn slot(sequence: &ops::AttentionSequence<'_>, spec: &KvCacheSpec) -> u32 {
    let block = sequence.block_table[sequence.first_position / spec.block_size] as usize;
    (block * spec.block_size + sequence.first_position % spec.block_size) as u32
}

/// Two 32-bit members of a structure of the device code.
fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

impl AttentionCall {
    /// The members that the structures `Call` of both kernels begin with, up to and without the scale.
    fn argument(&self, min_tokens: usize, max_tokens: usize) -> Result<Vec<u64>, KernelError> {
        let batch = &self.batch;
        Ok(vec![
            batch.token_offsets.pointer().0,
            batch.first_positions.pointer().0,
            batch.table_offsets.pointer().0,
            batch.block_tables.pointer().0,
            pair(batch.num_sequences as u32, min_tokens as u32),
            u64::from(max_tokens as u32),
            pair(batch.num_heads as u32, batch.spec.num_key_value_heads as u32),
            pair(batch.group_size as u32, batch.group_offset as u32),
            self.queries.buffer.pointer().0,
            self.queries.stride as u64,
            self.cache.layer(self.layer)?.pointer().0,
        ])
    }

    /// Factor on scores whose exponentials have base 2.
    fn scale_log2(&self) -> u32 {
        (self.batch.scale * std::f32::consts::LOG2_E).to_bits()
    }

    /// Options that both kernels are compiled with.
    fn options(&self) -> Vec<String> {
        let mut options = self.cache.options();
        options.push(format!("-DQUERY_FLOAT={}", u8::from(self.queries.element == Element::F32)));
        options
    }
}
