//! Tokenizers of vocabularies that are made up: SentencePiece against llama.cpp, hostile metadata, foreign decoders.
//!
//! `fixtures/spm_llama_cpp.json` holds tokens with types and scores, and texts with the ids that llama.cpp gives them,
//! with and without a space put before the text.

#![allow(clippy::expect_used, reason = "tests")]

use lockstep_model::{
    Tokenizer,
    tokenizer::{GgufVocabulary, TokenizerConfig},
};
use proptest::prelude::*;
use serde_json::{Value, json};

fn fixture() -> Value {
    serde_json::from_str(include_str!("fixtures/spm_llama_cpp.json")).expect("fixture")
}

fn sentence_piece(add_space_prefix: Option<bool>) -> GgufVocabulary {
    let mut vocabulary = GgufVocabulary { model: "llama".into(), add_space_prefix, ..GgufVocabulary::default() };
    let mut add = |text: String, token_type: i32, score: f32| {
        vocabulary.tokens.push(text);
        vocabulary.token_types.push(token_type);
        vocabulary.scores.push(score);
    };
    for (text, token_type) in [("<unk>", 2), ("<s>", 3), ("</s>", 3)] {
        add(text.into(), token_type, 0.0);
    }
    for byte in 0..=255 {
        add(format!("<0x{byte:02X}>"), 6, 0.0);
    }
    let tokens: Vec<(String, i32, f32)> = serde_json::from_value(fixture()["tokens"].clone()).expect("tokens");
    for (text, token_type, score) in tokens {
        add(text, token_type, score);
    }
    vocabulary
}

fn byte_level() -> GgufVocabulary {
    let texts = ["l", "o", "w", "Ġ", "lo", "low", "Ġlow", "<|im_end|>", "</s>", "<|im_start|>"];
    GgufVocabulary {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        tokens: texts.map(String::from).to_vec(),
        token_types: vec![1, 1, 1, 1, 1, 1, 1, 1, 1, 3],
        merges: ["l o", "lo w", "Ġ low"].map(String::from).to_vec(),
        bos_token_id: Some(9),
        ..GgufVocabulary::default()
    }
}

#[test]
fn sentence_piece_ids_equal_llama_cpp() {
    for (prefix, name) in [(None, "prefix"), (Some(true), "prefix"), (Some(false), "no_prefix")] {
        let tokenizer = Tokenizer::from_gguf(sentence_piece(prefix)).expect("tokenizer");
        for case in fixture()["cases"].as_array().expect("cases") {
            let text = case["text"].as_str().expect("text");
            let expected: Vec<u32> = serde_json::from_value(case[name].clone()).expect("ids");
            assert_eq!(tokenizer.encode(text, false).expect("encode"), expected, "{name}: {text:?}");
        }
        let config = TokenizerConfig { bos_token_id: Some(1), add_bos_token: true, eos_token_ids: vec![2, 347] };
        assert_eq!(tokenizer.config(), &config);
        assert_eq!(tokenizer.encode("a", true).expect("encode")[0], 1);
    }
}

fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut decoder = tokenizer.incremental();
    let mut text: String = ids.iter().map(|&id| decoder.push(id).expect("push")).collect();
    text.push_str(&decoder.finish());
    text
}

#[test]
fn sentence_piece_text_comes_back() {
    for prefix in [true, false] {
        let tokenizer = Tokenizer::from_gguf(sentence_piece(Some(prefix))).expect("tokenizer");
        let json = tokenizer.to_json().expect("to_json");
        let rebuilt = Tokenizer::from_json(&json, tokenizer.config().clone()).expect("from_json");
        for text in ["hello world", "  the  日本語", "naïve é 😀\n\t", " ", "", "abc"] {
            let ids = tokenizer.encode(text, false).expect("encode");
            assert_eq!(rebuilt.encode(text, false).expect("encode"), ids);
            assert_eq!(tokenizer.decode(&ids).expect("decode"), text);
            assert_eq!(rebuilt.decode(&ids).expect("decode"), text);
        }
    }
    // An output goes on after a prompt, so that its first space is text.
    let tokenizer = Tokenizer::from_gguf(sentence_piece(None)).expect("tokenizer");
    let ids = tokenizer.encode("hello", false).expect("encode");
    assert_eq!(stream(&tokenizer, &ids), " hello");
    assert_eq!(tokenizer.token_text(3 + 0xe6).as_deref(), Some("\u{fffd}"));
    assert_eq!(stream(&tokenizer, &[3 + 0xe6, 3 + 0x97, 1, 3 + 0xa5, 3 + 0xe6]), "日\u{fffd}");
}

#[test]
fn random_tokens_stream_as_they_decode_at_once() {
    let tokenizer = Tokenizer::from_gguf(sentence_piece(Some(false))).expect("tokenizer");
    proptest!(|(ids in prop::collection::vec(0..tokenizer.vocab_size() as u32, 0..60))| {
        prop_assert_eq!(stream(&tokenizer, &ids), tokenizer.decode(&ids).expect("decode"));
    });
}

