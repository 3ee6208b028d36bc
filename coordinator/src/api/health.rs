//! The standard gRPC health service: SERVING, overall and for Inference, while a replica is ready.

use lockstep_proto::v1::{admin_server::AdminServer, inference_server::InferenceServer};
use tonic::server::NamedService;
use tonic_health::{ServingStatus, server::HealthReporter};

use super::{admin::AdminService, grpc::InferenceService};
use crate::{admission::Admission, router::Router};

/// Whether a request could be served now, and if not, why.
///
/// # Errors
/// What is missing, in words.
pub fn readiness(admission: &Admission, router: &Router) -> Result<(), String> {
    if !admission.is_open() {
        return Err("the coordinator is shutting down".into());
    }
    let models = router.models();
    if models.values().any(|model| model.is_ready()) {
        return Ok(());
    }
    match models.values().next() {
        None => Err("no model is loaded".into()),
        Some(model) => Err(format!("model {:?} is not ready: {}", model.spec.name, model.explain().public)),
    }
}

/// Keeps the health service up to date for as long as it is polled.
pub async fn follow(reporter: HealthReporter, admission: Admission, router: Router) {
    let mut models = router.watch();
    reporter.set_service_status(AdminServer::<AdminService>::NAME, ServingStatus::Serving).await;
    loop {
        let is_ready = readiness(&admission, &router).is_ok();
        let status = if is_ready { ServingStatus::Serving } else { ServingStatus::NotServing };
        reporter.set_service_status("", status).await;
        reporter.set_service_status(InferenceServer::<InferenceService>::NAME, status).await;
        if models.changed().await.is_err() {
            return;
        }
    }
}

/// Says NOT_SERVING everywhere, before a drain.
pub async fn withdraw(reporter: &HealthReporter) {
    for service in ["", InferenceServer::<InferenceService>::NAME, AdminServer::<AdminService>::NAME] {
        reporter.set_service_status(service, ServingStatus::NotServing).await;
    }
}
