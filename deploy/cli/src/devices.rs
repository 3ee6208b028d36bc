//! `--device` and `--dtype` of the commands that run ranks or start workers.
//! Not here: how a worker makes ranks of them.

use lockstep_sharding::Dtype;
use lockstep_worker::devices::DeviceSelection;
use serde::{Deserialize, Serialize};

use crate::UsageError;

/// Which devices, and what they hold.
#[derive(Clone, Debug, Default, clap::Args, Deserialize, Serialize)]
pub struct DeviceArgs {
    /// Devices, one for each rank: auto (GPUs that CUDA, else Metal, Vulkan or DX12 reach, if there are enough for the ranks
    /// that are asked for, else the processor), cpu, webgpu:auto, or names such as cuda:0,cuda:1, vulkan:0, metal:0, dx12:0
    /// [default: auto]
    #[arg(long, env = "LOCKSTEP_DEVICE", value_name = "DEVICES")]
    pub device: Option<String>,
    /// Type in which keys and values are held and attention multiplies: auto (bf16 for BF16 checkpoints, else f16), f16,
    /// bf16, or, not on CUDA, f32. Sums are f32 with each; weights keep the types of the file [default: auto]
    #[arg(long, env = "LOCKSTEP_DTYPE", value_name = "TYPE")]
    pub dtype: Option<String>,
}

impl DeviceArgs {
    /// These where they are given, else `others`.
    pub fn or(self, others: Self) -> Self {
        Self { device: self.device.or(others.device), dtype: self.dtype.or(others.dtype) }
    }

    /// The devices; those that are not named are chosen.
    ///
    /// # Errors
    /// If there is no such kind.
    pub fn selection(&self) -> Result<DeviceSelection, UsageError> {
        self.device.as_deref().map_or(Ok(DeviceSelection::Auto), |text| {
            text.parse().map_err(|problem| UsageError(format!("device: {problem}")))
        })
    }

    /// The type; `None`: what suits the model.
    ///
    /// # Errors
    /// If there is no such type.
    pub fn dtype(&self) -> Result<Option<Dtype>, UsageError> {
        let named = self.dtype.as_deref().filter(|text| *text != "auto");
        let unknown = |text| UsageError(format!("dtype: {text:?} is none of auto, f16, bf16, f32"));
        named.map(|text| text.parse().map_err(|_| unknown(text))).transpose()
    }
}
