//! The fused matmul on WebGPU: quantized weights times 8-bit activations, plain weights times f32.
//! For: [`WebGpuDevice`](super::WebGpuDevice). Device code: `wgsl/matvec.wgsl`, `matvec_blocks.wgsl`, `matvec_plain.wgsl`,
//! `batch.wgsl`.
//! Invariant: one dispatch a part; what each computes depends on the layer, the target and the number of tokens alone.

pub mod embed;
pub mod layout;
pub mod linear;

use lockstep_formats::Dtype;

pub use linear::{Format, Part, WebGpuLinear};

use super::{
    commands::{Binding, Commands},
    elementwise,
    gpu::Gpu,
    source::{Options, Source},
    tensor::{Blocks, WebGpuTensor},
};
use crate::{KernelError, ops::matmul::shape, quant::ACTIVATION_BLOCK};

/// Few tokens.
pub static MATVEC: Source = Source { name: "matvec.wgsl", text: include_str!("../../../wgsl/matvec.wgsl") };
/// Few tokens, with the products as 8-bit blocks as well.
pub static MATVEC_BLOCKS: Source =
    Source { name: "matvec_blocks.wgsl", text: include_str!("../../../wgsl/matvec_blocks.wgsl") };
/// Weights that are not quantized.
pub static MATVEC_PLAIN: Source =
    Source { name: "matvec_plain.wgsl", text: include_str!("../../../wgsl/matvec_plain.wgsl") };
/// Many tokens.
pub static BATCH: Source = Source { name: "batch.wgsl", text: include_str!("../../../wgsl/batch.wgsl") };
/// Many tokens, by tensor cores.
pub static BATCH_COOPERATIVE: Source =
    Source { name: "batch_cooperative.wgsl", text: include_str!("../../../wgsl/batch_cooperative.wgsl") };

/// Most tokens of a workgroup of `matvec.wgsl`; more are tiles.
pub const MAX_MATVEC_TOKENS: usize = 8;
/// Storage buffers that `matvec_blocks.wgsl` binds.
const BLOCKS_BUFFERS: u32 = 9;
/// Rows and tokens of a tile of `batch.wgsl`, and blocks of a step.
const TILE: usize = 64;
const STEP: u32 = 2;
/// Columns that `batch_cooperative.wgsl` takes at a time.
const COOPERATIVE_COLUMNS: u32 = 64;

/// Shape of a workgroup of `matvec.wgsl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Threads that share the columns.
    pub threads: u32,
    /// Outputs.
    pub rows: u32,
}

impl Shape {
    /// Every shape that launches have.
    pub const ALL: [Self; 5] = [
        Self { threads: 64, rows: 1 },
        Self { threads: 128, rows: 2 },
        Self { threads: 32, rows: 4 },
        Self { threads: 32, rows: 2 },
        Self::NARROW,
    ];

    /// Every one of `matvec_blocks.wgsl`, whose subgroups make so many outputs at a time.
    pub const BLOCKS: [Self; 2] = [Self { threads: 256, rows: 2 }, Self { threads: 512, rows: 1 }];

    /// Where a processor computes four threads at once and every wait for more of them costs.
    pub const NARROW: Self = Self { threads: 4, rows: 8 };

    /// What was fastest on an H200 for layers of about so many outputs and columns.
    pub fn of(format: Format, num_outputs: usize, columns: usize) -> Self {
        match (format, num_outputs, columns) {
            (Format::Planes(layout), _, 8192..) if !layout.has_factors() => Self::ALL[1],
            (_, _, 8192..) => Self::ALL[0],
            (_, 65536.., _) => Self::ALL[2],
            _ => Self::ALL[3],
        }
    }

    /// Of `matvec_blocks.wgsl`: the fastest on an H200, where each subgroup then has two of the 32 outputs, if the adapter has as
    /// many threads and no smaller subgroups, some of which would have none.
    fn with_blocks(gpu: &Gpu) -> Self {
        let [small, large] = Self::BLOCKS;
        let suits = gpu.most_threads() >= large.threads && large.threads / gpu.subgroup_threads() <= 32;
        gpu.options().blocks_shape.unwrap_or(if suits { large } else { small })
    }
}

/// What becomes of the products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// They are stored.
    Store,
    /// They are added to what the output holds.
    Add,
    /// Of a row of gates and one of ups, `silu(gate) * up`.
    SwiGlu,
}

