//! What a rank gave to sums and hand-overs during a step.
//! For: metrics and traces, through the rank's thread. Invariant: counting takes no lock, and memory only where calls
//! are asked for.

use std::time::{Duration, Instant};

use crate::WorkerError;

/// One exchange between hosts.
#[derive(Debug)]
pub struct Call {
    /// What was done.
    pub operation: &'static str,
    /// Its begin.
    pub started: Instant,
    /// How long it took.
    pub duration: Duration,
    /// Bytes of the vector.
    pub num_bytes: u64,
}

/// Bytes and times of a step.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Bytes of the vectors that hosts summed or handed over.
    pub host_bytes: u64,
    /// How long that took, waits for the others included.
    pub host_time: Duration,
    /// Bytes of the vectors that devices summed or handed over, as f32. Their time is part of the device's.
    pub device_bytes: u64,
    /// The exchanges between hosts, where they are asked for.
    pub calls: Option<Vec<Call>>,
}

impl Traffic {
    /// Runs an exchange of `values` between hosts.
    ///
    /// # Errors
    /// What `exchange` returns.
    pub(super) fn over_hosts<T>(
        &mut self,
        operation: &'static str,
        values: &mut [T],
        exchange: impl FnOnce(&mut [T]) -> Result<(), WorkerError>,
    ) -> Result<(), WorkerError> {
        let started = Instant::now();
        let exchanged = exchange(values);
        let (duration, num_bytes) = (started.elapsed(), size_of_val(values) as u64);
        self.host_time += duration;
        self.host_bytes += num_bytes;
        if let Some(calls) = &mut self.calls {
            calls.push(Call { operation, started, duration, num_bytes });
        }
        exchanged
    }

    /// Notes an exchange of `[num_tokens, width]` between devices.
    pub(super) fn over_devices(&mut self, num_tokens: usize, width: usize) {
        self.device_bytes += (num_tokens * width * size_of::<f32>()) as u64;
    }
}
