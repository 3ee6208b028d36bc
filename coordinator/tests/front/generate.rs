//! Generate and Tokenize: texts, stops, refusals, cancellation, overload, deadlines.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use lockstep_proto::{
    Message,
    status::Class,
    v1::{self, generate_request::Input},
};
use tonic::Code;

use crate::stub::{self, MAX_TOKENS, MODEL, StubState, cluster, collect, config, eventually, request};

fn set<T>(field: &std::sync::Mutex<T>, value: T) {
    *field.lock().unwrap() = value;
}

#[tokio::test]
async fn streams_text_ids_logprobs_and_a_finish() {
    let (coordinator, workers) = cluster(1, config("tensor=1", 1)).await;
    set(&workers[0].state.script, "né ".into());
    let mut wanted = request(4);
    wanted.sampling.as_mut().unwrap().logprobs = 1;
    let stream = coordinator.inference().await.generate(wanted).await.unwrap();
    let got = collect(stream.into_inner()).await.unwrap();
    assert_eq!(got.text, "né ");
    assert_eq!(got.token_ids, "né ".bytes().map(u32::from).collect::<Vec<_>>());
    assert_eq!(got.logprobs.len(), 4);
    assert_eq!(got.logprobs[0].chosen.as_ref().unwrap().text, "n");
    let finish = got.finish.unwrap();
    assert_eq!(finish.reason(), v1::FinishReason::Length);
    assert_eq!(finish.usage.unwrap(), v1::Usage { prompt_tokens: 2, completion_tokens: 4, cached_tokens: 0 });
    let timings = finish.timings.unwrap();
    assert!(timings.ttft_ms > 0.0 && timings.queue_ms == 0.25, "{timings:?}");

    let sent = workers[0].state.last_sequence.lock().unwrap().clone().unwrap();
    assert_eq!(sent.token_ids, [104, 105]);
    assert_eq!(sent.eos_token_ids, [0]);
    assert!(sent.sampling.unwrap().seed.is_some());
}

#[tokio::test]
async fn cut_off_character_becomes_a_replacement() {
    let (coordinator, workers) = cluster(1, config("tensor=1", 1)).await;
    set(&workers[0].state.script, "é".into());
    let stream = coordinator.inference().await.generate(request(1)).await.unwrap();
    let got = collect(stream.into_inner()).await.unwrap();
    assert_eq!((got.text.as_str(), got.token_ids), ("\u{fffd}", vec![0xc3]));
}

#[tokio::test]
async fn stop_text_ends_the_stream_and_the_sequence() {
    let (coordinator, workers) = cluster(1, config("tensor=1", 1)).await;
    let state = &workers[0].state;
    set(&state.script, "one two three ".into());
    set(&state.token_delay, Duration::from_millis(5));
    let mut wanted = request(400);
    wanted.sampling.as_mut().unwrap().stop = vec!["o three".into()];
    let stream = coordinator.inference().await.generate(wanted).await.unwrap();
    let got = collect(stream.into_inner()).await.unwrap();
    assert_eq!(got.text, "one tw");
    assert_eq!(got.token_ids.len(), 6);
    let finish = got.finish.unwrap();
    assert_eq!((finish.reason(), finish.usage.unwrap().completion_tokens), (v1::FinishReason::Stop, 6));
    assert_eq!(finish.timings.unwrap().queue_ms, 0.25);
    assert!(state.last_sequence.lock().unwrap().as_ref().unwrap().sampling.as_ref().unwrap().stop.is_empty());
    eventually("cancelling the sequence", || state.num_cancelled.load(Ordering::SeqCst) == 1).await;
}

