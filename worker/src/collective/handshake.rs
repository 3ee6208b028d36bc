//! Who is on the other end of a new connection: both sides prove that they know the replica's secret. With TLS this goes
//! on within it, between members of the cluster.
//!
//! ```text
//! connector                                       listener
//!   hello (key, ranks, purpose, nonce)   ─────▶   looks the registration up
//!   checks the listener's proof          ◀─────   challenge (nonce, proof) or refusal
//!   proof                                ─────▶   checks it
//!   done                                 ◀─────   accepted
//! ```
//!
//! Proofs are HMAC-SHA256 under the secret over role, both nonces and all of the hello, so that a proof serves for one
//! connection, one direction and one pair of ranks only. Invariant: no step outlasts its deadline; no length that a
//! stranger sends is believed beyond [`MAX_MESSAGE_BYTES`].

use std::{
    io::{ErrorKind, Read, Write},
    time::{Duration, Instant},
};

use hmac::{Hmac, Mac};
use lockstep_transport::{LinkStream, explain};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::Sha256;

/// Longest handshake message.
const MAX_MESSAGE_BYTES: usize = 1024;
const PROTOCOL: [u8; 8] = *b"LKSHAND1";

/// Names one replica of one model under one plan; both ends of a link must agree on it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LinkKey {
    /// Model name.
    pub model: String,
    /// Index of the replica in its plan.
    pub replica: usize,
    /// Version of the plan.
    pub plan_epoch: u64,
}

impl std::fmt::Display for LinkKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{:?} replica {} epoch {}", self.model, self.replica, self.plan_epoch)
    }
}

/// What a link is for; each pair of ranks has at most one link for each purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Purpose {
    /// All-reduce within a tensor-parallel group.
    TensorParallel,
    /// Activations from one pipeline stage to the next.
    Pipeline,
    /// Step plans and results.
    Control,
}

/// First message of a connector.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    protocol: [u8; 8],
    pub(super) key: LinkKey,
    pub(super) from_rank: usize,
    pub(super) to_rank: usize,
    pub(super) purpose: Purpose,
    nonce: [u8; 32],
}

#[derive(Serialize, Deserialize)]
enum Challenge {
    /// Prove it, too.
    Prove { nonce: [u8; 32], proof: [u8; 32] },
    /// Not now: the replica is not registered here (yet).
    NotRegistered,
}

#[derive(Serialize, Deserialize)]
struct Proof([u8; 32]);

#[derive(Serialize, Deserialize)]
struct Accepted(bool);

/// Why a handshake did not end in a link.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    #[error(transparent)]
    Io(std::io::Error),
    #[error("{0}")]
    Tls(String),
    #[error("{0} is not registered here")]
    NotRegistered(LinkKey),
    #[error("it does not know the secret of the replica")]
    WrongSecret,
    #[error("it sent something that is no handshake: {0}")]
    Garbage(String),
    #[error("it refused the link")]
    Refused,
}

impl From<std::io::Error> for HandshakeError {
    fn from(error: std::io::Error) -> Self {
        explain(&error).map_or(Self::Io(error), Self::Tls)
    }
}

impl Hello {
    pub(super) fn new(key: LinkKey, from_rank: usize, to_rank: usize, purpose: Purpose) -> Self {
        Self { protocol: PROTOCOL, key, from_rank, to_rank, purpose, nonce: rand::random() }
    }
}

/// The connector's side.
pub(super) fn connect(
    stream: &LinkStream,
    hello: &Hello,
    secret: &[u8],
    deadline: Instant,
) -> Result<(), HandshakeError> {
    write_message(stream, hello, deadline)?;
    let nonce = match read_message(stream, deadline)? {
        Challenge::NotRegistered => return Err(HandshakeError::NotRegistered(hello.key.clone())),
        Challenge::Prove { nonce, proof } => {
            verify(secret, b"listener", hello, &nonce, &proof)?;
            nonce
        }
    };
    let proof = prove(secret, b"connector", hello, &nonce)?.finalize().into_bytes().into();
    write_message(stream, &Proof(proof), deadline)?;
    match read_message(stream, deadline)? {
        Accepted(true) => Ok(()),
        Accepted(false) => Err(HandshakeError::Refused),
    }
}

