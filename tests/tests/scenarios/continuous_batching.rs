//! Requests that run together give what each gives alone, and none of them holds the others up for long.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use lockstep_tests::{
    Client, Cluster, Layout,
    client::{greedy, tokens},
    environment,
};
use tempfile::TempDir;

use crate::prompts::PASSAGES;

#[tokio::test(flavor = "multi_thread")]
async fn thirty_two_at_once_give_the_tokens_of_one_at_a_time() {
    let cluster = Cluster::start(Layout::new(2, 1)).unwrap();
    let client = cluster.client().await.unwrap();
    let text = client.tokenize(&PASSAGES.join(" ")).await.unwrap();
    // Prompts of 1 to 311 tokens from different places, outputs of 4 to 35.
    let requests: Vec<_> = (0..32)
        .map(|index| greedy(tokens(&text[index * 7..][..1 + index * 10]), 4 + (index as u32 * 13) % 32))
        .collect();
    let mut alone = Vec::new();
    for request in &requests {
        alone.push(client.generate(request.clone()).await.unwrap());
    }
    let together: Vec<_> = requests
        .iter()
        .map(|request| {
            let (client, request) = (client.clone(), request.clone());
            tokio::spawn(async move { client.generate(request).await })
        })
        .collect();
    for (index, (alone, together)) in alone.iter().zip(together).enumerate() {
        assert_eq!(together.await.unwrap().unwrap().token_ids, alone.token_ids, "request {index}");
    }
}

/// Tokens of a step, and so many steps of prompt.
const MAX_STEP_TOKENS: u32 = 256;
const NUM_STEPS: u32 = 9;
/// Part of the time to the first token of that prompt for which others may stand still: a step, and as long again and more for
/// whatever else the machine does.
const LONGEST_GAP: f64 = 1.0 / 3.0;

/// Starts a stream of many tokens, and says when each came.
async fn note_times(client: &Client, first: u32) -> Arc<Mutex<Vec<Instant>>> {
    let mut stream = client.start(greedy(tokens(&[first, 3575, 282, 4649]), 1000)).await.unwrap();
    let times = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&times);
    tokio::spawn(async move {
        while let Ok(Some(_)) = stream.message().await {
            noted.lock().unwrap().push(Instant::now());
        }
    });
    times
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_prompt_holds_others_up_for_a_step_at_a_time() {
    let folder = TempDir::new().unwrap();
    let settings = folder.path().join("lockstep.toml");
    std::fs::write(&settings, format!("[coordinator]\nmax_step_tokens = {MAX_STEP_TOKENS}\n")).unwrap();
    let config = format!("--config={}", settings.display());
    let model = environment::model().unwrap();
    let cluster = Cluster::start_with_arguments(Layout::new(1, 1), &model, &[&config]).unwrap();
    let client = cluster.client().await.unwrap();
    let mut streams = Vec::new();
    for first in 504..508 {
        streams.push(note_times(&client, first).await);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let prompt: Vec<u32> = (0..MAX_STEP_TOKENS * NUM_STEPS).map(|index| 100 + index * 31 % 40_000).collect();
    let begin = Instant::now();
    client.generate(greedy(tokens(&prompt), 1)).await.unwrap();
    let end = Instant::now();
    let (mut longest, mut num_tokens) = (Duration::ZERO, 0);
    for times in streams {
        let mut times: Vec<_> = times.lock().unwrap().iter().copied().filter(|time| *time > begin).collect();
        num_tokens += times.len();
        times.push(end);
        longest = times.windows(2).map(|pair| pair[1] - pair[0]).chain([times[0] - begin, longest]).max().unwrap();
    }
    let ttft = end - begin;
    println!(
        "a prompt of {} tokens in steps of {MAX_STEP_TOKENS}: its first token after {ttft:.2?}, in which four others had \
         {num_tokens} tokens and stood still for {longest:.2?} at most",
        prompt.len()
    );
    assert!(longest < ttft.mul_f64(LONGEST_GAP), "{longest:?} of {ttft:?}");
    assert!(num_tokens >= 4 * (NUM_STEPS as usize - 2), "{num_tokens} tokens");
}
