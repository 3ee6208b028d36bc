//! How members without data agree that there is no cluster yet, and found it.
//!
//! For: [`membership`](crate::membership), where nobody answers as a member of a cluster. That may mean that there is none, or
//! that those who have its data are away; so each member says at its peers' port, as long as etcd is not there, that it has none.
//! Invariants: a member founds only after every other one has said that it has no data either; it goes on saying so until they
//! need it no more. What says this is not secret, and whoever reaches the port could say it.
//! Not here: what etcd is started with.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::membership::Wanted;

/// What a member without data says: that it looks for others, and that it has found all.
const EMPTY: &[u8] = b"lockstep etcd-member: no data\n";
const FOUNDING: &[u8] = b"lockstep etcd-member: founding\n";
/// Longest time for a peer to say it.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a member that may start goes on answering: three rounds of who asks once a second.
const FAREWELL: Duration = Duration::from_secs(3);

/// What is known of another member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Peer {
    /// It never answered, or is not one that has no data.
    Unknown,
    /// It has no data.
    Empty,
    /// It knows that nobody has.
    Founding,
}

/// A member that has no data, among the others.
#[derive(Debug)]
pub struct Founding {
    others: Vec<(Wanted, Peer)>,
    is_founding: Arc<AtomicBool>,
    /// Ends with this.
    _answers: JoinSet<()>,
}

impl Founding {
    /// Starts to answer where the peers of `own` reach it.
    ///
    /// # Errors
    /// If its address cannot be resolved, or bound.
    pub async fn open(wanted: &[Wanted], own: &Wanted) -> std::io::Result<Self> {
        let listener = TcpListener::bind(address(own)).await?;
        let is_founding = Arc::new(AtomicBool::new(false));
        let mut answers = JoinSet::new();
        answers.spawn(answer(listener, Arc::clone(&is_founding)));
        let others = wanted.iter().filter(|member| *member != own);
        let others = others.map(|member| (member.clone(), Peer::Unknown)).collect();
        Ok(Self { others, is_founding, _answers: answers })
    }

    /// Asks the others once.
    ///
    /// # Errors
    /// The names of those that have not said, or not yet, that they have no data.
    pub async fn ask(&mut self) -> Result<(), String> {
        let mut answers = JoinSet::new();
        for (index, (member, _)) in self.others.iter().enumerate() {
            let address = address(member).to_owned();
            answers.spawn(async move { (index, timeout(PATIENCE, listen_to(&address)).await) });
        }
        let is_founding = self.is_founding.load(Ordering::Relaxed);
        while let Some(Ok((index, said))) = answers.join_next().await {
            let peer = &mut self.others[index].1;
            *peer = match (said, *peer) {
                (Ok(Ok(said)), _) if said == FOUNDING => Peer::Founding,
                (Ok(Ok(said)), _) if said == EMPTY => Peer::Empty,
                // It was there, so it has found the others, too, and starts.
                (_, Peer::Empty | Peer::Founding) if is_founding => Peer::Founding,
                _ => Peer::Unknown,
            };
        }
        let lacks = |least: fn(Peer) -> bool| {
            let names = self.others.iter().filter(|(_, peer)| !least(*peer)).map(|(member, _)| member.name.as_str());
            names.collect::<Vec<_>>().join(", ")
        };
        let unknown = lacks(|peer| peer != Peer::Unknown);
        if !unknown.is_empty() {
            return Err(unknown);
        }
        self.is_founding.store(true, Ordering::Relaxed);
        let waiting = lacks(|peer| peer == Peer::Founding);
        if !waiting.is_empty() {
            return Err(waiting);
        }
        if !self.others.is_empty() {
            sleep(FAREWELL).await;
        }
        Ok(())
    }
}

/// Host and port of its peers' URL.
fn address(member: &Wanted) -> &str {
    member.peer_url.split_once("://").map_or(member.peer_url.as_str(), |(_, address)| address.trim_end_matches('/'))
}

async fn answer(listener: TcpListener, is_founding: Arc<AtomicBool>) {
    loop {
        let Ok((mut stream, _)) = listener.accept().await else {
            sleep(Duration::from_millis(100)).await;
            continue;
        };
        let text = if is_founding.load(Ordering::Relaxed) { FOUNDING } else { EMPTY };
        // Who does not take it asks again.
        let _ = timeout(PATIENCE, stream.write_all(text)).await;
    }
}

async fn listen_to(address: &str) -> std::io::Result<Vec<u8>> {
    let mut said = Vec::new();
    TcpStream::connect(address).await?.take(64).read_to_end(&mut said).await?;
    Ok(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Members at ports that were free.
    async fn wanted(count: usize) -> Vec<Wanted> {
        let mut listeners = Vec::new();
        for _ in 0..count {
            listeners.push(TcpListener::bind("127.0.0.1:0").await.unwrap());
        }
        let member = |(index, listener): (usize, &TcpListener)| Wanted {
            name: format!("m{index}"),
            peer_url: format!("http://{}", listener.local_addr().unwrap()),
        };
        listeners.iter().enumerate().map(member).collect()
    }

    async fn found(mut member: Founding) {
        while member.ask().await.is_err() {
            sleep(Duration::from_millis(50)).await;
        }
    }

    #[tokio::test]
    async fn members_found_once_all_of_them_have_no_data() {
        let wanted = wanted(3).await;
        let mut first = Founding::open(&wanted, &wanted[0]).await.unwrap();
        let second = Founding::open(&wanted, &wanted[1]).await.unwrap();
        assert_eq!(first.ask().await, Err("m2".to_owned()));
        let second = tokio::spawn(found(second));
        sleep(Duration::from_millis(300)).await;
        assert_eq!(first.ask().await, Err("m2".to_owned()), "the second one waits, too");
        let third = Founding::open(&wanted, &wanted[2]).await.unwrap();
        let all = async { tokio::join!(found(first), second, found(third)) };
        timeout(Duration::from_secs(20), all).await.unwrap().1.unwrap();
    }

    #[tokio::test]
    async fn who_answers_anything_else_or_nothing_may_have_data() {
        let wanted = wanted(2).await;
        let mut member = Founding::open(&wanted, &wanted[0]).await.unwrap();
        let other = TcpListener::bind(address(&wanted[1])).await.unwrap();
        assert_eq!(member.ask().await, Err("m1".to_owned()), "silent");
        let answers = async {
            loop {
                other.accept().await.unwrap().0.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
            }
        };
        tokio::select! {
            result = member.ask() => assert_eq!(result, Err("m1".to_owned()), "etcd"),
            () = answers => {}
        }
    }

    #[tokio::test]
    async fn who_is_alone_founds_at_once() {
        let wanted = wanted(1).await;
        let mut member = Founding::open(&wanted, &wanted[0]).await.unwrap();
        timeout(Duration::from_millis(500), member.ask()).await.unwrap().unwrap();
    }
}
