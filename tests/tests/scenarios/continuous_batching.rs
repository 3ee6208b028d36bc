//! Requests that run together give what each gives alone.

use lockstep_tests::{
    Cluster, Layout,
    client::{greedy, tokens},
};

use crate::prompts::PASSAGES;

#[tokio::test(flavor = "multi_thread")]
async fn thirty_two_at_once_give_the_tokens_of_one_at_a_time() {
    let cluster = Cluster::start(Layout::new(2, 1)).unwrap();
    let client = cluster.client().await.unwrap();
    let text = client.tokenize(&PASSAGES.join(" ")).await.unwrap();
    // Prompts of 1 to 311 tokens from different places, outputs of 4 to 35.
    let requests: Vec<_> = (0..32)
        .map(|index| greedy(tokens(&text[index * 7..][..1 + index * 10]), 4 + (index as u32 * 13) % 32))
        .collect();
    let mut alone = Vec::new();
    for request in &requests {
        alone.push(client.generate(request.clone()).await.unwrap());
    }
    let together: Vec<_> = requests
        .iter()
        .map(|request| {
            let (client, request) = (client.clone(), request.clone());
            tokio::spawn(async move { client.generate(request).await })
        })
        .collect();
    for (index, (alone, together)) in alone.iter().zip(together).enumerate() {
        assert_eq!(together.await.unwrap().unwrap().token_ids, alone.token_ids, "request {index}");
    }
}
