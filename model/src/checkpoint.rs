//! One type for every kind of checkpoint.
//! For: workers (slices of weights), coordinators' reports (tokenizer, template), the planner (shape).
//! Invariant: opening reads headers only; after that exactly the bytes of the rectangles asked for are read.
//! Not here: the formats themselves ([`crate::gguf`], [`crate::safetensors`]).

use std::{
    collections::HashMap,
    fs::File,
    io::Read,
    ops::Range,
    path::{Path, PathBuf},
};

use lockstep_formats::GgmlType;
use lockstep_sharding::{ModelShape, TensorRole, TensorShape};

use crate::{
    ModelConfig, ModelError, Tokenizer,
    gguf::{self, GgufFile, TensorInfo},
    positioned_file::PositionedFile,
    safetensors::HuggingFaceCheckpoint,
    tensor_names::{Naming, expected_tensors},
    text_source::TextSource,
};

/// Threads that read one slice, and the least that each reads: from the page cache one thread copies a few GB/s.
const MAX_READERS: usize = 8;
const MIN_THREAD_BYTES: usize = 1 << 20;
/// Most bytes of rows of which only some columns are wanted, read at once from another machine.
const MAX_SPAN_BYTES: usize = 8 << 20;

/// An open checkpoint: header parsed and checked, weights read by position when asked for.
#[derive(Debug)]
pub struct Checkpoint {
    config: ModelConfig,
    shape: ModelShape,
    tensors: HashMap<(TensorRole, Option<usize>), StoredTensor>,
    files: Vec<PositionedFile>,
    text: TextSource,
}

/// Where a tensor lies.
#[derive(Clone, Debug)]
pub(crate) struct StoredTensor {
    pub(crate) name: String,
    /// Index into the checkpoint's files.
    pub(crate) file: usize,
    /// First byte in that file.
    pub(crate) offset: u64,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) ggml_type: GgmlType,
}

