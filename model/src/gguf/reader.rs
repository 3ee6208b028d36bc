//! Parses the header, the metadata and the tensor directory of a GGUF file.
//! For: [`super::GgufFile::open`].
//! Invariant: a length, count or offset is compared with what is left of the file before anything is allocated from it.
//! Not here: tensor data; what keys mean.

use std::collections::HashSet;

use lockstep_formats::GgmlType;

use super::{DEFAULT_ALIGNMENT, GgufFile, MAGIC, Metadata, MetadataArray, MetadataValue, TensorInfo};
use crate::{ModelError, positioned_file::PositionedFile};

/// Bytes fetched at a time.
const BUFFER_BYTES: u64 = 1 << 20;

/// No directory is larger: a vocabulary of a million tokens takes 50 MB.
const MAX_DIRECTORY_BYTES: u64 = 1 << 30;

/// Elements reserved ahead for an array of strings or arrays; more come as they are really read.
const MAX_RESERVED: usize = 1 << 16;

/// Arrays of arrays may nest this deep.
const MAX_ARRAY_DEPTH: usize = 4;

/// Least bytes of a key/value pair: key length, value type, one byte of value.
const MIN_PAIR_BYTES: u64 = 13;

/// Least bytes of a tensor entry: name length, dimension count, one dimension, type, offset.
const MIN_TENSOR_BYTES: u64 = 32;

/// Types that GGUF knows and this project does not, for the error message.
const FOREIGN_TYPES: [(u32, &str); 18] = [
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

/// Reads everything before the tensor data.
pub(super) fn read(file: PositionedFile) -> Result<GgufFile, ModelError> {
    let mut cursor = Cursor::new(&file);
    let version = read_version(&mut cursor)?;
    let num_tensors = cursor.u64("header.tensor_count")?;
    let num_pairs = cursor.u64("header.metadata_kv_count")?;
    cursor.check_count("header.metadata_kv_count", num_pairs, MIN_PAIR_BYTES)?;
    cursor.check_count("header.tensor_count", num_tensors, MIN_TENSOR_BYTES)?;
    let metadata = read_metadata(&mut cursor, num_pairs)?;
    let alignment = alignment(&metadata)?;
    let mut tensors = read_tensor_infos(&mut cursor, num_tensors)?;
    let directory_end = cursor.position();
    place_tensors(&file, &mut tensors, directory_end, alignment)?;
    Ok(GgufFile { file, version, metadata, tensors })
}

fn read_version(cursor: &mut Cursor<'_>) -> Result<u32, ModelError> {
    let magic = cursor.array::<4>("header.magic")?;
    if magic != MAGIC {
        return Err(cursor.invalid("header.magic", format!("expected {MAGIC:?} (\"GGUF\"), got {magic:?}")));
    }
    match cursor.u32("header.version")? {
        version @ 2..=3 => Ok(version),
        other if matches!(other.swap_bytes(), 1..=3) => {
            Err(cursor.unsupported("header.version", format!("{} (big-endian)", other.swap_bytes())))
        }
        other => Err(cursor.unsupported("header.version", format!("{other} (expected 2 or 3)"))),
    }
}

fn read_metadata(cursor: &mut Cursor<'_>, num_pairs: u64) -> Result<Metadata, ModelError> {
    let mut metadata = Metadata::new(cursor.file.path());
    for index in 0..num_pairs {
        let key_field = format!("metadata[{index}].key");
        let key = cursor.string(&key_field)?;
        if key.is_empty() {
            return Err(cursor.invalid(&key_field, "expected a key, got an empty string"));
        }
        let type_id = cursor.u32(&key)?;
        let value = cursor.value(&key, type_id)?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(cursor.invalid(&key, "metadata key appears more than once"));
        }
    }
    Ok(metadata)
}

fn alignment(metadata: &Metadata) -> Result<u64, ModelError> {
    let key = "general.alignment";
    let alignment = metadata.get::<u32>(key)?.map_or(DEFAULT_ALIGNMENT, u64::from);
    if !alignment.is_power_of_two() {
        return Err(metadata.invalid(key, format!("expected a power of two, got {alignment}")));
    }
    Ok(alignment)
}

