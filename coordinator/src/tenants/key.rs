//! API keys: 32 random bytes in hexadecimal behind [`PREFIX`], kept only as SHA-256.
//! A hash made slow on purpose guards what people choose; of 256 random bits none can be guessed, however fast it is.

use std::fmt;

use serde::{Deserialize, Deserializer, de::Error};
use sha2::{Digest, Sha256};

/// How our keys begin, so that a leaked one is recognised.
pub const PREFIX: &str = "lockstep-";

/// SHA-256 of a key's text.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyHash(pub [u8; 32]);

impl KeyHash {
    /// Of the key that a client sends.
    pub fn of(key: &[u8]) -> Self {
        Self(Sha256::digest(key).into())
    }
}

impl fmt::Display for KeyHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&hexadecimal(&self.0))
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl<'de> Deserialize<'de> for KeyHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let problem = || D::Error::custom("expected 64 hexadecimal digits");
        let digits: Vec<u8> = text
            .chars()
            .map(|digit| digit.to_digit(16).map(|digit| digit as u8))
            .collect::<Option<_>>()
            .ok_or_else(problem)?;
        let bytes: Vec<u8> =
            digits.chunks(2).map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit)).collect();
        let is_whole = digits.len() == 64;
        bytes.try_into().ok().filter(|_| is_whole).map(Self).ok_or_else(problem)
    }
}

/// A new key. It is in nobody's file: whoever makes it shows it once.
///
/// # Errors
/// If the operating system has no randomness.
pub fn generate() -> Result<String, rand::rand_core::OsError> {
    use rand::TryRngCore;
    let mut bytes = [0; 32];
    rand::rngs::OsRng.try_fill_bytes(&mut bytes)?;
    Ok(format!("{PREFIX}{}", hexadecimal(&bytes)))
}

/// The key in an `authorization` of the scheme Bearer.
pub fn of_bearer(authorization: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = authorization.split_at_checked(7)?;
    let key = key.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !key.is_empty()).then_some(key)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_and_hashes_survive_the_file() {
        let (first, second) = (generate().unwrap(), generate().unwrap());
        assert_eq!((first.len(), first.starts_with(PREFIX)), (PREFIX.len() + 64, true));
        assert_ne!(first, second);
        let hash = KeyHash::of(first.as_bytes());
        let read: KeyHash = serde_json::from_str(&format!("\"{hash}\"")).unwrap();
        assert_eq!(read, hash);
        // FIPS 180-2, appendix B.1.
        let known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(KeyHash::of(b"abc").to_string(), known);
        for wrong in ["", "12", &known[1..], &known.replace('b', "g"), &format!("{known}00")] {
            assert!(serde_json::from_str::<KeyHash>(&format!("\"{wrong}\"")).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_bearer_is_read_in_any_case() {
        for (value, key) in [
            ("Bearer k", Some("k")),
            ("bearer  k ", Some("k")),
            ("BEARER k", Some("k")),
            ("Basic k", None),
            ("Bearer ", None),
            ("k", None),
            ("", None),
        ] {
            assert_eq!(of_bearer(value.as_bytes()), key.map(str::as_bytes), "{value}");
        }
    }
}
