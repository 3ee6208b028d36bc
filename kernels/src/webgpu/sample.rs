//! The device side of sampling on WebGPU. Device code: `wgsl/sample.wgsl`.
//! For: [`WebGpuDevice`](super::WebGpuDevice). Contract: [`ops::sample`](crate::ops::sample).
//! Invariant: slices of a row are merged as those of ranks are, so what comes back is as much as ranks would send.

use super::{
    commands::{Binding, Commands},
    reading::Reading,
    source::Source,
    tensor::WebGpuTensor,
};
use crate::{
    KernelError,
    ops::{Candidates, SampleRow},
};

/// The shader.
pub static SAMPLE: Source = Source { name: "sample.wgsl", text: include_str!("../../wgsl/sample.wgsl") };

/// Logits that a workgroup reduces.
const SLICE: usize = 2048;
/// Its options.
pub const OPTIONS: [(&str, u32); 2] = [("THREADS", 256), ("SLICE", SLICE as u32)];
/// Words of a slice's results before its candidates.
const FIXED_WORDS: usize = 8;

/// A row, as the shader reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::NoUninit)]
struct Row {
    top_k: u32,
    raw_top_k: u32,
    inverse_temperature: f32,
    is_drawn: u32,
    seed: [u32; 2],
    first_penalty: u32,
    num_penalties: u32,
}

/// Where the results of a call lie.
struct Results {
    part: Binding,
    num_slices: usize,
    slice_words: usize,
    rooms: [usize; 2],
    width: usize,
}

/// Reduced rows on their way back.
pub struct PendingCandidates {
    rows: Vec<SampleRow>,
    results: Option<(Results, Reading)>,
}

impl PendingCandidates {
    /// What came of each row, as soon as the GPU has it.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the GPU fails.
    pub async fn arrive(self) -> Result<Vec<Candidates>, KernelError> {
        match self.results {
            Some((results, reading)) => Ok(results.merge(&self.rows, &reading.arrive().await?)),
            None => Ok(Vec::new()),
        }
    }
}

/// Reduces the first rows of `logits` and reads back what comes of them, by way of `results`.
///
/// # Errors
/// [`KernelError`] if a row does not pass its checks or the GPU fails.
pub(super) fn sample(
    commands: &mut Commands,
    rows: &[SampleRow],
    first_token: u32,
    logits: &WebGpuTensor,
    results: &mut Binding,
) -> Result<Vec<Candidates>, KernelError> {
    match push(commands, rows, first_token, logits, results)? {
        Some(results) => Ok(results.merge(rows, &commands.read(&results.part)?)),
        None => Ok(Vec::new()),
    }
}

/// The same without waiting for the GPU.
///
/// # Errors
/// [`KernelError`] if a row does not pass its checks or the GPU fails.
pub(super) fn sample_later(
    commands: &mut Commands,
    rows: &[SampleRow],
    first_token: u32,
    logits: &WebGpuTensor,
    results: &mut Binding,
) -> Result<PendingCandidates, KernelError> {
    let results = push(commands, rows, first_token, logits, results)?;
    let read = |results: Results| Ok::<_, KernelError>((commands.read_later(&results.part)?, results));
    let results = results.map(read).transpose()?.map(|(reading, results)| (results, reading));
    Ok(PendingCandidates { rows: rows.to_vec(), results })
}

