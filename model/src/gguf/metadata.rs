//! Keys and values of a GGUF file with typed access.
//! For: configuration, tokenizer and chat template.
//! Invariant: a getter's error names the key, the type it wanted and the type it found.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use crate::ModelError;

/// A value of one of the 13 GGUF types.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names are GGUF's own")]
pub enum MetadataValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(MetadataArray),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array of one element type.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names are GGUF's own")]
pub enum MetadataArray {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<String>),
    Array(Vec<MetadataArray>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

impl MetadataValue {
    /// Name of the type, as the specification has it.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::U8(_) => "uint8",
            Self::I8(_) => "int8",
            Self::U16(_) => "uint16",
            Self::I16(_) => "int16",
            Self::U32(_) => "uint32",
            Self::I32(_) => "int32",
            Self::F32(_) => "float32",
            Self::Bool(_) => "bool",
            Self::String(_) => "string",
            Self::Array(array) => array.type_name(),
            Self::U64(_) => "uint64",
            Self::I64(_) => "int64",
            Self::F64(_) => "float64",
        }
    }

    /// The value as an integer, if it is one and not negative.
    fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(value) => Some(value.into()),
            Self::U16(value) => Some(value.into()),
            Self::U32(value) => Some(value.into()),
            Self::U64(value) => Some(value),
            Self::I8(value) => value.try_into().ok(),
            Self::I16(value) => value.try_into().ok(),
            Self::I32(value) => value.try_into().ok(),
            Self::I64(value) => value.try_into().ok(),
            _ => None,
        }
    }
}

impl MetadataArray {
    /// Name of the type.
    fn type_name(&self) -> &'static str {
        match self {
            Self::U8(_) => "array of uint8",
            Self::I8(_) => "array of int8",
            Self::U16(_) => "array of uint16",
            Self::I16(_) => "array of int16",
            Self::U32(_) => "array of uint32",
            Self::I32(_) => "array of int32",
            Self::F32(_) => "array of float32",
            Self::Bool(_) => "array of bool",
            Self::String(_) => "array of string",
            Self::Array(_) => "array of array",
            Self::U64(_) => "array of uint64",
            Self::I64(_) => "array of int64",
            Self::F64(_) => "array of float64",
        }
    }
}

/// Every key and value of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Metadata {
    path: PathBuf,
    values: BTreeMap<String, MetadataValue>,
}

impl Metadata {
    /// No keys yet; `path` stands in errors.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), values: BTreeMap::new() }
    }

    /// File that errors name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sets a key and returns its former value.
    pub fn insert(&mut self, key: impl Into<String>, value: MetadataValue) -> Option<MetadataValue> {
        self.values.insert(key.into(), value)
    }

    /// Keys and values, sorted by key.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &MetadataValue)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The value of a key as it is stored.
    pub fn value(&self, key: &str) -> Option<&MetadataValue> {
        self.values.get(key)
    }

    /// The value of a key, or `None` if the file has no such key.
    ///
    /// # Errors
    /// [`ModelError::Invalid`] if it is there with another type or out of range.
    pub fn get<'a, T: FromMetadata<'a>>(&'a self, key: &str) -> Result<Option<T>, ModelError> {
        let Some(value) = self.values.get(key) else { return Ok(None) };
        match T::from_metadata(value) {
            Some(converted) => Ok(Some(converted)),
            None => Err(self.invalid(key, format!("expected {}, got {}", T::EXPECTED, describe(value)))),
        }
    }

    /// The value of a key that must be there.
    ///
    /// # Errors
    /// [`ModelError::Invalid`] if it is missing, of another type or out of range.
    pub fn require<'a, T: FromMetadata<'a>>(&'a self, key: &str) -> Result<T, ModelError> {
        self.get(key)?.ok_or_else(|| self.invalid(key, format!("missing, expected {}", T::EXPECTED)))
    }

    /// An error about a key of this file.
    pub fn invalid(&self, key: &str, problem: impl Into<String>) -> ModelError {
        ModelError::Invalid { path: self.path.clone(), field: key.to_owned(), problem: problem.into() }
    }

    /// An error about a key of this file whose value is sound, but not something this project can run.
    pub fn unsupported(&self, key: &str, value: impl Into<String>) -> ModelError {
        ModelError::Unsupported { path: self.path.clone(), field: key.to_owned(), value: value.into() }
    }
}

fn describe(value: &MetadataValue) -> String {
    match value {
        MetadataValue::I8(value) => format!("int8 {value}"),
        MetadataValue::I16(value) => format!("int16 {value}"),
        MetadataValue::I32(value) => format!("int32 {value}"),
        MetadataValue::I64(value) => format!("int64 {value}"),
        MetadataValue::U32(value) => format!("uint32 {value}"),
        MetadataValue::U64(value) => format!("uint64 {value}"),
        MetadataValue::F32(value) => format!("float32 {value}"),
        MetadataValue::F64(value) => format!("float64 {value}"),
        other => other.type_name().to_owned(),
    }
}

/// A Rust type that metadata values convert to without loss.
pub trait FromMetadata<'a>: Sized {
    /// What errors say was wanted.
    const EXPECTED: &'static str;

    /// The converted value, or `None` if the stored type or range does not fit.
    fn from_metadata(value: &'a MetadataValue) -> Option<Self>;
}

macro_rules! from_metadata {
    ($target:ty, $expected:literal, $value:pat => $result:expr) => {
        #[allow(unreachable_patterns, reason = "integer conversions take every value")]
        impl<'a> FromMetadata<'a> for $target {
            const EXPECTED: &'static str = $expected;

            fn from_metadata(value: &'a MetadataValue) -> Option<Self> {
                match value {
                    $value => $result,
                    _ => None,
                }
            }
        }
    };
}

from_metadata!(u64, "an unsigned integer", value => value.as_u64());
from_metadata!(usize, "an unsigned integer", value => value.as_u64().and_then(|value| value.try_into().ok()));
from_metadata!(u32, "an unsigned 32-bit integer", value => value.as_u64().and_then(|value| value.try_into().ok()));
from_metadata!(bool, "bool", MetadataValue::Bool(value) => Some(*value));
from_metadata!(&'a str, "string", MetadataValue::String(value) => Some(value));
from_metadata!(&'a [String], "array of string", MetadataValue::Array(MetadataArray::String(values)) => Some(values));
from_metadata!(&'a [f32], "array of float32", MetadataValue::Array(MetadataArray::F32(values)) => Some(values));
from_metadata!(&'a [i32], "array of int32", MetadataValue::Array(MetadataArray::I32(values)) => Some(values));

impl FromMetadata<'_> for f32 {
    const EXPECTED: &'static str = "a finite number";

    fn from_metadata(value: &MetadataValue) -> Option<Self> {
        let number = match *value {
            MetadataValue::F32(value) => value,
            MetadataValue::F64(value) => value as Self,
            _ => return None,
        };
        number.is_finite().then_some(number)
    }
}
