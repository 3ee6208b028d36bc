//! `lockstep etcd-member`: the configuration file of a member of the chart's etcd.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::Context;
use lockstep_etcd::{
    EtcdSettings,
    founding::Founding,
    membership::{self, Start, Wanted},
};

use crate::{Interrupted, UsageError, signals, tls::EtcdArgs};

/// Between two attempts to be admitted.
const INTERVAL: Duration = Duration::from_secs(1);
/// Longest time until it is admitted.
const PATIENCE: Duration = Duration::from_secs(120);

/// Write the configuration file with which a member of etcd starts. A member with data starts as it was; one without joins
/// the members that run, in place of itself where its disk is lost. If nobody runs it founds the cluster with the others, once
/// each of them has told it, at the port of its peers, that it has no data either.
#[derive(clap::Args)]
#[command(after_help = "\
In an init container, before etcd --config-file=/run/etcd/etcd.yaml:
  lockstep etcd-member --name m0 --data-dir /data --initial-cluster m0=http://m0:2380,m1=http://m1:2380 \\
      --etcd http://m0:2379,http://m1:2379 --etcd-insecure --template etcd.yaml --output /run/etcd/etcd.yaml")]
pub struct Args {
    /// Name of the member
    #[arg(long)]
    name: String,
    /// Where its data is, or was
    #[arg(long, value_name = "FOLDER")]
    data_dir: PathBuf,
    /// All members that are wanted, as etcd's option of that name has them
    #[arg(long, value_name = "NAME=URL,...")]
    initial_cluster: String,
    /// Configuration of etcd, with ${NAME}, ${INITIAL_CLUSTER} and ${INITIAL_CLUSTER_STATE} in it
    #[arg(long, value_name = "FILE")]
    template: PathBuf,
    /// The same with values
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    etcd: EtcdArgs,
}

/// Writes the file, once the member may start.
///
/// # Errors
/// If a setting is wrong, a file cannot be read or written, or the members that run do not admit this one in time.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let wanted = membership::parse(&args.initial_cluster)
        .map_err(|problem| UsageError(format!("initial-cluster: {problem}")))?;
    let own = wanted.iter().find(|member| member.name == args.name);
    let own = own.ok_or_else(|| UsageError(format!("initial-cluster: has no member {:?}", args.name)))?;
    let settings = args.etcd.settings(false)?.ok_or_else(|| UsageError(String::from("etcd: no endpoint is given")))?;
    let template =
        std::fs::read_to_string(&args.template).with_context(|| format!("cannot read {}", args.template.display()))?;
    let start = if has_data(&args.data_dir)? {
        // etcd looks at neither where there is data.
        Start { initial_cluster: args.initial_cluster.clone(), state: "existing" }
    } else {
        let shutdown = signals::shutdown_token(false)?;
        let start = shutdown.run_until_cancelled(start_without_data(&settings, &wanted, own)).await;
        start.ok_or(Interrupted("interrupted before the member was admitted"))??
    };
    tracing::info!(state = start.state, initial_cluster = start.initial_cluster, "the member may start");
    let text = filled(&template, &args.name, &start)?;
    std::fs::write(&args.output, text).with_context(|| format!("cannot write {}", args.output.display()))
}

async fn start_without_data(settings: &EtcdSettings, wanted: &[Wanted], own: &Wanted) -> anyhow::Result<Start> {
    let end = Instant::now() + PATIENCE;
    let mut founding = None;
    loop {
        let problem = match membership::admit(settings, wanted, own).await {
            Ok(Some(start)) => return Ok(start),
            Ok(None) => match founding_of(&mut founding, wanted, own).await {
                Ok(()) => return Ok(membership::first_start(wanted)),
                Err(problem) => problem,
            },
            Err(error) => format!("the members that run do not admit this one: {error}"),
        };
        anyhow::ensure!(Instant::now() < end, "{problem}");
        tracing::warn!(problem, "may not start yet");
        tokio::time::sleep(INTERVAL).await;
    }
}

/// One attempt to found a cluster, where nobody answers as a member of one.
async fn founding_of(founding: &mut Option<Founding>, wanted: &[Wanted], own: &Wanted) -> Result<(), String> {
    let founding = match founding {
        Some(founding) => founding,
        None => {
            let opened = Founding::open(wanted, own).await;
            founding.insert(opened.map_err(|error| format!("cannot listen at {}: {error}", own.peer_url))?)
        }
    };
    let silent = founding.ask().await;
    silent.map_err(|names| format!("no cluster answers, and these may have its data: {names}"))
}

/// Whether etcd has ever written there.
fn has_data(folder: &Path) -> anyhow::Result<bool> {
    let log = folder.join("member/wal");
    match std::fs::read_dir(&log) {
        Ok(mut entries) => Ok(entries.next().is_some()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", log.display())),
    }
}

fn filled(template: &str, name: &str, start: &Start) -> Result<String, UsageError> {
    let values =
        [("${NAME}", name), ("${INITIAL_CLUSTER}", &start.initial_cluster), ("${INITIAL_CLUSTER_STATE}", start.state)];
    let mut text = template.to_owned();
    for (place, value) in values {
        if !text.contains(place) {
            return Err(UsageError(format!("template: has no {place}")));
        }
        text = text.replace(place, value);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_has_all_places() {
        let start = Start { initial_cluster: "m0=http://m0:2380".to_owned(), state: "new" };
        let all = "name: ${NAME}\nadvertise: http://${NAME}:2379\nc: ${INITIAL_CLUSTER}\ns: ${INITIAL_CLUSTER_STATE}\n";
        let expected = "name: m0\nadvertise: http://m0:2379\nc: m0=http://m0:2380\ns: new\n";
        assert_eq!(filled(all, "m0", &start).unwrap(), expected);
        let error = filled("name: ${NAME}\n", "m0", &start).unwrap_err().to_string();
        assert_eq!(error, "template: has no ${INITIAL_CLUSTER}");
    }

    #[test]
    fn a_folder_that_etcd_never_wrote_to_has_no_data() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!has_data(folder.path()).unwrap());
        std::fs::create_dir_all(folder.path().join("member/wal")).unwrap();
        assert!(!has_data(folder.path()).unwrap());
        std::fs::write(folder.path().join("member/wal/0.wal"), "x").unwrap();
        assert!(has_data(folder.path()).unwrap());
    }
}
