//! Names of full KV blocks, by which an engine finds those that it holds and the coordinator guesses which replica does.
//! Invariant: equal names mean equal contents: a name covers every token up to the block's end, and the tenant if it is isolated. It is a
//! cryptographic hash, so that nobody can choose a prompt whose blocks are taken for another's, and no tokens need be
//! kept for comparison.
//! Not here: who holds which block (the engine's block manager, the coordinator's index).

use sha2::{Digest, Sha256};

/// The name of a block: 128 bits of SHA-256 over its parent's name and its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(u128);

impl BlockHash {
    /// What stands before the first block of a tenant's prompts: isolated tenants share no block with anybody.
    pub fn root(tenant: &str, is_isolated: bool) -> Self {
        let owner = if is_isolated { tenant } else { "" };
        let hash = Sha256::new().chain_update(b"lockstep.v1 kv blocks").chain_update([u8::from(is_isolated)]);
        Self::finish(hash.chain_update(owner))
    }

    /// The block of these tokens behind `self`.
    pub fn child(self, token_ids: &[u32]) -> Self {
        let mut hash = Sha256::new().chain_update(self.0.to_le_bytes());
        for token_ids in token_ids.chunks(32) {
            let mut bytes = [0; 128];
            for (bytes, token_id) in bytes.chunks_exact_mut(4).zip(token_ids) {
                bytes.copy_from_slice(&token_id.to_le_bytes());
            }
            hash.update(&bytes[..token_ids.len() * 4]);
        }
        Self::finish(hash)
    }

    /// 64 bits of it, which are enough for guesses.
    pub fn short(self) -> u64 {
        self.0 as u64
    }

    fn finish(hash: Sha256) -> Self {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&hash.finalize()[..16]);
        Self(u128::from_le_bytes(bytes))
    }
}

/// The names of the full blocks of `token_ids` behind `root`, in order of position.
pub fn block_hashes(root: BlockHash, token_ids: &[u32], block_size: usize) -> impl Iterator<Item = BlockHash> {
    let chain = |parent: &mut BlockHash, token_ids: &[u32]| {
        *parent = parent.child(token_ids);
        Some(*parent)
    };
    token_ids.chunks_exact(block_size.max(1)).scan(root, chain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_covers_its_owner_and_every_token_before_its_end() {
        let roots = [BlockHash::root("a", false), BlockHash::root("a", true), BlockHash::root("", true)];
        let names = |root, token_ids: &[u32]| block_hashes(root, token_ids, 40).collect::<Vec<_>>();
        let token_ids: Vec<u32> = (0..100).collect();
        let all = names(roots[0], &token_ids);
        assert_eq!(all.len(), 2, "the third block is not full");
        assert_eq!(names(roots[0], &token_ids[..80]), all);
        for changed in [0, 31, 32, 39] {
            let mut other = token_ids.clone();
            other[changed] += 1 << 24;
            let other = names(roots[0], &other);
            assert!(all.iter().zip(&other).all(|(left, right)| left != right), "token {changed}");
        }
        let mut other = token_ids.clone();
        other[40] = 0;
        assert_eq!(names(roots[0], &other)[0], all[0]);
        assert_ne!(names(roots[0], &other)[1], all[1]);
        assert_eq!(BlockHash::root("b", false), roots[0]);
        let of_root = roots.map(|root| names(root, &token_ids));
        assert!(of_root[0] != of_root[1] && of_root[1] != of_root[2] && of_root[0] != of_root[2]);
    }

    /// Two versions of this program in one cluster must agree.
    #[test]
    fn names_do_not_change() {
        let name = block_hashes(BlockHash::root("", false), &[1, 2, 3, 4], 4).next().unwrap();
        assert_eq!(format!("{:032x}", name.0), "5e09d56772ed11519276a04172778537");
    }
}
