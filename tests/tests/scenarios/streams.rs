//! Many streams at once, one request after the other on each, all compared with what came undisturbed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockstep_proto::v1::GenerateRequest;
use lockstep_tests::{
    Client, Output,
    client::{check_undisturbed, generate_at_any},
};
use tokio::task::JoinHandle;

/// Running streams.
pub struct Streams {
    common: Arc<Common>,
    running: Vec<JoinHandle<()>>,
}

struct Common {
    /// One for each coordinator.
    clients: Vec<Client>,
    requests: Vec<GenerateRequest>,
    undisturbed: Vec<Output>,
    is_over: AtomicBool,
    num_complete: AtomicUsize,
    num_refused: AtomicUsize,
}

impl Streams {
    /// Asks once undisturbed, then starts so many streams, the first of them at the first coordinator.
    pub async fn start(clients: &[Client], requests: Vec<GenerateRequest>, count: usize) -> Self {
        let mut undisturbed = Vec::new();
        for request in &requests {
            undisturbed.push(clients[0].generate(request.clone()).await.unwrap());
        }
        let common = Arc::new(Common {
            clients: clients.to_vec(),
            requests,
            undisturbed,
            is_over: AtomicBool::new(false),
            num_complete: AtomicUsize::new(0),
            num_refused: AtomicUsize::new(0),
        });
        let run = |stream| {
            let common = Arc::clone(&common);
            tokio::spawn(async move { common.run(stream).await })
        };
        Self { running: (0..count).map(run).collect(), common }
    }

    /// Lets every stream end its request; returns the number of all that ended, each as undisturbed, and how often one was
    /// sent to another coordinator, or once more to the same.
    pub async fn end(self, log: impl Fn() -> String) -> (usize, usize) {
        self.common.is_over.store(true, Ordering::Relaxed);
        for stream in self.running {
            stream.await.unwrap_or_else(|error| panic!("{error:?}\n{}", log()));
        }
        (self.common.num_complete.load(Ordering::Relaxed), self.common.num_refused.load(Ordering::Relaxed))
    }

    /// Until so many requests have ended since now.
    pub async fn progress(&self, count: usize) {
        let end = self.common.num_complete.load(Ordering::Relaxed) + count;
        while self.common.num_complete.load(Ordering::Relaxed) < end {
            assert!(!self.running.iter().any(JoinHandle::is_finished), "a stream failed");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Common {
    async fn run(&self, stream: usize) {
        let mut clients = self.clients.clone();
        let num_clients = clients.len();
        clients.rotate_left(stream % num_clients);
        for (round, index) in (0..self.requests.len()).cycle().skip(stream).enumerate() {
            let request = GenerateRequest { request_id: format!("{stream}-{round}"), ..self.requests[index].clone() };
            let (output, num_refused) = generate_at_any(&clients, &request).await.unwrap();
            check_undisturbed(&self.undisturbed[index], &output)
                .unwrap_or_else(|error| panic!("request {index}: {error}"));
            self.num_complete.fetch_add(1, Ordering::Relaxed);
            self.num_refused.fetch_add(num_refused, Ordering::Relaxed);
            if self.is_over.load(Ordering::Relaxed) {
                return;
            }
        }
    }
}
