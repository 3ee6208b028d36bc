//! What `SamplingParams` may hold. For: the coordinator checks them for clients, a worker for whoever calls it.
//! Invariant: what passes makes no sampler fail: numbers are finite and in range, ids are in the vocabulary.
//! Not here: defaults of absent fields (each reader's own), stop texts of any meaning.

use crate::v1::SamplingParams;

/// Most alternatives for which log-probabilities are given.
pub const MAX_LOGPROBS: u32 = 20;
/// Most stop tokens that a request may name.
pub const MAX_STOP_TOKENS: usize = 64;
/// Most tokens that may end a sequence: those of the request and the model's own.
pub const MAX_SEQUENCE_STOP_TOKENS: usize = 256;
/// Highest temperature.
const MAX_TEMPERATURE: f32 = 100.0;
/// Highest repetition penalty.
const MAX_REPETITION_PENALTY: f32 = 100.0;
/// Bound of presence and frequency penalty, either sign.
const MAX_ADDITIVE_PENALTY: f32 = 2.0;
/// Most stop texts.
const MAX_STOPS: usize = 16;
/// Longest stop text, bytes.
const MAX_STOP_BYTES: usize = 256;

/// A field with a value that is not allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// Its path in the request.
    pub field: &'static str,
    /// The value and those allowed.
    pub problem: String,
}

/// Accepts parameters for a model of `vocab_size` tokens. Absent fields are accepted.
///
/// # Errors
/// [`FieldError`] naming the first field that is wrong.
pub fn check(sampling: &SamplingParams, vocab_size: usize) -> Result<(), FieldError> {
    if sampling.max_tokens == Some(0) {
        return refuse("sampling.max_tokens", "is 0, at least 1 is needed");
    }
    let in_range = |field, value: Option<f32>, least: f32, most: f32| match value {
        Some(value) if !(least..=most).contains(&value) => {
            refuse(field, format!("is {value}, allowed are {least} to {most}"))
        }
        _ => Ok(()),
    };
    let above_zero = |field, value: Option<f32>, most: f32| match value {
        Some(value) if !(value > 0.0 && value <= most) => {
            refuse(field, format!("is {value}, allowed is more than 0, up to {most}"))
        }
        _ => Ok(()),
    };
    in_range("sampling.temperature", sampling.temperature, 0.0, MAX_TEMPERATURE)?;
    above_zero("sampling.top_p", sampling.top_p, 1.0)?;
    in_range("sampling.min_p", sampling.min_p, 0.0, 1.0)?;
    above_zero("sampling.repetition_penalty", sampling.repetition_penalty, MAX_REPETITION_PENALTY)?;
    let most = MAX_ADDITIVE_PENALTY;
    in_range("sampling.presence_penalty", sampling.presence_penalty, -most, most)?;
    in_range("sampling.frequency_penalty", sampling.frequency_penalty, -most, most)?;
    if sampling.logprobs > MAX_LOGPROBS {
        return refuse("sampling.logprobs", format!("is {}, the limit is {MAX_LOGPROBS}", sampling.logprobs));
    }
    check_stops(sampling)?;
    check_token_ids("sampling.stop_token_ids", &sampling.stop_token_ids, vocab_size)
}

fn check_stops(sampling: &SamplingParams) -> Result<(), FieldError> {
    let within = |field, got: usize, limit: usize| match got > limit {
        true => refuse(field, format!("has {got} entries, the limit is {limit}")),
        false => Ok(()),
    };
    within("sampling.stop", sampling.stop.len(), MAX_STOPS)?;
    within("sampling.stop_token_ids", sampling.stop_token_ids.len(), MAX_STOP_TOKENS)?;
    match sampling.stop.iter().enumerate().find(|(_, stop)| stop.is_empty() || stop.len() > MAX_STOP_BYTES) {
        Some((index, stop)) => {
            let problem =
                format!("has an entry of {} bytes at index {index}, allowed are 1 to {MAX_STOP_BYTES}", stop.len());
            refuse("sampling.stop", problem)
        }
        None => Ok(()),
    }
}

/// Accepts ids of a vocabulary of `vocab_size` tokens.
///
/// # Errors
/// [`FieldError`] with the first id past it.
pub fn check_token_ids(field: &'static str, ids: &[u32], vocab_size: usize) -> Result<(), FieldError> {
    match ids.iter().enumerate().find(|(_, id)| **id as usize >= vocab_size) {
        Some((index, id)) => {
            refuse(field, format!("has {id} at index {index}, the vocabulary has {vocab_size} tokens"))
        }
        None => Ok(()),
    }
}

fn refuse(field: &'static str, problem: impl Into<String>) -> Result<(), FieldError> {
    Err(FieldError { field, problem: problem.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bad_field_is_named_with_its_value() {
        type Change = fn(&mut SamplingParams);
        let cases: [(Change, &str, &str); 18] = [
            (|s| s.max_tokens = Some(0), "max_tokens", "is 0, at least 1"),
            (|s| s.temperature = Some(f32::NAN), "temperature", "is NaN, allowed are 0 to 100"),
            (|s| s.temperature = Some(-0.5), "temperature", "is -0.5"),
            (|s| s.temperature = Some(f32::INFINITY), "temperature", "is inf"),
            (|s| s.top_p = Some(0.0), "top_p", "is 0, allowed is more than 0, up to 1"),
            (|s| s.top_p = Some(1.5), "top_p", "is 1.5"),
            (|s| s.top_p = Some(f32::NAN), "top_p", "is NaN"),
            (|s| s.min_p = Some(-0.1), "min_p", "is -0.1, allowed are 0 to 1"),
            (|s| s.repetition_penalty = Some(0.0), "repetition_penalty", "is 0"),
            (|s| s.presence_penalty = Some(3.0), "presence_penalty", "is 3, allowed are -2 to 2"),
            (|s| s.presence_penalty = Some(f32::INFINITY), "presence_penalty", "is inf"),
            (|s| s.frequency_penalty = Some(f32::NAN), "frequency_penalty", "is NaN"),
            (|s| s.logprobs = 21, "logprobs", "is 21, the limit is 20"),
            (|s| s.stop = vec!["x".into(); 17], "stop", "has 17 entries, the limit is 16"),
            (|s| s.stop = vec![String::new()], "stop", "has an entry of 0 bytes at index 0"),
            (|s| s.stop = vec!["x".repeat(257)], "stop", "has an entry of 257 bytes"),
            (|s| s.stop_token_ids = vec![100], "stop_token_ids", "has 100 at index 0, the vocabulary has 100 tokens"),
            (|s| s.stop_token_ids = vec![1; 65], "stop_token_ids", "has 65 entries"),
        ];
        assert_eq!(check(&SamplingParams::default(), 100), Ok(()));
        for (change, field, problem) in cases {
            let mut sampling = SamplingParams::default();
            change(&mut sampling);
            let error = check(&sampling, 100).unwrap_err();
            assert_eq!(error.field, format!("sampling.{field}"));
            assert!(error.problem.starts_with(problem), "got {error:?}, expected {problem:?}");
        }
    }
}
