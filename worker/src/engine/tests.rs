//! The engine against a fake model: random arrivals, cancellations, tiny caches and pipelines.

mod fairness;
pub mod fake_model;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use proptest::prelude::*;

use self::fake_model::{FakeModel, VOCAB_SIZE, request};
use super::*;

fn config() -> EngineConfig {
    EngineConfig {
        num_kv_blocks: 64,
        block_size: 4,
        max_num_sequences: 8,
        max_step_tokens: 32,
        max_sequence_tokens: 128,
        max_waiting_sequences: 100,
        max_steps_in_flight: 1,
        is_prefix_caching: true,
    }
}

/// An engine with its ranks, and what its sequences yielded.
struct Simulation {
    config: EngineConfig,
    engine: Engine,
    model: FakeModel,
    in_flight: VecDeque<(StepPlan, StepResult)>,
    yielded: BTreeMap<SequenceId, Vec<u32>>,
    finished: BTreeMap<SequenceId, (FinishReason, SequenceStats)>,
    now: Instant,
}

impl Simulation {
    fn new(config: EngineConfig) -> Self {
        Self {
            config,
            engine: Engine::new(config),
            model: FakeModel::new(config.block_size),
            in_flight: VecDeque::new(),
            yielded: BTreeMap::new(),
            finished: BTreeMap::new(),
            now: Instant::now(),
        }
    }

    fn add(&mut self, request: SequenceRequest) -> SequenceId {
        let id = self.engine.add(request, self.now).unwrap();
        self.yielded.insert(id, Vec::new());
        id
    }

    /// Fills the steps in flight; returns whether any was added.
    fn schedule(&mut self) -> bool {
        let before = self.in_flight.len();
        while let Some(plan) = self.engine.schedule(self.now) {
            self.check(&plan);
            let result = self.model.execute(&plan);
            self.in_flight.push_back((plan, result));
        }
        self.in_flight.len() > before
    }

    /// Returns the oldest step in flight.
    fn complete(&mut self) -> bool {
        let Some((_, result)) = self.in_flight.pop_front() else {
            return false;
        };
        self.now += Duration::from_millis(10);
        for (id, output) in self.engine.update(result, self.now) {
            assert!(!self.finished.contains_key(&id), "{id} yields after its end");
            match output {
                SequenceOutput::Token { token_id, .. } => self.yielded.get_mut(&id).unwrap().push(token_id),
                SequenceOutput::Finished { reason, stats } => {
                    self.finished.insert(id, (reason, stats));
                }
            }
        }
        true
    }

    fn run(&mut self) {
        for _ in 0..100_000 {
            self.schedule();
            if !self.complete() {
                assert!(self.engine.is_idle(), "work is left but nothing is scheduled");
                let status = self.engine.status(self.now);
                assert_eq!(status.num_free_kv_blocks, self.config.num_kv_blocks, "blocks leaked");
                return;
            }
        }
        panic!("the engine does not come to an end");
    }

    /// Budgets, block tables, one writer of a block, and nobody who reads it in the step in which it is written.
    fn check(&self, plan: &StepPlan) {
        assert!(!plan.sequences.is_empty());
        assert!(plan.num_tokens() <= self.config.max_step_tokens);
        assert!(plan.sequences.len() <= self.config.max_num_sequences);
        assert!(self.in_flight.len() < self.config.max_steps_in_flight);
        let block_size = self.config.block_size;
        let cut = |part: &StepSequence| part.first_position as usize / block_size;
        let mut writers = BTreeMap::new();
        let steps = self.in_flight.iter().map(|(plan, _)| plan).chain([plan]);
        for part in steps.flat_map(|plan| &plan.sequences) {
            let end = part.first_position as usize + part.token_ids.len();
            assert!(!part.token_ids.is_empty() && end <= self.config.max_sequence_tokens);
            assert!(part.block_table.len() * block_size >= end);
            assert!(part.block_table.iter().all(|&block| (block as usize) < self.config.num_kv_blocks));
            for &block in &part.block_table[cut(part)..] {
                let writer = *writers.entry(block).or_insert(part.sequence_id);
                assert_eq!(writer, part.sequence_id, "block {block} has two writers");
            }
        }
        let written: BTreeSet<_> = plan.sequences.iter().flat_map(|part| &part.block_table[cut(part)..]).collect();
        let mut read = plan.sequences.iter().flat_map(|part| &part.block_table[..cut(part)]);
        assert!(read.all(|block| !written.contains(block)), "a block is read and written in one step");
        let ids: BTreeSet<_> = plan.sequences.iter().map(|part| part.sequence_id).collect();
        assert_eq!(ids.len(), plan.sequences.len(), "a sequence is twice in a step");
    }
}

