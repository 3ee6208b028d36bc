//! Prompts that begin alike go to the replica that knows the beginning, which computes only the rest; when it has much to
//! do they go elsewhere. Either way they yield the same.

use std::time::{Duration, Instant};

use lockstep_proto::v1;
use lockstep_tests::{
    Client, Cluster, Layout,
    client::{greedy, tokens},
    environment,
    process::PATIENCE,
    tenants,
};
use tempfile::TempDir;

use crate::prompts::PASSAGES;

/// Tokens with which all prompts begin: nine blocks and a few.
const NUM_SHARED: usize = 300;
const NUM_SHARED_IN_BLOCKS: u32 = 288;

/// The engines of both replicas, as soon as `condition` holds for their reports.
async fn engines(client: &Client, condition: impl Fn(&[v1::EngineStatus]) -> bool) -> Vec<v1::EngineStatus> {
    let end = Instant::now() + PATIENCE;
    loop {
        let cluster = client.admin.clone().get_cluster(v1::GetClusterRequest {}).await.unwrap().into_inner();
        let engines: Vec<_> = cluster.models[0].replicas.iter().filter_map(|replica| replica.engine).collect();
        if engines.len() == 2 && condition(&engines) {
            return engines;
        }
        assert!(Instant::now() < end, "{engines:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn prefixes_find_their_replica_and_load_spreads() {
    let cluster = Cluster::start(Layout { replicas: 2, workers: 2, ..Layout::new(1, 1) }).unwrap();
    let client = cluster.client().await.unwrap();
    let text = client.tokenize(&PASSAGES.join(" ")).await.unwrap();
    let prompt = |own: usize| tokens(&[&text[..NUM_SHARED], &text[own..own + 20]].concat());

    let first = client.generate(greedy(prompt(0), 16)).await.unwrap();
    assert_eq!(first.finish.usage.unwrap().cached_tokens, 0);
    for own in 1..5 {
        let output = client.generate(greedy(prompt(own), 4)).await.unwrap();
        assert_eq!(output.finish.usage.unwrap().cached_tokens, NUM_SHARED_IN_BLOCKS, "prompt {own}");
    }
    let again = client.generate(greedy(prompt(0), 16)).await.unwrap();
    assert_eq!((&again.token_ids, &again.logprobs), (&first.token_ids, &first.logprobs));
    let queries = 6 * (NUM_SHARED as u64 + 20);
    let done =
        engines(&client, |engines| engines.iter().map(|engine| engine.prefix_query_tokens).sum::<u64>() == queries);
    let mut done = done.await;
    done.sort_by_key(|engine| engine.prefix_query_tokens);
    assert_eq!((done[0].prefix_query_tokens, done[1].prefix_hit_tokens), (0, 5 * u64::from(NUM_SHARED_IN_BLOCKS)));

    // Each stream costs the holder 232 tokens at first and spares it 288.
    let mut streams = Vec::new();
    for _ in 0..6 {
        let mut stream = client.start(greedy(prompt(0), 200)).await.unwrap();
        let mut token_ids = Vec::new();
        while token_ids.len() < 4 {
            let message = stream.message().await.unwrap().unwrap();
            if let Some(v1::generate_response::Event::Delta(delta)) = message.event {
                token_ids.extend(delta.token_ids);
            }
        }
        assert!(first.token_ids.starts_with(&token_ids[..4]), "{token_ids:?} instead of {:?}", first.token_ids);
        streams.push(stream);
    }
    engines(&client, |engines| engines.iter().all(|engine| engine.num_running_sequences >= 2)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_isolated_tenant_shares_prefixes_with_itself_alone() {
    let folder = TempDir::new().unwrap();
    let names = [("isolated-a", "isolated = true"), ("isolated-b", "isolated = true"), ("open-a", ""), ("open-b", "")];
    let mut specs = names.map(|(name, settings)| (name.to_owned(), settings.to_owned())).to_vec();
    specs.push((String::from("admin"), String::from("admin = true")));
    let (file, keys) = tenants::write(folder.path(), &specs).await.unwrap();
    let arguments = [format!("--tenants={}", file.display()), format!("--api-key={}", keys[4])];
    let arguments = arguments.each_ref().map(String::as_str);
    let cluster = Cluster::start_with_arguments(Layout::new(1, 1), &environment::model().unwrap(), &arguments).unwrap();
    let mut clients = Vec::new();
    for key in &keys[..4] {
        clients.push(Client::connect_as(&cluster.grpc(), key).await.unwrap());
    }
    let text = clients[0].tokenize(&PASSAGES.join(" ")).await.unwrap();
    let mut undisturbed = None;
    // Who asks, in turn, and whether the prompt is known to him by then.
    for (tenant, is_known) in [(0, false), (0, true), (1, false), (2, false), (3, true), (1, true), (0, true)] {
        let output = clients[tenant].generate(greedy(tokens(&text[..NUM_SHARED]), 8)).await.unwrap();
        let cached = output.finish.usage.unwrap().cached_tokens;
        assert_eq!(cached, if is_known { NUM_SHARED_IN_BLOCKS } else { 0 }, "{}", names[tenant].0);
        assert_eq!(*undisturbed.get_or_insert_with(|| output.token_ids.clone()), output.token_ids);
    }
}
