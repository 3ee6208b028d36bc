//! Folders of safetensors: what they say reaches the checkpoint, and what is wrong in them is named.

#![allow(clippy::expect_used, clippy::panic, reason = "a test says what it expected")]

use std::{fs, path::Path};

use lockstep_formats::GgmlType;
use lockstep_model::{
    Checkpoint, RopeStyle,
    synth::{Quantization, SynthSpec, synth},
};
use lockstep_sharding::TensorRole;
use serde_json::{Map, Value, json};

/// A file of `(name, dtype, shape, bytes)`.
fn encode(tensors: &[(String, &str, Vec<usize>, Vec<u8>)]) -> Vec<u8> {
    let mut header = Map::new();
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets }));
        data.extend(bytes);
    }
    with_header(&Value::Object(header).to_string(), &data)
}

fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 283, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "rope_scaling": null, "tie_word_embeddings": false, "attention_bias": false,
        "bos_token_id": 0, "eos_token_id": 2,
    })
}

/// The tensors of [`config`], each filled with its own number.
fn tensors() -> Vec<(String, &'static str, Vec<usize>, Vec<u8>)> {
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let shapes = [
        ("model.embed_tokens.weight".into(), vec![283, 32]),
        (layer("input_layernorm"), vec![32]),
        (layer("self_attn.q_proj"), vec![32, 32]),
        (layer("self_attn.k_proj"), vec![16, 32]),
        (layer("self_attn.v_proj"), vec![16, 32]),
        (layer("self_attn.o_proj"), vec![32, 32]),
        (layer("post_attention_layernorm"), vec![32]),
        (layer("mlp.gate_proj"), vec![48, 32]),
        (layer("mlp.up_proj"), vec![48, 32]),
        (layer("mlp.down_proj"), vec![32, 48]),
        ("model.norm.weight".into(), vec![32]),
        ("lm_head.weight".into(), vec![283, 32]),
    ];
    let filled = shapes.into_iter().zip(1u8..).map(|((name, shape), number): ((String, Vec<usize>), u8)| {
        let bytes = vec![number; shape.iter().product::<usize>() * 2];
        (name, "BF16", shape, bytes)
    });
    filled.collect()
}

/// Writes a folder in two shards with a tokenizer.
fn write_folder(folder: &Path, config: &Value) {
    let tensors = tensors();
    let (first, second) = tensors.split_at(5);
    fs::write(folder.join("model-00001-of-00002.safetensors"), encode(first)).expect("first shard");
    fs::write(folder.join("model-00002-of-00002.safetensors"), encode(second)).expect("second shard");
    let shard = |index: usize| format!("model-0000{}-of-00002.safetensors", 1 + usize::from(index >= 5));
    let map = tensors.iter().enumerate().map(|(index, tensor)| (tensor.0.clone(), shard(index).into()));
    let index = json!({ "metadata": {}, "weight_map": Value::Object(map.collect()) });
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).expect("index");
    fs::write(folder.join("config.json"), config.to_string()).expect("config");
}

fn write_tokenizer(folder: &Path) {
    let mut spec = SynthSpec::preset("tiny", Quantization::Uniform(GgmlType::Q8_0)).expect("preset");
    spec.vocab_size = 283;
    let path = folder.join("other.gguf");
    synth(&spec, &path, |_, _| {}).expect("synthesize");
    let tokenizer = Checkpoint::open(&path).and_then(|checkpoint| checkpoint.tokenizer()).expect("tokenizer");
    fs::write(folder.join("tokenizer.json"), tokenizer.to_json().expect("json")).expect("tokenizer.json");
    let settings = json!({
        "bos_token": { "content": "<|endoftext|>" }, "eos_token": "<|im_end|>", "add_bos_token": true,
        "chat_template": [{ "name": "tools", "template": "no" }, { "name": "default", "template": "yes" }],
    });
    fs::write(folder.join("tokenizer_config.json"), settings.to_string()).expect("tokenizer_config.json");
    let generation = json!({ "eos_token_id": [1, 2] });
    fs::write(folder.join("generation_config.json"), generation.to_string()).expect("generation_config.json");
}

