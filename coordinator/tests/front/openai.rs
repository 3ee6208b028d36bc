//! The OpenAI API: shapes, streams, refusals, clients that leave or do not read.

use std::{sync::atomic::Ordering, time::Duration};

use lockstep_coordinator::CoordinatorConfig;
use serde_json::{Value, json};
use tokio::{
    io::AsyncReadExt,
    net::{TcpSocket, TcpStream},
};

use crate::{
    http::{get, post, post_with, receive, send},
    stub::{Coordinator, MODEL, StubState, StubWorker, cluster, config, eventually},
};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// Method, path, content type, body, and the status and part of the message that are expected.
type Case<'a> = (&'a str, &'a str, &'a str, &'a [u8], u16, &'a str);

async fn start() -> (Coordinator, Vec<StubWorker>) {
    cluster(1, config("tensor=1", 1)).await
}

fn chat(max_tokens: u32) -> Value {
    json!({ "model": MODEL, "messages": [{ "role": "user", "content": "hi" }], "max_tokens": max_tokens })
}

/// `object` with the fields of `more`.
fn with(mut object: Value, more: Value) -> Value {
    object.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    object
}

fn slow(state: &StubState) {
    *state.token_delay.lock().unwrap() = Duration::from_millis(10);
}

#[tokio::test]
async fn models_are_listed_and_found() {
    let (coordinator, _workers) = start().await;
    let list = get(&coordinator, "/v1/models").await.json();
    let model = &list["data"][0];
    assert_eq!((&list["object"], &model["object"], &model["id"]), (&json!("list"), &json!("model"), &json!(MODEL)));
    assert!(model["created"].as_u64() > Some(1_700_000_000) && model["max_model_len"] == 512, "{model}");
    assert_eq!(get(&coordinator, &format!("/v1/models/{MODEL}")).await.json(), *model);
    let missing = get(&coordinator, "/v1/models/org/none").await;
    assert_eq!((missing.status, &missing.json()["error"]["code"]), (404, &json!("model_not_found")));
}

#[tokio::test]
async fn chat_is_answered_whole() {
    let (coordinator, workers) = start().await;
    let extras = json!({
        "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "seed": 7, "stop": "x", "stop_token_ids": [5], "ignore_eos": true, "user": "me",
        "max_completion_tokens": 5, "tools": [], "logit_bias": {}, "response_format": { "type": "text" },
        "unknown": { "a": 1 },
    });
    let answer = post(&coordinator, CHAT, &with(chat(400), extras)).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let json = answer.json();
    let expected = json!([{
        "index": 0, "message": { "role": "assistant", "content": "hello", "refusal": null },
        "logprobs": null, "finish_reason": "length",
    }]);
    assert_eq!(json["choices"], expected);
    let usage = json!({
        "prompt_tokens": 8, "completion_tokens": 5, "total_tokens": 13, "prompt_tokens_details": { "cached_tokens": 0 },
    });
    assert_eq!((&json["usage"], &json["object"], &json["model"]), (&usage, &json!("chat.completion"), &json!(MODEL)));
    let id = json["id"].as_str().unwrap();
    assert!(id.starts_with("chatcmpl-") && answer.head.contains(&format!("x-request-id: {id}")), "{answer:?}");
    assert!(json["system_fingerprint"].as_str().unwrap().starts_with("lockstep-"), "{json}");

    let sent = workers[0].state.last_sequence.lock().unwrap().clone().unwrap();
    assert_eq!((sent.request_id.as_str(), sent.token_ids.len(), sent.eos_token_ids.len()), (id, 8, 0));
    let sampling = sent.sampling.unwrap();
    assert_eq!((sampling.seed, sampling.top_k, sampling.temperature), (Some(7), None, Some(0.5)));
    assert_eq!((sampling.top_p, sampling.min_p, sampling.max_tokens), (Some(0.9), Some(0.1), Some(5)));
    assert_eq!((sampling.presence_penalty, sampling.frequency_penalty), (Some(0.5), Some(-0.5)));
    assert_eq!((sampling.repetition_penalty, sampling.stop_token_ids), (Some(1.1), vec![5]));
}

