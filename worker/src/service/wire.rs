//! Between `lockstep.v1` and this crate's own types: validation of what comes in, conversion of what goes out.
//! Invariant: what passes here cannot make the engine, the sampler or a kernel fail.

use std::time::Duration;

use lockstep_kernels::device::Scratch;
use lockstep_proto::{
    sampling::{self, FieldError, MAX_SEQUENCE_STOP_TOKENS},
    status::{Class, RETRY_AFTER},
    v1::{self, sequence_event::Event},
};
use tonic::Status;

use crate::{
    WorkerError,
    engine::{
        Beginning, EngineError, EngineStatus, FinishReason, Logprobs, Sampling, SequenceOutput, SequenceRequest,
        SequenceStats, Tenant,
    },
};

/// The sequence that a request describes; absent sampling fields take their defaults.
///
/// # Errors
/// `INVALID_ARGUMENT` naming the field, its value and what is allowed.
pub(super) fn sequence_request(request: v1::RunSequenceRequest, vocab_size: usize) -> Result<SequenceRequest, Status> {
    if request.token_ids.is_empty() {
        return Err(invalid("token_ids is empty"));
    }
    sampling::check_token_ids("token_ids", &request.token_ids, vocab_size).map_err(refused)?;
    sampling::check_token_ids("eos_token_ids", &request.eos_token_ids, vocab_size).map_err(refused)?;
    let params = request.sampling.ok_or_else(|| invalid("sampling is missing"))?;
    sampling::check(&params, vocab_size).map_err(refused)?;
    let sampling = sampling_of(params, request.eos_token_ids)?;
    let num_output_tokens = request.num_output_tokens as usize;
    for (limit, what) in [(request.token_ids.len(), "the number of token_ids"), (sampling.max_tokens, "max_tokens")] {
        if num_output_tokens >= limit {
            let problem = format!("num_output_tokens is {num_output_tokens}, expected less than {what}, {limit}");
            return Err(invalid(problem));
        }
    }
    let weight = request.weight.max(1);
    if weight > Tenant::MAX_WEIGHT {
        return Err(invalid(format!("weight is {weight}, allowed are 1 to {}", Tenant::MAX_WEIGHT)));
    }
    let v1::RunSequenceRequest { request_id, tenant, token_ids, is_isolated, .. } = request;
    let tenant = Tenant { name: tenant.into(), weight, is_isolated };
    Ok(SequenceRequest { request_id, tenant, token_ids, num_output_tokens, sampling })
}

fn sampling_of(params: v1::SamplingParams, eos_token_ids: Vec<u32>) -> Result<Sampling, Status> {
    let mut stop_token_ids = params.stop_token_ids;
    stop_token_ids.extend(eos_token_ids);
    let (got, limit) = (stop_token_ids.len(), MAX_SEQUENCE_STOP_TOKENS);
    if got > limit {
        return Err(invalid(format!("{got} tokens would end the sequence, at most {limit} are allowed")));
    }
    Ok(Sampling {
        max_tokens: params.max_tokens.ok_or_else(|| invalid("sampling.max_tokens is absent"))? as usize,
        temperature: params.temperature.unwrap_or(1.0),
        top_p: params.top_p.unwrap_or(1.0),
        top_k: params.top_k.unwrap_or(0) as usize,
        min_p: params.min_p.unwrap_or(0.0),
        seed: params.seed.ok_or_else(|| invalid("sampling.seed is absent"))?,
        repetition_penalty: params.repetition_penalty.unwrap_or(1.0),
        presence_penalty: params.presence_penalty.unwrap_or(0.0),
        frequency_penalty: params.frequency_penalty.unwrap_or(0.0),
        stop_token_ids,
        logprobs: params.logprobs as usize,
    })
}

fn invalid(message: impl Into<String>) -> Status {
    Class::InvalidRequest.status(message)
}

fn refused(FieldError { field, problem }: FieldError) -> Status {
    invalid(format!("{field}: {problem}"))
}

/// The status of a failure of this worker.
pub(super) fn status_of(error: &WorkerError) -> Status {
    let class = match error {
        WorkerError::Engine(EngineError::Overloaded { .. }) => {
            return Class::Overloaded.status_with_retry(error.to_string(), RETRY_AFTER);
        }
        WorkerError::Unreachable { worker_id, .. } => {
            return lockstep_proto::status::unreachable(error.to_string(), worker_id);
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
            SequenceOutput::Token { token_id, logprobs, beginning } => {
                if let Some(Beginning { queue_ms, cached_tokens }) = beginning {
                    tokens.queue_ms = Some(queue_ms);
                    tokens.cached_tokens = cached_tokens as u32;
                }
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

/// A rank's scratch memory for a heartbeat.
pub(crate) fn rank_report((rank, scratch): (usize, Scratch)) -> v1::RankReport {
    v1::RankReport {
        rank: rank as u32,
        scratch_high_water_bytes: scratch.high_water_bytes as u64,
        scratch_requests: scratch.num_requests,
        scratch_hits: scratch.num_hits,
    }
}

/// Engine numbers for a heartbeat.
pub(crate) fn engine_status(status: EngineStatus, last_step_age: Duration) -> v1::EngineStatus {
    v1::EngineStatus {
        num_running_sequences: status.num_running_sequences as u32,
        num_waiting_sequences: status.num_waiting_sequences as u32,
        num_kv_blocks: status.num_kv_blocks as u32,
        num_free_kv_blocks: status.num_free_kv_blocks as u32,
        prefill_tokens_per_second: status.prefill_tokens_per_second,
        decode_tokens_per_second: status.decode_tokens_per_second,
        num_preemptions: status.num_preemptions,
        prefix_query_tokens: status.prefix_query_tokens,
        prefix_hit_tokens: status.prefix_hit_tokens,
        last_step_age_ms: last_step_age.as_secs_f64() * 1e3,
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
        let cases: [(Change, &str); 10] = [
            (|request, _| request.weight = 1001, "weight is 1001, allowed are 1 to 1000"),
            (|request, _| request.token_ids.clear(), "token_ids is empty"),
            (|request, _| request.token_ids.push(10), "token_ids: has 10 at index 2"),
            (|request, _| request.eos_token_ids.push(11), "eos_token_ids: has 11"),
            (|request, _| request.eos_token_ids = vec![3; 257], "257 tokens would end the sequence"),
            (|request, _| request.num_output_tokens = 2, "num_output_tokens is 2, expected less than the number of"),
            (
                |request, _| (request.num_output_tokens, request.token_ids) = (4, vec![1; 5]),
                "num_output_tokens is 4, expected less than max_tokens, 4",
            ),
            (|_, params| params.max_tokens = None, "max_tokens is absent"),
            (|_, params| params.seed = None, "seed is absent"),
            (|_, params| params.temperature = Some(f32::NAN), "sampling.temperature: is NaN"),
        ];
        for (change, expected) in cases {
            let status = sequence_request(request(change), 10).unwrap_err();
            assert_eq!(Class::of(&status), Class::InvalidRequest);
            assert!(status.message().contains(expected), "{}", status.message());
        }
    }
}
