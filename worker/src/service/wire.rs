//! Between `lockstep.v1` and this crate's own types: validation of what comes in, conversion of what goes out.
//! Invariant: what passes here cannot make the engine, the sampler or a kernel fail.

use lockstep_proto::{
    status::Class,
    v1::{self, sequence_event::Event},
};
use tonic::Status;

use crate::{
    WorkerError,
    engine::{
        EngineError, EngineStatus, FinishReason, Logprobs, Sampling, SequenceOutput, SequenceRequest, SequenceStats,
    },
};

/// Most log-probabilities of one token.
const MAX_LOGPROBS: u32 = 20;
/// Most stop tokens of one sequence.
const MAX_STOP_TOKENS: usize = 256;
/// When an overloaded engine should be asked again.
const RETRY_AFTER: std::time::Duration = std::time::Duration::from_millis(500);

/// The sequence that a request describes; absent sampling fields take their defaults.
///
/// # Errors
/// `INVALID_ARGUMENT` naming the field, its value and what is allowed.
pub(super) fn sequence_request(request: v1::RunSequenceRequest, vocab_size: usize) -> Result<SequenceRequest, Status> {
    if request.token_ids.is_empty() {
        return Err(invalid("token_ids is empty"));
    }
    check_token_ids("token_ids", &request.token_ids, vocab_size)?;
    check_token_ids("eos_token_ids", &request.eos_token_ids, vocab_size)?;
    let params = request.sampling.ok_or_else(|| invalid("sampling is missing"))?;
    let sampling = sampling(params, request.eos_token_ids, vocab_size)?;
    Ok(SequenceRequest { request_id: request.request_id, prompt: request.token_ids, sampling })
}

fn sampling(params: v1::SamplingParams, eos_token_ids: Vec<u32>, vocab_size: usize) -> Result<Sampling, Status> {
    let max_tokens = params.max_tokens.filter(|max_tokens| *max_tokens > 0);
    check_token_ids("sampling.stop_token_ids", &params.stop_token_ids, vocab_size)?;
    let mut stop_token_ids = params.stop_token_ids;
    stop_token_ids.extend(eos_token_ids);
    if stop_token_ids.len() > MAX_STOP_TOKENS {
        return Err(invalid(format!("{} stop tokens, at most {MAX_STOP_TOKENS} are allowed", stop_token_ids.len())));
    }
    if params.logprobs > MAX_LOGPROBS {
        return Err(invalid(format!("sampling.logprobs is {}, at most {MAX_LOGPROBS} is allowed", params.logprobs)));
    }
    let penalty = |value: Option<f32>| value.unwrap_or(0.0);
    Ok(Sampling {
        max_tokens: max_tokens.ok_or_else(|| invalid("sampling.max_tokens is absent or 0, expected at least 1"))?
            as usize,
        temperature: within("temperature", params.temperature.unwrap_or(1.0), 0.0, f32::MAX)?,
        top_p: within("top_p", params.top_p.unwrap_or(1.0), f32::MIN_POSITIVE, 1.0)?,
        top_k: params.top_k.unwrap_or(0) as usize,
        min_p: within("min_p", params.min_p.unwrap_or(0.0), 0.0, 1.0)?,
        seed: params.seed.ok_or_else(|| invalid("sampling.seed is absent"))?,
        repetition_penalty: within(
            "repetition_penalty",
            params.repetition_penalty.unwrap_or(1.0),
            f32::MIN_POSITIVE,
            f32::MAX,
        )?,
        presence_penalty: within("presence_penalty", penalty(params.presence_penalty), f32::MIN, f32::MAX)?,
        frequency_penalty: within("frequency_penalty", penalty(params.frequency_penalty), f32::MIN, f32::MAX)?,
        stop_token_ids,
        logprobs: params.logprobs as usize,
    })
}

fn within(field: &str, value: f32, least: f32, most: f32) -> Result<f32, Status> {
    if value >= least && value <= most {
        Ok(value)
    } else {
        Err(invalid(format!("sampling.{field} is {value}, expected {least} to {most}")))
    }
}

fn check_token_ids(field: &str, token_ids: &[u32], vocab_size: usize) -> Result<(), Status> {
    match token_ids.iter().find(|token_id| **token_id as usize >= vocab_size) {
        Some(token_id) => Err(invalid(format!("{field} has {token_id}, the vocabulary ends at {vocab_size}"))),
        None => Ok(()),
    }
}

fn invalid(message: impl Into<String>) -> Status {
    Class::InvalidRequest.status(message)
}

/// The status of a failure of this worker.
pub(super) fn status_of(error: &WorkerError) -> Status {
    let class = match error {
        WorkerError::Engine(EngineError::Overloaded { .. }) => {
            return Class::Overloaded.status_with_retry(error.to_string(), RETRY_AFTER);
        }
        WorkerError::Engine(EngineError::TooLong { .. } | EngineError::EmptyPrompt) => Class::InvalidRequest,
        WorkerError::Model(_) | WorkerError::Plan(_) | WorkerError::Mismatch(_) => Class::InvalidRequest,
        WorkerError::Link { .. } | WorkerError::ReplicaBroken(_) => Class::WorkerLost,
        _ => Class::Internal,
    };
    class.status(error.to_string())
}

