//! `lockstep generate`: one request, streamed to the terminal.

use std::io::{IsTerminal, Read};

use anyhow::Context;
use lockstep_proto::{
    status::Class,
    v1::{
        Chat, Finish, FinishReason, GenerateRequest, GenerateResponse, Message, SamplingParams,
        generate_request::Input, generate_response::Event, inference_client::InferenceClient,
    },
};
use serde_json::json;
use tonic::Status;

use crate::{
    Interrupted, UsageError,
    client::{Reached, Server, ServerArgs, is_made_up, refused},
    output::{print, print_line},
};

/// Send one prompt and stream the answer; Ctrl-C cancels the request.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Continue a text:
  lockstep generate \"The capital of France is\" --max-tokens 32 --temperature 0
Ask through the model's chat template, prompt from standard input:
  echo \"Why is the sky blue?\" | lockstep generate --chat
Of two coordinators, the second goes on with the answer if the first is lost:
  lockstep generate --server host-a:7070,host-b:7070 \"Once upon a time\"
As JSON lines, with log-probabilities:
  lockstep generate --json --logprobs 3 \"Once upon a time\"")]
pub struct Args {
    #[command(flatten)]
    server: ServerArgs,
    /// The prompt; standard input if absent or `-`
    #[arg(value_name = "PROMPT")]
    text: Option<String>,
    /// The prompt, as an option
    #[arg(long, value_name = "TEXT", conflicts_with = "text")]
    prompt: Option<String>,
    /// Wrap the prompt as a user's message in the model's chat template
    #[arg(long, conflicts_with = "raw")]
    chat: bool,
    /// Continue the prompt as it is (the default)
    #[arg(long)]
    raw: bool,
    /// A system message before the prompt; implies --chat
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Name of the model; may be left out if one is served
    #[arg(long, default_value = "", hide_default_value = true)]
    model: String,
    /// Print one JSON object for each event instead of the text
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// How tokens are chosen; what is absent takes the server's default.
#[derive(Debug, clap::Args)]
struct SamplingArgs {
    /// Tokens to generate at most
    #[arg(long, short = 'n', value_name = "N")]
    max_tokens: Option<u32>,
    /// 0 is greedy and deterministic
    #[arg(long, short, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Keep the most likely tokens whose probabilities reach this sum
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Keep so many of the most likely tokens
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,
    /// Keep tokens at least so many times as likely as the most likely one
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// The same request with the same seed gives the same tokens
    #[arg(long)]
    seed: Option<u64>,
    /// Divides the logits of tokens seen in prompt or output
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,
    /// Subtracted from the logits of tokens seen in the output
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,
    /// Subtracted for each time that a token occurs in the output
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
    /// A text that ends the generation; may be repeated
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// A token that ends the generation; may be repeated
    #[arg(long, value_name = "ID")]
    stop_token_id: Vec<u32>,
    /// Go on past the model's end-of-sequence tokens
    #[arg(long)]
    ignore_eos: bool,
    /// Log-probabilities of the chosen and the N most likely tokens
    #[arg(long, value_name = "N", default_value_t = 0, requires = "json")]
    logprobs: u32,
}

/// Sends the request and prints what comes.
///
/// # Errors
/// If there is no prompt, or the server refuses, fails, or the request is cancelled.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let (is_json, server) = (args.json, args.server.clone());
    let reached = server.inference().await?;
    let mut request = args.into_request()?;
    tokio::select! {
        result = follow(&server, reached, &mut request, is_json) => result,
        signal = tokio::signal::ctrl_c() => {
            signal?;
            if !is_json {
                print_line("")?;
            }
            Err(Interrupted("cancelled").into())
        }
    }
}

/// Prints the answer to its end. If its coordinator is lost, and there are others, the next one goes on with it.
async fn follow(
    server: &ServerArgs,
    mut reached: Reached<InferenceClient<Server>>,
    request: &mut GenerateRequest,
    is_json: bool,
) -> anyhow::Result<()> {
    let mut num_passed = 0;
    let mut visited = vec![reached.address.clone()];
    loop {
        let num_received = request.received.as_ref().map_or(0, |received| received.token_ids.len());
        let status = match print_answer(&mut reached.client, request, is_json).await? {
            Ok(finish) => return finished(&request.request_id, &visited, &finish, is_json),
            Err(status) => status,
        };
        let has_progressed = request.received.as_ref().map_or(0, |received| received.token_ids.len()) > num_received;
        num_passed = if has_progressed { 1 } else { num_passed + 1 };
        let is_lost = is_made_up(&status) || matches!(Class::of(&status), Class::WorkerLost | Class::ShuttingDown);
        if !is_lost || num_passed >= server.num_coordinators() {
            return Err(refused(&reached.address, &status));
        }
        let next = server.inference_after(Some(&reached.address)).await;
        reached = next.with_context(|| refused(&reached.address, &status))?;
        visited.push(reached.address.clone());
    }
}

