//! The KV blocks of a replica: which are free, who shares one, and what full ones hold.
//! For: the scheduler, the only one that hands them to sequences.
//! Invariants: a block is either in the free list or referenced; a name leads only to the block that holds its contents,
//! and a block with a name is full and not written; a free block keeps its name until it is handed out for other contents.
//! Each operation on a block takes constant time.
//! Not here: which sequence refers to a block (its own block table) and when it may have one (the scheduler).

use std::collections::HashMap;

use lockstep_proto::prefix::BlockHash;

/// `num_blocks` blocks of `block_size` tokens.
#[derive(Debug)]
pub(super) struct BlockManager {
    block_size: usize,
    /// All blocks, and behind them the ends of the free list: the block after it is handed out next, the one before it
    /// last.
    blocks: Vec<Block>,
    num_free: usize,
    /// Blocks by name; `None` if none is ever found again.
    named: Option<HashMap<BlockHash, u32>>,
    /// Names given or lost since somebody asked, as many as there is room for.
    changed: Vec<BlockHash>,
}

#[derive(Clone, Debug)]
struct Block {
    num_references: u32,
    name: Option<BlockHash>,
    /// Neighbours in the free list, while it is there.
    previous: u32,
    next: u32,
}

/// Names that blocks were given or have lost, in their short form. If more change between two looks than there are
/// blocks, some are missing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixChanges {
    /// Blocks that can be found now.
    pub added: Vec<u64>,
    /// Blocks that cannot be found any more.
    pub evicted: Vec<u64>,
}

impl PrefixChanges {
    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.evicted.is_empty()
    }
}

impl BlockManager {
    /// All blocks free. Without `is_caching` none is found again.
    pub(super) fn new(num_blocks: usize, block_size: usize, is_caching: bool) -> Self {
        let num_blocks = num_blocks.min(u32::MAX as usize - 1);
        let end = num_blocks as u32;
        let block = |id: u32| Block {
            num_references: 0,
            name: None,
            previous: id.checked_sub(1).unwrap_or(end),
            next: if id == end { 0 } else { id + 1 },
        };
        Self {
            block_size: block_size.max(1),
            blocks: (0..=end).map(block).collect(),
            num_free: num_blocks,
            named: is_caching.then(HashMap::new),
            changed: Vec::new(),
        }
    }

    /// Tokens in a block.
    pub(super) fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks in all.
    pub(super) fn num_blocks(&self) -> usize {
        self.blocks.len() - 1
    }

    /// Blocks that nobody refers to, with or without a name.
    pub(super) fn num_free(&self) -> usize {
        self.num_free
    }

    /// Whether blocks can be found by name.
    pub(super) fn is_caching(&self) -> bool {
        self.named.is_some()
    }

    /// Tokens that all blocks together hold.
    pub(super) fn capacity_tokens(&self) -> usize {
        self.num_blocks().saturating_mul(self.block_size)
    }

    /// Blocks that `num_tokens` tokens need.
    pub(super) fn blocks_for(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }

    /// Tokens that `num_blocks` blocks hold.
    pub(super) fn tokens_in(&self, num_blocks: usize) -> usize {
        num_blocks.saturating_mul(self.block_size)
    }

    /// Extends `blocks` with blocks of unknown contents until they hold `num_tokens` tokens, or changes nothing and
    /// returns false if too few are free. Those without a name go first, then those that were free longest.
    pub(super) fn grow(&mut self, blocks: &mut Vec<u32>, num_tokens: usize) -> bool {
        let missing = self.blocks_for(num_tokens).saturating_sub(blocks.len());
        if missing > self.num_free {
            return false;
        }
        for _ in 0..missing {
            let id = self.blocks[self.end() as usize].next;
            self.take_from_free(id);
            self.take_name(id);
            blocks.push(id);
        }
        true
    }

    /// The block of that name, referred to once more.
    pub(super) fn share(&mut self, name: BlockHash) -> Option<u32> {
        let id = *self.named.as_ref()?.get(&name)?;
        match self.blocks[id as usize].num_references {
            0 => self.take_from_free(id),
            _ => self.blocks[id as usize].num_references += 1,
        }
        Some(id)
    }

    /// Whether a block of that name exists, and if so whether it is free.
    pub(super) fn find(&self, name: BlockHash) -> Option<bool> {
        let id = *self.named.as_ref()?.get(&name)?;
        Some(self.blocks[id as usize].num_references == 0)
    }

    /// Lets a referenced block be found by name, unless another one is found by it. It is not written from now on.
    pub(super) fn publish(&mut self, id: u32, name: BlockHash) {
        let Some(named) = &mut self.named else { return };
        let block = &mut self.blocks[id as usize];
        debug_assert!(block.num_references > 0, "block {id} is free and given a name");
        if block.name.is_none() && !named.contains_key(&name) {
            block.name = Some(name);
            named.insert(name, id);
            self.note(name);
        }
    }

    /// Takes the names from blocks: their contents are not to be trusted.
    pub(super) fn unpublish(&mut self, blocks: &[u32]) {
        blocks.iter().for_each(|&id| self.take_name(id));
    }

    /// Takes references back. Of blocks that become free the last one is handed out before those in front of it,
    /// without which it is of no use.
    pub(super) fn release(&mut self, blocks: &mut Vec<u32>) {
        for id in blocks.drain(..).rev() {
            let block = &mut self.blocks[id as usize];
            debug_assert!(block.num_references > 0, "block {id} is freed twice");
            block.num_references -= 1;
            if block.num_references == 0 {
                let end = self.end();
                // The memory of one without a name is the most likely to be in a cache of the processor.
                let next = if self.blocks[id as usize].name.is_some() { end } else { self.blocks[end as usize].next };
                self.put_in_front_of(id, next);
            }
        }
    }

    /// Short names of all blocks that can be found.
    pub(super) fn names(&self) -> Vec<u64> {
        self.named.iter().flatten().map(|(name, _)| name.short()).collect()
    }

    /// What changed since this was last asked.
    pub(super) fn take_changes(&mut self) -> PrefixChanges {
        let is_there = |name: &BlockHash| self.named.as_ref().is_some_and(|named| named.contains_key(name));
        let (added, evicted): (Vec<_>, Vec<_>) = self.changed.drain(..).partition(is_there);
        let short = |names: Vec<BlockHash>| names.into_iter().map(BlockHash::short).collect();
        PrefixChanges { added: short(added), evicted: short(evicted) }
    }

    fn end(&self) -> u32 {
        self.num_blocks() as u32
    }

    fn take_name(&mut self, id: u32) {
        if let Some(name) = self.blocks[id as usize].name.take()
            && let Some(named) = &mut self.named
        {
            named.remove(&name);
            self.note(name);
        }
    }

    fn note(&mut self, name: BlockHash) {
        if self.changed.len() < self.blocks.len() {
            self.changed.push(name);
        }
    }

    /// Refers to a free block.
    fn take_from_free(&mut self, id: u32) {
        let block = &mut self.blocks[id as usize];
        debug_assert!(block.num_references == 0, "block {id} is not free");
        block.num_references = 1;
        let (previous, next) = (block.previous, block.next);
        self.blocks[previous as usize].next = next;
        self.blocks[next as usize].previous = previous;
        self.num_free -= 1;
    }

    fn put_in_front_of(&mut self, id: u32, next: u32) {
        let previous = std::mem::replace(&mut self.blocks[next as usize].previous, id);
        self.blocks[previous as usize].next = id;
        let block = &mut self.blocks[id as usize];
        (block.previous, block.next) = (previous, next);
        self.num_free += 1;
    }
}

#[cfg(test)]
mod tests;
