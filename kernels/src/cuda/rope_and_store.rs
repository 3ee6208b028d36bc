//! Rotary embedding and KV store on CUDA, in one kernel. Device code: `cuda/rope_and_store.cu`.
//! For: steps that hold prompts; a decode step does the same inside its [`attention`](super::attention).
//! Invariant: positions and slots come from a checked call, so every write stays inside the cache.

use std::sync::Arc;

use super::{
    Argument, CudaKvCache, DeviceBuffer, Gpu, InputSlice, Kernel, Launch, StepInputs, attention::AttentionCall,
    sources::Source,
};
use crate::{
    KernelError,
    device::KvCacheSpec,
    ops::{RopeAndStore, RopeStyle, RopeTable},
};

/// Device code.
pub const SOURCE: Source = Source {
    name: "rope_and_store.cu",
    text: include_str!("../../cuda/rope_and_store.cu"),
    variants: &[
        "-DHEAD_DIM=128 -DBLOCK_SIZE=16 -DBFLOAT=0 -DQKV_FLOAT=1 -DQUERY_FLOAT=0",
        "-DHEAD_DIM=80 -DBLOCK_SIZE=32 -DBFLOAT=1 -DQKV_FLOAT=0 -DQUERY_FLOAT=1",
    ],
};

const OPERATION: &str = "rope_and_store";
/// Heads of a block: `HEADS` of the device code.
const HEADS_PER_BLOCK: usize = 8;
/// Threads of a block: `THREADS` of the device code.
const THREADS: u32 = 128;

/// Type of the elements of a buffer of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// f32.
    F32,
    /// The 16-bit type of the cache.
    Half,
}

impl Element {
    /// Bytes of one.
    pub fn num_bytes(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::Half => size_of::<u16>(),
        }
    }
}

/// Rows of queries, or of queries, keys and values.
#[derive(Clone, Debug, PartialEq)]
pub struct Rows {
    /// `[num_tokens, stride]`, on a border of 16 bytes.
    pub buffer: Arc<DeviceBuffer>,
    /// Type.
    pub element: Element,
    /// Elements from a row to the next, a multiple of 8.
    pub stride: usize,
}

impl Rows {
    pub(super) fn check(
        &self,
        operation: &'static str,
        what: &'static str,
        num_tokens: usize,
        columns: usize,
    ) -> Result<(), KernelError> {
        if self.stride < columns || !self.stride.is_multiple_of(8) {
            return Err(KernelError::Shape { operation, what: "stride of rows", got: self.stride, expected: columns });
        }
        let elements = num_tokens.saturating_sub(1).saturating_mul(self.stride).saturating_add(columns);
        self.buffer.expect_bytes(operation, what, elements.saturating_mul(self.element.num_bytes()))
    }
}

/// A [`RopeTable`] on the GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct CudaRope {
    frequencies: Arc<DeviceBuffer>,
    style: RopeStyle,
    rotary_dim: usize,
    magnitude: f32,
}

impl CudaRope {
    /// Copies the frequencies.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if their number is not half of `rotary_dim`, [`KernelError::Device`] if memory is short.
    pub fn new(gpu: &Arc<Gpu>, table: &RopeTable) -> Result<Self, KernelError> {
        let (got, expected) = (2 * table.frequencies.len(), table.rotary_dim);
        if got != expected {
            let what = "twice the number of frequencies";
            return Err(KernelError::Shape { operation: OPERATION, what, got, expected });
        }
        Ok(Self {
            frequencies: Arc::new(DeviceBuffer::from_slice(gpu, &table.frequencies)?),
            style: table.style,
            rotary_dim: table.rotary_dim,
            magnitude: table.magnitude,
        })
    }

    /// Refuses a rotation that is larger than a head.
    pub(super) fn check(&self, operation: &'static str, head_dim: usize) -> Result<(), KernelError> {
        let (got, limit) = (self.rotary_dim, head_dim + 1);
        if got < limit { Ok(()) } else { Err(KernelError::OutOfRange { operation, what: "rotary_dim", got, limit }) }
    }

    /// The structure `Rope` of the device code.
    pub(super) fn argument(&self) -> [u64; 3] {
        let is_interleaved = u64::from(self.style == RopeStyle::Interleaved);
        [
            self.frequencies.pointer().0,
            u64::from(self.magnitude.to_bits()) | (self.rotary_dim as u64) << 32,
            is_interleaved,
        ]
    }
}

/// Positions and slots of a step's tokens, on their way to the GPU. Content that is staged twice has one slice, so equal
/// slices are equal content.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenSlots {
    positions: InputSlice,
    slot_mapping: InputSlice,
}

impl TokenSlots {
    pub(super) fn stage(inputs: &mut StepInputs, positions: &[u32], slot_mapping: &[u32]) -> Result<Self, KernelError> {
        Ok(Self { positions: inputs.stage(positions)?, slot_mapping: inputs.stage(slot_mapping)? })
    }
}

