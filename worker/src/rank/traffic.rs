//! What a rank gave to sums and hand-overs during a step.
//! For: metrics, through the rank's thread. Invariant: counting takes no lock and no memory.

use std::time::{Duration, Instant};

use crate::WorkerError;

/// Bytes and times of a step.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Bytes of the vectors that hosts summed or handed over.
    pub host_bytes: u64,
    /// How long that took, waits for the others included.
    pub host_time: Duration,
    /// Bytes of the vectors that devices summed or handed over, as f32. Their time is part of the device's.
    pub device_bytes: u64,
}

impl Traffic {
    /// Runs an exchange of `values` between hosts.
    ///
    /// # Errors
    /// What `exchange` returns.
    pub(super) fn over_hosts<T>(
        &mut self,
        values: &mut [T],
        exchange: impl FnOnce(&mut [T]) -> Result<(), WorkerError>,
    ) -> Result<(), WorkerError> {
        let start = Instant::now();
        let exchanged = exchange(values);
        self.host_time += start.elapsed();
        self.host_bytes += size_of_val(values) as u64;
        exchanged
    }

    /// Notes an exchange of `[num_tokens, width]` between devices.
    pub(super) fn over_devices(&mut self, num_tokens: usize, width: usize) {
        self.device_bytes += (num_tokens * width * size_of::<f32>()) as u64;
    }
}