impl Target {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::Store, Self::Add, Self::SwiGlu];

    fn options(self) -> [(&'static str, u32); 2] {
        [("ADD", u32::from(self == Self::Add)), ("SWIGLU", u32::from(self == Self::SwiGlu))]
    }
}

fn format_options(format: Format) -> Options {
    match format {
        Format::Planes(layout) => layout.options().to_vec(),
        Format::Plain(dtype) => vec![("DTYPE", dtype_option(dtype))],
    }
}

/// Options of `matvec.wgsl` and `matvec_plain.wgsl`.
pub fn matvec_options(format: Format, shape: Shape, num_tokens: usize, target: Target) -> Options {
    let mut options = format_options(format);
    options.extend(target.options());
    options.extend([("THREADS", shape.threads), ("ROWS", shape.rows), ("TOKENS", matvec_tokens(num_tokens) as u32)]);
    options
}

/// Options of `matvec_blocks.wgsl`.
pub fn matvec_blocks_options(format: Format, shape: Shape, num_tokens: usize, target: Target) -> Options {
    let mut options = matvec_options(format, shape, num_tokens, target);
    options.push(("SUBGROUP_TEAMS", 1));
    options
}

/// Tokens of a workgroup of `matvec.wgsl`.
fn matvec_tokens(num_tokens: usize) -> usize {
    num_tokens.clamp(1, MAX_MATVEC_TOKENS).next_power_of_two()
}

/// Options of `batch.wgsl`.
pub fn batch_options(format: Format, target: Target) -> Options {
    let mut options = format_options(format);
    options.extend(target.options());
    options.push(("STEP", STEP));
    options
}

/// Options of `batch_cooperative.wgsl` for matrices of an edge.
pub fn cooperative_options(format: Format, edge: u32, target: Target) -> Options {
    let mut options = format_options(format);
    options.extend(target.options());
    options.extend([
        ("F16", 1),
        ("COOPERATIVE", 1),
        ("SMALL", u32::from(edge == 8)),
        ("TEAMS", cooperative_teams(edge)),
        ("HALF_TILES", 2),
        ("TOKEN_TILES", 32 / edge),
        ("COLUMN_TILES", COOPERATIVE_COLUMNS / edge),
    ]);
    options
}

/// Subgroups of `batch_cooperative.wgsl`: eight, and half of them where matrices and workgroup memory are smaller.
const fn cooperative_teams(edge: u32) -> u32 {
    edge / 2
}

/// The number of a type in the shaders.
pub(super) fn dtype_option(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F16 => 0,
        Dtype::Bf16 => 1,
        Dtype::F32 => 2,
    }
}

/// Adds the product of the first `num_tokens` rows of `input` to the commands; its target is `output`, rows of `width`.
///
/// # Errors
/// [`KernelError::Shape`] if lengths disagree, [`KernelError::Device`] if memory is short or a shader is refused.
pub(super) fn matmul(
    commands: &mut Commands,
    num_tokens: usize,
    weight: &WebGpuLinear,
    input: &WebGpuTensor,
    target: Target,
    output: &mut WebGpuTensor,
) -> Result<(), KernelError> {
    check(num_tokens, weight, input, target, output)?;
    if num_tokens == 0 {
        return Ok(());
    }
    if target == Target::SwiGlu && weight.parts().len() != 1 {
        let mut products = WebGpuTensor::zeroed(commands.gpu(), num_tokens, weight.rows())?;
        matmul(commands, num_tokens, weight, input, Target::Store, &mut products)?;
        return elementwise::swiglu(commands, num_tokens, &products, output);
    }
    let width = output.width();
    let values = output.overwrite();
    for part in weight.parts() {
        let num_outputs = if target == Target::SwiGlu { part.rows / 2 } else { part.rows };
        let part = PartCall { part, num_outputs, columns: weight.columns(), num_tokens, target, width };
        let blocks = if part.can_make_blocks(commands.gpu()) { output.overwrite_blocks(num_tokens) } else { None };
        part.push(commands, input, &values, blocks)?;
    }
    Ok(())
}

/// The product of one part.
struct PartCall<'a> {
    part: &'a Part,
    num_outputs: usize,
    columns: usize,
    num_tokens: usize,
    target: Target,
    /// Of a row of the output.
    width: usize,
}

