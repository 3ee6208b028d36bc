//! Metrics as Prometheus itself finds, scrapes and checks them.

use std::{
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use lockstep_proto::v1::generate_request::Input;
use lockstep_tests::{
    Cluster, Layout,
    client::greedy,
    environment,
    http::{get, get_json},
    ports::free_ports,
    process::{PATIENCE, finish},
};
use serde_json::Value;
use tempfile::TempDir;

/// A Prometheus that scrapes a cluster; it is killed when dropped.
struct Prometheus {
    process: Child,
    address: String,
    _folder: TempDir,
}

impl Prometheus {
    fn start(coordinator: &str) -> Self {
        let folder = TempDir::new().unwrap();
        let config = format!(
            "global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}\nscrape_configs:\n\
             - {{job_name: coordinator, static_configs: [{{targets: ['{coordinator}']}}]}}\n\
             - {{job_name: workers, http_sd_configs: [{{url: 'http://{coordinator}/prometheus/workers', refresh_interval: 1s}}]}}\n"
        );
        let config_file = folder.path().join("prometheus.yml");
        std::fs::write(&config_file, config).unwrap();
        let address = format!("127.0.0.1:{}", free_ports(1).unwrap()[0]);
        let process = Command::new(environment::prometheus().unwrap())
            .arg(format!("--config.file={}", config_file.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self { process, address, _folder: folder }
    }

    /// The values of a query, asked for until there are as many as expected and `accepts` takes them all.
    async fn values(&self, query: &str, expected: usize, accepts: impl Fn(f64) -> bool) -> Vec<f64> {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let end = Instant::now() + PATIENCE;
        loop {
            // It may not listen yet.
            let answer = get_json(&self.address, &format!("/api/v1/query?query={encoded}")).await;
            let result = answer.as_ref().ok().and_then(|answer| answer["data"]["result"].as_array());
            let value = |series: &Value| series["value"][1].as_str().and_then(|text| text.parse().ok());
            let values: Vec<f64> = result.into_iter().flatten().filter_map(value).collect();
            if values.len() == expected && values.iter().copied().all(&accepts) {
                return values;
            }
            assert!(Instant::now() < end, "{query}: {answer:?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Addresses of all processes that are scraped.
async fn targets(coordinator: &str) -> Vec<String> {
    let workers = get_json(coordinator, "/prometheus/workers").await.unwrap();
    let workers = workers.as_array().unwrap().iter().map(|group| group["targets"][0].as_str().unwrap().to_owned());
    [coordinator.to_owned()].into_iter().chain(workers).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn prometheus_scrapes_every_process() {
    let cluster = Cluster::start(Layout::new(2, 1)).unwrap();
    let client = cluster.client().await.unwrap();
    client.generate(greedy(Input::Prompt("The capital of France is".into()), 12)).await.unwrap();

    let targets = targets(&cluster.http()).await;
    assert_eq!(targets.len(), 3, "{targets:?}");
    let page = std::fs::read_to_string(environment::repository().join("docs/metrics.md")).unwrap();
    let promtool = environment::prometheus().unwrap().with_file_name("promtool");
    for target in &targets {
        assert_eq!(get(target, "/healthz").await.unwrap(), "ok\n");
        assert_eq!(get(target, "/readyz").await.unwrap(), "ready\n");
        let text = get(target, "/metrics").await.unwrap();
        let names = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        for name in names {
            assert!(page.contains(&format!("`{name}`")), "{name} is not in docs/metrics.md");
        }
        let mut check = Command::new(&promtool);
        check.args(["check", "metrics"]);
        let checked = finish(check, text.as_bytes()).await.unwrap();
        assert!(checked.status.success(), "{checked:?}: {text}");
    }

    let prometheus = Prometheus::start(&cluster.http());
    prometheus.values("up", 3, |up| up == 1.0).await;
    let median = |name: &str| format!("histogram_quantile(0.5, sum by (le) ({name}_bucket))");
    prometheus.values(&median("lockstep_coordinator_time_to_first_token_seconds"), 1, |seconds| seconds > 0.0).await;
    prometheus.values(&median("lockstep_worker_step_seconds"), 1, |seconds| seconds > 0.0).await;
    prometheus.values("lockstep_coordinator_requests_total{outcome=\"length\"}", 1, |count| count == 1.0).await;
    prometheus.values("lockstep_worker_tokens_total{kind=\"decode\"}", 1, |count| count == 11.0).await;
    // A prompt and eleven tokens after it, and the canaries of an idle replica, once a second.
    prometheus.values("lockstep_worker_rank_step_seconds_count", 2, |steps| steps >= 12.0).await;
    prometheus.values("lockstep_worker_collective_bytes_total{peers=\"hosts\"}", 2, |bytes| bytes > 0.0).await;
    // Between two canaries both ranks have taken part in as many steps and sums.
    for count in ["lockstep_worker_rank_step_seconds_count", "lockstep_worker_collective_bytes_total{peers=\"hosts\"}"]
    {
        prometheus.values(&format!("max({count}) - min({count})"), 1, |difference| difference == 0.0).await;
    }
    let seconds = "lockstep_worker_collective_seconds_total / on (rank) lockstep_worker_rank_step_seconds_sum";
    prometheus.values(seconds, 2, |share| share > 0.0 && share < 1.0).await;
    prometheus.values("lockstep_worker_kv_blocks > 0", 1, |blocks| blocks > 0.0).await;
}
