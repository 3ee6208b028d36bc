//! The page `/browser` and the models' files: off unless asked for, and then no other file than those.

use std::path::{Path, PathBuf};

use lockstep_coordinator::CoordinatorError;
use tokio_util::sync::CancellationToken;

use crate::{
    http::{Answer, get, get_with},
    stub::{self, Coordinator, MODEL, StubWorker},
    tenants,
};

const NAMES: [&str; 6] =
    ["index.html", "page.css", "page.js", "worker.js", "lockstep_browser.js", "lockstep_browser_bg.wasm"];

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    /// With a page, a model, and something else.
    fn new() -> Self {
        let path = std::env::temp_dir().join(format!("lockstep-browser-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir(&path).unwrap();
        for name in NAMES.into_iter().chain(["secret"]) {
            std::fs::write(path.join(name), name).unwrap();
        }
        std::fs::write(path.join("model.gguf"), "GGUF and so on").unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A coordinator with that page, if any, and a model of this file.
async fn cluster(page: Option<&Path>, model: &Path) -> (Coordinator, StubWorker, tenants::File) {
    let file = tenants::file(&[("alice", "")]);
    let mut config = stub::config("tensor=1", 1);
    config.tenants_file = Some(file.0.clone());
    config.browser_folder = page.map(Path::to_owned);
    config.model.as_mut().unwrap().source = model.display().to_string();
    let coordinator = Coordinator::start(config).await;
    let worker = StubWorker::start("w0", coordinator.grpc).await;
    tenants::wait_ready(&coordinator).await;
    (coordinator, worker, file)
}

async fn range(coordinator: &Coordinator, key: &str, model: &str, range: &str) -> Answer {
    let headers = format!("authorization: Bearer {key}\r\nrange: {range}\r\n");
    get_with(coordinator, &format!("/browser/models/{model}"), &headers).await
}

#[tokio::test]
async fn nothing_is_served_unless_asked_for() {
    let folder = Folder::new();
    let (coordinator, _worker, _file) = cluster(None, &folder.0.join("model.gguf")).await;
    for path in ["/browser", "/browser/", "/browser/page.js"] {
        assert_eq!(get(&coordinator, path).await.status, 404, "{path}");
    }
    assert_eq!(range(&coordinator, "alice", MODEL, "bytes=0-3").await.status, 404);
}

#[tokio::test]
async fn the_page_is_served_and_no_other_file() {
    let folder = Folder::new();
    let (coordinator, _worker, _file) = cluster(Some(&folder.0), &folder.0.join("model.gguf")).await;
    let page = get(&coordinator, "/browser/").await;
    assert_eq!((page.status, page.body.as_str()), (200, "index.html"));
    assert!(page.head.contains("content-security-policy: default-src 'none'; script-src 'self'"), "{}", page.head);
    assert!(get(&coordinator, "/browser").await.head.contains("location: /browser/"));
    for name in &NAMES[1..] {
        assert_eq!(get(&coordinator, &format!("/browser/{name}")).await.body, *name);
    }
    for path in ["secret", "model.gguf", "../secret", "..%2fsecret", "%2e%2e/secret", "models/secret", "models/"] {
        let status = get(&coordinator, &format!("/browser/{path}")).await.status;
        assert!(matches!(status, 401 | 404), "{path}: {status}");
    }
}

#[tokio::test]
async fn a_model_is_read_by_ranges_with_a_key() {
    let folder = Folder::new();
    let (coordinator, _worker, _file) = cluster(Some(&folder.0), &folder.0.join("model.gguf")).await;
    let answer = range(&coordinator, "alice", MODEL, "bytes=5-7").await;
    assert_eq!((answer.status, answer.body.as_str()), (206, "and"));
    assert!(answer.head.contains("content-range: bytes 5-7/14"), "{}", answer.head);
    assert_eq!(range(&coordinator, "alice", MODEL, "bytes=9-100").await.body, "so on");
    for wrong in ["bytes=14-20", "bytes=-3", "x"] {
        assert_eq!(range(&coordinator, "alice", MODEL, wrong).await.status, 416, "{wrong}");
    }
    assert_eq!(range(&coordinator, "bob", MODEL, "bytes=0-3").await.status, 401);
    assert_eq!(range(&coordinator, "alice", "other", "bytes=0-3").await.status, 404);
}

#[tokio::test]
async fn what_is_no_model_is_not_read() {
    let folder = Folder::new();
    for name in ["secret", "missing", "."] {
        let (coordinator, _worker, _file) = cluster(Some(&folder.0), &folder.0.join(name)).await;
        let answer = range(&coordinator, "alice", MODEL, "bytes=0-3").await;
        assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (404, Some("model_not_here")), "{name}");
    }
}

#[tokio::test]
async fn a_folder_without_the_page_is_refused_at_the_start() {
    let folder = Folder::new();
    std::fs::remove_file(folder.0.join("worker.js")).unwrap();
    let mut config = stub::config("tensor=1", 1);
    config.browser_folder = Some(folder.0.clone());
    let refused = lockstep_coordinator::run(config, CancellationToken::new(), |_, _| {}).await;
    assert!(matches!(refused, Err(CoordinatorError::BrowserFolder { file: "worker.js", .. })), "{refused:?}");
}
