//! Median time of an all-reduce of two ranks over the loopback interface: `cargo bench --bench collective`.
//! Each rank is a thread; a round is timed on rank 0, whose all-reduce ends when it has the sum.

use std::{
    net::Ipv4Addr,
    sync::Arc,
    time::{Duration, Instant},
};

use lockstep_tests::certificates::{Authority, Folder};
use lockstep_transport::ClusterTls;
use lockstep_worker::{
    WorkerError,
    collective::{AbortHandle, Collective, LinkKey, LinkListener, Purpose, RankLinks, RankLinksConfig},
};

const SIZES_BYTES: [usize; 6] = [1 << 10, 2304, 8 << 10, 64 << 10, 1 << 20, 16 << 20];
/// Bytes reduced for each size, within the bounds on rounds.
const VOLUME_BYTES: usize = 1 << 30;
const ROUNDS: std::ops::RangeInclusive<usize> = 40..=10_000;

fn main() -> anyhow::Result<()> {
    // Anything that `cargo bench` or `cargo test` passes on is a filter of other harnesses.
    if std::env::args().any(|argument| argument == "--test" || argument == "--list") {
        return Ok(());
    }
    let folder = Folder::new()?;
    let tls = ClusterTls::open(folder.member("bench", &Authority::new()?)?)?;
    let spinning = Duration::from_micros(50);
    for (name, spin, tls) in [
        ("spinning", spinning, None),
        ("blocking", Duration::ZERO, None),
        ("spinning, mutual TLS", spinning, Some(&tls)),
        ("blocking, mutual TLS", Duration::ZERO, Some(&tls)),
    ] {
        let times = measure(spin, tls)?;
        for (bytes, mut rounds) in SIZES_BYTES.into_iter().zip(times) {
            rounds.sort_unstable();
            let at = |share: f64| rounds[((rounds.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
            println!(
                "all-reduce, 2 ranks, {name}, {bytes:>9} B: median {:>8.1} µs (10 %: {:.1}, 90 %: {:.1}; {} rounds)",
                at(0.5),
                at(0.1),
                at(0.9),
                rounds.len()
            );
        }
    }
    Ok(())
}

/// Times of each size on rank 0.
fn measure(spin: Duration, tls: Option<&ClusterTls>) -> Result<Vec<Vec<Duration>>, WorkerError> {
    let listeners = [bind(tls)?, bind(tls)?];
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.local_addr()).collect();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = listeners
            .iter()
            .enumerate()
            .map(|(rank, listener)| {
                let config = RankLinksConfig {
                    key: LinkKey { model: "bench".to_owned(), replica: 0, plan_epoch: 1 },
                    secret: b"bench".to_vec(),
                    rank,
                    addresses: addresses.clone(),
                    connect_timeout: Duration::from_secs(10),
                    timeout: Duration::from_secs(10),
                    max_message_bytes: 0,
                    spin,
                    abort: AbortHandle::default(),
                };
                let listener = Arc::clone(listener);
                scope.spawn(move || run_rank(listener, config))
            })
            .collect();
        let mut times = Vec::new();
        for rank in ranks.into_iter().rev() {
            times = rank.join().unwrap_or_else(|cause| std::panic::resume_unwind(cause))?;
        }
        Ok(times)
    })
}

fn bind(tls: Option<&ClusterTls>) -> Result<Arc<LinkListener>, WorkerError> {
    LinkListener::bind((Ipv4Addr::LOCALHOST, 0).into(), tls.cloned()).map(Arc::new)
}

fn run_rank(listener: Arc<LinkListener>, config: RankLinksConfig) -> Result<Vec<Vec<Duration>>, WorkerError> {
    let mut collective = RankLinks::new(listener, config)?.collective(&[0, 1], Purpose::TensorParallel)?;
    let mut times = Vec::new();
    for bytes in SIZES_BYTES {
        let mut data = vec![1.0_f32; bytes / size_of::<f32>()];
        let rounds = (VOLUME_BYTES / bytes).clamp(*ROUNDS.start(), *ROUNDS.end());
        let mut of_size = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            let start = Instant::now();
            collective.all_reduce_sum(&mut data)?;
            of_size.push(start.elapsed());
        }
        times.push(of_size);
    }
    Ok(times)
}
