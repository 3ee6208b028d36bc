//! The fused dequantizing matmul on CUDA: `output = epilogue(input × weightᵀ)`, and the embedding of tokens.
//! For: every linear layer, the embedding table and the output head.
//! Invariant: weights stay quantized in memory; a token's output depends on the layer, the token, and the kind of kernel
//! that the number of tokens selects, not on the other tokens.
//!
//! - [`linear`]: a layer on the GPU; `layout`: tiles of quantized weights.
//! - [`matvec`]: one or two tokens, quantized weights; [`mod@batch`]: more of them.
//! - [`plain`]: one token, weights of 16 and 32 bits. [`dense`]: prompts, and `blas`, cuBLASLt.
//! - [`products`]: what becomes of products in memory. [`embed`]: rows of a table.
//! - `arguments`: the structures that kernels take.

mod arguments;
pub mod batch;
mod blas;
pub mod dense;
pub mod embed;
mod layout;
pub mod linear;
pub mod matvec;
pub mod plain;
pub mod products;

use std::sync::Arc;

use lockstep_formats::GgmlType;

use self::{
    arguments::{ActivationView, LayerView},
    blas::Blas,
    dense::Dense,
    linear::Format,
    products::Products,
};
pub use self::{embed::EmbedCall, linear::CudaLinear};
use super::{Activations, Forms, Gpu, HalfType, ScratchBuffer};
use crate::{KernelError, ops::matmul::shape};

/// Most tokens for which quantized weights are multiplied by 8-bit activations: above, tensor cores are faster.
pub const MAX_MATVEC_TOKENS: usize = 2;
/// Most tokens for which weights of 16 and 32 bits are multiplied without cuBLAS.
const MAX_PLAIN_TOKENS: usize = 1;
/// Tokens of the largest launch of [`plain`].
const PLAIN_PIECE_TOKENS: usize = 8;
/// What happens to the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// `output = product`, as f32 and halves.
    Store,
    /// `output += product`, in f32: the residual stream.
    Add,
    /// The layer stacks gate then up: `output = silu(gate) * up`, in any form.
    SwiGlu,
}

impl Target {
    /// Its name in the kernels.
    fn name(self) -> &'static str {
        match self {
            Self::Store => "Store",
            Self::Add => "Add",
            Self::SwiGlu => "SwiGlu",
        }
    }
}

impl CudaLinear {
    /// The forms of activations that products with so many tokens read.
    pub fn input_forms(&self, num_tokens: usize) -> Forms {
        let has = |wanted: GgmlType| self.parts.iter().any(|part| part.format == Format::Plain(wanted));
        let is_quantized = self.parts.iter().any(|part| matches!(part.format, Format::Tiles(_)));
        let is_batch = is_quantized && num_tokens > MAX_MATVEC_TOKENS;
        let (f16, bf16) = (has(GgmlType::F16) || is_batch, has(GgmlType::BF16));
        // Two types of halves cannot be handed on side by side: f32 serves those that go without.
        let values = has(GgmlType::F32) || f16 && bf16;
        let halves = if f16 { Some(HalfType::F16) } else { bf16.then_some(HalfType::BF16) };
        Forms { tiles: is_quantized && !is_batch, halves, values }
    }
}

/// `output = target(input × weightᵀ)`.
#[derive(Clone, Debug, PartialEq)]
pub struct MatmulCall {
    /// Rows of the activations.
    pub num_tokens: usize,
    /// The layer.
    pub weight: Arc<CudaLinear>,
    /// At least `num_tokens` rows in the forms of [`CudaLinear::input_forms`].
    pub input: Activations,
    /// What happens to the product.
    pub target: Target,
    /// At least `num_tokens` rows, as wide as the layer is high, for SwiGLU half of that.
    pub output: Activations,
}

/// The launcher.
pub struct Matmul {
    gpu: Arc<Gpu>,
    blas: Option<Blas>,
}