#[test]
fn a_sharded_folder_opens_reads_and_tokenizes() {
    let folder = tempfile::tempdir().expect("folder");
    write_folder(folder.path(), &config());
    write_tokenizer(folder.path());
    let checkpoint = Checkpoint::open(folder.path()).expect("open");
    let config = checkpoint.config();
    assert_eq!((config.head_dim, config.vocab_size, config.max_position_embeddings), (16, 283, 64));
    assert_eq!((config.rope.style, config.rope.frequencies.len()), (RopeStyle::Halves, 8));
    assert!(!checkpoint.shape().has_tied_embeddings());
    assert_eq!(checkpoint.shape().tensors.len(), 12);
    let read = |role, layer, rows, columns| checkpoint.read_slice(role, layer, rows, columns).expect("read");
    assert_eq!(read(TensorRole::Key, Some(0), 3..5, 0..32), [4; 128]);
    assert_eq!(read(TensorRole::Down, Some(0), 0..32, 8..9), [10; 64]);
    assert_eq!(read(TensorRole::OutputNorm, None, 0..1, 0..32), [11; 64]);
    assert_eq!(
        checkpoint.shape().tensor(TensorRole::Output, None).map(|tensor| tensor.ggml_type),
        Some(GgmlType::BF16)
    );

    let tokenizer = checkpoint.tokenizer().expect("tokenizer");
    assert_eq!(tokenizer.config().bos_token_id, Some(0));
    assert_eq!(tokenizer.config().eos_token_ids, [1, 2]);
    assert_eq!(tokenizer.encode("the", true).expect("encode").first(), Some(&0));
    assert_eq!(checkpoint.chat_template(), Some("yes"));
    fs::write(folder.path().join("chat_template.jinja"), "from a file").expect("template");
    assert_eq!(Checkpoint::open(folder.path()).expect("open again").chat_template(), Some("from a file"));
}

#[test]
fn a_single_file_opens_and_tied_embeddings_need_no_head() {
    let folder = tempfile::tempdir().expect("folder");
    let mut config = config();
    config["tie_word_embeddings"] = true.into();
    fs::write(folder.path().join("config.json"), config.to_string()).expect("config");
    let path = folder.path().join("model.safetensors");
    fs::write(&path, encode(&tensors()[..11])).expect("weights");
    for opened in [folder.path(), &path] {
        let checkpoint = Checkpoint::open(opened).expect("open");
        assert!(checkpoint.shape().has_tied_embeddings());
    }
    config["tie_word_embeddings"] = false.into();
    fs::write(folder.path().join("config.json"), config.to_string()).expect("config");
    let error = Checkpoint::open(&path).expect_err("no head").to_string();
    assert!(error.contains("lm_head.weight") && error.contains("missing"), "{error}");
}

#[test]
fn configurations_that_cannot_be_run_are_refused_by_field() {
    let folder = tempfile::tempdir().expect("folder");
    let cases = [
        ("architectures", json!(["Qwen3ForCausalLM"]), "Qwen3ForCausalLM"),
        ("hidden_size", json!("32"), "hidden_size"),
        ("hidden_size", json!(-1), "hidden_size"),
        ("hidden_size", Value::Null, "hidden_size: missing"),
        ("hidden_size", json!(64), "model.embed_tokens.weight: expected shape [283, 64], got [283, 32]"),
        ("num_hidden_layers", json!(2), "model.layers.1.input_layernorm.weight"),
        ("num_hidden_layers", json!(1u64 << 60), "num_hidden_layers"),
        ("num_key_value_heads", json!(3), "num_key_value_heads"),
        ("attention_bias", json!(true), "attention_bias"),
        ("mlp_bias", json!(true), "mlp_bias"),
        ("hidden_act", json!("gelu"), "gelu"),
        ("quantization_config", json!({ "quant_method": "awq" }), "quantization_config"),
        ("rope_theta", json!(0), "rope base"),
        ("rope_scaling", json!({ "rope_type": "longrope" }), "rope_scaling.rope_type \"longrope\""),
        ("rope_scaling", json!({ "type": "dynamic", "factor": 2.0 }), "rope_scaling.type \"dynamic\""),
        ("rope_scaling", json!({ "rope_type": "llama3", "factor": 8.0 }), "rope_scaling.low_freq_factor: missing"),
        ("rope_scaling", json!({ "rope_type": "linear", "factor": 0 }), "rope_scaling.factor"),
        ("rope_parameters", json!({ "rope_type": "yarn", "mscale": 1.0 }), "rope_parameters.mscale"),
    ];
    for (key, value, expected) in cases {
        let mut config = config();
        config[key] = value;
        write_folder(folder.path(), &config);
        let error = Checkpoint::open(folder.path()).expect_err(expected).to_string();
        assert!(error.contains(expected), "expected {expected:?} in: {error}");
    }
}

