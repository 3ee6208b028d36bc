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
        Mutex, PoisonError,
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
    num_threads: usize,
    /// The helpers; none for one thread.
    pool: Option<ThreadPool>,
    /// True while somebody runs work: nested or concurrent calls then run inline.
    is_busy: AtomicBool,
    /// True inside `stay_awake`.
    is_awake: AtomicBool,
    is_closing: AtomicBool,
    /// Counts up with each piece of work that is posted to awake helpers.
    epoch: Line<AtomicUsize>,
    /// Helpers that have not yet finished the posted work.
    num_running: Line<AtomicUsize>,
    work: UnsafeCell<Option<Work>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `work` is written only by the thread that holds `is_busy` and while `num_running` is 0, and read by helpers
// only between the release of a new `epoch` and their decrement of `num_running`.
unsafe impl Sync for Team {}
// SAFETY: the pointer in `work` is None or points at a closure that is `Sync` and alive, on whichever thread.
unsafe impl Send for Team {}

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
        Ok(Self {
            num_threads,
            pool,
            is_busy: AtomicBool::new(false),
            is_awake: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
            epoch: Line(AtomicUsize::new(0)),
            num_running: Line(AtomicUsize::new(0)),
            work: UnsafeCell::new(None),
            panic: Mutex::new(None),
        })
    }

    /// Threads, the caller included.
    pub fn num_threads(&self) -> usize {
        self.num_threads
    }

    /// Runs `work(thread_index)` for every index below `num_threads`, side by side, and waits for all.
    /// A call from inside another one, or beside one on another thread, runs all indices on the calling thread.
    ///
    /// # Panics
    /// If `work` panics on any thread.
    pub fn run(&self, work: &(dyn Fn(usize) + Sync)) {
        let Some(pool) = &self.pool else { return work(0) };
        if self.is_busy.swap(true, Ordering::Acquire) {
            return (0..self.num_threads).for_each(work);
        }
        let _busy = Reset(&self.is_busy);
        if !self.is_awake.load(Ordering::Acquire) {
            return pool.in_place_scope(|scope| {
                (1..self.num_threads).for_each(|index| scope.spawn(move |_| work(index)));
                work(0);
            });
        }
        self.post(work);
        let own = catch_unwind(AssertUnwindSafe(|| work(0)));
        wait_while(|| self.num_running.0.load(Ordering::Acquire) != 0);
        let others = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(payload) = own.err().or(others) {
            resume_unwind(payload);
        }
    }

    /// Runs `work(range)` for consecutive ranges of at most `chunk` items that cover `0..len`, each on whichever
    /// thread is free.
    pub fn for_chunks(&self, len: usize, chunk: usize, work: &(dyn Fn(Range<usize>) + Sync)) {
        let chunk = chunk.max(1);
        if self.num_threads == 1 || len <= chunk {
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
        let bound = |index: usize| len * index / self.num_threads;
        bound(thread_index)..bound(thread_index + 1)
    }

    /// Keeps the helpers awake, waiting for work by spinning, while `body` runs on the calling thread.
    pub fn stay_awake<R>(&self, body: impl FnOnce() -> R) -> R {
        let Some(pool) = &self.pool else { return body() };
        if self.is_busy.load(Ordering::Acquire) || self.is_awake.swap(true, Ordering::AcqRel) {
            return body();
        }
        self.is_closing.store(false, Ordering::Relaxed);
        let first_epoch = self.epoch.0.load(Ordering::Relaxed);
        pool.in_place_scope(|scope| {
            (1..self.num_threads).for_each(|index| scope.spawn(move |_| self.help(index, first_epoch)));
            let _closing = Close(self);
            body()
        })
    }

    fn post(&self, work: &(dyn Fn(usize) + Sync)) {
        // SAFETY: only the lifetime changes; `run` returns after every helper has finished with the closure.
        let work = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(work) };
        // SAFETY: the caller holds `is_busy` and no helper is running, so nobody else reads or writes the cell.
        unsafe { *self.work.get() = Some(std::ptr::from_ref(work)) };
        self.num_running.0.store(self.num_threads - 1, Ordering::Relaxed);
        self.epoch.0.fetch_add(1, Ordering::Release);
    }

    fn help(&self, index: usize, mut seen: usize) {
        loop {
            wait_while(|| self.epoch.0.load(Ordering::Acquire) == seen);
            seen = seen.wrapping_add(1);
            if self.is_closing.load(Ordering::Acquire) {
                return;
            }
            // SAFETY: written before the epoch that was just acquired, not again before this helper has finished.
            let Some(work) = (unsafe { *self.work.get() }) else { continue };
            // SAFETY: `run` keeps the closure alive until `num_running` is 0.
            let work = unsafe { &*work };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| work(index))) {
                *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
            }
            self.num_running.0.fetch_sub(1, Ordering::Release);
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

/// Sets the flag to false on drop, so that a panic leaves the team usable.
struct Reset<'a>(&'a AtomicBool);

impl Drop for Reset<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Sends the helpers home on drop.
struct Close<'a>(&'a Team);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        self.0.is_closing.store(true, Ordering::Release);
        self.0.is_awake.store(false, Ordering::Release);
        self.0.epoch.0.fetch_add(1, Ordering::Release);
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
