//! Rows of activations in the forms that matmuls read, as `cuda/include/activations.cuh` lays them out.
//! For: the launchers that write activations (norm, attention, SwiGLU) and those that read them (matmul).
//! Invariant: the buffers of an [`Activations`] hold `max_tokens` rows of `columns` values in their form; buffers of
//! tiles start zeroed, because the columns past a row's end must read as zeros.

use std::sync::Arc;

use super::{DeviceBuffer, Gpu};
use crate::KernelError;

/// Columns of a tile of 8-bit activations.
pub const TILE_COLUMNS: usize = 256;
/// Bytes of a tile: `ActivationTile`.
const TILE_BYTES: usize = 320;

/// Type of 16-bit activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HalfType {
    /// IEEE half precision.
    F16,
    /// The upper half of an f32.
    BF16,
}

/// Forms in which activations are wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Forms {
    /// As 8-bit tiles.
    pub tiles: bool,
    /// As 16-bit values.
    pub halves: Option<HalfType>,
    /// As f32.
    pub values: bool,
}

impl Forms {
    /// These and the other ones. Of two 16-bit types the other one counts.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            tiles: self.tiles || other.tiles,
            halves: other.halves.or(self.halves),
            values: self.values || other.values,
        }
    }
}

/// Rows of activations in one or several forms.
#[derive(Clone, Debug, PartialEq)]
pub struct Activations {
    /// Values of a row; a multiple of 32 if there are tiles.
    pub columns: usize,
    /// `[max_tokens, ceil(columns / 256)]` tiles.
    pub tiles: Option<Arc<DeviceBuffer>>,
    /// `[max_tokens, columns]` of this type.
    pub halves: Option<(HalfType, Arc<DeviceBuffer>)>,
    /// `[max_tokens, columns]` f32.
    pub values: Option<Arc<DeviceBuffer>>,
}

impl Activations {
    /// Zeroed rows in these forms.
    ///
    /// # Errors
    /// [`KernelError::Device`] if memory is short.
    pub fn zeroed(gpu: &Arc<Gpu>, max_tokens: usize, columns: usize, forms: Forms) -> Result<Self, KernelError> {
        let rows = |is_wanted: bool, row_bytes: usize| {
            is_wanted.then(|| DeviceBuffer::zeroed(gpu, max_tokens * row_bytes).map(Arc::new)).transpose()
        };
        let halves = rows(forms.halves.is_some(), columns * size_of::<u16>())?;
        Ok(Self {
            columns,
            tiles: rows(forms.tiles, tile_row_bytes(columns))?,
            halves: forms.halves.zip(halves),
            values: rows(forms.values, columns * size_of::<f32>())?,
        })
    }

    /// Refuses buffers that hold fewer rows.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    pub fn expect_tokens(&self, operation: &'static str, num_tokens: usize) -> Result<(), KernelError> {
        let halves = self.halves.as_ref().map(|(_, halves)| halves);
        for (buffer, what, row_bytes) in [
            (self.tiles.as_ref(), "bytes of the tiles", tile_row_bytes(self.columns)),
            (halves, "bytes of the halves", self.columns * size_of::<u16>()),
            (self.values.as_ref(), "bytes of the values", self.columns * size_of::<f32>()),
        ] {
            buffer
                .map_or(Ok(()), |buffer| buffer.expect_bytes(operation, what, num_tokens.saturating_mul(row_bytes)))?;
        }
        Ok(())
    }

    /// The structure `Activations` that kernels take by value: pass it as [`Argument::Struct`](super::Argument) of
    /// `bytemuck::bytes_of`.
    pub fn argument(&self) -> [u64; 4] {
        let address = |buffer: Option<&Arc<DeviceBuffer>>| buffer.map_or(0, |buffer| buffer.pointer().0);
        let (half_type, halves) = self.halves.as_ref().map(|(half_type, buffer)| (half_type, buffer)).unzip();
        let is_bfloat = u64::from(half_type == Some(&HalfType::BF16));
        [
            address(self.tiles.as_ref()),
            address(halves),
            address(self.values.as_ref()),
            self.columns as u64 | is_bfloat << 32,
        ]
    }
}

/// Bytes of a token's tiles.
pub(super) fn tile_row_bytes(columns: usize) -> usize {
    columns.div_ceil(TILE_COLUMNS) * TILE_BYTES
}
