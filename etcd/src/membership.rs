//! How a member of etcd starts that knows nothing of the others' past: for the first time, beside members that run, or in
//! place of one whose disk is lost.
//!
//! For: the members of a StatefulSet, which are all given the same list (`lockstep etcd-member`).
//! Invariants: nobody is removed but the member that asks, and only if etcd has seen it run and its data is gone; without a
//! leader nothing is changed; a cluster is founded only by members that all have no data.
//! Not here: how they know that ([`founding`](crate::founding)), members that are to go (`etcdctl member remove`), data (etcd
//! sends it to a member that joins).

use etcd_client::Member;

use crate::{Connection, Endpoints, EtcdError, EtcdSettings};

/// A member as it is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Its name.
    pub name: String,
    /// Where its peers reach it.
    pub peer_url: String,
}

/// What a member without data is to be started with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// etcd's `initial-cluster`.
    pub initial_cluster: String,
    /// etcd's `initial-cluster-state`: `new` or `existing`.
    pub state: &'static str,
}

/// Reads etcd's `initial-cluster`: `name=url`, between commas.
///
/// # Errors
/// What is not of that form, in words.
pub fn parse(list: &str) -> Result<Vec<Wanted>, String> {
    let wanted = |part: &str| match part.split_once('=') {
        Some((name, url)) if !name.is_empty() && url.contains("://") => {
            Ok(Wanted { name: name.to_owned(), peer_url: url.to_owned() })
        }
        _ => Err(format!("{part:?} is not of the form name=url")),
    };
    list.split(',').map(wanted).collect()
}

/// Makes room for `own`, a member that has no data, and says how it is to start; nothing if no member of a cluster answers.
///
/// # Errors
/// [`EtcdError`] if those that run do not admit it now, as while another one joins or they have no leader; trying again may
/// help.
pub async fn admit(settings: &EtcdSettings, wanted: &[Wanted], own: &Wanted) -> Result<Option<Start>, EtcdError> {
    let mut endpoints = Endpoints::new(settings, 0);
    let mut leaderless = None;
    for _ in 0..endpoints.len() {
        match members_of(&mut endpoints).await {
            Ok((connection, members)) => return admit_at(&connection, &members, wanted, own).await.map(Some),
            Err(error) if is_of_member(&error) => leaderless = Some(error),
            Err(error) => tracing::debug!(%error, "no cluster here"),
        }
    }
    leaderless.map_or(Ok(None), Err)
}

/// Whether a member itself refused, which only one that has been part of a cluster can; one that still waits for the others
/// to found it says nothing.
fn is_of_member(error: &EtcdError) -> bool {
    match error {
        EtcdError::Client { source, .. } => match source.as_ref() {
            etcd_client::Error::GRpcStatus(status) => status.message().starts_with("etcdserver: "),
            _ => false,
        },
        _ => false,
    }
}

async fn members_of(endpoints: &mut Endpoints) -> Result<(Connection, Vec<Known>), EtcdError> {
    let connection = endpoints.connect().await?;
    let mut cluster = connection.client.cluster_client();
    let listed = connection.within(cluster.member_list()).await?;
    Ok((connection, listed.members().iter().map(Known::of).collect()))
}

async fn admit_at(
    connection: &Connection,
    members: &[Known],
    wanted: &[Wanted],
    own: &Wanted,
) -> Result<Start, EtcdError> {
    let mut cluster = connection.client.cluster_client();
    match Standing::of(members, own) {
        Standing::First => return Ok(first_start(wanted)),
        Standing::Admitted => return Ok(existing(members, wanted)),
        Standing::Lost(id) => {
            tracing::warn!(member = own.name, id = format!("{id:x}"), "its data is gone: it joins anew");
            connection.within(cluster.member_remove(id)).await?;
        }
        Standing::Unknown => tracing::info!(member = own.name, "joins a cluster that runs"),
    }
    let added = connection.within(cluster.member_add([own.peer_url.clone()], None)).await?;
    let members: Vec<Known> = added.member_list().iter().map(Known::of).collect();
    Ok(existing(&members, wanted))
}

