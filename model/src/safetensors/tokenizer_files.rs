//! `tokenizer.json` and the files that say what it leaves out: special tokens and the chat template.
//! For: the folder reader in the parent module.
//! Invariant: an id comes from a number in a file, or from a token text that `tokenizer.json` knows; none is guessed.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::json::{JsonObject, read_whole};
use crate::{ModelError, Tokenizer, TokenizerConfig};

/// What a folder says about text.
#[derive(Clone, Debug)]
pub(crate) struct TokenizerFiles {
    path: PathBuf,
    bos_token_id: Option<u32>,
    bos_token: Option<String>,
    add_bos_token: Option<bool>,
    eos_token_ids: Vec<u32>,
    eos_token: Option<String>,
    /// Jinja source.
    pub(crate) chat_template: Option<String>,
}

/// One id or several.
#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    Many(Vec<u32>),
}

impl Ids {
    fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

impl TokenizerFiles {
    /// Reads what stands beside `tokenizer.json`; that file itself is read when the tokenizer is built.
    pub(super) fn find(folder: &Path, config: &JsonObject) -> Result<Self, ModelError> {
        let generation = JsonObject::read_if_there(&folder.join("generation_config.json"))?;
        let tokenizer = JsonObject::read_if_there(&folder.join("tokenizer_config.json"))?;
        let mut bos_token_id = None;
        let mut eos_token_ids = Vec::new();
        for file in [&generation, config] {
            eos_token_ids.extend(file.get::<Ids>("eos_token_id")?.map(Ids::into_vec).unwrap_or_default());
            let ids = file.get::<Ids>("bos_token_id")?.map(Ids::into_vec).unwrap_or_default();
            bos_token_id = bos_token_id.or(ids.first().copied());
        }
        Ok(Self {
            path: folder.join("tokenizer.json"),
            bos_token_id,
            bos_token: token_text(&tokenizer, "bos_token")?,
            add_bos_token: tokenizer.get("add_bos_token")?,
            eos_token_ids,
            eos_token: token_text(&tokenizer, "eos_token")?,
            chat_template: chat_template(folder, &tokenizer)?,
        })
    }

    /// Builds the tokenizer.
    pub(crate) fn tokenizer(&self) -> Result<Tokenizer, ModelError> {
        let bytes = read_whole(&self.path)?;
        let json: Value = serde_json::from_slice(&bytes).map_err(|error| ModelError::Invalid {
            path: self.path.clone(),
            field: "json".into(),
            problem: error.to_string(),
        })?;
        let id_of = |text: &Option<String>| text.as_deref().and_then(|text| token_id(&json, text));
        let bos_token_id = id_of(&self.bos_token).or(self.bos_token_id);
        let mut eos_token_ids = self.eos_token_ids.clone();
        eos_token_ids.extend(id_of(&self.eos_token));
        eos_token_ids.sort_unstable();
        eos_token_ids.dedup();
        let begins_with_bos = || self.bos_token.as_deref().is_some_and(|bos| template_begins_with(&json, bos));
        let add_bos_token = bos_token_id.is_some() && self.add_bos_token.unwrap_or_else(begins_with_bos);
        Tokenizer::from_json(&bytes, TokenizerConfig { bos_token_id, add_bos_token, eos_token_ids })
    }
}

/// A special token, which is a string or an object with the string in `content`.
fn token_text(json: &JsonObject, key: &str) -> Result<Option<String>, ModelError> {
    match json.value(key) {
        Some(Value::Object(_)) => json.object(key)?.map(|token| token.require("content")).transpose(),
        _ => json.get(key),
    }
}

/// The template in a file of its own, else in `tokenizer_config.json`: a string, or a list with one named `default`.
fn chat_template(folder: &Path, tokenizer: &JsonObject) -> Result<Option<String>, ModelError> {
    #[derive(Deserialize)]
    struct Named {
        name: String,
        template: String,
    }

    let path = folder.join("chat_template.jinja");
    if path.exists() {
        let text = String::from_utf8(read_whole(&path)?);
        return text.map(Some).map_err(|error| ModelError::Invalid {
            path,
            field: "template".into(),
            problem: format!("not UTF-8: {error}"),
        });
    }
    let key = "chat_template";
    match tokenizer.value(key) {
        Some(Value::Array(_)) => {
            let templates: Vec<Named> = tokenizer.get(key)?.unwrap_or_default();
            Ok(templates.into_iter().find(|named| named.name == "default").map(|named| named.template))
        }
        _ => tokenizer.get(key),
    }
}

/// The id of a token by its text, among the added tokens or in the vocabulary.
fn token_id(json: &Value, text: &str) -> Option<u32> {
    let added = json.get("added_tokens").and_then(Value::as_array);
    let added = added.and_then(|tokens| tokens.iter().find(|token| token.get("content") == Some(&text.into())));
    let id = match added {
        Some(token) => token.get("id"),
        None => json.get("model").and_then(|model| model.get("vocab")).and_then(|vocab| vocab.get(text)),
    };
    id.and_then(Value::as_u64).and_then(|id| id.try_into().ok())
}

/// Whether the post-processor puts this token before a single text.
fn template_begins_with(json: &Value, token: &str) -> bool {
    let Some(processor) = json.get("post_processor") else { return false };
    let parts = processor.get("processors").and_then(Value::as_array);
    let parts = parts.map_or(std::slice::from_ref(processor), Vec::as_slice);
    parts.iter().any(|part| {
        let first = part.get("single").and_then(|single| single.get(0));
        first.and_then(|piece| piece.pointer("/SpecialToken/id")).and_then(Value::as_str) == Some(token)
    })
}
