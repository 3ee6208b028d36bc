//! Tenants beside each other: how soon a first token comes, and who gets how much.

use super::*;

/// A request of a tenant.
fn of(name: &str, weight: u32, prompt: Vec<u32>, max_tokens: usize) -> SequenceRequest {
    let tenant = Tenant { name: name.into(), weight, is_isolated: false };
    SequenceRequest { tenant, ..request(prompt, max_tokens) }
}

/// Steps until the sequence has a token.
fn steps_to_first_token(simulation: &mut Simulation, id: SequenceId) -> usize {
    for num_steps in 1..1000 {
        simulation.schedule();
        simulation.complete();
        if !simulation.yielded[&id].is_empty() {
            return num_steps;
        }
    }
    panic!("no token in a thousand steps");
}

/// A full engine: `num_prompts` of the tenant "heavy", which has been alone for `num_steps`.
fn beside_heavy(config: EngineConfig, num_prompts: usize, prompt: Vec<u32>, num_steps: usize) -> Simulation {
    let mut simulation = Simulation::new(config);
    for _ in 0..num_prompts {
        simulation.add(of("heavy", 1, prompt.clone(), 60));
    }
    for _ in 0..num_steps {
        simulation.schedule();
        simulation.complete();
    }
    simulation
}

#[test]
fn a_hundred_queued_prompts_do_not_delay_another_tenant() {
    let roomy = EngineConfig { num_kv_blocks: 1000, ..config() };
    // All places taken by decodes; all blocks taken; the queue full of prompts; one long prompt after the other.
    let cases = [
        (roomy, vec![1; 4], 12),
        (EngineConfig { num_kv_blocks: 64, ..config() }, vec![1; 4], 40),
        (roomy, vec![1; 4], 0),
        (roomy, vec![1; 120], 3),
    ];
    for (index, (config, prompt, num_steps)) in cases.into_iter().enumerate() {
        let mut simulation = beside_heavy(config, 100, prompt, num_steps);
        for _ in 0..3 {
            let light = simulation.add(of("light", 1, vec![2; 20], 10));
            let num_steps = steps_to_first_token(&mut simulation, light);
            assert!(num_steps <= 2, "case {index}: {num_steps} steps");
            while !simulation.finished.contains_key(&light) {
                simulation.schedule();
                simulation.complete();
            }
        }
        simulation.run();
    }
}

#[test]
fn only_the_lack_of_blocks_costs_computed_tokens() {
    let mut simulation = beside_heavy(EngineConfig { num_kv_blocks: 1000, ..config() }, 100, vec![1; 4], 12);
    let light = simulation.add(of("light", 1, vec![2; 20], 10));
    steps_to_first_token(&mut simulation, light);
    let status = simulation.engine.status(simulation.now);
    assert_eq!((status.num_running_sequences, status.num_preemptions), (9, 0));
}

#[test]
fn tenants_with_enough_to_do_share_by_weight() {
    // Every token counts that is computed: none is found in the cache.
    let limits = EngineConfig { num_kv_blocks: 400, max_waiting_sequences: 1000, is_prefix_caching: false, ..config() };
    for max_steps_in_flight in [1, 3] {
        let mut simulation = Simulation::new(EngineConfig { max_steps_in_flight, ..limits });
        let tenants: Vec<(u32, Vec<SequenceId>)> = [1, 2, 4, 1]
            .into_iter()
            .enumerate()
            .map(|(index, weight)| {
                // Prompts and outputs of different lengths.
                let lengths = (4 + 20 * index, 40 - 10 * index);
                let one = || of(&index.to_string(), weight, vec![index as u32; lengths.0], lengths.1);
                (weight, (0..200).map(|_| simulation.add(one())).collect())
            })
            .collect();
        let num_steps = 800;
        for _ in 0..num_steps {
            simulation.schedule();
            simulation.complete();
        }
        let computed = |(index, (weight, ids)): (usize, &(u32, Vec<SequenceId>))| {
            let num_tokens = |id: &SequenceId| match simulation.yielded[id].len() {
                0 => 0,
                count => 4 + 20 * index + count - 1,
            };
            ids.iter().map(num_tokens).sum::<usize>() as f64 / f64::from(*weight)
        };
        let shares: Vec<f64> = tenants.iter().enumerate().map(computed).collect();
        let mean = shares.iter().sum::<f64>() / shares.len() as f64;
        assert!(shares.iter().all(|share| (share / mean - 1.0).abs() < 0.05), "{max_steps_in_flight}: {shares:?}");
    }
}

#[test]
fn who_was_away_or_alone_has_nothing_to_claim_or_to_pay() {
    // "early" is alone, then "late" comes with as much to do; from then on both get the same.
    let limits = EngineConfig { num_kv_blocks: 1000, max_waiting_sequences: 1000, ..config() };
    let mut simulation = beside_heavy(limits, 90, vec![1; 4], 200);
    let before: usize = simulation.yielded.values().map(Vec::len).sum();
    let late: Vec<_> = (0..90).map(|_| simulation.add(of("late", 1, vec![2; 4], 60))).collect();
    for _ in 0..200 {
        simulation.schedule();
        simulation.complete();
    }
    let of_late: usize = late.iter().map(|id| simulation.yielded[id].len()).sum();
    let of_heavy = simulation.yielded.values().map(Vec::len).sum::<usize>() - before - of_late;
    let ratio = of_late as f64 / of_heavy as f64;
    assert!((0.9..1.15).contains(&ratio), "{of_late} against {of_heavy}");
}

#[test]
fn a_full_queue_takes_what_another_tenant_has_a_right_to() {
    let mut simulation = beside_heavy(EngineConfig { max_waiting_sequences: 10, ..config() }, 10, vec![1; 4], 0);
    let now = simulation.now;
    let refused = simulation.engine.add(of("heavy", 1, vec![1], 1), now);
    assert_eq!(refused, Err(EngineError::Overloaded { waiting: 10, limit: 10 }));
    for _ in 0..5 {
        simulation.add(of("light", 1, vec![1], 1));
    }
    assert!(simulation.engine.add(of("light", 1, vec![1], 1), now).is_err());
    simulation.run();
}
