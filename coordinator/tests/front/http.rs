//! A client of HTTP that shows everything: it speaks HTTP/1.0, so that answers come as they are and end with the
//! connection.

use std::time::Instant;

use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::stub::{Coordinator, PATIENCE, POLL};

/// An answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The events of a stream; the last is `[DONE]` or an error.
    pub fn events(&self) -> Vec<Value> {
        assert!(self.head.contains("text/event-stream"), "{self:?}");
        let data = self.body.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap());
        data.map(|data| serde_json::from_str(data).unwrap_or(Value::from(data.trim_matches(['[', ']'])))).collect()
    }
}

/// Opens a connection and sends a request.
pub async fn send(coordinator: &Coordinator, method: &str, path: &str, content_type: &str, body: &[u8]) -> TcpStream {
    send_as(coordinator, "", method, path, content_type, body).await
}

/// The same with an API key.
pub async fn send_as(
    coordinator: &Coordinator,
    key: &str,
    method: &str,
    path: &str,
    content_type: &str,
    body: &[u8],
) -> TcpStream {
    let headers = format!("content-type: {content_type}\r\nauthorization: Bearer {key}\r\n");
    send_with(coordinator, method, path, &headers, body).await
}

/// The same with these headers, each ended by a line's end.
async fn send_with(coordinator: &Coordinator, method: &str, path: &str, headers: &str, body: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(coordinator.http).await.unwrap();
    let length = body.len();
    let head = format!("{method} {path} HTTP/1.0\r\nhost: x\r\ncontent-length: {length}\r\n{headers}\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    // A server that refuses the head does not read the body.
    let _ = stream.write_all(body).await;
    stream
}

/// Reads an answer to its end.
pub async fn receive(mut stream: TcpStream) -> Answer {
    let mut bytes = Vec::new();
    // A server that did not read all of a request resets the connection when it has answered.
    let _ = stream.read_to_end(&mut bytes).await;
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
}

/// Gets a path.
pub async fn get(coordinator: &Coordinator, path: &str) -> Answer {
    receive(send(coordinator, "GET", path, "text/plain", b"").await).await
}

/// The metrics, once they have that in them.
pub async fn shows(coordinator: &Coordinator, text: &str) -> String {
    let end = Instant::now() + PATIENCE;
    loop {
        let metrics = get(coordinator, "/metrics").await.body;
        if metrics.contains(text) {
            return metrics;
        }
        assert!(Instant::now() < end, "no {text:?} in {metrics}");
        tokio::time::sleep(POLL).await;
    }
}

/// Gets a path with these headers, each ended by a line's end.
pub async fn get_with(coordinator: &Coordinator, path: &str, headers: &str) -> Answer {
    receive(send_with(coordinator, "GET", path, headers, b"").await).await
}

/// Posts JSON.
pub async fn post(coordinator: &Coordinator, path: &str, body: &Value) -> Answer {
    receive(send(coordinator, "POST", path, "application/json", body.to_string().as_bytes()).await).await
}

/// The same with one more header.
pub async fn post_with(coordinator: &Coordinator, path: &str, header: (&str, &str), body: &Value) -> Answer {
    let headers = format!("content-type: application/json\r\n{}: {}\r\n", header.0, header.1);
    receive(send_with(coordinator, "POST", path, &headers, body.to_string().as_bytes()).await).await
}
