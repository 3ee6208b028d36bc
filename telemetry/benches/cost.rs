//! What telemetry costs the threads that compute: counting a step, and a span of a traced one.
//! The collector hangs, so that what is measured is the way into the full queue and past it as well.

#![allow(clippy::unwrap_used, missing_docs, reason = "a bench fails by panicking")]

use std::time::SystemTime;

use criterion::{Criterion, criterion_group, criterion_main};
use lockstep_telemetry::{
    define_metrics,
    metrics::{Counters, Gauges, Histograms},
    otlp::{self, ExportConfig},
    trace::{self, KeyValue},
};

const BUCKETS: &[f64] = &[0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5];

define_metrics! {
    /// As many as a rank sets in a step.
    pub struct Step {
        seconds: Histograms = "step_seconds" ["rank"] in BUCKETS, "A step";
        bytes: Counters = "bytes_total" ["rank", "peers"], "Bytes";
        memory: Gauges = "memory_bytes" ["rank", "kind"], "Memory";
    }
}

fn counting(criterion: &mut Criterion) {
    let step = Step::new().unwrap();
    let seconds = step.seconds.with_label_values(&["0"]);
    let bytes = ["hosts", "devices"].map(|peers| step.bytes.with_label_values(&["0", peers]));
    let memory = ["weights", "kv", "scratch", "high"].map(|kind| step.memory.with_label_values(&["0", kind]));
    criterion.bench_function("count a step", |bencher| {
        bencher.iter(|| {
            seconds.observe(0.004);
            bytes.iter().for_each(|counter| counter.inc_by(4096));
            memory.iter().for_each(|gauge| gauge.set(1.0));
        });
    });
}

fn tracing_a_step(criterion: &mut Criterion) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let exporting = {
        let _runtime = runtime.enter();
        otlp::start(&ExportConfig { endpoint, ratio: 1.0, service: "bench".to_owned(), ..ExportConfig::default() })
            .unwrap()
    };
    let parent = trace::remote(1, 2);
    let attributes: Vec<_> = (0..7).map(|index| KeyValue::new(format!("key{index}"), index)).collect();
    criterion.bench_function("span of a step", |bencher| {
        bencher.iter(|| {
            let links = std::slice::from_ref(&parent);
            drop(trace::open("step", &parent, SystemTime::now(), links, attributes.clone()));
        });
    });
    exporting.finish();
    runtime.shutdown_background();
}

criterion_group!(benches, counting, tracing_a_step);
criterion_main!(benches);
