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
    assert!(message.contains("a Q4_K block of 256 columns spans 4 heads of head_dim 64; pipeline=N"), "{message}");
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
    let message = error.to_string();
    assert!(message.starts_with("device host-0/0 (cpu) has 150.0 MiB to use, its part needs "), "{message}");
    assert!(message.ends_with("; the model needs at least 3 such devices"), "{message}");
    let PlanError::Memory { available_bytes, required_bytes, num_kv_blocks, .. } = error else { panic!("{error}") };
    assert_eq!((available_bytes, num_kv_blocks), (150 << 20, 256));
    assert!(required_bytes > available_bytes);
    // Nor is one that would take more bytes than can be counted.
    let options = PlanOptions { num_kv_blocks: Some(1 << 30), block_size: 1 << 30, ..PlanOptions::default() };
    let error = plan(&smollm2(), &small, &"tensor=1".parse().unwrap(), &options).unwrap_err();
    assert!(matches!(error, PlanError::Memory { kv_bytes: u64::MAX, .. }), "{error}");
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
}

fn llama_8b() -> ModelShape {
    shape((4096, 14_336, 32), (32, 8, 128), 128_256, GgmlType::Q4_K, false)
}

#[test]
fn auto_leaves_out_devices_that_make_it_worse() {
    let fast_alone = plan_of(&llama_8b(), "8*h200@a", "auto").unwrap();
    for devices in ["8*h200@a,4*cpu@a", "8*h200@a,1*cpu@b", "cpu@b,8*h200@a"] {
        let topology = Topology::parse_devices(devices).unwrap();
        let plan = plan_of(&llama_8b(), devices, "auto").unwrap();
        assert_eq!(plan.replicas.len(), fast_alone.replicas.len(), "{devices}");
        let explanation = Explanation::new(&plan, &topology);
        assert!(explanation.unused_devices.iter().all(|device| device.name == "cpu"), "{devices}");
        assert_eq!(explanation.unused_devices.len(), topology.devices.len() - 8);
        let text = explanation.to_string();
        assert!(text.contains("\nunused: ") && text.contains(" (cpu)\n"), "{text}");
        assert!(text.contains("then comes") && text.contains("left out, as no cut with slower ones"), "{text}");
    }
    // Slow devices that are equals of each other are all used, and so are those that a fixed policy asks for.
    assert_eq!(
        plan_of(&smollm2(), "4*cpu", "auto").unwrap().replicas.iter().map(ReplicaPlan::world_size).sum::<usize>(),
        4
    );
    assert_eq!(plan_of(&llama_8b(), "cpu@a,h200@b", "tensor=1").unwrap().replicas.len(), 2);
    let one = plan_of(&llama_8b(), "cpu@a,h200@b", "tensor=1,replicas=1").unwrap();
    assert_eq!(one.replicas[0].stages[0].ranks[0].worker_id, "b");
    assert_eq!(one.reason, "asked for: tensor=1,replicas=1");
}

#[test]
fn kv_blocks_take_the_memory_that_is_free() {
    let long = ModelShape { max_position_embeddings: 131_072, ..llama_8b() };
    let plan = plan_of(&long, "h200", "auto").unwrap();
    let rank = &plan.replicas[0].stages[0].ranks[0];
    let device = &Topology::parse_devices("h200").unwrap().devices[0];
    let used = rank.weight_bytes + rank.kv_bytes + rank.activation_bytes;
    let block_bytes = rank.kv_bytes / plan.replicas[0].num_kv_blocks as u64;
    assert!((used..used + block_bytes).contains(&device.memory_bytes), "{used} of {}", device.memory_bytes);
    // No more than the sequences of a step can fill.
    let small = plan_of(&smollm2(), "h200", "auto").unwrap();
    assert_eq!(small.replicas[0].num_kv_blocks, 64 * 8192 / 32);
    // A host's memory is spared, but not at the price of the longest sequence.
    let share = |tokens: usize| {
        let model = ModelShape { max_position_embeddings: tokens, ..llama_8b() };
        let plan = plan_of(&model, "cpu", "auto").unwrap();
        let rank = &plan.replicas[0].stages[0].ranks[0];
        let free =
            Topology::parse_devices("cpu").unwrap().devices[0].memory_bytes - rank.weight_bytes - rank.activation_bytes;
        rank.kv_bytes as f64 / free as f64
    };
    assert!((0.49..=0.5).contains(&share(8192)), "{}", share(8192));
    assert!(share(131_072) > 0.99);
}

#[test]
fn the_type_of_keys_and_values_is_planned_and_counted() {
    let rank = |shape: &ModelShape, dtype: Option<Dtype>| {
        let mut topology = Topology::parse_devices("h200").unwrap();
        topology.devices[0].dtype = dtype;
        let options = PlanOptions { num_kv_blocks: Some(100), ..PlanOptions::default() };
        let plan = plan(shape, &topology, &"tensor=1".parse().unwrap(), &options).unwrap();
        plan.replicas[0].stages[0].ranks[0].clone()
    };
    let bfloat = shape((576, 1536, 30), (9, 3, 64), 49152, GgmlType::BF16, true);
    let kv_bytes = 100 * 32 * 30 * 3 * 64 * 2 * 2;
    for (shape, asked, dtype, reason, bytes) in [
        (&smollm2(), None, Dtype::F16, "auto", kv_bytes),
        (&bfloat, None, Dtype::Bf16, "auto: BF16 checkpoint", kv_bytes),
        (&bfloat, Some(Dtype::F16), Dtype::F16, "asked for", kv_bytes),
        (&smollm2(), Some(Dtype::F32), Dtype::F32, "asked for", 2 * kv_bytes),
    ] {
        let rank = rank(shape, asked);
        assert_eq!((rank.dtype, rank.dtype_reason.as_str(), rank.kv_bytes), (dtype, reason, bytes));
    }
}