/// What the request yields with everything to itself.
fn alone(request: SequenceRequest) -> (Vec<u32>, FinishReason) {
    let mut simulation = Simulation::new(EngineConfig { max_step_tokens: 128, ..config() });
    let id = simulation.add(request);
    simulation.run();
    (simulation.yielded.remove(&id).unwrap(), simulation.finished[&id].0)
}

fn random_request() -> impl Strategy<Value = SequenceRequest> {
    let others = prop::collection::vec(0..VOCAB_SIZE as u32, 1..60);
    let begins_alike = (0u32..3, 1usize..60).prop_map(|(first, length)| (first..first + length as u32).collect());
    let prompt = prop_oneof![others, begins_alike];
    let filters = (prop_oneof![Just(0.0f32), 0.3f32..2.0], prop_oneof![Just(1.0f32), 0.2f32..0.99], 0usize..12);
    (prompt, 1usize..50, filters, any::<u64>(), any::<bool>(), any::<bool>(), 1u32..5).prop_map(
        |(prompt, max_tokens, (temperature, top_p, top_k), seed, is_penalized, has_stop, weight)| {
            let mut request = request(prompt, max_tokens);
            request.tenant = Tenant { name: weight.to_string().into(), weight, is_isolated: false };
            let sampling = &mut request.sampling;
            (sampling.temperature, sampling.top_p, sampling.top_k) = (temperature, top_p, top_k);
            sampling.seed = seed;
            if is_penalized {
                sampling.repetition_penalty = 1.2;
                sampling.frequency_penalty = 0.3;
            }
            if has_stop {
                sampling.stop_token_ids = (0..20).collect();
            }
            request
        },
    )
}

#[derive(Clone, Debug)]
enum Event {
    Add(SequenceRequest),
    Cancel(usize),
    Schedule,
    Complete,
}

fn random_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        2 => random_request().prop_map(Event::Add),
        1 => (0usize..20).prop_map(Event::Cancel),
        5 => Just(Event::Schedule),
        5 => Just(Event::Complete),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    /// A sequence that another engine takes over after any of its tokens yields the rest, whatever the sampling.
    #[test]
    fn a_sequence_goes_on_in_another_engine(request in random_request(), cut in any::<prop::sample::Index>()) {
        let (tokens, reason) = alone(request.clone());
        prop_assume!(!tokens.is_empty());
        let num_output_tokens = cut.index(tokens.len());
        let mut moved = SequenceRequest { num_output_tokens, ..request };
        moved.token_ids.extend(&tokens[..num_output_tokens]);
        let mut simulation = Simulation::new(EngineConfig { max_step_tokens: 128, ..config() });
        let id = simulation.add(moved);
        simulation.run();
        prop_assert_eq!(&simulation.yielded[&id], &tokens[num_output_tokens..]);
        let (finish, stats) = simulation.finished[&id];
        prop_assert_eq!((finish, stats.completion_tokens), (reason, tokens.len()));
    }

    /// Whatever else runs, and however small the cache: a sequence yields what it yields alone.
    #[test]
    fn every_sequence_yields_what_it_yields_alone(
        events in prop::collection::vec(random_event(), 1..120),
        num_kv_blocks in 32usize..60, max_num_sequences in 1usize..7, max_step_tokens in 1usize..40,
        max_steps_in_flight in 1usize..5, is_prefix_caching in any::<bool>(),
    ) {
        let limits = EngineConfig {
            num_kv_blocks, max_num_sequences, max_step_tokens, max_steps_in_flight, is_prefix_caching, ..config()
        };
        let mut simulation = Simulation::new(limits);
        let mut requests = Vec::new();
        let mut cancelled = BTreeSet::new();
        for event in events {
            match event {
                Event::Add(request) => requests.push((simulation.add(request.clone()), request)),
                Event::Cancel(index) => if let Some((id, _)) = requests.get(index) {
                    simulation.engine.cancel(*id);
                    cancelled.insert(*id);
                },
                Event::Schedule => { simulation.schedule(); }
                Event::Complete => { simulation.complete(); }
            }
        }
        simulation.run();
        for (id, request) in requests {
            let (tokens, reason) = alone(request);
            let yielded = &simulation.yielded[&id];
            if cancelled.contains(&id) {
                prop_assert!(tokens.starts_with(yielded));
                continue;
            }
            prop_assert_eq!(yielded, &tokens);
            let (finish, stats) = simulation.finished[&id];
            prop_assert_eq!(finish, reason);
            prop_assert_eq!(stats.completion_tokens, tokens.len());
            prop_assert!(stats.queue_ms <= stats.ttft_ms);
            prop_assert!(stats.cached_tokens < stats.prompt_tokens && (is_prefix_caching || stats.cached_tokens == 0));
        }
    }
}

