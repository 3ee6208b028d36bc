//! Calls whose message does not come.
//! Invariant: a call of one message is read to its end within [`MESSAGE_TIMEOUT`], or ends with DEADLINE_EXCEEDED; so nobody holds
//! streams open by saying nothing.

use std::time::Duration;

use axum::{
    BoxError,
    body::{Body, BodyDataStream, Bytes},
};
use futures::{StreamExt, stream};
use lockstep_proto::status::Class;
use tokio::time::{Instant, timeout_at};

/// Longest that a client may take to send the message of a call.
pub const MESSAGE_TIMEOUT: Duration = Duration::from_secs(60);

/// A body that fails unless all of it has come after `limit`.
pub fn in_time(body: Body, limit: Duration) -> Body {
    let deadline = Instant::now() + limit;
    let next = move |chunks: Option<BodyDataStream>| async move {
        let mut chunks = chunks?;
        let chunk: Result<Bytes, BoxError> = match timeout_at(deadline, chunks.next()).await {
            Ok(chunk) => chunk?.map_err(BoxError::from),
            Err(_) => {
                let late = format!("the message of the call did not come within {} s", limit.as_secs_f64());
                Err(Class::Deadline.status(late).into())
            }
        };
        let rest = chunk.is_ok().then_some(chunks);
        Some((chunk, rest))
    };
    Body::from_stream(stream::unfold(Some(body.into_data_stream()), next))
}

#[cfg(test)]
mod tests {
    use tonic::{Code, Status};

    use super::*;

    #[tokio::test]
    async fn what_does_not_come_ends_the_call() {
        let whole = in_time(Body::from("message"), Duration::from_secs(5));
        assert_eq!(axum::body::to_bytes(whole, 100).await.unwrap(), "message");
        let first = stream::iter([Ok::<_, BoxError>(Bytes::from("mess"))]);
        let halting = Body::from_stream(first.chain(stream::pending()));
        let error = axum::body::to_bytes(in_time(halting, Duration::from_millis(50)), 100).await.unwrap_err();
        let status = Status::from_error(error.into());
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
        assert!(status.message().contains("within 0.05 s"), "{status:?}");
    }
}
