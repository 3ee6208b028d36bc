//! `lockstep drain`: take a worker out of service, and wait until nothing is left on it. Its process is not ended.

use std::time::Duration;

use lockstep_proto::v1::DrainWorkerRequest;

use super::status::num_parts;
use crate::{
    client::{ServerArgs, refused},
    output::print,
};

/// Between two looks at the worker.
const POLL: Duration = Duration::from_millis(200);

/// Take a worker out of service: others take its place where there are any, running requests finish or move to them.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Relieve a worker and wait until it holds nothing:
  lockstep drain worker-1
Only give the order, and look later; the worker is `drained: holds nothing` once that is so:
  lockstep drain worker-1 --no-wait
  lockstep status
The process goes on running, and `lockstep status` goes on showing it, until it is stopped: SIGTERM then ends it at once.
A restart undoes the drain, nothing else does.")]
pub struct Args {
    #[command(flatten)]
    server: ServerArgs,
    /// Id of the worker, as `lockstep status` shows it
    worker: String,
    /// Return at once
    #[arg(long)]
    no_wait: bool,
}

/// Drains a worker.
///
/// # Errors
/// If the coordinator cannot be reached or does not know the worker.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let mut admin = args.server.admin().await?;
    let request = DrainWorkerRequest { worker_id: args.worker.clone() };
    admin.client.drain_worker(request).await.map_err(|status| refused(&admin.address, &status))?;
    if args.no_wait {
        return print(&format!("{}: draining\n", args.worker));
    }
    let mut last = None;
    loop {
        let cluster = args.server.cluster(&mut admin).await?;
        let Some(worker) = cluster.workers.iter().find(|worker| worker.worker_id == args.worker) else { break };
        let left = (num_parts(&cluster, &worker.worker_id), worker.num_requests);
        if left == (0, 0) && worker.draining {
            break;
        }
        if last.replace(left) != Some(left) {
            let (num_parts, num_requests) = left;
            print(&format!("{}: {num_parts} replica parts, {num_requests} requests left\n", args.worker))?;
        }
        tokio::time::sleep(POLL).await;
    }
    print(&format!("{}: drained, it can be stopped\n", args.worker))
}
