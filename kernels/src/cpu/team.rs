//! The thread team: runs one closure on all threads, at the cost of an atomic exchange while a step is under way.
//! For: every CPU operation. A decode step has some 150 fork-joins, which must not cost a futex wake-up each.
//! Invariant: `run` returns after the closure has returned on every thread; each thread index runs exactly once.
//! Not here: what is run (`matmul`, `attention`, ...).

use std::{
    any::Any,
    cell::UnsafeCell,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::KernelError;

/// Spins before a waiting thread gives its core away: some 20 µs, longer than the gaps between two operations.
const SPINS_BEFORE_YIELD: u32 = 2000;

/// Work as the helpers see it; the lifetime is erased, `run` keeps it alive until all have returned.
type Work = *const (dyn Fn(usize) + Sync);

/// On a cache line of its own, so that waiting for one value does not slow the writers of another.
#[repr(align(128))]
struct Line<T>(T);

/// So many threads that work on one operation at a time: the caller (index 0) and helpers from a rayon pool.
pub struct Team {
    /// The helpers; none for one thread.
    pool: Option<ThreadPool>,
    /// True while somebody runs work: nested or concurrent calls then run inline.
    is_busy: AtomicBool,
    posted: Arc<Posted>,
}

/// What the caller and the helpers share.
struct Posted {
    num_threads: usize,
    /// True inside `stay_awake`.
    is_awake: AtomicBool,
    /// Helpers that are awake, or on their way.
    num_helpers: AtomicUsize,
    /// The next thread index of the posted work that nobody runs yet; `num_threads` or more: none.
    next_index: Line<AtomicUsize>,
    /// Thread indices of the posted work that have not returned, but for index 0.
    num_running: Line<AtomicUsize>,
    work: UnsafeCell<Option<Work>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `work` is written only by the thread that holds `is_busy` and while `num_running` is 0, and read by helpers
// only between claiming an index, which acquires it, and their decrement of `num_running`.
unsafe impl Sync for Posted {}
// SAFETY: the pointer in `work` is None or points at a closure that is `Sync` and alive while indices can be claimed.
unsafe impl Send for Posted {}

impl Team {
    /// Starts a team of so many threads (0: one for each core).
    ///
    /// # Errors
    /// [`KernelError::Device`] if a thread cannot be started.
    pub fn new(num_threads: usize) -> Result<Self, KernelError> {
        let num_threads = match num_threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            given => given,
        };
        let failed = |error: rayon::ThreadPoolBuildError| KernelError::Device {
            device: "cpu".to_owned(),
            what: format!("cannot start {num_threads} threads: {error}"),
        };
        let pool = match num_threads {
            1 => None,
            _ => Some(
                ThreadPoolBuilder::new()
                    .num_threads(num_threads - 1)
                    .thread_name(|index| format!("lockstep-cpu-{}", index + 1))
                    .build()
                    .map_err(failed)?,
            ),
        };
        let posted = Posted {
            num_threads,
            is_awake: AtomicBool::new(false),
            num_helpers: AtomicUsize::new(0),
            next_index: Line(AtomicUsize::new(num_threads)),
            num_running: Line(AtomicUsize::new(0)),
            work: UnsafeCell::new(None),
            panic: Mutex::new(None),
        };
        Ok(Self { pool, is_busy: AtomicBool::new(false), posted: Arc::new(posted) })
    }

    /// Threads, the caller included.
    pub fn num_threads(&self) -> usize {
        self.posted.num_threads
    }

    /// Runs `work(thread_index)` for every index below `num_threads`, side by side, and waits for all. An index that no
    /// helper has taken up when the caller is done with its own is run by the caller: a helper that the system has
    /// put aside holds nobody up. So one index must not wait for another.
    /// A call from inside another one, or beside one on another thread, runs all indices on the calling thread.
    ///
    /// # Panics
    /// If `work` panics on any thread.
    pub fn run(&self, work: &(dyn Fn(usize) + Sync)) {
        let Some(pool) = &self.pool else { return work(0) };
        if self.is_busy.swap(true, Ordering::Acquire) {
            return (0..self.num_threads()).for_each(work);
        }
        let _busy = Reset(&self.is_busy);
        if self.posted.is_awake.load(Ordering::Acquire) {
            return self.posted.run(work);
        }
        pool.in_place_scope(|scope| {
            (1..self.num_threads()).for_each(|index| scope.spawn(move |_| work(index)));
            work(0);
        });
    }

    /// Runs `work(range)` for consecutive ranges of at most `chunk` items that cover `0..len`, each on whichever
    /// thread is free.
    pub fn for_chunks(&self, len: usize, chunk: usize, work: &(dyn Fn(Range<usize>) + Sync)) {
        let chunk = chunk.max(1);
        if self.num_threads() == 1 || len <= chunk {
            return (0..len).step_by(chunk).for_each(|start| work(start..len.min(start + chunk)));
        }
        let next = Line(AtomicUsize::new(0));
        self.run(&|_| {
            loop {
                let start = next.0.fetch_add(chunk, Ordering::Relaxed);
                if start >= len {
                    break;
                }
                work(start..len.min(start + chunk));
            }
        });
    }

    /// Like [`for_chunks`](Self::for_chunks) over the rows of `data` (`[len / width, width]`):
    /// `work(first_row, rows)` gets whole rows, at most `chunk` of them, as a slice of its own.
    pub fn for_rows<T: Send>(
        &self,
        data: &mut [T],
        width: usize,
        chunk: usize,
        work: &(dyn Fn(usize, &mut [T]) + Sync),
    ) {
        let shared = SharedSlice::new(data);
        self.for_chunks(shared.len() / width.max(1), chunk, &|rows| {
            // SAFETY: the chunks of `for_chunks` do not overlap.
            let part = unsafe { shared.range_mut(rows.start * width..rows.end * width) };
            work(rows.start, part);
        });
    }

    /// The share of `thread_index` when `0..len` is cut evenly into consecutive ranges, one for each thread.
    pub fn share(&self, thread_index: usize, len: usize) -> Range<usize> {
        let bound = |index: usize| len * index / self.num_threads();
        bound(thread_index)..bound(thread_index + 1)
    }

    /// Keeps the helpers awake, waiting for work by spinning, while `body` runs on the calling thread.
    /// Nobody waits for a helper to wake up or to go back to sleep.
    pub fn stay_awake<R>(&self, body: impl FnOnce() -> R) -> R {
        let Some(pool) = &self.pool else { return body() };
        if self.posted.is_awake.swap(true, Ordering::AcqRel) {
            return body();
        }
        let _awake = Reset(&self.posted.is_awake);
        for _ in self.posted.num_helpers.load(Ordering::Acquire)..self.num_threads() - 1 {
            self.posted.num_helpers.fetch_add(1, Ordering::AcqRel);
            let posted = Arc::clone(&self.posted);
            pool.spawn(move || posted.help());
        }
        body()
    }
}

impl Posted {
    /// [`Team::run`] while the helpers are awake. The caller holds `is_busy`.
    fn run(&self, work: &(dyn Fn(usize) + Sync)) {
        self.post(work);
        let own = catch_unwind(AssertUnwindSafe(|| {
            work(0);
            while let Some(index) = self.claim() {
                let _finish = Finish(&self.num_running.0);
                work(index);
            }
        }));
        while self.claim().is_some() {
            drop(Finish(&self.num_running.0));
        }
        wait_while(|| self.num_running.0.load(Ordering::Acquire) != 0);
        let others = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(payload) = own.err().or(others) {
            resume_unwind(payload);
        }
    }

    fn post(&self, work: &(dyn Fn(usize) + Sync)) {
        // SAFETY: only the lifetime changes; `run` returns after every helper has finished with the closure.
        let work = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(work) };
        // SAFETY: the caller holds `is_busy` and no helper is running, so nobody else reads or writes the cell.
        unsafe { *self.work.get() = Some(std::ptr::from_ref(work)) };
        self.num_running.0.store(self.num_threads - 1, Ordering::Relaxed);
        self.next_index.0.store(1, Ordering::Release);
    }

    /// Takes up an index of the posted work that nobody runs yet.
    fn claim(&self) -> Option<usize> {
        let next = &self.next_index.0;
        let take = |index| (index < self.num_threads).then_some(index + 1);
        next.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).ok()
    }

    /// Runs what is posted until the team may sleep.
    fn help(&self) {
        loop {
            wait_while(|| {
                self.next_index.0.load(Ordering::Relaxed) >= self.num_threads && self.is_awake.load(Ordering::Relaxed)
            });
            let Some(index) = self.claim() else {
                if self.is_awake.load(Ordering::Acquire) {
                    continue;
                }
                self.num_helpers.fetch_sub(1, Ordering::AcqRel);
                return;
            };
            let _finish = Finish(&self.num_running.0);
            // SAFETY: written before the index that was just claimed, not again before this helper has finished.
            let Some(work) = (unsafe { *self.work.get() }) else { continue };
            // SAFETY: `run` keeps the closure alive until `num_running` is 0.
            let work = unsafe { &*work };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| work(index))) {
                *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
            }
        }
    }
}

