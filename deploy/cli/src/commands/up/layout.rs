//! How many workers `up` starts, and how the model is cut over them.

use super::usage;
use crate::UsageError;

/// The degrees; each may be left out.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct LayoutArgs {
    /// Worker processes [default: what the degrees below need, or 1]
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
    /// Workers that share each layer [default: all that the other degrees leave]
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
    /// Worker processes, one device each.
    pub num_workers: usize,
    /// Policy text for the planner.
    pub policy: String,
}

impl LayoutArgs {
    /// Fills in what was left out.
    ///
    /// # Errors
    /// If a number is 0 or the degrees do not multiply to the workers.
    pub fn layout(&self) -> Result<Layout, UsageError> {
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
        let tensor = match (self.tensor_parallel, self.workers) {
            (Some(tensor), _) => tensor,
            (None, Some(workers)) => (workers / others).max(1),
            (None, None) => 1,
        };
        let needed = tensor.saturating_mul(others);
        let num_workers = self.workers.unwrap_or(needed);
        if needed != num_workers {
            return Err(usage(format!(
                "tensor {tensor} x pipeline {pipeline} x replicas {replicas} need {needed} workers, --workers is {num_workers}"
            )));
        }
        Ok(Layout { num_workers, policy: format!("hybrid={tensor}x{pipeline},replicas={replicas}") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(numbers: [usize; 4]) -> Result<Layout, UsageError> {
        let some = |number: usize| (number < 99).then_some(number);
        let [workers, tensor, pipeline, replicas] = numbers.map(some);
        LayoutArgs { workers, tensor_parallel: tensor, pipeline_parallel: pipeline, replicas }.layout()
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
            assert_eq!(layout(numbers).unwrap(), Layout { num_workers, policy: String::from(policy) });
        }
        for wrong in [[0, 99, 99, 99], [3, 2, 99, 99], [3, 99, 2, 99], [1, 99, 2, 99]] {
            assert!(layout(wrong).is_err(), "{wrong:?}");
        }
    }
}