/// The listener's side up to the decision: `secret_of` gives the secret of a registered replica.
pub(super) fn listen(
    stream: &LinkStream,
    secret_of: impl FnOnce(&Hello) -> Option<Vec<u8>>,
    deadline: Instant,
) -> Result<Hello, HandshakeError> {
    let hello: Hello = read_message(stream, deadline)?;
    if hello.protocol != PROTOCOL {
        return Err(HandshakeError::Garbage(format!("protocol {:?}", String::from_utf8_lossy(&hello.protocol))));
    }
    let Some(secret) = secret_of(&hello) else {
        write_message(stream, &Challenge::NotRegistered, deadline)?;
        return Err(HandshakeError::NotRegistered(hello.key));
    };
    let nonce: [u8; 32] = rand::random();
    let proof = prove(&secret, b"listener", &hello, &nonce)?.finalize().into_bytes().into();
    write_message(stream, &Challenge::Prove { nonce, proof }, deadline)?;
    let Proof(proof) = read_message(stream, deadline)?;
    verify(&secret, b"connector", &hello, &nonce, &proof)?;
    Ok(hello)
}

/// The listener's last word.
pub(super) fn answer(stream: &LinkStream, is_accepted: bool, deadline: Instant) -> Result<(), HandshakeError> {
    write_message(stream, &Accepted(is_accepted), deadline)
}

fn prove(secret: &[u8], role: &[u8], hello: &Hello, nonce: &[u8; 32]) -> Result<Hmac<Sha256>, HandshakeError> {
    let hello = bincode::serde::encode_to_vec(hello, config()).map_err(garbage)?;
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).map_err(garbage)?;
    mac.update(role);
    mac.update(nonce);
    mac.update(&hello);
    Ok(mac)
}

fn verify(secret: &[u8], role: &[u8], hello: &Hello, nonce: &[u8; 32], proof: &[u8; 32]) -> Result<(), HandshakeError> {
    // `verify_slice` compares in constant time.
    prove(secret, role, hello, nonce)?.verify_slice(proof).map_err(|_| HandshakeError::WrongSecret)
}

fn write_message(mut stream: &LinkStream, value: &impl Serialize, deadline: Instant) -> Result<(), HandshakeError> {
    let body = bincode::serde::encode_to_vec(value, config()).map_err(garbage)?;
    let length = u16::try_from(body.len()).map_err(garbage)?;
    let bytes = [&length.to_le_bytes(), &*body].concat();
    stream.socket().set_write_timeout(Some(remaining(deadline)?))?;
    stream.write_all(&bytes)?;
    Ok(stream.flush()?)
}

fn read_message<T: DeserializeOwned>(stream: &LinkStream, deadline: Instant) -> Result<T, HandshakeError> {
    let mut length = [0; 2];
    read_exact(stream, &mut length, deadline)?;
    let length = usize::from(u16::from_le_bytes(length));
    if length > MAX_MESSAGE_BYTES {
        return Err(HandshakeError::Garbage(format!("a message of {length} bytes, at most {MAX_MESSAGE_BYTES}")));
    }
    let mut body = vec![0; length];
    read_exact(stream, &mut body, deadline)?;
    let (value, used) = bincode::serde::decode_from_slice(&body, config()).map_err(garbage)?;
    if used != length {
        return Err(HandshakeError::Garbage(format!("{length} bytes where {used} were expected")));
    }
    Ok(value)
}

/// Reads all of `target` by `deadline`, however slowly the bytes trickle in.
fn read_exact(mut stream: &LinkStream, target: &mut [u8], deadline: Instant) -> Result<(), HandshakeError> {
    let mut filled = 0;
    while filled < target.len() {
        stream.socket().set_read_timeout(Some(remaining(deadline)?))?;
        match stream.read(&mut target[filled..]) {
            Ok(0) => return Err(std::io::Error::from(ErrorKind::UnexpectedEof).into()),
            Ok(bytes) => filled += bytes,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(silent().into()),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn remaining(deadline: Instant) -> Result<Duration, std::io::Error> {
    let rest = deadline.saturating_duration_since(Instant::now());
    if rest.is_zero() { Err(silent()) } else { Ok(rest) }
}

fn silent() -> std::io::Error {
    std::io::Error::new(ErrorKind::TimedOut, "it did not finish the handshake in time")
}

fn garbage(error: impl std::fmt::Display) -> HandshakeError {
    HandshakeError::Garbage(error.to_string())
}

fn config() -> impl bincode::config::Config {
    bincode::config::standard().with_fixed_int_encoding().with_limit::<MAX_MESSAGE_BYTES>()
}
