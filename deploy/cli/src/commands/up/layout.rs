//! How many workers `up` starts, which devices they hold, and how the model is cut over them.

use lockstep_worker::devices::DeviceSelection;

use super::usage;
use crate::UsageError;

/// The degrees; each may be left out.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct LayoutArgs {
    /// Worker processes [default: one for all GPUs, on the processor one for each rank that the degrees below make]
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
    /// Ranks that share each layer [default: all that the other degrees leave]
    #[arg(long, value_name = "N")]
    tensor_parallel: Option<usize>,
    /// Stages of layers [default: 1]
    #[arg(long, value_name = "N")]
    pipeline_parallel: Option<usize>,
    /// Full copies of the model [default: 1]
    #[arg(long, value_name = "N")]
    replicas: Option<usize>,
}

/// A checked layout.
#[derive(Debug, PartialEq, Eq)]
pub struct Layout {
    /// Worker processes, each with an equal part of the devices; on the processor one each.
    pub num_workers: usize,
    /// The processor or all GPUs.
    pub devices: DeviceSelection,
    /// Why these, if they were not asked for.
    pub reason: Option<String>,
    /// Policy text for the planner.
    pub policy: String,
}

impl LayoutArgs {
    /// Fills in what was left out; `choose` finds devices for so many ranks where the selection leaves that open.
    ///
    /// # Errors
    /// If a number is 0 or the degrees do not multiply to the devices, or what `choose` returns.
    pub fn layout(
        &self,
        selection: DeviceSelection,
        choose: &dyn Fn(DeviceSelection, usize) -> Result<(DeviceSelection, String), UsageError>,
    ) -> Result<Layout, UsageError> {
        let given = [
            ("--workers", self.workers),
            ("--tensor-parallel", self.tensor_parallel),
            ("--pipeline-parallel", self.pipeline_parallel),
            ("--replicas", self.replicas),
        ];
        if let Some((name, _)) = given.iter().find(|(_, value)| *value == Some(0)) {
            return Err(usage(format!("{name} is 0, expected at least 1")));
        }
        let pipeline = self.pipeline_parallel.unwrap_or(1);
        let replicas = self.replicas.unwrap_or(1);
        let others = pipeline.saturating_mul(replicas);
        let given_ranks = selection.num_named().or(self.workers);
        let tensor = self.tensor_parallel.unwrap_or(given_ranks.map_or(1, |ranks| (ranks / others).max(1)));
        let needed = tensor.saturating_mul(others);
        let num_ranks = given_ranks.unwrap_or(needed);
        if needed != num_ranks {
            let given = if selection.num_named().is_some() { "--device names" } else { "--workers is" };
            return Err(usage(format!(
                "tensor {tensor} x pipeline {pipeline} x replicas {replicas} need {needed} ranks, {given} {num_ranks}"
            )));
        }
        let (devices, reason) = match selection {
            automatic @ (DeviceSelection::Auto | DeviceSelection::WebGpuAuto) => {
                let (chosen, reason) = choose(automatic, needed)?;
                (chosen.part(0..needed), Some(reason))
            }
            named => (named, None),
        };
        let is_mixed = matches!(devices, DeviceSelection::Mixed(_));
        let num_workers = self.workers.unwrap_or(if devices == DeviceSelection::Cpu || is_mixed { needed } else { 1 });
        if is_mixed && num_workers != needed {
            return Err(usage(format!(
                "{devices} are of several kinds: --workers is {num_workers}, expected {needed}"
            )));
        }
        if !needed.is_multiple_of(num_workers) {
            return Err(usage(format!("{needed} devices cannot be shared equally by --workers {num_workers}")));
        }
        let policy = format!("hybrid={tensor}x{pipeline},replicas={replicas}");
        Ok(Layout { num_workers, devices, reason, policy })
    }
}

impl Layout {
    /// The part of worker number `index`.
    pub fn device_of(&self, index: usize) -> DeviceSelection {
        let each = self.devices.num_named().unwrap_or(0) / self.num_workers;
        self.devices.part(index * each..(index + 1) * each)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(numbers: [usize; 4], selection: &str) -> Result<Layout, UsageError> {
        let some = |number: usize| (number < 99).then_some(number);
        let [workers, tensor, pipeline, replicas] = numbers.map(some);
        LayoutArgs { workers, tensor_parallel: tensor, pipeline_parallel: pipeline, replicas }.layout(
            selection.parse().unwrap(),
            &|_, num_ranks| {
                // A machine of two GPUs.
                let devices = if num_ranks > 2 { DeviceSelection::Cpu } else { DeviceSelection::Cuda(vec![0, 1]) };
                Ok((devices, String::from("a test")))
            },
        )
    }

    #[test]
    fn what_is_left_out_is_tensor_parallel() {
        let cases = [
            ([99, 99, 99, 99], 1, "hybrid=1x1,replicas=1"),
            ([3, 99, 99, 99], 3, "hybrid=3x1,replicas=1"),
            ([99, 2, 2, 99], 4, "hybrid=2x2,replicas=1"),
            ([4, 99, 99, 2], 4, "hybrid=2x1,replicas=2"),
            ([4, 99, 2, 99], 4, "hybrid=2x2,replicas=1"),
        ];
        for (numbers, num_workers, policy) in cases {
            let expected = Layout { num_workers, devices: DeviceSelection::Cpu, reason: None, policy: policy.into() };
            assert_eq!(layout(numbers, "cpu").unwrap(), expected);
        }
        for wrong in [[0, 99, 99, 99], [3, 2, 99, 99], [3, 99, 2, 99], [1, 99, 2, 99]] {
            assert!(layout(wrong, "cpu").is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn gpus_are_shared_by_the_workers() {
        let cases = [
            ([99, 99, 99, 99], "cuda:3,cuda:1", "hybrid=2x1,replicas=1", vec!["cuda:3,cuda:1"]),
            ([2, 99, 99, 99], "cuda:3,cuda:1", "hybrid=2x1,replicas=1", vec!["cuda:3", "cuda:1"]),
            ([99, 99, 99, 99], "auto", "hybrid=1x1,replicas=1", vec!["cuda:0"]),
            ([99, 2, 99, 99], "auto", "hybrid=2x1,replicas=1", vec!["cuda:0,cuda:1"]),
            ([3, 99, 99, 99], "auto", "hybrid=3x1,replicas=1", vec!["cpu", "cpu", "cpu"]),
        ];
        for (numbers, selection, policy, devices) in cases {
            let layout = layout(numbers, selection).unwrap();
            assert_eq!((layout.policy.as_str(), layout.reason.is_some()), (policy, selection == "auto"));
            let got: Vec<String> = (0..layout.num_workers).map(|index| layout.device_of(index).to_string()).collect();
            assert_eq!(got, devices);
        }
        for (wrong, selection) in [([99, 3, 99, 99], "cuda:0,cuda:1"), ([3, 99, 99, 99], "cuda:0,cuda:1")] {
            assert!(layout(wrong, selection).is_err(), "{wrong:?}");
        }
    }
}
