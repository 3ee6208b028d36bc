//! What a checkpoint says: its hyper-parameters, tensors, tokenizer and chat template.
//!
//! - [`checkpoint`]: opens a GGUF file or a safetensors folder behind one type; reads slices by position.
//! - [`gguf`], [`safetensors`]: the formats. [`tensor_names`]: which tensors a decoder has and what they are called.
//! - [`config`]: hyper-parameters in the words of `config.json`. [`rope`]: rotary frequencies under every scaling.
//! - [`tokenizer`], [`chat_template`]: text to token ids and back, incrementally.
//! - [`source`]: fetching a checkpoint (`hf://`, URLs, clouds); `remote_file`: reading one where it lies. [`synth`]: random checkpoints of any shape.
//!
//! For WebAssembly all but [`source`], `remote_file` and [`synth`] is there; a page opens bytes of its own.
//!
//! Invariants: nothing is allocated from a length in a file before it is checked against the file's size;
//! an error names the file and the field or tensor; no weight is read that was not asked for.

#![forbid(unsafe_code)]

pub mod chat_template;
pub mod checkpoint;
pub mod config;
pub mod error;
pub mod gguf;
pub mod positioned_file;
#[cfg(not(target_family = "wasm"))]
mod remote_file;
pub mod rope;
pub mod safetensors;
#[cfg(not(target_family = "wasm"))]
pub mod source;
#[cfg(not(target_family = "wasm"))]
pub mod synth;
pub mod tensor_names;
mod text_source;
pub mod tokenizer;

pub use chat_template::{ChatMessage, ChatTemplate};
pub use checkpoint::Checkpoint;
pub use config::{ModelConfig, RopeConfig, RopeStyle};
pub use error::ModelError;
pub use tokenizer::{IncrementalDecoder, Tokenizer, TokenizerConfig};
