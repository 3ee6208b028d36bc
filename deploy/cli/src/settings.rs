//! Settings in layers: defaults < TOML file < environment < flags. Clap merges the last two.
//! Invariant: an unknown key or a value of the wrong type stops the start and is named; nothing falls back silently.

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::{Serialize, de::DeserializeOwned};

/// Sections that a settings file may have: one file can serve all processes of a host.
const SECTIONS: [&str; 2] = ["coordinator", "worker"];

/// `flags` (in which absent settings are `None`) over section `section` of the file.
///
/// # Errors
/// If the file cannot be read or holds an unknown key or a wrong value.
pub fn layered<T: Serialize + DeserializeOwned>(flags: &T, file: Option<&Path>, section: &str) -> anyhow::Result<T> {
    let text = match file {
        Some(path) => std::fs::read_to_string(path).with_context(|| format!("settings file {}", path.display()))?,
        None => String::new(),
    };
    let name = file.map(|path| path.display().to_string()).unwrap_or_default();
    overlay(flags, &text, section).with_context(|| format!("settings file {name}"))
}

/// Where compiled GPU kernels are kept unless a setting says so; nowhere if there is no home.
pub fn default_kernel_cache() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")));
    cache.map(|cache| cache.join("lockstep").join("kernels"))
}

fn overlay<T: Serialize + DeserializeOwned>(flags: &T, text: &str, section: &str) -> anyhow::Result<T> {
    let mut file: toml::Table = text.parse()?;
    if let Some(unknown) = file.keys().find(|key| !SECTIONS.contains(&key.as_str())) {
        anyhow::bail!("unknown section {unknown:?}, expected one of {SECTIONS:?}");
    }
    let mut settings = match file.remove(section) {
        None => toml::Table::new(),
        Some(toml::Value::Table(table)) => table,
        Some(other) => anyhow::bail!("{section} is a {}, expected a section", other.type_str()),
    };
    settings.extend(toml::Table::try_from(flags)?);
    toml::Value::Table(settings).try_into().with_context(|| format!("section {section}"))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Default, Deserialize, PartialEq, Serialize)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        name: Option<String>,
        count: Option<u64>,
    }

    #[test]
    fn flags_win_over_the_file() {
        let flags = Sample { name: None, count: Some(3) };
        let text = "[coordinator]\nname = \"file\"\ncount = 2\n[worker]\nother = 1";
        let merged: Sample = overlay(&flags, text, "coordinator").unwrap();
        assert_eq!(merged, Sample { name: Some(String::from("file")), count: Some(3) });
        assert_eq!(overlay(&flags, "", "coordinator").unwrap(), flags);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let error = |text: &str| format!("{:#}", overlay(&Sample::default(), text, "worker").unwrap_err());
        assert!(error("[worker]\ncuont = 2").contains("cuont"));
        assert!(error("[worker]\ncount = \"two\"").contains("two"));
        assert!(error("[wroker]").contains("wroker"));
        assert!(error("worker = 1").contains("worker is a integer"));
    }
}
