//! Plans of made-up models and clusters.

use lockstep_formats::GgmlType;

use super::*;

/// A llama-like shape with all its tensors.
pub(crate) fn shape(
    (hidden, intermediate, layers): (usize, usize, usize),
    (heads, kv_heads, head_dim): (usize, usize, usize),
    vocab_size: usize,
    ggml_type: GgmlType,
    is_tied: bool,
) -> ModelShape {
    let tensor = |role, layer, rows, columns, ggml_type| TensorShape { role, layer, rows, columns, ggml_type };
    let mut tensors = vec![
        tensor(TensorRole::TokenEmbedding, None, vocab_size, hidden, GgmlType::F16),
        tensor(TensorRole::OutputNorm, None, 1, hidden, GgmlType::F32),
    ];
    if !is_tied {
        tensors.push(tensor(TensorRole::Output, None, vocab_size, hidden, GgmlType::F16));
    }
    let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
    for layer in 0..layers {
        let matrices = [
            (TensorRole::Query, queries, hidden),
            (TensorRole::Key, keys, hidden),
            (TensorRole::Value, keys, hidden),
            (TensorRole::AttentionOutput, hidden, queries),
            (TensorRole::Gate, intermediate, hidden),
            (TensorRole::Up, intermediate, hidden),
            (TensorRole::Down, hidden, intermediate),
        ];
        tensors.extend(matrices.map(|(role, rows, columns)| tensor(role, Some(layer), rows, columns, ggml_type)));
        let norms = [TensorRole::AttentionNorm, TensorRole::FeedForwardNorm];
        tensors.extend(norms.map(|role| tensor(role, Some(layer), 1, hidden, GgmlType::F32)));
    }
    ModelShape {
        architecture: "llama".to_owned(),
        hidden_size: hidden,
        intermediate_size: intermediate,
        num_hidden_layers: layers,
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        head_dim,
        vocab_size,
        max_position_embeddings: 8192,
        tensors,
    }
}

pub(crate) fn smollm2() -> ModelShape {
    shape((576, 1536, 30), (9, 3, 64), 49152, GgmlType::Q4_1, true)
}

fn plan_of(shape: &ModelShape, devices: &str, policy: &str) -> Result<ShardPlan, PlanError> {
    let topology = Topology::parse_devices(devices).unwrap();
    plan(shape, &topology, &policy.parse().unwrap(), &PlanOptions::default())
}

#[test]
fn smollm2_is_cut_over_two_to_five_ranks() {
    let heads = |policy: &str| {
        let plan = plan_of(&smollm2(), "5*cpu", policy).unwrap();
        let ranks = plan.replicas[0].stages[0].ranks.iter();
        ranks.map(|rank| (rank.query_heads.clone(), rank.key_value_heads.clone())).collect::<Vec<_>>()
    };
    assert_eq!(heads("tensor=2,replicas=1"), [(0..4, 0..2), (4..9, 1..3)]);
    assert_eq!(heads("tensor=3"), [(0..3, 0..1), (3..6, 1..2), (6..9, 2..3)]);
    for (policy, most) in [("tensor=4", 3), ("tensor=5", 2)] {
        let ranks = heads(policy);
        assert!(ranks.iter().all(|(queries, _)| (1..=most).contains(&queries.len())), "{ranks:?}");
        assert_eq!(ranks.last().unwrap().0.end, 9);
    }
    let plan = plan_of(&smollm2(), "4*cpu", "hybrid=2x2").unwrap();
    let replica = &plan.replicas[0];
    assert_eq!((replica.world_size(), replica.stages.len()), (4, 2));
    // The head counts as much as eight layers.
    assert!(replica.stages[0].layers.len() > replica.stages[1].layers.len());
    let explanation = Explanation::new(&plan, &Topology::parse_devices("4*cpu").unwrap());
    assert!(explanation.to_string().contains("kv heads"));
    assert!(explanation.to_json().unwrap().contains("\"bound_by\""));
}

#[test]
fn too_many_ranks_are_refused_with_numbers() {
    let message = plan_of(&smollm2(), "12*cpu", "tensor=10").unwrap_err().to_string();
    assert_eq!(
        message,
        "tensor_parallel_size 10 is more than the 9 parts of 9 query heads that the model can be cut into"
    );
    let message = plan_of(&smollm2(), "40*cpu", "pipeline=31").unwrap_err().to_string();
    assert_eq!(message, "pipeline_parallel_size 31 is more than the 30 layers that the model can be cut into");
    let message = plan_of(&smollm2(), "3*cpu", "hybrid=2x2").unwrap_err().to_string();
    assert!(message.ends_with("need 4 devices, the cluster has 3"), "{message}");
    // Blocks of 256 elements hold four heads of 64.
    let model = shape((1024, 2048, 2), (16, 4, 64), 1000, GgmlType::Q4_K, true);
    assert!(plan_of(&model, "8*cpu", "tensor=4").is_ok());
    let message = plan_of(&model, "8*cpu", "tensor=5").unwrap_err().to_string();
    assert!(message.contains("4 parts of 16 query heads in groups of 4"), "{message}");
}

