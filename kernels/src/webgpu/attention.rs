//! Paged flash attention on WebGPU. Device code: `wgsl/attention_decode.wgsl` and `attention_combine.wgsl`; for prompts
//! `attention_tiles.wgsl`, `attention_cooperative.wgsl` and, with large heads, `attention.wgsl`.
//! For: [`WebGpuDevice`](super::WebGpuDevice).
//! Invariant: the keys of a token that is computed singly are cut into ranges by its position alone; a prompt's are not cut.

use lockstep_formats::Dtype;

use super::{
    attention_decode::{self, MAX_RANGES},
    commands::{Binding, Commands},
    gpu::Gpu,
    kv_cache::{self, WebGpuKvCache},
    source::{Options, Source},
    tensor::WebGpuTensor,
};
use crate::{
    KernelError,
    ops::{Attention, RopeStyle},
    quant::ACTIVATION_BLOCK,
};

/// Tokens one by one, by ranges of their keys.
pub static DECODE: Source =
    Source { name: "attention_decode.wgsl", text: include_str!("../../wgsl/attention_decode.wgsl") };
/// Prompts by tiles in workgroup memory.
pub static ATTENTION: Source = Source { name: "attention.wgsl", text: include_str!("../../wgsl/attention.wgsl") };
/// Prompts by tiles in registers.
pub static TILES: Source =
    Source { name: "attention_tiles.wgsl", text: include_str!("../../wgsl/attention_tiles.wgsl") };
/// Prompts by tensor cores.
pub static COOPERATIVE: Source =
    Source { name: "attention_cooperative.wgsl", text: include_str!("../../wgsl/attention_cooperative.wgsl") };
/// Sums over ranges.
pub static COMBINE: Source =
    Source { name: "attention_combine.wgsl", text: include_str!("../../wgsl/attention_combine.wgsl") };

/// Threads of a workgroup of `attention.wgsl` and `attention_combine.wgsl`: one at least has a group of four elements of the
/// largest head.
const THREADS: u32 = 128;
/// Keys of a tile of `attention.wgsl`, and bytes of them, at most.
const KEYS: usize = 32;
const KEYS_BYTES: usize = 8 << 10;
/// Storage buffers that attention binds which stores keys and values: of a whole layer and of one in parts. It takes one more to
/// join ranges at once.
const STORING_BUFFERS: [u32; 2] = [10, 16];
/// Tokens of a prompt that share an item, without tensor cores.
const PREFILL_TOKENS: usize = 4;
/// Tokens of a sequence from which on tiles and tensor cores pay.
const LEAST_TILE_TOKENS: usize = 8;
/// The largest head of them: its sums stay in registers.
const MAX_TILE_HEAD: usize = 128;
/// Rows of a workgroup of `attention_tiles.wgsl`, keys of a tile, rows of a thread, and values that it takes at a time.
const TILE_ROWS: usize = 64;
const TILE_KEYS: usize = 64;
const TILE_LINES: usize = 8;
const TILE_VALUES: u32 = 8;
/// No partial sums.
const NONE: u32 = u32::MAX;

/// What a workgroup does, as the shader reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::NoUninit)]
struct Item {
    row: u32,
    num_tokens: u32,
    table: u32,
    first_key: u32,
    end_key: u32,
    position: u32,
    slot: u32,
    range: u32,
}

/// The work of a step, which its layers share.
#[derive(Clone)]
pub(super) struct StagedItems {
    work: [Work; 2],
    /// Items of one token, and of several, each with their number.
    items: [Option<(Binding, usize)>; 2],
    tables: Binding,
    /// Tokens whose sums are to be joined, and their number.
    combined: Option<(Binding, usize)>,
    /// Slots of partial sums.
    num_slots: usize,
}

/// The rows that attend.
pub(super) struct Rows {
    pub qkv: Binding,
    /// How they are to be rotated, and their keys and values stored, before they attend; `None`: they are.
    pub rotation: Option<Rotation>,
}

