//! Slices of a checkpoint that stays on a server are those of the file, over breaks; what is asked for is little more.

#![allow(clippy::expect_used, reason = "tests")]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use lockstep_formats::GgmlType;
use lockstep_model::{
    Checkpoint,
    synth::{Quantization, SynthSpec, synth},
};

/// A server of one file, which breaks off every third answer in its middle and counts the bytes that it sends. As
/// `signed.gguf` it is for those who GET it with the signature.
struct Server {
    url: PathBuf,
    sent: Arc<AtomicU64>,
    /// Of the file, as its headers tell.
    version: Arc<AtomicUsize>,
}

/// The headers that tell versions of a file apart.
type Validators = fn(usize) -> String;

fn dated(version: usize) -> String {
    format!("Last-Modified: Sat, 01 Nov 2025 10:00:0{version} GMT")
}

fn strong(version: usize) -> String {
    format!("ETag: \"{version}\"\r\n{}", dated(version))
}

fn weak(version: usize) -> String {
    format!("ETag: W/\"{version}\"\r\n{}", dated(version))
}

/// Whether a request is for another version. A weak ETag matches nothing.
fn is_refused(head: &[String], validators: &str) -> bool {
    let asked = |name: &str| head.iter().find_map(|line| line.to_lowercase().strip_prefix(name).map(str::to_owned));
    let validators = validators.to_lowercase();
    asked("if-match: ").is_some_and(|etag| etag.starts_with("w/") || !validators.contains(&etag))
        || asked("if-unmodified-since: ").is_some_and(|time| !validators.contains(&time))
}

impl Server {
    fn start(file: Vec<u8>, validators: Validators) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let url = PathBuf::from(format!("http://{}/m.gguf", listener.local_addr().expect("address")));
        let sent = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&sent);
        let (file, answers) = (Arc::new(file), Arc::new(AtomicUsize::new(0)));
        let version = Arc::new(AtomicUsize::new(1));
        let told = Arc::clone(&version);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (file, answers, counted) = (Arc::clone(&file), Arc::clone(&answers), Arc::clone(&counted));
                let validators = validators(told.load(Ordering::Relaxed));
                // A client that went away is no concern of the server.
                std::thread::spawn(move || answer(stream, &file, &validators, &answers, &counted));
            }
        });
        Self { url, sent, version }
    }
}

