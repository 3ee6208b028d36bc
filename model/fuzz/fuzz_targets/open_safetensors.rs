//! Any bytes as a safetensors file beside a sound `config.json`: opening it never panics.
//! Run: `cargo +nightly fuzz run open_safetensors` in `model/`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use lockstep_model::Checkpoint;

const CONFIG: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 4, "tie_word_embeddings": true
}"#;

fuzz_target!(|bytes: &[u8]| {
    let Ok(folder) = tempfile::tempdir() else { return };
    let path = folder.path().join("model.safetensors");
    let written = std::fs::write(folder.path().join("config.json"), CONFIG).and_then(|()| std::fs::write(&path, bytes));
    if written.is_ok() {
        let _ = Checkpoint::open(&path);
    }
});
