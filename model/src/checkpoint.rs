//! One type for every kind of checkpoint.

use std::{ops::Range, path::Path};

use lockstep_sharding::{ModelShape, TensorRole};

use crate::{ModelConfig, ModelError, Tokenizer};

/// An open checkpoint: header parsed and checked, weights read by position when asked for.
pub struct Checkpoint {}

impl Checkpoint {
    /// Opens a GGUF file, a safetensors file, or a folder with `config.json` and safetensors.
    ///
    /// # Errors
    /// [`ModelError`] naming the field that is wrong.
    pub fn open(_path: &Path) -> Result<Self, ModelError> {
        todo!()
    }

    /// Hyper-parameters.
    pub fn config(&self) -> &ModelConfig {
        todo!()
    }

    /// Dimensions and tensors, for the planner.
    pub fn shape(&self) -> &ModelShape {
        todo!()
    }

    /// The blocks of a rectangle of a tensor, row by row, as stored.
    ///
    /// # Errors
    /// [`ModelError::Io`] if the file shrank or fails; [`ModelError::Invalid`] if the rectangle lies outside the tensor
    /// or its columns not on block borders.
    pub fn read_slice(
        &self,
        _role: TensorRole,
        _layer: Option<usize>,
        _rows: Range<usize>,
        _columns: Range<usize>,
    ) -> Result<Vec<u8>, ModelError> {
        todo!()
    }

    /// The tokenizer that the checkpoint describes.
    ///
    /// # Errors
    /// [`ModelError`] naming the metadata that is missing or unknown.
    pub fn tokenizer(&self) -> Result<Tokenizer, ModelError> {
        todo!()
    }

    /// The Jinja source of the chat template, if there is one.
    pub fn chat_template(&self) -> Option<&str> {
        todo!()
    }
}
