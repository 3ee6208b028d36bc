//! The structures of `cuda/include/layer.cuh` and `activations.cuh`, as kernels take them by value.
//! For: the launchers of this module. Invariant: a launch has at most [`MAX_PARTS`] parts, all quantized or all of one
//! type that is not.

use std::sync::Arc;

use lockstep_formats::GgmlType;

use super::{
    layout::{GROUP_ROWS, Layout},
    linear::{CudaLinear, Format, Part},
};
use crate::{
    KernelError,
    cuda::{Activations, DeviceBuffer, DevicePointer, HalfType, activations::tile_row_bytes},
    ops::matmul::shape,
};

/// Parts of a launch.
pub(super) const MAX_PARTS: usize = 4;

/// Activations from some token on.
#[derive(Clone, Copy, Debug)]
pub(super) struct ActivationView {
    pub(super) tiles: DevicePointer,
    pub(super) halves: DevicePointer,
    pub(super) half_type: Option<HalfType>,
    pub(super) values: DevicePointer,
    pub(super) columns: usize,
}

impl ActivationView {
    /// All tokens; forms that are missing are null.
    pub(super) fn of(activations: &Activations) -> Self {
        let Activations { columns, tiles, halves, values } = activations;
        let pointer = |buffer: Option<&Arc<DeviceBuffer>>| buffer.map_or(DevicePointer(0), |buffer| buffer.pointer());
        Self {
            tiles: pointer(tiles.as_ref()),
            halves: pointer(halves.as_ref().map(|(_, buffer)| buffer)),
            half_type: halves.as_ref().map(|(half_type, _)| *half_type),
            values: pointer(values.as_ref()),
            columns: *columns,
        }
    }

    /// f32 `[num_tokens, columns]`.
    pub(super) fn of_values(values: DevicePointer, columns: usize) -> Self {
        Self { tiles: DevicePointer(0), halves: DevicePointer(0), half_type: None, values, columns }
    }

    /// Without the first tokens.
    pub(super) fn skip_tokens(self, num_tokens: usize) -> Self {
        let skip = |pointer: DevicePointer, row_bytes: usize| {
            if pointer.0 == 0 { pointer } else { pointer.offset_bytes(num_tokens * row_bytes) }
        };
        let columns = self.columns;
        Self {
            tiles: skip(self.tiles, tile_row_bytes(columns)),
            halves: skip(self.halves, columns * size_of::<u16>()),
            values: skip(self.values, columns * size_of::<f32>()),
            ..self
        }
    }

    /// The structure `Activations`.
    pub(super) fn argument(self) -> [u64; 4] {
        let is_bfloat = u64::from(self.half_type == Some(HalfType::BF16));
        [self.tiles.0, self.halves.0, self.values.0, self.columns as u64 | is_bfloat << 32]
    }
}

/// Rows of one format.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartView {
    pub(super) format: Format,
    data: DevicePointer,
    pub(super) rows: usize,
    /// Its first row in the output of the layer.
    pub(super) first_row: usize,
}

/// The parts of one launch: all quantized, or all of one type that is not.
#[derive(Clone, Debug)]
pub(super) struct LayerView {
    parts: Vec<PartView>,
    num_tiles: usize,
}

impl LayerView {
    /// All parts in as few launches as can be.
    pub(super) fn all(weight: &CudaLinear) -> Vec<Self> {
        let mut layers: Vec<Self> = Vec::new();
        for part in weight.parts.iter().map(PartView::of) {
            match layers.iter_mut().find(|layer| layer.parts.len() < MAX_PARTS && layer.takes(&part)) {
                Some(layer) => layer.parts.push(part),
                None => layers.push(Self { parts: vec![part], num_tiles: weight.num_tiles() }),
            }
        }
        layers
    }

    /// One part without data.
    #[cfg(test)]
    pub(super) fn of_layout(layout: Layout, rows: usize, columns: usize) -> Self {
        let part = PartView { format: Format::Tiles(layout), data: DevicePointer(0), rows, first_row: 0 };
        Self { parts: vec![part], num_tiles: columns.div_ceil(super::layout::TILE_COLUMNS) }
    }

    /// Each part in a launch of its own.
    pub(super) fn each(weight: &CudaLinear) -> Vec<Self> {
        let parts = weight.parts.iter().map(PartView::of);
        parts.map(|part| Self { parts: vec![part], num_tiles: weight.num_tiles() }).collect()
    }

    fn takes(&self, other: &PartView) -> bool {
        self.parts.iter().all(|part| part.format.goes_with(other.format))
    }

