//! Groups of ranks on the GPUs of this machine, a thread each, for tests and benchmarks of what they do together.

mod meeting;

use std::{
    convert::Infallible,
    sync::{
        Arc, Mutex, Weak,
        mpsc::{RecvTimeoutError, channel},
    },
    thread,
    time::Duration,
};

use lockstep_kernels::cuda::{Gpu, KernelCache, OneShot};

pub use meeting::Meeting;

/// After this a group that hangs is aborted, so that its test fails.
const TIME_LIMIT: Duration = Duration::from_secs(90);

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