#[test]
fn ends_of_turn_are_known_by_their_text() {
    let tokenizer = Tokenizer::from_gguf(byte_level()).expect("tokenizer");
    // Declared normal by mistake, and yet an end; while markup that only looks like one is a word.
    assert_eq!(tokenizer.config().eos_token_ids, [7]);
    assert_eq!(tokenizer.encode("low low<|im_end|>", true).expect("encode"), [5, 6, 7]);
    assert_eq!(tokenizer.decode(&[5, 6, 7, 8]).expect("decode"), "low low</s>");
    let declared = GgufVocabulary { eos_token_id: Some(8), eot_token_id: Some(9), ..byte_level() };
    let tokenizer = Tokenizer::from_gguf(declared).expect("tokenizer");
    assert_eq!(tokenizer.config().eos_token_ids, [7, 8, 9]);
}

/// One value of a sound vocabulary made hostile, and what the error must name.
fn check_refused(vocabulary: GgufVocabulary, expected: &[&str]) {
    let error = Tokenizer::from_gguf(vocabulary).expect_err("hostile vocabulary").to_string();
    assert!(expected.iter().all(|&part| error.contains(part)), "{error}: expected {expected:?}");
}

#[test]
fn hostile_vocabularies_are_refused_by_field() {
    let bpe = byte_level;
    let merges = |merge: &str| GgufVocabulary { merges: vec!["l o".into(), merge.into()], ..bpe() };
    check_refused(GgufVocabulary { model: "bert".into(), ..bpe() }, &["tokenizer.ggml.model", "bert"]);
    check_refused(GgufVocabulary { pre: Some("acme".into()), ..bpe() }, &["tokenizer.ggml.pre", "acme"]);
    check_refused(GgufVocabulary { tokens: vec![], token_types: vec![], ..bpe() }, &["tokenizer.ggml.tokens"]);
    check_refused(GgufVocabulary { token_types: vec![1; 3], ..bpe() }, &["tokenizer.ggml.token_type", "3", "10"]);
    check_refused(GgufVocabulary { token_types: vec![7; 10], ..bpe() }, &["tokenizer.ggml.token_type", "type 7"]);
    check_refused(GgufVocabulary { merges: vec![], ..bpe() }, &["tokenizer.ggml.merges"]);
    check_refused(GgufVocabulary { eos_token_id: Some(10), ..bpe() }, &["tokenizer.ggml.eos_token_id", "10"]);
    check_refused(GgufVocabulary { bos_token_id: Some(u32::MAX), ..bpe() }, &["tokenizer.ggml.bos_token_id"]);
    check_refused(merges("low"), &["tokenizer.ggml.merges", "entry 1"]);
    check_refused(merges(""), &["tokenizer.ggml.merges", "entry 1"]);
    check_refused(merges("é"), &["tokenizer.ggml.merges", "entry 1"]);
    check_refused(merges("x y"), &["tokenizer.ggml.merges", "\"x\" is not a token"]);
    check_refused(merges("low <|im_start|>"), &["tokenizer.ggml.merges", "is not a token"]);
    let mut repeated = bpe();
    repeated.tokens[3] = "l".into();
    check_refused(repeated, &["tokenizer.ggml.tokens", "token 3 repeats token 0"]);

    let spm = || sentence_piece(None);
    check_refused(GgufVocabulary { scores: vec![0.0; 7], ..spm() }, &["tokenizer.ggml.scores", "7"]);
    let mut not_a_number = spm();
    not_a_number.scores[5] = f32::NAN;
    check_refused(not_a_number, &["tokenizer.ggml.scores", "token 5"]);
    let mut long = spm();
    long.tokens[300] = "a".repeat(5000);
    check_refused(long, &["tokenizer.ggml.tokens", "token 300", "5000"]);
}

#[test]
fn damaged_or_foreign_json_is_refused() {
    let from_json = |value: &Value| {
        let config = TokenizerConfig { bos_token_id: Some(4), ..TokenizerConfig::default() };
        Tokenizer::from_json(value.to_string().as_bytes(), config).map_err(|error| error.to_string())
    };
    let sound = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null, "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "Ġ": 3, "c": 4}, "merges": [["a", "b"]]},
    });
    let with = |pointer: &str, value: Value| {
        let mut json = sound.clone();
        *json.pointer_mut(pointer).expect("pointer") = value;
        from_json(&json)
    };
    let tokenizer = from_json(&sound).expect("sound");
    assert_eq!(tokenizer.encode("ab a", false).expect("encode"), [2, 3, 0]);
    assert_eq!(tokenizer.decode(&[2, 3, 0]).expect("decode"), "ab a");
    let truncated = json!({"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0});
    let tokenizer = with("/truncation", truncated).expect("truncation");
    assert_eq!(tokenizer.encode("ab a", false).expect("encode").len(), 3, "a prompt is not cut");

    // A merge longer than every token makes the library panic.
    assert!(with("/model/merges", json!([["ab", "ab"]])).expect_err("merges").contains("tokenizer.json"));
    assert!(with("/decoder", json!({"type": "WordPiece", "prefix": "##", "cleanup": true})).is_err());
    assert!(with("/decoder", Value::Null).expect_err("no decoder").contains("decoder"));
    assert!(
        with("/model/vocab", json!({"a": 0, "b": 1, "ab": 4_000_000_000_u32})).expect_err("id").contains("4000000000")
    );
    assert!(with("/model/vocab", json!({"a": 0, "b": 1, "ab": 2})).expect_err("bos").contains("bos_token_id 4"));
    assert!(Tokenizer::from_json(b"{", TokenizerConfig::default()).is_err());
}