/// Prints what one coordinator answers and adds it to what was received: to the end, or up to the status that broke it.
async fn print_answer(
    client: &mut InferenceClient<Server>,
    request: &mut GenerateRequest,
    is_json: bool,
) -> anyhow::Result<Result<Finish, Status>> {
    let mut stream = match client.generate(request.clone()).await {
        Ok(stream) => stream.into_inner(),
        Err(status) => return Ok(Err(status)),
    };
    loop {
        let delta = match stream.message().await {
            Ok(Some(GenerateResponse { event: Some(Event::Delta(delta)), .. })) => delta,
            Ok(Some(GenerateResponse { event: Some(Event::Finish(finish)), .. })) => return Ok(Ok(finish)),
            Ok(Some(_)) => continue,
            Ok(None) => return Ok(Err(Class::WorkerLost.status("the server closed the stream before its end"))),
            Err(status) => return Ok(Err(status)),
        };
        if is_json {
            let logprobs: Vec<_> = delta.logprobs.iter().map(logprobs_json).collect();
            let mut line = json!({"request_id": request.request_id, "text": delta.text, "token_ids": delta.token_ids});
            if !logprobs.is_empty() {
                line["logprobs"] = logprobs.into();
            }
            print_line(&line.to_string())?;
        } else {
            print(&delta.text)?;
        }
        let received = request.received.get_or_insert_default();
        received.text_bytes += delta.text.len() as u64;
        received.token_ids.extend(delta.token_ids);
    }
}

fn logprobs_json(logprobs: &lockstep_proto::v1::TokenLogprobs) -> serde_json::Value {
    let token = |token: &lockstep_proto::v1::TokenLogprob| json!({"token_id": token.token_id, "logprob": token.logprob, "text": token.text});
    json!({"chosen": logprobs.chosen.as_ref().map(token), "top": logprobs.top.iter().map(token).collect::<Vec<_>>()})
}

/// The last line: what the request took, and where it went on (`visited`) after its coordinator was lost.
fn finished(request_id: &str, visited: &[String], finish: &Finish, is_json: bool) -> anyhow::Result<()> {
    let usage = finish.usage.unwrap_or_default();
    let timings = finish.timings.unwrap_or_default();
    let reason = finish.reason();
    // The first token belongs to the prefill: the decode time lies between the first and the last.
    let decode = f64::from(usage.completion_tokens.saturating_sub(1)) * 1000.0 / timings.decode_ms.max(1e-3);
    let reason_name = reason.as_str_name().trim_start_matches("FINISH_REASON_").to_lowercase();
    if is_json {
        let line = json!({
            "request_id": request_id,
            "finish_reason": reason_name,
            "coordinators": visited,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            },
            "timings": {
                "queue_ms": timings.queue_ms, "ttft_ms": timings.ttft_ms, "decode_ms": timings.decode_ms,
            },
            "decode_tokens_per_second": decode,
        });
        print_line(&line.to_string())?;
    } else {
        print_line("")?;
        let moves: String = visited
            .iter()
            .zip(visited.iter().skip(1))
            .map(|(lost, next)| format!("; continued at {next} after {lost} was lost"))
            .collect();
        eprintln!(
            "{} prompt + {} generated tokens, first after {:.0} ms, then {decode:.1} tokens/s ({reason_name}){moves}",
            usage.prompt_tokens, usage.completion_tokens, timings.ttft_ms,
        );
    }
    match reason {
        FinishReason::Stop | FinishReason::Length => Ok(()),
        _ => anyhow::bail!("the request ended with {reason_name}"),
    }
}

impl Args {
    fn into_request(self) -> anyhow::Result<GenerateRequest> {
        let prompt = match self.prompt.or(self.text).filter(|text| text != "-") {
            Some(text) => text,
            None if std::io::stdin().is_terminal() => {
                return Err(UsageError(String::from("no prompt: give it as an argument or on standard input")).into());
            }
            None => {
                let mut text = String::new();
                std::io::stdin().read_to_string(&mut text).context("standard input")?;
                text
            }
        };
        let message = |role: &str, content: String| Message { role: role.to_owned(), content };
        let input = if self.chat || self.system.is_some() {
            let system = self.system.map(|text| message("system", text));
            Input::Chat(Chat { messages: system.into_iter().chain([message("user", prompt)]).collect() })
        } else {
            Input::Prompt(prompt)
        };
        Ok(GenerateRequest {
            model: self.model,
            // Ours, so that another coordinator can take the request up.
            request_id: uuid::Uuid::new_v4().to_string(),
            input: Some(input),
            sampling: Some(self.sampling.into_params()),
            received: None,
        })
    }
}

impl SamplingArgs {
    fn into_params(self) -> SamplingParams {
        SamplingParams {
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            seed: self.seed,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            stop: self.stop,
            stop_token_ids: self.stop_token_id,
            ignore_eos: self.ignore_eos,
            logprobs: self.logprobs,
        }
    }
}
