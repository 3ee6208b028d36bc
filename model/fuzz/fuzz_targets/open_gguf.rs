//! Any bytes as a GGUF file: opening, building its tokenizer and reading its tensors never panic.
//! Run: `cargo +nightly fuzz run open_gguf` in `model/`; seeds from `lockstep synth` in `fuzz/corpus/open_gguf`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use lockstep_model::{Checkpoint, ModelError};

fuzz_target!(|bytes: &[u8]| {
    let Ok(folder) = tempfile::tempdir() else { return };
    let path = folder.path().join("fuzzed.gguf");
    if std::fs::write(&path, bytes).is_err() {
        return;
    }
    match Checkpoint::open(&path) {
        Ok(checkpoint) => {
            for tensor in &checkpoint.shape().tensors {
                let read = checkpoint.read_slice(tensor.role, tensor.layer, 0..tensor.rows, 0..tensor.columns);
                assert_eq!(read.map(|bytes| bytes.len() as u64).ok(), Some(tensor.bytes()));
            }
            let _ = checkpoint.tokenizer();
        }
        Err(ModelError::Invalid { field, problem, .. }) => assert!(!field.is_empty() && !problem.is_empty()),
        Err(ModelError::Unsupported { field, .. }) => assert!(!field.is_empty()),
        Err(_) => {}
    }
});
