//! A collector that hangs must cost its spans and nothing else.

#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::time::{Duration, Instant, SystemTime};

use lockstep_telemetry::{
    otlp::{self, ExportConfig},
    trace,
};
use lockstep_transport::TlsFiles;

const NUM_SPANS: u64 = 30_000;

#[test]
fn endpoints_that_cannot_be_used_are_refused() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _runtime = runtime.enter();
    let problem = |endpoint: &str, ca: Option<&str>| {
        let tls = TlsFiles { ca: ca.map(Into::into), pair: None };
        otlp::start(&ExportConfig { endpoint: endpoint.to_owned(), tls, ..ExportConfig::default() }).err().unwrap()
    };
    assert!(problem("ftp://collector", None).to_string().contains("host:port"));
    assert!(problem("https://collector", Some("/no/ca.pem")).to_string().contains("/no/ca.pem"));
    assert!(
        problem("http://collector", Some(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")))
            .to_string()
            .contains("certificate")
    );
}

#[test]
fn a_collector_that_hangs_holds_nobody_up() {
    // Connections come in, and nobody ever answers on them.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let exporting = {
        let _runtime = runtime.enter();
        otlp::start(&ExportConfig { endpoint, ratio: 1.0, service: "test".to_owned(), ..ExportConfig::default() })
            .unwrap()
    };
    let parent = trace::remote(1, 2);
    let start = Instant::now();
    for _ in 0..NUM_SPANS {
        drop(trace::open("step", &parent, SystemTime::now(), &[], Vec::new()));
    }
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    let counts = otlp::metrics().unwrap();
    assert!(counts.dropped.get() > NUM_SPANS / 2, "{}", counts.dropped.get());
    assert_eq!(counts.exported.get(), 0);

    let end = Instant::now();
    exporting.finish();
    assert!(end.elapsed() < Duration::from_secs(6), "{:?}", end.elapsed());
    runtime.shutdown_background();
}
