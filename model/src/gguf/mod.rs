//! GGUF files, versions 2 and 3, little-endian: header, metadata, tensor directory; and a writer of the same.
//! For: [`crate::Checkpoint`] and the tokenizer read them, [`crate::synth`] and tests write them.
//! Invariant: a [`GgufFile`] that opened has every tensor inside the file, aligned, apart from all others and of whole blocks.
//! Not here: what the keys of an architecture mean ([`crate::config`]).

mod metadata;
mod reader;
mod writer;

use std::path::Path;

use lockstep_formats::GgmlType;

pub use metadata::{FromMetadata, Metadata, MetadataArray, MetadataValue};
pub use writer::{GgufWriter, TensorEntry, write_file};

use crate::{ModelError, positioned_file::PositionedFile};

/// First four bytes of every GGUF file.
pub const MAGIC: [u8; 4] = *b"GGUF";

/// Alignment of tensor data where `general.alignment` does not say otherwise.
pub const DEFAULT_ALIGNMENT: u64 = 32;

/// One entry of the tensor directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name.
    pub name: String,
    /// 1 to 4 dimensions, the row length first.
    pub dimensions: Vec<usize>,
    /// Element type.
    pub ggml_type: GgmlType,
    /// Position of the first byte in the file.
    pub offset: u64,
    /// Size.
    pub num_bytes: u64,
}

impl TensorInfo {
    /// Product of all dimensions but the first.
    pub fn rows(&self) -> usize {
        self.dimensions.iter().skip(1).product()
    }

    /// Elements of a row.
    pub fn columns(&self) -> usize {
        self.dimensions.first().copied().unwrap_or(0)
    }
}

/// A GGUF file whose directory was parsed and checked.
#[derive(Debug)]
pub struct GgufFile {
    /// The file, for reading tensor data.
    pub file: PositionedFile,
    /// Version, 2 or 3.
    pub version: u32,
    /// Every key and value.
    pub metadata: Metadata,
    /// Tensors in the order of the directory.
    pub tensors: Vec<TensorInfo>,
}

impl GgufFile {
    /// Opens a file and parses everything but the tensor data.
    ///
    /// # Errors
    /// [`ModelError`] naming the header field, metadata key or tensor that is wrong.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        Self::read(PositionedFile::open(path)?)
    }

    /// Parses everything of an open file but the tensor data.
    ///
    /// # Errors
    /// [`ModelError`] naming the header field, metadata key or tensor that is wrong.
    pub fn read(file: PositionedFile) -> Result<Self, ModelError> {
        reader::read(file)
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}
