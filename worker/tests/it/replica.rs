//! Whole replicas on the real model, in one process over loopback links: every cut answers as one rank does, a lost
//! rank breaks the replica at once, cancelled sequences give their blocks back, and a rank reads only its slices.

use std::time::{Duration, Instant};

use crate::cluster::{Cluster, block_on, cut, greedy, run, test_model};
use lockstep_model::Checkpoint;

/// Log-probability gap below which two tokens count as equally likely: sums in another order may swap them.
const TIE: f32 = 0.02;

const PROMPTS: [&str; 4] = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "Water boils at 100 degrees Celsius because",
];

fn encode(text: &str) -> Vec<u32> {
    Checkpoint::open(&test_model()).unwrap().tokenizer().unwrap().encode(text, true).unwrap()
}

fn text(token_ids: impl IntoIterator<Item = u32>) -> String {
    let mut decoder = Checkpoint::open(&test_model()).unwrap().tokenizer().unwrap().incremental();
    token_ids.into_iter().map(|token_id| decoder.push(token_id).unwrap()).collect()
}

/// Fails unless `cluster` gives the tokens of `expected` up to the first tie.
fn assert_same(cluster: &Cluster, expected: &[Vec<(u32, f32)>], name: &str) {
    for (prompt, expected) in PROMPTS.iter().zip(expected) {
        let tokens = block_on(run(cluster.leader(), greedy(encode(prompt), expected.len())));
        for (index, ((token_id, _), (expected_id, gap))) in tokens.iter().zip(expected).enumerate() {
            if token_id != expected_id {
                assert!(*gap < TIE, "{name}: token {index} of {prompt:?} is {token_id}, expected {expected_id}");
                break;
            }
        }
    }
}

/// Tokens of one rank, each with the gap to the runner-up.
fn expected() -> Vec<Vec<(u32, f32)>> {
    let cluster = Cluster::start(&test_model(), &[1]);
    let with_gap = |prompt: &&str| {
        let tokens = block_on(run(cluster.leader(), greedy(encode(prompt), 24)));
        tokens.into_iter().map(|(token_id, logprobs)| (token_id, logprobs.top[0].1 - logprobs.top[1].1)).collect()
    };
    PROMPTS.iter().map(with_gap).collect()
}

#[test]
fn every_cut_answers_as_one_rank_does() {
    let expected = expected();
    let answer = text(expected[0].iter().map(|token| token.0));
    assert!(answer.contains("Paris"), "{:?} is continued by {answer:?}", PROMPTS[0]);
    for stages in [&[2][..], &[3], &[4], &[5], &[1, 1], &[1, 1, 1], &[2, 2], &[1, 2], &[2, 1]] {
        let cluster = Cluster::start(&test_model(), stages);
        assert_same(&cluster, &expected, &format!("{stages:?}"));
    }
}

#[test]
fn ranks_of_one_worker_answer_alike() {
    let checkpoint = Checkpoint::open(&test_model()).unwrap();
    let mut plan = cut(checkpoint.shape(), &[2, 2], 256);
    for rank in plan.stages.iter_mut().flat_map(|stage| &mut stage.ranks) {
        rank.worker_id = format!("worker-{}", rank.rank % 2);
    }
    assert_same(&Cluster::load(&test_model(), plan), &expected(), "two workers of two ranks");
}

#[test]
fn concurrent_sequences_answer_as_alone() {
    let expected = expected();
    let cluster = Cluster::start(&test_model(), &[2, 1]);
    let all = async {
        let runs = PROMPTS.iter().map(|prompt| run(cluster.leader(), greedy(encode(prompt), 24)));
        futures::future::join_all(runs).await
    };
    for (tokens, expected) in block_on(all).into_iter().zip(&expected) {
        let end = expected.iter().position(|token| token.1 < TIE).unwrap_or(expected.len());
        let ids = |tokens: Vec<u32>| tokens.into_iter().take(end).collect::<Vec<_>>();
        assert_eq!(
            ids(tokens.iter().map(|token| token.0).collect()),
            ids(expected.iter().map(|token| token.0).collect())
        );
    }
}

#[test]
fn a_lost_rank_breaks_the_replica_and_ends_its_sequences() {
    for stages in [&[2][..], &[1, 1]] {
        let mut cluster = Cluster::start(&test_model(), stages);
        let mut running = block_on(cluster.leader().submit(greedy(encode(PROMPTS[1]), 900))).unwrap();
        assert!(block_on(running.outputs.recv()).is_some());
        let start = Instant::now();
        drop(cluster.parts.pop());
        let reason = cluster.wait_broken(Duration::from_secs(2));
        assert!(reason.contains("rank 1"), "{reason}");
        block_on(async { while running.outputs.recv().await.is_some() {} });
        assert!(start.elapsed() < Duration::from_secs(2));
        let refused = block_on(cluster.leader().submit(greedy(vec![1], 1))).err().unwrap();
        assert!(refused.to_string().contains(&reason), "{refused}");
    }
}

#[test]
fn dropping_a_sequence_frees_its_blocks() {
    let cluster = Cluster::start(&test_model(), &[1]);
    let all = cluster.leader().status().num_free_kv_blocks;
    let mut running = block_on(cluster.leader().submit(greedy(encode(PROMPTS[1]), 900))).unwrap();
    assert!(block_on(running.outputs.recv()).is_some());
    assert!(cluster.leader().status().num_free_kv_blocks < all);
    drop(running);
    let start = Instant::now();
    while cluster.leader().status().num_free_kv_blocks < all {
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", cluster.leader().status());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(cluster.leader().status().num_running_sequences, 0);
}

#[test]
fn a_rank_reads_its_slices_only() {
    use lockstep_sharding::TensorRole::{AttentionNorm, FeedForwardNorm, Key, OutputNorm, Value};
    let checkpoint = Checkpoint::open(&test_model()).unwrap();
    let is_replicated = |role| matches!(role, AttentionNorm | FeedForwardNorm | OutputNorm | Key | Value);
    let bytes = |replicated: bool| -> u64 {
        let tensors = checkpoint.shape().tensors.iter().filter(|tensor| is_replicated(tensor.role) == replicated);
        tensors.map(|tensor| tensor.bytes()).sum()
    };
    let expected = bytes(false) / 2 + bytes(true);
    for loaded in Cluster::start(&test_model(), &[2]).loaded_bytes {
        let ratio = loaded as f64 / expected as f64;
        assert!((0.85..1.15).contains(&ratio), "{loaded} bytes read, expected about {expected}");
    }
}