#[tokio::test]
async fn chat_streams_role_text_finish_and_usage() {
    let (coordinator, _workers) = start().await;
    let options = json!({ "stream": true, "stream_options": { "include_usage": true } });
    let answer = post(&coordinator, CHAT, &with(chat(3), options)).await;
    let mut events = answer.events();
    assert_eq!(events.pop(), Some(json!("DONE")));
    let usage = events.pop().unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]["total_tokens"]), (&json!([]), &json!(11)));
    for event in &events {
        assert_eq!((&event["object"], &event["id"]), (&json!("chat.completion.chunk"), &events[0]["id"]));
        assert!(event.as_object().unwrap().contains_key("usage") && event["usage"].is_null(), "{event}");
    }
    let deltas: Vec<&Value> = events.iter().map(|event| &event["choices"][0]["delta"]).collect();
    let expected = [
        json!({ "role": "assistant", "content": "" }),
        json!({ "content": "h" }),
        json!({ "content": "e" }),
        json!({ "content": "l" }),
        json!({}),
    ];
    assert_eq!(deltas, expected.iter().collect::<Vec<_>>());
    assert_eq!(events[4]["choices"][0]["finish_reason"], "length");
    assert!(events[3]["choices"][0]["finish_reason"].is_null());
    let plain = post(&coordinator, CHAT, &with(chat(3), json!({ "stream": true }))).await;
    assert!(!plain.body.contains("usage"), "{plain:?}");
}