impl PartCall<'_> {
    /// Whether the outputs can be made as 8-bit blocks in the same dispatch, which only matmuls after SwiGLU ask for: few tokens,
    /// whole blocks, and subgroups to share the work.
    fn can_make_blocks(&self, gpu: &Gpu) -> bool {
        self.target == Target::SwiGlu
            && matches!(self.part.format, Format::Planes(_))
            && self.num_tokens <= MAX_MATVEC_TOKENS
            && self.num_outputs == self.width
            && self.width.is_multiple_of(ACTIVATION_BLOCK)
            && gpu.has_subgroups()
            && gpu.limits().max_storage_buffers_per_shader_stage >= BLOCKS_BUFFERS
    }

    fn push(
        &self,
        commands: &mut Commands,
        input: &WebGpuTensor,
        output: &Binding,
        output_blocks: Option<Blocks>,
    ) -> Result<(), KernelError> {
        let format = self.part.format;
        let (inner, bindings) = match format {
            Format::Planes(_) => {
                let blocks = elementwise::blocks(commands, self.num_tokens, input)?;
                let planes = self.part.planes.iter().cloned();
                let bindings = planes.chain([blocks.quants, blocks.scales, output.clone()]);
                let made = output_blocks.iter().flat_map(|blocks| [blocks.quants.clone(), blocks.scales.clone()]);
                let bindings = bindings.chain(made).collect();
                (self.columns / ACTIVATION_BLOCK, bindings)
            }
            Format::Plain(_) => (self.columns, vec![self.part.planes[0].clone(), input.values(), output.clone()]),
        };
        let (source, options, grid) = match output_blocks {
            Some(_) => self.launch_with_blocks(commands.gpu()),
            None => self.launch(commands),
        };
        let pipeline = commands.gpu().pipeline(source, &options)?;
        let numbers = [self.num_outputs, inner, self.num_tokens, self.width, self.part.first_row];
        commands.dispatch(&pipeline, bindings, &numbers.map(|number| number as u32), grid)
    }

    fn launch_with_blocks(&self, gpu: &Gpu) -> (&'static Source, Options, [usize; 3]) {
        let [x, y] = elementwise::plane(self.num_outputs / ACTIVATION_BLOCK);
        let z = self.num_tokens.div_ceil(matvec_tokens(self.num_tokens));
        let options = matvec_blocks_options(self.part.format, Shape::with_blocks(gpu), self.num_tokens, self.target);
        (&MATVEC_BLOCKS, options, [x, y, z])
    }

    fn launch(&self, commands: &Commands) -> (&'static Source, Options, [usize; 3]) {
        let Self { part: Part { format, .. }, num_tokens, num_outputs, target, .. } = *self;
        let is_quantized = matches!(format, Format::Planes(_));
        if !is_quantized || num_tokens <= MAX_MATVEC_TOKENS {
            let source = if is_quantized { &MATVEC } else { &MATVEC_PLAIN };
            let shape = commands.gpu().matvec_shape().unwrap_or(Shape::of(*format, num_outputs, self.columns));
            let [x, y] = elementwise::plane(num_outputs.div_ceil(shape.rows as usize));
            let z = num_tokens.div_ceil(matvec_tokens(num_tokens));
            return (source, matvec_options(*format, shape, num_tokens, target), [x, y, z]);
        }
        // Of SwiGLU half of a tile's rows are gates.
        let tiles = |tile: usize| {
            let outputs = if target == Target::SwiGlu { tile / 2 } else { tile };
            [num_outputs.div_ceil(outputs), num_tokens.div_ceil(tile), 1]
        };
        match commands.gpu().matrix_edge() {
            // Half as many rows and tokens as threads.
            Some(edge) => {
                let tile = 16 * cooperative_teams(edge) as usize;
                (&BATCH_COOPERATIVE, cooperative_options(*format, edge, target), tiles(tile))
            }
            None => (&BATCH, batch_options(*format, target), tiles(TILE)),
        }
    }
}

fn check(
    num_tokens: usize,
    weight: &WebGpuLinear,
    input: &WebGpuTensor,
    target: Target,
    output: &WebGpuTensor,
) -> Result<(), KernelError> {
    input.expect_tokens("matmul", num_tokens)?;
    output.expect_tokens("matmul", num_tokens)?;
    if input.width() != weight.columns() {
        return Err(shape("input width", input.width(), weight.columns()));
    }
    let width = match target {
        Target::SwiGlu if !weight.rows().is_multiple_of(2) => {
            return Err(shape("rows of gate and up (odd)", weight.rows(), weight.rows() + 1));
        }
        Target::SwiGlu => weight.rows() / 2,
        Target::Store | Target::Add => weight.rows(),
    };
    if output.width() != width {
        return Err(shape("output width", output.width(), width));
    }
    Ok(())
}
