//! Moving the bytes: requests, redirects, resumption, retries.
//!
//! Invariant: every round either wins a byte beyond the furthest so far or counts as an attempt, so a server that
//! breaks for ever ends the fetch, and one that breaks now and then does not.

use std::time::Duration;

use object_store::GetRange;
use reqwest::{
    Client, Response, StatusCode, Url, Version,
    header::{
        ACCEPT_ENCODING, CONTENT_RANGE, ETAG, HeaderMap, IF_RANGE, LOCATION, RANGE, RETRY_AFTER, TRANSFER_ENCODING,
    },
    redirect,
};

use super::{
    FetchError, FetchOptions, MAX_BACKOFF, Progress,
    location::{Location, as_sha256},
    object::{self, RemoteObject, is_passing},
    partial::Partial,
};
use crate::positioned_file::shown;

const MAX_REDIRECTS: usize = 10;

/// One file on its way.
pub(super) struct Transfer<'a> {
    origin: Origin,
    location: &'a Location,
    options: &'a FetchOptions,
    partial: Partial,
    /// SHA-256 that was asked for, or that Hugging Face declared.
    wanted: Option<String>,
}

/// Whom to ask.
enum Origin {
    Http(Client),
    Object(RemoteObject),
}

/// Why a round ended early.
enum Failure {
    /// Trying again would not help.
    Fatal(FetchError),
    /// Trying again may help, not before the time that the server named.
    Passing(FetchError, Option<Duration>),
}

impl From<FetchError> for Failure {
    fn from(error: FetchError) -> Self {
        Self::Fatal(error)
    }
}

