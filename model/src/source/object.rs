//! Objects of S3, Google Cloud Storage and Azure, and files of HTTP servers, by ranges of bytes.
//! For: [`fetch`](super::fetch) of `s3://`, `gs://` and `az://`, and weights that are read where they lie.
//! Invariants: no wait is without a time-out; ranges of one object are never of two versions of it, as far as the server
//! tells versions apart: by ETags that stand for the very bytes, or else by the second of the last change.
//! Not here: credentials. They are what each cloud's own tools read from the environment (`AWS_…`, `GOOGLE_…`,
//! `AZURE_…`), the identity that a machine or pod was given included.

use std::{sync::Arc, time::Duration};

use futures::{StreamExt, stream::BoxStream};
use object_store::{
    ClientConfigKey, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, RetryConfig,
    aws::{AmazonS3Builder, AmazonS3ConfigKey},
    azure::{AzureConfigKey, MicrosoftAzureBuilder},
    gcp::{GoogleCloudStorageBuilder, GoogleConfigKey},
    http::HttpBuilder,
    path::Path,
};
use reqwest::Url;

use super::{FetchError, FetchOptions};
use crate::positioned_file::shown;

/// Longest that one answer may take, its body included: only what stands still is given up, and that is found otherwise.
const WHOLE_ANSWER: &str = "24h";
/// Where every cloud's machines ask for their identity, which is what is tried where the environment names none.
const IDENTITY_SERVICE: &str = "169.254.169.254";

/// One object, by its address.
#[derive(Clone, Debug)]
pub(crate) struct RemoteObject {
    store: Arc<dyn ObjectStore>,
    path: Path,
    /// Of an HTTP server's file: what follows the question mark, perhaps a signature.
    query: Option<String>,
    /// For errors.
    url: String,
    stall_timeout: Duration,
}

/// Bytes as they come.
pub(crate) type Chunks = BoxStream<'static, object_store::Result<bytes::Bytes>>;

impl RemoteObject {
    /// Whether a source is an object of a cloud.
    pub(crate) fn is_cloud(scheme: &str) -> bool {
        matches!(scheme, "s3" | "s3a" | "gs" | "az" | "azure" | "abfs" | "abfss")
    }

    /// Makes a client for the object; nothing is asked yet.
    ///
    /// # Errors
    /// [`FetchError::InvalidSource`] if the URL or the environment does not say where and as whom.
    pub(crate) fn new(url: &Url, options: &FetchOptions) -> Result<Self, FetchError> {
        // The client takes the process's provider; a second installation changes nothing.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let name = shown(url.as_str());
        let invalid = |problem: String| FetchError::InvalidSource { source_name: name.clone(), problem };
        let store = store_of(url, options).map_err(|error| invalid(error.to_string()))?;
        let path = Path::from_url_path(url.path()).map_err(|error| invalid(error.to_string()))?;
        let query = url.query().filter(|_| !Self::is_cloud(url.scheme())).map(str::to_owned);
        Ok(Self { store, path, query, url: name, stall_timeout: options.stall_timeout })
    }

    /// Size and ETag.
    ///
    /// # Errors
    /// [`FetchError::Object`], [`FetchError::Stalled`].
    pub(crate) async fn head(&self) -> Result<ObjectMeta, FetchError> {
        // A signature is one for GET alone.
        let first = GetOptions { range: Some(GetRange::Bounded(0..1)), ..GetOptions::default() };
        let asked = async {
            match self.query {
                Some(_) => self.store.get_opts(&self.path, first).await.map(|answer| answer.meta),
                None => self.store.head(&self.path).await,
            }
        };
        self.in_time(asked).await?.map_err(|source| self.failed(source))
    }

    /// The bytes of a range, of the version that [`Self::head`] told of.
    ///
    /// # Errors
    /// [`FetchError::Changed`], [`FetchError::Object`], [`FetchError::Stalled`].
    pub(crate) async fn get(&self, range: GetRange, meta: &ObjectMeta) -> Result<Chunks, FetchError> {
        let if_match = strong_etag(meta);
        // A server that names no time is taken for one of 1970.
        let is_dated = if_match.is_none() && meta.last_modified.timestamp() > 0;
        let if_unmodified_since = is_dated.then_some(meta.last_modified);
        let options = GetOptions { range: Some(range), if_match, if_unmodified_since, ..GetOptions::default() };
        let answer = self.in_time(self.store.get_opts(&self.path, options)).await?;
        answer.map(object_store::GetResult::into_stream).map_err(|source| self.failed(source))
    }