impl Checkpoint {
    /// Opens a GGUF file, a safetensors file, or a folder with `config.json` and safetensors; under a URL a GGUF file,
    /// which is then read where it lies.
    ///
    /// # Errors
    /// [`ModelError`] naming the field that is wrong.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        if crate::positioned_file::is_remote(path) {
            return Self::open_gguf(PositionedFile::open(path)?);
        }
        let failed =
            |source| ModelError::Io { path: path.to_owned(), what: "cannot open the checkpoint".into(), source };
        let is_file = std::fs::metadata(path).map_err(failed)?.is_file();
        let mut magic = [0; 4];
        // A file shorter than the magic is left to the other reader, which says what it lacks.
        let is_gguf =
            is_file && File::open(path).map_err(failed)?.read_exact(&mut magic).is_ok() && magic == gguf::MAGIC;
        if is_gguf { Self::open_gguf(PositionedFile::open(path)?) } else { Self::from_hugging_face(path) }
    }

    /// Reads the header of an open GGUF file.
    ///
    /// # Errors
    /// [`ModelError`] naming the field that is wrong.
    pub fn open_gguf(file: PositionedFile) -> Result<Self, ModelError> {
        Self::from_gguf(GgufFile::read(file)?)
    }

    fn from_hugging_face(path: &Path) -> Result<Self, ModelError> {
        let opened = HuggingFaceCheckpoint::open(path)?;
        let text = TextSource::Files(opened.tokenizer);
        let stored = opened.tensors.into_iter();
        Self::assemble(opened.config, Naming::HuggingFace, stored, opened.files, text, opened.is_tied)
    }

    fn from_gguf(gguf: GgufFile) -> Result<Self, ModelError> {
        let divisors =
            gguf.tensor("rope_freqs.weight").map(|tensor| read_vector_f32(&gguf.file, tensor)).transpose()?;
        let embedding_name = "token_embd.weight";
        let embedding_rows = gguf.tensor(embedding_name).map(TensorInfo::rows);
        let config = ModelConfig::from_gguf(&gguf.metadata, embedding_rows.unwrap_or(1), divisors.as_deref())?;
        let tokens = gguf.metadata.get::<&[String]>("tokenizer.ggml.tokens")?.map_or(0, <[String]>::len);
        if let Some(rows) = embedding_rows.filter(|&rows| tokens > rows) {
            let problem = format!("expected at most the {rows} rows of {embedding_name}, got {tokens} tokens");
            return Err(gguf.metadata.invalid("tokenizer.ggml.tokens", problem));
        }
        let stored = gguf.tensors.into_iter().map(|tensor| StoredTensor {
            rows: tensor.rows(),
            columns: tensor.columns(),
            name: tensor.name,
            file: 0,
            offset: tensor.offset,
            ggml_type: tensor.ggml_type,
        });
        Self::assemble(config, Naming::Gguf, stored, vec![gguf.file], TextSource::from_gguf(gguf.metadata)?, false)
    }

    /// Finds every expected tensor by name and checks its shape.
    fn assemble(
        config: ModelConfig,
        naming: Naming,
        stored: impl Iterator<Item = StoredTensor>,
        files: Vec<PositionedFile>,
        text: TextSource,
        is_tied: bool,
    ) -> Result<Self, ModelError> {
        let path = files.first().map(|file| file.path().to_owned()).unwrap_or_default();
        let invalid = |field: String, problem| ModelError::Invalid { path: path.clone(), field, problem };
        let mut by_name: HashMap<String, StoredTensor> = stored.map(|tensor| (tensor.name.clone(), tensor)).collect();
        if let Some(name) = by_name.keys().filter(|name| name.ends_with(".bias")).min() {
            let (field, value) = (name.clone(), "a tensor of biases".into());
            return Err(ModelError::Unsupported { path, field, value });
        }
        let mut tensors = HashMap::new();
        let mut shapes = Vec::new();
        for expected in expected_tensors(&config) {
            let (role, layer) = (expected.role, expected.layer);
            let may_be_tied = role == TensorRole::Output;
            if may_be_tied && is_tied {
                continue;
            }
            let name = naming.name(role, layer).unwrap_or_default();
            let Some(tensor) = by_name.remove(&name) else {
                if may_be_tied && naming == Naming::Gguf {
                    continue;
                }
                return Err(invalid(name, "tensor is missing".into()));
            };
            if (tensor.rows, tensor.columns) != (expected.rows, expected.columns) {
                let problem = format!(
                    "expected shape [{}, {}], got [{}, {}]",
                    expected.rows, expected.columns, tensor.rows, tensor.columns
                );
                return Err(invalid(name, problem));
            }
            let (rows, columns, ggml_type) = (tensor.rows, tensor.columns, tensor.ggml_type);
            shapes.push(TensorShape { role, layer, rows, columns, ggml_type });
            tensors.insert((role, layer), tensor);
        }
        let shape = config.shape(shapes);
        Ok(Self { config, shape, tensors, files, text })
    }

    /// Hyper-parameters.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Dimensions and tensors, for the planner.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Files that the checkpoint consists of.
    pub fn paths(&self) -> impl Iterator<Item = PathBuf> {
        self.files.iter().map(|file| file.path().to_owned())
    }

    /// Size of all its files.
    pub fn num_bytes(&self) -> u64 {
        self.files.iter().map(PositionedFile::num_bytes).sum()
    }

    /// Bytes read from its files since it was opened, headers included.
    pub fn bytes_read(&self) -> u64 {
        self.files.iter().map(PositionedFile::bytes_read).sum()
    }

    /// The blocks of a rectangle of a tensor, row by row, as stored.
    ///
    /// # Errors
    /// [`ModelError::Io`] if the file shrank or fails; [`ModelError::Invalid`] if the rectangle lies outside the tensor
    /// or its columns not on block borders.
    pub fn read_slice(
        &self,
        role: TensorRole,
        layer: Option<usize>,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Result<Vec<u8>, ModelError> {
        let tensor = self.tensors.get(&(role, layer)).ok_or_else(|| {
            let field = format!("{role:?} of layer {layer:?}");
            self.invalid(0, field, "the checkpoint has no such tensor".into())
        })?;
        let (file, row_bytes, slice) = self.locate(tensor, &rows, &columns)?;
        let first = tensor.offset + rows.start as u64 * row_bytes + slice.start as u64;
        let source = RowReader { file, tensor: &tensor.name, row_bytes, width: slice.len() };
        let mut bytes = vec![0; rows.len() * slice.len()];
        source.read_side_by_side(first, &mut bytes)?;
        Ok(bytes)
    }

    /// File, bytes of a row and the bytes of the columns within a row; refuses what is outside or off the block borders.
    fn locate(
        &self,
        tensor: &StoredTensor,
        rows: &Range<usize>,
        columns: &Range<usize>,
    ) -> Result<(&PositionedFile, u64, Range<usize>), ModelError> {
        let invalid = |problem| self.invalid(tensor.file, tensor.name.clone(), problem);
        let inside = |range: &Range<usize>, length| range.start <= range.end && range.end <= length;
        if !(inside(rows, tensor.rows) && inside(columns, tensor.columns)) {
            return Err(invalid(format!(
                "rows {rows:?} and columns {columns:?} are not inside [{}, {}]",
                tensor.rows, tensor.columns
            )));
        }
        let off_border = || {
            let (block, ggml_type) = (tensor.ggml_type.block_elements(), tensor.ggml_type);
            invalid(format!("columns {columns:?} do not fall on the {ggml_type} blocks of {block}"))
        };
        let bytes_of = |elements| tensor.ggml_type.bytes_of(elements).ok_or_else(off_border);
        let slice = bytes_of(columns.start)?..bytes_of(columns.end)?;
        let row_bytes = bytes_of(tensor.columns)? as u64;
        let file = self.files.get(tensor.file).ok_or_else(|| invalid("its file is not open".into()))?;
        Ok((file, row_bytes, slice))
    }

    /// The tokenizer that the checkpoint describes.
    ///
    /// # Errors
    /// [`ModelError`] naming the metadata that is missing or unknown.
    pub fn tokenizer(&self) -> Result<Tokenizer, ModelError> {
        self.text.tokenizer()
    }

    /// The Jinja source of the chat template, if there is one.
    pub fn chat_template(&self) -> Option<&str> {
        self.text.chat_template()
    }

    fn invalid(&self, file: usize, field: String, problem: String) -> ModelError {
        let path = self.files.get(file).map(|file| file.path().to_owned()).unwrap_or_default();
        ModelError::Invalid { path, field, problem }
    }
}

