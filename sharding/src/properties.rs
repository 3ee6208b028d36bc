//! Properties of all plans: random models, clusters and degrees.

use std::ops::Range;

use lockstep_formats::GgmlType;
use proptest::prelude::*;

use crate::{tests::shape, *};

prop_compose! {
    /// A small model whose matrices are whole numbers of blocks.
    fn models()(
        ggml_type in prop::sample::select(vec![GgmlType::F16, GgmlType::Q4_1, GgmlType::Q8_0, GgmlType::Q4_K]),
        head_dim in prop::sample::select(vec![64usize, 80, 128]),
        kv_heads in 1usize..=4,
        group in 1usize..=5,
        (hidden, intermediate) in (1usize..=3, 1usize..=6),
        layers in 1usize..=4,
        vocab_size in 40usize..=300,
        is_tied in any::<bool>(),
    ) -> ModelShape {
        let block = ggml_type.block_elements();
        // The output matrix has heads × head_dim columns: as many heads as fill its blocks.
        let mut heads = kv_heads * group;
        while !(heads * head_dim).is_multiple_of(block) {
            heads += kv_heads;
        }
        let unit = block.max(32);
        shape((hidden * unit, intermediate * unit, layers), (heads, kv_heads, head_dim), vocab_size, ggml_type, is_tied)
    }
}

prop_compose! {
    fn clusters()(speeds in prop::collection::vec(1u32..=8, 1..=8), hosts in 1usize..=3) -> Topology {
        let text: Vec<_> = (0..speeds.len()).map(|index| format!("cpu@host-{}", index % hosts)).collect();
        let mut topology = Topology::parse_devices(&text.join(",")).unwrap();
        for (device, speed) in topology.devices.iter_mut().zip(speeds) {
            device.memory_bytes_per_second = f64::from(speed) * 1e10;
        }
        topology
    }
}

