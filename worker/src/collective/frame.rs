//! The header before every payload on a link.
//! Invariant: fixed length, little-endian; a receiver compares every field before it takes a byte of payload.

use serde::{Deserialize, Serialize};

/// First bytes of every frame: "LKS1".
const MAGIC: u32 = u32::from_le_bytes(*b"LKS1");

/// Bytes of an encoded [`FrameHeader`].
pub(super) const HEADER_BYTES: usize = 4 + 4 + 8 + 8 + 8;

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum FrameKind {
    /// f32 or f64 values, which of them the call says; little-endian.
    Values = 1,
    /// One bincode value.
    Message = 2,
    /// Nothing: the sender lives.
    Heartbeat = 3,
    /// Nothing: the sender closes the link, and that is no failure.
    Goodbye = 4,
}

/// Precedes `payload_bytes` bytes of payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FrameHeader {
    magic: u32,
    kind: u32,
    plan_epoch: u64,
    /// Counts the frames of one direction of a link, from 0.
    sequence: u64,
    payload_bytes: u64,
}

impl FrameHeader {
    pub(super) fn new(kind: FrameKind, plan_epoch: u64, sequence: u64, payload_bytes: usize) -> Self {
        Self { magic: MAGIC, kind: kind as u32, plan_epoch, sequence, payload_bytes: payload_bytes as u64 }
    }

    pub(super) fn is(&self, kind: FrameKind) -> bool {
        self.kind == kind as u32
    }

    pub(super) fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// The header's bytes.
    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let written = bincode::serde::encode_into_slice(self, &mut bytes, config());
        debug_assert_eq!(written.ok(), Some(HEADER_BYTES));
        bytes
    }

    /// The header in `bytes`, which may be garbage: compare it before use.
    ///
    /// # Errors
    /// The difference in words.
    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, String> {
        let (header, _) = bincode::serde::decode_from_slice::<Self, _>(bytes, config()).map_err(|e| e.to_string())?;
        if header.magic != MAGIC {
            return Err(format!("sent {:#010x} where a frame begins, expected {MAGIC:#010x}", header.magic));
        }
        Ok(header)
    }

    /// Says in words how `self` differs from the header that the receiver waits for.
    pub(super) fn check(&self, expected: &Self) -> Result<(), String> {
        let fields = [
            ("frame kind", self.kind.into(), expected.kind.into()),
            ("plan epoch", self.plan_epoch, expected.plan_epoch),
            ("frame sequence", self.sequence, expected.sequence),
            ("payload bytes", self.payload_bytes, expected.payload_bytes),
        ];
        match fields.iter().find(|(_, got, wanted)| got != wanted) {
            Some((name, got, wanted)) => Err(format!("sent {name} {got}, expected {wanted}")),
            None => Ok(()),
        }
    }
}

fn config() -> impl bincode::config::Config {
    bincode::config::standard().with_fixed_int_encoding().with_limit::<HEADER_BYTES>()
}
