//! The header of one safetensors file: a length, then JSON that places each tensor.
//! For: the folder reader in the parent module.
//! Invariant: tensors that are returned lie inside the file, do not overlap and have the bytes of dtype and shape.

use std::fmt;

use lockstep_formats::GgmlType;
use serde::{Deserialize, Deserializer, de};

use crate::{ModelError, checkpoint::StoredTensor, positioned_file::PositionedFile};

/// The format's own limit on the header.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes before the header.
const LENGTH_BYTES: u64 = 8;

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// Names and entries in the order of the header; a name may come twice.
struct Entries(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Entries;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object of tensors")
            }

            fn visit_map<A: de::MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<de::IgnoredAny>()?;
                        continue;
                    }
                    let value = map.next_value::<serde_json::Value>()?;
                    let entry =
                        Entry::deserialize(value).map_err(|error| de::Error::custom(format!("{name}: {error}")))?;
                    entries.push((name, entry));
                }
                Ok(Entries(entries))
            }
        }

        deserializer.deserialize_map(Visitor)
    }
}

/// Tensors of a file, which is number `file_index` of its checkpoint.
pub(super) fn read(file: &PositionedFile, file_index: usize) -> Result<Vec<StoredTensor>, ModelError> {
    let invalid = |field: &str, problem: String| ModelError::Invalid {
        path: file.path().to_owned(),
        field: field.to_owned(),
        problem,
    };
    let num_bytes = file.num_bytes();
    if num_bytes < LENGTH_BYTES {
        return Err(invalid(
            "header length",
            format!("expected {LENGTH_BYTES} bytes, the file has {num_bytes}; it is neither GGUF nor safetensors"),
        ));
    }
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact_at(&mut length, 0, "header length")?;
    let length = u64::from_le_bytes(length);
    let largest = MAX_HEADER_BYTES.min(num_bytes - LENGTH_BYTES);
    if length > largest {
        return Err(invalid(
            "header length",
            format!("expected at most {largest} bytes, got {length}; the file is neither GGUF nor safetensors"),
        ));
    }
    let mut json = vec![0; length as usize];
    file.read_exact_at(&mut json, LENGTH_BYTES, "header")?;
    let entries: Entries = serde_json::from_slice(&json).map_err(|error| invalid("header", error.to_string()))?;
    let data_start = LENGTH_BYTES + length;
    let data_bytes = num_bytes - data_start;

    let mut placed = Vec::with_capacity(entries.0.len());
    for (name, entry) in entries.0 {
        let tensor = check_entry(&name, &entry, data_bytes).map_err(|problem| invalid(&name, problem))?;
        let Some((rows, columns, ggml_type)) = tensor else {
            let (path, field) = (file.path().to_owned(), name);
            return Err(ModelError::Unsupported { path, field, value: format!("dtype {}", entry.dtype) });
        };
        let offset = data_start + entry.data_offsets.0;
        let end = data_start + entry.data_offsets.1;
        placed.push((end, StoredTensor { name, file: file_index, offset, rows, columns, ggml_type }));
    }
    placed.sort_by_key(|(_, tensor)| tensor.offset);
    if let Some(pair) = placed.windows(2).find(|pair| pair[1].1.offset < pair[0].0) {
        let (end, before) = (pair[0].0, &pair[0].1.name);
        let problem = format!("begins at byte {} inside {before}, which ends at {end}", pair[1].1.offset);
        return Err(invalid(&pair[1].1.name, problem));
    }
    Ok(placed.into_iter().map(|(_, tensor)| tensor).collect())
}

/// Rows, columns and type of an entry that fits; `None` for a dtype that is not supported.
fn check_entry(name: &str, entry: &Entry, data_bytes: u64) -> Result<Option<(usize, usize, GgmlType)>, String> {
    let ggml_type = match entry.dtype.as_str() {
        "F32" => GgmlType::F32,
        "F16" => GgmlType::F16,
        "BF16" => GgmlType::BF16,
        _ => return Ok(None),
    };
    if name.is_empty() || entry.shape.is_empty() || entry.shape.contains(&0) {
        return Err(format!("expected a name and dimensions of at least 1, got shape {:?}", entry.shape));
    }
    let elements = entry.shape.iter().try_fold(1usize, |product, &length| product.checked_mul(length));
    let expected = elements.and_then(|elements| ggml_type.bytes_of(elements));
    let expected = expected.ok_or_else(|| format!("shape {:?} overflows", entry.shape))? as u64;
    let (begin, end) = entry.data_offsets;
    if begin > end || end > data_bytes {
        return Err(format!("data_offsets [{begin}, {end}] are not inside the {data_bytes} bytes of tensor data"));
    }
    if end - begin != expected {
        let got = end - begin;
        return Err(format!("expected {expected} bytes for {} {:?}, got {got}", entry.dtype, entry.shape));
    }
    let columns = entry.shape.last().copied().unwrap_or(1);
    Ok(Some((entry.shape.iter().rev().skip(1).product(), columns, ggml_type)))
}