/// A rotation, and a store, that a dispatch of attention makes itself.
#[derive(Clone)]
pub(super) struct Rotation {
    pub angles: Binding,
    pub rotary_dim: usize,
    pub style: RopeStyle,
}

/// Shape of a workgroup of `attention_cooperative.wgsl`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixShape {
    /// Rows and columns of a matrix: 16, or 8 as in Metal.
    pub edge: u32,
    /// Subgroups, of 16 rows each.
    pub teams: u32,
    /// Keys of a tile: 32, or a multiple.
    pub keys: u32,
}

impl MatrixShape {
    /// Rows of a subgroup.
    const TEAM_ROWS: u32 = 16;
    /// The fastest on an H200, and one that Metal's workgroup memory holds.
    pub const ALL: [Self; 2] = [Self { edge: 16, teams: 8, keys: 32 }, Self { edge: 8, teams: 4, keys: 32 }];

    /// The one for matrices of an edge.
    fn of_edge(edge: u32) -> Self {
        if edge == 8 { Self::ALL[1] } else { Self::ALL[0] }
    }

    fn rows(self) -> usize {
        (self.teams * Self::TEAM_ROWS) as usize
    }
}

/// Whether tensor cores compute prompts for caches of a type and heads of a size: they have 16 bits.
pub fn has_matrices(dtype: Dtype, head_dim: usize) -> bool {
    dtype != Dtype::F32 && head_dim.is_multiple_of(16) && head_dim <= MAX_TILE_HEAD
}

/// Who computes the tokens of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// One token.
    Decode,
    /// A few tokens of a prompt, with heads that are too large for the others.
    Prefill,
    /// Many tokens of a prompt, by tiles in registers.
    Tiles,
    /// Many tokens of a prompt, by tensor cores.
    Matrices(MatrixShape),
}

impl Work {
    /// How the prompts of a call are computed.
    fn of_prompts(gpu: &Gpu, call: &Attention<'_>, cache: &WebGpuKvCache) -> Self {
        match gpu.matrix_edge() {
            Some(edge) if has_matrices(cache.dtype(), call.head_dim) => Self::Matrices(MatrixShape::of_edge(edge)),
            _ => Self::of_plain_prompts(call.head_dim),
        }
    }

    /// How they are without tensor cores.
    pub fn of_plain_prompts(head_dim: usize) -> Self {
        if head_dim <= MAX_TILE_HEAD { Self::Tiles } else { Self::Prefill }
    }

    /// Query heads that share a workgroup.
    fn query_heads(self, head_dim: usize, group_size: usize) -> usize {
        // Queries and scores stay in workgroup memory.
        let most = match (self, head_dim) {
            // Rows that are no query head's are multiplied in vain.
            (Self::Matrices(_) | Self::Tiles, _) => return 1 << group_size.trailing_zeros().min(3),
            (Self::Decode, _) => return attention_decode::query_heads(head_dim, group_size),
            (Self::Prefill, 257..) => 1,
            (Self::Prefill, 129..) => 2,
            (Self::Prefill, _) => 4,
        };
        group_size.next_power_of_two().min(most)
    }

    /// Tokens of an item.
    fn tokens(self, head_dim: usize, group_size: usize) -> usize {
        match self {
            Self::Decode => 1,
            Self::Prefill => PREFILL_TOKENS,
            Self::Tiles => TILE_ROWS / self.query_heads(head_dim, group_size),
            Self::Matrices(shape) => shape.rows() / self.query_heads(head_dim, group_size),
        }
    }

    /// Tokens below which a sequence is computed token by token.
    fn least_tokens(self) -> usize {
        if self == Self::Prefill { PREFILL_TOKENS } else { LEAST_TILE_TOKENS }
    }

    fn source(self) -> &'static Source {
        match self {
            Self::Decode => &DECODE,
            Self::Prefill => &ATTENTION,
            Self::Tiles => &TILES,
            Self::Matrices(_) => &COOPERATIVE,
        }
    }
}

