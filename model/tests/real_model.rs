//! The reader on a real checkpoint: SmolLM2-135M-Instruct Q4_1, found through `LOCKSTEP_TEST_MODEL`.

#![allow(clippy::expect_used, clippy::panic, reason = "a test says what it expected")]

use std::path::PathBuf;

use lockstep_formats::GgmlType;
use lockstep_model::{Checkpoint, RopeStyle};
use lockstep_sharding::TensorRole;

fn open() -> Checkpoint {
    let path = std::env::var_os("LOCKSTEP_TEST_MODEL")
        .map(PathBuf::from)
        .expect("LOCKSTEP_TEST_MODEL is not set: run tests/run.sh, which fetches the model and sets it");
    Checkpoint::open(&path).expect("open the model")
}

#[test]
fn smollm2_has_its_dimensions() {
    let checkpoint = open();
    let config = checkpoint.config();
    assert_eq!(config.architecture, "llama");
    assert_eq!((config.num_hidden_layers, config.hidden_size, config.intermediate_size), (30, 576, 1536));
    assert_eq!((config.num_attention_heads, config.num_key_value_heads, config.head_dim), (9, 3, 64));
    assert_eq!((config.max_position_embeddings, config.vocab_size), (8192, 49152));
    assert_eq!(config.rms_norm_eps, 1e-5);
    assert_eq!((config.rope.style, config.rope.rotary_dim, config.rope.magnitude), (RopeStyle::Interleaved, 64, 1.0));
    assert_eq!(config.rope.frequencies.len(), 32);
    assert!((config.rope.frequencies[1] - 100_000f32.powf(-2.0 / 64.0)).abs() < 1e-7);

    let shape = checkpoint.shape();
    assert_eq!(shape.tensors.len(), 272);
    assert!(shape.has_tied_embeddings());
    assert_eq!(shape.tensor(TensorRole::TokenEmbedding, None).map(|tensor| tensor.ggml_type), Some(GgmlType::Q8_0));
    assert_eq!(shape.tensor(TensorRole::Down, Some(29)).map(|tensor| tensor.ggml_type), Some(GgmlType::Q4_1));
    assert_eq!(shape.tensors.iter().map(|tensor| tensor.bytes()).sum::<u64>(), 98_362_432 - 1_785_664);
}

#[test]
fn slices_reassemble_the_tensor_and_read_nothing_else() {
    let checkpoint = open();
    let (role, layer) = (TensorRole::Down, Some(7));
    let whole = checkpoint.read_slice(role, layer, 0..576, 0..1536).expect("whole");
    let before = checkpoint.bytes_read();
    let left = checkpoint.read_slice(role, layer, 0..576, 0..512).expect("left columns");
    let right = checkpoint.read_slice(role, layer, 0..576, 512..1536).expect("right columns");
    assert_eq!(checkpoint.bytes_read() - before, whole.len() as u64);
    let rows = left.chunks(512 / 32 * 20).zip(right.chunks(1024 / 32 * 20));
    assert_eq!(rows.flat_map(|(left, right)| [left, right].concat()).collect::<Vec<_>>(), whole);
    let rows = checkpoint.read_slice(role, layer, 100..103, 0..1536).expect("rows");
    assert_eq!(rows, whole[100 * 960..103 * 960]);

    let error = checkpoint.read_slice(role, layer, 0..576, 0..500).expect_err("off a block border").to_string();
    assert!(error.contains("blk.7.ffn_down.weight") && error.contains("0..500"), "{error}");
    let error = checkpoint.read_slice(role, layer, 0..577, 0..32).expect_err("outside").to_string();
    assert!(error.contains("blk.7.ffn_down.weight") && error.contains("576"), "{error}");
}

#[test]
fn smollm2_has_its_tokenizer_and_template() {
    let checkpoint = open();
    let tokenizer = checkpoint.tokenizer().expect("tokenizer");
    assert_eq!(tokenizer.vocab_size(), 49152);
    let ids = tokenizer.encode("Hello, world! 123 naïve 😀", true).expect("encode");
    assert_eq!(ids, [19556, 28, 905, 17, 216, 33, 34, 35, 15486, 46494, 40303, 218]);
    assert!(checkpoint.chat_template().is_some_and(|template| template.contains("<|im_start|>")));
}
