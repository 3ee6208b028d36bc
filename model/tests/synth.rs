//! Synthesized checkpoints: they open, have the shape that was asked for, weights of the right spread, and a tokenizer.

#![allow(clippy::expect_used, clippy::panic, reason = "a test says what it expected")]

use std::path::Path;

use candle_core::{Device, quantized::ggml_file::qtensor_from_ggml};
use lockstep_formats::GgmlType;
use lockstep_model::{
    ChatMessage, ChatTemplate, Checkpoint,
    synth::{Quantization, SynthSpec, synth},
};
use lockstep_sharding::{PlanOptions, TensorRole, TensorShape, Topology};

fn write(spec: &SynthSpec, path: &Path) -> Checkpoint {
    synth(spec, path, |_, _| {}).expect("synthesize");
    Checkpoint::open(path).expect("open what was synthesized")
}

/// Mean and standard deviation of a tensor, as candle dequantizes it.
fn moments(checkpoint: &Checkpoint, tensor: &TensorShape) -> (f64, f64) {
    let bytes = checkpoint
        .read_slice(tensor.role, tensor.layer, 0..tensor.rows, 0..tensor.columns)
        .expect("read the whole tensor");
    let dtype = match tensor.ggml_type {
        GgmlType::F32 => candle_core::quantized::GgmlDType::F32,
        GgmlType::F16 => candle_core::quantized::GgmlDType::F16,
        GgmlType::BF16 => candle_core::quantized::GgmlDType::BF16,
        GgmlType::Q4_0 => candle_core::quantized::GgmlDType::Q4_0,
        GgmlType::Q4_1 => candle_core::quantized::GgmlDType::Q4_1,
        GgmlType::Q5_0 => candle_core::quantized::GgmlDType::Q5_0,
        GgmlType::Q5_1 => candle_core::quantized::GgmlDType::Q5_1,
        GgmlType::Q8_0 => candle_core::quantized::GgmlDType::Q8_0,
        GgmlType::Q8_1 => candle_core::quantized::GgmlDType::Q8_1,
        GgmlType::Q2_K => candle_core::quantized::GgmlDType::Q2K,
        GgmlType::Q3_K => candle_core::quantized::GgmlDType::Q3K,
        GgmlType::Q4_K => candle_core::quantized::GgmlDType::Q4K,
        GgmlType::Q5_K => candle_core::quantized::GgmlDType::Q5K,
        GgmlType::Q6_K => candle_core::quantized::GgmlDType::Q6K,
        GgmlType::Q8_K => candle_core::quantized::GgmlDType::Q8K,
    };
    let values: Vec<f32> = if matches!(tensor.ggml_type, GgmlType::Q8_1 | GgmlType::Q8_K) {
        dequantize_q8(&bytes, tensor.ggml_type)
    } else {
        let quantized = qtensor_from_ggml(dtype, &bytes, vec![tensor.rows, tensor.columns], &Device::Cpu);
        let values = quantized.and_then(|tensor| tensor.dequantize(&Device::Cpu)).expect("dequantize");
        values.flatten_all().and_then(|values| values.to_vec1()).expect("values")
    };
    assert!(values.iter().all(|value| value.is_finite()));
    let mean = values.iter().map(|&value| f64::from(value)).sum::<f64>() / values.len() as f64;
    let squares = values.iter().map(|&value| (f64::from(value) - mean).powi(2)).sum::<f64>();
    (mean, (squares / values.len() as f64).sqrt())
}

/// Candle has no dequantization of the two types that are meant for activations; checks their sums too.
fn dequantize_q8(bytes: &[u8], ggml_type: GgmlType) -> Vec<f32> {
    let mut values = Vec::new();
    for block in bytes.chunks(ggml_type.block_bytes()) {
        let half = |at: usize| half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
        if ggml_type == GgmlType::Q8_1 {
            let quants = block[4..].iter().map(|&quant| f32::from(quant as i8));
            let sum: f32 = quants.clone().sum();
            assert!((half(2) - half(0) * sum).abs() <= 1e-3 * half(2).abs() + 1e-6);
            values.extend(quants.map(|quant| half(0) * quant));
        } else {
            let scale = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
            values.extend(block[4..260].iter().map(|&quant| scale * f32::from(quant as i8)));
            for (index, sum) in block[260..].chunks(2).enumerate() {
                let quants = &block[4 + 16 * index..20 + 16 * index];
                let expected: i16 = quants.iter().map(|&quant| i16::from(quant as i8)).sum();
                assert_eq!(i16::from_le_bytes([sum[0], sum[1]]), expected);
            }
        }
    }
    values
}

