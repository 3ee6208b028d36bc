//! Fetching from a server on the loopback that breaks in every way in which servers do.

#![allow(clippy::expect_used, reason = "tests")]

use std::{
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use lockstep_model::source::{FetchError, FetchOptions, Fetched, Progress, fetch};
use sha2::{Digest, Sha256};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// A request as the server read it: first line and headers, in lower case.
type Request = String;

/// What the server sends: a head, and of the body that it announces perhaps only a part.
struct Reply {
    head: String,
    body: Vec<u8>,
    /// Keeps the connection open and silent after the body.
    stalls: bool,
}

struct Server {
    address: String,
    requests: Arc<Mutex<Vec<Request>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    /// Answers each request with what `reply` makes of its number and text.
    async fn start(reply: impl Fn(usize, &Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = format!("http://{}", listener.local_addr().expect("address"));
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&requests);
        let reply = Arc::new(reply);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(answer(stream, Arc::clone(&seen), Arc::clone(&reply)));
            }
        });
        Self { address, requests, task }
    }

    fn requests(&self) -> Vec<Request> {
        self.requests.lock().expect("requests").clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn answer(mut stream: TcpStream, seen: Arc<Mutex<Vec<Request>>>, reply: Arc<impl Fn(usize, &Request) -> Reply>) {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        let Ok(byte) = stream.read_u8().await else { return };
        request.push(byte);
    }
    let request = String::from_utf8(request).expect("text").to_lowercase();
    let number = {
        let mut seen = seen.lock().expect("requests");
        seen.push(request.clone());
        seen.len()
    };
    let reply = reply(number, &request);
    let head = format!("HTTP/1.1 {}\r\nConnection: close\r\n\r\n", reply.head);
    let _ = stream.write_all(head.as_bytes()).await;
    let _ = stream.write_all(&reply.body).await;
    let _ = stream.flush().await;
    if reply.stalls {
        std::future::pending::<()>().await;
    }
}

fn head(status: &str, headers: &[&str]) -> Reply {
    Reply { head: [&[status], headers].concat().join("\r\n"), body: Vec::new(), stalls: false }
}

/// The file, or the range of it that was asked for, cut off after `cut` bytes.
fn serve(request: &Request, file: &[u8], etag: &str, cut: usize) -> Reply {
    let offset = range_of(request).filter(|_| !request.contains("if-range") || request.contains(etag));
    let rest = &file[offset.unwrap_or(0)..];
    let length = format!("Content-Length: {}", rest.len());
    let etag = format!("ETag: {etag}");
    let range = offset.map(|offset| format!("Content-Range: bytes {offset}-{}/{}", file.len() - 1, file.len()));
    let mut reply = match &range {
        Some(range) => head("206 Partial Content", &[&length, &etag, range]),
        None => head("200 OK", &[&length, &etag]),
    };
    reply.body = rest[..cut.min(rest.len())].to_vec();
    reply
}

fn range_of(request: &Request) -> Option<usize> {
    let range = request.split("\r\nrange: bytes=").nth(1)?;
    range.split('-').next()?.parse().ok()
}

