//! A TCP proxy that can fall silent: what comes waits, connections stay, and nobody is told, as on a cut line.

use std::{io, net::SocketAddr};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    task::JoinHandle,
};

/// Forwards `at` to `to` until it is dropped.
pub struct Proxy {
    /// Where it listens.
    pub at: SocketAddr,
    /// Whom it connects to.
    pub to: SocketAddr,
    is_cut: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Proxy {
    /// Starts one.
    ///
    /// # Errors
    /// If it cannot listen.
    pub async fn start(at: SocketAddr, to: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(at).await?;
        let (is_cut, watched) = watch::channel(false);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                // Either end may close at any time.
                tokio::spawn(relay(client, to, watched.clone()));
            }
        });
        Ok(Self { at, to, is_cut, task })
    }

    /// Falls silent, or passes on again what came meanwhile.
    pub fn set(&self, is_cut: bool) {
        self.is_cut.send_replace(is_cut);
    }
}

async fn relay(client: TcpStream, to: SocketAddr, mut is_cut: watch::Receiver<bool>) -> io::Result<()> {
    healed(&mut is_cut).await?;
    let server = TcpStream::connect(to).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    tokio::try_join!(pump(from_client, to_server, is_cut.clone()), pump(from_server, to_client, is_cut)).map(drop)
}

async fn pump(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut is_cut: watch::Receiver<bool>) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let count = from.read(&mut buffer).await?;
        healed(&mut is_cut).await?;
        if count == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buffer[..count]).await?;
    }
}

async fn healed(is_cut: &mut watch::Receiver<bool>) -> io::Result<()> {
    is_cut.wait_for(|is_cut| !is_cut).await.map(drop).map_err(|_| io::ErrorKind::ConnectionAborted.into())
}
