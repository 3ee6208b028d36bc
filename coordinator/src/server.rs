//! The life of a coordinator: bind, serve, and at the end stop admission, drain, close.
//! Invariant: it returns at most `drain_timeout` plus [`CLOSE_TIMEOUT`] after the shutdown signal.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use axum::{http::HeaderValue, response::Response};
use lockstep_proto::{FILE_DESCRIPTOR_SET, MAX_MESSAGE_BYTES, v1};
use lockstep_transport::{
    Incoming, Outbound,
    http::{self as http_server, HttpLimits},
};
use tokio::{net::TcpListener, sync::oneshot, task::JoinHandle};
use tokio_util::sync::CancellationToken;
use tonic::{Code, service::Routes, transport::Server};

use crate::{
    CoordinatorConfig, CoordinatorError,
    admission::Admission,
    api::{
        MAX_REQUEST_BYTES, admin::AdminService, auth, browser::BrowserFolder, grpc::InferenceService, health, http,
        intake::Intake, suspicion::Turns, tokenizing::Tokenizing,
    },
    cluster::{MemoryRegistry, PlanStore, Registry, registration::RegistrationService},
    metrics::Metrics,
    planner::{Planner, PlannerConfig},
    router::{Router, reports},
    security::Security,
    tenants::Tenants,
};

/// Longest wait for connections to end after the drain.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Most bytes of a gRPC call's headers.
const MAX_HEADER_BYTES: u32 = 16 << 10;
/// Streams that one connection may open beyond the request limit, so that overload is answered and not queued.
const SPARE_STREAMS: usize = 1024;

/// Runs a coordinator until `shutdown` fires; then stops admission, drains and returns.
/// `ready` is called once with the bound gRPC and HTTP addresses.
///
/// # Errors
/// [`CoordinatorError`] if it cannot start, or if a server fails.
pub async fn run(
    config: CoordinatorConfig,
    shutdown: CancellationToken,
    ready: impl FnOnce(SocketAddr, SocketAddr) + Send,
) -> Result<(), CoordinatorError> {
    let security = Arc::new(Security::open(&config)?);
    let browser = config.browser_folder.as_deref().map(BrowserFolder::open).transpose()?;
    let tenants = Tenants::open(config.tenants_file.as_deref())?;
    let (grpc_listener, grpc_address) = bind(config.grpc_listen).await?;
    let (http_listener, http_address) = bind(config.http_listen).await?;

    let closing = CancellationToken::new();
    // However this function is left, the tasks that it started end.
    let _closing_guard = closing.clone().drop_guard();
    security.follow_files(&closing);
    let cluster = Cluster::start(&config, security.outbound(), &tenants, &closing)?;
    let planner = planner(&config, &cluster, security.outbound(), closing.clone());
    let router = planner.router();
    let reports_task = tokio::spawn(reports::follow(router.watch(), closing.clone()));
    let intake = intake(&config, tenants, router.clone())?;
    if let Some(path) = config.tenants_file.clone() {
        tokio::spawn(closing.clone().run_until_cancelled_owned(intake.tenants.clone().follow(path)));
    }
    let (workers, store, plan_options) = (cluster.registry.watch(), cluster.store.clone(), config.plan_options);
    let admin = AdminService { workers: workers.clone(), store, router: router.clone(), planner, plan_options };
    let (store, started) = (cluster.store, SystemTime::now());
    let state =
        http::HttpState { intake: intake.clone(), workers, store, started, security: Arc::clone(&security), browser };
    let (reporter, health_service) = tonic_health::server::health_reporter();
    let grpc_incoming = Incoming::new(grpc_listener, security.grpc_gate());
    let http_incoming = Incoming::new(http_listener, security.http_gate());
    let admission = intake.admission.clone();
    let routes = grpc_routes(Routes::new(health_service), intake, admin, cluster.registration)?;
    let routes = Security::guard(security, routes);
    let mut grpc_server = tokio::spawn(serve_grpc(grpc_incoming, routes, &config, closing.clone()));
    let mut http_server = tokio::spawn(serve_http(http_incoming, http::routes(state), closing.clone()));
    let health_task = tokio::spawn(health::follow(reporter.clone(), admission.clone(), router));
    tracing::info!(%grpc_address, %http_address, "coordinator serves");
    ready(grpc_address, http_address);

    tokio::select! {
        () = shutdown.cancelled() => {}
        ended = &mut grpc_server => return Err(failed("gRPC", ended)),
        ended = &mut http_server => return Err(failed("HTTP", ended)),
    }
    admission.close();
    health_task.abort();
    health::withdraw(&reporter).await;
    drain(&admission, config.drain_timeout).await;
    closing.cancel();
    tokio::join!(close(grpc_server), close(http_server), leave(cluster.ended));
    // It ends with `closing`; only a panic could be reported here.
    let _ = reports_task.await;
    Ok(())
}

