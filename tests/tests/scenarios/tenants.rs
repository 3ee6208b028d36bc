//! Sixteen tenants on one replica: who gets how much, how soon, and what all get together.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use lockstep_proto::{
    status::Class,
    v1::{self, generate_response::Event},
};
use lockstep_tests::{
    Client, Cluster, Layout,
    client::{greedy, tokens},
    environment,
    process::{PATIENCE, lockstep},
    tenants,
};
use tempfile::TempDir;
use tonic::Status;

const NUM_TENANTS: usize = 16;
/// Sequences that run at once when nobody is below his share.
const NUM_PLACES: usize = 16;
/// A tenant's tokens, divided by its weight, from the mean of all.
const SHARE_TOLERANCE: f64 = 0.15;
/// What that mean is to be, however slow the machine: many times a prompt, whose tokens count all at once.
const SHARE_TOKENS: usize = 200;

/// Weights are 1, 2, 1, 4, and again.
fn weight(index: usize) -> usize {
    [1, 2, 1, 4][index % 4]
}

/// How much is asked of a cluster, by its speed.
struct Load {
    /// Tokens of a stream whose rate is taken.
    num_tokens: u32,
    /// So many times one tenant's rate all together have at least.
    least_speedup: f64,
    /// Tokens of each of a hundred prompts, so that less than 70 end while others ask.
    num_queued_tokens: u32,
}

/// A cluster with tenants, an administrator, and a client for each tenant.
async fn cluster(folder: &TempDir, layout: Layout, model: &Path) -> (Cluster, Vec<Client>) {
    let mut tenants: Vec<(String, String)> =
        (0..NUM_TENANTS).map(|index| (format!("tenant-{index}"), format!("weight = {}", weight(index)))).collect();
    tenants.push((String::from("admin"), String::from("admin = true")));
    let (tenants, keys) = tenants::write(folder.path(), &tenants).await.unwrap();
    let settings = folder.path().join("lockstep.toml");
    std::fs::write(&settings, format!("[coordinator]\nmax_num_sequences = {NUM_PLACES}\n")).unwrap();
    let arguments = [
        format!("--tenants={}", tenants.display()),
        format!("--config={}", settings.display()),
        format!("--api-key={}", keys[NUM_TENANTS]),
    ];
    let cluster = Cluster::start_with_arguments(layout, model, &arguments.each_ref().map(String::as_str)).unwrap();
    let mut clients = Vec::new();
    for key in &keys[..NUM_TENANTS] {
        clients.push(Client::connect_as(&cluster.grpc(), key).await.unwrap());
    }
    (cluster, clients)
}

/// A request for `num_tokens` tokens after a prompt like no other.
fn request(num_prompt_tokens: usize, num_tokens: u32) -> v1::GenerateRequest {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let first = NEXT.fetch_add(1, Ordering::Relaxed) as u32;
    let ids: Vec<u32> = (0..num_prompt_tokens as u32).map(|index| 100 + (first * 7919 + index * 31) % 40_000).collect();
    let mut request = greedy(tokens(&ids), num_tokens);
    request.sampling.as_mut().unwrap().logprobs = 0;
    request
}

/// Runs a request and calls `on_token` with the number of tokens of every message.
async fn run(client: &Client, request: v1::GenerateRequest, mut on_token: impl FnMut(usize)) -> Result<(), Status> {
    let mut stream = client.start(request).await?;
    while let Some(message) = stream.message().await? {
        if let Some(Event::Delta(delta)) = message.event {
            on_token(delta.token_ids.len());
        }
    }
    Ok(())
}

/// Tokens per second of one stream for each of these clients, from the first token of each.
async fn decode_rate(clients: &[Client], num_tokens: u32) -> f64 {
    let streams = clients.iter().cloned().map(|client| {
        tokio::spawn(async move {
            let (mut first, mut count, mut last) = (None, 0, Instant::now());
            let on_token = |num_tokens| {
                last = Instant::now();
                first.get_or_insert(last);
                count += num_tokens;
            };
            run(&client, request(4, num_tokens), on_token).await.unwrap();
            (first.unwrap(), last, count - 1)
        })
    });
    let streams: Vec<_> = streams.collect();
    let (mut first, mut last, mut count) = (None, None, 0);
    for stream in streams {
        let (began, ended, num_tokens) = stream.await.unwrap();
        first = Some(first.map_or(began, |first: Instant| first.min(began)));
        last = last.max(Some(ended));
        count += num_tokens;
    }
    f64::from(u32::try_from(count).unwrap()) / (last.unwrap() - first.unwrap()).as_secs_f64()
}