/// Entries with offsets still relative to the start of the tensor data.
fn read_tensor_infos(cursor: &mut Cursor<'_>, num_tensors: u64) -> Result<Vec<TensorInfo>, ModelError> {
    let mut tensors = Vec::new();
    let mut names = HashSet::new();
    for index in 0..num_tensors {
        let tensor = read_tensor_info(cursor, index)?;
        if !names.insert(tensor.name.clone()) {
            return Err(cursor.invalid(&tensor.name, "tensor name appears more than once"));
        }
        tensors.push(tensor);
    }
    Ok(tensors)
}

fn read_tensor_info(cursor: &mut Cursor<'_>, index: u64) -> Result<TensorInfo, ModelError> {
    let name_field = format!("tensor[{index}].name");
    let name = cursor.string(&name_field)?;
    if name.is_empty() {
        return Err(cursor.invalid(&name_field, "expected a name, got an empty string"));
    }
    let num_dimensions = cursor.u32(&name)?;
    if !(1..=4).contains(&num_dimensions) {
        return Err(cursor.invalid(&name, format!("expected 1 to 4 dimensions, got {num_dimensions}")));
    }
    let mut dimensions = Vec::with_capacity(num_dimensions as usize);
    for axis in 0..num_dimensions {
        let length = cursor.u64(&name)?;
        if length == 0 {
            return Err(cursor.invalid(&name, format!("dimension {axis}: expected at least 1, got 0")));
        }
        dimensions.push(length);
    }
    let type_id = cursor.u32(&name)?;
    let Ok(ggml_type) = GgmlType::try_from(type_id) else {
        let known = FOREIGN_TYPES.iter().find(|entry| entry.0 == type_id).map_or("unknown", |entry| entry.1);
        return Err(cursor.unsupported(&name, format!("element type {type_id} ({known})")));
    };
    let offset = cursor.u64(&name)?;
    let too_large = || cursor.invalid(&name, format!("dimensions {dimensions:?} overflow"));
    let elements = dimensions.iter().try_fold(1u64, |product, &length| product.checked_mul(length));
    let elements = elements.and_then(|elements| usize::try_from(elements).ok()).ok_or_else(too_large)?;
    let columns = dimensions[0] as usize;
    if !columns.is_multiple_of(ggml_type.block_elements()) {
        let block = ggml_type.block_elements();
        return Err(cursor
            .invalid(&name, format!("row length {columns} is not a multiple of the {ggml_type} block of {block}")));
    }
    let num_bytes = ggml_type.bytes_of(elements).ok_or_else(too_large)? as u64;
    let dimensions = dimensions.iter().map(|&length| length as usize).collect();
    Ok(TensorInfo { name, dimensions, ggml_type, offset, num_bytes })
}

/// Makes offsets absolute and checks that the tensors are aligned, inside the file and apart from each other.
fn place_tensors(
    file: &PositionedFile,
    tensors: &mut [TensorInfo],
    directory_end: u64,
    alignment: u64,
) -> Result<(), ModelError> {
    let invalid =
        |name: &str, problem| ModelError::Invalid { path: file.path().to_owned(), field: name.to_owned(), problem };
    // Both are below 2^32, so the sum cannot overflow.
    let data_start = directory_end.next_multiple_of(alignment);
    let data_bytes = file.num_bytes().saturating_sub(data_start);
    for tensor in tensors.iter_mut() {
        let (offset, num_bytes) = (tensor.offset, tensor.num_bytes);
        if !offset.is_multiple_of(alignment) {
            return Err(invalid(
                &tensor.name,
                format!("offset {offset} is not a multiple of the alignment {alignment}"),
            ));
        }
        if offset.checked_add(num_bytes).is_none_or(|end| end > data_bytes) {
            return Err(invalid(
                &tensor.name,
                format!("expected {num_bytes} bytes at offset {offset} of the tensor data, the file has {data_bytes}"),
            ));
        }
        tensor.offset = data_start + offset;
    }
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|tensor| tensor.offset);
    for pair in order.windows(2) {
        let end = pair[0].offset + pair[0].num_bytes;
        if pair[1].offset < end {
            return Err(invalid(
                &pair[1].name,
                format!("begins at byte {} inside {}, which ends at {end}", pair[1].offset, pair[0].name),
            ));
        }
    }
    Ok(())
}

