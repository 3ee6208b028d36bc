//! One-shot sums over the GPUs of one host: each rank writes its terms straight into the memory of the others.
//! For: small messages between ranks with peer access, where NCCL's latency is most of the time.
//! Invariant: either all ranks of a group have a `OneShot` or none has, and all launch the same operations in the same
//! order. Inboxes live until every rank that writes to them has closed, or their own process ends.
//! Not here: the protocol on the GPU (`cuda/include/one_shot.cuh`); large messages and other hosts.
//!
//! - [`inbox`]: memory that other ranks write to, in this process and in others.
//! - [`all_reduce`]: the launches.

pub mod all_reduce;
mod inbox;

use std::sync::Arc;

use self::inbox::{Inbox, PeerInbox};
use super::{DeviceBuffer, Gpu, memory::PinnedFlag};
use crate::{
    KernelError,
    group::{Exchange, OFFER_BYTES},
};

/// Most ranks of a group: `MAX_WORLD_SIZE` of the device code.
pub const MAX_WORLD_SIZE: usize = 8;
/// Most blocks of a launch: `MAX_BLOCKS` of the device code.
const MAX_BLOCKS: usize = 512;
/// f32 values that a warp sends at a time, and the lines which they take.
const WARP_VALUES: usize = 128;
const WARP_LINES: usize = 64;
const LINE_BYTES: usize = 16;
/// First byte of a message; its length follows.
const CONTENT: u8 = 1;
const REASON: u8 = 2;
const MAX_CONTENT_BYTES: usize = OFFER_BYTES - 2;

/// One rank of a group of GPUs that can write to each other's memory.
pub struct OneShot {
    gpu: Arc<Gpu>,
    rank: usize,
    max_len: usize,
    /// Of each rank; the own is among them.
    inboxes: Vec<PeerInbox>,
    /// Epoch of the latest operation and whether one was left before its end, for each block of a launch.
    states: DeviceBuffer,
    abort: Arc<PinnedFlag>,
}

/// f32 values of the largest message: above, sending everything to everybody costs more than it saves. Measured on two
/// and four H200s, assumed for others.
fn max_len(world_size: usize) -> usize {
    match world_size {
        0..=2 => 512 << 10,
        3..=4 => 64 << 10,
        _ => 32 << 10,
    }
}

/// Lines of a message of `len` values.
fn num_lines(len: usize) -> usize {
    len.div_ceil(WARP_VALUES) * WARP_LINES
}

impl OneShot {
    /// Joins a group of ranks, which all call this together. `None`, on all of them: they are not on one host, or some
    /// GPU cannot write to another's memory; the log says which and why.
    ///
    /// # Errors
    /// What `exchange` returns.
    pub fn join<E>(
        gpu: &Arc<Gpu>,
        rank: usize,
        world_size: usize,
        exchange: Exchange<'_, E>,
    ) -> Result<Option<Self>, E> {
        if !(2..=MAX_WORLD_SIZE).contains(&world_size) {
            return Ok(None);
        }
        let inbox_bytes = 2 * world_size * num_lines(max_len(world_size)) * LINE_BYTES;
        let made = Inbox::new(gpu, inbox_bytes).map_err(|error| error.to_string());
        let card = made.as_ref().map(Inbox::card);
        let cards = exchange(&encode(card.as_deref().map_err(|why| why.as_str())))?;
        if let Ok(inbox) = &made {
            inbox.note_other_processes(&cards.iter().filter_map(|card| decode(card).ok()).collect::<Vec<_>>());
        }
        let opened = made.and_then(|inbox| {
            let open = |(other, card): (usize, &Vec<u8>)| {
                let card = decode(card).map_err(|why| format!("rank {other}: {why}"))?;
                if other == rank { Ok(inbox.own()) } else { inbox.open(card, other) }
            };
            let inboxes = cards.iter().enumerate().map(open).collect::<Result<_, _>>()?;
            Self::new(gpu, rank, inboxes).map_err(|error| error.to_string())
        });
        let answer = opened.as_ref().map(|_| &[][..]);
        let answers = exchange(&encode(answer.map_err(|why| why.as_str())))?;
        let refusals: Vec<_> =
            answers.iter().enumerate().filter_map(|(other, answer)| Some((other, decode(answer).err()?))).collect();
        for (other, why) in &refusals {
            tracing::info!(rank, refused_by = other, why, "ranks cannot write to each other's memory");
        }
        Ok(opened.ok().filter(|_| refusals.is_empty()))
    }