#[test]
fn every_type_has_the_spread_that_keeps_activations_alive() {
    let folder = tempfile::tempdir().expect("folder");
    for quantization in GgmlType::all().map(Quantization::Uniform).chain([Quantization::Q4KM]) {
        let spec = SynthSpec::preset("tiny", quantization).expect("preset");
        let checkpoint = write(&spec, &folder.path().join("model.gguf"));
        assert_eq!(checkpoint.shape(), &spec.shape().expect("shape"), "{quantization}");
        assert_eq!(checkpoint.config(), &spec.config().expect("config"), "{quantization}");
        for role in [TensorRole::Down, TensorRole::Query] {
            let tensor = checkpoint.shape().tensor(role, Some(1)).expect("tensor");
            let (mean, deviation) = moments(&checkpoint, tensor);
            let expected = 1.0 / (tensor.columns as f64).sqrt();
            assert!((deviation / expected - 1.0).abs() < 0.03, "{quantization} {role:?}: {deviation} for {expected}");
            assert!(mean.abs() < 0.03 * expected, "{quantization} {role:?}: mean {mean} for deviation {expected}");
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_another_gives_others() {
    let folder = tempfile::tempdir().expect("folder");
    let mut spec = SynthSpec::preset("tiny", Quantization::Q4KM).expect("preset");
    let mut files = Vec::new();
    for seed in [7, 7, 8] {
        spec.seed = seed;
        let path = folder.path().join("model.gguf");
        write(&spec, &path);
        files.push(std::fs::read(&path).expect("read"));
    }
    assert_eq!(files[0], files[1]);
    assert_ne!(files[0], files[2]);
}

#[test]
fn rows_that_are_no_multiple_of_256_fall_back_to_blocks_of_32() {
    let spec = SynthSpec::preset("smollm2-135m", Quantization::Q4KM).expect("preset");
    let shape = spec.shape().expect("shape");
    let type_of = |role, layer| shape.tensor(role, layer).map(|tensor| tensor.ggml_type);
    assert_eq!(type_of(TensorRole::TokenEmbedding, None), Some(GgmlType::Q8_0));
    assert_eq!(type_of(TensorRole::Query, Some(0)), Some(GgmlType::Q5_0));
    assert_eq!(type_of(TensorRole::Down, Some(0)), Some(GgmlType::Q6_K));
    assert_eq!(type_of(TensorRole::AttentionNorm, Some(0)), Some(GgmlType::F32));
}

#[test]
fn presets_have_the_parameters_of_their_names() {
    let expected = [
        ("smollm2-135m", 134_515_008),
        ("llama-1b", 1_235_814_400),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
    ];
    for (name, parameters) in expected {
        let spec = SynthSpec::preset(name, Quantization::Q4KM).expect("preset");
        let shape = spec.shape().expect("shape");
        assert_eq!(
            shape.tensors.iter().map(|tensor| tensor.rows * tensor.columns).sum::<usize>(),
            parameters,
            "{name}"
        );
    }
    assert!(SynthSpec::preset("llama-7b", Quantization::Q4KM).is_none());
}

#[test]
fn the_tiny_model_can_be_cut_over_four_ranks_in_every_type() {
    let topology = Topology::parse_devices("4*cpu").expect("devices");
    for quantization in GgmlType::all().map(Quantization::Uniform).chain([Quantization::Q4KM]) {
        let shape = SynthSpec::preset("tiny", quantization).and_then(|spec| spec.shape().ok()).expect("shape");
        for degree in ["tensor=2", "tensor=4", "hybrid=2x2"] {
            let policy = degree.parse().expect("policy");
            let plan = lockstep_sharding::plan(&shape, &topology, &policy, &PlanOptions::default());
            assert!(plan.is_ok(), "{quantization} {degree}: {plan:?}");
        }
    }
}

#[test]
fn the_tokenizer_and_the_template_work_and_every_token_has_a_text() {
    let folder = tempfile::tempdir().expect("folder");
    let spec = SynthSpec::preset("tiny", Quantization::Q4KM).expect("preset");
    let checkpoint = write(&spec, &folder.path().join("model.gguf"));
    let tokenizer = checkpoint.tokenizer().expect("tokenizer");
    assert_eq!(tokenizer.vocab_size(), spec.vocab_size);
    let text = "the thing in the naïve 😀\n";
    let ids = tokenizer.encode(text, true).expect("encode");
    assert!(ids.len() < text.len(), "merges apply: {ids:?}");
    assert_eq!(tokenizer.decode(&ids).expect("decode"), text);
    assert!((0..spec.vocab_size as u32).all(|id| tokenizer.token_text(id).is_some_and(|text| !text.is_empty())));

    let template = checkpoint.chat_template().expect("template");
    let template = ChatTemplate::new(template, "<|endoftext|>", "<|im_end|>").expect("parse the template");
    let message = ChatMessage { role: "user".into(), content: "hello".into() };
    let prompt = template.render(&[message]).expect("render");
    assert_eq!(prompt, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n");
}

#[test]
fn impossible_shapes_are_refused_by_field() {
    let path = Path::new("/nonexistent/model.gguf");
    let tiny = SynthSpec::preset("tiny", Quantization::Q4KM).expect("preset");
    let cases = [
        ("vocab_size", SynthSpec { vocab_size: 10, ..tiny.clone() }),
        ("num_key_value_heads", SynthSpec { num_key_value_heads: 3, ..tiny.clone() }),
        ("hidden_size", SynthSpec { hidden_size: 0, ..tiny.clone() }),
        ("rope_theta", SynthSpec { rope_theta: f32::NAN, ..tiny.clone() }),
        ("model.gguf", tiny),
    ];
    for (field, spec) in cases {
        let error = synth(&spec, path, |_, _| {}).expect_err(field).to_string();
        assert!(error.contains(field), "{error}");
    }
}
