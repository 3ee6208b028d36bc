//! Streams a synthesized checkpoint to a file: threads make chunks, one writes them in order.
//! For: `lockstep synth` and tests.
//! Invariant: a few chunks a thread are in memory, whatever the model's size; a file of that name is complete.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::mpsc::{SyncSender, sync_channel},
};

use lockstep_sharding::{ModelShape, TensorShape};
use rayon::prelude::*;

use super::{
    SynthSpec,
    blocks::{Random, fill_blocks},
    vocabulary::put_vocabulary,
};
use crate::{
    ModelError,
    gguf::{GgufWriter, Metadata, MetadataValue, TensorEntry},
    tensor_names::Naming,
};

/// Bytes that one thread makes at a time, to the block.
const CHUNK_BYTES: usize = 4 << 20;

/// Writes the checkpoint; `progress` is told bytes written and bytes in all.
///
/// # Errors
/// [`ModelError::Invalid`] for a shape that no model has, [`ModelError::Io`] if the file cannot be written.
pub fn synth(spec: &SynthSpec, path: &Path, progress: impl Fn(u64, u64)) -> Result<(), ModelError> {
    let shape = spec.shape()?;
    let metadata = metadata(spec, path);
    let failed = |what: &str, source| ModelError::Io { path: path.to_owned(), what: what.to_owned(), source };
    let partial = partial_path(path);
    let written = write_weights(spec, &shape, &metadata, &partial, progress);
    let finished = written.and_then(|()| std::fs::rename(&partial, path));
    finished.map_err(|source| {
        // What is left is of no use, and why it is there is what the caller needs to hear.
        let _ = std::fs::remove_file(&partial);
        failed("cannot write the checkpoint", source)
    })
}

/// Where a checkpoint lies while it is written.
pub fn partial_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

fn metadata(spec: &SynthSpec, path: &Path) -> Metadata {
    let mut metadata = Metadata::new(path);
    let mut put = |key: &str, value| metadata.insert(key, value);
    put("general.architecture", MetadataValue::String("llama".into()));
    put("general.name", MetadataValue::String(format!("synthetic {} seed {}", spec.quantization, spec.seed)));
    put("general.quantization_version", MetadataValue::U32(2));
    let numbers = [
        ("context_length", spec.max_position_embeddings),
        ("embedding_length", spec.hidden_size),
        ("feed_forward_length", spec.intermediate_size),
        ("block_count", spec.num_hidden_layers),
        ("attention.head_count", spec.num_attention_heads),
        ("attention.head_count_kv", spec.num_key_value_heads),
        ("attention.key_length", spec.head_dim),
        ("attention.value_length", spec.head_dim),
        ("rope.dimension_count", spec.head_dim),
        ("vocab_size", spec.vocab_size),
    ];
    for (key, number) in numbers {
        put(&format!("llama.{key}"), MetadataValue::U32(number as u32));
    }
    put("llama.rope.freq_base", MetadataValue::F32(spec.rope_theta));
    put("llama.attention.layer_norm_rms_epsilon", MetadataValue::F32(spec.rms_norm_eps));
    put_vocabulary(&mut metadata, spec.vocab_size);
    metadata
}

fn write_weights(
    spec: &SynthSpec,
    shape: &ModelShape,
    metadata: &Metadata,
    path: &Path,
    progress: impl Fn(u64, u64),
) -> io::Result<()> {
    let entries: Vec<TensorEntry> = shape.tensors.iter().map(tensor_entry).collect();
    let total = shape.tensors.iter().map(TensorShape::bytes).sum();
    let mut writer = GgufWriter::new(File::create(path)?, metadata, &entries)?;
    let (sender, receiver) = sync_channel::<Vec<Vec<u8>>>(1);
    std::thread::scope(|scope| {
        scope.spawn(move || make_chunks(spec, shape, &sender));
        let mut done = 0;
        // Leaving early drops the receiver, which stops the maker.
        for chunk in receiver.into_iter().flatten() {
            writer.write(&chunk)?;
            done += chunk.len() as u64;
            progress(done, total);
        }
        writer.finish()?.sync_data()
    })
}

fn tensor_entry(tensor: &TensorShape) -> TensorEntry {
    TensorEntry {
        name: Naming::Gguf.name(tensor.role, tensor.layer).unwrap_or_default(),
        dimensions: if tensor.rows == 1 { vec![tensor.columns] } else { vec![tensor.columns, tensor.rows] },
        ggml_type: tensor.ggml_type,
    }
}

/// Sends the chunks of all tensors in order, a batch of them at a time.
fn make_chunks(spec: &SynthSpec, shape: &ModelShape, sender: &SyncSender<Vec<Vec<u8>>>) {
    let mut stream = 0;
    let mut jobs = Vec::new();
    for tensor in &shape.tensors {
        let block_bytes = tensor.ggml_type.block_bytes();
        let chunk_bytes = CHUNK_BYTES / block_bytes * block_bytes;
        let mut left = tensor.bytes();
        while left > 0 {
            let num_bytes = left.min(chunk_bytes as u64);
            jobs.push((tensor, num_bytes as usize, stream));
            left -= num_bytes;
            stream += 1;
        }
    }
    for batch in jobs.chunks(2 * rayon::current_num_threads()) {
        let chunks = batch.par_iter().map(|&(tensor, num_bytes, stream)| {
            let mut bytes = vec![0; num_bytes];
            make_chunk(&mut bytes, tensor, Random::new(spec.seed, stream));
            bytes
        });
        if sender.send(chunks.collect()).is_err() {
            return;
        }
    }
}

fn make_chunk(bytes: &mut [u8], tensor: &TensorShape, mut random: Random) {
    if tensor.rows == 1 {
        // Vectors are the weights of norms.
        bytes.as_chunks_mut::<4>().0.iter_mut().for_each(|chunk| *chunk = 1f32.to_le_bytes());
        return;
    }
    let deviation = 1.0 / (tensor.columns as f32).sqrt();
    fill_blocks(bytes, tensor.ggml_type, deviation, &mut random);
}