/// Reads little-endian values in order through one buffer, never past the directory's limit.
struct Cursor<'a> {
    file: &'a PositionedFile,
    limit: u64,
    /// Position in the file of the byte after the buffer.
    buffer_end: u64,
    buffer: Vec<u8>,
    /// Bytes of the buffer already taken.
    taken: usize,
}

impl<'a> Cursor<'a> {
    fn new(file: &'a PositionedFile) -> Self {
        let limit = file.num_bytes().min(MAX_DIRECTORY_BYTES);
        Self { file, limit, buffer_end: 0, buffer: Vec::new(), taken: 0 }
    }

    fn position(&self) -> u64 {
        self.buffer_end - (self.buffer.len() - self.taken) as u64
    }

    fn remaining(&self) -> u64 {
        self.limit - self.position()
    }

    fn invalid(&self, field: &str, problem: impl Into<String>) -> ModelError {
        ModelError::Invalid { path: self.file.path().to_owned(), field: field.to_owned(), problem: problem.into() }
    }

    fn unsupported(&self, field: &str, value: String) -> ModelError {
        ModelError::Unsupported { path: self.file.path().to_owned(), field: field.to_owned(), value }
    }

    /// Refuses a count of items that cannot fit in what is left of the file.
    fn check_count(&self, field: &str, count: u64, item_bytes: u64) -> Result<(), ModelError> {
        let remaining = self.remaining();
        if count.checked_mul(item_bytes).is_none_or(|bytes| bytes > remaining) {
            return Err(self.invalid(
                field,
                format!("{count} items of at least {item_bytes} bytes do not fit in the {remaining} bytes left"),
            ));
        }
        Ok(())
    }

    /// The next `count` bytes.
    fn take(&mut self, field: &str, count: u64) -> Result<&[u8], ModelError> {
        let position = self.position();
        if count > self.remaining() {
            let problem = format!("expected {count} bytes at offset {position}, the file ends at {}", self.limit);
            return Err(self.invalid(field, problem));
        }
        let count = count as usize;
        if self.buffer.len() - self.taken < count {
            self.buffer.drain(..self.taken);
            self.taken = 0;
            let kept = self.buffer.len();
            let wanted = BUFFER_BYTES.max((count - kept) as u64).min(self.limit - self.buffer_end);
            self.buffer.resize(kept + wanted as usize, 0);
            self.file.read_exact_at(&mut self.buffer[kept..], self.buffer_end, field)?;
            self.buffer_end += wanted;
        }
        let start = self.taken;
        self.taken += count;
        Ok(&self.buffer[start..self.taken])
    }

