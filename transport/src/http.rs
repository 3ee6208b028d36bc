//! HTTP/1 connections, served within limits.
//! For: coordinators and workers. Invariants: a connection that sends no whole head of a request in time is closed, so is one that sends
//! too many headers or too large a head; when the process closes, what is being answered is answered first.
//! Not here: bodies, and how many connections there are ([`accept`](crate::accept)).

use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::{Connection, Incoming};

/// Bounds of a connection.
#[derive(Clone, Copy, Debug)]
pub struct HttpLimits {
    /// Longest time to the end of a request's head; also the longest that a connection may be idle.
    pub head_timeout: Duration,
    /// Most headers of a request.
    pub max_headers: usize,
    /// Largest head of a request, bytes.
    pub max_head_bytes: usize,
}

impl HttpLimits {
    /// For clients of an API.
    pub const DEFAULT: Self =
        Self { head_timeout: Duration::from_secs(60), max_headers: 100, max_head_bytes: 64 << 10 };
}

/// Serves connections until `closing` fires.
pub async fn serve(mut incoming: Incoming, routes: axum::Router, limits: HttpLimits, closing: CancellationToken) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = closing.cancelled() => break,
            connection = incoming.next() => {
                connections.spawn(serve_one(connection, routes.clone(), limits, closing.clone()));
            }
            Some(_) = connections.join_next() => {}
        }
    }
    drop(incoming);
    while connections.join_next().await.is_some() {}
}

async fn serve_one(connection: Connection, routes: axum::Router, limits: HttpLimits, closing: CancellationToken) {
    let address = connection.peer.address;
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_headers(limits.max_headers)
        .max_buf_size(limits.max_head_bytes)
        .serve_connection(TokioIo::new(connection), TowerToHyperService::new(routes));
    let mut serving = std::pin::pin!(serving);
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = closing.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%address, %error, "a connection ended early");
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{TcpListener, TcpStream},
        time::Instant,
    };

    use super::*;
    use crate::Gate;

    async fn server() -> (SocketAddr, tokio_util::sync::DropGuard) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let limits = HttpLimits { head_timeout: Duration::from_millis(300), max_headers: 10, max_head_bytes: 16 << 10 };
        let closing = CancellationToken::new();
        let routes = axum::Router::new().route("/", axum::routing::get(|| async { "hello" }));
        tokio::spawn(serve(Incoming::new(listener, Gate::Http(None)), routes, limits, closing.clone()));
        (address, closing.drop_guard())
    }

    /// What comes back for these bytes, until the server closes.
    async fn answer(address: SocketAddr, bytes: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        let mut read = Vec::new();
        // A reset is an end too.
        let _ =
            tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut read)).await.expect("it stays open");
        String::from_utf8(read).unwrap()
    }

    #[tokio::test]
    async fn heads_are_bounded_in_number_size_and_time() {
        let (address, _closing) = server().await;
        let head = |rest: &str| format!("GET / HTTP/1.1\r\nhost: x\r\n{rest}");
        let begin = Instant::now();
        // Served, and then closed for being idle.
        assert!(answer(address, head("\r\n").as_bytes()).await.ends_with("hello"));
        // A head without an end.
        assert!(!answer(address, head("").as_bytes()).await.contains("200"));
        assert!(begin.elapsed() >= Duration::from_millis(500));
        let many: String = (0..10).map(|index| format!("x-{index}: y\r\n")).collect();
        assert!(answer(address, head(&format!("{many}\r\n")).as_bytes()).await.starts_with("HTTP/1.1 431"));
        let large = format!("x: {}\r\n\r\n", "y".repeat(32 << 10));
        assert!(answer(address, head(&large).as_bytes()).await.starts_with("HTTP/1.1 431"));
    }
}