fn file() -> Vec<u8> {
    (0..300_000_u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn options() -> FetchOptions {
    FetchOptions {
        connect_timeout: Duration::from_secs(2),
        stall_timeout: Duration::from_millis(300),
        max_retries: 3,
        backoff: Duration::from_millis(5),
        ..FetchOptions::default()
    }
}

async fn pull(source: &str, destination: &Path, options: &FetchOptions) -> Result<Fetched, FetchError> {
    fetch(source, destination, options, &mut |_| {}).await
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("folder");
    let mut names: Vec<_> =
        entries.map(|entry| entry.expect("entry").file_name().into_string().expect("name")).collect();
    names.sort();
    names
}

#[tokio::test]
async fn a_file_arrives_whole_with_progress() {
    let server = Server::start(|_, request| serve(request, &file(), "\"a\"", usize::MAX)).await;
    let folder = tempfile::tempdir().expect("folder");
    let mut seen: Vec<Progress> = Vec::new();
    let source = format!("{}/dir/m.gguf?sig=secret", server.address);
    let fetched = fetch(&source, folder.path(), &options(), &mut |progress| seen.push(progress)).await.expect("fetch");
    assert_eq!(fetched.path, folder.path().join("m.gguf"));
    assert_eq!((fetched.num_bytes, fetched.was_present), (300_000, false));
    assert_eq!(fetched.sha256, Some(sha256(&file())));
    assert_eq!(std::fs::read(&fetched.path).expect("file"), file());
    assert_eq!(names(folder.path()), ["m.gguf", "m.gguf.lock"]);
    assert!(seen.is_sorted_by_key(|progress| progress.bytes));
    assert_eq!(seen.last(), Some(&Progress { bytes: 300_000, total_bytes: Some(300_000) }));

    // Again: nothing is asked of the server, unless the file is not the one that is wanted; it stays until that has come.
    let again = pull(&source, folder.path(), &options()).await.expect("again");
    assert!(again.was_present);
    let wrong = FetchOptions { sha256: Some("0".repeat(64)), ..options() };
    assert!(matches!(pull(&source, folder.path(), &wrong).await, Err(FetchError::Hash { .. })));
    assert_eq!(std::fs::read(&fetched.path).expect("file"), file());
    assert_eq!(server.requests().len(), 2);
}

#[tokio::test]
async fn missing_folders_are_made_and_nothing_is_written_beside_a_file_that_is_there() {
    let server = Server::start(|_, request| serve(request, &file(), "\"a\"", usize::MAX)).await;
    let folder = tempfile::tempdir().expect("folder");
    let source = format!("{}/m.gguf", server.address);
    let fetched = pull(&source, &folder.path().join("a/b/"), &options()).await.expect("into a folder");
    assert_eq!(fetched.path, folder.path().join("a/b/m.gguf"));
    let fetched = pull(&source, &folder.path().join("c/n.gguf"), &options()).await.expect("to a file");
    assert_eq!(fetched.path, folder.path().join("c/n.gguf"));
    std::fs::remove_file(folder.path().join("c/n.gguf.lock")).expect("lock");
    // As on a volume that is mounted read-only.
    let checked = FetchOptions { sha256: Some(sha256(&file())), ..options() };
    for options in [options(), checked] {
        assert!(pull(&source, &fetched.path, &options).await.expect("it is there").was_present);
    }
    assert_eq!(names(&folder.path().join("c")), ["n.gguf"]);
}

#[tokio::test]
async fn a_file_that_was_fetched_here_is_hashed_again_only_if_it_changed_and_then_fetched_anew() {
    let server = Server::start(|_, request| serve(request, &file(), "\"a\"", usize::MAX)).await;
    let folder = tempfile::tempdir().expect("folder");
    let source = format!("{}/m.gguf", server.address);
    let checked = FetchOptions { sha256: Some(sha256(&file())), ..options() };
    let path = pull(&source, folder.path(), &checked).await.expect("fetch").path;
    let fetched = std::fs::metadata(&path).and_then(|metadata| metadata.modified()).expect("time");
    let mut changed = file();
    changed[7] ^= 1;
    std::fs::write(&path, &changed).expect("write");
    // Nothing but size and time is looked at.
    let open = std::fs::File::options().write(true).open(&path).expect("open");
    open.set_modified(fetched).expect("time");
    assert!(pull(&source, folder.path(), &checked).await.expect("as it was").was_present);
    open.set_modified(fetched + Duration::from_secs(1)).expect("time");
    assert!(!pull(&source, folder.path(), &checked).await.expect("anew").was_present);
    assert_eq!(std::fs::read(&path).expect("file"), file());
    let other = FetchOptions { sha256: Some("0".repeat(64)), ..options() };
    let error = pull(&source, folder.path(), &other).await.expect_err("another hash");
    assert!(matches!(error, FetchError::Hash { .. }), "{error}");
}

#[tokio::test]
async fn broken_connections_are_resumed() {
    let server = Server::start(|_, request| serve(request, &file(), "\"a\"", 70_000)).await;
    let folder = tempfile::tempdir().expect("folder");
    let fetched = pull(&format!("{}/m", server.address), folder.path(), &options()).await.expect("fetch");
    assert_eq!(fetched.sha256, Some(sha256(&file())));
    let requests = server.requests();
    assert_eq!(requests.iter().map(range_of).collect::<Vec<_>>()[0], None);
    assert!(requests[1..].iter().all(|request| range_of(request) > Some(0) && request.contains("if-range: \"a\"")));
}

#[tokio::test]
async fn a_later_run_continues_what_an_earlier_one_left() {
    let folder = tempfile::tempdir().expect("folder");
    let server = Server::start(|number, request| match number {
        1 => serve(request, &file(), "\"a\"", 100_000),
        2 => head("404 Not Found", &[]),
        _ => serve(request, &file(), "\"a\"", usize::MAX),
    })
    .await;
    let source = format!("{}/m", server.address);
    let error = pull(&source, folder.path(), &options()).await.expect_err("404");
    assert!(matches!(error, FetchError::Status { status: 404, .. }), "{error}");
    assert_eq!(names(folder.path()), ["m.lock", "m.partial", "m.partial.json"]);
    let fetched = pull(&source, folder.path(), &options()).await.expect("second run");
    assert_eq!(fetched.sha256, Some(sha256(&file())));
    assert!(range_of(&server.requests()[2]) > Some(0));
}

#[tokio::test]
async fn a_file_that_changed_meanwhile_is_fetched_anew() {
    let changed: Vec<u8> = file().iter().map(|byte| !byte).collect();
    let expected = sha256(&changed);
    let server = Server::start(move |number, request| match number {
        1 => serve(request, &file(), "\"a\"", 100_000),
        _ => serve(request, &changed, "\"b\"", usize::MAX),
    })
    .await;
    let folder = tempfile::tempdir().expect("folder");
    let fetched = pull(&format!("{}/m", server.address), folder.path(), &options()).await.expect("fetch");
    assert_eq!(fetched.sha256, Some(expected));
}

#[tokio::test]
async fn a_server_without_ranges_is_asked_from_the_start_and_not_for_ever() {
    let whole = |cut| {
        let mut reply = head("200 OK", &["Content-Length: 300000"]);
        reply.body = file()[..cut].to_vec();
        reply
    };
    let server = Server::start(move |number, _| whole(if number < 3 { 200_000 } else { 300_000 })).await;
    let folder = tempfile::tempdir().expect("folder");
    let fetched = pull(&format!("{}/m", server.address), folder.path(), &options()).await.expect("fetch");
    assert_eq!(fetched.sha256, Some(sha256(&file())));

    let server = Server::start(move |_, _| whole(1000)).await;
    let error = pull(&format!("{}/n", server.address), folder.path(), &options()).await.expect_err("never whole");
    assert!(matches!(error, FetchError::GaveUp { attempts: 4, .. }), "{error}");
    assert!(server.requests().len() <= 5);
}

#[tokio::test]
async fn a_stall_ends_the_wait_and_the_rest_is_fetched() {
    let server = Server::start(|number, request| {
        let mut reply = serve(request, &file(), "\"a\"", if number == 1 { 50_000 } else { usize::MAX });
        reply.stalls = number == 1;
        reply
    })
    .await;
    let folder = tempfile::tempdir().expect("folder");
    let fetched = pull(&format!("{}/m", server.address), folder.path(), &options()).await.expect("fetch");
    assert_eq!(fetched.sha256, Some(sha256(&file())));
    assert_eq!(server.requests().len(), 2);
}

#[tokio::test]
async fn a_wrong_hash_leaves_nothing_under_the_name() {
    let server = Server::start(|_, request| serve(request, &file(), "\"a\"", usize::MAX)).await;
    let folder = tempfile::tempdir().expect("folder");
    let options = FetchOptions { sha256: Some("A".repeat(64)), ..options() };
    let error = pull(&format!("{}/m", server.address), folder.path(), &options).await.expect_err("hash");
    let text = error.to_string();
    assert!(text.contains(&sha256(&file())) && text.contains(&"a".repeat(64)), "{text}");
    assert!(!folder.path().join("m").exists());
    assert!(!folder.path().join("m.partial").exists());
    let options = FetchOptions { sha256: Some("abc".into()), ..options };
    assert!(matches!(
        pull("http://127.0.0.1:1/m", folder.path(), &options).await,
        Err(FetchError::InvalidSource { .. })
    ));
}

#[tokio::test]
async fn hugging_face_redirects_carry_the_hash_but_not_the_token() {
    let cdn = Server::start(|_, request| serve(request, &file(), "\"cdn\"", usize::MAX)).await;
    let target = format!("Location: {}/blob?X-Signature=secret", cdn.address);
    let declared = format!("X-Linked-ETag: \"{}\"", sha256(&file()));
    let wrong = format!("X-Linked-ETag: \"{}\"", "0".repeat(64));
    let hub = Server::start(move |_, request| {
        let hash = if request.contains("/other/") { &wrong } else { &declared };
        head("302 Found", &[&target, hash, "Content-Length: 0"])
    })
    .await;
    let folder = tempfile::tempdir().expect("folder");
    let options = FetchOptions { hf_endpoint: hub.address.clone(), hf_token: Some("hf_token".into()), ..options() };
    let fetched = pull("hf://org/repo/m.gguf@v1", folder.path(), &options).await.expect("fetch");
    assert_eq!(fetched.path, folder.path().join("m.gguf"));
    assert!(hub.requests()[0].starts_with("get /org/repo/resolve/v1/m.gguf "));
    assert!(hub.requests()[0].contains("authorization: bearer hf_token"));
    assert!(!cdn.requests()[0].contains("authorization"));

    let error = pull("hf://org/other/n.gguf", folder.path(), &options).await.expect_err("other hash");
    assert!(matches!(error, FetchError::Hash { .. }), "{error}");
    pull(&format!("{}/plain", cdn.address), folder.path(), &options).await.expect("plain URL");
    assert!(cdn.requests().iter().all(|request| !request.contains("authorization")));
}

#[tokio::test]
async fn refusals_are_told_once_and_busy_servers_asked_again() {
    let folder = tempfile::tempdir().expect("folder");
    let server = Server::start(|_, _| head("403 Forbidden", &["Content-Length: 0"])).await;
    let options = FetchOptions { hf_endpoint: server.address.clone(), ..options() };
    let error = pull("hf://org/repo/m", folder.path(), &options).await.expect_err("403").to_string();
    assert!(error.contains("403") && error.contains("HF_TOKEN"), "{error}");
    assert_eq!(server.requests().len(), 1);

    let server = Server::start(|number, request| match number {
        1 => head("503 Service Unavailable", &["Retry-After: 0", "Content-Length: 0"]),
        2 => head("429 Too Many Requests", &["Content-Length: 0"]),
        _ => serve(request, &file(), "\"a\"", usize::MAX),
    })
    .await;
    pull(&format!("{}/m", server.address), folder.path(), &options).await.expect("third time");

    let server = Server::start(|_, _| head("302 Found", &["Location: /again", "Content-Length: 0"])).await;
    let error = pull(&format!("{}/loop?sig=secret", server.address), folder.path(), &options).await;
    let error = error.expect_err("loop").to_string();
    assert!(error.contains("redirects") && !error.contains("secret"), "{error}");
    let server = Server::start(|_, _| head("302 Found", &["Location: file:///etc/passwd"])).await;
    assert!(pull(&format!("{}/x", server.address), folder.path(), &options).await.is_err());
}

#[tokio::test]
async fn no_server_and_a_second_fetch_are_clear_errors() {
    let folder = tempfile::tempdir().expect("folder");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let source = format!("http://{}/m", listener.local_addr().expect("address"));
    drop(listener);
    let error = pull(&source, folder.path(), &options()).await.expect_err("nobody listens");
    assert!(matches!(error, FetchError::GaveUp { attempts: 4, .. }), "{error}");

    let lock = std::fs::File::create(folder.path().join("m.lock")).expect("lock file");
    lock.lock().expect("lock");
    let error = pull(&source, folder.path(), &options()).await.expect_err("locked");
    assert!(matches!(error, FetchError::Locked { .. }), "{error}");
    let error = pull(&source, &folder.path().join("m.lock/m"), &options()).await.expect_err("a file in the way");
    assert!(matches!(error, FetchError::Io { .. }), "{error}");
}

/// A presigned URL is another one every hour.
#[tokio::test]
async fn a_new_signature_goes_on_with_what_has_come_if_the_hash_is_known_and_none_is_written_down() {
    let folder = tempfile::tempdir().expect("folder");
    let server = Server::start(|number, request| match number {
        2 | 5 => head("404 Not Found", &[]),
        _ => serve(request, &file(), "\"a\"", if request.contains("=old") { 100_000 } else { usize::MAX }),
    })
    .await;
    let source = |name: &str| format!("{}/m?sig={name}", server.address.replace("//", "//user:secret@"));
    for (options, is_continued) in
        [(FetchOptions { sha256: Some(sha256(&file())), ..options() }, true), (options(), false)]
    {
        let error = pull(&source("old-secret"), folder.path(), &options).await.expect_err("404").to_string();
        let written = std::fs::read_to_string(folder.path().join("m.partial.json")).expect("record");
        assert!(
            !error.contains("secret") && !written.contains("secret") && written.contains("etag"),
            "{error} {written}"
        );
        pull(&source("new"), folder.path(), &options).await.expect("fetch");
        assert_eq!(range_of(server.requests().last().expect("a request")).is_some(), is_continued);
        std::fs::remove_file(folder.path().join("m")).expect("remove");
    }
}

#[tokio::test]
async fn a_body_that_a_break_may_have_ended_counts_only_with_its_hash() {
    let folder = tempfile::tempdir().expect("folder");
    let endless =
        |cut: usize| move |_: usize, _: &Request| Reply { body: file()[..cut].to_vec(), ..head("200 OK", &[]) };
    let server = Server::start(endless(300_000)).await;
    let source = format!("{}/m", server.address);
    let error = pull(&source, folder.path(), &options()).await.expect_err("no length").to_string();
    assert!(error.contains("names no length"), "{error}");
    assert_eq!((server.requests().len(), names(folder.path())), (1, vec!["m.lock".to_owned()]));
    let checked = FetchOptions { sha256: Some(sha256(&file())), ..options() };
    assert_eq!(pull(&source, folder.path(), &checked).await.expect("by its hash").num_bytes, 300_000);
    let server = Server::start(endless(200_000)).await;
    let error = pull(&format!("{}/n", server.address), folder.path(), &checked).await.expect_err("cut off");
    assert!(matches!(error, FetchError::Hash { .. }), "{error}");
}
