//! Files that change while a server runs.

use std::{
    os::unix::fs::symlink,
    time::{Duration, SystemTime},
};

use lockstep_tests::certificates::{Authority, Folder};
use lockstep_transport::{ClientTls, ClusterTls, Gate, Outbound, ServerTls, TlsError, TlsFiles};

use crate::accept::{ask, serve};

/// Asks until the answer is as wanted.
async fn becomes(address: &str, outbound: Outbound, wanted: &str) {
    let end = tokio::time::Instant::now() + Duration::from_secs(10);
    loop {
        let told = ask(address, outbound.clone()).await;
        if told.contains(wanted) {
            return;
        }
        assert!(tokio::time::Instant::now() < end, "{told}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn new_certificates_are_taken_over_and_bad_ones_are_not() {
    let folder = Folder::new().unwrap();
    let (old, new) = (Authority::new().unwrap(), Authority::new().unwrap());
    let pair = old.sign_until("server", 2900).unwrap();
    let files = folder.files("server", None, Some(&pair)).unwrap();
    let server = ServerTls::open(files).unwrap();
    let expiry = server.not_after();
    assert!(expiry > SystemTime::now());
    tokio::spawn(server.clone().watch());
    let address = serve(Gate::Both(Some(server.clone()), None)).await;
    let trusting = |name, authority: &Authority| {
        Outbound::Server(ClientTls::open(&folder.files(name, Some(authority), None).unwrap()).unwrap())
    };
    let (of_old, of_new) = (trusting("old", &old), trusting("new", &new));
    assert_eq!(ask(&address, of_old.clone()).await, "Client");

    // Half of a change, garbage, and a certificate that has expired: the old one stays.
    let bad = [
        folder.files("server", None, Some(&new.sign("server").unwrap())).map(|files| files.pair.unwrap().1).unwrap(),
        folder.path().join("server.cert"),
    ];
    std::fs::write(&bad[0], &pair.key).unwrap();
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(ask(&address, of_old.clone()).await, "Client");
    std::fs::write(&bad[1], "no certificate").unwrap();
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(ask(&address, of_old.clone()).await, "Client");
    folder.files("server", None, Some(&new.sign_until("server", 2020).unwrap())).unwrap();
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(ask(&address, of_old.clone()).await, "Client");
    assert_eq!(server.not_after(), expiry);

    folder.files("server", None, Some(&new.sign("server").unwrap())).unwrap();
    becomes(&address, of_new, "Client").await;
    assert!(ask(&address, of_old).await.contains("no authority that is trusted here"));
    assert!(server.not_after() > expiry);
}

#[tokio::test]
async fn a_mounted_secret_changes_by_its_links() {
    let folder = Folder::new().unwrap();
    let (old, new) = (Authority::new().unwrap(), Authority::new().unwrap());
    // As Kubernetes mounts a secret: files are links into `..data`, which is a link to a folder of the version.
    let version = |name: &str, authority: &Authority| {
        let path = folder.path().join(name);
        std::fs::create_dir(&path).unwrap();
        let files = folder.member("m", authority).unwrap();
        let (cert, key) = files.pair.unwrap();
        for (file, target) in [(files.ca.unwrap(), "ca.crt"), (cert, "tls.crt"), (key, "tls.key")] {
            std::fs::rename(file, path.join(target)).unwrap();
        }
    };
    version("..1", &old);
    version("..2", &new);
    let data = folder.path().join("..data");
    symlink("..1", &data).unwrap();
    let file = |name: &str| {
        let path = folder.path().join(name);
        symlink(format!("..data/{name}"), &path).unwrap();
        path
    };
    let files = TlsFiles { ca: Some(file("ca.crt")), pair: Some((file("tls.crt"), file("tls.key"))) };
    let member = ClusterTls::open(files).unwrap();
    tokio::spawn(member.clone().watch());
    let address = serve(Gate::Members(Some(member))).await;
    let as_member = |name, authority: &Authority| {
        Outbound::Member(ClusterTls::open(folder.member(name, authority).unwrap()).unwrap())
    };
    assert_eq!(ask(&address, as_member("a", &old)).await, "Member");
    symlink("..2", folder.path().join("..new")).unwrap();
    std::fs::rename(folder.path().join("..new"), &data).unwrap();
    becomes(&address, as_member("b", &new), "Member").await;
    assert_ne!(ask(&address, as_member("c", &old)).await, "Member");
}

#[test]
fn what_is_wrong_with_a_file_is_said_with_its_name() {
    let folder = Folder::new().unwrap();
    let (one, other) = (Authority::new().unwrap(), Authority::new().unwrap());
    let error = |files: TlsFiles| ServerTls::open(files).err().unwrap().to_string();
    let pair = one.sign("x").unwrap();
    let good = folder.files("good", None, Some(&pair)).unwrap();
    let (cert, key) = good.pair.clone().unwrap();
    let of_other = folder.files("other", None, Some(&other.sign("y").unwrap())).unwrap().pair.unwrap();
    let expired = folder.files("expired", None, Some(&one.sign_until("x", 2020).unwrap())).unwrap();

    assert!(
        error(TlsFiles { pair: Some((cert.clone(), of_other.1)), ca: None }).contains("no key for the certificate in")
    );
    assert!(error(TlsFiles { pair: Some((cert.clone(), cert.clone())), ca: None }).contains("good.cert"));
    assert!(error(TlsFiles { pair: Some((key.clone(), key)), ca: None }).contains("good.key: no certificate"));
    assert!(error(expired).contains("expired.cert: the certificate expired on 2020-01-01"));
    assert!(error(TlsFiles::default()).contains("a certificate and its key"));
    let missing = TlsFiles { pair: Some((folder.path().join("none"), cert)), ca: None };
    assert!(matches!(ServerTls::open(missing), Err(TlsError::Read { .. })));
    assert!(ClusterTls::open(good).err().unwrap().to_string().contains("the cluster's authority"));
}