fn cluster(memories_bytes: &[u64], speeds: &[f64]) -> Topology {
    let mut topology = Topology::parse_devices(&format!("{}*cpu", speeds.len())).unwrap();
    for (device, (memory, speed)) in topology.devices.iter_mut().zip(memories_bytes.iter().zip(speeds)) {
        device.memory_bytes = *memory;
        device.memory_bytes_per_second = *speed;
    }
    topology
}

#[test]
fn a_weak_or_small_device_gets_less() {
    let fixed = |text: &str| text.parse::<Policy>().unwrap();
    let options = PlanOptions { max_sequence_tokens: Some(2048), ..PlanOptions::default() };
    let model = shape((1024, 4096, 24), (16, 4, 64), 32_000, GgmlType::Q8_0, false);
    let weak = plan(&model, &cluster(&[1 << 40, 1 << 40], &[40e9, 10e9]), &fixed("tensor=2"), &options).unwrap();
    let ranks = &weak.replicas[0].stages[0].ranks;
    assert!(ranks[0].weight_bytes > 2 * ranks[1].weight_bytes, "{ranks:?}");
    assert!(ranks[1].bound_by.starts_with("device speed (0.25"), "{}", ranks[1].bound_by);

    let even = plan(&model, &cluster(&[1 << 40, 1 << 40], &[40e9, 36e9]), &fixed("tensor=2"), &options).unwrap();
    let ranks = &even.replicas[0].stages[0].ranks;
    assert_eq!(ranks[0].intermediate.len(), ranks[1].intermediate.len());

    let whole: u64 = model.tensors.iter().map(TensorShape::bytes).sum();
    for policy in ["tensor=2", "pipeline=2"] {
        let small = cluster(&[whole, whole * 7 / 16], &[40e9, 40e9]);
        let plan = plan(&model, &small, &fixed(policy), &options).unwrap();
        let ranks: Vec<_> = plan.replicas[0].stages.iter().flat_map(|stage| &stage.ranks).collect();
        assert!(ranks[1].weight_bytes < ranks[0].weight_bytes, "{policy}");
        assert!(ranks[1].bound_by.starts_with("device memory"), "{}", ranks[1].bound_by);
        for (rank, device) in ranks.iter().zip(&small.devices) {
            assert!(rank.weight_bytes + rank.kv_bytes + rank.activation_bytes <= device.memory_bytes);
        }
    }
}

#[test]
fn a_plan_that_does_not_fit_is_refused_with_numbers() {
    let options = PlanOptions { max_sequence_tokens: Some(8192), ..PlanOptions::default() };
    let small = cluster(&[150 << 20], &[40e9]);
    let error = plan(&smollm2(), &small, &"tensor=1".parse().unwrap(), &options).unwrap_err();
    let PlanError::Memory { available_bytes, required_bytes, num_kv_blocks, .. } = error else { panic!("{error}") };
    assert_eq!((available_bytes, num_kv_blocks), (150 << 20, 256));
    assert!(required_bytes > available_bytes);
    // Without a length asked for, what fits is served.
    let less = cluster(&[260 << 20], &[40e9]);
    let plan = plan(&smollm2(), &less, &Policy::AUTO, &PlanOptions::default()).unwrap();
    assert!((512..8192).contains(&plan.max_sequence_tokens), "{}", plan.max_sequence_tokens);
    assert!(plan.replicas[0].num_kv_blocks * plan.block_size >= plan.max_sequence_tokens);
}

#[test]
fn a_cluster_that_does_not_exist_is_planned() {
    let model = shape((8192, 28_672, 80), (64, 8, 128), 128_256, GgmlType::Q4_K, false);
    let hosts = Topology::parse_devices("8*h200@a,8*h200@b").unwrap();
    let plan = plan(&model, &hosts, &Policy::AUTO, &PlanOptions::default()).unwrap();
    for replica in &plan.replicas {
        for stage in &replica.stages {
            let mut names = stage.ranks.iter().map(|rank| &hosts.devices[rank.device].host);
            let first = names.next();
            assert!(names.all(|name| Some(name) == first), "a group spans hosts");
        }
    }
    let spread = plan_of(&model, "8*h200@a,8*h200@b", "hybrid=8x2").unwrap();
    assert_eq!(spread.replicas.len(), 1);
    assert_eq!(spread.replicas[0].stages[1].ranks[0].worker_id, "b");
    println!("{}", Explanation::new(&plan, &hosts));
    println!("{}", Explanation::new(&spread, &hosts));
}