impl<'a> Transfer<'a> {
    /// # Errors
    /// [`FetchError::Client`]; [`FetchError::InvalidSource`] if the environment does not say where an object is.
    pub(super) fn new(
        location: &'a Location,
        options: &'a FetchOptions,
        partial: Partial,
        wanted: Option<String>,
    ) -> Result<Self, FetchError> {
        if RemoteObject::is_cloud(location.url.scheme()) {
            let origin = Origin::Object(RemoteObject::new(&location.url, options)?);
            return Ok(Self { origin, location, options, partial, wanted });
        }
        // The client takes the process's provider; a second installation changes nothing.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let builder = || {
            Client::builder()
                .user_agent(concat!("lockstep/", env!("CARGO_PKG_VERSION")))
                // Followed here: the token must not travel along, and Hugging Face puts the hash on the first hop.
                .redirect(redirect::Policy::none())
                .connect_timeout(options.connect_timeout)
                .read_timeout(options.stall_timeout)
        };
        let client = builder().build().or_else(|error| match location.url.scheme() {
            // A machine without root certificates can still fetch what needs none.
            "http" => builder().tls_certs_only([]).build(),
            _ => Err(error),
        });
        let origin = Origin::Http(client.map_err(FetchError::Client)?);
        Ok(Self { origin, location, options, partial, wanted })
    }

    /// The bytes, and the SHA-256 that they must have if one is known.
    pub(super) fn into_parts(self) -> (Partial, Option<String>) {
        (self.partial, self.wanted)
    }

    /// Fetches until the file is whole.
    ///
    /// # Errors
    /// [`FetchError`]; what has come stays in the part.
    pub(super) async fn run(&mut self, progress: &mut (dyn FnMut(Progress) + Send)) -> Result<(), FetchError> {
        let mut furthest = self.partial.len();
        let mut attempts = 0;
        loop {
            let round = match &self.origin {
                Origin::Http(client) => self.http_round(client.clone(), progress).await,
                Origin::Object(object) => self.object_round(object.clone(), progress).await,
            };
            let (error, retry_after) = match round {
                Ok(()) => return self.partial.flush().await,
                Err(Failure::Fatal(error)) => {
                    self.partial.flush().await?;
                    return Err(error);
                }
                Err(Failure::Passing(error, retry_after)) => (error, retry_after),
            };
            if self.partial.len() > furthest {
                furthest = self.partial.len();
                attempts = 0;
            }
            attempts += 1;
            if attempts > self.options.max_retries {
                self.partial.flush().await?;
                return Err(FetchError::GaveUp { attempts, last: Box::new(error) });
            }
            let wait = retry_after.map_or(self.options.backoff_after(attempts), |wait| wait.min(MAX_BACKOFF));
            tracing::warn!(%error, attempts, bytes = self.partial.len(), "cannot fetch, trying again");
            tokio::time::sleep(wait).await;
        }
    }

    /// One request for an object's bytes that are missing, if any are.
    async fn object_round(
        &mut self,
        object: RemoteObject,
        progress: &mut (dyn FnMut(Progress) + Send),
    ) -> Result<(), Failure> {
        let of_object = |error| if is_passing(&error) { Failure::Passing(error, None) } else { Failure::Fatal(error) };
        let meta = object.head().await.map_err(of_object)?;
        // Without an ETag only the hash can tell whether two halves belong together.
        let etag = object::strong_etag(&meta);
        let is_same = self.partial.etag() == etag.as_deref() && (etag.is_some() || self.wanted.is_some());
        if !is_same || self.partial.len() > meta.size {
            self.partial.restart(etag).await?;
        }
        let mut shown = Progress { bytes: self.partial.len(), total_bytes: Some(meta.size) };
        progress(shown);
        if shown.bytes == meta.size {
            return Ok(());
        }
        let range = GetRange::Bounded(shown.bytes..meta.size);
        let mut chunks = object.get(range, &meta).await.map_err(of_object)?;
        while let Some(chunk) = object.next(&mut chunks).await.map_err(of_object)? {
            self.partial.write(&chunk).await?;
            shown.bytes = self.partial.len();
            progress(shown);
        }
        let missing = (shown.bytes != meta.size).then(|| object.short(meta.size as usize, shown.bytes as usize));
        missing.map_or(Ok(()), |error| Err(Failure::Passing(error, None)))
    }

    /// One request and its body.
    async fn http_round(&mut self, client: Client, progress: &mut (dyn FnMut(Progress) + Send)) -> Result<(), Failure> {
        let offset = self.partial.len();
        // Without an ETag only the hash can tell whether two halves belong together.
        let is_resumable = self.partial.etag().is_some() || self.wanted.is_some();
        let range = (offset > 0 && is_resumable).then_some(offset);
        let (mut response, url) = self.request(&client, range).await?;
        let content_range = response.headers().get(CONTENT_RANGE).and_then(|value| value.to_str().ok());
        let total_bytes = match response.status() {
            StatusCode::OK => {
                let total = response.content_length();
                if total.is_none() && self.wanted.is_none() && ends_with_its_connection(&response) {
                    let problem = "names no length, and only a SHA-256 could tell whether it comes whole".to_owned();
                    return Err(Failure::Fatal(FetchError::Response { url, problem }));
                }
                self.partial.restart(strong_etag(response.headers())).await?;
                total
            }
            StatusCode::PARTIAL_CONTENT if range.is_some() => {
                let (start, total) = content_range.and_then(parse_content_range).unwrap_or_default();
                if start != Some(offset) {
                    let problem = format!("expected bytes from {offset}, got content-range {content_range:?}");
                    self.partial.restart(None).await?;
                    return Err(Failure::Passing(FetchError::Response { url, problem }, None));
                }
                total
            }
            StatusCode::RANGE_NOT_SATISFIABLE if range.is_some() => {
                let (_, total) = content_range.and_then(parse_content_range).unwrap_or_default();
                if total == Some(offset) {
                    progress(Progress { bytes: offset, total_bytes: total });
                    return Ok(());
                }
                self.partial.restart(None).await?;
                let problem = format!("has no bytes from {offset}, its size is {total:?}");
                return Err(Failure::Passing(FetchError::Response { url, problem }, None));
            }
            status => return Err(refused(&response, status, url, self.location.is_hugging_face)),
        };

        progress(Progress { bytes: self.partial.len(), total_bytes });
        loop {
            let chunk = response.chunk().await.map_err(|error| broken(&url, error))?;
            let Some(chunk) = chunk else { break };
            self.partial.write(&chunk).await?;
            progress(Progress { bytes: self.partial.len(), total_bytes });
        }
        match total_bytes.filter(|&total| total != self.partial.len()) {
            Some(total) => {
                let problem = format!("expected {total} bytes, got {}", self.partial.len());
                if self.partial.len() > total {
                    self.partial.restart(None).await?;
                }
                Err(Failure::Passing(FetchError::Response { url, problem }, None))
            }
            None => Ok(()),
        }
    }

    /// Asks for the bytes from `offset` on and follows redirects. Returns the last URL too, as errors show it.
    async fn request(&mut self, client: &Client, offset: Option<u64>) -> Result<(Response, String), Failure> {
        let mut url = self.location.url.clone();
        for _ in 0..=MAX_REDIRECTS {
            // What is served compressed could not be resumed.
            let mut request = client.get(url.clone()).header(ACCEPT_ENCODING, "identity");
            if let Some(offset) = offset {
                request = request.header(RANGE, format!("bytes={offset}-"));
                if let Some(etag) = self.partial.etag() {
                    request = request.header(IF_RANGE, etag);
                }
            }
            let is_ours = self.location.is_hugging_face && url.origin() == self.location.url.origin();
            if let Some(token) = self.options.hf_token.as_ref().filter(|_| is_ours) {
                request = request.bearer_auth(token);
            }
            let name = shown(url.as_str());
            let response = request.send().await.map_err(|error| broken(&name, error))?;
            if is_ours && self.wanted.is_none() {
                let linked = response.headers().get("x-linked-etag").and_then(|value| value.to_str().ok());
                self.wanted = linked.and_then(|etag| as_sha256(etag.trim_matches('"')));
            }
            match redirect_target(&response, &url)? {
                Some(target) => url = target,
                None => return Ok((response, name)),
            }
        }
        let problem = format!("more than {MAX_REDIRECTS} redirects");
        Err(FetchError::Response { url: self.location.shown(), problem }.into())
    }
}