    /// The next bytes; `None` at the end.
    ///
    /// # Errors
    /// [`FetchError::Object`], [`FetchError::Stalled`].
    pub(crate) async fn next(&self, chunks: &mut Chunks) -> Result<Option<bytes::Bytes>, FetchError> {
        self.in_time(chunks.next()).await?.transpose().map_err(|source| self.failed(source))
    }

    /// The error of a range that ended early.
    pub(crate) fn short(&self, expected: usize, got: usize) -> FetchError {
        FetchError::Response { url: self.url.clone(), problem: format!("expected {expected} bytes, got {got}") }
    }

    async fn in_time<T>(&self, answer: impl Future<Output = T>) -> Result<T, FetchError> {
        let stalled = |_| FetchError::Stalled { url: self.url.clone(), seconds: self.stall_timeout.as_secs_f64() };
        tokio::time::timeout(self.stall_timeout, answer).await.map_err(stalled)
    }

    fn failed(&self, source: object_store::Error) -> FetchError {
        if matches!(source, object_store::Error::Precondition { .. }) {
            return FetchError::Changed { url: self.url.clone() };
        }
        let (url, is_nobody) = (self.url.clone(), source.to_string().contains(IDENTITY_SERVICE));
        let source = Box::new(source);
        if is_nobody {
            let hint = credentials_hint(&url);
            return FetchError::Credentials { url, hint, source };
        }
        let said = source.to_string();
        let problem = self.query.as_ref().map_or_else(|| said.clone(), |query| said.replace(&format!("?{query}"), ""));
        FetchError::Object { url, problem, cause: source }
    }
}

/// The ETag if it stands for the very bytes: a weak one matches nothing that is asked for by it.
pub(super) fn strong_etag(meta: &ObjectMeta) -> Option<String> {
    meta.e_tag.clone().filter(|etag| !etag.starts_with("W/"))
}

/// What a store's credentials are, for whoever has none.
fn credentials_hint(url: &str) -> &'static str {
    match url.split_once(':') {
        Some(("gs", _)) => {
            "set GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket"
        }
        Some(("s3" | "s3a", _)) => {
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket"
        }
        _ => {
            "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY, or AZURE_SKIP_SIGNATURE=true for a public container"
        }
    }
}

/// Whether asking anew may help.
pub(crate) fn is_passing(error: &FetchError) -> bool {
    use object_store::Error;
    match error {
        FetchError::Stalled { .. } | FetchError::Response { .. } | FetchError::Changed { .. } => true,
        FetchError::Object { cause, .. } => !matches!(
            **cause,
            Error::NotFound { .. }
                | Error::InvalidPath { .. }
                | Error::NotSupported { .. }
                | Error::NotImplemented { .. }
                | Error::PermissionDenied { .. }
                | Error::Unauthenticated { .. }
        ),
        _ => false,
    }
}

fn store_of(url: &Url, options: &FetchOptions) -> object_store::Result<Arc<dyn ObjectStore>> {
    // Whoever asks tries again himself, and goes on where it broke.
    let retry = RetryConfig { max_retries: 1, retry_timeout: options.stall_timeout, ..RetryConfig::default() };
    let connect = format!("{}ms", options.connect_timeout.as_millis());
    let times = [(ClientConfigKey::ConnectTimeout, connect.as_str()), (ClientConfigKey::Timeout, WHOLE_ANSWER)];
    // The builders have these methods in common, but no trait.
    macro_rules! build {
        ($builder:expr, $key:path) => {{
            let builder = $builder.with_retry(retry);
            Arc::new(
                times.into_iter().fold(builder, |built, (key, value)| built.with_config($key(key), value)).build()?,
            )
        }};
    }
    Ok(match url.scheme() {
        "s3" | "s3a" => build!(AmazonS3Builder::from_env().with_url(url.as_str()), AmazonS3ConfigKey::Client),
        "gs" => build!(GoogleCloudStorageBuilder::from_env().with_url(url.as_str()), GoogleConfigKey::Client),
        "http" | "https" => {
            // The path is put before the query, which may be a signature.
            let query = url.query().map_or_else(String::new, |query| format!("/?{query}"));
            let builder = HttpBuilder::new().with_url(url.origin().ascii_serialization() + &query);
            build!(builder.with_config(ClientConfigKey::AllowHttp, "true"), std::convert::identity)
        }
        _ => build!(MicrosoftAzureBuilder::from_env().with_url(url.as_str()), AzureConfigKey::Client),
    })
}
