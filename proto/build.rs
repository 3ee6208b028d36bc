//! Compiles the protocol without protoc (protox parses it) and keeps the descriptors for reflection.

use prost::Message;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = ["common", "inference", "admin", "cluster", "worker", "registry"]
        .map(|name| format!("lockstep/v1/{name}.proto"));
    let descriptors = protox::compile(files, ["proto"])?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("lockstep_descriptor.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().bytes(".lockstep.v1.LoadReplicaRequest.plan").compile_fds(descriptors)?;
    Ok(())
}