/// Every tenant keeps a queue, of different lengths and kinds of requests; tokens of each in the same time.
async fn tokens_of_each(clients: &[Client]) -> Vec<usize> {
    let counts: Vec<_> = (0..clients.len()).map(|_| Arc::new(AtomicUsize::new(0))).collect();
    let mut queues = Vec::new();
    for (index, client) in clients.iter().enumerate() {
        for _ in 0..[4, 6, 8, 12][index % 4] {
            let (client, count) = (client.clone(), Arc::clone(&counts[index]));
            let num_prompt_tokens = 4 + index;
            queues.push(tokio::spawn(async move {
                loop {
                    let mut is_first = true;
                    let on_token = |num_tokens| {
                        // The first token shows that the prompt was computed; the last one given out never is.
                        let prompt = if std::mem::take(&mut is_first) { num_prompt_tokens - 1 } else { 0 };
                        count.fetch_add(prompt + num_tokens, Ordering::Relaxed);
                    };
                    run(&client, request(num_prompt_tokens, 16), on_token).await.unwrap();
                }
            }));
        }
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let read = || counts.iter().map(|count| count.load(Ordering::Relaxed)).collect::<Vec<_>>();
    let (before, begin) = (read(), Instant::now());
    let least = SHARE_TOKENS * (0..clients.len()).map(weight).sum::<usize>();
    let mut counted: Vec<usize> = Vec::new();
    while counted.iter().sum::<usize>() < least {
        assert!(begin.elapsed() < PATIENCE, "{counted:?} of {least} tokens");
        tokio::time::sleep(Duration::from_millis(50)).await;
        counted = read().iter().zip(&before).map(|(now, before)| now - before).collect();
    }
    queues.iter().for_each(tokio::task::JoinHandle::abort);
    counted
}

/// Rates, shares and first tokens.
async fn check(layout: Layout, model: &Path, load: &Load) {
    let folder = TempDir::new().unwrap();
    let (_cluster, clients) = cluster(&folder, layout, model).await;
    let refused = clients[0].admin.clone().get_cluster(v1::GetClusterRequest {}).await.unwrap_err();
    assert_eq!(Class::of(&refused), Class::PermissionDenied);

    // The best of three: whatever else runs on the machine only slows down.
    let (mut one, mut all) = (0.0, 0.0);
    for _ in 0..3 {
        one = decode_rate(&clients[..1], load.num_tokens).await.max(one);
        all = decode_rate(&clients, load.num_tokens / 2).await.max(all);
    }
    println!("one tenant decodes {one:.0} tokens/s, sixteen {all:.0}: {:.1} times", all / one);

    let num_tokens = tokens_of_each(&clients).await;
    let shares: Vec<f64> =
        num_tokens.iter().enumerate().map(|(index, &count)| count as f64 / weight(index) as f64).collect();
    let mean = shares.iter().sum::<f64>() / shares.len() as f64;
    let deviations: Vec<f64> = shares.iter().map(|share| share / mean - 1.0).collect();
    let largest = deviations.iter().fold(0.0, |largest: f64, deviation| largest.max(deviation.abs()));
    println!("tokens {num_tokens:?}, {mean:.0} for a weight of 1, largest deviation {:.1} %", largest * 100.0);
    assert!(largest < SHARE_TOLERANCE, "shares deviate by {deviations:.3?}");

    a_hundred_prompts_delay_nobody(&clients[0], &clients[1], load.num_queued_tokens).await;
    assert!(all >= load.least_speedup * one, "sixteen tenants decode {all:.0} tokens/s, one {one:.0}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sixteen_tenants_share_a_replica() {
    let load = Load { num_tokens: 128, least_speedup: 3.0, num_queued_tokens: 100 };
    check(Layout { threads: 2, ..Layout::new(1, 1) }, &environment::model().unwrap(), &load).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a CUDA GPU"]
async fn sixteen_tenants_share_an_8b_model_on_a_gpu() {
    let folder = TempDir::new().unwrap();
    let model = folder.path().join("llama-8b.gguf");
    let written = lockstep(&["synth", "llama-8b", "--output", model.to_str().unwrap()]).await.unwrap();
    assert!(written.status.success(), "{written:?}");
    let load = Load { num_tokens: 1024, least_speedup: 8.0, num_queued_tokens: 500 };
    check(Layout::on_gpus(1, 1), &model, &load).await;
}

/// A tenant with little to ask gets its first token within a few steps, while another has a hundred prompts queued.
async fn a_hundred_prompts_delay_nobody(heavy: &Client, light: &Client, num_tokens: u32) {
    let longest_gap = Arc::new(AtomicUsize::new(0));
    let ended = Arc::new(AtomicUsize::new(0));
    let queue: Vec<_> = (0..100)
        .map(|_| {
            let (heavy, longest_gap, ended) = (heavy.clone(), Arc::clone(&longest_gap), Arc::clone(&ended));
            tokio::spawn(async move {
                let mut last = None;
                let on_token = |_| {
                    let gap =
                        last.replace(Instant::now()).map_or(0, |last: Instant| last.elapsed().as_micros() as usize);
                    longest_gap.fetch_max(gap, Ordering::Relaxed);
                };
                run(&heavy, request(64, num_tokens), on_token).await.unwrap();
                ended.fetch_add(1, Ordering::Relaxed);
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let mut waits = Vec::new();
    for _ in 0..5 {
        let (begin, mut first) = (Instant::now(), None);
        run(light, request(8, 4), |_| {
            first.get_or_insert_with(|| begin.elapsed());
        })
        .await
        .unwrap();
        waits.push(first.unwrap());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let num_ended = ended.load(Ordering::Relaxed);
    queue.iter().for_each(tokio::task::JoinHandle::abort);
    let gap = Duration::from_micros(longest_gap.load(Ordering::Relaxed) as u64);
    println!("first tokens after {waits:.1?}; longest pause of the others {gap:.1?}; {num_ended} of 100 had ended");
    assert!(num_ended < 70, "the queue was nearly empty: {num_ended} had ended");
    // A step or two, and what the machine does beside.
    let limit = 3 * gap + Duration::from_millis(100);
    assert!(waits.iter().all(|wait| *wait < limit), "first tokens came after {waits:?}, expected within {limit:?}");
}