/// Of etcd's own description of a member what matters here.
#[derive(Clone, Debug)]
struct Known {
    id: u64,
    name: String,
    peer_urls: Vec<String>,
    /// Whether it has ever told where its clients reach it.
    has_run: bool,
}

impl Known {
    fn of(member: &Member) -> Self {
        let (id, name) = (member.id(), member.name().to_owned());
        Self { id, name, peer_urls: member.peer_urls().to_vec(), has_run: !member.client_urls().is_empty() }
    }

    fn is(&self, wanted: &Wanted) -> bool {
        self.peer_urls.contains(&wanted.peer_url)
    }
}

/// What a cluster knows of a member without data.
#[derive(Debug, PartialEq, Eq)]
enum Standing {
    /// It is one of those with which the cluster was founded, and never ran.
    First,
    /// It was added, and never ran.
    Admitted,
    /// It ran; this is its id.
    Lost(u64),
    /// Nothing.
    Unknown,
}

impl Standing {
    fn of(members: &[Known], own: &Wanted) -> Self {
        match members.iter().find(|member| member.is(own)) {
            None => Self::Unknown,
            // etcd names who was added only when it runs.
            Some(member) if member.name.is_empty() => Self::Admitted,
            Some(member) if member.has_run => Self::Lost(member.id),
            Some(_) => Self::First,
        }
    }
}

/// The start of a member that founds a cluster with the others.
pub fn first_start(wanted: &[Wanted]) -> Start {
    let parts: Vec<_> = wanted.iter().map(|member| format!("{}={}", member.name, member.peer_url)).collect();
    Start { initial_cluster: parts.join(","), state: "new" }
}

/// The members that are, under the names that are wanted: etcd refuses a list that differs from its own.
fn existing(members: &[Known], wanted: &[Wanted]) -> Start {
    let part = |member: &Known| {
        let named = wanted.iter().find(|wanted| member.is(wanted));
        let name = named.map_or(&member.name, |wanted| &wanted.name);
        member.peer_urls.iter().map(|url| format!("{name}={url}")).collect::<Vec<_>>().join(",")
    };
    Start { initial_cluster: members.iter().map(part).collect::<Vec<_>>().join(","), state: "existing" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(id: u64, name: &str, has_run: bool) -> Known {
        Known { id, name: name.to_owned(), peer_urls: vec![format!("http://m{id}:2380")], has_run }
    }

    #[test]
    fn only_who_ran_and_lost_its_data_is_replaced() {
        let wanted = parse("m0=http://m0:2380,m1=http://m1:2380,m2=http://m2:2380").unwrap();
        let own = &wanted[2];
        let others = [known(0, "m0", true), known(1, "m1", true)];
        let with = |member: Known| [others.to_vec(), vec![member]].concat();
        assert_eq!(Standing::of(&others, own), Standing::Unknown);
        assert_eq!(Standing::of(&with(known(2, "m2", false)), own), Standing::First);
        assert_eq!(Standing::of(&with(known(2, "", false)), own), Standing::Admitted);
        assert_eq!(Standing::of(&with(known(2, "m2", true)), own), Standing::Lost(2));
        let all = "m0=http://m0:2380,m1=http://m1:2380,m2=http://m2:2380";
        let start = Start { initial_cluster: all.to_owned(), state: "existing" };
        assert_eq!(existing(&with(known(2, "", false)), &wanted), start);
        assert_eq!(first_start(&wanted), Start { state: "new", ..start });
    }

    #[test]
    fn a_list_of_another_form_is_refused() {
        for list in ["", "m0", "=http://m0:2380", "m0=m0:2380", "m0=http://m0:2380,"] {
            assert!(parse(list).unwrap_err().contains("name=url"), "{list}");
        }
    }
}
