//! Traces as an OTLP collector gets them, and the log lines that belong to them.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use lockstep_proto::v1::generate_request::Input;
use lockstep_tests::{
    Cluster, Layout,
    certificates::{Authority, Folder},
    client::{greedy, read_to_end},
    collector::{Collector, Received},
    environment,
    http::{get, post_json},
};
use serde_json::{Value, json};

/// The client's trace and span.
const TRACE_ID: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT_ID: &str = "00f067aa0ba902b7";
/// The trace of a request over HTTP.
const HTTP_TRACE_ID: &str = "0af7651916cd43dd8448eb211c80319c";
const NUM_TOKENS: u32 = 6;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn with_context<T>(message: T, flags: &str) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    let parent = format!("00-{TRACE_ID}-{PARENT_ID}-{flags}");
    request.metadata_mut().insert("traceparent", parent.parse().unwrap());
    request
}

fn prompt() -> Input {
    Input::Prompt("The capital of France is".into())
}

/// The spans of that name.
fn children<'a>(spans: &'a [Received], name: &str) -> Vec<&'a Received> {
    spans.iter().filter(|received| received.span.name == name).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_request_is_one_trace_through_every_process() {
    let collector = Collector::start().await.unwrap();
    let endpoint = format!("--otlp-endpoint=http://{}", collector.address);
    let arguments =
        [endpoint.as_str(), "--log-format=json", "--log=lockstep_coordinator=debug,lockstep_worker=debug,info"];
    let cluster = Cluster::start_with_arguments(Layout::new(2, 1), &environment::model().unwrap(), &arguments).unwrap();
    let client = cluster.client().await.unwrap();
    let mut request = greedy(prompt(), NUM_TOKENS);
    request.request_id = "traced-1".into();
    let answer = client.inference.clone().generate(with_context(request, "01")).await.unwrap();
    let output = read_to_end(answer.into_inner()).await.unwrap();
    assert_eq!(output.token_ids.len() as u32, NUM_TOKENS);
    // Whoever asked for no trace gets none.
    let mut unsampled = greedy(prompt(), NUM_TOKENS);
    unsampled.request_id = "unsampled".into();
    let answer = client.inference.clone().generate(with_context(unsampled, "00")).await.unwrap();
    read_to_end(answer.into_inner()).await.unwrap();
    let two_choices = json!({"prompt": "The capital of France is", "max_tokens": 8, "n": 2, "ignore_eos": true});
    let header = format!("traceparent: 00-{HTTP_TRACE_ID}-{PARENT_ID}-01\r\n");
    post_json(&cluster.http(), "/v1/completions", &header, &two_choices).await.unwrap();
    let counts = get(&cluster.http(), "/metrics").await.unwrap();
    assert!(counts.contains("lockstep_trace_dropped_spans_total 0"), "{counts}");

    drop(client);
    // At the end what waits is sent.
    let (status, log) = cluster.stop().unwrap();
    assert!(status.success(), "{log}");
    let (spans, over_http): (Vec<_>, Vec<_>) =
        collector.spans().into_iter().partition(|received| hex(&received.span.trace_id) != HTTP_TRACE_ID);
    check_spans(&spans);
    check_choices(&over_http);
    check_log(&log);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_may_demand_certificates_and_a_key() {
    let (folder, authority) = (Folder::new().unwrap(), Authority::new().unwrap());
    let collector = Collector::start_secured(folder.member("collector", &authority).unwrap()).await.unwrap();
    let ours = folder.member("us", &authority).unwrap();
    let (Some(ca), Some((cert, key))) = (&ours.ca, &ours.pair) else { panic!("a member without files") };
    let endpoint = format!("https://{}", collector.address);
    let variables = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", Path::new(&endpoint)),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", ca),
        ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", cert),
        ("OTEL_EXPORTER_OTLP_CLIENT_KEY", key),
        ("OTEL_EXPORTER_OTLP_HEADERS", Path::new("authorization=Bearer%20secret")),
    ];
    let cluster = Cluster::start_with_environment(Layout::new(1, 1), &variables).unwrap();
    cluster.client().await.unwrap().generate(greedy(prompt(), NUM_TOKENS)).await.unwrap();
    let (status, log) = cluster.stop().unwrap();
    assert!(status.success(), "{log}");
    let services: BTreeSet<String> = collector.spans().into_iter().map(|received| received.service).collect();
    assert!(services.contains("lockstep-coordinator") && services.contains("lockstep-worker"), "{services:?}: {log}");
    assert_eq!(collector.keys().into_iter().collect::<Vec<_>>(), ["Bearer secret"]);
}

