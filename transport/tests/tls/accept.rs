//! Listeners and connectors.

use std::time::Duration;

use lockstep_tests::certificates::{Authority, Folder};
use lockstep_transport::{
    ClientTls, ClusterTls, Connection, Connector, Gate, Incoming, Outbound, Security, ServerTls, TlsFiles, explain,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tonic::transport::Endpoint;
use tower_service::Service;

/// A port behind `gate`; every connection that gets in is told how, and closed.
pub async fn serve(gate: Gate) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut incoming = Incoming::new(listener, gate);
    tokio::spawn(async move {
        loop {
            tokio::spawn(answer(incoming.next().await));
        }
    });
    address
}

async fn answer(mut connection: Connection) {
    let name = format!("{:?}", connection.peer.security);
    let _ = connection.write_all(name.as_bytes()).await;
    let _ = connection.shutdown().await;
}

/// What a connection is told, or what its end says that went wrong.
pub async fn ask(address: &str, outbound: Outbound) -> String {
    let (_, mut connector): (Endpoint, Connector) = Connector::new(address, outbound).unwrap();
    let told = async {
        let mut stream = connector.call("http://unused".parse().unwrap()).await?.into_inner();
        let mut text = String::new();
        // The server's answer comes at once; a client that spoke clear text must speak first.
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await?;
        stream.read_to_string(&mut text).await?;
        std::io::Result::Ok(text)
    };
    match tokio::time::timeout(Duration::from_secs(10), told).await.expect("it hangs") {
        Ok(text) => text,
        Err(error) => explain(&error).unwrap_or_else(|| error.to_string()),
    }
}

struct Parties {
    folder: Folder,
    ours: Authority,
    others: Authority,
}

impl Parties {
    fn new() -> Self {
        Self { folder: Folder::new().unwrap(), ours: Authority::new().unwrap(), others: Authority::new().unwrap() }
    }

    fn member(&self, name: &str, authority: &Authority) -> ClusterTls {
        ClusterTls::open(self.folder.member(name, authority).unwrap()).unwrap()
    }

    fn server(&self, client_ca: Option<&Authority>) -> ServerTls {
        let pair = self.ours.sign("server.test").unwrap();
        ServerTls::open(self.folder.files("server", client_ca, Some(&pair)).unwrap()).unwrap()
    }

    fn client(&self, trusts: &Authority, signed_by: Option<&Authority>) -> Outbound {
        let pair = signed_by.map(|authority| authority.sign("client").unwrap());
        let files = self.folder.files("client", Some(trusts), pair.as_ref()).unwrap();
        Outbound::Server(ClientTls::open(&files).unwrap())
    }
}

#[tokio::test]
async fn members_and_clients_share_a_port() {
    let parties = Parties::new();
    let gate = Gate::Both(Some(parties.server(None)), Some(parties.member("a", &parties.ours)));
    let address = serve(gate).await;
    assert_eq!(ask(&address, Outbound::Member(parties.member("b", &parties.ours))).await, "Member");
    assert_eq!(ask(&address, parties.client(&parties.ours, None)).await, "Client");
    assert!(ask(&address, Outbound::ClearText).await.contains("this port speaks TLS"));
    let told = ask(&address, Outbound::Member(parties.member("c", &parties.others))).await;
    assert!(told.contains("no authority that is trusted here"), "{told}");
}

#[tokio::test]
async fn connections_beyond_the_limit_wait_for_a_place() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut incoming = Incoming::limited(listener, Gate::Http(None), 2);
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(TcpStream::connect(address).await.unwrap());
    }
    let (first, _second) = (incoming.next().await, incoming.next().await);
    let third = tokio::time::timeout(Duration::from_millis(300), incoming.next()).await;
    assert!(third.is_err(), "there is no place for it");
    drop(first);
    let third = tokio::time::timeout(Duration::from_secs(10), incoming.next()).await.expect("a place is free");
    assert_eq!(third.peer.address, clients[2].local_addr().unwrap());
}

#[tokio::test]
async fn a_party_without_tls_comes_in_clear_text() {
    let parties = Parties::new();
    let address = serve(Gate::Both(None, Some(parties.member("a", &parties.ours)))).await;
    assert_eq!(ask(&address, Outbound::ClearText).await, "ClearText");
    assert_eq!(ask(&address, Outbound::Member(parties.member("b", &parties.ours))).await, "Member");
    let told = ask(&address, parties.client(&parties.ours, None)).await;
    assert!(told.contains("not of this kind"), "{told}");
    let address = serve(Gate::Members(None)).await;
    assert_eq!(ask(&address, Outbound::ClearText).await, "ClearText");
}

#[tokio::test]
async fn members_need_a_certificate_of_the_cluster() {
    let parties = Parties::new();
    let address = serve(Gate::Members(Some(parties.member("a", &parties.ours)))).await;
    // Trusts the member but shows none, or one of another authority, without the protocol name of members.
    let told = ask(&address, parties.client(&parties.ours, None)).await;
    assert!(told.contains("not of this kind"), "{told}");
    // A certificate of another authority that trusts this one: only the listener can refuse it.
    let pair = parties.others.sign("x").unwrap();
    let files = parties.folder.files("x", Some(&parties.ours), Some(&pair)).unwrap();
    let told = ask(&address, Outbound::Member(ClusterTls::open(files).unwrap())).await;
    assert!(told.contains("does not trust the authority that this one's certificate comes from"), "{told}");
}

