//! Whole replicas on the real model, in one process over loopback links: every cut answers as one rank does, a lost
//! rank breaks the replica at once, cancelled sequences give their blocks back, and a rank reads only its slices.

use std::{
    sync::{Arc, Condvar, Mutex},
    time::{Duration, Instant},
};

use crate::cluster::{Cluster, block_on, cut, greedy, run, test_model};
use lockstep_model::Checkpoint;
use lockstep_worker::engine::{Sampling, SequenceRequest, Tenant};

/// Gap to the runner-up, in nats, below which two tokens may be swapped by rounding.
const TIE: f32 = 0.02;
/// Most that log-probabilities may differ on average: sums over ranks are bit for bit those of one rank but for rare
/// last bits.
const MEAN_DIFFERENCE: f32 = 0.01;

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

/// What a replica gives for a prompt.
#[derive(Debug, PartialEq)]
struct Answer {
    token_ids: Vec<u32>,
    /// Of each token: log-probability of the most likely one, and its distance to the runner-up.
    best: Vec<(f32, f32)>,
}

fn answer(cluster: &Cluster, prompt: &str) -> Answer {
    let tokens = block_on(run(cluster.leader(), greedy(encode(prompt), 24)));
    let best = tokens.iter().map(|(_, logprobs)| (logprobs.top[0].1, logprobs.top[0].1 - logprobs.top[1].1)).collect();
    Answer { token_ids: tokens.into_iter().map(|token| token.0).collect(), best }
}

fn expected() -> Vec<Answer> {
    answers(&Cluster::start(&test_model(), &[1]))
}

/// Fails unless `answers` are those of `expected`, each up to the first tie.
fn assert_same(answers: &[Answer], expected: &[Answer], name: &str) {
    for ((prompt, answer), expected) in PROMPTS.iter().zip(answers).zip(expected) {
        let pairs = answer.token_ids.iter().zip(&expected.token_ids);
        let same = pairs.take_while(|(got, expected)| got == expected).count();
        if let Some((_, gap)) = expected.best.get(same) {
            assert!(*gap < TIE, "{name}: token {same} of {prompt:?} differs at a gap of {gap}");
        }
        let differences =
            answer.best.iter().zip(&expected.best).take(same).map(|(got, wanted)| (got.0 - wanted.0).abs());
        let mean = differences.sum::<f32>() / same.max(1) as f32;
        assert!(mean < MEAN_DIFFERENCE, "{name}: log-probabilities of {prompt:?} differ by {mean} on average");
    }
}

fn answers(cluster: &Cluster) -> Vec<Answer> {
    PROMPTS.iter().map(|prompt| answer(cluster, prompt)).collect()
}

#[test]
fn every_cut_answers_as_one_rank_does() {
    let expected = expected();
    let answer = text(expected[0].token_ids.iter().copied());
    assert!(answer.contains("Paris"), "{:?} is continued by {answer:?}", PROMPTS[0]);
    for stages in [&[2][..], &[3], &[4], &[5], &[2, 2], &[1, 2], &[2, 1]] {
        assert_same(&answers(&Cluster::start(&test_model(), stages)), &expected, &format!("{stages:?}"));
    }
    // Stages alone change no sum, hence no bit.
    for stages in [&[1, 1][..], &[1, 1, 1]] {
        assert_eq!(answers(&Cluster::start(&test_model(), stages)), expected, "{stages:?}");
    }
}

#[test]
fn ranks_of_one_worker_answer_alike() {
    let checkpoint = Checkpoint::open(&test_model()).unwrap();
    let mut plan = cut(checkpoint.shape(), &[2, 2], 256);
    for rank in plan.stages.iter_mut().flat_map(|stage| &mut stage.ranks) {
        rank.worker_id = format!("worker-{}", rank.rank % 2);
    }
    assert_same(&answers(&Cluster::load(&test_model(), plan)), &expected(), "two workers of two ranks");
}