fn planner(config: &CoordinatorConfig, cluster: &Cluster, outbound: Outbound, closing: CancellationToken) -> Planner {
    let config = PlannerConfig {
        model: config.model.clone(),
        settings_revision: config.settings_revision,
        min_workers_timeout: config.min_workers_timeout,
        replan_delay: config.replan_delay,
        drain_timeout: config.drain_timeout,
        outbound,
    };
    Planner::start(config, Arc::clone(&cluster.registry), cluster.store.clone(), closing)
}

fn intake(config: &CoordinatorConfig, tenants: Tenants, router: Router) -> Result<Intake, CoordinatorError> {
    Ok(Intake {
        tenants,
        admission: Admission::new(config.max_concurrent_requests),
        router,
        tokenizing: Tokenizing::default(),
        metrics: Arc::new(Metrics::new().map_err(CoordinatorError::Metrics)?),
        failover_timeout: config.failover_timeout,
        slow_reader_timeout: config.slow_reader_timeout,
        turns: Turns::default(),
    })
}

/// The gRPC services beside health, to callers with a key where there are keys.
fn grpc_routes(
    routes: Routes,
    intake: Intake,
    admin: AdminService,
    registration: Option<RegistrationService>,
) -> Result<axum::Router, CoordinatorError> {
    let inference = v1::inference_server::InferenceServer::new(InferenceService { intake: intake.clone() });
    let routes = routes
        .add_service(inference.max_decoding_message_size(MAX_REQUEST_BYTES))
        .add_service(v1::admin_server::AdminServer::new(admin).max_encoding_message_size(MAX_MESSAGE_BYTES));
    let routes = match registration {
        Some(registration) => routes.add_service(v1::cluster_server::ClusterServer::new(registration)),
        None => routes,
    };
    Ok(auth::grpc(with_reflection(routes)?.into_axum_router(), intake))
}

/// Waits for the requests that run.
async fn drain(admission: &Admission, limit: Duration) {
    tracing::info!(num_running = admission.num_running(), "draining");
    if !admission.drained(limit).await {
        tracing::warn!(num_running = admission.num_running(), "requests were cut off: the drain took too long");
    }
}

/// With etcd, what was used last is told, and the lease given back, so that nobody need wait for its end.
async fn leave(ended: Option<oneshot::Receiver<()>>) {
    if let Some(ended) = ended {
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, ended).await;
    }
}

/// Where workers are known, and what is shared with other coordinators.
struct Cluster {
    registry: Arc<dyn Registry>,
    store: Option<Arc<dyn PlanStore>>,
    /// Where workers register with the only coordinator.
    registration: Option<RegistrationService>,
    /// Fails when etcd was left.
    ended: Option<oneshot::Receiver<()>>,
}

