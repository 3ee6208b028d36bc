//! Who may connect to a coordinator, how, and which services he may then call.
//! Invariant: workers register as members of the cluster where it has certificates, else in clear text from this machine,
//! from others only if that was asked for; clients come in the same two ways with certificates of their own. Neither kind
//! of certificate opens the other's services.
//! Not here: what a client may do ([`crate::api`]).

use std::{net::SocketAddr, sync::Arc, time::SystemTime};

use axum::{
    extract::{Request, State},
    middleware::{Next, from_fn_with_state},
    response::Response,
};
use lockstep_proto::status::Class;
use lockstep_transport::{ClusterTls, Gate, Outbound, Peer, Security as Secured, ServerTls, is_local};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::{CoordinatorConfig, CoordinatorError};

/// Paths of the service that is for members.
const MEMBERS_PATH: &str = "/lockstep.v1.Cluster/";

/// Certificates, and what may go without: by default none, and only what stays on this machine.
#[derive(Default)]
pub struct Security {
    clients: Option<ServerTls>,
    members: Option<ClusterTls>,
    allow_insecure: bool,
}

impl Security {
    /// Reads the certificates.
    ///
    /// # Errors
    /// [`CoordinatorError::Tls`] naming the file, [`CoordinatorError::Exposed`] if clients of other machines would come in
    /// clear text.
    pub fn open(config: &CoordinatorConfig) -> Result<Self, CoordinatorError> {
        let clients = config.client_tls.clone().map(ServerTls::open).transpose()?;
        let members = config.cluster_tls.clone().map(ClusterTls::open).transpose()?;
        let listens = [("grpc_listen", config.grpc_listen), ("http_listen", config.http_listen)];
        let exposed = listens.into_iter().find(|(_, address)| !is_local(address.ip()));
        match exposed {
            Some((setting, address)) if clients.is_none() && !config.allow_insecure => {
                Err(CoordinatorError::Exposed { setting, address })
            }
            _ => Ok(Self { clients, members, allow_insecure: config.allow_insecure }),
        }
    }

    /// Takes changed certificates over until `closing` fires.
    pub fn follow_files(&self, closing: &CancellationToken) {
        if let Some(clients) = self.clients.clone() {
            tokio::spawn(closing.clone().run_until_cancelled_owned(clients.watch()));
        }
        if let Some(members) = self.members.clone() {
            tokio::spawn(closing.clone().run_until_cancelled_owned(members.watch()));
        }
    }

    /// When the certificates in force expire, by whom they are for.
    pub fn expiries(&self) -> Vec<(&'static str, SystemTime)> {
        let clients = self.clients.iter().map(|tls| ("clients", tls.not_after()));
        clients.chain(self.members.iter().map(|tls| ("cluster", tls.not_after()))).collect()
    }

    /// Of the gRPC port.
    pub fn grpc_gate(&self) -> Gate {
        Gate::Both(self.clients.clone(), self.members.clone())
    }

    /// Of the HTTP port.
    pub fn http_gate(&self) -> Gate {
        Gate::Http(self.clients.clone())
    }

    /// The scheme of workers' HTTP pages: members of a cluster show their certificates there, too.
    pub fn workers_scheme(&self) -> &'static str {
        if self.members.is_some() { "https" } else { "http" }
    }

    /// How workers are reached.
    pub fn outbound(&self) -> Outbound {
        self.members.clone().map_or(Outbound::ClearText, Outbound::Member)
    }

    /// Puts this before all gRPC services.
    pub fn guard(security: Arc<Self>, routes: axum::Router) -> axum::Router {
        routes.layer(from_fn_with_state(security, pass))
    }

    fn check(&self, path: &str, peer: Option<&Peer>) -> Result<(), Status> {
        let Some(Peer { address, security }) = peer else {
            return Err(Class::Internal.status("a connection without an address"));
        };
        let may_be_clear = self.allow_insecure || is_local(SocketAddr::ip(address));
        let is_for_members = path.starts_with(MEMBERS_PATH);
        let problem = match (is_for_members, security) {
            (true, Secured::Member) | (false, Secured::Client) => return Ok(()),
            (true, Secured::ClearText) if self.members.is_none() && may_be_clear => return Ok(()),
            (false, Secured::ClearText) if self.clients.is_none() && may_be_clear => return Ok(()),
            (true, _) if self.members.is_some() => {
                "workers register here as members of the cluster: cluster_ca, cluster_cert and cluster_key are needed"
            }
            (true, _) => {
                "workers of other machines register with certificates (cluster_ca, cluster_cert, cluster_key) or, where \
                 insecure asks for it, without any"
            }
            (false, Secured::Member) => "a member of the cluster may register and nothing else",
            (false, _) => "this port speaks TLS to clients",
        };
        Err(Class::Unauthenticated.status(problem))
    }
}

async fn pass(State(security): State<Arc<Security>>, request: Request, next: Next) -> Response {
    match security.check(request.uri().path(), request.extensions().get::<Peer>()) {
        Ok(()) => next.run(request).await,
        Err(status) => status.into_http(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(allow_insecure: bool, address: &str, path: &str, security: Secured) -> bool {
        let rules = Security { clients: None, members: None, allow_insecure };
        rules.check(path, Some(&Peer { address: address.parse().unwrap(), security })).is_ok()
    }

    #[test]
    fn clear_text_is_for_this_machine_unless_asked_for() {
        for path in ["/lockstep.v1.Cluster/Register", "/lockstep.v1.Inference/Generate"] {
            assert!(answer(false, "127.0.0.1:1", path, Secured::ClearText));
            assert!(answer(false, "[::ffff:127.0.0.1]:1", path, Secured::ClearText));
            assert!(!answer(false, "10.0.0.1:1", path, Secured::ClearText));
            assert!(answer(true, "10.0.0.1:1", path, Secured::ClearText));
        }
    }

    #[test]
    fn no_certificate_opens_the_services_of_the_other_kind() {
        assert!(!answer(true, "127.0.0.1:1", "/lockstep.v1.Cluster/Register", Secured::Client));
        assert!(!answer(true, "127.0.0.1:1", "/lockstep.v1.Admin/DrainWorker", Secured::Member));
    }
}
