//! Names of GPUs that are reached through Vulkan, Metal or DX12: `vulkan:0`.
//! For: settings, which name devices whether or not this build can open them.
//! Invariant: numbers count the adapters of one backend in the order in which the system shows them.
//! Not here: what adapters there are (`webgpu::adapter`).

use std::{fmt, str::FromStr};

/// An interface to GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backend {
    /// Vulkan.
    Vulkan,
    /// Apple's Metal.
    Metal,
    /// Direct3D 12.
    Dx12,
}

impl Backend {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::Vulkan, Self::Metal, Self::Dx12];

    /// Its name in settings and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vulkan => "vulkan",
            Self::Metal => "metal",
            Self::Dx12 => "dx12",
        }
    }
}

/// An adapter: `vulkan:0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AdapterId {
    /// Its backend.
    pub backend: Backend,
    /// Its number among those of the backend.
    pub ordinal: usize,
}

impl fmt::Display for AdapterId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.backend.name(), self.ordinal)
    }
}

impl FromStr for AdapterId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (name, ordinal) = text.split_once(':').ok_or(())?;
        let backend = Backend::ALL.into_iter().find(|backend| backend.name() == name).ok_or(())?;
        Ok(Self { backend, ordinal: ordinal.parse().map_err(|_| ())? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back() {
        for text in ["vulkan:0", "metal:1", "dx12:12"] {
            assert_eq!(text.parse::<AdapterId>().map(|id| id.to_string()), Ok(text.to_owned()));
        }
        for wrong in ["vulkan", "vulkan:", "vulkan:x", "opengl:0", "webgpu:auto"] {
            assert!(wrong.parse::<AdapterId>().is_err(), "{wrong}");
        }
    }
}
