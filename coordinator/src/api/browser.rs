//! The page `/browser`, on which a model computes in the visitor's browser, and the model's file for it.
//! For: coordinators that were given the page's folder (`browser/build.sh` makes it); nothing of this is served else.
//! Invariant: of the folder only the files listed here are served, and of the machine only what a loaded model's file
//! holds: a GGUF file under the path by which workers know it. For that callers need a key where there are keys.
//! Not here: the page itself (`browser/page`), what it runs (the crate `browser`).

use std::{
    io::SeekFrom,
    path::{Path, PathBuf},
    sync::Arc,
};

use axum::{
    Router as Routes,
    body::Bytes,
    extract::{Path as UrlPath, State},
    http::{HeaderMap, HeaderName, StatusCode, header},
    response::{IntoResponse, Redirect, Response},
    routing::get,
};
use tokio::{
    fs::File,
    io::{AsyncReadExt, AsyncSeekExt},
};

use super::{http::HttpState, openai::error::ApiError};
use crate::CoordinatorError;

/// Files of the page, with their types; the first is the page.
const FILES: [(&str, &str); 6] = [
    ("index.html", "text/html; charset=utf-8"),
    ("page.css", "text/css; charset=utf-8"),
    ("page.js", "text/javascript; charset=utf-8"),
    ("worker.js", "text/javascript; charset=utf-8"),
    ("lockstep_browser.js", "text/javascript; charset=utf-8"),
    ("lockstep_browser_bg.wasm", "application/wasm"),
];
/// The page and its worker run what comes from here, and talk to nobody else.
const POLICY: &str = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src data:; \
                      connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// What a GGUF file begins with.
const MAGIC: &[u8] = b"GGUF";
/// Most bytes of an answer; whoever wants more asks again.
const PIECE_BYTES: u64 = 4 << 20;

/// The folder with the files of the page.
#[derive(Clone, Debug)]
pub struct BrowserFolder(Arc<PathBuf>);

impl BrowserFolder {
    /// Looks for every file.
    ///
    /// # Errors
    /// [`CoordinatorError::BrowserFolder`] with the one that is missing.
    pub fn open(path: &Path) -> Result<Self, CoordinatorError> {
        match FILES.iter().find(|(name, _)| !path.join(name).is_file()) {
            Some((name, _)) => Err(CoordinatorError::BrowserFolder { path: path.to_owned(), file: name }),
            None => Ok(Self(Arc::new(path.to_owned()))),
        }
    }
}

/// The page and its files.
pub fn routes(folder: &BrowserFolder) -> Routes<HttpState> {
    let mut routes = Routes::new().route("/browser", get(async || Redirect::permanent("/browser/")));
    for (index, (name, kind)) in FILES.into_iter().enumerate() {
        let path = folder.0.join(name);
        let served = get(async move || file(&path, kind).await);
        let url = if index == 0 { "/browser/".to_owned() } else { format!("/browser/{name}") };
        routes = routes.route(&url, served);
    }
    routes
}

/// The models' files.
pub fn model_routes() -> Routes<HttpState> {
    Routes::new().route("/browser/models/{*name}", get(model))
}

async fn file(path: &Path, kind: &'static str) -> Response {
    match tokio::fs::read(path).await {
        Ok(bytes) => {
            let headers = [
                (header::CONTENT_TYPE, kind),
                (header::CONTENT_SECURITY_POLICY, POLICY),
                (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
                (header::REFERRER_POLICY, "no-referrer"),
                (header::CACHE_CONTROL, "no-cache"),
            ];
            (headers, bytes).into_response()
        }
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "a file of the page cannot be read");
            StatusCode::NOT_FOUND.into_response()
        }
    }
}

/// A range of a model's file; perhaps only the beginning of what was asked for.
async fn model(
    State(state): State<HttpState>,
    UrlPath(name): UrlPath<String>,
    headers: HeaderMap,
) -> Result<(StatusCode, [(HeaderName, String); 4], Bytes), ApiError> {
    let model = state.intake.router.model(&name).map_err(|error| ApiError::of(&error, "model"))?;
    let not_here = || {
        let message = format!("the file of model {name:?} is no GGUF file on this machine");
        ApiError::new(StatusCode::NOT_FOUND, "model_not_here", message)
    };
    // A worker has described it: the path is no foreign file's.
    let source = model.description.as_ref().map(|_| Path::new(&model.spec.source)).ok_or_else(not_here)?;
    let metadata = tokio::fs::metadata(source).await.ok().filter(std::fs::Metadata::is_file).ok_or_else(not_here)?;
    let range = headers.get(header::RANGE).and_then(|range| range.to_str().ok());
    let (start, end) = range.and_then(|range| parse_range(range, metadata.len())).ok_or_else(|| {
        let message = format!("range is {range:?}, expected bytes=FIRST-LAST of {} bytes", metadata.len());
        ApiError::new(StatusCode::RANGE_NOT_SATISFIABLE, "invalid_range", message)
    })?;
    let bytes = read(source, start, end).await.ok().flatten().ok_or_else(not_here)?;
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_RANGE, format!("bytes {start}-{}/{}", end - 1, metadata.len())),
        (header::CACHE_CONTROL, "no-store".to_owned()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
    ];
    Ok((StatusCode::PARTIAL_CONTENT, headers, bytes))
}

/// `bytes=FIRST-LAST` as `[start, end)` within the file and no longer than an answer.
fn parse_range(range: &str, num_bytes: u64) -> Option<(u64, u64)> {
    let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
    let start: u64 = first.parse().ok()?;
    let last: u64 = if last.is_empty() { u64::MAX } else { last.parse().ok()? };
    let end = last.saturating_add(1).min(num_bytes).min(start.saturating_add(PIECE_BYTES));
    (start < end).then_some((start, end))
}

/// Bytes of a GGUF file; `None` of another.
async fn read(path: &Path, start: u64, end: u64) -> std::io::Result<Option<Bytes>> {
    let mut file = File::open(path).await?;
    let mut magic = [0; MAGIC.len()];
    file.read_exact(&mut magic).await?;
    if magic != MAGIC {
        return Ok(None);
    }
    file.seek(SeekFrom::Start(start)).await?;
    let mut bytes = vec![0; (end - start) as usize];
    file.read_exact(&mut bytes).await?;
    Ok(Some(bytes.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_stay_in_the_file_and_short() {
        let parse = |text: &str| parse_range(text, PIECE_BYTES + 9);
        assert_eq!(parse("bytes=0-0"), Some((0, 1)));
        assert_eq!(parse("bytes=5-"), Some((5, PIECE_BYTES + 5)));
        assert_eq!(parse("bytes=0-18446744073709551615"), Some((0, PIECE_BYTES)));
        assert_eq!(parse(&format!("bytes={}-{}", PIECE_BYTES + 8, u64::MAX)), Some((PIECE_BYTES + 8, PIECE_BYTES + 9)));
        for wrong in ["bytes=9-3", "bytes=-5", "bytes=1-2,4-5", "lines=1-2", "bytes=99999999999-", "bytes=x-1", ""] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
