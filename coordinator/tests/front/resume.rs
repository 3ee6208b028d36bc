//! Requests taken up where another coordinator left them: what the client has is not sent again, what it lacks is.

use lockstep_proto::v1;
use tonic::Code;

use crate::stub::{Collected, Coordinator, StubWorker, cluster, collect, config, request};

/// A request as a client sends it again that has the text and the tokens (bytes of `tokens`) of a first try.
fn again(request: &v1::GenerateRequest, text: &str, tokens: &str) -> v1::GenerateRequest {
    let token_ids = tokens.bytes().map(u32::from).collect();
    let received = Some(v1::Received { token_ids, text_bytes: text.len() as u64 });
    v1::GenerateRequest { request_id: "first".into(), received, ..request.clone() }
}

async fn answer(coordinator: &Coordinator, request: v1::GenerateRequest) -> Collected {
    let stream = coordinator.inference().await.generate(request).await.unwrap();
    collect(stream.into_inner()).await.unwrap()
}

fn last_sequence(worker: &StubWorker) -> v1::RunSequenceRequest {
    worker.state.last_sequence.lock().unwrap().clone().unwrap()
}

#[tokio::test]
async fn the_rest_of_an_answer_follows_what_was_received() {
    let (coordinator, workers) = cluster(1, config("tensor=1", 1)).await;
    let request = v1::GenerateRequest { request_id: "first".into(), ..request(11) };
    let whole = answer(&coordinator, request.clone()).await;
    assert_eq!(whole.text, "hello world");
    let first = last_sequence(&workers[0]);
    for received in 0..=11 {
        let text = &whole.text[..received];
        let rest = answer(&coordinator, again(&request, text, text)).await;
        assert_eq!(format!("{text}{}", rest.text), whole.text);
        assert_eq!(rest.token_ids, whole.token_ids[received..]);
        let (rest, whole) = (rest.finish.unwrap(), whole.finish.unwrap());
        assert_eq!((rest.reason, rest.usage), (whole.reason, whole.usage));
        if (1..11).contains(&received) {
            let sequence = last_sequence(&workers[0]);
            assert_eq!(sequence.num_output_tokens as usize, received);
            assert_eq!(sequence.token_ids, [&first.token_ids[..], &rest_ids(text)].concat());
            // No seed was named: the request's id stands for one.
            assert_eq!(sequence.sampling, first.sampling);
        }
    }
}

fn rest_ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[tokio::test]
async fn what_was_held_back_is_neither_lost_nor_repeated() {
    let (coordinator, _workers) = cluster(1, config("tensor=1", 1)).await;
    let mut request = request(24);
    request.sampling.as_mut().unwrap().stop = vec!["lo worm".into(), "ld h".into()];
    // "lo wor" is held back until the l says that it was no stop.
    for (received, rest) in [("hel", "lo wor"), ("hello", " wor"), ("hello wor", "")] {
        let got = answer(&coordinator, again(&request, received, received)).await;
        assert_eq!(got.text, rest, "after {received:?}");
        let finish = got.finish.unwrap();
        assert_eq!(finish.reason(), v1::FinishReason::Stop);
        assert_eq!(finish.usage.unwrap().completion_tokens, 9);
    }
    // The text of the tokens that the client has not: it gets it, or has it already.
    let got = answer(&coordinator, again(&request, "he", "hel")).await;
    assert_eq!((got.text.as_str(), got.token_ids.len()), ("llo wor", 6));
    let got = answer(&coordinator, again(&request, "hello", "hel")).await;
    assert_eq!((got.text.as_str(), got.token_ids.len()), (" wor", 6));
}

#[tokio::test]
async fn what_cannot_have_been_received_is_refused() {
    let (coordinator, _workers) = cluster(1, config("tensor=1", 1)).await;
    let mut client = coordinator.inference().await;
    let mut refused = async |request: v1::GenerateRequest| {
        let status = client.generate(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        status.message().to_owned()
    };
    let anonymous = v1::GenerateRequest { request_id: String::new(), ..again(&request(5), "he", "he") };
    assert!(refused(anonymous).await.contains("request_id: is empty"));
    assert!(refused(again(&request(1), "he", "he")).await.contains("received.token_ids: has 2 tokens, at most 1"));
    let mut unknown = again(&request(5), "he", "he");
    unknown.received.as_mut().unwrap().token_ids[1] = 1 << 20;
    assert!(refused(unknown).await.contains("received.token_ids: has 1048576 at index 1"));
}
