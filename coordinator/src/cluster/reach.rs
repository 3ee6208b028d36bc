//! How a worker is reached.
//! For: the planner, which orders workers and hands them requests, and whoever follows their heartbeats.

use std::time::Duration;

use lockstep_proto::{MAX_MESSAGE_BYTES, v1::worker_client::WorkerClient};
use lockstep_transport::{Connector, Outbound};
use tonic::transport::Channel;

/// Opening a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Bytes that a worker may send on one stream ahead of its reader, and on all of them together: so much more that readers
/// who are slow hold up their own streams alone.
const STREAM_WINDOW_BYTES: u32 = 64 << 10;
/// See `STREAM_WINDOW_BYTES`; the largest that HTTP/2 knows.
const CONNECTION_WINDOW_BYTES: u32 = i32::MAX as u32;

/// A client of the worker at `address` (`host:port`); connects when it is first used.
///
/// # Errors
/// What is wrong with the address, in words.
pub fn worker_client(address: &str, outbound: &Outbound) -> Result<WorkerClient<Channel>, String> {
    let (endpoint, connector) =
        Connector::new(address, outbound.clone()).map_err(|error| format!("of the worker: {error}"))?;
    let endpoint = endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES);
    Ok(WorkerClient::new(endpoint.connect_with_connector_lazy(connector))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES))
}
