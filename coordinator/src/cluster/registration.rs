//! The Cluster service: each registration stream is one worker's lease.
//! Invariant: a worker is lost when its stream ends, or when no report came for a lease, whichever is first.

use std::time::Duration;

use axum::http::uri::Authority;
use lockstep_proto::{status::Class, v1};
use lockstep_sharding::Dtype;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use super::{MemoryRegistry, memory::Lease};

/// Longest worker id, bytes.
const MAX_ID_BYTES: usize = 128;

/// Serves registrations into a [`MemoryRegistry`].
pub struct RegistrationService {
    /// Where workers are entered.
    pub registry: MemoryRegistry,
    /// How long a worker may be silent.
    pub lease: Duration,
    /// Ends every registration when the coordinator closes.
    pub closing: CancellationToken,
}

#[tonic::async_trait]
impl v1::cluster_server::Cluster for RegistrationService {
    type RegisterStream = ReceiverStream<Result<v1::RegistrationReply, Status>>;

    async fn register(
        &self,
        request: Request<Streaming<v1::WorkerReport>>,
    ) -> Result<Response<Self::RegisterStream>, Status> {
        let mut reports = request.into_inner();
        let hello = first_report(&mut reports, self.lease).await?;
        check_hello(&hello)?;
        let worker_id = hello.worker_id.clone();
        let num_devices = hello.devices.len();
        let lease = self.registry.register(hello).ok_or_else(|| {
            Class::AlreadyExists.status(format!("worker_id {worker_id:?} is taken by a worker that is alive"))
        })?;
        tracing::info!(worker_id, num_devices, "worker registered");

        let (replies, receiver) = mpsc::channel(1);
        let lease_ms = self.lease.as_millis().try_into().unwrap_or(u32::MAX);
        // The channel is empty and has room for one: this cannot fail.
        let _ = replies.try_send(Ok(v1::RegistrationReply { lease_ms }));
        let (duration, closing) = (self.lease, self.closing.clone());
        tokio::spawn(async move {
            let (status, reason) = tokio::select! {
                lost = hold(&lease, &mut reports, duration) => lost,
                () = closing.cancelled() => {
                    (Class::ShuttingDown.status("the coordinator is shutting down"), "coordinator closing".to_owned())
                }
                () = replies.closed() => (Class::Cancelled.status("the registration was dropped"), "stream dropped".to_owned()),
            };
            tracing::info!(worker_id, reason, "registration ended");
            drop(lease);
            let _ = replies.try_send(Err(status));
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}

async fn first_report(reports: &mut Streaming<v1::WorkerReport>, wait: Duration) -> Result<v1::WorkerHello, Status> {
    let missing = || Class::InvalidRequest.status("report: the first message must be hello");
    match tokio::time::timeout(wait, reports.message()).await {
        Err(_) => Err(Class::Deadline.status(format!("no hello came within {} ms", wait.as_millis()))),
        Ok(report) => match report?.ok_or_else(missing)?.report {
            Some(v1::worker_report::Report::Hello(hello)) => Ok(hello),
            _ => Err(missing()),
        },
    }
}

/// Refuses what no planner could work with.
///
/// # Errors
/// Naming the field.
pub fn check_hello(hello: &v1::WorkerHello) -> Result<(), Status> {
    let refuse = |text: String| Err(Class::InvalidRequest.status(text));
    if hello.worker_id.is_empty() || hello.worker_id.len() > MAX_ID_BYTES {
        return refuse(format!("worker_id has {} bytes, allowed are 1 to {MAX_ID_BYTES}", hello.worker_id.len()));
    }
    let mut addresses = vec![("address", &hello.address), ("rank_address", &hello.rank_address)];
    if !hello.http_address.is_empty() {
        addresses.push(("http_address", &hello.http_address));
    }
    for (field, address) in addresses {
        let port = address.parse::<Authority>().ok().and_then(|address| address.port_u16());
        if port.is_none_or(|port| port == 0) {
            return refuse(format!("{field} is {address:?}, expected host:port"));
        }
    }
    if hello.devices.is_empty() {
        return refuse("devices is empty, at least one is needed".into());
    }
    if let Some(device) = hello.devices.iter().find(|it| !it.dtype.is_empty() && it.dtype.parse::<Dtype>().is_err()) {
        return refuse(format!("devices.dtype is {:?}, expected f16, bf16, f32 or nothing", device.dtype));
    }
    Ok(())
}

/// Renews the lease until the worker falls silent or leaves; says why.
async fn hold(lease: &Lease, reports: &mut Streaming<v1::WorkerReport>, duration: Duration) -> (Status, String) {
    loop {
        match tokio::time::timeout(duration, reports.message()).await {
            Err(_) => {
                let text = format!("no heartbeat came for {} ms", duration.as_millis());
                return (Class::Deadline.status(text.clone()), text);
            }
            Ok(Ok(Some(v1::WorkerReport { report: Some(v1::worker_report::Report::Heartbeat(heartbeat)) }))) => {
                lease.renew(heartbeat);
            }
            Ok(Ok(Some(_))) => {
                let text = "report: only heartbeats may follow the hello".to_owned();
                return (Class::InvalidRequest.status(text.clone()), text);
            }
            Ok(Ok(None)) => {
                return (Class::Cancelled.status("the worker ended its registration"), "stream ended".into());
            }
            Ok(Err(status)) => return (Class::Cancelled.status("the stream broke"), status.message().to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_nobody_can_connect_to_are_refused() {
        let hello = |address: &str| v1::WorkerHello {
            worker_id: "w".into(),
            address: address.into(),
            rank_address: "host:7071".into(),
            devices: vec![v1::WorkerDevice::default()],
            ..Default::default()
        };
        for good in ["host-1.svc:7071", "10.0.0.1:1", "[fe80::1]:7071"] {
            assert!(check_hello(&hello(good)).is_ok(), "{good}");
        }
        for bad in ["", "host", "host:0", "host:65536", "a host:7071", "fe80::1:7071", "http://host:7071"] {
            let refused = check_hello(&hello(bad)).unwrap_err();
            assert!(refused.message().contains(&format!("address is {bad:?}, expected host:port")), "{refused:?}");
        }
    }
}
