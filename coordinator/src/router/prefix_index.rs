//! What the coordinator believes of the prefixes that a replica holds: those that its leader reports, and those that
//! were routed there and will soon be.
//! For: the choice of a replica. Invariant: it holds at most as many blocks as the replica has, most recently used ones.
//! It may be wrong: a report may be late or lost, and a request may end before its prompt is computed. A wrong guess
//! costs time, never a result.
//! Not here: how reports arrive ([`reports`](super::reports)), what a guess is worth ([`choice`](super::choice)).

use std::{
    num::NonZero,
    sync::{Mutex, MutexGuard, PoisonError},
};

use lru::LruCache;

/// Blocks that are remembered of the largest replica.
const MAX_BLOCKS: usize = 1 << 20;

/// Blocks of one replica by the first 64 bits of their names; empty until its leader reports.
#[derive(Default)]
pub struct PrefixIndex {
    blocks: Mutex<Option<LruCache<u64, ()>>>,
}

impl PrefixIndex {
    /// Begins with what the leader holds; the replica has room for `num_blocks`.
    pub fn begin(&self, num_blocks: usize, held: &[u64]) {
        let capacity = NonZero::new(num_blocks.min(MAX_BLOCKS)).unwrap_or(NonZero::<usize>::MIN);
        let mut blocks = LruCache::new(capacity);
        for name in held {
            blocks.put(*name, ());
        }
        *self.lock() = Some(blocks);
    }

    /// The leader reports no more.
    pub fn forget(&self) {
        *self.lock() = None;
    }

    /// Whether the leader reports.
    pub fn is_known(&self) -> bool {
        self.lock().is_some()
    }

    /// Takes a report in.
    pub fn update(&self, added: &[u64], evicted: &[u64]) {
        if let Some(blocks) = &mut *self.lock() {
            for name in evicted {
                blocks.pop(name);
            }
            for name in added {
                blocks.put(*name, ());
            }
        }
    }

    /// Notes that a prompt of these blocks is on its way to the replica.
    pub fn expect(&self, names: &[u64]) {
        if let Some(blocks) = &mut *self.lock() {
            // From the last to the first: the end of a prompt is forgotten before what it stands behind.
            for name in names.iter().rev() {
                blocks.put(*name, ());
            }
        }
    }

    /// How many of a prompt's first blocks are there. As blocks are forgotten from the last to the first, the end of
    /// those that are there is found by halving.
    pub fn num_held(&self, names: &[u64]) -> usize {
        match &*self.lock() {
            Some(blocks) => names.partition_point(|name| blocks.contains(name)),
            None => 0,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<LruCache<u64, ()>>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_what_was_reported_and_expected() {
        let index = PrefixIndex::default();
        index.expect(&[1, 2, 3]);
        assert_eq!((index.is_known(), index.num_held(&[1, 2, 3])), (false, 0), "without reports nothing is believed");
        index.begin(100, &[2, 1]);
        assert_eq!(index.num_held(&[1, 2, 3, 4]), 2);
        index.expect(&[1, 2, 3]);
        assert_eq!(index.num_held(&[1, 2, 3, 4]), 3);
        index.update(&[4], &[]);
        assert_eq!(index.num_held(&[1, 2, 3, 4]), 4);
        index.update(&[], &[3, 4, 9]);
        assert_eq!((index.num_held(&[1, 2, 3, 4]), index.num_held(&[9]), index.num_held(&[])), (2, 0, 0));
        index.begin(100, &[]);
        assert_eq!(index.num_held(&[1]), 0);
    }

    #[test]
    fn is_no_larger_than_the_replica_and_forgets_ends_first() {
        let index = PrefixIndex::default();
        index.begin(10, &[]);
        let names: Vec<u64> = (0..8).collect();
        index.expect(&names);
        index.expect(&[100, 101, 102, 103]);
        assert_eq!((index.num_held(&names), index.num_held(&[100, 101, 102, 103])), (6, 4));
        index.expect(&names[..3]);
        index.update(&[200, 201, 202, 203, 204], &[]);
        assert_eq!((index.num_held(&names), index.num_held(&[100, 101, 102, 103])), (3, 2));
    }
}
