//! GGUF element types: the ids, names and block sizes of the tensors that a checkpoint stores; types of KV caches; kinds of links
//! between GPUs.
//! For: readers and writers of checkpoints, the planner (bytes, split borders) and the kernels.
//! Invariant: a tensor row is a whole number of blocks; nothing else about a type is stated here.
//! Not here: what the bits of a block mean (`lockstep_kernels::quant`).

mod dtype;
mod peer_link;

use serde::{Deserialize, Serialize};

pub use self::{dtype::Dtype, peer_link::PeerLink};

/// An element type of the GGUF specification (`ggml_type`), by its standard name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(non_camel_case_types, missing_docs, reason = "the names are GGUF's own and explain themselves")]
pub enum GgmlType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_K,
}

/// A type id or name that this project does not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unsupported element type {0}")]
pub struct UnsupportedType(pub String);

/// `(type, GGUF id, elements in a block, bytes of a block)`, after the GGUF specification and ggml's `ggml-common.h`.
const TABLE: [(GgmlType, u32, usize, usize, &str); 15] = [
    (GgmlType::F32, 0, 1, 4, "F32"),
    (GgmlType::F16, 1, 1, 2, "F16"),
    (GgmlType::Q4_0, 2, 32, 18, "Q4_0"),
    (GgmlType::Q4_1, 3, 32, 20, "Q4_1"),
    (GgmlType::Q5_0, 6, 32, 22, "Q5_0"),
    (GgmlType::Q5_1, 7, 32, 24, "Q5_1"),
    (GgmlType::Q8_0, 8, 32, 34, "Q8_0"),
    (GgmlType::Q8_1, 9, 32, 36, "Q8_1"),
    (GgmlType::Q2_K, 10, 256, 84, "Q2_K"),
    (GgmlType::Q3_K, 11, 256, 110, "Q3_K"),
    (GgmlType::Q4_K, 12, 256, 144, "Q4_K"),
    (GgmlType::Q5_K, 13, 256, 176, "Q5_K"),
    (GgmlType::Q6_K, 14, 256, 210, "Q6_K"),
    (GgmlType::Q8_K, 15, 256, 292, "Q8_K"),
    (GgmlType::BF16, 30, 1, 2, "BF16"),
];

impl GgmlType {
    /// Every supported type, in the order of its GGUF id.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|entry| entry.0)
    }

    fn entry(self) -> &'static (Self, u32, usize, usize, &'static str) {
        TABLE.iter().find(|entry| entry.0 == self).unwrap_or(&TABLE[0])
    }

    /// The id that a GGUF file stores.
    pub fn id(self) -> u32 {
        self.entry().1
    }

    /// Elements in one block: 1, 32 or 256. Splits along a row fall on multiples of it.
    pub fn block_elements(self) -> usize {
        self.entry().2
    }

    /// Columns of a row-parallel matrix whose products are summed in f32, before these sums are added in f64. Cuts
    /// between ranks fall on multiples of it, and so change no bit of a result.
    pub fn sum_columns(self) -> usize {
        self.block_elements().max(64)
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        self.entry().3
    }

    /// The standard name, such as `Q4_K`.
    pub fn name(self) -> &'static str {
        self.entry().4
    }

    /// Bytes of `elements` elements, or `None` if they are no whole number of blocks or the size overflows.
    pub fn bytes_of(self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.block_elements()) {
            return None;
        }
        (elements / self.block_elements()).checked_mul(self.block_bytes())
    }
}

impl TryFrom<u32> for GgmlType {
    type Error = UnsupportedType;

    fn try_from(id: u32) -> Result<Self, Self::Error> {
        TABLE.iter().find(|entry| entry.1 == id).map(|entry| entry.0).ok_or_else(|| UnsupportedType(id.to_string()))
    }
}

impl std::str::FromStr for GgmlType {
    type Err = UnsupportedType;

    /// Accepts the standard name in any case: `q4_k`, `Q4_K`.
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        TABLE
            .iter()
            .find(|entry| entry.4.eq_ignore_ascii_case(name))
            .map(|entry| entry.0)
            .ok_or_else(|| UnsupportedType(name.to_owned()))
    }
}

impl std::fmt::Display for GgmlType {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_found_by_id_and_name() {
        assert_eq!(GgmlType::all().count(), TABLE.len());
        for ggml_type in GgmlType::all() {
            assert_eq!(GgmlType::try_from(ggml_type.id()), Ok(ggml_type));
            assert_eq!(ggml_type.name().to_lowercase().parse(), Ok(ggml_type));
        }
        assert!(GgmlType::try_from(16).is_err());
        assert_eq!(GgmlType::Q4_K.bytes_of(512), Some(288));
        assert_eq!(GgmlType::Q4_K.bytes_of(100), None);
    }
}