/// What decides the variant of a shader but for `attention_combine.wgsl`, beside the cache.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// Elements of a head.
    pub head_dim: usize,
    /// Tokens of a KV block.
    pub block_size: usize,
    /// Query heads of a group.
    pub group_size: usize,
    /// Who computes.
    pub work: Work,
    /// Whether the output is made as 8-bit blocks, too.
    pub make_blocks: bool,
    /// Whether the adapter computes with f16.
    pub has_f16: bool,
    /// Threads that share keys of one token: [`attention_decode::key_lanes`].
    pub key_lanes: u32,
    /// Whether ranges of a token's keys are joined in the same dispatch.
    pub joins: bool,
    /// Whether queries and keys are rotated, and keys and values stored, in the same dispatch.
    pub stores: bool,
}

impl Variant {
    /// The source and its options for a cache.
    pub fn of_cache(self, dtype: Dtype, is_parted: bool) -> (&'static Source, Options) {
        let Self { head_dim, block_size, group_size, work, make_blocks, has_f16, key_lanes, joins, stores } = self;
        let mut options = kv_cache::options(dtype, is_parted).to_vec();
        let is_native = u32::from(has_f16 && dtype == Dtype::F16);
        options.extend([
            ("NATIVE", is_native),
            ("DECODE", u32::from(work == Work::Decode)),
            ("STORES", u32::from(stores)),
            ("JOINS", u32::from(joins)),
            ("GROUPS", head_dim.div_ceil(4) as u32),
            ("BLOCK_SIZE", block_size as u32),
            ("QUANTIZE", u32::from(make_blocks)),
            ("GROUP", work.query_heads(head_dim, group_size) as u32),
        ]);
        match work {
            Work::Matrices(MatrixShape { edge, teams, keys }) => options.extend([
                ("F16", 1),
                ("COOPERATIVE", 1),
                ("SMALL", u32::from(edge == 8)),
                ("TEAMS", teams),
                ("ROW_TILES", MatrixShape::TEAM_ROWS / edge),
                ("KEY_TILES", keys / edge),
                ("HEAD_TILES", head_dim as u32 / edge),
                ("LANE_GROUPS", keys * MatrixShape::TEAM_ROWS / (4 * 32)),
            ]),
            Work::Tiles => options.extend([
                ("F16", is_native),
                ("ROWS", TILE_ROWS as u32),
                ("KEYS", TILE_KEYS as u32),
                ("LINES", TILE_LINES as u32),
                ("VALUE_KEYS", TILE_VALUES),
                ("THREADS", (TILE_ROWS / TILE_LINES * TILE_KEYS / 4) as u32),
                // A thread holds a group of four elements of every four keys' worth of threads.
                ("STEPS", head_dim.div_ceil(TILE_KEYS) as u32),
            ]),
            Work::Decode => {
                options.push(("F16", is_native));
                let heads = work.query_heads(head_dim, group_size);
                options.extend(attention_decode::options(dtype, head_dim, heads, key_lanes));
            }
            Work::Prefill => options.extend([
                ("F16", is_native),
                ("THREADS", THREADS),
                ("KEYS", tile_keys(dtype, head_dim) as u32),
                ("COPIES", (tile_keys(dtype, head_dim) * head_dim.div_ceil(4)).div_ceil(THREADS as usize) as u32),
                ("TOKENS", work.tokens(head_dim, group_size) as u32),
            ]),
        }
        (work.source(), options)
    }
}

/// Options of `attention_combine.wgsl` for heads of so many groups of four elements.
pub fn combine_options(head_groups: usize, make_blocks: bool) -> Options {
    let ranges = MAX_RANGES as u32;
    vec![("THREADS", THREADS), ("GROUPS", head_groups as u32), ("RANGES", ranges), ("QUANTIZE", u32::from(make_blocks))]
}