fn answer(
    mut stream: TcpStream,
    file: &[u8],
    validators: &str,
    answers: &AtomicUsize,
    sent: &AtomicU64,
) -> std::io::Result<()> {
    let head: Vec<String> = BufReader::new(stream.try_clone()?)
        .take(16 << 10)
        .lines()
        .map_while(Result::ok)
        .take_while(|line| !line.is_empty())
        .collect();
    if is_refused(&head, validators) {
        return write!(stream, "HTTP/1.1 412 Precondition Failed\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    }
    let request = head.first().map_or("", String::as_str);
    if request.contains("/signed.gguf") && !request.starts_with("GET /signed.gguf?sig=secret&x=1 ") {
        return write!(stream, "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    }
    let is_get = head.first().is_some_and(|line| line.starts_with("GET"));
    let range = head.iter().find_map(|line| line.to_lowercase().strip_prefix("range: bytes=").map(str::to_owned));
    let bounds = range.as_deref().and_then(|range| range.split_once('-'));
    let (first, last) = bounds
        .map_or((0, file.len() - 1), |(first, last)| (first.parse().expect("first"), last.parse().expect("last")));
    let part = &file[first..=last];
    let common = format!("{validators}\r\nContent-Length: {}", part.len());
    let status = match bounds {
        Some(_) => format!("206 Partial Content\r\nContent-Range: bytes {first}-{last}/{}", file.len()),
        None => "200 OK".to_owned(),
    };
    write!(stream, "HTTP/1.1 {status}\r\n{common}\r\nConnection: close\r\n\r\n")?;
    if is_get {
        let breaks = answers.fetch_add(1, Ordering::Relaxed) % 3 == 1;
        let part = if breaks { &part[..part.len() / 2] } else { part };
        sent.fetch_add(part.len() as u64, Ordering::Relaxed);
        stream.write_all(part)?;
    }
    Ok(())
}

fn tiny() -> SynthSpec {
    SynthSpec::preset("tiny", Quantization::Uniform(GgmlType::Q8_0)).expect("a known shape")
}

#[test]
fn slices_are_those_of_the_file() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("m.gguf");
    synth(&tiny(), &path, |_, _| {}).expect("synthesize");
    let local = Checkpoint::open(&path).expect("open the file");
    let server = Server::start(std::fs::read(&path).expect("read"), strong);
    let remote = Checkpoint::open(&server.url).expect("open the object");
    assert_eq!((remote.shape(), remote.num_bytes()), (local.shape(), local.num_bytes()));

    for tensor in &local.shape().tensors {
        let block = tensor.ggml_type.block_elements();
        let columns = block * (tensor.columns / block / 2)..tensor.columns;
        for (rows, columns) in [(0..tensor.rows, 0..tensor.columns), (tensor.rows / 3..tensor.rows, columns)] {
            let read = |checkpoint: &Checkpoint| {
                checkpoint.read_slice(tensor.role, tensor.layer, rows.clone(), columns.clone()).expect("slice")
            };
            assert!(read(&local) == read(&remote), "{:?} of layer {:?}", tensor.role, tensor.layer);
        }
    }
}

#[test]
fn what_is_read_is_of_one_version() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("m.gguf");
    synth(&tiny(), &path, |_, _| {}).expect("synthesize");
    for validators in [strong as Validators, weak, dated] {
        let server = Server::start(std::fs::read(&path).expect("read"), validators);
        let signed = PathBuf::from(server.url.display().to_string().replace("m.gguf", "signed.gguf?sig=secret&x=1"));
        let remote = Checkpoint::open(&signed).expect("open");
        let tensor = remote.shape().tensors.first().expect("a tensor").clone();
        let read = || remote.read_slice(tensor.role, tensor.layer, 0..tensor.rows, 0..tensor.columns);
        read().expect("slice");
        server.version.store(2, Ordering::Relaxed);
        let error = read().expect_err("another version").to_string();
        assert!(error.contains("changed while it was read") && !error.contains("secret"), "{error}");
    }
}

#[test]
fn a_part_costs_about_its_own_bytes() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("m.gguf");
    let spec = SynthSpec { vocab_size: 4096, hidden_size: 1024, ..tiny() };
    synth(&spec, &path, |_, _| {}).expect("synthesize");
    let server = Server::start(std::fs::read(&path).expect("read"), strong);
    let remote = Checkpoint::open(&server.url).expect("open");
    let header = server.sent.load(Ordering::Relaxed);
    let embedding = remote.shape().tensors.iter().find(|tensor| tensor.layer.is_none()).expect("a tensor").clone();
    let bytes = remote.read_slice(embedding.role, None, 0..embedding.rows / 2, 0..embedding.columns).expect("slice");
    let cost = server.sent.load(Ordering::Relaxed) - header;
    assert!(cost < 2 * bytes.len() as u64 + (2 << 20), "{cost} for {}", bytes.len());
}

#[test]
fn what_is_not_there_is_an_error() {
    let refused = Checkpoint::open(&PathBuf::from("http://127.0.0.1:1/m.gguf")).expect_err("nobody listens");
    assert!(refused.to_string().contains("http://127.0.0.1:1/m.gguf"), "{refused}");
    let server = Server::start(vec![0], strong);
    let forged = server.url.display().to_string().replace("m.gguf", "signed.gguf?sig=forged");
    let refused = Checkpoint::open(&PathBuf::from(forged)).expect_err("another signature").to_string();
    assert!(refused.contains("403") && !refused.contains("forged"), "{refused}");
}
