//! The block manager against a naive model: random sequences that share, grow, publish and release.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const BLOCK_SIZE: usize = 4;
const NUM_BLOCKS: usize = 12;

fn name(content: u8) -> BlockHash {
    BlockHash::root("", false).child(&[content.into()])
}

/// What the manager promises, in plain lists.
struct Naive {
    /// Named free blocks, longest free first.
    kept: Vec<u32>,
    /// Free blocks without a name, next first.
    unnamed: Vec<u32>,
    references: BTreeMap<u32, usize>,
    names: BTreeMap<u32, u8>,
}

impl Naive {
    fn take(&mut self) -> u32 {
        let id = if self.unnamed.is_empty() { self.kept.remove(0) } else { self.unnamed.remove(0) };
        self.names.remove(&id);
        self.references.insert(id, 1);
        id
    }

    fn share(&mut self, content: u8) -> Option<u32> {
        let (&id, _) = self.names.iter().find(|(_, name)| **name == content)?;
        self.kept.retain(|kept| *kept != id);
        *self.references.entry(id).or_default() += 1;
        Some(id)
    }

    fn release(&mut self, blocks: &[u32]) {
        for id in blocks.iter().rev() {
            let references = self.references.get_mut(id).unwrap();
            *references -= 1;
            if *references == 0 {
                self.references.remove(id);
                if self.names.contains_key(id) { self.kept.push(*id) } else { self.unnamed.insert(0, *id) }
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Operation {
    Grow(usize, usize),
    Share(usize, u8),
    Publish(usize, usize, u8),
    Unpublish(usize),
    Release(usize),
}

fn random_operation() -> impl Strategy<Value = Operation> {
    let holder = || 0usize..4;
    prop_oneof![
        4 => (holder(), 1usize..6).prop_map(|(holder, num_blocks)| Operation::Grow(holder, num_blocks)),
        4 => (holder(), 0u8..20).prop_map(|(holder, content)| Operation::Share(holder, content)),
        6 => (holder(), 0usize..6, 0u8..20).prop_map(|(holder, index, content)| Operation::Publish(holder, index, content)),
        1 => holder().prop_map(Operation::Unpublish),
        4 => holder().prop_map(Operation::Release),
    ]
}

fn check(manager: &BlockManager, naive: &Naive) {
    let mut free = Vec::new();
    let mut id = manager.blocks[NUM_BLOCKS].next;
    while id != NUM_BLOCKS as u32 {
        free.push(id);
        id = manager.blocks[id as usize].next;
    }
    assert_eq!(free, [naive.unnamed.clone(), naive.kept.clone()].concat(), "order of the free list");
    assert_eq!(manager.num_free(), free.len());
    for (id, block) in manager.blocks[..NUM_BLOCKS].iter().enumerate() {
        let id = id as u32;
        assert_eq!(block.num_references as usize, naive.references.get(&id).copied().unwrap_or(0));
        assert_eq!(block.num_references == 0, free.contains(&id), "block {id} is free xor referenced");
        assert_eq!(block.name, naive.names.get(&id).map(|content| name(*content)));
    }
    let named: BTreeMap<_, _> = manager.named.iter().flatten().map(|(name, id)| (*id, *name)).collect();
    assert_eq!(named, naive.names.iter().map(|(id, content)| (*id, name(*content))).collect());
}

proptest! {
    #[test]
    fn does_what_the_naive_model_does(operations in prop::collection::vec(random_operation(), 1..200)) {
        let mut manager = BlockManager::new(NUM_BLOCKS, BLOCK_SIZE, true);
        let unnamed = (0..NUM_BLOCKS as u32).collect();
        let (references, names) = (BTreeMap::new(), BTreeMap::new());
        let mut naive = Naive { kept: Vec::new(), unnamed, references, names };
        let mut holders: [Vec<u32>; 4] = Default::default();
        let mut followed = BTreeSet::new();
        for operation in operations {
            match operation {
                Operation::Grow(holder, num_blocks) => {
                    let blocks = &mut holders[holder];
                    let (before, num_tokens) = (blocks.clone(), (blocks.len() + num_blocks) * BLOCK_SIZE - 1);
                    let has_room = naive.unnamed.len() + naive.kept.len() >= num_blocks;
                    prop_assert_eq!(manager.grow(blocks, num_tokens), has_room);
                    let taken: Vec<u32> = (0..if has_room { num_blocks } else { 0 }).map(|_| naive.take()).collect();
                    prop_assert_eq!(&*blocks, &[before, taken].concat());
                }
                Operation::Share(holder, content) => {
                    let shared = naive.share(content);
                    prop_assert_eq!(manager.share(name(content)), shared);
                    holders[holder].extend(shared);
                }
                Operation::Publish(holder, index, content) => if let Some(&id) = holders[holder].get(index) {
                    manager.publish(id, name(content));
                    if !naive.names.contains_key(&id) && !naive.names.values().any(|name| *name == content) {
                        naive.names.insert(id, content);
                    }
                },
                Operation::Unpublish(holder) => {
                    manager.unpublish(&holders[holder]);
                    naive.names.retain(|id, _| !holders[holder].contains(id));
                }
                Operation::Release(holder) => {
                    naive.release(&holders[holder]);
                    manager.release(&mut holders[holder]);
                }
            }
            check(&manager, &naive);
            let changes = manager.take_changes();
            followed.retain(|name| !changes.evicted.contains(name));
            followed.extend(changes.added);
            prop_assert_eq!(&followed, &manager.names().into_iter().collect());
        }
        holders.iter_mut().for_each(|blocks| manager.release(blocks));
        prop_assert_eq!(manager.num_free(), NUM_BLOCKS);
    }
}

#[test]
fn without_caching_nothing_is_found() {
    let mut manager = BlockManager::new(4, 8, false);
    let (mut first, mut second) = (Vec::new(), Vec::new());
    assert!(manager.grow(&mut first, 17));
    assert_eq!(first, [0, 1, 2]);
    assert!(manager.grow(&mut first, 24), "the third block has room");
    assert!(!manager.grow(&mut second, 9));
    assert!(second.is_empty() && manager.num_free() == 1);
    manager.publish(0, name(1));
    assert_eq!((manager.find(name(1)), manager.share(name(1))), (None, None));
    assert_eq!(manager.take_changes(), PrefixChanges::default());
    manager.release(&mut first);
    assert!(manager.grow(&mut second, 32));
    assert_eq!(second, [0, 1, 2, 3]);
}

#[test]
fn changes_that_nobody_takes_are_bounded() {
    let mut manager = BlockManager::new(1, 1, true);
    for content in 0..10 {
        let mut blocks = Vec::new();
        assert!(manager.grow(&mut blocks, 1));
        manager.publish(0, name(content));
        manager.release(&mut blocks);
    }
    let changes = manager.take_changes();
    assert_eq!(changes, PrefixChanges { added: Vec::new(), evicted: vec![name(0).short(), name(0).short()] });
}