    /// Gate and up as two parts of equal height; `None` if the halves of the layer are not whole parts or groups of rows.
    pub(super) fn gate_and_up(weight: &CudaLinear) -> Option<Self> {
        let num_tiles = weight.num_tiles();
        let parts: Vec<PartView> = weight.parts.iter().map(PartView::of).collect();
        let parts = match parts[..] {
            [gate, up] if gate.rows == up.rows && gate.format.goes_with(up.format) => vec![gate, up],
            [both] if both.rows.is_multiple_of(2 * GROUP_ROWS) => {
                let rows = both.rows / 2;
                let gate = PartView { rows, ..both };
                let data = both.row(rows, num_tiles, weight.columns());
                vec![gate, PartView { data, first_row: rows, ..gate }]
            }
            _ => return None,
        };
        Some(Self { parts, num_tiles })
    }

    /// The parts.
    pub(super) fn parts(&self) -> &[PartView] {
        &self.parts
    }

    /// The type, if it is not a quantized one.
    pub(super) fn plain_type(&self) -> Option<GgmlType> {
        self.parts.iter().find_map(|part| match part.format {
            Format::Plain(plain) => Some(plain),
            Format::Tiles(_) => None,
        })
    }

    /// Tiles of a row.
    pub(super) fn num_tiles(&self) -> usize {
        self.num_tiles
    }

    /// Rows of all parts.
    pub(super) fn num_rows(&self) -> usize {
        self.parts.iter().map(|part| part.rows).sum()
    }

    /// Rows of the first part: the outputs of SwiGLU.
    pub(super) fn first_rows(&self) -> usize {
        self.parts.first().map_or(0, |part| part.rows)
    }

    fn layouts(&self) -> impl Iterator<Item = Layout> {
        self.parts.iter().filter_map(|part| match part.format {
            Format::Plain(_) => None,
            Format::Tiles(layout) => Some(layout),
        })
    }

    /// The layouts that occur, each once.
    fn distinct_layouts(&self) -> Vec<Layout> {
        let mut distinct = Vec::new();
        for layout in self.layouts() {
            if !distinct.contains(&layout) {
                distinct.push(layout);
            }
        }
        distinct
    }

    /// The option `FORMATS`.
    pub(super) fn formats(&self) -> String {
        let names: Vec<&str> = self.distinct_layouts().iter().map(|layout| layout.name).collect();
        format!("-DFORMATS={}", names.join(","))
    }

    /// Bytes of the largest tile.
    pub(super) fn max_tile_bytes(&self) -> usize {
        self.layouts().map(Layout::tile_bytes).max().unwrap_or(0)
    }

    /// Blocks that make `rows_each` rows each, of one part each.
    pub(super) fn num_units(&self, rows_each: usize) -> usize {
        self.parts.iter().map(|part| part.rows.div_ceil(rows_each)).sum()
    }

    /// The structure `Layer` for blocks of `rows_each` rows.
    pub(super) fn argument(&self, rows_each: usize) -> Result<[u64; 3 * MAX_PARTS + 1], KernelError> {
        let layouts = self.distinct_layouts();
        let mut words = [0; 3 * MAX_PARTS + 1];
        let mut first_unit = 0;
        for (part, words) in self.parts.iter().zip(words.as_chunks_mut::<3>().0) {
            let format = layouts.iter().position(|layout| part.format == Format::Tiles(*layout)).unwrap_or(0);
            *words = [part.data.0, pair(part.rows, part.first_row)?, pair(first_unit, format)?];
            first_unit += part.rows.div_ceil(rows_each);
        }
        words[3 * MAX_PARTS] = pair(self.parts.len(), self.num_tiles)?;
        Ok(words)
    }
}

impl PartView {
    fn of(part: &Part) -> Self {
        Self { format: part.format, data: part.pointer(), rows: part.rows, first_row: part.first_row }
    }

    /// Where a row begins; of tiles, a multiple of [`GROUP_ROWS`].
    pub(super) fn row(&self, row: usize, num_tiles: usize, columns: usize) -> DevicePointer {
        self.data.offset_bytes(match self.format {
            Format::Tiles(layout) => row / GROUP_ROWS * num_tiles * layout.tile_bytes(),
            Format::Plain(plain) => row * columns * plain.block_bytes(),
        })
    }
}

/// Two `uint32_t` side by side.
fn pair(first: usize, second: usize) -> Result<u64, KernelError> {
    let word = |value: usize| u32::try_from(value).map_err(|_| shape("rows or columns", value, u32::MAX as usize));
    Ok(u64::from(word(first)?) | u64::from(word(second)?) << 32)
}