/// Outputs that are ready together as events: their tokens in one, and the end if it is among them.
pub(super) fn sequence_events(outputs: Vec<SequenceOutput>) -> Vec<v1::SequenceEvent> {
    let mut tokens = v1::SequenceTokens::default();
    let mut finish = None;
    for output in outputs {
        match output {
            SequenceOutput::Token { token_id, logprobs } => {
                tokens.token_ids.push(token_id);
                tokens.logprobs.extend(logprobs.map(token_logprobs));
            }
            SequenceOutput::Finished { reason, stats } => finish = Some(Event::Finish(sequence_finish(reason, stats))),
        }
    }
    let tokens = (!tokens.token_ids.is_empty()).then_some(Event::Tokens(tokens));
    tokens.into_iter().chain(finish).map(|event| v1::SequenceEvent { event: Some(event) }).collect()
}

/// Whether nothing follows an event.
pub(super) fn is_last(event: &v1::SequenceEvent) -> bool {
    matches!(event.event, Some(Event::Finish(_)))
}

fn token_logprobs(logprobs: Logprobs) -> v1::TokenLogprobs {
    let convert = |(token_id, logprob)| v1::TokenLogprob { token_id, logprob, text: String::new() };
    v1::TokenLogprobs { chosen: Some(convert(logprobs.chosen)), top: logprobs.top.into_iter().map(convert).collect() }
}

fn sequence_finish(reason: FinishReason, stats: SequenceStats) -> v1::SequenceFinish {
    let reason = match reason {
        FinishReason::Stop => v1::FinishReason::Stop,
        FinishReason::Length => v1::FinishReason::Length,
        FinishReason::Error => v1::FinishReason::Error,
    };
    v1::SequenceFinish {
        reason: reason.into(),
        usage: Some(v1::Usage {
            prompt_tokens: stats.prompt_tokens as u32,
            completion_tokens: stats.completion_tokens as u32,
            cached_tokens: stats.cached_tokens as u32,
        }),
        timings: Some(v1::Timings { queue_ms: stats.queue_ms, ttft_ms: stats.ttft_ms, decode_ms: stats.decode_ms }),
    }
}

/// Engine numbers for a heartbeat.
pub(crate) fn engine_status(status: EngineStatus) -> v1::EngineStatus {
    v1::EngineStatus {
        num_running_sequences: status.num_running_sequences as u32,
        num_waiting_sequences: status.num_waiting_sequences as u32,
        num_kv_blocks: status.num_kv_blocks as u32,
        num_free_kv_blocks: status.num_free_kv_blocks as u32,
        prefill_tokens_per_second: status.prefill_tokens_per_second,
        decode_tokens_per_second: status.decode_tokens_per_second,
        num_preemptions: status.num_preemptions,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(change: impl FnOnce(&mut v1::RunSequenceRequest, &mut v1::SamplingParams)) -> v1::RunSequenceRequest {
        let mut request = v1::RunSequenceRequest { token_ids: vec![1, 2], ..Default::default() };
        let mut params = v1::SamplingParams { max_tokens: Some(4), seed: Some(1), ..Default::default() };
        change(&mut request, &mut params);
        request.sampling = Some(params);
        request
    }

    #[test]
    fn defaults_are_applied() {
        let request = request(|request, params| {
            request.eos_token_ids = vec![3];
            params.stop_token_ids = vec![4];
        });
        let sampling = sequence_request(request, 10).unwrap().sampling;
        assert_eq!((sampling.temperature, sampling.top_p, sampling.repetition_penalty), (1.0, 1.0, 1.0));
        assert_eq!(sampling.stop_token_ids, [4, 3]);
    }

    #[test]
    fn bad_fields_are_named() {
        type Change = fn(&mut v1::RunSequenceRequest, &mut v1::SamplingParams);
        let cases: [(Change, &str); 11] = [
            (|request, _| request.token_ids.clear(), "token_ids is empty"),
            (|request, _| request.token_ids.push(10), "token_ids has 10"),
            (|request, _| request.eos_token_ids.push(11), "eos_token_ids has 11"),
            (|_, params| params.max_tokens = Some(0), "max_tokens"),
            (|_, params| params.seed = None, "seed"),
            (|_, params| params.temperature = Some(f32::NAN), "temperature is NaN"),
            (|_, params| params.temperature = Some(-1.0), "temperature is -1"),
            (|_, params| params.top_p = Some(0.0), "top_p is 0"),
            (|_, params| params.min_p = Some(1.5), "min_p is 1.5"),
            (|_, params| params.presence_penalty = Some(f32::INFINITY), "presence_penalty is inf"),
            (|_, params| params.logprobs = 21, "logprobs is 21"),
        ];
        for (change, expected) in cases {
            let status = sequence_request(request(change), 10).unwrap_err();
            assert_eq!(Class::of(&status), Class::InvalidRequest);
            assert!(status.message().contains(expected), "{}", status.message());
        }
    }
}
