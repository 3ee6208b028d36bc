//! What can be wrong with a checkpoint.

use std::path::PathBuf;

/// A checkpoint that cannot be used, by file and field.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file cannot be opened or read.
    #[error("{path}: {what}: {source}")]
    Io {
        /// File.
        path: PathBuf,
        /// What was being read.
        what: String,
        /// Cause.
        source: std::io::Error,
    },
    /// A field or tensor is missing, damaged or disagrees with another.
    #[error("{path}: {field}: {problem}")]
    Invalid {
        /// File.
        path: PathBuf,
        /// Metadata key, header field or tensor name.
        field: String,
        /// What is wrong, expected and got.
        problem: String,
    },
    /// Sound, but not something this project can run.
    #[error("{path}: {field} {value:?} is not supported")]
    Unsupported {
        /// File.
        path: PathBuf,
        /// Metadata key, header field or tensor name.
        field: String,
        /// Its value.
        value: String,
    },
    /// The tokenizer cannot be built or used.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The chat template does not parse or cannot render these messages.
    #[error("chat template: {0}")]
    ChatTemplate(String),
}
