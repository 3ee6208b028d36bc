//! What each rank tells the others before their GPUs meet, and what they all conclude from it.
//! Invariant: the conclusion follows from the offers alone, which are the same on all ranks.

use std::ops::Range;

use super::nccl::{self, ID_BYTES};
use crate::{
    cuda::{Gpu, probe::Library},
    group::{NO_OFFER, OFFER_BYTES},
};

const VERSION: Range<usize> = 0..4;
const GPU: Range<usize> = 4..20;
const ID: Range<usize> = 20..20 + ID_BYTES;
const _: () = assert!(ID.end <= OFFER_BYTES);

/// The offer of rank `rank`; or why there is none.
pub(super) fn make(gpu: &Gpu, rank: usize) -> Result<[u8; OFFER_BYTES], String> {
    Library::Nccl.require().map_err(|error| error.to_string())?;
    let mut offer = NO_OFFER;
    offer[VERSION].copy_from_slice(&nccl::version()?.to_le_bytes());
    offer[GPU].copy_from_slice(&gpu.uuid().map_err(|error| error.to_string())?);
    if rank == 0 {
        offer[ID].copy_from_slice(&nccl::unique_id()?);
    }
    Ok(offer)
}

/// The id under which the GPUs meet; or why they do not.
pub(super) fn conclude(offers: &[Vec<u8>]) -> Result<[u8; ID_BYTES], String> {
    let part = |rank: usize, range: Range<usize>| offers.get(rank).and_then(|offer| offer.get(range)).unwrap_or(&[]);
    for rank in 0..offers.len() {
        if part(rank, VERSION).iter().all(|byte| *byte == 0) {
            return Err(format!("rank {rank} of the group has no CUDA device or no NCCL"));
        }
        if part(rank, VERSION) != part(0, VERSION) {
            return Err(format!("ranks 0 and {rank} of the group have different versions of NCCL"));
        }
        if let Some(other) = (0..rank).find(|other| part(*other, GPU) == part(rank, GPU)) {
            return Err(format!("ranks {other} and {rank} of the group share a GPU"));
        }
    }
    part(0, ID).try_into().map_err(|_| "rank 0 of the group sent an offer of another length".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(version: u32, gpu: u8, id: u8) -> Vec<u8> {
        let mut offer = NO_OFFER.to_vec();
        offer[VERSION].copy_from_slice(&version.to_le_bytes());
        offer[GPU].fill(gpu);
        offer[ID].fill(id);
        offer
    }

    #[test]
    fn gpus_meet_if_all_can() {
        let conclude = |offers: &[Vec<u8>]| conclude(offers);
        assert_eq!(conclude(&[offer(22_809, 1, 7), offer(22_809, 2, 0)]), Ok([7; ID_BYTES]));
        let reason = |offers: &[Vec<u8>]| conclude(offers).unwrap_err();
        assert!(reason(&[offer(22_809, 1, 7), NO_OFFER.to_vec()]).contains("rank 1 of the group has no CUDA"));
        assert!(reason(&[offer(22_809, 1, 7), offer(22_803, 2, 0)]).contains("different versions"));
        assert!(reason(&[offer(22_809, 1, 7), offer(22_809, 1, 0)]).contains("0 and 1 of the group share a GPU"));
        assert!(conclude(&[]).is_err());
    }
}
