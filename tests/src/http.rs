//! Plain HTTP, as much of it as tests ask for.

use anyhow::{Context, ensure};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// The body at `path` of `host:port`.
///
/// # Errors
/// If nobody answers, or with something else than 200.
pub async fn get(address: &str, path: &str) -> anyhow::Result<String> {
    exchange(address, path, &format!("GET {path} HTTP/1.0\r\nhost: {address}\r\n\r\n")).await
}

/// The answer to JSON that is posted with further `headers`, each ended by a line's end.
///
/// # Errors
/// As [`get`].
pub async fn post_json(address: &str, path: &str, headers: &str, body: &Value) -> anyhow::Result<String> {
    let body = body.to_string();
    let head = format!("POST {path} HTTP/1.0\r\nhost: {address}\r\ncontent-type: application/json\r\n{headers}");
    exchange(address, path, &format!("{head}content-length: {}\r\n\r\n{body}", body.len())).await
}

async fn exchange(address: &str, path: &str, request: &str) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect(address).await.with_context(|| format!("connecting to {address}"))?;
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no answer")?;
    ensure!(head.split(' ').nth(1) == Some("200"), "{address}{path} answers {answer}");
    Ok(body.to_owned())
}

/// The same as JSON.
///
/// # Errors
/// As [`get`], or if it is none.
pub async fn get_json(address: &str, path: &str) -> anyhow::Result<Value> {
    Ok(serde_json::from_str(&get(address, path).await?)?)
}
