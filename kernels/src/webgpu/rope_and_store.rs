//! Rotary embedding and KV store in one dispatch. Device code: `wgsl/rope_and_store.wgsl`.
//! For: [`WebGpuDevice`](super::WebGpuDevice).
//! Invariant: cosines and sines come from the host, in f64 as the oracle's; the layers of a step share them.

use std::sync::Arc;

use lockstep_formats::Dtype;

use super::{
    commands::{Binding, Commands},
    kv_cache::{self, WebGpuKvCache},
    source::{Options, Source},
};
use crate::{
    KernelError,
    ops::{RopeAndStore, RopeStyle, RopeTable},
};

/// The shader.
pub static ROPE_AND_STORE: Source =
    Source { name: "rope_and_store.wgsl", text: include_str!("../../wgsl/rope_and_store.wgsl") };

/// Threads of a workgroup; each takes four elements of a head at a time.
pub const THREADS: u32 = 64;

/// What the layers of a step share.
#[derive(Clone)]
pub(super) struct StagedTokens {
    /// Cosine and sine of each rotated pair of each token.
    pub angles: Binding,
    slots: Binding,
    /// Position and slot of each token.
    pub places: Arc<[[u32; 2]]>,
}

/// Options of the variant for a cache.
pub fn options(dtype: Dtype, is_parted: bool, style: RopeStyle) -> Options {
    let mut options = kv_cache::options(dtype, is_parted).to_vec();
    let interleaved = u32::from(style == RopeStyle::Interleaved);
    options.extend([("NATIVE", 0), ("STORES", 1), ("THREADS", THREADS), ("INTERLEAVED", interleaved)]);
    options
}

/// Sends angles and slots.
pub(super) fn stage(
    commands: &mut Commands,
    call: &RopeAndStore<'_>,
    table: &RopeTable,
) -> Result<StagedTokens, KernelError> {
    let magnitude = f64::from(table.magnitude);
    let angles: Vec<[f32; 2]> = call
        .positions
        .iter()
        .flat_map(|position| {
            table.frequencies.iter().map(move |frequency| {
                let (sine, cosine) = (f64::from(*position) * f64::from(*frequency)).sin_cos();
                [(cosine * magnitude) as f32, (sine * magnitude) as f32]
            })
        })
        .collect();
    let places = call.positions.iter().zip(call.slot_mapping).map(|(position, slot)| [*position, *slot]).collect();
    Ok(StagedTokens { angles: commands.stage(&angles)?, slots: commands.stage(call.slot_mapping)?, places })
}

/// Adds the call, which was checked, to the commands.
pub(super) fn push(
    commands: &mut Commands,
    call: &RopeAndStore<'_>,
    table: &RopeTable,
    staged: &StagedTokens,
    qkv: Binding,
    cache: &WebGpuKvCache,
) -> Result<(), KernelError> {
    let options = options(cache.dtype(), cache.is_parted(), table.style);
    let pipeline = commands.gpu().pipeline(&ROPE_AND_STORE, &options)?;
    let tokens = [qkv, staged.angles.clone(), staged.slots.clone()];
    let bindings = tokens.into_iter().chain(cache.layer(call.layer)).collect();
    let numbers = [
        call.num_heads,
        call.num_key_value_heads,
        call.head_dim,
        table.rotary_dim,
        cache.spec().block_size,
        cache.head_groups(),
        cache.part_blocks(),
    ];
    let heads = call.num_heads + 2 * call.num_key_value_heads;
    commands.dispatch(&pipeline, bindings, &numbers.map(|number| number as u32), [heads, call.num_tokens(), 1])
}