#[tokio::test]
async fn completions_take_prompts_in_every_form() {
    let (coordinator, workers) = start().await;
    let choices = async |prompt: Value, more: Value| {
        let answer = post(&coordinator, COMPLETIONS, &with(json!({ "prompt": prompt, "max_tokens": 2 }), more)).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let json = answer.json();
        let choices = json["choices"].as_array().unwrap().clone();
        assert!(choices.iter().enumerate().all(|(index, choice)| choice["index"] == index), "{json}");
        let texts: Vec<String> = choices.iter().map(|choice| choice["text"].as_str().unwrap().into()).collect();
        (texts, json["usage"]["prompt_tokens"].as_u64().unwrap(), json["usage"]["completion_tokens"].as_u64().unwrap())
    };
    assert_eq!(choices(json!("abc"), json!({})).await, (vec!["he".into()], 3, 2));
    assert_eq!(choices(json!([97, 98]), json!({ "echo": true })).await, (vec!["abhe".into()], 2, 2));
    let two = choices(json!(["a", "bc"]), json!({ "echo": true, "n": 2, "seed": -1 })).await;
    assert_eq!(two, (vec!["ahe".into(), "ahe".into(), "bche".into(), "bche".into()], 3, 8));
    assert_eq!(choices(json!([[97], [98, 99]]), json!({})).await, (vec!["he".into(), "he".into()], 3, 4));
    // The default of OpenAI's servers.
    let answer = post(&coordinator, COMPLETIONS, &json!({ "prompt": "a" })).await.json();
    assert_eq!(answer["usage"]["completion_tokens"], 16);
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-") && answer["object"] == "text_completion", "{answer}");
    assert_eq!(workers[0].state.num_cancelled.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn choices_are_interleaved_and_have_seeds_of_their_own() {
    let (coordinator, workers) = start().await;
    slow(&workers[0].state);
    let wanted = json!({ "prompt": "a", "max_tokens": 8, "n": 3, "seed": 40, "stream": true, "echo": true });
    let events = post(&coordinator, COMPLETIONS, &wanted).await.events();
    let indices: Vec<u64> = events.iter().filter_map(|event| event["choices"][0]["index"].as_u64()).collect();
    assert_eq!(indices[..3], [0, 1, 2]);
    assert!(indices[3..9] != [0; 6], "one choice came before the others: {indices:?}");
    for index in 0..3 {
        let chunks = events.iter().filter(|event| event["choices"][0]["index"] == index);
        let text: String = chunks.map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
        assert_eq!(text, "ahello wo");
    }
    let seeds = async |seed: i64| {
        let wanted = json!({ "prompt": "a", "max_tokens": 1, "n": 1, "seed": seed });
        post(&coordinator, COMPLETIONS, &wanted).await;
        workers[0].state.last_sequence.lock().unwrap().as_ref().unwrap().sampling.as_ref().unwrap().seed()
    };
    assert_eq!((seeds(41).await, seeds(-1).await), (41, u64::MAX));
}

#[tokio::test]
async fn logprobs_have_the_shape_of_their_endpoint() {
    let (coordinator, _workers) = start().await;
    let answer = post(&coordinator, CHAT, &with(chat(2), json!({ "logprobs": true }))).await.json();
    let token = |token: &str| json!({ "token": token, "logprob": -0.5, "bytes": token.as_bytes(), "top_logprobs": [] });
    let expected = json!({ "content": [token("h"), token("e")], "refusal": null });
    assert_eq!(answer["choices"][0]["logprobs"], expected);

    let wanted = json!({ "prompt": "a", "max_tokens": 2, "logprobs": 0, "stream": true });
    let events = post(&coordinator, COMPLETIONS, &wanted).await.events();
    let expected = json!({ "tokens": ["e"], "token_logprobs": [-0.5], "top_logprobs": [{}], "text_offset": [1] });
    assert_eq!(events[1]["choices"][0]["logprobs"], expected);
}

#[tokio::test]
async fn a_stop_text_is_reported_as_stop() {
    let (coordinator, _workers) = start().await;
    for stream in [false, true] {
        let answer = post(&coordinator, CHAT, &with(chat(100), json!({ "stop": ["o w"], "stream": stream }))).await;
        if stream {
            let events = answer.events();
            assert_eq!(events[events.len() - 2]["choices"][0]["finish_reason"], "stop", "{events:?}");
        } else {
            let choice = &answer.json()["choices"][0];
            let got = (&choice["message"]["content"], &choice["finish_reason"]);
            assert_eq!(got, (&json!("hell"), &json!("stop")));
        }
    }
}

#[tokio::test]
async fn refusals_have_a_status_and_name_the_field() {
    let (coordinator, _workers) = start().await;
    let image = json!([{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "x" } }] }]);
    let cases = [
        (CHAT, json!({ "messages": image }), 400, "messages[0].content", "image_url"),
        (CHAT, json!({ "messages": [] }), 400, "messages", "is empty"),
        (CHAT, json!({ "messages": [{ "role": "robot", "content": "x" }] }), 400, "messages", "role robot is unknown"),
        (CHAT, json!({ "prompt": "x" }), 400, "messages", "is missing"),
        (CHAT, with(chat(1), json!({ "temperature": "hot" })), 400, "temperature", "invalid type: string"),
        (CHAT, with(chat(1), json!({ "temperature": -1 })), 400, "temperature", "is -1, allowed are 0 to 100"),
        (CHAT, chat(0), 400, "max_tokens", "is 0"),
        (CHAT, with(chat(1), json!({ "tools": [{ "type": "function" }] })), 400, "tools", "is not served"),
        (CHAT, with(chat(1), json!({ "logit_bias": { "5": 1 } })), 400, "logit_bias", "is not served"),
        (CHAT, with(chat(1), json!({ "response_format": { "type": "json_object" } })), 400, "response_format.type", ""),
        (CHAT, with(chat(1), json!({ "top_logprobs": 2 })), 400, "top_logprobs", "needs logprobs"),
        (CHAT, with(chat(1), json!({ "logprobs": true, "top_logprobs": 21 })), 400, "top_logprobs", "the limit is 20"),
        (CHAT, with(chat(1), json!({ "n": 0 })), 400, "n", "allowed are 1 to 128"),
        (CHAT, with(chat(1), json!({ "n": 129 })), 400, "n", "is 129"),
        (CHAT, with(chat(1), json!({ "stream_options": {} })), 400, "stream_options", "needs stream"),
        (CHAT, with(chat(1), json!({ "model": "gpt-9" })), 404, "model", "loaded are: stub-model"),
        (COMPLETIONS, json!({}), 400, "prompt", "is missing"),
        (COMPLETIONS, json!({ "prompt": [] }), 400, "prompt", "is empty"),
        (COMPLETIONS, json!({ "prompt": "" }), 400, "prompt", "is empty"),
        (COMPLETIONS, json!({ "prompt": [999] }), 400, "prompt", "has 999 at index 0"),
        (COMPLETIONS, json!({ "prompt": "x".repeat(512) }), 400, "prompt", "has 512 tokens, the model serves 512"),
        (COMPLETIONS, json!({ "prompt": { "a": 1 } }), 400, "prompt", "expected a text, an array"),
        (COMPLETIONS, json!({ "prompt": "a", "suffix": "b" }), 400, "suffix", "is not served"),
        (COMPLETIONS, json!({ "prompt": "a", "echo": true, "logprobs": 1 }), 400, "echo", "logprobs"),
    ];
    for (path, body, status, param, message) in cases {
        let answer = post(&coordinator, path, &body).await;
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["param"]), (status, &json!(param)), "{body}: {answer:?}");
        assert!(error["message"].as_str().unwrap().contains(message), "{body}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
    }
}

