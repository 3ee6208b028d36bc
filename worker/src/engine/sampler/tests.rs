//! The sampler against a direct f64 implementation of the same filters over a whole softmax.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::engine::tests::fake_model::reduce;

/// Penalized logit over temperature of every token, minus infinity where min-p, top-k or top-p drops it; plainly.
fn filtered(logits: &[f32], sampling: &Sampling, prompt: &[u32], output: &[u32]) -> Vec<f64> {
    let mut scaled: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    for (token, logit) in scaled.iter_mut().enumerate() {
        let token = token as u32;
        let count = output.iter().filter(|&&seen| seen == token).count() as f64;
        if count > 0.0 || prompt.contains(&token) {
            let repetition = f64::from(sampling.repetition_penalty);
            *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
        }
        if count > 0.0 {
            *logit -= f64::from(sampling.presence_penalty) + f64::from(sampling.frequency_penalty) * count;
        }
        *logit /= f64::from(sampling.temperature);
    }
    let mut probabilities = softmax(&scaled);
    let most = probabilities.iter().copied().fold(0.0, f64::max);
    for (token, probability) in probabilities.iter().enumerate() {
        if *probability < most * f64::from(sampling.min_p) {
            scaled[token] = f64::NEG_INFINITY;
        }
    }
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&left, &right| scaled[right].total_cmp(&scaled[left]).then(left.cmp(&right)));
    if sampling.top_k > 0 {
        order.iter().skip(sampling.top_k).for_each(|&token| scaled[token] = f64::NEG_INFINITY);
    }
    probabilities = softmax(&scaled);
    let mut before = 0.0;
    for &token in &order {
        if sampling.top_p < 1.0 && before > 0.0 && before >= f64::from(sampling.top_p) {
            scaled[token] = f64::NEG_INFINITY;
        }
        before += probabilities[token];
    }
    scaled
}

fn num_kept(filtered: &[f64]) -> usize {
    filtered.iter().filter(|logit| logit.is_finite()).count()
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|logit| (logit - most).exp()).sum();
    logits.iter().map(|logit| (logit - most).exp() / sum).collect()
}

/// Asks for rows until the sampler has enough candidates.
fn sample(sampler: &mut Sampler, logits: &[f32], position: usize) -> (u32, Option<Logprobs>, usize) {
    for repeats in 0.. {
        match sampler.choose(position, &reduce(logits, &sampler.row(position))) {
            Choice::Token(token_id, logprobs) => return (token_id, logprobs, repeats),
            Choice::MoreCandidates => assert!(repeats < 8, "the list does not grow"),
            Choice::Invalid => panic!("finite logits are valid"),
        }
    }
    unreachable!()
}

fn logits_of(seed: u64, vocab_size: usize, spread: f32) -> Vec<f32> {
    (0..vocab_size).map(|token| (gumbel(seed, token as u32) as f32) * spread).collect()
}

/// Draws many tokens and compares their frequencies with the reference by Pearson's chi-square.
fn check_distribution(logits: &[f32], sampling: &Sampling) {
    const DRAWS: usize = 20_000;
    let (prompt, output) = ([1, 2, 3], [3, 4, 4]);
    let expected = softmax(&filtered(logits, sampling, &prompt, &output));
    let mut sampler = Sampler::new(sampling, &prompt);
    output.iter().for_each(|&token_id| sampler.observe(token_id));
    let mut counts = BTreeMap::new();
    for position in 0..DRAWS {
        *counts.entry(sample(&mut sampler, logits, position).0).or_insert(0usize) += 1;
    }
    let (mut chi_square, mut degrees, mut rest, mut rest_expected) = (0.0, 0.0, 0.0, 0.0);
    for (token, probability) in expected.iter().enumerate() {
        let count = counts.get(&(token as u32)).copied().unwrap_or(0) as f64;
        let mean = probability * DRAWS as f64;
        assert!(*probability > 0.0 || count == 0.0, "token {token} was filtered out but drawn: {sampling:?}");
        if mean >= 8.0 {
            chi_square += (count - mean).powi(2) / mean;
            degrees += 1.0;
        } else {
            rest += count;
            rest_expected += mean;
        }
    }
    if rest_expected >= 8.0 {
        chi_square += (rest - rest_expected).powi(2) / rest_expected;
        degrees += 1.0;
    }
    // Mean `degrees - 1`, variance twice that; five deviations.
    let bound = degrees + 5.0 * (2.0f64 * degrees).sqrt();
    assert!(chi_square <= bound, "chi-square {chi_square} > {bound}: {sampling:?}");
}