impl Cluster {
    #[cfg_attr(
        not(feature = "etcd"),
        expect(unused_variables, reason = "workers reach the only coordinator themselves")
    )]
    fn start(
        config: &CoordinatorConfig,
        outbound: Outbound,
        tenants: &Tenants,
        closing: &CancellationToken,
    ) -> Result<Self, CoordinatorError> {
        match &config.etcd {
            None => {
                let registry = MemoryRegistry::default();
                let registration =
                    RegistrationService { registry: registry.clone(), lease: config.lease, closing: closing.clone() };
                Ok(Self { registry: Arc::new(registry), store: None, registration: Some(registration), ended: None })
            }
            #[cfg(feature = "etcd")]
            Some(settings) => {
                let joining = crate::cluster::Joining {
                    id: config.coordinator_id.clone(),
                    settings: settings.clone(),
                    silence: config.lease,
                    outbound,
                    tenants: tenants.clone(),
                };
                let (registry, ended) = crate::cluster::EtcdRegistry::start(joining, closing.clone())?;
                Ok(Self { store: Some(registry.clone()), registry, registration: None, ended: Some(ended) })
            }
            #[cfg(not(feature = "etcd"))]
            Some(_) => Err(CoordinatorError::Server {
                server: "etcd",
                reason: "this build has no etcd client: build with the feature `etcd`".to_owned(),
            }),
        }
    }
}

async fn bind(address: SocketAddr) -> Result<(TcpListener, SocketAddr), CoordinatorError> {
    let refused = |source| CoordinatorError::Bind { address, source };
    let listener = TcpListener::bind(address).await.map_err(refused)?;
    let local = listener.local_addr().map_err(refused)?;
    Ok((listener, local))
}

/// Adds reflection: v1, and v1alpha for the clients that know nothing newer.
fn with_reflection(routes: Routes) -> Result<Routes, CoordinatorError> {
    let builder = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let refused = |error: tonic_reflection::server::Error| CoordinatorError::Server {
        server: "reflection",
        reason: error.to_string(),
    };
    let (v1, v1alpha) = (builder().build_v1().map_err(refused)?, builder().build_v1alpha().map_err(refused)?);
    Ok(routes.add_service(v1).add_service(v1alpha))
}

fn serve_grpc(
    incoming: Incoming,
    routes: axum::Router,
    config: &CoordinatorConfig,
    closing: CancellationToken,
) -> impl Future<Output = Result<(), String>> + Send + 'static {
    let routes = Routes::from(routes.layer(axum::middleware::map_response(blame_the_client)));
    let max_streams = config.max_concurrent_requests.saturating_add(SPARE_STREAMS).try_into().unwrap_or(u32::MAX);
    let server = Server::builder()
        .max_concurrent_streams(Some(max_streams))
        .http2_max_header_list_size(Some(MAX_HEADER_BYTES))
        .http2_keepalive_interval(Some(Duration::from_secs(10)))
        .add_routes(routes)
        .serve_with_incoming_shutdown(incoming.into_stream(), closing.cancelled_owned());
    async move { server.await.map_err(|error| error.to_string()) }
}

async fn serve_http(incoming: Incoming, routes: axum::Router, closing: CancellationToken) -> Result<(), String> {
    http_server::serve(incoming, routes, HttpLimits::DEFAULT, closing).await;
    Ok(())
}

/// A request that does not decode (such as text that is no UTF-8) is the client's fault; tonic calls it INTERNAL.
async fn blame_the_client(mut response: Response) -> Response {
    let headers = response.headers_mut();
    let is_internal = headers.get("grpc-status").is_some_and(|code| code == "13");
    let message = headers.get("grpc-message").and_then(|message| message.to_str().ok()).unwrap_or_default();
    if is_internal && message.starts_with("failed%20to%20decode") {
        headers.insert("grpc-status", HeaderValue::from(Code::InvalidArgument as i32));
    }
    response
}

async fn close(mut server: JoinHandle<Result<(), String>>) {
    if tokio::time::timeout(CLOSE_TIMEOUT, &mut server).await.is_err() {
        server.abort();
    }
}

fn failed(server: &'static str, ended: Result<Result<(), String>, tokio::task::JoinError>) -> CoordinatorError {
    let reason = match ended {
        Ok(Ok(())) => "it ended".into(),
        Ok(Err(reason)) => reason,
        Err(error) => error.to_string(),
    };
    CoordinatorError::Server { server, reason }
}
