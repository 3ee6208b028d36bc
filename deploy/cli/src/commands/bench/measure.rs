//! What is measured: `pp N` (prompt tokens by the time to the first token; `pp N @ D` behind D tokens that all prompts
//! share, which are not counted), `tg N` (tokens by the time between the first and the last), `tg N x C` (all tokens of C
//! simultaneous requests by the time from the first token to the last), both `@ D` after prompts of D tokens if they are
//! not of the usual length.

use std::time::{Duration, Instant};

use anyhow::Context;

use super::{Args, cluster::ClusterTarget, in_process::InProcessTarget};
use crate::UsageError;

/// Usual prompt of a decode measurement, tokens.
const USUAL_DEPTH: usize = 16;

/// Who is measured.
pub enum Target {
    /// A coordinator.
    Cluster(ClusterTarget),
    /// A replica in this process.
    InProcess(InProcessTarget),
}

/// When a request was sent and when its tokens came.
#[derive(Debug)]
pub struct TokenTimes {
    /// Sent.
    pub start: Instant,
    /// Arrival of each token, in order.
    pub tokens: Vec<Instant>,
}

/// Tokens per second over the repetitions.
#[derive(Debug)]
pub struct Measurement {
    /// Such as `pp512` or `tg128x16`.
    pub name: String,
    /// Median.
    pub median: f64,
    /// Least.
    pub least: f64,
    /// Most.
    pub most: f64,
}

impl Target {
    /// What is measured, for the report.
    pub fn describe(&self) -> &str {
        match self {
            Self::Cluster(target) => &target.description,
            Self::InProcess(target) => &target.description,
        }
    }

    fn limits(&self) -> (usize, usize) {
        match self {
            Self::Cluster(target) => (target.vocab_size, target.max_sequence_tokens),
            Self::InProcess(target) => (target.vocab_size, target.max_sequence_tokens),
        }
    }

    async fn generate(&self, prompt: Vec<u32>, max_tokens: usize) -> anyhow::Result<TokenTimes> {
        let times = match self {
            Self::Cluster(target) => target.generate(prompt, max_tokens).await,
            Self::InProcess(target) => target.generate(prompt, max_tokens).await,
        }?;
        let got = times.tokens.len();
        anyhow::ensure!(got == max_tokens, "{got} tokens were generated, {max_tokens} were asked for");
        Ok(times)
    }
}

/// How long a start takes, from the beginning of the command.
#[derive(Debug)]
pub struct Startup {
    /// Bytes of the checkpoint that the ranks loaded.
    pub num_bytes: u64,
    /// Until the replica was ready.
    pub load: Duration,
    /// Until the first token of the first request.
    pub first_token: Duration,
}

impl Startup {
    /// Times the first token of a replica that took `load` to be ready, counted from `start`.
    ///
    /// # Errors
    /// If the request fails.
    pub async fn measure(target: &InProcessTarget, start: Instant, load: Duration) -> anyhow::Result<Self> {
        let mut prompts = Prompts { vocab_size: target.vocab_size, state: 0 };
        let times = target.generate(prompts.next(USUAL_DEPTH.min(target.max_sequence_tokens - 1)), 1).await?;
        let first = times.tokens.first().context("the replica ended without a token")?;
        Ok(Self { num_bytes: target.num_bytes, load, first_token: *first - start })
    }
}

/// Refuses lengths that sequences of at most `max_sequence_tokens` tokens cannot have; the last token is not computed.
///
/// # Errors
/// If one is too long, with the numbers.
pub fn expect_to_fit(args: &Args, max_sequence_tokens: usize) -> Result<(), UsageError> {
    let longest = |lengths: &[usize]| lengths.iter().copied().max().unwrap_or(0);
    let lengths = [
        ("--shared-prefix", args.shared_prefix, "--prefill", longest(&args.prefill)),
        ("--depth", longest(&args.depth), "--decode", args.decode),
    ];
    for (first, first_tokens, second, second_tokens) in lengths {
        if first_tokens.saturating_add(second_tokens) >= max_sequence_tokens {
            return Err(UsageError(format!(
                "{first} {first_tokens} and {second} {second_tokens} do not fit the model: a sequence has at most \
                 {max_sequence_tokens} tokens, of which one is to spare"
            )));
        }
    }
    Ok(())
}

