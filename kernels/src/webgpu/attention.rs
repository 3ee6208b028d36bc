//! Paged flash attention on WebGPU. Device code: `wgsl/attention.wgsl`, `attention_combine.wgsl`.
//! For: [`WebGpuDevice`](super::WebGpuDevice).
//! Invariant: how a token's keys are cut into ranges depends on its position alone.

use lockstep_formats::Dtype;

use super::{
    commands::{Binding, Commands},
    kv_cache::{self, WebGpuKvCache},
    source::{Options, Source},
    tensor::WebGpuTensor,
};
use crate::{KernelError, ops::Attention, quant::ACTIVATION_BLOCK};

/// The ranges of keys.
pub static ATTENTION: Source = Source { name: "attention.wgsl", text: include_str!("../../wgsl/attention.wgsl") };
/// Their sums.
pub static COMBINE: Source =
    Source { name: "attention_combine.wgsl", text: include_str!("../../wgsl/attention_combine.wgsl") };

/// Threads of a workgroup, and keys of a tile: a quarter of the largest head.
const THREADS: u32 = 128;
/// Keys of a range.
const RANGE_KEYS: usize = 128;
/// Tokens of a prompt that share an item.
const PREFILL_TOKENS: usize = 4;
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
    unused: u32,
}

/// The work of a step, which its layers share.
#[derive(Clone)]
pub(super) struct StagedItems {
    /// Items of one token, and of several, each with their number.
    items: [Option<(Binding, usize)>; 2],
    tables: Binding,
    /// Tokens whose sums are to be joined, and their number.
    combined: Option<(Binding, usize)>,
    /// Slots of partial sums.
    num_slots: usize,
}

/// What decides the variant of `attention.wgsl` beside the cache.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// Elements of a head.
    pub head_dim: usize,
    /// Tokens of a KV block.
    pub block_size: usize,
    /// Query heads of a group.
    pub group_size: usize,
    /// Whether items have several tokens.
    pub is_prefill: bool,
    /// Whether the output is made as 8-bit blocks, too.
    pub make_blocks: bool,
}

/// Options of `attention.wgsl`.
pub fn attention_options(dtype: Dtype, is_parted: bool, variant: Variant) -> Options {
    let mut options = kv_cache::options(dtype, is_parted).to_vec();
    let Variant { head_dim, block_size, group_size, is_prefill, make_blocks } = variant;
    let tokens = if is_prefill { PREFILL_TOKENS } else { 1 };
    options.extend([
        ("WIDE", u32::from(dtype == Dtype::F32)),
        ("THREADS", THREADS),
        ("GROUP", query_heads(head_dim, group_size, is_prefill) as u32),
        ("TOKENS", tokens as u32),
        ("GROUPS", head_dim.div_ceil(4) as u32),
        ("BLOCK_SIZE", block_size as u32),
        ("QUANTIZE", u32::from(make_blocks)),
    ]);
    options
}

/// Options of `attention_combine.wgsl` for heads of so many groups of four elements.
pub fn combine_options(head_groups: usize, make_blocks: bool) -> Options {
    vec![("THREADS", THREADS), ("GROUPS", head_groups as u32), ("QUANTIZE", u32::from(make_blocks))]
}

/// Query heads that share a workgroup.
fn query_heads(head_dim: usize, group_size: usize, is_prefill: bool) -> usize {
    // Queries and scores stay in workgroup memory.
    let most = match (is_prefill, head_dim) {
        (true, 257..) => 1,
        (true, 129..) => 2,
        (true, _) => 4,
        (false, 257..) => 4,
        (false, _) => 8,
    };
    group_size.next_power_of_two().min(most)
}