#[tokio::test]
async fn what_is_no_request_is_refused_as_json() {
    let (coordinator, _workers) = start().await;
    let json = "application/json";
    let long = vec![b' '; (16 << 20) + 1];
    let cases: [Case<'_>; 9] = [
        ("POST", CHAT, json, b"{", 400, "EOF while parsing"),
        ("POST", CHAT, json, b"[]", 400, ""),
        ("POST", CHAT, json, b"{} {}", 400, "trailing characters"),
        ("POST", CHAT, json, b"\xff", 400, ""),
        ("POST", CHAT, "text/plain", b"{}", 415, "expected application/json"),
        ("POST", CHAT, json, &long, 413, "longer than 16777216 bytes"),
        ("GET", CHAT, json, b"", 405, "not served with this method"),
        ("POST", "/v1/embeddings", json, b"{}", 404, "/v1/embeddings is not served"),
        ("DELETE", "/v1/models", json, b"", 405, ""),
    ];
    for (method, path, content_type, body, status, message) in cases {
        let answer = receive(send(&coordinator, method, path, content_type, body).await).await;
        let error = &answer.json()["error"];
        assert_eq!(answer.status, status, "{answer:?}");
        assert!(error["message"].as_str().unwrap().contains(message), "{answer:?}");
    }
    let metrics = get(&coordinator, "/metrics").await.body;
    assert!(metrics.contains("requests_total{outcome=\"invalid_request\"} 6"), "those of the endpoint: {metrics}");
}

#[tokio::test]
async fn overload_and_waiting_say_when_to_try_again() {
    let mut settings = config("tensor=1", 1);
    settings.max_concurrent_requests = 2;
    let (coordinator, workers) = cluster(1, settings).await;
    // What could never run is no overload.
    let answer = post(&coordinator, CHAT, &with(chat(1), json!({ "n": 3 }))).await;
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("n")), "{answer:?}");
    let state = &workers[0].state;
    slow(state);
    let body = with(chat(400), json!({ "stream": true })).to_string();
    let running = send(&coordinator, "POST", CHAT, "application/json", body.as_bytes()).await;
    eventually("running", || state.num_running.load(Ordering::SeqCst) == 1).await;
    let answer = post(&coordinator, CHAT, &with(chat(1), json!({ "n": 2 }))).await;
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (429, &json!("overloaded")), "{answer:?}");
    assert!(answer.head.contains("retry-after: 1") && answer.head.contains("retry-after-ms: 500"), "{answer:?}");
    drop(running);
    eventually("cancelling", || state.num_cancelled.load(Ordering::SeqCst) == 1).await;
    assert_eq!(post(&coordinator, CHAT, &with(chat(1), json!({ "n": 2 }))).await.status, 200);
    let metrics = get(&coordinator, "/metrics").await.body;
    assert!(metrics.contains("requests_total{outcome=\"overloaded\"} 1"), "{metrics}");

    drop(workers);
    coordinator.wait_ready(false).await;
    let answer = post(&coordinator, CHAT, &chat(1)).await;
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (503, &json!("server_error")), "{answer:?}");
    assert!(answer.head.contains("retry-after:"), "{answer:?}");
}

#[tokio::test]
async fn clients_that_leave_cancel_their_sequences() {
    let (coordinator, workers) = start().await;
    let state = &workers[0].state;
    slow(state);
    for (stream, cancelled) in [(true, 2), (false, 4)] {
        let body = with(chat(400), json!({ "stream": stream, "n": 2 })).to_string();
        let mut connection = send(&coordinator, "POST", CHAT, "application/json", body.as_bytes()).await;
        if stream {
            connection.read_u8().await.unwrap();
        }
        eventually("running", || state.num_running.load(Ordering::SeqCst) == 2).await;
        drop(connection);
        eventually("cancelling", || state.num_cancelled.load(Ordering::SeqCst) == cancelled).await;
        assert_eq!(state.num_running.load(Ordering::SeqCst), 0);
    }
}

#[tokio::test]
async fn a_failure_in_mid_stream_is_the_last_event() {
    let settings = CoordinatorConfig { failover_timeout: Duration::ZERO, ..config("tensor=1", 1) };
    let (coordinator, mut workers) = cluster(1, settings).await;
    slow(&workers[0].state);
    let body = with(chat(400), json!({ "stream": true, "n": 2 })).to_string();
    let connection = send(&coordinator, "POST", CHAT, "application/json", body.as_bytes()).await;
    connection.peek(&mut [0; 1]).await.unwrap();
    workers.clear();
    let answer = receive(connection).await;
    let events = answer.events();
    let error = &events.last().unwrap()["error"];
    assert_eq!((answer.status, &error["type"], &error["code"]), (200, &json!("server_error"), &json!("worker_lost")));
    assert!(events[0]["choices"][0]["delta"]["role"] == "assistant", "{events:?}");
}

