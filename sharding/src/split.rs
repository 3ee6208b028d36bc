//! Cuts the layers' matrices over the ranks of a tensor-parallel group.
//! Invariant: the ranges of a group partition query heads, intermediate columns and vocabulary rows in rank order, each
//! rank has at least one of each, and row-parallel matrices are cut on borders of their quantization blocks; where there
//! are parts enough also on those of the kernels' f32 sums, so that a cut changes no bit of the result.
//! Each kind is balanced by itself, not their sum: ranks meet after attention and after the feed-forward layer.

use std::ops::Range;

use lockstep_formats::GgmlType;

use crate::{ModelShape, PlanError, TensorRole};

/// Columns and vocabulary rows are handed out in multiples of this where possible, for the kernels' sake.
const ALIGNMENT: usize = 32;

/// What one rank of the group gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorShare {
    pub query_heads: Range<usize>,
    pub key_value_heads: Range<usize>,
    pub intermediate: Range<usize>,
    pub vocabulary: Range<usize>,
}

/// Smallest pieces in which a model can be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Granules {
    /// Query heads.
    pub heads: usize,
    /// Intermediate columns.
    pub intermediate: usize,
    /// Vocabulary rows.
    pub vocabulary: usize,
}

impl Granules {
    /// For a group of `degree` ranks.
    pub fn of(shape: &ModelShape, degree: usize) -> Self {
        let by_sum = Self::on_borders(shape, GgmlType::sum_columns);
        if by_sum.max_degree(shape) >= degree { by_sum } else { Self::on_borders(shape, GgmlType::block_elements) }
    }

    fn on_borders(shape: &ModelShape, border: fn(GgmlType) -> usize) -> Self {
        let block = |role| {
            let tensors = shape.tensors.iter().filter(|tensor| tensor.role == role);
            tensors.fold(1, |block, tensor| lcm(block, border(tensor.ggml_type)))
        };
        Self {
            heads: lcm(block(TensorRole::AttentionOutput), shape.head_dim) / shape.head_dim,
            intermediate: lcm(block(TensorRole::Down), ALIGNMENT),
            vocabulary: ALIGNMENT,
        }
    }

    /// The largest tensor-parallel degree of `shape`.
    pub fn max_degree(&self, shape: &ModelShape) -> usize {
        let heads = shape.num_attention_heads.div_ceil(self.heads);
        heads.min(shape.intermediate_size.div_ceil(self.intermediate))
    }

    /// Accepts a tensor-parallel degree that `shape` can be cut into.
    ///
    /// # Errors
    /// [`PlanError::Degree`] saying what bounds it and what would work.
    pub fn check(&self, shape: &ModelShape, asked: usize) -> Result<(), PlanError> {
        let possible = self.max_degree(shape);
        if asked <= possible {
            return Ok(());
        }
        let noun = if possible == 1 { "part" } else { "parts" };
        let is_heads = possible == shape.num_attention_heads.div_ceil(self.heads);
        let (parts, role) = if is_heads {
            let each = if self.heads == 1 { String::new() } else { format!(" in groups of {}", self.heads) };
            (format!("{noun} of {} query heads{each}", shape.num_attention_heads), TensorRole::AttentionOutput)
        } else {
            let columns = format!("{} intermediate columns, {} each", shape.intermediate_size, self.intermediate);
            (format!("{noun} of {columns}"), TensorRole::Down)
        };
        let types = shape.tensors.iter().filter(|tensor| tensor.role == role).map(|tensor| tensor.ggml_type);
        let widest = types.max_by_key(|ggml_type| ggml_type.block_elements());
        let cause =
            widest.filter(|ggml_type| ggml_type.block_elements() > ALIGNMENT).map_or_else(String::new, |wide| {
                let columns = wide.block_elements();
                let span = if is_heads && self.heads > 1 {
                    format!(" spans {} heads of head_dim {}", self.heads, shape.head_dim)
                } else {
                    " cannot be cut".to_owned()
                };
                format!(
                    ": a {wide} block of {columns} columns{span}; pipeline=N or a type with blocks of 32 would work"
                )
            });
        Err(PlanError::Degree { degree: "tensor_parallel_size", asked, possible, parts, cause })
    }
}