#[tokio::test]
async fn client_that_leaves_cancels_its_sequence() {
    let (coordinator, workers) = cluster(1, config("tensor=1", 1)).await;
    let state: &StubState = &workers[0].state;
    set(&state.token_delay, Duration::from_millis(10));
    let mut stream = coordinator.inference().await.generate(request(400)).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    assert_eq!(state.num_running.load(Ordering::SeqCst), 1);
    drop(stream);
    eventually("cancelling the sequence", || state.num_cancelled.load(Ordering::SeqCst) == 1).await;
    assert_eq!(state.num_running.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn one_request_too_many_is_overload_with_a_hint() {
    let mut settings = config("tensor=1", 1);
    settings.max_concurrent_requests = 2;
    let (coordinator, workers) = cluster(1, settings).await;
    set(&workers[0].state.token_delay, Duration::from_millis(10));
    let mut client = coordinator.inference().await;
    let first = client.generate(request(400)).await.unwrap();
    let _second = client.generate(request(400)).await.unwrap();
    let status = client.generate(request(1)).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    assert!(Class::retry_after(&status).is_some());
    drop(first);
    let state = &workers[0].state;
    eventually("freeing the first", || state.num_cancelled.load(Ordering::SeqCst) == 1).await;
    set(&state.token_delay, Duration::ZERO);
    let third = client.generate(request(1)).await.unwrap();
    assert_eq!(collect(third.into_inner()).await.unwrap().text, "h");
}

#[tokio::test]
async fn deadline_is_kept() {
    let (coordinator, workers) = cluster(1, config("tensor=1", 1)).await;
    set(&workers[0].state.token_delay, Duration::from_millis(20));
    let mut wanted = tonic::Request::new(request(400));
    // As a client in another process would send it; tonic's own time-out would act on this side.
    wanted.metadata_mut().insert("grpc-timeout", "300m".parse().unwrap());
    let begin = Instant::now();
    let stream = coordinator.inference().await.generate(wanted).await.unwrap();
    let status = collect(stream.into_inner()).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    assert!(begin.elapsed() < Duration::from_secs(2));
    let state = &workers[0].state;
    eventually("cancelling the sequence", || state.num_cancelled.load(Ordering::SeqCst) == 1).await;
}

#[tokio::test]
async fn a_deadline_that_passes_before_the_stream_begins_is_one() {
    let (coordinator, workers) = cluster(1, config("tensor=1", 1)).await;
    // Not tonic's client, which would act on the header itself.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let message = request(5).encode_to_vec();
    let mut body = vec![0, 0, 0, 0, message.len() as u8];
    body.extend(message);
    for attempt in 0..40 {
        // The request waits for another replica for longer than that.
        *workers[0].state.refusal.lock().unwrap() = Some(Class::ShuttingDown);
        let call = client.post(format!("http://{}/lockstep.v1.Inference/Generate", coordinator.grpc));
        let call = call.header("content-type", "application/grpc").header("te", "trailers");
        let answer = call.header("grpc-timeout", "30m").body(body.clone()).send().await.unwrap();
        let status = answer.headers().get("grpc-status").cloned();
        assert_eq!(status.unwrap(), (Code::DeadlineExceeded as i32).to_string().as_str(), "attempt {attempt}");
    }
}

#[tokio::test]
async fn bad_requests_are_refused_by_field() {
    let (coordinator, _workers) = cluster(1, config("tensor=1", 1)).await;
    let mut client = coordinator.inference().await;
    let with_input = |input| v1::GenerateRequest { input: Some(input), ..request(1) };
    let chat = |role: &str| {
        let messages = vec![v1::Message { role: role.into(), content: "x".into() }];
        Input::Chat(v1::Chat { messages })
    };
    let cases = [
        (v1::GenerateRequest { model: "other".into(), ..request(1) }, Code::NotFound, "loaded are: stub-model"),
        (with_input(Input::Prompt(String::new())), Code::InvalidArgument, "prompt: is empty"),
        (
            with_input(Input::Prompt("x".repeat(MAX_TOKENS))),
            Code::InvalidArgument,
            "input: has 512 tokens, the model serves 512",
        ),
        (with_input(Input::Prompt("x".repeat(100_000))), Code::InvalidArgument, "input: has 100000 tokens"),
        (with_input(Input::TokenIds(v1::TokenIds { ids: vec![] })), Code::InvalidArgument, "input: has no tokens"),
        (
            with_input(Input::TokenIds(v1::TokenIds { ids: vec![256] })),
            Code::InvalidArgument,
            "token_ids: has 256 at index 0",
        ),
        (with_input(chat("robot")), Code::InvalidArgument, "role robot is unknown"),
        (with_input(chat("")), Code::InvalidArgument, "chat.messages.role: has 0 bytes in message 0"),
        (request(0), Code::InvalidArgument, "sampling.max_tokens: is 0"),
    ];
    for (request, code, text) in cases {
        let status = client.generate(request).await.unwrap_err();
        assert_eq!(status.code(), code, "{status:?}");
        assert!(status.message().contains(text), "got {:?}, expected {text:?}", status.message());
    }
    let mut many = with_input(chat("user"));
    if let Some(Input::Chat(chat)) = &mut many.input {
        chat.messages = vec![chat.messages[0].clone(); 100_000];
    }
    let status = client.generate(many).await.unwrap_err();
    assert!(status.message().contains("input: has 700000 tokens"), "{status:?}");
    let chat = with_input(chat("user"));
    assert_eq!(collect(client.generate(chat).await.unwrap().into_inner()).await.unwrap().text, "h");
}

#[tokio::test]
async fn text_that_is_no_utf8_is_the_clients_fault() {
    let (coordinator, _workers) = cluster(1, config("tensor=1", 1)).await;
    let channel = tonic::transport::Channel::from_shared(format!("http://{}", coordinator.grpc)).unwrap();
    let mut client = tonic::client::Grpc::new(channel.connect().await.unwrap());
    client.ready().await.unwrap();
    let path = "/lockstep.v1.Inference/Tokenize".parse().unwrap();
    // Field 2 is the prompt of a TokenizeRequest; this message has bytes there, which look the same on the wire.
    let message = v1::DescribeModelResponse { tokenizer_json: vec![0xff, 0xfe], ..Default::default() };
    let codec = tonic_prost::ProstCodec::<v1::DescribeModelResponse, v1::TokenizeResponse>::default();
    let status = client.unary(tonic::Request::new(message), path, codec).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    assert!(status.message().contains("UTF-8"), "{status:?}");
}

#[tokio::test]
async fn tokenizes_and_lists() {
    let (coordinator, _workers) = cluster(1, config("tensor=1", 1)).await;
    let mut client = coordinator.inference().await;
    let input = Some(v1::tokenize_request::Input::Prompt("aé".into()));
    let tokens = client.tokenize(v1::TokenizeRequest { model: MODEL.into(), input }).await.unwrap().into_inner();
    assert_eq!(tokens.token_ids, [97, 0xc3, 0xa9]);
    assert_eq!(tokens.tokens, ["a", "\u{fffd}", "\u{fffd}"]);
    let models = client.list_models(v1::ListModelsRequest {}).await.unwrap().into_inner().models;
    let expected =
        v1::Model { name: MODEL.into(), max_sequence_tokens: MAX_TOKENS as u32, vocab_size: 256, ready: true };
    assert_eq!(models, [expected]);
}

#[tokio::test]
async fn many_streams_at_once_are_all_answered() {
    let (coordinator, _workers) = cluster(2, config("tensor=2", 2)).await;
    let client = coordinator.inference().await;
    let streams = (0..60).map(|index| {
        let mut client = client.clone();
        async move {
            let stream = client.generate(stub::request(index + 1)).await.unwrap();
            collect(stream.into_inner()).await.unwrap().token_ids.len()
        }
    });
    let lengths = futures::future::join_all(streams).await;
    assert_eq!(lengths, (1..=60).collect::<Vec<_>>());
}
