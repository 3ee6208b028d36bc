//! Files of tenants, with keys made by `lockstep tenant new`.

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::Value;

use crate::process::lockstep;

/// Writes a file of tenants, each a name and lines of settings, into `folder`; returns its path and a key for each.
///
/// # Errors
/// If a name is none or the file cannot be written.
pub async fn write(folder: &Path, tenants: &[(String, String)]) -> anyhow::Result<(PathBuf, Vec<String>)> {
    let (mut file, mut keys) = (String::new(), Vec::new());
    for (name, settings) in tenants {
        let made = lockstep(&["tenant", "new", name, "--json"]).await?;
        let made: Value = serde_json::from_slice(&made.stdout)?;
        file += &format!("[[tenant]]\nname = \"{name}\"\nkey_sha256 = [{}]\n{settings}\n", made["key_sha256"]);
        keys.push(made["key"].as_str().context("no key")?.to_owned());
    }
    let path = folder.join("tenants.toml");
    std::fs::write(&path, file)?;
    Ok((path, keys))
}