#[test]
fn refuses_what_can_never_run() {
    let mut engine = Engine::new(EngineConfig { num_kv_blocks: 4, max_waiting_sequences: 1, ..config() });
    let now = Instant::now();
    assert_eq!(engine.add(request(vec![], 1), now), Err(EngineError::EmptyPrompt));
    let refused = engine.add(request(vec![0; 16], 1), now);
    assert_eq!(refused, Err(EngineError::TooLong { what: "prompt length in tokens", got: 16, limit: 15 }));
    engine.add(request(vec![0; 15], 1), now).unwrap();
    let refused = engine.add(request(vec![0], 1), now);
    assert_eq!(refused, Err(EngineError::Overloaded { waiting: 1, limit: 1 }));
}

#[test]
fn decodes_go_on_while_a_long_prompt_is_prefilled() {
    let mut simulation = Simulation::new(config());
    let streams: Vec<_> = (0..3).map(|token| simulation.add(request(vec![token], 60))).collect();
    simulation.schedule();
    simulation.complete();
    simulation.add(request(vec![7; 100], 5));
    for _ in 0..4 {
        let plan = simulation.engine.schedule(simulation.now).unwrap();
        for id in &streams {
            assert!(plan.sequences.iter().any(|part| part.sequence_id == *id));
        }
        assert!(plan.num_tokens() <= 32 && plan.sequences.len() == 4);
        let result = simulation.model.execute(&plan);
        simulation.in_flight.push_back((plan, result));
        simulation.complete();
    }
    simulation.run();
}

#[test]
fn admission_and_finish_keep_the_order_of_arrival() {
    let mut simulation = Simulation::new(EngineConfig { max_num_sequences: 2, ..config() });
    let ids: Vec<_> = (0..6).map(|token| simulation.add(request(vec![token; 9], 10))).collect();
    simulation.run();
    let mut by_queue_time = ids.clone();
    by_queue_time
        .sort_by(|left, right| simulation.finished[left].1.queue_ms.total_cmp(&simulation.finished[right].1.queue_ms));
    assert_eq!(by_queue_time, ids);
}

#[test]
fn preempted_sequences_come_back_and_the_oldest_never_stops() {
    let mut simulation = Simulation::new(EngineConfig { num_kv_blocks: 33, ..config() });
    let ids: Vec<_> = (0..4).map(|token| simulation.add(request(vec![token; 4], 100))).collect();
    let mut num_oldest = 0;
    while !simulation.engine.is_idle() {
        simulation.schedule();
        simulation.complete();
        let now = simulation.yielded[&ids[0]].len();
        assert!(now > num_oldest || now == 100, "the oldest sequence yields a token in every step");
        num_oldest = now;
    }
    assert!(simulation.engine.status(simulation.now).num_preemptions > 0);
    assert!(ids.iter().all(|id| simulation.yielded[id].len() == 100));
}

