//! Writes GGUF version 3 in one pass: directory first, then the bytes of each tensor in order.
//! For: synthesized checkpoints and tests.
//! Invariant: a file that [`GgufWriter::finish`] accepted is read back by [`super::GgufFile::open`].

use std::{
    io::{self, Write},
    path::Path,
};

use lockstep_formats::GgmlType;

use super::{DEFAULT_ALIGNMENT, MAGIC, Metadata, MetadataArray, MetadataValue};

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// Name.
    pub name: String,
    /// 1 to 4 dimensions, the row length first.
    pub dimensions: Vec<usize>,
    /// Element type.
    pub ggml_type: GgmlType,
}

impl TensorEntry {
    /// Size of the tensor data.
    ///
    /// # Errors
    /// `InvalidInput` if the rows are no whole blocks or the size overflows.
    pub fn num_bytes(&self) -> io::Result<u64> {
        let rows = self.dimensions.iter().skip(1).try_fold(1usize, |product, &length| product.checked_mul(length));
        let row_bytes = self.dimensions.first().and_then(|&columns| self.ggml_type.bytes_of(columns));
        let bytes = rows.zip(row_bytes).and_then(|(rows, row_bytes)| rows.checked_mul(row_bytes));
        bytes.map(|bytes| bytes as u64).ok_or_else(|| {
            let problem =
                format!("{}: dimensions {:?} are no whole {} blocks", self.name, self.dimensions, self.ggml_type);
            io::Error::new(io::ErrorKind::InvalidInput, problem)
        })
    }
}

/// A GGUF file being written.
pub struct GgufWriter<W: Write> {
    output: W,
    /// Bytes of each tensor in order.
    sizes: Vec<u64>,
    /// Index of the tensor being written.
    current: usize,
    /// Bytes of it already written.
    written: u64,
}

impl<W: Write> GgufWriter<W> {
    /// Writes the header, the metadata and the directory.
    ///
    /// # Errors
    /// What `output` says, or `InvalidInput` for a tensor of broken blocks.
    pub fn new(mut output: W, metadata: &Metadata, tensors: &[TensorEntry]) -> io::Result<Self> {
        let sizes = tensors.iter().map(TensorEntry::num_bytes).collect::<io::Result<Vec<_>>>()?;
        let header = encode_directory(metadata, tensors, &sizes);
        output.write_all(&header)?;
        let mut writer = Self { output, sizes, current: 0, written: 0 };
        writer.pad(header.len() as u64)?;
        Ok(writer)
    }

    /// Appends bytes of the tensor data; they may begin and end anywhere inside a tensor, but not cross into the next.
    ///
    /// # Errors
    /// What the output says, or `InvalidInput` for more bytes than the tensor has.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let left = self.sizes.get(self.current).map_or(0, |size| size - self.written);
        if bytes.len() as u64 > left {
            let problem = format!("{} bytes for tensor {} of which {left} are left", bytes.len(), self.current);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        }
        self.output.write_all(bytes)?;
        self.written += bytes.len() as u64;
        if bytes.len() as u64 == left {
            self.pad(self.written)?;
            self.current += 1;
            self.written = 0;
        }
        Ok(())
    }

    /// Flushes and gives the output back.
    ///
    /// # Errors
    /// What the output says, or `InvalidInput` if tensor data is missing.
    pub fn finish(mut self) -> io::Result<W> {
        if self.current != self.sizes.len() {
            let problem = format!("tensor {} of {} is incomplete", self.current, self.sizes.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        }
        self.output.flush()?;
        Ok(self.output)
    }

    fn pad(&mut self, written: u64) -> io::Result<()> {
        let padding = written.next_multiple_of(DEFAULT_ALIGNMENT) - written;
        self.output.write_all(&[0; DEFAULT_ALIGNMENT as usize][..padding as usize])
    }
}

/// Writes a whole small file at once.
///
/// # Errors
/// What the file system says, or `InvalidInput` if `data` does not match the tensors.
pub fn write_file(path: &Path, metadata: &Metadata, tensors: &[(TensorEntry, Vec<u8>)]) -> io::Result<()> {
    let entries: Vec<TensorEntry> = tensors.iter().map(|(entry, _)| entry.clone()).collect();
    let output = io::BufWriter::new(std::fs::File::create(path)?);
    let mut writer = GgufWriter::new(output, metadata, &entries)?;
    for (_, data) in tensors {
        writer.write(data)?;
    }
    writer.finish()?;
    Ok(())
}