/// Addresses of one call, on their way to the GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeAddresses {
    pub(super) tokens: TokenSlots,
    num_tokens: usize,
    num_heads: usize,
    spec: KvCacheSpec,
}

/// One call.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeAndStoreCall {
    /// Where its tokens go.
    pub addresses: RopeAddresses,
    /// Layer of the cache.
    pub layer: usize,
    /// Angles.
    pub rope: CudaRope,
    /// `[num_tokens, (num_heads + 2 * num_key_value_heads) * head_dim]`, without gaps.
    pub qkv: Rows,
    /// Rotated queries, at least `num_heads * head_dim` elements a row. May be `qkv` itself.
    pub queries: Rows,
    /// The cache.
    pub cache: CudaKvCache,
}

impl RopeAndStoreCall {
    /// Whether [`Attention::launch_fused`](super::attention::Attention::launch_fused) of `attention` does the same before it
    /// attends.
    pub(super) fn is_part_of(&self, attention: &AttentionCall) -> bool {
        self.layer == attention.layer
            && self.qkv == attention.queries
            && self.cache == attention.cache
            && attention.batch.tokens.as_ref() == Some(&self.addresses.tokens)
    }
}

/// Starts the kernel.
pub struct CudaRopeAndStore {
    gpu: Arc<Gpu>,
}

impl CudaRopeAndStore {
    /// On this GPU. Kernels are loaded when they are first used.
    pub fn new(gpu: &Arc<Gpu>) -> Self {
        Self { gpu: Arc::clone(gpu) }
    }

    /// Checks a call and stages its addresses.
    ///
    /// # Errors
    /// Those of [`RopeAndStore::check`], or [`KernelError::Device`] if memory is short.
    pub fn stage(
        &self,
        inputs: &mut StepInputs,
        call: &RopeAndStore<'_>,
        table: &RopeTable,
        cache: &CudaKvCache,
    ) -> Result<RopeAddresses, KernelError> {
        let qkv_width = (call.num_heads + 2 * call.num_key_value_heads) * call.head_dim;
        call.check(table, cache.spec(), qkv_width)?;
        Ok(RopeAddresses {
            tokens: TokenSlots::stage(inputs, call.positions, call.slot_mapping)?,
            num_tokens: call.num_tokens(),
            num_heads: call.num_heads,
            spec: *cache.spec(),
        })
    }

    /// Starts it.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if a buffer is too small or misaligned, [`KernelError::OutOfRange`] for a layer outside the
    /// cache, [`KernelError::Device`] if the launch fails.
    pub fn launch(&self, call: &RopeAndStoreCall) -> Result<(), KernelError> {
        let spec = call.cache.spec();
        let RopeAddresses { tokens, num_tokens, num_heads, spec: staged_for } = &call.addresses;
        call.cache.expect_spec(OPERATION, staged_for)?;
        let all_heads = num_heads + 2 * spec.num_key_value_heads;
        call.rope.check(OPERATION, spec.head_dim)?;
        call.qkv.check(OPERATION, "bytes of qkv", *num_tokens, all_heads * spec.head_dim)?;
        call.queries.check(OPERATION, "bytes of queries", *num_tokens, num_heads * spec.head_dim)?;
        if call.qkv.stride != all_heads * spec.head_dim {
            let (got, expected) = (call.qkv.stride, all_heads * spec.head_dim);
            return Err(KernelError::Shape { operation: OPERATION, what: "stride of qkv", got, expected });
        }
        let rope = call.rope.argument();
        let arguments = [
            (&*call.qkv.buffer).into(),
            Argument::Struct(bytemuck::cast_slice(&rope)),
            tokens.positions.pointer().into(),
            tokens.slot_mapping.pointer().into(),
            (*num_heads as u32).into(),
            (spec.num_key_value_heads as u32).into(),
            (&*call.queries.buffer).into(),
            (call.queries.stride as u32).into(),
            (&**call.cache.layer(call.layer)?).into(),
        ];
        let blocks = [*num_tokens as u32, all_heads.div_ceil(HEADS_PER_BLOCK) as u32, 1];
        let launch = Launch { grid: blocks, block: [THREADS, 1, 1], shared_bytes: 0 };
        let kernel = self.kernel(call)?;
        // SAFETY: the kernel's arguments. `stage` checked positions and slots against the cache, the lines above the
        // rows and the layer; the call keeps all memory alive.
        unsafe { kernel.launch(&self.gpu, launch, &arguments) }
    }

    fn kernel(&self, call: &RopeAndStoreCall) -> Result<Kernel, KernelError> {
        let mut options = call.cache.options();
        for (name, rows) in [("QKV_FLOAT", &call.qkv), ("QUERY_FLOAT", &call.queries)] {
            options.push(format!("-D{name}={}", u8::from(rows.element == Element::F32)));
        }
        self.gpu.kernel(&SOURCE, &options, OPERATION)
    }
}
