//! What can never be served is refused at once, by field; and the cluster goes on serving.

use lockstep_proto::v1::{self, generate_request::Input};
use lockstep_tests::{Cluster, Layout, client::greedy, client::tokens};
use tonic::Code;

fn with_sampling(change: impl FnOnce(&mut v1::SamplingParams)) -> v1::GenerateRequest {
    let mut request = greedy(tokens(&[504]), 4);
    change(request.sampling.as_mut().unwrap());
    request
}

fn cases() -> Vec<(v1::GenerateRequest, Code, &'static str)> {
    let invalid = Code::InvalidArgument;
    let chat = |messages| Input::Chat(v1::Chat { messages });
    vec![
        (
            v1::GenerateRequest { model: "gpt-9".into(), ..greedy(tokens(&[504]), 4) },
            Code::NotFound,
            "loaded are: smol",
        ),
        (v1::GenerateRequest { input: None, ..greedy(tokens(&[504]), 4) }, invalid, "input: is missing"),
        (greedy(Input::Prompt(String::new()), 4), invalid, "prompt: is empty"),
        (greedy(Input::Prompt("word ".repeat(9000)), 4), invalid, "the model serves 8192"),
        (greedy(tokens(&[]), 4), invalid, "input: has no tokens"),
        (greedy(tokens(&[1; 8192]), 4), invalid, "input: has 8192 tokens, the model serves 8192"),
        (greedy(tokens(&[504, 49152]), 4), invalid, "token_ids: has 49152 at index 1, the vocabulary has 49152 tokens"),
        (greedy(chat(vec![]), 4), invalid, "chat.messages: is empty"),
        (with_sampling(|s| s.max_tokens = Some(0)), invalid, "sampling.max_tokens: is 0"),
        (with_sampling(|s| s.temperature = Some(f32::NAN)), invalid, "sampling.temperature: is NaN"),
        (with_sampling(|s| s.temperature = Some(-1.0)), invalid, "sampling.temperature: is -1"),
        (with_sampling(|s| s.top_p = Some(0.0)), invalid, "sampling.top_p: is 0"),
        (with_sampling(|s| s.min_p = Some(2.0)), invalid, "sampling.min_p: is 2"),
        (with_sampling(|s| s.logprobs = 21), invalid, "sampling.logprobs: is 21"),
        (with_sampling(|s| s.stop = vec![String::new()]), invalid, "sampling.stop: has an entry of 0 bytes"),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_are_refused_by_field() {
    let cluster = Cluster::start(Layout::new(1, 1)).unwrap();
    let client = cluster.client().await.unwrap();
    for (request, code, text) in cases() {
        let status = client.generate(request).await.unwrap_err();
        assert_eq!(status.code(), code, "{status:?}");
        assert!(status.message().contains(text), "got {:?}, expected {text:?}", status.message());
    }
    let output = client.generate(greedy(tokens(&[504, 3575, 282, 4649, 314]), 1)).await.unwrap();
    assert_eq!(output.text, " Paris");
}