fn encode_directory(metadata: &Metadata, tensors: &[TensorEntry], sizes: &[u64]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(MAGIC);
    bytes.extend(3u32.to_le_bytes());
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((metadata.iter().len() as u64).to_le_bytes());
    for (key, value) in metadata.iter() {
        put_string(&mut bytes, key);
        put_value(&mut bytes, value);
    }
    let mut offset = 0u64;
    for (tensor, size) in tensors.iter().zip(sizes) {
        put_string(&mut bytes, &tensor.name);
        bytes.extend((tensor.dimensions.len() as u32).to_le_bytes());
        for &length in &tensor.dimensions {
            bytes.extend((length as u64).to_le_bytes());
        }
        bytes.extend(tensor.ggml_type.id().to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        offset = (offset + size).next_multiple_of(DEFAULT_ALIGNMENT);
    }
    bytes
}

fn put_string(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

fn put_value(bytes: &mut Vec<u8>, value: &MetadataValue) {
    use MetadataValue as Value;
    let mut put = |type_id: u32, payload: &[u8]| {
        bytes.extend(type_id.to_le_bytes());
        bytes.extend(payload);
    };
    match value {
        Value::U8(value) => put(0, &value.to_le_bytes()),
        Value::I8(value) => put(1, &value.to_le_bytes()),
        Value::U16(value) => put(2, &value.to_le_bytes()),
        Value::I16(value) => put(3, &value.to_le_bytes()),
        Value::U32(value) => put(4, &value.to_le_bytes()),
        Value::I32(value) => put(5, &value.to_le_bytes()),
        Value::F32(value) => put(6, &value.to_le_bytes()),
        Value::Bool(value) => put(7, &[u8::from(*value)]),
        Value::U64(value) => put(10, &value.to_le_bytes()),
        Value::I64(value) => put(11, &value.to_le_bytes()),
        Value::F64(value) => put(12, &value.to_le_bytes()),
        Value::String(text) => {
            put(8, &[]);
            put_string(bytes, text);
        }
        Value::Array(array) => {
            put(9, &[]);
            put_array(bytes, array);
        }
    }
}

fn put_array(bytes: &mut Vec<u8>, array: &MetadataArray) {
    use MetadataArray as Array;
    match array {
        Array::U8(values) => put_items(bytes, 0, values, |bytes, value| bytes.extend(value.to_le_bytes())),
        Array::I8(values) => put_items(bytes, 1, values, |bytes, value| bytes.extend(value.to_le_bytes())),
        Array::U16(values) => put_items(bytes, 2, values, |bytes, value| bytes.extend(value.to_le_bytes())),
        Array::I16(values) => put_items(bytes, 3, values, |bytes, value| bytes.extend(value.to_le_bytes())),
        Array::U32(values) => put_items(bytes, 4, values, |bytes, value| bytes.extend(value.to_le_bytes())),
        Array::I32(values) => put_items(bytes, 5, values, |bytes, value| bytes.extend(value.to_le_bytes())),
        Array::F32(values) => put_items(bytes, 6, values, |bytes, value| bytes.extend(value.to_le_bytes())),
        Array::Bool(values) => put_items(bytes, 7, values, |bytes, value| bytes.push(u8::from(*value))),
        Array::String(values) => put_items(bytes, 8, values, |bytes, value| put_string(bytes, value)),
        Array::Array(values) => put_items(bytes, 9, values, put_array),
        Array::U64(values) => put_items(bytes, 10, values, |bytes, value| bytes.extend(value.to_le_bytes())),
        Array::I64(values) => put_items(bytes, 11, values, |bytes, value| bytes.extend(value.to_le_bytes())),
        Array::F64(values) => put_items(bytes, 12, values, |bytes, value| bytes.extend(value.to_le_bytes())),
    }
}

fn put_items<T>(bytes: &mut Vec<u8>, type_id: u32, values: &[T], put: impl Fn(&mut Vec<u8>, &T)) {
    bytes.extend(type_id.to_le_bytes());
    bytes.extend((values.len() as u64).to_le_bytes());
    for value in values {
        put(bytes, value);
    }
}
