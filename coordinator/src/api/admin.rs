//! The Admin service: what operators see and order.

use std::{
    pin::Pin,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures::{Stream, stream};
use lockstep_proto::v1;
use lockstep_sharding::{Parallelism, PlanOptions, Policy};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::status;
use crate::{
    cluster::{PlanStore, Workers},
    config::{ModelSpec, default_model_name},
    error::RequestError,
    planner::Planner,
    router::Router,
    served::Replica,
};

/// Between two progress messages.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// Longest model name, bytes.
const MAX_NAME_BYTES: usize = 128;

/// Serves Admin.
pub struct AdminService {
    /// Live workers.
    pub workers: watch::Receiver<Workers>,
    /// What is shared with other coordinators.
    pub store: Option<Arc<dyn PlanStore>>,
    /// What is served.
    pub router: Router,
    /// Obeys orders.
    pub planner: Planner,
    /// Sizes that plans of models leave room for that are loaded here.
    pub plan_options: PlanOptions,
}

#[tonic::async_trait]
impl v1::admin_server::Admin for AdminService {
    type LoadModelStream = Pin<Box<dyn Stream<Item = Result<v1::LoadModelProgress, Status>> + Send>>;

    async fn get_cluster(
        &self,
        _request: Request<v1::GetClusterRequest>,
    ) -> Result<Response<v1::GetClusterResponse>, Status> {
        let live = Arc::clone(&self.workers.borrow());
        Ok(Response::new(status::cluster(&live, &self.router.models(), self.store.as_deref())))
    }

    async fn get_plan(&self, request: Request<v1::GetPlanRequest>) -> Result<Response<v1::GetPlanResponse>, Status> {
        let model = self.router.model(&request.into_inner().model)?;
        let plan = model.plan.as_ref().ok_or_else(|| RequestError::NotReady {
            model: model.spec.name.clone(),
            problem: model.explain().detail,
        })?;
        let plan_json =
            plan.to_json().map_err(|error| RequestError::Internal(format!("the plan cannot be shown: {error}")))?;
        Ok(Response::new(v1::GetPlanResponse { plan_epoch: model.plan_epoch, plan_json }))
    }

    async fn load_model(
        &self,
        request: Request<v1::LoadModelRequest>,
    ) -> Result<Response<Self::LoadModelStream>, Status> {
        let spec = spec_of(request.into_inner(), self.plan_options)?;
        let name = spec.name.clone();
        let is_new = self.planner.load(spec).await?;
        let (router, planner) = (self.router.clone(), self.planner.clone());
        // `Some(name)` until the last message is sent.
        let progress = stream::unfold(Some(name), move |name| {
            let (router, planner) = (router.clone(), planner.clone());
            async move {
                let name = name?;
                tokio::time::sleep(PROGRESS_INTERVAL).await;
                match load_progress(&router, &name) {
                    Ok(progress) if progress.ready => Some((Ok(progress), None)),
                    Ok(progress) => Some((Ok(progress), Some(name))),
                    Err(error) => {
                        // What this order brought in and never served is not kept: the caller may correct the order.
                        if is_new {
                            let _ = planner.discard(name).await;
                        }
                        Some((Err(Status::from(error)), None))
                    }
                }
            }
        });
        Ok(Response::new(Box::pin(progress)))
    }

    async fn unload_model(
        &self,
        request: Request<v1::UnloadModelRequest>,
    ) -> Result<Response<v1::UnloadModelResponse>, Status> {
        self.planner.unload(request.into_inner().name).await?;
        Ok(Response::new(v1::UnloadModelResponse {}))
    }

    async fn drain_worker(
        &self,
        request: Request<v1::DrainWorkerRequest>,
    ) -> Result<Response<v1::DrainWorkerResponse>, Status> {
        self.planner.drain_worker(request.into_inner().worker_id).await?;
        Ok(Response::new(v1::DrainWorkerResponse {}))
    }
}

/// The model that a request asks for. It waits until there are devices enough for its policy.
fn spec_of(request: v1::LoadModelRequest, plan_options: PlanOptions) -> Result<ModelSpec, RequestError> {
    if request.source.is_empty() {
        return Err(RequestError::invalid(
            "source",
            "is empty, expected a path on the workers or a URL that they read",
        ));
    }
    let name = if request.name.is_empty() { default_model_name(&request.source) } else { request.name.clone() };
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control) {
        let problem = format!("is {name:?}, allowed are 1 to {MAX_NAME_BYTES} bytes without control characters");
        return Err(RequestError::invalid("name", problem));
    }
    let policy = if request.policy.is_empty() {
        Policy { parallelism: Parallelism::Auto, replicas: None }
    } else {
        request
            .policy
            .parse()
            .map_err(|error: lockstep_sharding::PlanError| RequestError::invalid("policy", error.to_string()))?
    };
    Ok(ModelSpec { name, source: request.source, policy, min_workers: 1, plan_options })
}

/// How far the model is; its problem as an error once an attempt failed.
fn load_progress(router: &Router, name: &str) -> Result<v1::LoadModelProgress, RequestError> {
    let model = router.model(name)?;
    if model.failed_attempts > 0 && !model.is_ready() {
        return Err(RequestError::NotReady { model: name.into(), problem: model.explain().detail });
    }
    let sum = |count: fn(&Replica) -> u64| model.replicas.iter().map(|replica| count(replica)).sum();
    Ok(v1::LoadModelProgress {
        loaded_bytes: sum(|replica| replica.loaded_bytes.load(Ordering::Relaxed)),
        total_bytes: sum(|replica| replica.total_bytes.load(Ordering::Relaxed)),
        ready: model.is_ready(),
    })
}