#[test]
fn rope_settings_old_and_new_give_the_same() {
    let folder = tempfile::tempdir().expect("folder");
    let open = |config: &Value| {
        write_folder(folder.path(), config);
        Checkpoint::open(folder.path()).expect("open")
    };
    let mut old = config();
    old["rope_scaling"] = json!({
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    });
    let mut new = config();
    new["rope_parameters"] = old["rope_scaling"].clone();
    new["rope_parameters"]["rope_theta"] = json!(500000.0);
    new["rope_theta"] = Value::Null;
    let plain = open(&config()).config().rope.clone();
    let scaled = open(&old).config().rope.clone();
    assert_eq!(scaled, open(&new).config().rope);
    assert_eq!(scaled.frequencies[0], plain.frequencies[0]);
    assert_ne!(scaled.frequencies[7], plain.frequencies[7]);

    let mut mistral = config();
    mistral["architectures"] = json!(["MistralForCausalLM"]);
    mistral["sliding_window"] = json!(16);
    assert_eq!(open(&mistral).config().max_position_embeddings, 16);
}

#[test]
fn hostile_weights_are_refused_by_field() {
    let folder = tempfile::tempdir().expect("folder");
    fs::write(folder.path().join("config.json"), config().to_string()).expect("config");
    let entry = |body: &str| with_header(&format!("{{\"a.weight\":{body}}}"), &[0; 64]);
    let cases = [
        (b"".to_vec(), "header length"),
        (vec![0; 7], "header length"),
        (u64::MAX.to_le_bytes().to_vec(), "header length"),
        ([&(1u64 << 60).to_le_bytes()[..], b"{}"].concat(), "1152921504606846976"),
        (with_header("{", &[]), "header"),
        (with_header("[]", &[]), "header"),
        (entry("3"), "a.weight"),
        (entry(r#"{"dtype":"F32","shape":[16]}"#), "data_offsets"),
        (entry(r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,64]}"#), "a.weight"),
        (entry(r#"{"dtype":"F32","shape":[],"data_offsets":[0,4]}"#), "a.weight"),
        (entry(r#"{"dtype":"F32","shape":[0],"data_offsets":[0,0]}"#), "a.weight"),
        (entry(r#"{"dtype":"I64","shape":[8],"data_offsets":[0,64]}"#), "dtype I64"),
        (entry(r#"{"dtype":"F32","shape":[16],"data_offsets":[0,65]}"#), "not inside the 64 bytes"),
        (entry(r#"{"dtype":"F32","shape":[16],"data_offsets":[64,0]}"#), "[64, 0]"),
        (entry(r#"{"dtype":"F32","shape":[15],"data_offsets":[0,64]}"#), "expected 60 bytes"),
        (entry(r#"{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,64]}"#), "overflows"),
        (
            entry(
                r#"{"dtype":"F32","shape":[16],"data_offsets":[0,64]},"b.weight":{"dtype":"F16","shape":[2],"data_offsets":[60,64]}"#,
            ),
            "inside a.weight",
        ),
        (
            entry(
                r#"{"dtype":"F32","shape":[8],"data_offsets":[0,32]},"a.weight":{"dtype":"F32","shape":[8],"data_offsets":[32,64]}"#,
            ),
            "more than one",
        ),
        (with_header("{}", &[]), "model.embed_tokens.weight: tensor is missing"),
    ];
    let path = folder.path().join("model.safetensors");
    for (bytes, expected) in cases {
        fs::write(&path, &bytes).expect("weights");
        let error = Checkpoint::open(&path).expect_err(expected).to_string();
        assert!(error.contains(expected), "expected {expected:?} in: {error}");
    }
}

#[test]
fn an_index_may_not_lead_out_of_its_folder() {
    let folder = tempfile::tempdir().expect("folder");
    write_folder(folder.path(), &config());
    for name in ["../secret.safetensors", "/etc/passwd", "..", ""] {
        let index = json!({ "weight_map": { "model.norm.weight": name } });
        fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).expect("index");
        let error = Checkpoint::open(folder.path()).expect_err(name).to_string();
        assert!(error.contains("weight_map.model.norm.weight") && error.contains("file name"), "{error}");
    }
}

#[test]
fn a_file_that_is_no_configuration_takes_no_memory() {
    let folder = tempfile::tempdir().expect("folder");
    write_folder(folder.path(), &config());
    let sparse = fs::File::create(folder.path().join("config.json")).expect("config");
    sparse.set_len(1 << 43).expect("length");
    let error = Checkpoint::open(folder.path()).expect_err("8 TiB").to_string();
    assert!(error.contains("config.json") && error.contains("expected at most"), "{error}");
}