#[test]
fn steps_are_longer_on_gpus_alone() {
    let step_tokens = |devices: &str, asked| {
        let options = PlanOptions { max_step_tokens: asked, ..PlanOptions::default() };
        let topology = Topology::parse_devices(devices).unwrap();
        plan(&smollm2(), &topology, &Policy::AUTO, &options).unwrap().max_step_tokens
    };
    assert_eq!((step_tokens("2*h200@a", None), step_tokens("2*cpu@a", None)), (2048, 512));
    assert_eq!((step_tokens("h200@a,cpu@a", None), step_tokens("h200", Some(100))), (512, 100));
}

#[test]
fn steps_are_shorter_on_slow_devices() {
    let model = shape((4096, 14336, 32), (32, 8, 128), 128_256, GgmlType::Q4_K, false);
    let step_tokens = |rate: f64, options: PlanOptions| {
        let mut topology = Topology::parse_devices("2*h200@a").unwrap();
        topology.devices[1].operations_per_second = rate;
        plan(&model, &topology, &Policy::AUTO, &options).unwrap().max_step_tokens
    };
    // 14 G operations a token: 2,292 tokens in two seconds, 286, 14.
    let default = PlanOptions::default();
    assert_eq!([16e12, 2e12, 0.1e12].map(|rate| step_tokens(rate, default)), [2048, 256, 64]);
    // Every sequence has its token in a step, and who asks for longer steps gets them.
    assert_eq!(step_tokens(0.1e12, PlanOptions { max_num_sequences: 200, ..default }), 200);
    assert_eq!(step_tokens(0.1e12, PlanOptions { max_step_tokens: Some(512), ..default }), 512);
}

#[test]
fn identical_replicas_share_a_table_and_estimates_are_rounded() {
    let topology = Topology::parse_devices("8*h200@a").unwrap();
    let plan = plan(&smollm2(), &topology, &"tensor=2".parse().unwrap(), &PlanOptions::default()).unwrap();
    let explanation = Explanation::new(&plan, &topology);
    let text = explanation.to_string();
    assert!(text.starts_with("4 replicas; sequences of up to 8192 tokens;"), "{text}");
    assert!(text.contains("\nreplicas 0-3, identical, each: tensor 2 × pipeline 1;"), "{text}");
    assert!(text.contains("room for 524288 tokens or 64 sequences of full length (8192)"), "{text}");
    assert!(text.contains("\ndevices: a/0-1; a/2-3; a/4-5; a/6-7\n"), "{text}");
    assert!(text.contains("reckoned with: h200 4500 GB/s, 600 TFLOP/s (a coordinator"), "{text}");
    assert_eq!(text.matches("kv heads").count(), 1);
    // Launches bound a small model on a fast device.
    let rate = explanation.replicas[0].decode_tokens_per_second;
    assert!((500.0..3000.0).contains(&rate) && rate.to_string().len() <= 4, "{rate}");
}

#[test]
fn gpus_that_a_worker_says_are_joined_are_planned_like_described_ones() {
    let model = shape((8192, 28672, 80), (64, 8, 128), 128_256, GgmlType::Q4_K, false);
    let described = Topology::parse_devices("4*h200@a").unwrap();
    // As a coordinator makes it of what workers report.
    let registered = |peer_link| {
        let mut topology = Topology {
            intra_host: Some(LinkSpec::TCP_LOOPBACK),
            inter_host: Some(LinkSpec::TCP_ETHERNET),
            ..described.clone()
        };
        topology.devices.iter_mut().for_each(|device| device.peer_link = peer_link);
        topology
    };
    let cut = |topology: &Topology| {
        let plan = plan(&model, topology, &"replicas=1".parse().unwrap(), &PlanOptions::default()).unwrap();
        let replica = &plan.replicas[0];
        let estimates = replica.stages.iter().flat_map(|stage| &stage.ranks).map(|rank| rank.decode_step_ms);
        (replica.stages.len(), replica.stages[0].ranks.len(), estimates.collect::<Vec<_>>())
    };
    let wanted = cut(&described);
    assert_eq!((wanted.0, wanted.1), (1, 4));
    assert_eq!(cut(&registered(Some(PeerLink::Nvlink))), wanted);
    assert_ne!(cut(&registered(None)).1, 4);
    // The slowest link of a group holds it up; a device that says nothing is reached over TCP.
    let mut mixed = registered(Some(PeerLink::Nvlink));
    mixed.devices[1].peer_link = Some(PeerLink::Pcie);
    mixed.devices[3].peer_link = None;
    let (nvlink, pcie) = (mixed.link(&[0, 2]), mixed.link(&[0, 1]));
    assert!(nvlink.bytes_per_second > pcie.bytes_per_second && pcie.bytes_per_second > 1e10, "{nvlink:?} {pcie:?}");
    assert_eq!(mixed.link(&[0, 3]), LinkSpec::TCP_LOOPBACK);
}
