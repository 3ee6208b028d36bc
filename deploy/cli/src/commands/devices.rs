//! `lockstep devices`: the devices of this machine, as a table or as JSON.

use lockstep_sharding::format_bytes;
use lockstep_worker::devices::listing::{self, ListedDevice};

use crate::{output::print, table::Table};

/// Show the devices of this machine: backend, memory, features and limits.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
  lockstep devices
  lockstep devices --json | jq '.[].device'")]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints the devices.
///
/// # Errors
/// If the processor's threads cannot be started.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let devices = listing::list()?;
    print(&if args.json { format!("{}\n", serde_json::to_string_pretty(&devices)?) } else { render(&devices) })
}

fn render(devices: &[ListedDevice]) -> String {
    let mut table = Table::new(&["DEVICE", "BACKEND", "MEMORY", "FEATURES", "NAME"]);
    for device in devices {
        let name = match &device.remark {
            Some(remark) if device.name.is_empty() => remark.clone(),
            Some(remark) => format!("{}: {remark}", device.name),
            None => device.name.clone(),
        };
        table.row(vec![
            device.device.clone(),
            device.backend.clone(),
            format_bytes(device.memory_bytes),
            device.abilities.features.join(", "),
            name,
        ]);
    }
    let mut text = table.render();
    for device in devices.iter().filter(|device| !device.abilities.limits.is_empty()) {
        let limits = device.abilities.limits.iter().map(|(name, value)| format!("{name} {value}"));
        let limits: Vec<String> = limits.collect();
        text += &format!("{}: {}\n", device.device, limits.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use lockstep_worker::devices::listing::Abilities;

    use super::*;

    #[test]
    fn what_cannot_be_used_says_why() {
        let device = |name: &str, remark: Option<&str>| ListedDevice {
            device: "vulkan:0".to_owned(),
            name: name.to_owned(),
            backend: "vulkan".to_owned(),
            memory_bytes: 1 << 30,
            abilities: Abilities {
                features: vec!["subgroups".to_owned(), "f16".to_owned()],
                limits: vec![("bytes of a binding".to_owned(), 77)],
            },
            remark: remark.map(str::to_owned),
        };
        let text = render(&[device("llvmpipe", Some("computes on the processor"))]);
        assert!(text.contains("llvmpipe: computes on the processor"), "{text}");
        assert!(text.contains("subgroups, f16") && text.contains("vulkan:0: bytes of a binding 77"), "{text}");
    }
}