#[test]
fn frequencies_match_the_filtered_softmax() {
    let base = Sampling { temperature: 0.8, seed: 11, ..Sampling::greedy(1) };
    let penalized = Sampling { repetition_penalty: 1.3, presence_penalty: 0.4, frequency_penalty: 0.3, ..base.clone() };
    let cases = [
        base.clone(),
        penalized.clone(),
        Sampling { top_k: 5, ..base.clone() },
        Sampling { top_p: 0.8, ..base.clone() },
        Sampling { min_p: 0.05, ..base.clone() },
        Sampling { top_k: 30, top_p: 0.9, min_p: 0.02, ..penalized },
        Sampling { temperature: 1.7, top_p: 0.95, ..base },
    ];
    for (index, sampling) in cases.iter().enumerate() {
        check_distribution(&logits_of(index as u64, 100, 1.5), sampling);
    }
}

#[test]
fn flat_distributions_past_the_first_candidates_stay_exact() {
    let logits = logits_of(5, 3000, 0.2);
    let sampling = Sampling { temperature: 1.5, top_p: 0.97, seed: 3, ..Sampling::greedy(1) };
    let mut sampler = Sampler::new(&sampling, &[0]);
    let repeats: Vec<_> = (0..50).map(|position| sample(&mut sampler, &logits, position).2).collect();
    assert!(repeats[0] > 0, "the nucleus is longer than the first list");
    assert!(repeats[1..].iter().all(|&repeats| repeats == 0), "the length is remembered");
    let kept = num_kept(&filtered(&logits, &sampling, &[0], &[]));
    let counted = sampler.num_kept(&reduce(&logits, &sampler.row(0))).unwrap();
    assert!(kept.abs_diff(counted) <= 1, "f32 sums may move the border by one token: {kept} and {counted}");
}

#[test]
fn greedy_is_the_argmax_with_ties_to_the_smaller_id() {
    let mut sampler = Sampler::new(&Sampling::greedy(1), &[0]);
    assert_eq!(sample(&mut sampler, &[0.5, 2.0, 2.0, -1.0], 0).0, 1);
    let penalized = Sampling { repetition_penalty: 2.0, ..Sampling::greedy(1) };
    let mut sampler = Sampler::new(&penalized, &[1]);
    assert_eq!(sample(&mut sampler, &[0.5, 2.0, 1.5, -1.0], 0).0, 2);
    assert_eq!(sampler.choose(0, &Candidates::default()), Choice::Invalid);
    let nan = Candidates { top: vec![(0, f32::NAN)], ..Candidates::default() };
    assert_eq!(sampler.choose(0, &nan), Choice::Invalid);
}

#[test]
fn logprobs_are_those_of_the_raw_logits() {
    let logits = logits_of(9, 60, 1.0);
    let all: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    let expected = softmax(&all);
    for (temperature, top_k) in [(0.0, 0), (1.3, 0), (1.3, 40)] {
        let sampling = Sampling {
            temperature,
            top_k,
            logprobs: 3,
            repetition_penalty: 1.8,
            presence_penalty: 0.5,
            ..Sampling::greedy(1)
        };
        let mut sampler = Sampler::new(&sampling, &[7, 8]);
        (0..60).for_each(|token_id| sampler.observe(token_id));
        for position in 0..20 {
            let (token_id, logprobs, _) = sample(&mut sampler, &logits, position);
            let logprobs = logprobs.unwrap();
            assert_eq!(logprobs.chosen.0, token_id);
            assert_eq!(logprobs.top.len(), 3);
            for (token_id, logprob) in logprobs.top.iter().chain([&logprobs.chosen]) {
                let difference = f64::from(*logprob) - expected[*token_id as usize].ln();
                assert!(difference.abs() < 1e-4, "{difference}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// The kept set is the reference's, whatever the filters (up to one token at the border of an f32 sum).
    #[test]
    fn kept_tokens_are_the_references(
        seed in any::<u64>(), vocab_size in 1usize..600, spread in 0.01f32..4.0, temperature in 0.05f32..3.0,
        top_k in 0usize..400, top_p in 0.01f32..1.1, min_p in 0f32..0.5,
    ) {
        let min_p = if seed % 3 == 0 { 0.0 } else { min_p };
        let sampling = Sampling { temperature, top_k, top_p: top_p.min(1.0), min_p, seed, ..Sampling::greedy(1) };
        let logits = logits_of(seed, vocab_size, spread);
        let mut sampler = Sampler::new(&sampling, &[0]);
        prop_assume!(sampler.mode == Mode::Filtered);
        let expected = filtered(&logits, &sampling, &[0], &[]);
        let (token_id, _, _) = sample(&mut sampler, &logits, 0);
        let kept = num_kept(&expected);
        let row = SampleRow { top_k: vocab_size + 1, ..sampler.row(0) };
        sampler.num_candidates = vocab_size + 1;
        let counted = sampler.num_kept(&reduce(&logits, &row)).unwrap();
        prop_assert!(kept.abs_diff(counted) <= 1, "expected {kept}, got {counted}");
        prop_assert!(expected[token_id as usize].is_finite() || counted > kept);
    }
}
