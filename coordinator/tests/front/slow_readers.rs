//! Clients that do not read hold up themselves alone.

use std::{sync::atomic::Ordering, time::Duration};

use lockstep_proto::v1::{self, inference_client::InferenceClient};
use tonic::transport::Endpoint;

use crate::stub::{cluster, collect, config, request};

/// HTTP/2's own windows, so that little of an answer is on its way to a client.
const WINDOW_BYTES: u32 = 65_535;

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_do_not_read_hold_up_nobody_else() {
    let mut settings = config("tensor=1", 1);
    settings.model.as_mut().unwrap().plan_options.max_sequence_tokens = Some(4096);
    let (coordinator, workers) = cluster(1, settings).await;
    let state = &workers[0].state;
    state.num_top.store(200, Ordering::SeqCst);
    let mut wanted = request(4000);
    wanted.sampling.get_or_insert_default().logprobs = 1;
    let mut unread = Vec::new();
    for _ in 0..20 {
        let endpoint = Endpoint::from_shared(format!("http://{}", coordinator.grpc)).unwrap();
        let endpoint = endpoint.initial_stream_window_size(WINDOW_BYTES).initial_connection_window_size(WINDOW_BYTES);
        let mut client = InferenceClient::new(endpoint.connect().await.unwrap());
        unread.push(client.generate(wanted.clone()).await.unwrap());
    }
    // Until everything between the worker and them is full.
    let mut num_sent = usize::MAX;
    while std::mem::replace(&mut num_sent, state.num_sent.load(Ordering::SeqCst)) != num_sent {
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    assert_eq!(state.num_running.load(Ordering::SeqCst), unread.len());
    state.num_top.store(0, Ordering::SeqCst);
    let answer = async {
        let stream = coordinator.inference().await.generate(request(50)).await.unwrap();
        collect(stream.into_inner()).await.unwrap()
    };
    let answer = tokio::time::timeout(Duration::from_secs(5), answer).await.expect("it waits for other clients");
    assert_eq!(answer.finish.unwrap().reason(), v1::FinishReason::Length);
}