/// Where a response sends us, if it does. Never from https to http.
fn redirect_target(response: &Response, url: &Url) -> Result<Option<Url>, FetchError> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return Ok(None);
    }
    let target = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
    let target = target.and_then(|target| url.join(target).ok());
    match target.filter(|target| target.scheme() == "https" || (target.scheme() == "http" && url.scheme() == "http")) {
        Some(target) => Ok(Some(target)),
        None => {
            let problem = "redirects to no http(s) URL, or from https to http".to_owned();
            Err(FetchError::Response { url: shown(url.as_str()), problem })
        }
    }
}

fn broken(url: &str, error: reqwest::Error) -> Failure {
    Failure::Passing(FetchError::Connection { url: url.to_owned(), source: error.without_url() }, None)
}

/// A status that brings no bytes: final, but for those that servers give when they are busy.
fn refused(response: &Response, status: StatusCode, url: String, is_hugging_face: bool) -> Failure {
    let hint = match status.as_u16() {
        401 | 403 if is_hugging_face => " (a private or gated repository needs HF_TOKEN and accepted terms)",
        404 if is_hugging_face => " (no such repository, revision or file)",
        _ => "",
    };
    let error = FetchError::Status { url, status: status.as_u16(), hint };
    if !(status.is_server_error() || matches!(status.as_u16(), 408 | 429)) {
        return Failure::Fatal(error);
    }
    let seconds = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    Failure::Passing(error, seconds.map(Duration::from_secs))
}

/// Whether a body without a length ends where the connection does, so that a break looks like its end.
fn ends_with_its_connection(response: &Response) -> bool {
    response.version() <= Version::HTTP_11 && !response.headers().contains_key(TRANSFER_ENCODING)
}

/// The ETag if it stands for the very bytes.
fn strong_etag(headers: &HeaderMap) -> Option<String> {
    let etag = headers.get(ETAG)?.to_str().ok()?;
    etag.starts_with('"').then(|| etag.to_owned())
}

/// First byte and total of `bytes 5-9/10`, `bytes 5-9/*` or `bytes */10`.
fn parse_content_range(value: &str) -> Option<(Option<u64>, Option<u64>)> {
    let (range, total) = value.strip_prefix("bytes ")?.split_once('/')?;
    let start = range.split_once('-').and_then(|(start, _)| start.parse().ok());
    Some((start, total.parse().ok()))
}
