//! What joins the GPUs of a host. For: workers, which find it out, and the planner, which knows how fast it is.
//! Invariant: from the fastest to the slowest, so the slowest of a group is its maximum.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::UnsupportedType;

/// A kind of link between GPUs of one host, over which they exchange values without their processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PeerLink {
    /// NVLink: GPUs reach each other's memory as their own, atomics included.
    Nvlink,
    /// PCI Express, be it through the host's memory.
    Pcie,
}

impl PeerLink {
    /// Every one.
    pub const ALL: [Self; 2] = [Self::Nvlink, Self::Pcie];

    /// Its name in registrations.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nvlink => "nvlink",
            Self::Pcie => "pcie",
        }
    }
}

impl fmt::Display for PeerLink {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for PeerLink {
    type Err = UnsupportedType;

    fn from_str(text: &str) -> Result<Self, UnsupportedType> {
        Self::ALL.into_iter().find(|link| link.name() == text).ok_or_else(|| UnsupportedType(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back() {
        for link in PeerLink::ALL {
            assert_eq!(link.to_string().parse(), Ok(link));
        }
        assert!("tcp".parse::<PeerLink>().is_err() && PeerLink::Nvlink < PeerLink::Pcie);
    }
}