/// Cuts `shape` over ranks of relative speeds `shares`.
///
/// # Errors
/// [`PlanError::Degree`] if there are more ranks than parts.
pub(crate) fn split(shape: &ModelShape, shares: &[f64]) -> Result<Vec<TensorShare>, PlanError> {
    let granules = Granules::of(shape, shares.len());
    granules.check(shape, shares.len())?;
    let heads = split_heads(shape, granules.heads, shares);
    let intermediate = proportional(shape.intermediate_size, granules.intermediate, shares);
    let vocabulary_granule =
        if shape.vocab_size >= granules.vocabulary * shares.len() { granules.vocabulary } else { 1 };
    let vocabulary = proportional(shape.vocab_size, vocabulary_granule, shares);
    Ok(heads
        .into_iter()
        .zip(intermediate)
        .zip(vocabulary)
        .map(|((query_heads, intermediate), vocabulary)| TensorShare {
            key_value_heads: key_value_heads(shape, &query_heads),
            query_heads,
            intermediate,
            vocabulary,
        })
        .collect())
}

/// The key/value heads that `query_heads` attend to.
pub(crate) fn key_value_heads(shape: &ModelShape, query_heads: &Range<usize>) -> Range<usize> {
    let group = shape.group_size().max(1);
    query_heads.start / group..query_heads.end.div_ceil(group)
}

/// A partial cut of the first heads over the first ranks.
#[derive(Clone, Copy)]
struct Cut {
    slowest: f64,
    key_value_heads: usize,
    start: usize,
}

/// Query heads by rank such that the slowest rank's attention weights take least time; of equal cuts, the one that
/// replicates fewest key/value heads, then the one that spares the first rank, which also schedules. Exact, by dynamic programming over borders.
fn split_heads(shape: &ModelShape, granule: usize, shares: &[f64]) -> Vec<Range<usize>> {
    let total = shape.num_attention_heads;
    let units = total.div_ceil(granule);
    // A query head costs its rows of Q and columns of the output matrix, a key/value head its rows of K and V; attention
    // itself goes with the query heads and adds about an eighth.
    let cost = |range: &Range<usize>| 1.125 * range.len() as f64 + key_value_heads(shape, range).len() as f64;
    let heads = |units: Range<usize>| units.start * granule..total.min(units.end * granule);
    let mut table: Vec<Vec<Option<Cut>>> = vec![vec![None; units + 1]; shares.len() + 1];
    table[0][0] = Some(Cut { slowest: 0.0, key_value_heads: 0, start: 0 });
    for (rank, share) in shares.iter().enumerate() {
        let ranks_left = shares.len() - rank - 1;
        for end in rank + 1..=units - ranks_left {
            let cuts = (rank..end).filter_map(|start| {
                let before = table[rank][start]?;
                let range = heads(start..end);
                Some(Cut {
                    slowest: before.slowest.max(cost(&range) / share),
                    key_value_heads: before.key_value_heads + key_value_heads(shape, &range).len(),
                    start,
                })
            });
            table[rank + 1][end] = cuts.min_by(|a, b| {
                let slowest = a.slowest.total_cmp(&b.slowest);
                slowest.then(a.key_value_heads.cmp(&b.key_value_heads)).then(a.start.cmp(&b.start))
            });
        }
    }
    let mut ranges = Vec::with_capacity(shares.len());
    let mut end = units;
    for row in table.iter().skip(1).rev() {
        let start = row[end].map_or(0, |cut| cut.start);
        ranges.push(heads(start..end));
        end = start;
    }
    ranges.reverse();
    ranges
}

/// Ranges of `total` on multiples of `granule` (but for the end), in proportion to `shares`, none empty.
/// The caller has checked that there are at least as many granules as shares.
pub(crate) fn proportional(total: usize, granule: usize, shares: &[f64]) -> Vec<Range<usize>> {
    let units = total.div_ceil(granule);
    let counts = apportion(units, shares);
    let mut start = 0;
    counts
        .into_iter()
        .map(|count| {
            let range = (start * granule).min(total)..((start + count) * granule).min(total);
            start += count;
            range
        })
        .collect()
}

/// `units` in proportion to `shares`, each at least one: repeatedly to whom one more unit costs the least time.
fn apportion(units: usize, shares: &[f64]) -> Vec<usize> {
    let sum: f64 = shares.iter().sum();
    let mut counts: Vec<usize> =
        shares.iter().map(|share| ((units as f64 * share / sum).floor() as usize).max(1)).collect();
    let time = |count: usize, index: usize| count as f64 / shares[index];
    while counts.iter().sum::<usize>() < units {
        let next = (0..counts.len()).min_by(|&a, &b| time(counts[a] + 1, a).total_cmp(&time(counts[b] + 1, b)));
        let Some(next) = next else { break };
        counts[next] += 1;
    }
    while counts.iter().sum::<usize>() > units {
        let reducible = (0..counts.len()).filter(|&index| counts[index] > 1);
        let Some(next) = reducible.max_by(|&a, &b| time(counts[a], a).total_cmp(&time(counts[b], b))) else { break };
        counts[next] -= 1;
    }
    counts
}

fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a.checked_div(x).map_or(0, |factor| factor * b)
}
