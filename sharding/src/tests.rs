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
