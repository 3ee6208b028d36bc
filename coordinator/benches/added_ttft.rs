//! What the coordinator adds to the time to first token: the same short request through it and straight to a stub
//! worker, in turns, over loopback. Fails if the median of the difference reaches 1 ms.
//!
//!   cargo bench -p lockstep-coordinator --bench added_ttft

#![allow(clippy::unwrap_used, reason = "a bench fails by panicking")]

#[path = "../tests/stub/mod.rs"]
mod stub;

use std::time::{Duration, Instant};

use lockstep_proto::v1;

const ROUNDS: usize = 2000;
const LIMIT: Duration = Duration::from_millis(1);

fn main() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let added = runtime.block_on(measure());
    assert!(added < LIMIT, "the coordinator adds {added:?} at the median, the limit is {LIMIT:?}");
}

async fn measure() -> Duration {
    let (coordinator, workers) = stub::cluster(1, stub::config("tensor=1", 1)).await;
    let load = workers[0].state.loads.lock().unwrap()[0].clone();
    let mut client = coordinator.inference().await;
    let mut worker = v1::worker_client::WorkerClient::connect(format!("http://{}", workers[0].address)).await.unwrap();
    let prompt = "a prompt of some forty tokens, one a byte";
    let request =
        v1::GenerateRequest { input: Some(v1::generate_request::Input::Prompt(prompt.into())), ..stub::request(2) };
    let sequence = v1::RunSequenceRequest {
        model: load.model,
        plan_epoch: load.plan_epoch,
        token_ids: prompt.bytes().map(u32::from).collect(),
        sampling: request.sampling.clone(),
        ..Default::default()
    };
    let (mut direct, mut through) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        let mut stream = worker.run_sequence(sequence.clone()).await.unwrap().into_inner();
        stream.message().await.unwrap();
        direct.push(begin.elapsed());
        while stream.message().await.unwrap().is_some() {}

        let begin = Instant::now();
        let mut stream = client.generate(request.clone()).await.unwrap().into_inner();
        stream.message().await.unwrap();
        through.push(begin.elapsed());
        while stream.message().await.unwrap().is_some() {}
    }
    let (direct, through) = (Quantiles::of(direct), Quantiles::of(through));
    println!("time to first token over {ROUNDS} requests of {} prompt tokens", prompt.len());
    println!("straight to the stub worker: {direct}");
    println!("through the coordinator:     {through}");
    let added = through.median.saturating_sub(direct.median);
    println!("added at the median:         {:.3} ms", added.as_secs_f64() * 1e3);
    added
}

struct Quantiles {
    median: Duration,
    p90: Duration,
}

impl Quantiles {
    fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        Self { median: times[times.len() / 2], p90: times[times.len() * 9 / 10] }
    }
}

impl std::fmt::Display for Quantiles {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        write!(formatter, "median {:.3} ms, 90 % {:.3} ms", millis(self.median), millis(self.p90))
    }
}
