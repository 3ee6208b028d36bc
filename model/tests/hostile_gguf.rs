//! GGUF files that are cut, corrupted or made to mislead: each gives an error that names the field; none panics or makes
//! the reader allocate what a length in the file claims.

#![allow(clippy::expect_used, clippy::panic, reason = "a test says what it expected")]

mod raw_gguf;

use std::path::Path;

use lockstep_model::{Checkpoint, ModelError};
use lockstep_sharding::TensorRole;
use raw_gguf::{RawGguf, array, string};

/// A change to a sound file, and the text that the error has to contain: the field, and often the number.
type Case = (&'static str, fn(&mut RawGguf), &'static [&'static str]);

const U32: u32 = 4;
const STRING: u32 = 8;
const ARRAY: u32 = 9;
const HUGE: u64 = 1 << 60;

const HEADER: &[Case] = &[
    ("magic", |file| file.magic = *b"GGUX", &["neither GGUF nor safetensors"]),
    ("version 0", |file| file.version = 0, &["header.version", "0"]),
    ("version 1", |file| file.version = 1, &["header.version", "1"]),
    ("version 4", |file| file.version = 4, &["header.version", "4"]),
    ("big-endian", |file| file.version = 3u32.swap_bytes(), &["header.version", "big-endian"]),
    ("tensors 2^60", |file| file.num_tensors = Some(HUGE), &["header.tensor_count", "1152921504606846976"]),
    ("tensors 2^64-1", |file| file.num_tensors = Some(u64::MAX), &["header.tensor_count"]),
    ("pairs 2^60", |file| file.num_pairs = Some(HUGE), &["header.metadata_kv_count", "1152921504606846976"]),
    ("pairs 2^64-1", |file| file.num_pairs = Some(u64::MAX), &["header.metadata_kv_count"]),
    ("one pair too many", |file| file.num_pairs = Some(file.pairs.len() as u64 + 1), &["tensor[0].name"]),
    ("one tensor too many", |file| file.num_tensors = Some(file.tensors.len() as u64 + 1), &["tensor[11].name"]),
];

const METADATA: &[Case] = &[
    ("key of 2^60 bytes", |file| file.raw_pair(HUGE, b"k", U32, &[0; 4]), &["metadata[0].key", "1152921504606846976"]),
    ("key of 2^64-1 bytes", |file| file.raw_pair(u64::MAX, b"k", U32, &[0; 4]), &["metadata[0].key"]),
    ("empty key", |file| file.raw_pair(0, b"", U32, &[0; 4]), &["metadata[0].key", "empty"]),
    ("key not UTF-8", |file| file.raw_pair(2, &[0xff, 0xfe], U32, &[0; 4]), &["metadata[0].key", "UTF-8"]),
    ("type 13", |file| file.set("x.type", 13, vec![0; 8]), &["x.type", "13"]),
    ("type 2^32-1", |file| file.set("x.type", u32::MAX, vec![0; 8]), &["x.type", "4294967295"]),
    (
        "string of 2^60",
        |file| file.set("x.text", STRING, HUGE.to_le_bytes().to_vec()),
        &["x.text", "1152921504606846976"],
    ),
    ("string of 2^64-1", |file| file.set("x.text", STRING, u64::MAX.to_le_bytes().to_vec()), &["x.text"]),
    ("string not UTF-8", |file| file.set("x.text", STRING, string(&[b'a', 0xc3])), &["x.text", "UTF-8"]),
    ("bool 2", |file| file.set("x.flag", 7, vec![2]), &["x.flag", "got 2"]),
    ("bools of 3", |file| file.set("x.flags", ARRAY, array(7, 2, &[1, 3])), &["x.flags", "got 3"]),
    ("array of 2^60 bytes", |file| file.set("x.list", ARRAY, array(0, HUGE, &[])), &["x.list", "1152921504606846976"]),
    ("array of 2^61 doubles", |file| file.set("x.list", ARRAY, array(12, HUGE * 2, &[])), &["x.list"]),
    ("array of 2^60 strings", |file| file.set("x.list", ARRAY, array(8, HUGE, &[])), &["x.list"]),
    ("array of 2^60 arrays", |file| file.set("x.list", ARRAY, array(9, HUGE, &[])), &["x.list"]),
    ("array of type 13", |file| file.set("x.list", ARRAY, array(13, 1, &[0; 8])), &["x.list", "13"]),
    ("array in 5 arrays", |file| file.set("x.list", ARRAY, nested(5)), &["x.list", "nest"]),
    ("string in an array", |file| file.set("x.list", ARRAY, array(8, 1, &HUGE.to_le_bytes())), &["x.list"]),
    (
        "key twice",
        |file| file.raw_pair(20, b"general.architecture", STRING, &string(b"llama")),
        &["general.architecture", "more than once"],
    ),
    ("alignment 0", |file| file.set_u32("general.alignment", 0), &["general.alignment", "got 0"]),
    ("alignment 48", |file| file.set_u32("general.alignment", 48), &["general.alignment", "got 48"]),
    ("alignment 2^31", |file| file.set_u32("general.alignment", 1 << 31), &["blk.0.attn_k.weight"]),
    ("alignment a text", |file| file.set("general.alignment", STRING, string(b"32")), &["general.alignment", "string"]),
];

const CONFIG: &[Case] = &[
    ("no architecture", |file| file.remove("general.architecture"), &["general.architecture", "missing"]),
    (
        "foreign architecture",
        |file| file.set("general.architecture", STRING, string(b"mamba")),
        &["general.architecture", "mamba"],
    ),
    ("no layers key", |file| file.remove("llama.block_count"), &["llama.block_count", "missing"]),
    ("layers 0", |file| file.set_u32("llama.block_count", 0), &["num_hidden_layers", "got 0"]),
    ("layers 2^27", |file| file.set_u32("llama.block_count", 1 << 27), &["blk.1.attn_norm.weight", "missing"]),
    ("layers 2^60", |file| file.set("llama.block_count", 10, HUGE.to_le_bytes().to_vec()), &["num_hidden_layers"]),
    (
        "layers -1",
        |file| file.set("llama.block_count", 5, (-1i32).to_le_bytes().to_vec()),
        &["llama.block_count", "-1"],
    ),
    ("layers a text", |file| file.set("llama.block_count", STRING, string(b"1")), &["llama.block_count", "string"]),
    ("heads 0", |file| file.set_u32("llama.attention.head_count", 0), &["num_attention_heads", "got 0"]),
    ("heads 3 of 2", |file| file.set_u32("llama.attention.head_count_kv", 3), &["num_key_value_heads", "got 3"]),
    ("hidden size 64", |file| file.set_u32("llama.embedding_length", 64), &["token_embd.weight", "[4, 64]", "[4, 32]"]),
    ("intermediate 64", |file| file.set_u32("llama.feed_forward_length", 64), &["blk.0.ffn_gate.weight", "[64, 32]"]),
    ("head of 2^30", |file| file.set_u32("llama.attention.key_length", 1 << 30), &["head_dim", "1073741824"]),
    ("rotary 15", |file| file.set_u32("llama.rope.dimension_count", 15), &["rope.dimension_count", "got 15"]),
    ("rotary 18", |file| file.set_u32("llama.rope.dimension_count", 18), &["rope.dimension_count", "got 18"]),
    ("theta NaN", |file| file.set_f32("llama.rope.freq_base", f32::NAN), &["llama.rope.freq_base", "finite"]),
    ("theta 0", |file| file.set_f32("llama.rope.freq_base", 0.0), &["llama.rope.freq_base", "got 0"]),
    ("epsilon -1", |file| file.set_f32("llama.attention.layer_norm_rms_epsilon", -1.0), &["rms_norm_eps", "-1"]),
    (
        "foreign scaling",
        |file| file.set("llama.rope.scaling.type", STRING, string(b"longrope")),
        &["llama.rope.scaling.type", "longrope"],
    ),
    ("experts", |file| file.set_u32("llama.expert_count", 8), &["llama.expert_count", "8"]),
    (
        "too many tokens",
        |file| file.set("tokenizer.ggml.tokens", ARRAY, tokens(5)),
        &["tokenizer.ggml.tokens", "5 tokens"],
    ),
    ("template a number", |file| file.set_u32("tokenizer.chat_template", 1), &["tokenizer.chat_template", "uint32"]),
];

const TENSORS: &[Case] = &[
    ("name of 2^60 bytes", |file| file.tensors[0].name_length = Some(HUGE), &["tensor[0].name"]),
    ("name not UTF-8", |file| file.tensors[3].name = vec![0xff, b'a'], &["tensor[3].name", "UTF-8"]),
    ("empty name", |file| file.tensors[2].name.clear(), &["tensor[2].name", "empty"]),
    ("name twice", |file| file.tensors[5].name = file.tensors[4].name.clone(), &["more than once"]),
    ("0 dimensions", |file| file.tensors[0].num_dimensions = Some(0), &["blk.0.attn_k.weight", "got 0"]),
    ("5 dimensions", |file| file.tensors[0].num_dimensions = Some(5), &["blk.0.attn_k.weight", "got 5"]),
    ("2^32-1 dimensions", |file| file.tensors[0].num_dimensions = Some(u32::MAX), &["blk.0.attn_k.weight"]),
    ("dimension 0", |file| file.tensors[0].dimensions[1] = 0, &["blk.0.attn_k.weight", "dimension 1"]),
    (
        "dimensions overflow",
        |file| file.tensors[0].dimensions = vec![1 << 40, 1 << 40],
        &["blk.0.attn_k.weight", "overflow"],
    ),
    ("bytes overflow", |file| file.tensors[0].dimensions = vec![1 << 62, 2], &["blk.0.attn_k.weight", "overflow"]),
    ("2^50 rows", |file| file.tensors[0].dimensions[1] = 1 << 50, &["blk.0.attn_k.weight", "the file has"]),
    ("type 31", |file| file.tensors[0].type_id = 31, &["blk.0.attn_k.weight", "31"]),
    ("foreign type", |file| file.tensors[0].type_id = 20, &["blk.0.attn_k.weight", "IQ4_NL"]),
    (
        "broken block",
        |file| file.tensors[0].type_id = 12,
        &["blk.0.attn_k.weight", "multiple of the Q4_K block of 256"],
    ),
    ("offset off alignment", |file| file.tensors[1].offset += 4, &["multiple of the alignment 32"]),
    ("offset past the end", |file| file.tensors[1].offset = 1 << 40, &["blk.0.attn_norm.weight", "1099511627776"]),
    ("offset overflows", |file| file.tensors[1].offset = u64::MAX - 31, &["blk.0.attn_norm.weight"]),
    ("overlap", |file| file.tensors[1].offset = file.tensors[0].offset, &["blk.0.attn", "inside"]),
    ("partial overlap", |file| file.tensors[1].offset -= 32, &["blk.0.attn_norm.weight", "inside blk.0.attn_k.weight"]),
    ("tensor missing", |file| file.tensors[7].name = b"other".to_vec(), &["blk.0.ffn_norm.weight", "missing"]),
    (
        "tensor transposed",
        |file| file.tensors[0].dimensions.reverse(),
        &["blk.0.attn_k.weight", "[16, 32]", "[32, 16]"],
    ),
    ("biases", |file| file.tensors[1].name = b"blk.0.attn_q.bias".to_vec(), &["blk.0.attn_q.bias"]),
];

fn nested(depth: usize) -> Vec<u8> {
    (1..depth).fold(array(0, 1, &[0]), |inner, _| array(9, 1, &inner))
}

fn tokens(count: u64) -> Vec<u8> {
    array(8, count, &(0..count).flat_map(|id| string(format!("t{id}").as_bytes())).collect::<Vec<_>>())
}

fn open(path: &Path, bytes: &[u8]) -> Result<Checkpoint, ModelError> {
    std::fs::write(path, bytes).expect("write the file");
    Checkpoint::open(path)
}

#[test]
fn misleading_files_are_refused_by_field() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("hostile.gguf");
    open(&path, &RawGguf::sound().encode()).expect("the file that every case changes is sound");
    let before = peak_bytes();
    let cases = [HEADER, METADATA, CONFIG, TENSORS].concat();
    assert!(cases.len() >= 50, "{} cases", cases.len());
    let mut failures = Vec::new();
    for (name, change, expected) in cases {
        let mut file = RawGguf::sound();
        change(&mut file);
        let error = open(&path, &file.encode()).err().map_or("no error".into(), |error| error.to_string());
        let missing = expected.iter().chain(&["hostile.gguf"]).find(|&&part| !error.contains(part));
        failures.extend(missing.map(|part| format!("{name}: expected {part:?} in: {error}")));
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    let grown = peak_bytes().saturating_sub(before);
    assert!(grown < 64 << 20, "address space grew by {grown} bytes");
}

/// Largest address space that this process ever had; 0 where the system does not tell.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPeak:"));
    line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

#[test]
fn a_file_cut_anywhere_is_refused_by_field() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("cut.gguf");
    let whole = RawGguf::sound().encode();
    std::fs::write(&path, &whole).expect("write the file");
    let file = std::fs::OpenOptions::new().write(true).open(&path).expect("open for writing");
    // Every length within the directory, and some within the tensor data.
    let directory = whole.len() - RawGguf::sound().data_bytes;
    let lengths = (0..directory).chain((directory..whole.len()).step_by(97));
    for length in lengths.map(|length| length as u64).rev() {
        file.set_len(length).expect("cut");
        match Checkpoint::open(&path).expect_err("a cut file") {
            ModelError::Invalid { field, problem, .. } => {
                assert!(!field.is_empty() && !problem.is_empty(), "cut to {length}: {field}: {problem}");
            }
            other => panic!("cut to {length}: {other}"),
        }
    }
}

#[test]
fn flipped_bytes_never_panic() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("flipped.gguf");
    let whole = RawGguf::sound().encode();
    let directory = whole.len() - RawGguf::sound().data_bytes;
    let mut state = 1u64;
    let mut refused = 0;
    for _ in 0..1000 {
        let mut bytes = whole.clone();
        for _ in 0..3 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            bytes[(state >> 33) as usize % directory] = (state >> 24) as u8;
        }
        refused += usize::from(open(&path, &bytes).is_err());
    }
    assert!(refused > 0);
}

#[test]
fn a_file_that_shrinks_while_it_loads_is_an_error_that_names_the_tensor() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("shrinking.gguf");
    let whole = RawGguf::sound().encode();
    let checkpoint = open(&path, &whole).expect("a sound file");
    checkpoint.read_slice(TensorRole::TokenEmbedding, None, 0..4, 0..32).expect("read before it shrinks");
    let file = std::fs::OpenOptions::new().write(true).open(&path).expect("open for writing");
    file.set_len(whole.len() as u64 - 64).expect("shrink");
    let error = checkpoint.read_slice(TensorRole::TokenEmbedding, None, 0..4, 0..32).expect_err("shrunk").to_string();
    assert!(error.contains("token_embd.weight") && error.contains("shrank"), "{error}");
}
