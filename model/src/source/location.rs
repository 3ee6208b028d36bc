//! What a source's text means: a URL, a file name, and whether the token may go there.
//!
//! Invariant: a file name has no separator and is not hidden behind `..`; errors never quote a URL's query or user.

use reqwest::Url;

use super::{FetchError, object::RemoteObject};
use crate::positioned_file::shown;

/// A parsed source.
pub(super) struct Location {
    /// First URL to ask.
    pub(super) url: Url,
    /// Last segment of the path.
    pub(super) file_name: String,
    /// Whether the token belongs to the URL's origin.
    pub(super) is_hugging_face: bool,
}

impl Location {
    /// # Errors
    /// [`FetchError::InvalidSource`].
    pub(super) fn parse(source: &str, hf_endpoint: &str) -> Result<Self, FetchError> {
        let invalid = |problem: String| FetchError::InvalidSource { source_name: shown(source), problem };
        let (url, is_hugging_face) = match source.strip_prefix("hf://") {
            Some(file) => (hugging_face_url(file, hf_endpoint).map_err(invalid)?, true),
            None if source.starts_with("http://") || source.starts_with("https://") => {
                (Url::parse(source).map_err(|error| invalid(error.to_string()))?, false)
            }
            None => match Url::parse(source) {
                Ok(url) if RemoteObject::is_cloud(url.scheme()) && source.contains("://") => (url, false),
                _ => {
                    let known = "hf://org/repo/file[@revision], an http(s) URL, s3://, gs:// or az://";
                    return Err(invalid(format!("expected {known}")));
                }
            },
        };
        let file_name = url.path_segments().and_then(Iterator::last).map(percent_decode).unwrap_or_default();
        if file_name.is_empty() || file_name.starts_with('.') || file_name.contains(['/', '\\', '\0']) {
            return Err(invalid("the URL ends in no file name".to_owned()));
        }
        Ok(Self { url, file_name, is_hugging_face })
    }

    /// See [`shown`].
    pub(super) fn shown(&self) -> String {
        shown(self.url.as_str())
    }
}

fn hugging_face_url(file: &str, endpoint: &str) -> Result<Url, String> {
    let (file, revision) = file.rsplit_once('@').unwrap_or((file, "main"));
    let segments: Vec<&str> = file.split('/').collect();
    let is_segment = |segment: &&str| !matches!(*segment, "" | "." | "..");
    let [org, repo, path @ ..] = segments.as_slice() else { return Err("expected hf://org/repo/file".to_owned()) };
    if path.is_empty() || !segments.iter().all(is_segment) || !revision.split('/').all(|part| is_segment(&part)) {
        return Err("expected hf://org/repo/file[@revision] with no empty part".to_owned());
    }
    let mut url = Url::parse(endpoint).map_err(|error| format!("endpoint {}: {error}", shown(endpoint)))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(format!("endpoint {}: expected an http(s) URL", shown(endpoint)));
    }
    url.path_segments_mut()
        .map_err(|()| format!("endpoint {}: has no path", shown(endpoint)))?
        .pop_if_empty()
        .extend([*org, *repo, "resolve", revision])
        .extend(path);
    Ok(url)
}

/// Lower-case hexadecimal of a SHA-256 that a user gave.
///
/// # Errors
/// [`FetchError::InvalidSource`] if it is none.
pub(super) fn parse_sha256(source: &str, hash: &str) -> Result<String, FetchError> {
    as_sha256(hash).ok_or_else(|| FetchError::InvalidSource {
        source_name: shown(source),
        problem: format!("sha256 {hash:?} is not 64 hexadecimal digits"),
    })
}

/// The text in lower case if it can be a SHA-256.
pub(super) fn as_sha256(text: &str) -> Option<String> {
    let is_hash = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hash.then(|| text.to_ascii_lowercase())
}

fn percent_decode(segment: &str) -> String {
    let mut bytes = Vec::with_capacity(segment.len());
    let mut rest = segment.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let hex = tail.get(..2).filter(|_| byte == b'%').and_then(|hex| std::str::from_utf8(hex).ok());
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(decoded) => {
                bytes.push(decoded);
                rest = &tail[2..];
            }
            None => {
                bytes.push(byte);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENDPOINT: &str = "https://huggingface.co";

    fn url(source: &str) -> String {
        Location::parse(source, ENDPOINT).expect(source).url.into()
    }

    #[test]
    fn hugging_face_files_are_resolved() {
        assert_eq!(url("hf://org/repo/a.gguf"), "https://huggingface.co/org/repo/resolve/main/a.gguf");
        assert_eq!(
            url("hf://o/r/dir/a b.gguf@refs/pr/1"),
            "https://huggingface.co/o/r/resolve/refs%2Fpr%2F1/dir/a%20b.gguf"
        );
        let mirror = Location::parse("hf://o/r/a b.gguf", "http://127.0.0.1:9/hf/").expect("mirror");
        assert_eq!(mirror.url.as_str(), "http://127.0.0.1:9/hf/o/r/resolve/main/a%20b.gguf");
        assert_eq!(mirror.file_name, "a b.gguf");
        assert!(mirror.is_hugging_face);
    }

    #[test]
    fn plain_urls_are_kept() {
        let location = Location::parse("https://h/x/m.gguf?sig=1", ENDPOINT).expect("url");
        assert_eq!((location.file_name.as_str(), location.is_hugging_face), ("m.gguf", false));
        assert_eq!(location.shown(), "https://h/x/m.gguf");
    }

    #[test]
    fn secrets_are_not_shown() {
        for source in ["https://u:secret@h:9/x@y/m.gguf?sig=secret#secret", "https://u:secret@h:9/x@y/m.gguf"] {
            assert_eq!(shown(source), "https://h:9/x@y/m.gguf");
        }
        for plain in ["/models/m?.gguf", "hf://o/r/m.gguf@refs/pr/1", "s3://bucket/m.gguf", "https://h"] {
            assert_eq!(shown(plain), plain);
        }
        for wrong in ["htps://u:secret@h/m.gguf?secret", "https://u:secret@h:port/m.gguf", "https://h/?secret"] {
            let error = Location::parse(wrong, ENDPOINT).err().expect(wrong).to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn what_is_no_source_is_refused() {
        let sources = [
            "model.gguf",
            "ftp://h/x",
            "hf://org/repo",
            "hf://org//a",
            "hf://org/repo/../a",
            "hf://org/repo/a@",
            "https://h/",
            "https://h/a%2fb",
            "https://h/..%2f",
            "http://",
            "hf://o/r/.x",
        ];
        for source in sources {
            assert!(Location::parse(source, ENDPOINT).is_err(), "{source}");
        }
        assert!(Location::parse("hf://o/r/a", "file:///x").is_err());
    }
}