fn wait_while(condition: impl Fn() -> bool) {
    let mut spins = 0;
    while condition() {
        if spins < SPINS_BEFORE_YIELD {
            spins += 1;
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}

/// Counts one index as returned on drop.
struct Finish<'a>(&'a AtomicUsize);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// Sets the flag to false on drop, so that a panic leaves the team usable.
struct Reset<'a>(&'a AtomicBool);

impl Drop for Reset<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// A slice whose disjoint parts are written by several threads.
pub struct SharedSlice<'a, T> {
    start: *mut T,
    len: usize,
    borrow: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: it is a `&mut [T]` whose parts are handed to threads; who calls `range_mut` keeps the parts apart.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}
// SAFETY: as a `&mut [T]`.
unsafe impl<T: Send> Send for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    /// Takes the slice over for sharing.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), borrow: std::marker::PhantomData }
    }

    /// Elements of the slice.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// First element, for writes that are no ranges; the same rule holds for them as for [`range_mut`](Self::range_mut).
    pub fn as_mut_ptr(&self) -> *mut T {
        self.start
    }

    /// One part. A range past the end is a bug of the caller and is cut off.
    ///
    /// # Safety
    /// No two ranges that are in use at the same time may overlap.
    #[allow(clippy::mut_from_ref, reason = "that is its purpose; the caller keeps the parts apart")]
    pub unsafe fn range_mut(&self, range: Range<usize>) -> &mut [T] {
        debug_assert!(range.start <= range.end && range.end <= self.len);
        let end = range.end.min(self.len);
        let start = range.start.min(end);
        // SAFETY: inside the slice; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), end - start) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_runs_once_awake_or_not_and_after_a_panic() {
        for num_threads in [1, 2, 3, 7] {
            let team = Team::new(num_threads).unwrap();
            let counts: Vec<AtomicUsize> = (0..num_threads).map(|_| AtomicUsize::new(0)).collect();
            let count = |index: usize| {
                counts[index].fetch_add(1, Ordering::Relaxed);
            };
            team.run(&count);
            for _ in 0..2 {
                team.stay_awake(|| (0..100).for_each(|_| team.run(&count)));
            }
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                team.stay_awake(|| team.run(&|index| assert!(index + 1 != num_threads, "on purpose")));
            }));
            assert!(panicked.is_err());
            team.stay_awake(|| team.run(&|_| team.for_chunks(1, 1, &|_| ())));
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 201));
        }
    }

    #[test]
    fn chunks_and_rows_cover_everything_once() {
        let team = Team::new(3).unwrap();
        for (rows, chunk) in [(0, 1), (1, 4), (17, 4), (64, 1), (5, 100)] {
            let mut data = vec![0_u32; rows * 3];
            team.stay_awake(|| {
                team.for_rows(&mut data, 3, chunk, &|first_row, part| {
                    assert!(part.len() <= chunk * 3);
                    for (offset, value) in part.iter_mut().enumerate() {
                        *value += (first_row * 3 + offset) as u32;
                    }
                });
            });
            assert!(data.iter().enumerate().all(|(index, value)| *value == index as u32));
            assert_eq!((0..3).map(|index| team.share(index, rows).len()).sum::<usize>(), rows);
        }
    }
}
