//! Teacher-forced comparison: two implementations are fed the same tokens, and choose.
//! Two correct implementations of quantized arithmetic agree on at least 95.5 % of the steps and part only where the
//! best two tokens lie close together.

use anyhow::{Context, ensure};

use crate::client::{Client, gap, greedy, tokens};

/// Least share of steps that agree.
const AGREEMENT: f64 = 0.955;
/// No parting where the best two lie so many nats apart.
pub const LARGEST_GAP: f32 = 0.6;

/// The greedy choice after a prefix, and how far the second best is behind it, nats.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// Chosen.
    pub token_id: u32,
    /// Nats.
    pub gap: f32,
}

/// A prompt with its continuation; the choices after each prefix that ends in the continuation are compared.
#[derive(Clone, Debug)]
pub struct Passage {
    /// All tokens.
    pub ids: Vec<u32>,
    /// Those of the prompt.
    pub num_prompt_tokens: usize,
}

impl Passage {
    /// Lengths of the prefixes after which a choice is compared.
    pub fn lengths(&self) -> std::ops::Range<usize> {
        self.num_prompt_tokens..self.ids.len()
    }
}

/// What a cluster chooses: every prefix as a request of its own, those of a passage at once.
///
/// # Errors
/// If a request fails.
pub async fn choices(client: &Client, passages: &[Passage]) -> anyhow::Result<Vec<Choice>> {
    let mut choices = Vec::new();
    for passage in passages {
        let steps: Vec<_> = passage
            .lengths()
            .map(|length| {
                let (client, request) = (client.clone(), greedy(tokens(&passage.ids[..length]), 1));
                tokio::spawn(async move { client.generate(request).await })
            })
            .collect();
        for step in steps {
            let output = step.await??;
            let (token_id, logprobs) = output.token_ids.first().zip(output.logprobs.first()).context("no token")?;
            choices.push(Choice { token_id: *token_id, gap: gap(logprobs) });
        }
    }
    Ok(choices)
}

/// Compares step by step; a parting counts with the larger of the two gaps. Prints the figures.
///
/// # Errors
/// If they agree too seldom or part where rounding cannot explain it.
pub fn check(name: &str, ours: &[Choice], theirs: &[Choice]) -> anyhow::Result<()> {
    ensure!(ours.len() == theirs.len(), "{name}: {} steps against {}", ours.len(), theirs.len());
    let gaps: Vec<f32> = ours
        .iter()
        .zip(theirs)
        .filter(|(ours, theirs)| ours.token_id != theirs.token_id)
        .map(|(ours, theirs)| ours.gap.max(theirs.gap))
        .collect();
    let agreement = 1.0 - gaps.len() as f64 / ours.len() as f64;
    let largest = gaps.iter().copied().fold(0.0, f32::max);
    println!("{name}: {:.1} % of {} steps agree, largest gap at a parting {largest:.3}", agreement * 100.0, ours.len());
    ensure!(agreement >= AGREEMENT, "{name}: only {:.1} % of {} steps agree", agreement * 100.0, ours.len());
    ensure!(largest < LARGEST_GAP, "{name}: parts at a gap of {largest} nats");
    Ok(())
}
