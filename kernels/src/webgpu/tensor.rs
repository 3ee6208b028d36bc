//! Activations: f32 rows, and beside them the 8-bit blocks that matmuls have asked for.
//! For: [`WebGpuDevice`](super::WebGpuDevice).
//! Invariant: the f32 rows are always there; blocks are read only if they were made from the rows that are there now.
//! Once a matmul has asked for blocks, a producer that can makes them in its own dispatch.

use std::{
    cell::{Cell, RefCell},
    sync::Arc,
};

use wgpu::Buffer;

use super::{Gpu, commands::Binding};
use crate::{KernelError, quant::ACTIVATION_BLOCK};

/// Rows `[max_tokens, width]`.
#[derive(Debug)]
pub struct WebGpuTensor {
    max_tokens: usize,
    width: usize,
    values: Arc<Buffer>,
    blocks: RefCell<Option<Blocks>>,
    /// Rows whose blocks are those of the present values.
    num_current: Cell<usize>,
}

/// Rows as 8-bit blocks: words, and scales with sums.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    pub quants: Binding,
    pub scales: Binding,
}

impl WebGpuTensor {
    /// Zeroed rows.
    pub(super) fn zeroed(gpu: &Gpu, max_tokens: usize, width: usize) -> Result<Self, KernelError> {
        let len = max_tokens.checked_mul(width).and_then(|len| len.checked_mul(size_of::<f32>()));
        let limit = gpu.limits().max_storage_buffer_binding_size;
        let len = len.map(|len| len as u64).filter(|len| *len <= limit);
        let len = len.ok_or_else(|| {
            gpu.error(format!("a tensor [{max_tokens}, {width}] is larger than the {limit} bytes of a binding"))
        })?;
        let values = gpu.buffer("a tensor", len)?;
        Ok(Self { max_tokens, width, values, blocks: RefCell::default(), num_current: Cell::new(0) })
    }

    /// Values of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows that it can hold.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// The f32 rows, to be read.
    pub(super) fn values(&self) -> Binding {
        Binding::whole(&self.values)
    }

    /// The first rows.
    pub(super) fn rows(&self, num_tokens: usize) -> Binding {
        let num_bytes = (num_tokens * self.width * size_of::<f32>()) as u64;
        Binding { num_bytes, ..self.values() }
    }

    /// The f32 rows, to be written.
    pub(super) fn overwrite(&mut self) -> Binding {
        self.num_current.set(0);
        self.values()
    }

    /// The buffer of the f32 rows, to be written.
    pub(super) fn overwrite_buffer(&mut self) -> &Buffer {
        self.num_current.set(0);
        &self.values
    }

    /// Blocks of whoever overwrites the rows and makes them as well, if they are wanted.
    pub(super) fn overwrite_blocks(&mut self, num_tokens: usize) -> Option<Blocks> {
        let blocks = self.blocks.get_mut().clone();
        self.num_current.set(if blocks.is_some() { num_tokens } else { 0 });
        blocks
    }

    /// The first rows as blocks, and whether these must be made first.
    pub(super) fn request_blocks(&self, gpu: &Gpu, num_tokens: usize) -> Result<(Blocks, bool), KernelError> {
        let mut blocks = self.blocks.borrow_mut();
        let blocks = match &mut *blocks {
            Some(blocks) => blocks.clone(),
            none => {
                let num_blocks = (self.max_tokens * self.width / ACTIVATION_BLOCK) as u64;
                let quants = Binding::whole(&gpu.buffer("8-bit activations", 32 * num_blocks)?);
                let scales = Binding::whole(&gpu.buffer("scales of activations", 8 * num_blocks)?);
                none.insert(Blocks { quants, scales }).clone()
            }
        };
        let num_current = self.num_current.get();
        self.num_current.set(num_current.max(num_tokens));
        Ok((blocks, num_current < num_tokens))
    }

    /// Refuses more rows than there are.
    pub(super) fn expect_tokens(&self, operation: &'static str, num_tokens: usize) -> Result<(), KernelError> {
        if num_tokens <= self.max_tokens {
            return Ok(());
        }
        let (got, expected) = (num_tokens, self.max_tokens);
        Err(KernelError::Shape { operation, what: "num_tokens", got, expected })
    }
}
