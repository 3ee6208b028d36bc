//! Sizes as people write them.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Bytes of a text such as `1500000`, `512MiB`, `16GiB` or `80GB`.
///
/// # Errors
/// What is expected.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 9] = [
        ("TiB", 1 << 40),
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
        ("TB", 1_000_000_000_000),
        ("GB", 1_000_000_000),
        ("MB", 1_000_000),
        ("KB", 1_000),
        ("B", 1),
    ];
    let wrong =
        || format!("{text:?} is not a size: expected bytes or a number with KiB, MiB, GiB, TiB, KB, MB, GB, TB");
    let (number, unit) = UNITS
        .iter()
        .find_map(|(name, unit)| text.strip_suffix(name).map(|number| (number.trim(), *unit)))
        .unwrap_or((text, 1));
    let value: f64 = number.parse().map_err(|_| wrong())?;
    let bytes = value * unit as f64;
    if !(0.0..1e18).contains(&bytes) {
        return Err(wrong());
    }
    Ok(bytes as u64)
}

/// A number of bytes in a settings file: a text with a unit, or a number.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(try_from = "WrittenSize")]
pub struct ByteSize(pub u64);

#[derive(Deserialize)]
#[serde(untagged)]
enum WrittenSize {
    Number(u64),
    Text(String),
}

impl TryFrom<WrittenSize> for ByteSize {
    type Error = String;

    fn try_from(written: WrittenSize) -> Result<Self, String> {
        match written {
            WrittenSize::Number(bytes) => Ok(Self(bytes)),
            WrittenSize::Text(text) => text.parse(),
        }
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse_bytes(text).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        assert_eq!(parse_bytes("512MiB"), Ok(512 << 20));
        assert_eq!(parse_bytes("1.5 GiB"), Ok(3 << 29));
        assert_eq!(parse_bytes("80GB"), Ok(80_000_000_000));
        assert_eq!(parse_bytes("7"), Ok(7));
        for wrong in ["", "GiB", "-1", "1 PiB", "nan", "inf"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
    }
}
