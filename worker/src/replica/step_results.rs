//! Puts together what the ranks of the last stage make of each step in flight.
//! Invariant: results leave in the order of the steps, each once all ranks of the stage have answered.

use std::collections::VecDeque;

use lockstep_executor::step::{StepPlan, StepResult};
use lockstep_kernels::ops::{Candidates, SampleRow};

use super::rank_thread::RankResult;
use crate::WorkerError;

/// Steps in flight.
pub(super) struct StepResults {
    /// Ranks of the last stage, in the order of their parts of the vocabulary.
    ranks: Vec<usize>,
    in_flight: VecDeque<InFlight>,
}

struct InFlight {
    step_id: u64,
    samples: Vec<SampleRow>,
    /// By position in `ranks`.
    parts: Vec<Option<Vec<Candidates>>>,
}

impl StepResults {
    /// Nothing in flight.
    pub fn new(ranks: Vec<usize>) -> Self {
        Self { ranks, in_flight: VecDeque::new() }
    }

    /// Notes that a step was sent out.
    pub fn expect(&mut self, plan: &StepPlan) {
        self.in_flight.push_back(InFlight {
            step_id: plan.step_id,
            samples: plan.sequences.iter().filter_map(|sequence| sequence.sample.clone()).collect(),
            parts: self.ranks.iter().map(|_| None).collect(),
        });
    }

    /// Takes one rank's result.
    ///
    /// # Errors
    /// [`WorkerError::Link`] if nobody asked the rank for it.
    pub fn add(&mut self, rank: usize, result: RankResult) -> Result<(), WorkerError> {
        let wrong = |what: String| WorkerError::Link { peer: rank, what };
        let RankResult { step_id, candidates } = result;
        let step = self.in_flight.iter_mut().find(|step| step.step_id == step_id);
        let step = step.ok_or_else(|| wrong(format!("sent a result of step {step_id}, which is not in flight")))?;
        if candidates.len() != step.samples.len() {
            let expected = step.samples.len();
            return Err(wrong(format!("sent {} candidates of step {step_id}, expected {expected}", candidates.len())));
        }
        let part = self.ranks.iter().position(|known| *known == rank).and_then(|index| step.parts.get_mut(index));
        match part {
            Some(part @ None) => {
                *part = Some(candidates);
                Ok(())
            }
            _ => Err(wrong(format!("sent a result of step {step_id} twice or without being asked"))),
        }
    }

    /// The oldest step's result, if it is complete.
    pub fn next_complete(&mut self) -> Option<StepResult> {
        if self.in_flight.front()?.parts.iter().any(Option::is_none) {
            return None;
        }
        let InFlight { step_id, samples, parts } = self.in_flight.pop_front()?;
        let mut parts: Vec<_> = parts.into_iter().flatten().collect();
        let candidates = if parts.len() == 1 {
            parts.pop().unwrap_or_default()
        } else {
            let mut parts: Vec<_> = parts.into_iter().map(Vec::into_iter).collect();
            let merge = |sample| Candidates::merge(sample, parts.iter_mut().filter_map(Iterator::next));
            samples.iter().map(merge).collect()
        };
        Some(StepResult { step_id, candidates })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_executor::step::StepSequence;

    fn plan(step_id: u64) -> StepPlan {
        let sample = SampleRow { top_k: 1, temperature: 1.0, noise_seed: None, penalties: Vec::new(), raw_top_k: 0 };
        let sequence = StepSequence {
            sequence_id: 0,
            first_position: 0,
            token_ids: vec![1],
            block_table: vec![0],
            sample: Some(sample),
        };
        StepPlan { step_id, sequences: vec![sequence], trace: None }
    }

    fn result(step_id: u64, token_id: u32, logit: f32) -> RankResult {
        let candidates = Candidates { top: vec![(token_id, logit)], ..Candidates::default() };
        RankResult { step_id, candidates: vec![candidates] }
    }

    #[test]
    fn parts_are_merged_and_steps_leave_in_order() {
        let mut results = StepResults::new(vec![2, 3]);
        results.expect(&plan(0));
        results.expect(&plan(1));
        results.add(3, result(1, 7, 1.0)).unwrap();
        results.add(2, result(1, 5, 2.0)).unwrap();
        assert_eq!(results.next_complete(), None);
        results.add(2, result(0, 5, 1.0)).unwrap();
        results.add(3, result(0, 7, 3.0)).unwrap();
        let first = results.next_complete().unwrap();
        assert_eq!((first.step_id, &first.candidates[0].top), (0, &vec![(7, 3.0)]));
        assert_eq!(results.next_complete().unwrap().candidates[0].top, [(5, 2.0)]);
        assert_eq!(results.next_complete(), None);
    }

    #[test]
    fn unasked_results_are_refused() {
        let mut results = StepResults::new(vec![2, 3]);
        results.expect(&plan(0));
        results.add(2, result(0, 1, 1.0)).unwrap();
        assert!(results.add(2, result(0, 1, 1.0)).is_err());
        assert!(results.add(1, result(0, 1, 1.0)).is_err());
        assert!(results.add(3, result(4, 1, 1.0)).is_err());
        assert!(results.add(3, RankResult { step_id: 0, candidates: Vec::new() }).is_err());
    }
}