/// Keys of a tile of `attention.wgsl`: a power of two.
fn tile_keys(dtype: Dtype, head_dim: usize) -> usize {
    let most = KEYS_BYTES / (head_dim.next_multiple_of(4) * dtype.element_bytes()).max(1);
    (1 << most.max(4).ilog2()).min(KEYS)
}

/// Whether ranges are joined by the dispatch that attends.
fn joins(gpu: &Gpu, cache: &WebGpuKvCache) -> bool {
    let num_buffers = gpu.limits().max_storage_buffers_per_shader_stage;
    gpu.has_coherent_memory() && num_buffers > STORING_BUFFERS[usize::from(cache.is_parted())]
}

/// Whether attention can rotate and store the tokens at `places`, positions and slots, itself: one of each sequence, which goes
/// where its sequence goes on.
pub(super) fn can_store(gpu: &Gpu, call: &Attention<'_>, cache: &WebGpuKvCache, places: &[[u32; 2]]) -> bool {
    let block_size = cache.spec().block_size;
    let num_buffers = gpu.limits().max_storage_buffers_per_shader_stage;
    num_buffers >= STORING_BUFFERS[usize::from(cache.is_parted())]
        && call.sequences.len() == places.len()
        && call.sequences.iter().zip(places).all(|(sequence, [position, slot])| {
            let (block, place) = (sequence.first_position / block_size, sequence.first_position % block_size);
            let own = sequence.block_table.get(block).map(|block| *block as usize * block_size + place);
            sequence.num_tokens == 1 && sequence.first_position == *position as usize && own == Some(*slot as usize)
        })
}

/// Sends what is to be done.
pub(super) fn stage(
    commands: &mut Commands,
    call: &Attention<'_>,
    cache: &WebGpuKvCache,
) -> Result<StagedItems, KernelError> {
    let work = Work::of_prompts(commands.gpu(), call, cache);
    let tokens = work.tokens(call.head_dim, call.group_size);
    let (mut singles, mut several, mut combined) = (Vec::new(), Vec::new(), Vec::new());
    let (mut tables, mut row, mut num_slots) = (Vec::new(), 0, 0);
    for sequence in call.sequences {
        let table = tables.len() as u32;
        tables.extend_from_slice(sequence.block_table);
        let (step, items) =
            if sequence.num_tokens < work.least_tokens() { (1, &mut singles) } else { (tokens, &mut several) };
        for first in (0..sequence.num_tokens).step_by(step) {
            let num_tokens = step.min(sequence.num_tokens - first);
            let position = sequence.first_position + first;
            // Ranges end where they would for any other call; a prompt's are not cut.
            let num_keys = position + num_tokens;
            let range = if step == 1 { attention_decode::range_keys(num_keys) } else { num_keys };
            let num_ranges = num_keys.div_ceil(range);
            for index in 0..num_ranges {
                let first_key = index * range;
                items.push(Item {
                    row: (row + first) as u32,
                    num_tokens: num_tokens as u32,
                    table,
                    first_key: first_key as u32,
                    end_key: num_keys.min(first_key + range) as u32,
                    position: position as u32,
                    slot: if num_ranges > 1 { (num_slots + index) as u32 } else { NONE },
                    range: (index + num_ranges * MAX_RANGES) as u32,
                });
            }
            if num_ranges > 1 {
                combined.push([(row + first) as u32, num_slots as u32, num_ranges as u32, 0]);
                num_slots += num_ranges;
            }
        }
        row += sequence.num_tokens;
    }
    // The longest first: what is left at the end is short.
    several.reverse();
    let mut staged = |items: &[Item]| {
        (!items.is_empty()).then(|| commands.stage(items).map(|binding| (binding, items.len()))).transpose()
    };
    let items = [staged(&singles)?, staged(&several)?];
    let combined =
        (!combined.is_empty()).then(|| commands.stage(&combined).map(|at| (at, combined.len()))).transpose()?;
    Ok(StagedItems { work: [Work::Decode, work], items, tables: commands.stage(&tables)?, combined, num_slots })
}

