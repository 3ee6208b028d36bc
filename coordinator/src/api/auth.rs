//! Whose a call is: the tenant of its API key, known before anything of the call is read.
//! Invariant: what passes carries a [`Caller`]; where keys are used, Admin and the cluster's status are for administrators.
//! Open are: health, reflection, metrics (names of models and tenants, and numbers), the page without its numbers, and,
//! to members of the cluster, registration ([`crate::security`]).

use std::sync::Arc;

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, header},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
};
use lockstep_proto::v1::{admin_server::AdminServer, inference_server::InferenceServer};
use tonic::{Status, server::NamedService};

use super::{
    admin::AdminService,
    arrival::{self, MESSAGE_TIMEOUT},
    grpc::InferenceService,
    intake::Intake,
    openai::error::ApiError,
};
use crate::{error::RequestError, tenants::Tenant};

/// The tenant that calls.
#[derive(Clone)]
pub struct Caller(pub Arc<Tenant>);

impl Caller {
    /// Of a gRPC call.
    ///
    /// # Errors
    /// [`RequestError::Internal`] for one that did not come by [`grpc`].
    pub fn of<T>(request: &tonic::Request<T>) -> Result<Self, RequestError> {
        request.extensions().get().cloned().ok_or_else(|| RequestError::Internal("a call without a caller".into()))
    }
}

/// Asks callers of Inference and Admin for their keys.
pub fn grpc(routes: Router, intake: Intake) -> Router {
    routes.layer(from_fn_with_state(intake, pass_grpc))
}

/// Asks all that call `routes` for their keys.
pub fn http<S: Clone + Send + Sync + 'static>(routes: Router<S>, intake: &Intake) -> Router<S> {
    routes.route_layer(from_fn_with_state(intake.clone(), pass_http))
}

/// Asks all that call `routes` for the key of an administrator.
pub fn http_admin<S: Clone + Send + Sync + 'static>(routes: Router<S>, intake: &Intake) -> Router<S> {
    routes.route_layer(from_fn_with_state(intake.clone(), pass_http_admin))
}

fn caller(intake: &Intake, headers: &HeaderMap, is_for_admins: bool) -> Result<Caller, RequestError> {
    let authorization = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let tenant = intake.tenants.authenticate(authorization);
    let is_refused = |tenant: &Arc<Tenant>| is_for_admins && !tenant.is_admin();
    let error = match tenant {
        Ok(tenant) if !is_refused(&tenant) => return Ok(Caller(tenant)),
        Ok(_) => RequestError::NotAdmin,
        Err(error) => error,
    };
    intake.metrics.count_request(None, error.class().reason());
    Err(error)
}

async fn pass_grpc(State(intake): State<Intake>, mut request: Request, next: Next) -> Response {
    let service = request.uri().path().split('/').nth(1).unwrap_or_default();
    let is_admin = service == AdminServer::<AdminService>::NAME;
    if is_admin || service == InferenceServer::<InferenceService>::NAME {
        match caller(&intake, request.headers(), is_admin) {
            Ok(caller) => drop(request.extensions_mut().insert(caller)),
            Err(error) => return Status::from(error).into_http(),
        }
        // Each of their calls has one message.
        request = request.map(|body| arrival::in_time(body, MESSAGE_TIMEOUT));
    }
    next.run(request).await
}

async fn pass_http(State(intake): State<Intake>, request: Request, next: Next) -> Response {
    pass(&intake, request, next, false).await
}

async fn pass_http_admin(State(intake): State<Intake>, request: Request, next: Next) -> Response {
    pass(&intake, request, next, true).await
}

async fn pass(intake: &Intake, mut request: Request, next: Next, is_for_admins: bool) -> Response {
    match caller(intake, request.headers(), is_for_admins) {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => ApiError::of(&error, "").into_response(),
    }
}
