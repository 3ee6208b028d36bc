//! The stub's model: its shape and its tokenizer, in which tokens are bytes.

use lockstep_sharding::ModelShape;
use serde_json::json;

use super::MODEL_TOKENS;

/// Two layers, two heads, a vocabulary of all bytes.
pub fn shape() -> ModelShape {
    let tensor = |role: &str, layer: Option<usize>, rows: usize, columns: usize| json!({ "role": role, "layer": layer, "rows": rows, "columns": columns, "ggml_type": "F32" });
    let mut tensors = vec![tensor("TokenEmbedding", None, 256, 64), tensor("OutputNorm", None, 1, 64)];
    for layer in [Some(0), Some(1)] {
        for role in ["AttentionNorm", "FeedForwardNorm"] {
            tensors.push(tensor(role, layer, 1, 64));
        }
        for role in ["Query", "Key", "Value", "AttentionOutput"] {
            tensors.push(tensor(role, layer, 64, 64));
        }
        tensors.extend([tensor("Gate", layer, 128, 64), tensor("Up", layer, 128, 64), tensor("Down", layer, 64, 128)]);
    }
    serde_json::from_value(json!({
        "architecture": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256,
        "max_position_embeddings": MODEL_TOKENS, "tensors": tensors,
    }))
    .unwrap()
}

/// Every byte is a token whose id is its value; byte 0 is the end of sequence.
pub fn tokenizer_json() -> Vec<u8> {
    let mut next = 256;
    let vocabulary: serde_json::Map<_, _> = (0..256_u32)
        .map(|byte| {
            // GPT-2's alphabet: printable bytes stand for themselves, the others for characters from 256 on.
            let is_printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
            let character = if is_printable { byte } else { next };
            next += u32::from(!is_printable);
            (char::from_u32(character).unwrap().to_string(), json!(byte))
        })
        .collect();
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": [],
        },
    });
    serde_json::to_vec(&tokenizer).unwrap()
}
