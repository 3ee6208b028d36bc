//! The KV blocks of a replica: which are free.
//! For: the scheduler, the only one that hands them to sequences.
//! Invariant: a block is either in the free list or owned by exactly one sequence.
//! Not here: who owns a block (the sequence's own block table) and when a sequence may have one (the scheduler).

/// A free list over `num_blocks` blocks of `block_size` tokens.
#[derive(Debug)]
pub(super) struct BlockManager {
    block_size: usize,
    num_blocks: usize,
    /// Last freed, first reused: its memory is the most likely to be in a cache.
    free: Vec<u32>,
}

impl BlockManager {
    /// All blocks free.
    pub(super) fn new(num_blocks: usize, block_size: usize) -> Self {
        let num_blocks = num_blocks.min(u32::MAX as usize);
        Self { block_size: block_size.max(1), num_blocks, free: (0..num_blocks as u32).rev().collect() }
    }

    /// Blocks in all.
    pub(super) fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Blocks that nobody owns.
    pub(super) fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Tokens that all blocks together hold.
    pub(super) fn capacity_tokens(&self) -> usize {
        self.num_blocks.saturating_mul(self.block_size)
    }

    /// Blocks that `num_tokens` tokens need.
    pub(super) fn blocks_for(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }

    /// Tokens that `num_blocks` blocks hold.
    pub(super) fn tokens_in(&self, num_blocks: usize) -> usize {
        num_blocks.saturating_mul(self.block_size)
    }

    /// Extends `blocks` until they hold `num_tokens` tokens, or changes nothing and returns false if too few are free.
    pub(super) fn grow(&mut self, blocks: &mut Vec<u32>, num_tokens: usize) -> bool {
        let missing = self.blocks_for(num_tokens).saturating_sub(blocks.len());
        if missing > self.free.len() {
            return false;
        }
        blocks.extend(self.free.drain(self.free.len() - missing..).rev());
        true
    }

    /// Takes blocks back.
    pub(super) fn release(&mut self, blocks: &mut Vec<u32>) {
        debug_assert!(blocks.iter().all(|block| !self.free.contains(block)), "a block is freed twice");
        self.free.extend(blocks.drain(..).rev());
        debug_assert!(self.free.len() <= self.num_blocks, "more blocks are free than exist");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_by_whole_blocks_and_takes_them_back() {
        let mut manager = BlockManager::new(4, 8);
        let (mut first, mut second) = (Vec::new(), Vec::new());
        assert!(manager.grow(&mut first, 17));
        assert_eq!(first, [0, 1, 2]);
        assert!(manager.grow(&mut first, 24), "the third block has room");
        assert!(!manager.grow(&mut second, 9));
        assert!(second.is_empty() && manager.num_free() == 1);
        assert!(manager.grow(&mut second, 8));
        manager.release(&mut first);
        assert_eq!(manager.num_free(), 3);
        assert!(first.is_empty());
        assert!(manager.grow(&mut second, 32));
        assert_eq!(second.len(), 4);
    }
}