/// Adds the reduction to the commands, unless there are no rows.
fn push(
    commands: &mut Commands,
    rows: &[SampleRow],
    first_token: u32,
    logits: &WebGpuTensor,
    results: &mut Binding,
) -> Result<Option<Results>, KernelError> {
    rows.iter().try_for_each(SampleRow::check)?;
    logits.expect_tokens("sample", rows.len())?;
    let width = logits.width();
    if u32::try_from(width).ok().and_then(|width| first_token.checked_add(width)).is_none() {
        let (got, limit) = (first_token as usize + width, u32::MAX as usize);
        return Err(KernelError::OutOfRange { operation: "sample", what: "last token id", got, limit });
    }
    if rows.is_empty() {
        return Ok(None);
    }
    let room = |wanted: fn(&SampleRow) -> usize| rows.iter().map(wanted).max().unwrap_or(0).min(SLICE);
    let rooms = [room(|row| row.top_k), room(|row| row.raw_top_k)];
    let num_slices = width.div_ceil(SLICE);
    let slice_words = FIXED_WORDS + 2 * (rooms[0] + rooms[1]);
    let num_bytes = (rows.len() * num_slices * slice_words * size_of::<u32>()) as u64;
    if results.num_bytes < num_bytes {
        *results = Binding::whole(&commands.gpu().buffer("candidates", num_bytes.next_power_of_two())?);
    }
    let (staged, penalties) = stage(commands, rows)?;
    let pipeline = commands.gpu().pipeline(&SAMPLE, &OPTIONS)?;
    let bindings = vec![logits.values(), staged, penalties, results.clone()];
    let infinity = f32::NEG_INFINITY.to_bits();
    let parameters = [width as u32, first_token, infinity, rooms[0] as u32, rooms[1] as u32];
    commands.dispatch(&pipeline, bindings, &parameters, [num_slices, rows.len(), 1])?;
    let part = Binding { num_bytes, ..results.clone() };
    Ok(Some(Results { part, num_slices, slice_words, rooms, width }))
}

impl Results {
    /// What came of each row.
    fn merge(&self, rows: &[SampleRow], words: &[u32]) -> Vec<Candidates> {
        let Self { num_slices, slice_words, rooms, width, .. } = *self;
        let rows_words = words.chunks_exact(num_slices * slice_words);
        let merged = rows.iter().zip(rows_words).map(|(row, words)| {
            let slices = words.chunks_exact(slice_words).enumerate();
            let slices = slices.map(|(slice, words)| candidates(row, words, rooms, SLICE.min(width - slice * SLICE)));
            Candidates::merge(row, slices)
        });
        merged.collect()
    }
}

fn stage(commands: &mut Commands, rows: &[SampleRow]) -> Result<(Binding, Binding), KernelError> {
    let mut penalties: Vec<[u32; 4]> = Vec::new();
    let mut staged = Vec::with_capacity(rows.len());
    for row in rows {
        let seed = row.noise_seed.unwrap_or(0);
        staged.push(Row {
            top_k: u32::try_from(row.top_k).unwrap_or(u32::MAX),
            raw_top_k: u32::try_from(row.raw_top_k).unwrap_or(u32::MAX),
            inverse_temperature: 1.0 / row.temperature,
            is_drawn: u32::from(row.noise_seed.is_some()),
            seed: [seed as u32, (seed >> 32) as u32],
            first_penalty: penalties.len() as u32,
            num_penalties: row.penalties.len() as u32,
        });
        let words = |penalty: &crate::ops::TokenPenalty| {
            [penalty.token_id, penalty.repetition.to_bits(), penalty.subtract.to_bits(), 0]
        };
        penalties.extend(row.penalties.iter().map(words));
    }
    Ok((commands.stage(&staged)?, commands.stage(&penalties)?))
}

/// What a slice of `len` logits came to.
fn candidates(row: &SampleRow, words: &[u32], rooms: [usize; 2], len: usize) -> Candidates {
    let float = |index: usize| f32::from_bits(words[index]);
    let log_sum_exp = |at: usize| {
        let (largest, sum) = (float(at), float(at + 1));
        if largest.is_finite() { (f64::from(largest) + f64::from(sum).ln()) as f32 } else { largest }
    };
    let top = |at: usize, wanted: usize| {
        let entries = words[at..].chunks_exact(2).take(wanted.min(len));
        entries.map(|entry| (entry[1], f32::from_bits(entry[0]))).collect()
    };
    Candidates {
        raw_log_sum_exp: log_sum_exp(0),
        scaled_log_sum_exp: log_sum_exp(2),
        drawn: (words[4] != 0).then(|| (words[5], float(6), float(7))),
        top: top(FIXED_WORDS, row.top_k),
        raw_top: top(FIXED_WORDS + 2 * rooms[0], row.raw_top_k),
    }
}