#[test]
fn cancelling_frees_blocks_when_the_step_in_flight_returns() {
    let mut simulation = Simulation::new(config());
    let id = simulation.add(request(vec![1; 20], 50));
    simulation.schedule();
    assert_eq!(simulation.engine.status(simulation.now).num_free_kv_blocks, 64 - 5);
    simulation.engine.cancel(id);
    simulation.engine.cancel(id);
    assert_eq!(simulation.engine.status(simulation.now).num_free_kv_blocks, 64 - 5, "the step may still write");
    simulation.complete();
    assert_eq!(simulation.engine.status(simulation.now).num_free_kv_blocks, 64);
    assert!(simulation.engine.is_idle() && simulation.yielded[&id].is_empty());
}

#[test]
fn a_pipeline_of_decodes_stays_full() {
    let mut simulation = Simulation::new(EngineConfig { max_steps_in_flight: 3, ..config() });
    (0..7).for_each(|token| {
        simulation.add(request(vec![token; 3], 40));
    });
    for step in 0..60 {
        simulation.schedule();
        let sizes: Vec<_> = simulation.in_flight.iter().map(|(plan, _)| plan.sequences.len()).collect();
        if step > 3 {
            assert!(sizes.len() == 3 && sizes.iter().all(|size| (1..=3).contains(size)), "{sizes:?}");
        }
        simulation.complete();
    }
    simulation.run();
}

#[test]
fn prompt_chunks_follow_each_other_in_flight() {
    let mut simulation = Simulation::new(EngineConfig { max_steps_in_flight: 3, max_step_tokens: 10, ..config() });
    simulation.add(request((0..35).collect(), 4));
    simulation.schedule();
    let chunks: Vec<_> = simulation.in_flight.iter().map(|(plan, _)| plan.num_tokens()).collect();
    assert_eq!(chunks, [10, 10, 10]);
    simulation.run();
}

#[test]
fn a_damaged_result_ends_its_sequences_with_an_error() {
    let mut simulation = Simulation::new(config());
    let id = simulation.add(request(vec![1, 2, 3], 5));
    simulation.schedule();
    simulation.in_flight[0].1.candidates.clear();
    simulation.complete();
    assert_eq!(simulation.finished[&id].0, FinishReason::Error);
    simulation.run();
}

#[test]
fn length_limits_count_prompt_and_output() {
    let (tokens, reason) = alone(request(vec![1; 120], 1000));
    assert_eq!((tokens.len(), reason), (8, FinishReason::Length));
    let sampling = Sampling { stop_token_ids: (0..VOCAB_SIZE as u32).collect(), ..Sampling::greedy(10) };
    let (tokens, reason) = alone(SequenceRequest { sampling, ..request(vec![1], 1) });
    assert_eq!((tokens.len(), reason), (0, FinishReason::Stop));
}

/// Tokens of each part of the step that is formed next.
fn next_sizes(simulation: &mut Simulation) -> Vec<usize> {
    simulation.schedule();
    let (plan, _) = simulation.in_flight.back().unwrap();
    plan.sequences.iter().map(|part| part.token_ids.len()).collect()
}

