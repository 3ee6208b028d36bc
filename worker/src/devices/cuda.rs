//! The NVIDIA GPUs of this machine: which of them work, and the contexts that stay open until ranks own them.
//! For: choosing devices. Invariant: what does not work is said with its reason, never passed over.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use lockstep_kernels::{
    KernelError,
    cuda::{
        Gpu, KernelCache,
        probe::{Library, num_devices},
    },
    device::DeviceInfo,
};

use crate::WorkerError;

/// What trying the GPUs came to.
pub(super) struct Found {
    /// Those that can be used.
    pub ordinals: Vec<usize>,
    /// Why others cannot, and what those that can must do without.
    pub remarks: Vec<String>,
}

/// GPUs that were found to work, kept open: to open one takes a third of a second.
#[derive(Clone, Default)]
pub(super) struct OpenGpus(Arc<Mutex<BTreeMap<usize, Arc<Gpu>>>>);

impl std::fmt::Debug for OpenGpus {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_set().entries(self.lock().keys()).finish()
    }
}

impl OpenGpus {
    /// Refuses GPUs that the driver does not show.
    pub fn expect(ordinals: &[usize]) -> Result<(), WorkerError> {
        let num_devices = num_devices()?;
        match ordinals.iter().find(|ordinal| **ordinal >= num_devices) {
            Some(missing) => {
                let problem = format!("cuda:{missing} is asked for, GPUs that the driver shows: {num_devices}");
                Err(WorkerError::Config { field: "device", problem })
            }
            None => Ok(()),
        }
    }

    /// Tries all GPUs, side by side.
    ///
    /// # Errors
    /// [`KernelError`] if there is none, or none that works.
    pub fn find(&self, cache: &KernelCache) -> Result<Found, KernelError> {
        let opened =
            side_by_side(0..num_devices()?, |ordinal| self.gpu(ordinal, cache)?.expect_memory().map(|()| ordinal));
        let mut found = Found { ordinals: Vec::new(), remarks: Vec::new() };
        let mut problems = Vec::new();
        for gpu in opened {
            match gpu {
                Ok(ordinal) => found.ordinals.push(ordinal),
                Err(problem) => problems.push(problem),
            }
        }
        found.remarks = problems.iter().map(|problem| format!("not used: {problem}")).collect();
        if !Library::CublasLt.is_present() {
            found.remarks.push(format!("{} is not found: prompts are slower", Library::CublasLt.name()));
        }
        match problems.pop() {
            Some(problem) if found.ordinals.is_empty() => Err(problem),
            _ => Ok(found),
        }
    }

    /// What GPUs are and sustain, measured side by side.
    ///
    /// # Errors
    /// [`KernelError`] if one cannot be opened or has no memory left.
    pub fn measure(&self, ordinals: &[usize], cache: &KernelCache) -> Result<Vec<DeviceInfo>, KernelError> {
        let measure = |ordinal| self.gpu(ordinal, cache)?.measure();
        side_by_side(ordinals.iter().copied(), measure).into_iter().collect()
    }

    /// The GPU, open and kept so.
    fn gpu(&self, ordinal: usize, cache: &KernelCache) -> Result<Arc<Gpu>, KernelError> {
        let known = self.lock().get(&ordinal).cloned();
        match known {
            Some(gpu) => Ok(gpu),
            None => {
                let gpu = Gpu::open(ordinal, cache.clone())?;
                self.lock().insert(ordinal, Arc::clone(&gpu));
                Ok(gpu)
            }
        }
    }

    /// From now on a GPU is open only while ranks own it: a failure that spoils its context ends with them.
    pub fn release(&self, ordinal: usize) {
        self.lock().remove(&ordinal);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Arc<Gpu>>> {
        // The map is whole at any time.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether this machine seems to have GPUs: it has the driver.
pub(super) fn is_expected() -> bool {
    Library::Driver.is_present()
}

/// The GPUs for at least so many ranks, or none, and why.
pub(super) fn choose(found: Result<Found, KernelError>, num_ranks: usize) -> (Option<Vec<usize>>, String) {
    let Found { ordinals, remarks } = match found {
        Ok(found) => found,
        Err(problem) => return (None, format!("no GPU is used: {problem}")),
    };
    let is_enough = ordinals.len() >= num_ranks;
    let mut reasons = vec![if is_enough {
        "CUDA works here".to_owned()
    } else {
        format!("no GPU is used: {num_ranks} are needed, {} can be used", ordinals.len())
    }];
    reasons.extend(remarks);
    (is_enough.then_some(ordinals), reasons.join("; "))
}

/// What `work` makes of each ordinal, a thread each.
fn side_by_side<T: Send>(ordinals: impl Iterator<Item = usize>, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = ordinals.map(|ordinal| scope.spawn(move || work(ordinal))).collect();
        let ended = threads.into_iter().map(std::thread::ScopedJoinHandle::join);
        ended.map(|ended| ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_says_what_was_not_used_and_why() {
        let found = |remarks: &[&str]| {
            let remarks = remarks.iter().map(|remark| (*remark).to_owned()).collect();
            Ok(Found { ordinals: vec![0, 2], remarks })
        };
        assert_eq!(choose(found(&[]), 2), (Some(vec![0, 2]), "CUDA works here".to_owned()));
        let (ordinals, reason) = choose(found(&["not used: cuda:1: it is too old"]), 1);
        assert_eq!((ordinals, reason.as_str()), (Some(vec![0, 2]), "CUDA works here; not used: cuda:1: it is too old"));
        let (ordinals, reason) = choose(found(&["not used: cuda:1: it is too old"]), 3);
        assert!(
            ordinals.is_none() && reason.starts_with("no GPU is used: 3 are needed, 2 can be used; not used: cuda:1")
        );
        let what = "300 MiB of 143771 MiB are free".to_owned();
        let (ordinals, reason) = choose(Err(KernelError::Device { device: "cuda:0".to_owned(), what }), 1);
        assert!(ordinals.is_none() && reason.contains("cuda:0") && reason.contains("300 MiB of"), "{reason}");
    }

    #[test]
    fn results_keep_the_order_of_the_ordinals() {
        assert_eq!(side_by_side([3, 1, 2].into_iter(), |ordinal| ordinal * 2), [6, 2, 4]);
    }
}
