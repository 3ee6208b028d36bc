//! A JSON object of a file, with getters whose errors name the file and the key.
//! For: `config.json` and its companions.
//! Invariant: `null` counts as absent, as it does for the library that writes these files.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::{ModelError, positioned_file::PositionedFile};

/// Largest file beside the weights: tokenizers take tens of megabytes.
const MAX_BYTES: u64 = 256 << 20;

/// An object, and where it stands.
#[derive(Clone, Debug)]
pub(super) struct JsonObject {
    path: PathBuf,
    /// Keys that lead to this object, each with a dot behind it.
    prefix: String,
    values: Map<String, Value>,
}

/// All bytes of a file; more than a tokenizer takes are refused before memory is asked for.
pub(super) fn read_whole(path: &Path) -> Result<Vec<u8>, ModelError> {
    let file = PositionedFile::open(path)?;
    let num_bytes = file.num_bytes();
    if num_bytes > MAX_BYTES {
        let problem = format!("expected at most {MAX_BYTES} bytes, the file has {num_bytes}");
        return Err(ModelError::Invalid { path: path.to_owned(), field: "size".into(), problem });
    }
    let mut bytes = vec![0; num_bytes as usize];
    file.read_exact_at(&mut bytes, 0, "the whole file")?;
    Ok(bytes)
}

impl JsonObject {
    /// Parses a file that holds one object.
    pub(super) fn read(path: &Path) -> Result<Self, ModelError> {
        let values = serde_json::from_slice(&read_whole(path)?).map_err(|error| ModelError::Invalid {
            path: path.to_owned(),
            field: "json".into(),
            problem: error.to_string(),
        })?;
        Ok(Self { path: path.to_owned(), prefix: String::new(), values })
    }

    /// The same for a file that may be absent, which then counts as an empty object.
    pub(super) fn read_if_there(path: &Path) -> Result<Self, ModelError> {
        if path.exists() {
            return Self::read(path);
        }
        Ok(Self { path: path.to_owned(), prefix: String::new(), values: Map::new() })
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &String> {
        self.values.keys()
    }

    /// The value of a key; `None` if absent or null.
    pub(super) fn value(&self, key: &str) -> Option<&Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    /// The converted value of a key; `None` if absent or null.
    pub(super) fn get<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, ModelError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        T::deserialize(value).map(Some).map_err(|error| self.invalid(key, error.to_string()))
    }

    /// The converted value of a key that must be there.
    pub(super) fn require<T: DeserializeOwned>(&self, key: &str) -> Result<T, ModelError> {
        self.get(key)?.ok_or_else(|| self.invalid(key, "missing"))
    }

    /// The object under a key; `None` if absent or null.
    pub(super) fn object(&self, key: &str) -> Result<Option<Self>, ModelError> {
        let prefix = format!("{}{key}.", self.prefix);
        Ok(self.get(key)?.map(|values| Self { path: self.path.clone(), prefix, values }))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn invalid(&self, key: &str, problem: impl Into<String>) -> ModelError {
        let field = format!("{}{key}", self.prefix);
        ModelError::Invalid { path: self.path.clone(), field, problem: problem.into() }
    }

    pub(super) fn unsupported(&self, key: &str, value: impl Into<String>) -> ModelError {
        let field = format!("{}{key}", self.prefix);
        ModelError::Unsupported { path: self.path.clone(), field, value: value.into() }
    }
}