#[test]
fn equal_beginnings_are_computed_once() {
    let mut simulation = Simulation::new(config());
    let prompt: Vec<u32> = (0..21).collect();
    let first = simulation.add(request(prompt.clone(), 8));
    simulation.run();
    let again = simulation.add(request(prompt.clone(), 8));
    assert_eq!(next_sizes(&mut simulation), [1], "five full blocks are there");
    simulation.run();
    let whole = simulation.add(request(prompt[..20].to_vec(), 1));
    assert_eq!(next_sizes(&mut simulation), [4], "the last token is computed, and with it its block");
    simulation.run();
    let mut longer = [&prompt[..], &simulation.yielded[&first]].concat();
    let conversation = simulation.add(request(longer.clone(), 1));
    assert_eq!(next_sizes(&mut simulation), [1], "the output but its last token is there, too");
    simulation.run();
    longer[5] += 1;
    let other = simulation.add(request(longer, 1));
    simulation.run();
    assert_eq!(simulation.yielded[&first], simulation.yielded[&again]);
    let cached = [first, again, whole, conversation, other].map(|id| simulation.finished[&id].1.cached_tokens);
    assert_eq!(cached, [0, 20, 16, 28, 4]);
    let status = simulation.engine.status(simulation.now);
    assert_eq!((status.prefix_query_tokens, status.prefix_hit_tokens), (21 + 21 + 20 + 29 + 29, 68));
}

#[test]
fn isolated_tenants_share_nothing() {
    let mut simulation = Simulation::new(config());
    let of = |name: &str, is_isolated| {
        let tenant = Tenant { name: name.into(), weight: 1, is_isolated };
        SequenceRequest { tenant, ..request((0..21).collect(), 1) }
    };
    let requests = [("a", false), ("b", false), ("a", true), ("b", true), ("b", true)];
    let ids = requests.map(|(name, is_isolated)| {
        let id = simulation.add(of(name, is_isolated));
        simulation.run();
        id
    });
    assert_eq!(ids.map(|id| simulation.finished[&id].1.cached_tokens), [0, 20, 0, 0, 20]);
}

#[test]
fn a_prompt_that_is_being_computed_is_shared_as_far_as_it_is() {
    let mut simulation = Simulation::new(config());
    let prompt: Vec<u32> = (0..100).collect();
    let ids = [0; 3].map(|_| simulation.add(request(prompt.clone(), 4)));
    let mut num_computed = 0;
    while !simulation.engine.is_idle() {
        simulation.schedule();
        num_computed += simulation.in_flight.back().map_or(0, |(plan, _)| plan.num_tokens());
        simulation.complete();
    }
    assert!(num_computed < 160, "{num_computed} tokens were computed for three prompts of 100");
    assert!(ids.iter().all(|id| simulation.yielded[id] == simulation.yielded[&ids[0]]));
}

#[test]
fn a_preempted_sequence_finds_its_blocks_again() {
    let mut simulation = Simulation::new(EngineConfig { num_kv_blocks: 33, ..config() });
    let ids: Vec<_> = (0..4).map(|token| simulation.add(request(vec![token; 4], 100))).collect();
    let mut num_computed = 0;
    while !simulation.engine.is_idle() {
        simulation.schedule();
        num_computed += simulation.in_flight.back().map_or(0, |(plan, _)| plan.num_tokens());
        simulation.complete();
    }
    let num_preemptions = simulation.engine.status(simulation.now).num_preemptions;
    assert!(num_preemptions > 0);
    assert!(
        num_computed < 4 * 103 + 40 * num_preemptions as usize,
        "{num_computed} after {num_preemptions} preemptions"
    );
    assert!(ids.iter().all(|id| simulation.finished[id].1.cached_tokens == 0), "its own blocks are no gain");
}

#[test]
fn what_made_no_sense_is_not_shared() {
    let mut simulation = Simulation::new(config());
    simulation.add(request((0..21).collect(), 5));
    simulation.schedule();
    simulation.in_flight[0].1.candidates.clear();
    simulation.complete();
    let id = simulation.add(request((0..21).collect(), 5));
    simulation.run();
    assert_eq!(simulation.finished[&id].1.cached_tokens, 0);
}

#[test]
fn shared_blocks_do_not_count_twice_for_admission() {
    let mut simulation = Simulation::new(EngineConfig { num_kv_blocks: 33, max_step_tokens: 128, ..config() });
    simulation.add(request((0..100).collect(), 20));
    simulation.schedule();
    simulation.complete();
    simulation.add(request((0..100).collect(), 4));
    assert_eq!(next_sizes(&mut simulation), [1, 4], "25 blocks are in use, 24 of them serve both");
    simulation.run();
}
