//! Checkpoints as Hugging Face publishes them: `config.json`, safetensors in one file or shards, `tokenizer.json`.
//! For: [`crate::Checkpoint`].
//! Invariant: every tensor of every shard lies inside its file, apart from the others, and has the bytes of its shape.
//! Not here: which tensors a model needs ([`crate::tensor_names`]).

mod header;
mod hf_config;
mod json;
mod tokenizer_files;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

pub(crate) use tokenizer_files::TokenizerFiles;

use self::json::JsonObject;
use crate::{ModelConfig, ModelError, checkpoint::StoredTensor, positioned_file::PositionedFile};

const CONFIG_NAME: &str = "config.json";
const INDEX_NAME: &str = "model.safetensors.index.json";
const SINGLE_NAME: &str = "model.safetensors";

/// A checkpoint of this kind before its tensors are matched with the roles of a decoder.
pub(crate) struct HuggingFaceCheckpoint {
    pub(crate) config: ModelConfig,
    /// Whether the logits use the token embedding, whatever else the files hold.
    pub(crate) is_tied: bool,
    pub(crate) files: Vec<PositionedFile>,
    pub(crate) tensors: Vec<StoredTensor>,
    pub(crate) tokenizer: TokenizerFiles,
}

impl HuggingFaceCheckpoint {
    /// Opens a folder, or one safetensors file with `config.json` beside it.
    pub(crate) fn open(path: &Path) -> Result<Self, ModelError> {
        let (folder, shards) = if path.is_dir() {
            (path, shard_paths(path)?)
        } else {
            (path.parent().unwrap_or(Path::new(".")), vec![path.to_owned()])
        };
        let mut files = Vec::new();
        let mut tensors = Vec::new();
        for shard in shards {
            let file = PositionedFile::open(&shard)?;
            tensors.extend(header::read(&file, files.len())?);
            files.push(file);
        }
        check_unique(&files, &tensors)?;
        let json = JsonObject::read(&folder.join(CONFIG_NAME))?;
        let (config, is_tied) = hf_config::read(&json)?;
        let tokenizer = TokenizerFiles::find(folder, &json)?;
        Ok(Self { config, is_tied, files, tensors, tokenizer })
    }
}

/// The files that hold the weights of a folder.
fn shard_paths(folder: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let index_path = folder.join(INDEX_NAME);
    if !index_path.exists() {
        return Ok(vec![folder.join(SINGLE_NAME)]);
    }
    let index = JsonObject::read(&index_path)?;
    let weight_map =
        index.object("weight_map")?.ok_or_else(|| index.invalid("weight_map", "missing, expected an object"))?;
    let mut names = BTreeSet::new();
    for tensor in weight_map.keys() {
        let name = weight_map.require::<String>(tensor)?;
        // The name comes from a stranger: it may not lead out of the folder.
        if Path::new(&name).file_name() != Some(name.as_ref()) {
            return Err(weight_map.invalid(tensor, format!("expected a file name, got {name:?}")));
        }
        names.insert(name);
    }
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

fn check_unique(files: &[PositionedFile], tensors: &[StoredTensor]) -> Result<(), ModelError> {
    let mut order: Vec<&StoredTensor> = tensors.iter().collect();
    order.sort_by(|a, b| a.name.cmp(&b.name));
    match order.windows(2).find(|pair| pair[0].name == pair[1].name) {
        None => Ok(()),
        Some(pair) => {
            let path = files.get(pair[1].file).map(|file| file.path().to_owned()).unwrap_or_default();
            let problem = "tensor is in more than one file".into();
            Err(ModelError::Invalid { path, field: pair[1].name.clone(), problem })
        }
    }
}