/// The plan, or `None` where the degrees are refused for a good reason.
fn plan_or_refusal(model: &ModelShape, topology: &Topology, (tensor, pipeline): (usize, usize)) -> Option<ShardPlan> {
    let policy = Policy {
        parallelism: Parallelism::Fixed { tensor_parallel_size: tensor, pipeline_parallel_size: pipeline },
        replicas: None,
    };
    let options = PlanOptions { max_step_tokens: Some(64), ..PlanOptions::default() };
    match plan(model, topology, &policy, &options) {
        Ok(plan) => {
            assert_eq!(plan, super::plan(model, topology, &policy, &options).unwrap(), "not deterministic");
            Some(plan)
        }
        Err(PlanError::Degree { asked, possible, .. }) => {
            assert!(asked > possible);
            None
        }
        Err(PlanError::Devices { .. }) => {
            assert!(tensor * pipeline > topology.devices.len());
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Bytes of a whole tensor, each telling its place.
fn synthetic_bytes(tensor: &TensorShape) -> Vec<u8> {
    let seed = tensor.role as u64 * 131 + tensor.layer.map_or(7, |layer| layer as u64);
    (0..tensor.bytes()).map(|index| ((index + seed).wrapping_mul(2_654_435_761) >> 13) as u8 | 1).collect()
}

/// Puts the slices of `ranks` together and counts how often each byte came; checks that columns are on block borders.
fn reassemble(tensor: &TensorShape, slices: &[TensorSlice]) -> (Vec<u8>, Vec<u8>) {
    let whole = synthetic_bytes(tensor);
    let mut copy = vec![0; whole.len()];
    let mut counts = vec![0; whole.len()];
    let (elements, bytes) = (tensor.ggml_type.block_elements(), tensor.ggml_type.block_bytes());
    for slice in slices {
        let span = |column: usize| {
            assert!(column.is_multiple_of(elements), "{tensor:?}: column {column} inside a block");
            column / elements * bytes
        };
        for row in slice.rows.clone() {
            let start = row * tensor.row_bytes() as usize;
            let range = start + span(slice.columns.start)..start + span(slice.columns.end);
            copy[range.clone()].copy_from_slice(&whole[range.clone()]);
            counts[range].iter_mut().for_each(|count| *count += 1);
        }
    }
    assert_eq!(copy, whole, "{tensor:?}");
    (copy, counts)
}

fn is_replicated(role: TensorRole) -> bool {
    use TensorRole::*;
    matches!(role, Key | Value | AttentionNorm | FeedForwardNorm | OutputNorm | RopeFrequencies)
}

fn is_partition(ranges: &[Range<usize>], total: usize) -> bool {
    let ends = ranges.iter().map(|range| range.end);
    let starts = ranges.iter().map(|range| range.start);
    starts.eq([0].into_iter().chain(ends.take(ranges.len() - 1)))
        && ranges.last().is_some_and(|range| range.end == total)
        && ranges.iter().all(|range| !range.is_empty())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_element_has_one_owner(model in models(), topology in clusters(), tensor in 1usize..=6, pipeline in 1usize..=3) {
        let Some(plan) = plan_or_refusal(&model, &topology, (tensor, pipeline)) else { return Ok(()) };
        for replica in &plan.replicas {
            for tensor in &model.tensors {
                for stage in &replica.stages {
                    let slices: Vec<_> =
                        stage.ranks.iter().filter_map(|rank| replica.slice(&model, tensor, rank.rank)).collect();
                    if slices.is_empty() {
                        continue;
                    }
                    let (_, counts) = reassemble(tensor, &slices);
                    if !is_replicated(tensor.role) {
                        prop_assert!(counts.iter().all(|count| *count == 1), "{tensor:?}");
                    }
                }
                let holders = replica.stages.iter().flat_map(|stage| &stage.ranks);
                let holders = holders.filter(|rank| replica.slice(&model, tensor, rank.rank).is_some());
                prop_assert!(holders.count() > 0, "{tensor:?} has no owner");
            }
        }
    }

    #[test]
    fn shares_partition_the_model(model in models(), topology in clusters(), tensor in 1usize..=6, pipeline in 1usize..=3) {
        let Some(plan) = plan_or_refusal(&model, &topology, (tensor, pipeline)) else { return Ok(()) };
        let mut devices = Vec::new();
        for replica in &plan.replicas {
            let layers: Vec<_> = replica.stages.iter().map(|stage| stage.layers.clone()).collect();
            prop_assert!(is_partition(&layers, model.num_hidden_layers));
            let ranks: Vec<_> = replica.stages.iter().flat_map(|stage| &stage.ranks).collect();
            prop_assert!(ranks.iter().enumerate().all(|(index, rank)| rank.rank == index));
            devices.extend(ranks.iter().map(|rank| rank.device));
            for stage in &replica.stages {
                let of = |part: fn(&RankPlan) -> &Range<usize>| stage.ranks.iter().map(|rank| part(rank).clone()).collect::<Vec<_>>();
                prop_assert!(is_partition(&of(|rank| &rank.query_heads), model.num_attention_heads));
                prop_assert!(is_partition(&of(|rank| &rank.intermediate), model.intermediate_size));
                prop_assert!(is_partition(&of(|rank| &rank.vocabulary), model.vocab_size));
                for rank in &stage.ranks {
                    let needed = rank.query_heads.clone().map(|head| head / model.group_size());
                    prop_assert!(needed.clone().all(|head| rank.key_value_heads.contains(&head)));
                    prop_assert!(rank.key_value_heads.clone().all(|head| needed.clone().any(|other| other == head)));
                    prop_assert!(rank.decode_step_ms > 0.0 && rank.decode_step_ms.is_finite());
                }
            }
        }
        let used = devices.len();
        devices.sort_unstable();
        devices.dedup();
        prop_assert_eq!(devices.len(), used, "a device holds two ranks");
    }

    #[test]
    fn plans_and_shapes_survive_their_encoding(model in models(), topology in clusters(), at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let plan = plan(&model, &topology, &Policy::AUTO, &PlanOptions::default()).unwrap();
        let bytes = encode(&plan).unwrap();
        prop_assert_eq!(decode(&bytes).unwrap(), plan);
        prop_assert_eq!(decode_shape(&encode_shape(&model).unwrap()).unwrap(), model);
        prop_assert!(decode_shape(&bytes).is_err());
        // Damaged bytes give an error or another plan, never a panic.
        prop_assert!(decode(&bytes[..at.index(bytes.len())]).is_err());
        let mut damaged = bytes.clone();
        damaged[at.index(bytes.len())] ^= 1 << bit;
        let _ = decode(&damaged);
    }
}
