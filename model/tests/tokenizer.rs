//! Tokenizers against llama.cpp, on the vocabulary of the test model (`LOCKSTEP_TEST_MODEL`).
//!
//! `fixtures/bpe_llama_cpp.json` holds texts and the ids that llama.cpp gives them with this vocabulary under each
//! pre-tokenizer (for all but `smollm` a file was written that differs in `tokenizer.ggml.pre` alone).

#![allow(clippy::expect_used, reason = "tests")]

use std::path::PathBuf;

use lockstep_model::{
    Tokenizer,
    gguf::GgufFile,
    tokenizer::{GgufVocabulary, TokenizerConfig},
};
use proptest::prelude::*;
use serde_json::Value;

fn vocabulary() -> GgufVocabulary {
    let path = std::env::var_os("LOCKSTEP_TEST_MODEL")
        .map(PathBuf::from)
        .expect("LOCKSTEP_TEST_MODEL is not set: run tests/run.sh, which fetches the model and sets it");
    GgufVocabulary::from_metadata(&GgufFile::open(&path).expect("open the model").metadata).expect("vocabulary")
}

fn fixture() -> Vec<Value> {
    let json: Value = serde_json::from_str(include_str!("fixtures/bpe_llama_cpp.json")).expect("fixture");
    json["cases"].as_array().expect("cases").clone()
}

#[test]
fn byte_level_ids_equal_llama_cpp() {
    let vocabulary = vocabulary();
    for pre in ["smollm", "llama-bpe", "qwen2", "gpt-2", "default", "tekken"] {
        let tokenizer =
            Tokenizer::from_gguf(GgufVocabulary { pre: Some(pre.to_owned()), ..vocabulary.clone() }).expect(pre);
        for case in fixture() {
            let text = case["text"].as_str().expect("text");
            let expected: Vec<u32> = serde_json::from_value(case["ids"][pre].clone()).expect("ids");
            assert_eq!(tokenizer.encode(text, false).expect("encode"), expected, "{pre}: {text:?}");
        }
    }
}

#[test]
fn smollm2_knows_its_special_tokens() {
    let tokenizer = Tokenizer::from_gguf(vocabulary()).expect("tokenizer");
    let expected = TokenizerConfig { bos_token_id: Some(1), add_bos_token: false, eos_token_ids: vec![0, 2] };
    assert_eq!(tokenizer.config(), &expected);
    assert_eq!(tokenizer.vocab_size(), 49152);
    assert_eq!(tokenizer.token_text(2).as_deref(), Some("<|im_end|>"));
    assert_eq!(tokenizer.token_text(49152), None);
    assert_eq!(tokenizer.decode(&[1, 2, 0]).expect("decode"), "");
    let error = tokenizer.incremental().push(49152).expect_err("past the vocabulary").to_string();
    assert!(error.contains("49152"), "{error}");
    let error = tokenizer.decode(&[u32::MAX]).expect_err("past the vocabulary").to_string();
    assert!(error.contains("4294967295"), "{error}");
}

#[test]
fn bos_is_added_once_and_only_when_asked_for() {
    let vocabulary = GgufVocabulary { add_bos_token: Some(true), ..vocabulary() };
    let tokenizer = Tokenizer::from_gguf(vocabulary).expect("tokenizer");
    let plain = tokenizer.encode("Hello", false).expect("encode");
    let with_bos = tokenizer.encode("Hello", true).expect("encode");
    assert_eq!(with_bos, [&[1], plain.as_slice()].concat());
    assert_eq!(tokenizer.encode("<|im_start|>Hello", true).expect("encode"), with_bos);
    assert_eq!(tokenizer.encode("", true).expect("encode"), [1]);
}

#[test]
fn a_tokenizer_rebuilt_from_its_json_is_the_same() {
    let tokenizer = Tokenizer::from_gguf(vocabulary()).expect("tokenizer");
    let json = tokenizer.to_json().expect("to_json");
    let rebuilt = Tokenizer::from_json(&json, tokenizer.config().clone()).expect("from_json");
    assert_eq!(rebuilt.config(), tokenizer.config());
    assert_eq!(rebuilt.vocab_size(), tokenizer.vocab_size());
    for case in fixture() {
        let text = case["text"].as_str().expect("text");
        let ids = tokenizer.encode(text, false).expect("encode");
        assert_eq!(rebuilt.encode(text, false).expect("encode"), ids, "{text:?}");
        assert_eq!(rebuilt.decode(&ids).expect("decode"), tokenizer.decode(&ids).expect("decode"));
    }
}

#[test]
fn text_comes_back_and_streams_as_it_decodes() {
    let tokenizer = Tokenizer::from_gguf(vocabulary()).expect("tokenizer");
    for case in fixture() {
        let text = case["text"].as_str().expect("text");
        let ids = tokenizer.encode(text, false).expect("encode");
        let mut plain = text.to_owned();
        for special in ["<|im_start|>", "<|im_end|>", "<|endoftext|>"] {
            plain = plain.replace(special, "");
        }
        assert_eq!(tokenizer.decode(&ids).expect("decode"), plain);
        assert_eq!(stream(&tokenizer, &ids), plain);
    }
}

fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut decoder = tokenizer.incremental();
    let mut text: String = ids.iter().map(|&id| decoder.push(id).expect("push")).collect();
    text.push_str(&decoder.finish());
    text
}

#[test]
fn random_tokens_stream_as_they_decode_at_once() {
    let tokenizer = Tokenizer::from_gguf(vocabulary()).expect("tokenizer");
    // Ids below 300 are the single bytes and specials: they make broken characters likely.
    let id = prop_oneof![0..300_u32, 0..49152_u32];
    proptest!(|(ids in prop::collection::vec(id, 0..60))| {
        prop_assert_eq!(stream(&tokenizer, &ids), tokenizer.decode(&ids).expect("decode"));
    });
}

#[test]
fn long_texts_take_time_in_proportion() {
    let tokenizer = Tokenizer::from_gguf(vocabulary()).expect("tokenizer");
    let start = std::time::Instant::now();
    for text in ["a".repeat(300_000), " ".repeat(300_000), "\n".repeat(300_000), "word 12 ".repeat(40_000)] {
        let ids = tokenizer.encode(&text, false).expect("encode");
        assert_eq!(tokenizer.decode(&ids).expect("decode"), text);
    }
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}
