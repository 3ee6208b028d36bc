//! `docs/metrics.md` lists what the roles export, no more and no less.

#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::{fmt::Write, path::PathBuf};

use lockstep_telemetry::metrics::{Definition, Kind};

/// Set it to anything and the test writes the tables instead of comparing them.
const WRITE: &str = "LOCKSTEP_WRITE_DOCS";

/// The roles' tables in the order of the page, each between these marks.
const ROLES: [(&str, &[Definition]); 3] = [
    ("coordinator", lockstep_coordinator::metrics::Metrics::DEFINITIONS),
    ("worker", lockstep_worker::metrics::Metrics::DEFINITIONS),
    ("trace", lockstep_telemetry::otlp::ExportMetrics::DEFINITIONS),
];

fn table(definitions: &[Definition]) -> String {
    let mut text = String::from("| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n");
    for Definition { name, help, kind, labels, .. } in definitions {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
        writeln!(text, "| `{name}` | {kind} | {} | {help} |", labels.join(" ")).unwrap();
    }
    text
}

#[test]
fn the_page_lists_every_metric() {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md"));
    let page = std::fs::read_to_string(&path).unwrap();
    let mut expected = String::new();
    let mut rest = page.as_str();
    for (role, definitions) in ROLES {
        let (begin, end) = (format!("<!-- {role} -->\n"), format!("<!-- end of {role} -->\n"));
        let (before, from) = rest.split_once(&begin).unwrap();
        let (_, after) = from.split_once(&end).unwrap();
        expected += &[before, &begin, &table(definitions), &end].concat();
        rest = after;
    }
    expected += rest;
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&path, expected).unwrap();
    } else {
        assert_eq!(page, expected, "run this test with {WRITE}=1 to write the tables");
    }
}

#[test]
fn names_say_whose_they_are_and_their_unit() {
    for (role, definitions) in ROLES {
        for Definition { name, kind, buckets, .. } in definitions {
            assert!(name.starts_with(&format!("lockstep_{role}_")), "{name}");
            assert_eq!(name.ends_with("_total"), *kind == Kind::Counter, "{name}");
            assert!(name.ends_with("_seconds") || *kind != Kind::Histogram, "{name}: every histogram is of times");
            assert_eq!(!buckets.is_empty(), *kind == Kind::Histogram, "{name}");
            assert!(buckets.is_sorted(), "{name}");
        }
    }
}