#[tokio::test]
async fn the_page_and_its_numbers_are_served() {
    let (coordinator, _workers) = start().await;
    let page = get(&coordinator, "/").await;
    let policy = page.head.lines().find_map(|line| line.strip_prefix("content-security-policy: ")).unwrap();
    let nonce = policy.split("script-src 'nonce-").nth(1).unwrap().split('\'').next().unwrap();
    assert_eq!(page.body.matches(&format!("nonce=\"{nonce}\"")).count(), 2, "{policy}");
    assert!(policy.starts_with("default-src 'none'") && !page.body.contains("{nonce}") && !page.body.contains("://"));
    let again = get(&coordinator, "/").await;
    assert!(!again.body.contains(nonce), "a nonce is used once");

    let status = get(&coordinator, "/status.json").await.json();
    let model = &status["models"][0];
    assert_eq!(
        (&model["name"], &model["ready"], &status["num_running_requests"]),
        (&json!(MODEL), &json!(true), &json!(0))
    );
    assert_eq!((&model["replicas"][0]["state"], &status["workers"][0]["worker_id"]), (&json!("ready"), &json!("w0")));
    assert!(model["plan"]["replicas"][0]["ranks"][0]["worker_id"] == "w0", "{status}");
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_its_sequences_back() {
    let (coordinator, _workers) = start().await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut connection: TcpStream = socket.connect(coordinator.http).await.unwrap();
    let body = with(chat(500), json!({ "stream": true, "n": 60, "logprobs": true })).to_string();
    let head = format!(
        "POST {CHAT} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    tokio::io::AsyncWriteExt::write_all(&mut connection, head.as_bytes()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let metrics = get(&coordinator, "/metrics").await.body;
    assert!(!metrics.contains("running_requests 0"), "the whole answer is held somewhere: {metrics}");
    let answer = receive(connection).await;
    let events = answer.events();
    assert_eq!(events.last(), Some(&json!("DONE")));
    assert_eq!(events.len(), 60 * (1 + 500 + 1) + 1);
}

#[tokio::test]
async fn a_client_may_bound_the_whole_answer() {
    let (coordinator, workers) = start().await;
    slow(&workers[0].state);
    let within = |millis: &'static str| ("x-request-timeout-ms", millis);
    let late = post_with(&coordinator, CHAT, within("200"), &chat(400)).await;
    assert_eq!((late.status, late.json()["error"]["code"].clone()), (504, json!("deadline")), "{late:?}");
    // The stream has begun by then: its last event says it, and no [DONE] follows.
    let stream = with(chat(400), json!({ "stream": true }));
    let late = post_with(&coordinator, CHAT, within("300"), &stream).await.events();
    assert!(late.len() > 2 && late.last().unwrap()["error"]["code"] == "deadline", "{late:?}");
    eventually("the sequences' end", || workers[0].state.num_running.load(Ordering::SeqCst) == 0).await;
    assert_eq!(post_with(&coordinator, CHAT, within("86400000"), &chat(2)).await.status, 200);
    for wrong in ["0", "86400001", "-1", "soon"] {
        let refused = post_with(&coordinator, COMPLETIONS, within(wrong), &json!({ "prompt": "hi" })).await;
        assert_eq!((refused.status, refused.json()["error"]["param"].clone()), (400, json!("x-request-timeout-ms")));
    }
}

#[tokio::test]
async fn who_asks_again_under_the_same_key_gets_the_same_draws() {
    let (coordinator, workers) = start().await;
    let seed = || workers[0].state.last_sequence.lock().unwrap().clone().unwrap().sampling.unwrap().seed.unwrap();
    let mut answers = Vec::new();
    for key in ["a", "a", "b"] {
        let answer = post_with(&coordinator, CHAT, ("Idempotency-Key", key), &chat(3)).await.json();
        answers.push((answer["id"].as_str().unwrap().to_owned(), seed()));
    }
    assert_eq!(answers[0], answers[1]);
    assert!(answers[0].0 != answers[2].0 && answers[0].1 != answers[2].1, "{answers:?}");
}
