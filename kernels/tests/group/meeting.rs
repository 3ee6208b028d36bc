//! Where the threads of a group exchange bytes and wait for each other.

use std::{
    sync::{Barrier, Condvar, Mutex},
    time::Duration,
};

/// Longest wait for the others' bytes: a rank that failed must not let the others hang.
const PATIENCE: Duration = Duration::from_secs(60);

/// Shared by the threads of a group.
pub struct Meeting {
    barrier: Barrier,
    exchanges: Mutex<Exchanges>,
    changed: Condvar,
}

struct Exchanges {
    /// Bytes by round and rank.
    rounds: Vec<Vec<Option<Vec<u8>>>>,
    /// Rounds that each rank has taken part in.
    num_joined: Vec<usize>,
}

impl Meeting {
    pub fn new(world_size: usize) -> Self {
        let exchanges = Exchanges { rounds: Vec::new(), num_joined: vec![0; world_size] };
        Self { barrier: Barrier::new(world_size), exchanges: Mutex::new(exchanges), changed: Condvar::new() }
    }

    /// Waits for all ranks.
    #[allow(dead_code, reason = "not every test does")]
    pub fn wait(&self) {
        self.barrier.wait();
    }

    /// Gives `message` to all ranks and takes theirs.
    pub fn exchange(&self, rank: usize, message: &[u8]) -> Vec<Vec<u8>> {
        let mut exchanges = self.exchanges.lock().unwrap();
        let (round, world_size) = (exchanges.num_joined[rank], exchanges.num_joined.len());
        exchanges.num_joined[rank] += 1;
        if exchanges.rounds.len() == round {
            exchanges.rounds.push(vec![None; world_size]);
        }
        exchanges.rounds[round][rank] = Some(message.to_vec());
        self.changed.notify_all();
        let is_missing = |exchanges: &mut Exchanges| exchanges.rounds[round].contains(&None);
        let (exchanges, waited) = self.changed.wait_timeout_while(exchanges, PATIENCE, is_missing).unwrap();
        assert!(!waited.timed_out(), "rank {rank} is alone in round {round}");
        exchanges.rounds[round].iter().flatten().cloned().collect()
    }
}
