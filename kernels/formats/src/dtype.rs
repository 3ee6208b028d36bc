//! The types in which a device can hold keys and values.
//! For: `--dtype`, the planner (bytes of the cache) and the kernels. Invariant: bytes of an element are stated here alone.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::UnsupportedType;

/// Type of the keys and values of a rank, and of the factors of attention's products. Sums are f32 with every one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE half precision: 11 bits, up to 65504.
    #[default]
    F16,
    /// The upper half of an f32: 8 bits, the range of f32.
    Bf16,
    /// Single precision.
    F32,
}

impl Dtype {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::F16, Self::Bf16, Self::F32];

    /// Its name in settings and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }

    /// Bytes of an element.
    pub fn element_bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for Dtype {
    type Err = UnsupportedType;

    fn from_str(text: &str) -> Result<Self, UnsupportedType> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == text).ok_or_else(|| UnsupportedType(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back() {
        for dtype in Dtype::ALL {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
        }
        assert!("BF16".parse::<Dtype>().is_err() && "auto".parse::<Dtype>().is_err());
        assert_eq!(Dtype::ALL.map(Dtype::element_bytes), [2, 2, 4]);
    }
}