/// Sends what is to be done.
pub(super) fn stage(commands: &mut Commands, call: &Attention<'_>) -> Result<StagedItems, KernelError> {
    let (mut singles, mut several, mut combined) = (Vec::new(), Vec::new(), Vec::new());
    let (mut tables, mut row, mut num_slots) = (Vec::new(), 0, 0);
    for sequence in call.sequences {
        let table = tables.len() as u32;
        tables.extend_from_slice(sequence.block_table);
        let (step, items) =
            if sequence.num_tokens < PREFILL_TOKENS { (1, &mut singles) } else { (PREFILL_TOKENS, &mut several) };
        for first in (0..sequence.num_tokens).step_by(step) {
            let num_tokens = step.min(sequence.num_tokens - first);
            let position = sequence.first_position + first;
            // Ranges end where they would for any other call; a prompt's are not cut.
            let num_keys = position + num_tokens;
            let range = if step == 1 { RANGE_KEYS } else { num_keys };
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
                    unused: 0,
                });
            }
            if num_ranges > 1 {
                combined.push([(row + first) as u32, num_slots as u32, num_ranges as u32, 1]);
                num_slots += num_ranges;
            }
        }
        row += sequence.num_tokens;
    }
    let mut staged = |items: &[Item]| {
        (!items.is_empty()).then(|| commands.stage(items).map(|binding| (binding, items.len()))).transpose()
    };
    let items = [staged(&singles)?, staged(&several)?];
    let combined =
        (!combined.is_empty()).then(|| commands.stage(&combined).map(|at| (at, combined.len()))).transpose()?;
    Ok(StagedItems { items, tables: commands.stage(&tables)?, combined, num_slots })
}

/// Bytes of partial sums.
pub(super) fn partial_bytes(call: &Attention<'_>, staged: &StagedItems) -> u64 {
    (staged.num_slots * call.num_heads * (call.head_dim.div_ceil(4) + 1) * 16) as u64
}

/// Adds the call, which was checked, to the commands. `partial` holds [`partial_bytes`].
pub(super) fn push(
    commands: &mut Commands,
    call: &Attention<'_>,
    staged: &StagedItems,
    cache: &WebGpuKvCache,
    qkv: Binding,
    output: &mut WebGpuTensor,
    partial: Binding,
) -> Result<(), KernelError> {
    let values = output.overwrite();
    let blocks =
        if call.head_dim.is_multiple_of(ACTIVATION_BLOCK) { output.overwrite_blocks(call.num_tokens()) } else { None };
    let make_blocks = blocks.is_some();
    let blocks: Vec<Binding> = blocks.into_iter().flat_map(|blocks| [blocks.quants, blocks.scales]).collect();
    for (items, is_prefill) in staged.items.iter().zip([false, true]) {
        let Some((items, num_items)) = items else { continue };
        let Attention { head_dim, group_size, .. } = *call;
        let variant = Variant { head_dim, block_size: cache.spec().block_size, group_size, is_prefill, make_blocks };
        let options = attention_options(cache.dtype(), cache.is_parted(), variant);
        let pipeline = commands.gpu().pipeline(&ATTENTION, &options)?;
        let mut cached = cache.layer(call.layer);
        let mut bindings = vec![qkv.clone(), items.clone(), staged.tables.clone()];
        bindings.extend(cached.by_ref().take(2));
        bindings.extend([values.clone(), partial.clone()]);
        bindings.extend(blocks.iter().cloned().chain(cached));
        let chunks = group_size.div_ceil(query_heads(head_dim, group_size, is_prefill));
        let parameters = [
            call.num_heads as u32,
            call.num_key_value_heads as u32,
            head_dim as u32,
            group_size as u32,
            call.group_offset as u32,
            call.scale.to_bits(),
            chunks as u32,
            cache.part_blocks() as u32,
        ];
        let grid = [*num_items, call.num_key_value_heads * chunks, 1];
        commands.dispatch(&pipeline, bindings, &parameters, grid)?;
    }
    if let Some((tokens, num_tokens)) = &staged.combined {
        let pipeline = commands.gpu().pipeline(&COMBINE, &combine_options(call.head_dim.div_ceil(4), make_blocks))?;
        let bindings = [tokens.clone(), partial, values].into_iter().chain(blocks).collect();
        let parameters = [call.num_heads as u32, call.head_dim as u32];
        commands.dispatch(&pipeline, bindings, &parameters, [*num_tokens, call.num_heads, 1])?;
    }
    Ok(())
}
