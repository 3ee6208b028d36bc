//! Tenants' limits over several coordinators that meet in a real etcd.

use std::time::{Duration, Instant};

use lockstep_coordinator::CoordinatorConfig;
use lockstep_proto::status::Class;
use lockstep_tests::Etcd;

use crate::{
    etcd::{Registered, shared},
    http::shows,
    stub::{Coordinator, PATIENCE},
    tenants::{File, complete, file, generate, wait_ready},
};

async fn start(etcd: &Etcd, name: &str, tenants: &File) -> Coordinator {
    let settings = CoordinatorConfig { tenants_file: Some(tenants.0.clone()), ..shared(etcd, name, "tensor=1", 1) };
    Coordinator::start(settings).await
}

/// Waits until so much is left of the budget of the tenant "spent".
async fn wait_left(coordinator: &Coordinator, num_tokens: u64) {
    let line = format!("lockstep_coordinator_tenant_budget_left_tokens{{tenant=\"spent\"}} {num_tokens}\n");
    shows(coordinator, &line).await;
}

/// Whether a request of two tokens is admitted, refused requests being those of a limit.
async fn is_admitted(coordinator: &Coordinator, tenant: &str) -> bool {
    match generate(coordinator, tenant, 2).await {
        Ok(_) => true,
        Err(status) => {
            assert_eq!(Class::of(&status), Class::RateLimited, "{status:?}");
            false
        }
    }
}

async fn eventually_admitted(coordinator: &Coordinator, tenant: &str, wanted: bool) {
    let end = Instant::now() + PATIENCE;
    while is_admitted(coordinator, tenant).await != wanted {
        assert!(Instant::now() < end, "admitted: {} for {PATIENCE:?}", !wanted);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_hold_over_all_coordinators_and_budgets_outlive_them() {
    let etcd = Etcd::start(1).unwrap();
    let limits = [("busy", "max_concurrent = 1"), ("rated", "tokens_per_minute = 120"), ("spent", "token_budget = 50")];
    let tenants = file(&limits);
    let worker = Registered::start("w0", &etcd).await;
    let (first, second) = (start(&etcd, "a", &tenants).await, start(&etcd, "b", &tenants).await);
    wait_ready(&first).await;
    wait_ready(&second).await;

    // "hi" is two tokens. Both are told in one word, so that the second is known when the first is.
    assert_eq!(complete(&first, "rated", 100).await.status, 200);
    assert_eq!(complete(&first, "spent", 40).await.status, 200);
    wait_left(&second, 8).await;
    let refused = generate(&second, "spent", 7).await.unwrap_err();
    assert_eq!(Class::of(&refused), Class::QuotaExhausted, "{refused:?}");
    let refused = generate(&second, "rated", 58).await.unwrap_err();
    assert_eq!(Class::of(&refused), Class::RateLimited, "{refused:?}");

    *worker.stub.state.token_delay.lock().unwrap() = Duration::from_millis(20);
    let mut running = generate(&first, "busy", 400).await.unwrap();
    running.message().await.unwrap().unwrap();
    eventually_admitted(&second, "busy", false).await;
    drop(running);
    eventually_admitted(&second, "busy", true).await;

    // What a coordinator has spent that has ended is counted, once, by whoever is there.
    let third = start(&etcd, "c", &tenants).await;
    for coordinator in [first, second] {
        coordinator.shutdown.cancel();
        coordinator.ended.await.unwrap().unwrap();
        wait_left(&third, 8).await;
    }
    let end = Instant::now() + PATIENCE;
    while etcd.control(&["get", "/test/limits/budget/", "--prefix", "--keys-only"]).unwrap().split_whitespace().count()
        > 1
    {
        assert!(Instant::now() < end, "what was spent is not taken over");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    wait_left(&third, 8).await;
    let refused = generate(&third, "spent", 7).await.unwrap_err();
    assert_eq!(Class::of(&refused), Class::QuotaExhausted, "{refused:?}");
}