/// Reads the same columns of consecutive rows.
#[derive(Clone, Copy)]
struct RowReader<'a> {
    file: &'a PositionedFile,
    /// For errors.
    tensor: &'a str,
    /// Of a whole row.
    row_bytes: u64,
    /// Bytes wanted of each.
    width: usize,
}

impl RowReader<'_> {
    /// Fills `bytes` with rows from position `first` on; large ones by several threads.
    fn read_side_by_side(self, first: u64, bytes: &mut [u8]) -> Result<(), ModelError> {
        let num_threads = (bytes.len() / MIN_THREAD_BYTES).clamp(1, MAX_READERS);
        let num_threads = num_threads.min(std::thread::available_parallelism().map_or(1, usize::from));
        if num_threads == 1 {
            return self.read(first, bytes);
        }
        let rows_each = (bytes.len() / self.width).div_ceil(num_threads);
        std::thread::scope(|scope| {
            let pieces = bytes.chunks_mut(rows_each * self.width).enumerate();
            let threads: Vec<_> = pieces
                .map(|(index, piece)| {
                    let first = first + (index * rows_each) as u64 * self.row_bytes;
                    scope.spawn(move || self.read(first, piece))
                })
                .collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    fn read(self, first: u64, bytes: &mut [u8]) -> Result<(), ModelError> {
        if self.width as u64 == self.row_bytes {
            return self.file.read_exact_at(bytes, first, self.tensor);
        }
        if self.file.is_remote() {
            return self.read_whole_rows(first, bytes);
        }
        for (index, row) in bytes.chunks_exact_mut(self.width.max(1)).enumerate() {
            self.file.read_exact_at(row, first + index as u64 * self.row_bytes, self.tensor)?;
        }
        Ok(())
    }

    /// The same from where every request costs a round trip: whole rows, many at a time, of which the columns are kept.
    fn read_whole_rows(self, first: u64, bytes: &mut [u8]) -> Result<(), ModelError> {
        let width = self.width.max(1);
        let row_bytes = self.row_bytes as usize;
        let num_rows = (MAX_SPAN_BYTES / row_bytes.max(1)).max(1);
        for (index, rows) in bytes.chunks_mut(num_rows * width).enumerate() {
            let mut span = vec![0; (rows.len() / width - 1) * row_bytes + width];
            let start = first + (index * num_rows) as u64 * self.row_bytes;
            self.file.read_exact_at(&mut span, start, self.tensor)?;
            for (row, read) in rows.chunks_exact_mut(width).zip(span.chunks(row_bytes)) {
                row.copy_from_slice(&read[..width]);
            }
        }
        Ok(())
    }
}

/// A vector of 32-bit floats, whole.
fn read_vector_f32(file: &PositionedFile, tensor: &TensorInfo) -> Result<Vec<f32>, ModelError> {
    if tensor.ggml_type != GgmlType::F32 || tensor.columns() > crate::config::MAX_HEAD_DIM || tensor.rows() != 1 {
        let problem = format!("expected a vector of F32, got {} {:?}", tensor.ggml_type, tensor.dimensions);
        return Err(ModelError::Invalid { path: file.path().to_owned(), field: tensor.name.clone(), problem });
    }
    let mut bytes = vec![0; tensor.columns() * 4];
    file.read_exact_at(&mut bytes, tensor.offset, &tensor.name)?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|&chunk| f32::from_le_bytes(chunk)).collect())
}
