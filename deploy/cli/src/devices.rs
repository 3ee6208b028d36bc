//! `--device` and `--dtype` of the commands that run ranks or start workers.
//! Not here: the same two settings of `worker`, which come from its settings file too.

use lockstep_sharding::Dtype;
use lockstep_worker::devices::DeviceSelection;

use crate::UsageError;

/// Which devices, and what they hold.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct DeviceArgs {
    /// Devices of the ranks: auto (GPUs if there are enough that CUDA, Metal, Vulkan or DX12 reach, else the processor),
    /// cpu, webgpu:auto, or names such as cuda:0,cuda:1, vulkan:0, metal:0 [default: auto]
    #[arg(long, env = "LOCKSTEP_DEVICE", value_name = "DEVICES")]
    pub device: Option<String>,
    /// Type in which keys and values are held and attention multiplies: auto (bf16 for BF16 checkpoints, else f16), f16,
    /// bf16, or, on the processor, f32 [default: auto]
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
