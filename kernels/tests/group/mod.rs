//! Groups of ranks on the GPUs of this machine, a thread each, for tests and benchmarks of what they do together.

use std::{
    convert::Infallible,
    sync::{
        Arc, Barrier, Mutex, Weak,
        mpsc::{RecvTimeoutError, channel},
    },
    thread,
    time::Duration,
};

use lockstep_kernels::cuda::{Gpu, KernelCache, OneShot};

/// After this a group that hangs is aborted, so that its test fails.
const TIME_LIMIT: Duration = Duration::from_secs(90);

/// Where the threads of a group exchange bytes.
pub struct Meeting {
    barrier: Barrier,
    messages: Mutex<Vec<Vec<u8>>>,
}

impl Meeting {
    pub fn new(world_size: usize) -> Self {
        Self { barrier: Barrier::new(world_size), messages: Mutex::new(vec![Vec::new(); world_size]) }
    }

    /// Waits for all ranks.
    pub fn wait(&self) {
        self.barrier.wait();
    }

    /// Gives `message` to all ranks and takes theirs.
    pub fn exchange(&self, rank: usize, message: &[u8]) -> Vec<Vec<u8>> {
        self.messages.lock().unwrap()[rank] = message.to_vec();
        self.wait();
        let messages = self.messages.lock().unwrap().clone();
        self.wait();
        messages
    }
}

/// One rank of a group of threads.
pub struct Member<'a> {
    pub gpu: Arc<Gpu>,
    pub ranks: Arc<OneShot>,
    pub rank: usize,
    pub meeting: &'a Meeting,
}

impl Member<'_> {
    /// Prints a line once for all ranks.
    #[allow(dead_code, reason = "benchmarks print")]
    pub fn print(&self, line: &str) {
        if self.rank == 0 {
            println!("{line}");
        }
    }
}

/// What `body` returns on each rank of a group on the first GPUs.
pub fn run<T: Send>(world_size: usize, body: impl Fn(Member<'_>) -> T + Sync) -> Vec<T> {
    let meeting = Meeting::new(world_size);
    let groups: Mutex<Vec<Weak<OneShot>>> = Mutex::default();
    let (done, all_done) = channel::<Infallible>();
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..world_size)
            .map(|rank| {
                let (meeting, groups, body, done) = (&meeting, &groups, &body, done.clone());
                scope.spawn(move || {
                    let _done = done;
                    let gpu = Gpu::open(rank, KernelCache::default()).unwrap();
                    let mut exchange = |message: &[u8]| Ok::<_, Infallible>(meeting.exchange(rank, message));
                    let ranks = OneShot::join(&gpu, rank, world_size, &mut exchange).unwrap();
                    assert!(ranks.is_some(), "these GPUs have no access to each other");
                    let ranks = Arc::new(ranks.unwrap());
                    groups.lock().unwrap().push(Arc::downgrade(&ranks));
                    body(Member { gpu, ranks, rank, meeting })
                })
            })
            .collect();
        drop(done);
        if all_done.recv_timeout(TIME_LIMIT) == Err(RecvTimeoutError::Timeout) {
            println!("a group of {world_size} hangs");
            groups.lock().unwrap().iter().filter_map(Weak::upgrade).for_each(|ranks| ranks.abort());
        }
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}