    fn array<const N: usize>(&mut self, field: &str) -> Result<[u8; N], ModelError> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(field, N as u64)?);
        Ok(bytes)
    }

    fn u32(&mut self, field: &str) -> Result<u32, ModelError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    fn u64(&mut self, field: &str) -> Result<u64, ModelError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    fn string(&mut self, field: &str) -> Result<String, ModelError> {
        let length = self.u64(field)?;
        let position = self.position();
        let bytes = self.take(field, length)?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(error) => {
                let problem = format!("string of {length} bytes at offset {position} is not UTF-8: {error}");
                Err(self.invalid(field, problem))
            }
        }
    }

    fn bool(&self, field: &str, byte: u8) -> Result<bool, ModelError> {
        match byte {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.invalid(field, format!("expected a bool of 0 or 1, got {other}"))),
        }
    }

    fn value(&mut self, key: &str, type_id: u32) -> Result<MetadataValue, ModelError> {
        use MetadataValue as Value;
        Ok(match type_id {
            0 => Value::U8(u8::from_le_bytes(self.array(key)?)),
            1 => Value::I8(i8::from_le_bytes(self.array(key)?)),
            2 => Value::U16(u16::from_le_bytes(self.array(key)?)),
            3 => Value::I16(i16::from_le_bytes(self.array(key)?)),
            4 => Value::U32(u32::from_le_bytes(self.array(key)?)),
            5 => Value::I32(i32::from_le_bytes(self.array(key)?)),
            6 => Value::F32(f32::from_le_bytes(self.array(key)?)),
            7 => {
                let [byte] = self.array(key)?;
                Value::Bool(self.bool(key, byte)?)
            }
            8 => Value::String(self.string(key)?),
            9 => Value::Array(self.metadata_array(key, 1)?),
            10 => Value::U64(u64::from_le_bytes(self.array(key)?)),
            11 => Value::I64(i64::from_le_bytes(self.array(key)?)),
            12 => Value::F64(f64::from_le_bytes(self.array(key)?)),
            other => return Err(self.invalid(key, format!("expected a value type of 0 to 12, got {other}"))),
        })
    }

    fn metadata_array(&mut self, key: &str, depth: usize) -> Result<MetadataArray, ModelError> {
        use MetadataArray as Array;
        if depth > MAX_ARRAY_DEPTH {
            return Err(self.invalid(key, format!("arrays nest deeper than {MAX_ARRAY_DEPTH}")));
        }
        let type_id = self.u32(key)?;
        let count = self.u64(key)?;
        Ok(match type_id {
            0 => Array::U8(self.numbers(key, count, u8::from_le_bytes)?),
            1 => Array::I8(self.numbers(key, count, i8::from_le_bytes)?),
            2 => Array::U16(self.numbers(key, count, u16::from_le_bytes)?),
            3 => Array::I16(self.numbers(key, count, i16::from_le_bytes)?),
            4 => Array::U32(self.numbers(key, count, u32::from_le_bytes)?),
            5 => Array::I32(self.numbers(key, count, i32::from_le_bytes)?),
            6 => Array::F32(self.numbers(key, count, f32::from_le_bytes)?),
            7 => {
                let bytes = self.numbers(key, count, u8::from_le_bytes)?;
                Array::Bool(bytes.into_iter().map(|byte| self.bool(key, byte)).collect::<Result<_, _>>()?)
            }
            8 => Array::String(self.items(key, count, 8, |cursor| cursor.string(key))?),
            9 => Array::Array(self.items(key, count, 12, |cursor| cursor.metadata_array(key, depth + 1))?),
            10 => Array::U64(self.numbers(key, count, u64::from_le_bytes)?),
            11 => Array::I64(self.numbers(key, count, i64::from_le_bytes)?),
            12 => Array::F64(self.numbers(key, count, f64::from_le_bytes)?),
            other => return Err(self.invalid(key, format!("expected an element type of 0 to 12, got {other}"))),
        })
    }

    fn numbers<T, const N: usize>(
        &mut self,
        key: &str,
        count: u64,
        decode: fn([u8; N]) -> T,
    ) -> Result<Vec<T>, ModelError> {
        self.check_count(key, count, N as u64)?;
        let bytes = self.take(key, count * N as u64)?;
        Ok(bytes.as_chunks::<N>().0.iter().map(|&chunk| decode(chunk)).collect())
    }

    fn items<T>(
        &mut self,
        key: &str,
        count: u64,
        min_bytes: u64,
        read_item: impl Fn(&mut Self) -> Result<T, ModelError>,
    ) -> Result<Vec<T>, ModelError> {
        self.check_count(key, count, min_bytes)?;
        let mut items = Vec::with_capacity(MAX_RESERVED.min(count as usize));
        for _ in 0..count {
            items.push(read_item(self)?);
        }
        Ok(items)
    }
}