fn check_spans(spans: &[Received]) {
    let mut names = BTreeMap::<&str, usize>::new();
    for Received { span, .. } in spans {
        assert_eq!(hex(&span.trace_id), TRACE_ID, "{span:?}");
        *names.entry(&span.name).or_default() += 1;
    }
    let num_steps = NUM_TOKENS as usize;
    assert_eq!((names["generate"], names["run_sequence"], names["step"]), (1, 1, num_steps), "{names:?}");
    assert_eq!(names["rank_step"], 2 * num_steps, "{names:?}");
    assert_eq!(
        names.keys().copied().collect::<Vec<_>>(),
        ["all_reduce", "generate", "rank_step", "run_sequence", "step"]
    );

    let generate = children(spans, "generate")[0];
    assert_eq!(
        (generate.service.as_str(), hex(&generate.span.parent_span_id).as_str()),
        ("lockstep-coordinator", PARENT_ID)
    );
    let attributes = generate.attributes();
    for (key, value) in [
        ("gen_ai.request.model", "smol"),
        ("gen_ai.response.id", "traced-1"),
        ("gen_ai.usage.input_tokens", "5"),
        ("gen_ai.usage.output_tokens", "6"),
        ("gen_ai.operation.name", "text_completion"),
        ("gen_ai.response.finish_reasons", "[length]"),
        ("lockstep.moves", "0"),
        ("lockstep.outcome", "length"),
    ] {
        assert_eq!(attributes.get(key).map(String::as_str), Some(value), "{key}: {attributes:?}");
    }
    for key in ["lockstep.queue_ms", "lockstep.ttft_ms", "lockstep.decode_ms"] {
        assert!(attributes[key].parse::<f64>().unwrap() >= 0.0, "{key}: {attributes:?}");
    }
    let sequence = children(spans, "run_sequence")[0];
    assert_eq!(sequence.service, "lockstep-worker");
    assert_eq!(sequence.span.parent_span_id, generate.span.span_id);
    let steps = children(spans, "step");
    for step in &steps {
        assert_eq!(step.span.parent_span_id, sequence.span.span_id);
        let links: Vec<_> = step.span.links.iter().map(|link| (&link.trace_id, &link.span_id)).collect();
        assert_eq!(links, [(&sequence.span.trace_id, &sequence.span.span_id)]);
        let ranks: Vec<_> = children(spans, "rank_step")
            .into_iter()
            .filter(|rank| rank.span.parent_span_id == step.span.span_id)
            .collect();
        let mut of_ranks: Vec<_> = ranks.iter().map(|rank| rank.attributes()["lockstep.rank"].clone()).collect();
        of_ranks.sort();
        assert_eq!(of_ranks, ["0", "1"]);
        for rank in ranks {
            assert!(rank.span.end_time_unix_nano > rank.span.start_time_unix_nano, "{rank:?}");
        }
    }
    // Two sums a layer and the embedding's, on both ranks, in the first step alone.
    let sums = children(spans, "all_reduce");
    assert_eq!(sums.len(), 2 * (2 * 30 + 1));
    let prefill = steps.iter().min_by_key(|step| step.span.start_time_unix_nano).unwrap();
    for sum in sums {
        let rank = spans.iter().find(|other| other.span.span_id == sum.span.parent_span_id).unwrap();
        assert_eq!((rank.span.name.as_str(), &rank.span.parent_span_id), ("rank_step", &prefill.span.span_id));
        assert!(sum.attributes()["lockstep.collective.bytes"].parse::<u64>().unwrap() >= 5 * 576 * 4);
    }
}

/// A request of two choices is one span with a span for each of them, below which the trace goes on.
fn check_choices(spans: &[Received]) {
    let [generate] = children(spans, "generate")[..] else { panic!("{spans:?}") };
    assert_eq!(hex(&generate.span.parent_span_id), PARENT_ID);
    let choices = children(spans, "choice");
    assert_eq!(choices.len(), 2);
    for choice in choices {
        assert_eq!(choice.span.parent_span_id, generate.span.span_id);
        assert_eq!(choice.attributes()["gen_ai.usage.output_tokens"], "8");
        let sequences = children(spans, "run_sequence");
        assert_eq!(sequences.iter().filter(|it| it.span.parent_span_id == choice.span.span_id).count(), 1);
    }
    // Both run together, at least for a while.
    assert!(children(spans, "step").iter().any(|step| step.span.links.len() == 2));
}

/// Lines of both processes that a request passed name it and its trace.
fn check_log(log: &str) {
    let lines: Vec<Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    for role in ["coordinator", "worker-"] {
        let is_named = |line: &Value| {
            let (process, span) = (line["process"].as_str().unwrap_or_default(), &line["span"]);
            process.starts_with(role) && span["request_id"] == "traced-1" && span["trace_id"] == TRACE_ID
        };
        assert!(lines.iter().any(is_named), "{role}: {log}");
    }
}

/// A collector that is not there costs nothing but its spans.
#[tokio::test(flavor = "multi_thread")]
async fn serving_goes_on_without_the_collector() {
    let arguments = ["--otlp-endpoint=http://127.0.0.1:9"];
    let cluster = Cluster::start_with_arguments(Layout::new(1, 1), &environment::model().unwrap(), &arguments).unwrap();
    let client = cluster.client().await.unwrap();
    for _ in 0..3 {
        let output = client.generate(greedy(prompt(), 24)).await.unwrap();
        assert_eq!(output.token_ids.len(), 24);
    }
    drop(client);
    let begin = std::time::Instant::now();
    let (status, log) = cluster.stop().unwrap();
    assert!(status.success(), "{log}");
    assert!(begin.elapsed() < std::time::Duration::from_secs(10), "{:?}", begin.elapsed());
}