    fn new(gpu: &Arc<Gpu>, rank: usize, inboxes: Vec<PeerInbox>) -> Result<Self, KernelError> {
        let states = DeviceBuffer::zeroed(gpu, MAX_BLOCKS * size_of::<[u32; 2]>())?;
        let abort = Arc::new(PinnedFlag::new(gpu)?);
        // The inbox is zeroed, too, before others may write to it.
        gpu.synchronize()?;
        Ok(Self { gpu: Arc::clone(gpu), rank, max_len: max_len(inboxes.len()), inboxes, states, abort })
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.inboxes.len()
    }

    /// f32 values of the largest message.
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// Lets kernels that wait for another rank leave, with wrong results, within milliseconds; nothing can be launched
    /// afterwards. The other ranks are not told. Any thread may call it.
    pub fn abort(&self) {
        self.abort.raise();
    }

    /// What [`abort`](Self::abort) raises, for those who do not know more of it.
    pub(super) fn abort_flag(&self) -> Arc<PinnedFlag> {
        Arc::clone(&self.abort)
    }

    /// Whether it was aborted: what was computed since may be wrong.
    pub fn is_aborted(&self) -> bool {
        self.abort.is_raised()
    }

    /// Refuses messages that no launch takes, and all when it was aborted.
    fn check(&self, operation: &'static str, len: usize) -> Result<(), KernelError> {
        if self.is_aborted() {
            return Err(self.gpu.error(format!("{operation}: the group of ranks was aborted")));
        }
        let (what, limit) = ("values of a message", self.max_len + 1);
        match len {
            0 => Err(KernelError::Shape { operation, what, got: 0, expected: 1 }),
            got if got >= limit => Err(KernelError::OutOfRange { operation, what, got, limit }),
            _ => Ok(()),
        }
    }

    /// The structure `Ranks` that kernels take by value.
    fn argument(&self) -> [u64; MAX_WORLD_SIZE + 3] {
        let mut words = [0; MAX_WORLD_SIZE + 3];
        for (word, inbox) in words.iter_mut().zip(&self.inboxes) {
            *word = inbox.pointer().0;
        }
        words[MAX_WORLD_SIZE] = self.states.pointer().0;
        words[MAX_WORLD_SIZE + 1] = self.abort.pointer().0;
        words[MAX_WORLD_SIZE + 2] = self.rank as u64 | (num_lines(self.max_len) as u64) << 32;
        words
    }
}

impl Drop for OneShot {
    fn drop(&mut self) {
        // Work that waits for ranks which are gone would never end; what it computes is wanted by nobody.
        self.abort();
        if let Err(error) = self.gpu.drain() {
            tracing::error!(%error, "a group of ranks was left with failed work");
        }
    }
}

/// What a rank found, for the others: content, or why there is none. All messages have the same length.
fn encode(found: Result<&[u8], &str>) -> Vec<u8> {
    let (tag, content) = match found {
        Ok(content) => (CONTENT, content),
        Err(why) => (REASON, why.as_bytes()),
    };
    let content = &content[..content.len().min(MAX_CONTENT_BYTES)];
    let mut message = vec![tag, content.len() as u8];
    message.extend(content);
    message.resize(OFFER_BYTES, 0);
    message
}

fn decode(message: &[u8]) -> Result<&[u8], String> {
    let [tag, len, content @ ..] = message else { return Err("a message is empty".to_owned()) };
    match (*tag, content.get(..usize::from(*len))) {
        (CONTENT, Some(content)) => Ok(content),
        (REASON, Some(why)) => Err(String::from_utf8_lossy(why).into_owned()),
        _ => Err("a message of another version".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_carry_content_or_the_reason_why_there_is_none() {
        assert_eq!(decode(&encode(Ok(&[7, 8]))), Ok(&[7, 8][..]));
        assert_eq!(decode(&encode(Err("no"))), Err("no".to_owned()));
        let long = "why".repeat(200);
        assert_eq!(encode(Err(&long)).len(), OFFER_BYTES);
        assert_eq!(decode(&encode(Err(&long))), Err(long[..MAX_CONTENT_BYTES].to_owned()));
        assert!(decode(&[]).is_err() && decode(&[0; OFFER_BYTES]).is_err() && decode(&[CONTENT, 2, 1]).is_err());
    }

    #[test]
    fn every_value_has_a_place() {
        // `first_line` of the device code, of the last chunk, and the line 32 further on.
        for len in [1, 4, 127, 128, 129, 4096, 512 << 10] {
            let chunk = (len - 1) / 4;
            assert!(chunk / 32 * 64 + chunk % 32 + 32 < num_lines(len), "{len}");
        }
        for world_size in 2..=MAX_WORLD_SIZE {
            assert!(max_len(world_size) <= MAX_BLOCKS * 256 * 4);
        }
    }
}