#[tokio::test]
async fn clients_show_certificates_where_they_must() {
    let parties = Parties::new();
    let address = serve(Gate::Http(Some(parties.server(Some(&parties.ours))))).await;
    let told = ask(&address, parties.client(&parties.ours, None)).await;
    assert!(told.contains("not of this kind"), "gRPC to an HTTP port: {told}");
    let address = serve(Gate::Both(Some(parties.server(Some(&parties.ours))), None)).await;
    assert_eq!(ask(&address, parties.client(&parties.ours, Some(&parties.ours))).await, "Client");
    let told = ask(&address, parties.client(&parties.ours, None)).await;
    assert!(told.contains("demands a certificate"), "{told}");
    let told = ask(&address, parties.client(&parties.ours, Some(&parties.others))).await;
    assert!(told.contains("does not trust the authority"), "{told}");
}

#[tokio::test]
async fn servers_are_known_by_their_names() {
    let parties = Parties::new();
    let gate = Gate::Both(Some(parties.server(None)), None);
    let address = serve(gate).await;
    let port = address.rsplit_once(':').unwrap().1;
    let told = ask(&format!("localhost:{port}"), parties.client(&parties.ours, None)).await;
    assert!(told.contains("for another name") && told.contains("server.test"), "{told}");
    let told = ask(&address, parties.client(&parties.others, None)).await;
    assert!(told.contains("no authority that is trusted here"), "{told}");
    // A server that answers in clear text.
    let address = serve(Gate::Members(None)).await;
    let told = ask(&address, parties.client(&parties.ours, None)).await;
    assert!(told.contains("does not speak TLS"), "{told}");
}

#[tokio::test]
async fn an_old_protocol_in_clear_text_is_told_to_use_https() {
    let parties = Parties::new();
    let address = serve(Gate::Http(Some(parties.server(None)))).await;
    let mut stream = TcpStream::connect(&address).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    assert!(text.starts_with("HTTP/1.1 400 ") && text.contains("this port speaks TLS: use https"), "{text}");
}

#[tokio::test]
async fn garbage_and_silence_hold_nobody_up() {
    let parties = Parties::new();
    let gate = Gate::Both(Some(parties.server(None)), Some(parties.member("a", &parties.ours)));
    let address = serve(gate).await;
    let mut strangers = Vec::new();
    for index in 0..64_u8 {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        // A record's head and then anything; plain garbage; half a record; nothing.
        let garbage: Vec<u8> = (0..200).map(|at: u8| at.wrapping_mul(index | 1)).collect();
        let bytes = match index % 4 {
            0 => [&[0x16, 3, 1, 0, 200][..], &garbage].concat(),
            1 => garbage,
            2 => vec![0x16, 3, 1],
            _ => Vec::new(),
        };
        let _ = stream.write_all(&bytes).await;
        strangers.push(stream);
    }
    let start = std::time::Instant::now();
    assert_eq!(ask(&address, parties.client(&parties.ours, None)).await, "Client");
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    for mut stream in strangers {
        // Everybody is closed within the time of a handshake.
        let closed = tokio::time::timeout(Duration::from_secs(8), stream.read_to_end(&mut Vec::new())).await;
        assert!(closed.is_ok(), "a stranger is still connected");
    }
}

#[test]
fn addresses_say_what_they_ask_for() {
    let wrong = |address: &str| Connector::new(address, Outbound::ClearText).err().unwrap().to_string();
    assert!(wrong("https://host:1").contains("asks for TLS"));
    for address in ["host", "ftp://host:1", "host:port", "", "http://", "host:1:2"] {
        assert!(wrong(address).contains("host:port"), "{address}");
    }
    assert!(Connector::new("[::1]:7070", Outbound::ClearText).is_ok());
    let client = Outbound::Server(ClientTls::open(&TlsFiles::default()).unwrap());
    assert!(Connector::new("http://host:1", client.clone()).err().unwrap().to_string().contains("clear text"));
    assert!(Connector::new("https://host:1", client).is_ok());
}

#[tokio::test]
async fn a_peer_says_where_it_comes_from() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut incoming = Incoming::new(listener, Gate::Http(None));
    let stream = TcpStream::connect(address).await.unwrap();
    let peer = incoming.next().await.peer;
    assert_eq!((peer.address, peer.security), (stream.local_addr().unwrap(), Security::ClearText));
}

#[tokio::test]
async fn a_failed_handshake_does_not_hide_a_later_one() {
    let parties = Parties::new();
    let address = serve(Gate::Both(None, Some(parties.member("a", &parties.ours)))).await;
    let mut slow = TcpStream::connect(&address).await.unwrap();
    let mut failing = TcpStream::connect(&address).await.unwrap();
    failing.write_all(&[0x16, 3, 3, 0, 4, 1, 2, 3, 4]).await.unwrap();
    let _ = failing.read_to_end(&mut Vec::new()).await;
    // Nobody else connects from here on.
    slow.write_all(b"PRI").await.unwrap();
    let mut text = String::new();
    let told = tokio::time::timeout(Duration::from_secs(3), slow.read_to_string(&mut text)).await;
    assert!(told.is_ok() && text == "ClearText", "{text:?}");
}