/// Bytes of partial sums.
pub(super) fn partial_bytes(call: &Attention<'_>, staged: &StagedItems) -> u64 {
    (staged.num_slots * call.num_heads * (call.head_dim.div_ceil(4) + 1) * 16) as u64
}

/// Bytes of the counts of ranges that are done.
pub(super) fn arrival_bytes(call: &Attention<'_>, staged: &StagedItems) -> u64 {
    let chunks = call.group_size.div_ceil(Work::Decode.query_heads(call.head_dim, call.group_size));
    (staged.num_slots * call.num_key_value_heads * chunks * 4) as u64
}

/// Adds the call, which was checked, to the commands. `partial` holds [`partial_bytes`], `arrivals` [`arrival_bytes`], all 0.
pub(super) fn push(
    commands: &mut Commands,
    call: &Attention<'_>,
    staged: &StagedItems,
    cache: &WebGpuKvCache,
    rows: Rows,
    output: &mut WebGpuTensor,
    [partial, arrivals]: [Binding; 2],
) -> Result<(), KernelError> {
    let values = output.overwrite();
    let blocks =
        if call.head_dim.is_multiple_of(ACTIVATION_BLOCK) { output.overwrite_blocks(call.num_tokens()) } else { None };
    let make_blocks = blocks.is_some();
    let blocks: Vec<Binding> = blocks.into_iter().flat_map(|blocks| [blocks.quants, blocks.scales]).collect();
    let Attention { head_dim, group_size, .. } = *call;
    let joins = joins(commands.gpu(), cache);
    for (items, work) in staged.items.iter().zip(staged.work) {
        let Some((items, num_items)) = items else { continue };
        let (block_size, has_f16) = (cache.spec().block_size, commands.gpu().has_f16());
        let stores = rows.rotation.is_some();
        let key_lanes = attention_decode::key_lanes(commands.gpu().subgroup_threads());
        let joins = joins && work == Work::Decode;
        let variant =
            Variant { head_dim, block_size, group_size, work, make_blocks, has_f16, key_lanes, joins, stores };
        let (source, options) = variant.of_cache(cache.dtype(), cache.is_parted());
        let pipeline = commands.gpu().pipeline(source, &options)?;
        let mut bindings = vec![rows.qkv.clone(), items.clone(), staged.tables.clone()];
        bindings.extend(cache.layer(call.layer));
        bindings.push(values.clone());
        bindings.extend((work == Work::Decode).then(|| partial.clone()));
        bindings.extend(blocks.iter().chain(rows.rotation.iter().map(|rotation| &rotation.angles)).cloned());
        bindings.extend(joins.then(|| arrivals.clone()));
        let chunks = group_size.div_ceil(work.query_heads(head_dim, group_size));
        let parameters = [
            call.num_heads as u32,
            call.num_key_value_heads as u32,
            head_dim as u32,
            group_size as u32,
            call.group_offset as u32,
            call.scale.to_bits(),
            chunks as u32,
            cache.part_blocks() as u32,
            rows.rotation.as_ref().map_or(0, |rotation| rotation.rotary_dim as u32),
            rows.rotation.as_ref().map_or(0, |rotation| u32::from(rotation.style == RopeStyle::Interleaved)),
        ];
        let grid = [*num_items, call.num_key_value_heads * chunks, 1];
        commands.dispatch(&pipeline, bindings, &parameters, grid)?;
    }
    if let Some((tokens, num_tokens)) = staged.combined.as_ref().filter(|_| !joins) {
        let pipeline = commands.gpu().pipeline(&COMBINE, &combine_options(call.head_dim.div_ceil(4), make_blocks))?;
        let bindings = [tokens.clone(), partial, values].into_iter().chain(blocks).collect();
        let parameters = [call.num_heads as u32, call.head_dim as u32];
        commands.dispatch(&pipeline, bindings, &parameters, [*num_tokens, call.num_heads, 1])?;
    }
    Ok(())
}