/// Runs every measurement that `args` names, each once more as a warm-up.
///
/// # Errors
/// If a request fails or does not fit the model.
pub async fn measure(target: &Target, args: &Args) -> anyhow::Result<Vec<Measurement>> {
    let (vocab_size, max_sequence_tokens) = target.limits();
    expect_to_fit(args, max_sequence_tokens)?;
    let mut prompts = Prompts { vocab_size, state: 1 };
    let mut results = Vec::new();
    let shared = prompts.next(args.shared_prefix);
    let behind = if shared.is_empty() { String::new() } else { format!("@{}", shared.len()) };
    for &length in &args.prefill {
        let mut rates = Vec::new();
        for _ in 0..=args.repetitions {
            let times = target.generate([&shared[..], &prompts.next(length)].concat(), 1).await?;
            rates.push(length as f64 / (times.tokens[0] - times.start).as_secs_f64());
        }
        results.push(summary(format!("pp{length}{behind}"), &rates[1..])?);
    }
    for &depth in &args.depth {
        for &concurrent in &args.concurrent {
            let mut rates = Vec::new();
            for _ in 0..=args.repetitions {
                let prompts = (0..concurrent).map(|_| prompts.next(depth)).collect();
                rates.push(decode_rate(target, prompts, args.decode).await?);
            }
            let times = if concurrent == 1 { String::new() } else { format!("x{concurrent}") };
            let at = if depth == USUAL_DEPTH { String::new() } else { format!("@{depth}") };
            results.push(summary(format!("tg{}{times}{at}", args.decode), &rates[1..])?);
        }
    }
    Ok(results)
}

async fn decode_rate(target: &Target, prompts: Vec<Vec<u32>>, decode: usize) -> anyhow::Result<f64> {
    let concurrent = prompts.len();
    let requests = prompts.into_iter().map(|prompt| target.generate(prompt, decode));
    let all = futures::future::try_join_all(requests).await?;
    let tokens = || all.iter().flat_map(|times| times.tokens.iter().copied());
    let first = tokens().min().context("no tokens")?;
    let last = tokens().max().context("no tokens")?;
    // The first token of each request is the end of its prefill.
    Ok((concurrent * (decode - 1)) as f64 / (last - first).as_secs_f64().max(1e-9))
}

fn summary(name: String, rates: &[f64]) -> anyhow::Result<Measurement> {
    let mut sorted = rates.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let (Some(&least), Some(&most), Some(&upper)) = (sorted.first(), sorted.last(), sorted.get(middle)) else {
        anyhow::bail!("{name} was not measured");
    };
    let median = if sorted.len() % 2 == 1 { upper } else { f64::midpoint(sorted[middle - 1], upper) };
    Ok(Measurement { name, median, least, most })
}

/// Pseudo-random prompts, every one another, so that no cache of prefixes helps unless it is asked to.
struct Prompts {
    vocab_size: usize,
    state: u64,
}

impl Prompts {
    fn next(&mut self, length: usize) -> Vec<u32> {
        // A linear congruential generator (Knuth's MMIX constants); its upper bits are good enough here.
        let mut token = || {
            self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((self.state >> 33) % self.vocab_size.max(1) as u64) as u32
        };
        (0..length).map(|_| token()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        let even = summary(String::from("a"), &[4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((even.median, even.least, even.most), (2.5, 1.0, 4.0));
        assert_eq!(summary(String::from("a"), &[9.0, 1.0, 3.0]).unwrap().median, 3.0);
        assert!(summary(String::from("a"), &[]).is_err());
    }

    #[test]
    fn prompts_differ_and_stay_in_the_vocabulary() {
        let mut prompts = Prompts { vocab_size: 100, state: 1 };
        let (first, second) = (prompts.next(50), prompts.next(50));
        assert_ne!(first, second);
        assert!(first.iter().all(|&token_id| token_id < 100));
    }
}