#[test]
fn concurrent_sequences_answer_as_alone() {
    let expected = expected();
    let cluster = Cluster::start(&test_model(), &[1, 1]);
    let answers = std::thread::scope(|scope| {
        let cluster = &cluster;
        let runs: Vec<_> = PROMPTS.iter().map(|prompt| scope.spawn(move || answer(cluster, prompt))).collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect::<Vec<_>>()
    });
    // A token's result does not depend on what else is in its batch.
    assert_eq!(answers, expected);
}

/// Prompts with equal beginnings of 16 tokens and more, one that ends with a block, and one twice.
fn alike() -> Vec<Vec<u32>> {
    let beginning = encode(&PROMPTS.join("\n").repeat(3));
    let mut prompts = vec![beginning[..128].to_vec(), beginning[..129].to_vec(), beginning[..129].to_vec()];
    for (prompt, length) in PROMPTS.iter().zip([16, 75, 110, beginning.len()]) {
        prompts.push([&beginning[..length], &encode(prompt)].concat());
    }
    prompts
}

#[test]
fn shared_blocks_change_no_bit() {
    for stages in [&[1][..], &[1, 1], &[2]] {
        let cluster = Cluster::start(&test_model(), stages);
        let run_all = |tenant_of: fn(usize) -> Tenant| {
            std::thread::scope(|scope| {
                let cluster = &cluster;
                let start = |(index, prompt)| {
                    let request = SequenceRequest { tenant: tenant_of(index), ..greedy(prompt, 12) };
                    scope.spawn(move || block_on(run(cluster.leader(), request)))
                };
                let runs: Vec<_> = alike().into_iter().enumerate().map(start).collect();
                runs.into_iter().map(|run| run.join().unwrap()).collect::<Vec<_>>()
            })
        };
        let hits = || cluster.leader().status().prefix_hit_tokens;
        let expected = run_all(|index| Tenant { name: index.to_string().into(), weight: 1, is_isolated: true });
        assert_eq!(hits(), 0, "{stages:?}");
        // First with blocks that are being written, then with all of them written.
        for least in [300, 900] {
            assert_eq!(run_all(|_| Tenant::default()), expected, "{stages:?}");
            assert!(hits() >= least, "{stages:?}: {} tokens were found", hits());
        }
    }
}

#[test]
fn flat_distributions_do_not_break_a_replica() {
    // Two steps of 64 rows are in flight; the rank of the last stage sends all of the vocabulary for each row.
    const NUM_SEQUENCES: usize = 128;
    let cluster = Cluster::start(&test_model(), &[1, 1]);
    block_on(async {
        let request = |seed| {
            let sampling = Sampling { temperature: 100.0, top_p: 0.999, seed, logprobs: 2, ..Sampling::greedy(3) };
            SequenceRequest { sampling, ..greedy(vec![1, 2], 3) }
        };
        let runs = (0..NUM_SEQUENCES as u64).map(|seed| run(cluster.leader(), request(seed)));
        for tokens in futures::future::join_all(runs).await {
            assert_eq!(tokens.len(), 3);
        }
    });
    assert_eq!(*cluster.parts[0].problem().borrow(), None);
}

#[test]
fn a_leader_reports_while_others_load() {
    const REPORTS: u32 = 5;
    let plan = cut(Checkpoint::open(&test_model()).unwrap().shape(), &[1, 1], 64);
    // The follower goes on loading when the leader, which has all of its part, has reported a few times more.
    let reports = Arc::new((Mutex::new(0), Condvar::new()));
    Cluster::load_following(&test_model(), plan, move |worker, loaded, total| {
        let (count, changed) = &*reports;
        let mut count = count.lock().unwrap();
        if worker == 0 && loaded == total && total > 0 {
            *count += 1;
            changed.notify_all();
        } else if worker == 1 {
            let waited = changed.wait_timeout_while(count, Duration::from_secs(20), |count| *count < REPORTS);
            assert!(!waited.unwrap().1.timed_out(), "the leader is silent");
        }
    });
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