impl Matmul {
    /// Of a GPU; kernels are compiled when they are first wanted.
    ///
    /// # Errors
    /// [`KernelError::Device`] if cuBLASLt is there and does not start.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, KernelError> {
        let blas = Blas::open(gpu)?;
        if blas.is_none() {
            tracing::warn!("libcublasLt is not found: prompts are processed by slower kernels");
        }
        Ok(Self { gpu: Arc::clone(gpu), blas })
    }

    /// Starts it.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if lengths disagree or a form is missing, [`KernelError::Device`] if a launch fails.
    pub fn launch(&self, call: &MatmulCall) -> Result<(), KernelError> {
        call.check()?;
        let MatmulCall { num_tokens, ref weight, target, .. } = *call;
        if num_tokens == 0 {
            return Ok(());
        }
        let (input, output) = (ActivationView::of(&call.input), ActivationView::of(&call.output));
        if target != Target::SwiGlu {
            return self.launch_parts(num_tokens, weight, input, target, output);
        }
        if let Some(layer) = LayerView::gate_and_up(weight) {
            return self.launch_layer(num_tokens, &layer, input, target, output);
        }
        let stacked = ScratchBuffer::new(&self.gpu, num_tokens * weight.rows() * size_of::<f32>())?;
        let products = ActivationView::of_values(stacked.pointer(), weight.rows());
        self.launch_parts(num_tokens, weight, input, Target::Store, products)?;
        let (columns, pointer) = (output.columns, stacked.pointer());
        let products = Products { pointer, is_half: false, columns, first_column: 0 };
        products::store(&self.gpu, num_tokens, products, true, output)
    }

    /// All parts of a layer.
    fn launch_parts(
        &self,
        num_tokens: usize,
        weight: &CudaLinear,
        input: ActivationView,
        target: Target,
        output: ActivationView,
    ) -> Result<(), KernelError> {
        let layers = LayerView::all(weight);
        layers.iter().try_for_each(|layer| self.launch_layer(num_tokens, layer, input, target, output))
    }

    fn launch_layer(
        &self,
        num_tokens: usize,
        layer: &LayerView,
        input: ActivationView,
        target: Target,
        output: ActivationView,
    ) -> Result<(), KernelError> {
        let is_quantized = layer.plain_type().is_none();
        let is_dense = num_tokens > if is_quantized { batch::max_tokens(&self.gpu) } else { MAX_PLAIN_TOKENS };
        if let Some(blas) = self.blas.as_ref().filter(|_| is_dense && dense::takes(layer.plain_type(), &input)) {
            return Dense { gpu: &self.gpu, blas, layer, num_tokens, input, output }.launch(target);
        }
        let Some(ggml_type) = layer.plain_type() else {
            let launch = if num_tokens > MAX_MATVEC_TOKENS { batch::launch } else { matvec::launch };
            return launch(&self.gpu, layer, num_tokens, input, target, output);
        };
        for first in (0..num_tokens).step_by(PLAIN_PIECE_TOKENS) {
            let num_tokens = PLAIN_PIECE_TOKENS.min(num_tokens - first);
            let (input, output) = (input.skip_tokens(first), output.skip_tokens(first));
            plain::launch(&self.gpu, layer, ggml_type, num_tokens, input, target, output)?;
        }
        Ok(())
    }
}

impl MatmulCall {
    /// Refuses widths that disagree, missing forms and short buffers.
    fn check(&self) -> Result<(), KernelError> {
        let Self { num_tokens, weight, input, target, output } = self;
        let width = match target {
            Target::SwiGlu if weight.rows() % 2 == 1 => {
                return Err(shape("rows of gate and up", weight.rows(), weight.rows() + 1));
            }
            Target::SwiGlu => weight.rows() / 2,
            Target::Store | Target::Add => weight.rows(),
        };
        if input.columns != weight.columns() {
            return Err(shape("width of the input", input.columns, weight.columns()));
        }
        if output.columns != width {
            return Err(shape("width of the output", output.columns, width));
        }
        let forms = weight.input_forms(*num_tokens);
        let half_type = input.halves.as_ref().map(|(half_type, _)| *half_type);
        let has_forms = (!forms.tiles || input.tiles.is_some())
            && (!forms.values || input.values.is_some())
            && (forms.halves.is_none() || forms.halves == half_type);
        if !has_forms {
            return Err(shape("forms of the input", 0, 1));
        }
        let has_target = match target {
            Target::Store => output.tiles.is_none(),
            Target::Add => output.values.is_some(),
            Target::SwiGlu => true,
        };
        if !has_target {
            return Err(shape("forms of the output", 0, 1));
        }
        input.expect_tokens("matmul", *num_tokens)?;
        output.expect_tokens("matmul", *num_tokens)
    }
}
