//! Replicas that others take the place of while they serve: because other settings are in force, or because workers came
//! that allow a better plan.
//! Invariants: superseded replicas serve until their successors do wherever there are devices for both; where there are
//! none they give theirs up once a plan is known that is made with them, and their requests wait for it. Nobody has to wait for
//! longer than [`SHORT_LOAD`] only because there is something better.

use std::{sync::Arc, time::Duration};

use lockstep_sharding::{PlanError, Policy, RankPlan, ReplicaPlan, ShardPlan, StagePlan};
use tokio::time::Instant;

use super::{
    deploy::Planned,
    model_state::Growth,
    reconciler::{Event, Reconciler},
};
use crate::{
    cluster::Workers,
    served::{BreakCause, Replica, ReplicaState},
};

/// A plan is better than another if it is worth so many times as much. What is measured of devices scatters by less.
const BETTER: f64 = 1.5;
/// Tokens that a sequence has on average, as the planner takes it.
const CONTEXT_TOKENS: usize = 512;
/// A plan beside what serves may be worse by so much than one for which that had to make room.
const BESIDE: f64 = 0.8;
/// So long may requests wait, and be refused, for the sake of a better plan.
const SHORT_LOAD: Duration = Duration::from_secs(10);

/// Where a plan goes.
pub(super) enum Place<P> {
    /// Onto free devices.
    Beside(P),
    /// Onto devices that superseded replicas have to give up first; it is made again then.
    Instead,
}

impl<P> Place<P> {
    /// The same with another plan.
    pub fn map<Q>(self, with: impl FnOnce(P) -> Q) -> Place<Q> {
        match self {
            Self::Beside(plan) => Place::Beside(with(plan)),
            Self::Instead => Place::Instead,
        }
    }
}

/// Where to put the successors of superseded replicas, given the plans over the free devices and over theirs as well.
///
/// # Errors
/// That of the latter, if there is neither.
pub(super) fn place(
    free: Result<Planned, PlanError>,
    all: Result<Planned, PlanError>,
) -> Result<Place<Planned>, PlanError> {
    let worth = |planned: &Planned| worth(rates(&planned.plan));
    match (free, all) {
        (Ok(free), Ok(all)) if worth(&free) < BESIDE * worth(&all) => Ok(Place::Instead),
        (Ok(free), _) => Ok(Place::Beside(free)),
        (Err(_), Ok(_)) => Ok(Place::Instead),
        (Err(_), Err(error)) => Err(error),
    }
}

/// What a replica is expected to do, as its plan reckons it; in tokens per second.
#[derive(Clone, Copy)]
struct Rates {
    /// Of one sequence alone.
    decode: f64,
    /// With as many sequences as its limits and its KV blocks allow.
    full: f64,
}

impl Rates {
    fn new(replica: &ReplicaPlan, plan: &ShardPlan) -> Self {
        let slowest = |stage: &StagePlan, time: fn(&RankPlan) -> f64| {
            stage.ranks.iter().map(time).fold(f64::MIN_POSITIVE, f64::max)
        };
        let num_sequences = plan.max_num_sequences.min(replica.num_kv_blocks * plan.block_size / CONTEXT_TOKENS);
        let batch = num_sequences.div_ceil(replica.stages.len().max(1)).max(1) as f64;
        // Between a step of one token and one of the most tokens a step grows evenly.
        let share = (batch - 1.0) / (plan.max_step_tokens.max(2) - 1) as f64;
        let (mut decode_ms, mut slowest_ms) = (0.0, f64::MIN_POSITIVE);
        for stage in &replica.stages {
            let (decode, prefill) =
                (slowest(stage, |rank| rank.decode_step_ms), slowest(stage, |rank| rank.prefill_step_ms));
            decode_ms += decode;
            slowest_ms = f64::max(slowest_ms, decode + share * (prefill - decode).max(0.0));
        }
        Self { decode: 1e3 / decode_ms.max(f64::MIN_POSITIVE), full: batch * 1e3 / slowest_ms }
    }
}

fn rates(plan: &ShardPlan) -> impl Iterator<Item = Rates> {
    plan.replicas.iter().map(|replica| Rates::new(replica, plan))
}

/// What replicas are worth together, as the planner chooses: the rate of one sequence on the slowest times that of all of them with
/// full batches.
fn worth(replicas: impl Iterator<Item = Rates>) -> f64 {
    let (slowest, all) =
        replicas.fold((f64::MAX, 0.0), |(slowest, all), Rates { decode, full }| (decode.min(slowest), all + full));
    slowest * all
}

impl Reconciler {
    /// Takes up a plan: puts it into force, or makes room for it.
    pub(super) fn take_place(&mut self, name: &str, place: Place<Box<Planned>>, now: Instant) {
        match place {
            Place::Beside(planned) => self.deploy(name, *planned, now),
            Place::Instead => {
                let Some(model) = self.models.get(name) else { return };
                for replica in model.superseded() {
                    let detail = "another plan takes its devices";
                    replica.advance(ReplicaState::broken(BreakCause::Replanned, detail));
                }
            }
        }
    }

    /// Looks whether models that are served in full would be served better with workers that came since, once those have
    /// stayed for a while.
    pub(super) fn grow(&mut self, live: &Workers, now: Instant) {
        let have_stayed = |delay: Duration| now >= self.workers_changed_at + delay;
        let may_grow = !self.is_freeing() && !self.is_planning() && !self.estranged.is_active(now);
        if !may_grow || !self.config.replan_delay.is_some_and(have_stayed) {
            return;
        }
        let served: Vec<String> = self
            .models
            .iter()
            .filter(|(_, model)| model.is_complete() && model.description.is_some())
            .map(|(name, _)| name.clone())
            .collect();
        for name in served {
            match self.models.get(&name).map(|model| model.growth) {
                Some(Growth::Unknown) if !self.is_planning() => self.ask_for_growth(&name, live, now),
                Some(Growth::Add(count)) => self.note(&name, |model| {
                    tracing::info!(model = name, count, "workers came: more replicas are planned");
                    model.wanted_replicas = Some(model.num_staying() + count);
                    model.growth = Growth::Unknown;
                }),
                Some(growth @ (Growth::Move | Growth::Replace)) => self.note(&name, |model| {
                    if growth == Growth::Move || model.load_time.is_some_and(|time| time <= SHORT_LOAD) {
                        tracing::info!(
                            model = name,
                            ?growth,
                            "workers came: a better plan takes the place of the present one"
                        );
                        model.supersede();
                    }
                }),
                _ => {}
            }
        }
    }

    fn ask_for_growth(&mut self, name: &str, live: &Workers, now: Instant) {
        let free = self.topology(name, live, |_| true);
        if free.devices.is_empty() {
            self.note(name, |model| model.growth = Growth::None);
            return;
        }
        let all = self.topology(name, live, |replica| replica.model != name);
        let Some((planning, model)) = self.planning(name, now).zip(self.models.get(name)) else { return };
        let present: Vec<Arc<Replica>> = model.staying().cloned().collect();
        let (policy, name) = (model.spec.policy, name.to_owned());
        let work = move || {
            let (free, all) = (planning.plan(&free, &policy).ok(), planning.plan(&all, &policy).ok());
            growth(&policy, &present, free.as_ref(), all.as_ref())
        };
        self.attempt(name.clone(), async move {
            match tokio::task::spawn_blocking(work).await {
                Ok(growth) => Event::Compared { model: name, asked: now, growth },
                Err(error) => Event::Failed { model: name, problem: format!("planning failed: {error}") },
            }
        });
    }
}

/// What is best for a model: what it has, the plan over the `free` devices beside it or instead, or that over `all`.
fn growth(policy: &Policy, present: &[Arc<Replica>], free: Option<&Planned>, all: Option<&Planned>) -> Growth {
    let present = present.iter().filter_map(|replica| {
        let plan = lockstep_sharding::decode(&replica.load.plan).ok()?;
        Some(Rates::new(&replica.plan, &plan))
    });
    let present: Vec<Rates> = present.collect();
    let worth_of = |planned: Option<&Planned>| planned.map_or(0.0, |planned| worth(rates(&planned.plan)));
    let (now, moved, replaced) = (worth(present.iter().copied()), worth_of(free), worth_of(all));
    let more = free.filter(|_| policy.replicas.is_none());
    let added = more.map_or(0.0, |more| worth(present.iter().copied().chain(rates(&more.plan))));
    let growth = if added.max(moved).max(replaced) < BETTER * now {
        Growth::None
    } else if added >= BESIDE * moved.max(replaced) {
        Growth::Add(more.map_or(0, |more| more.plan.replicas.len()))
    } else if moved >= BESIDE * replaced {
        Growth::Move
    } else {
        Growth::Replace
    };
    tracing::debug!(%policy, now, added, moved, replaced, ?growth, "compared plans");
    growth
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_replicas_and_faster_ones_are_worth_more() {
        let rates = |decode, full| Rates { decode, full };
        let worth = |replicas: &[Rates]| worth(replicas.iter().copied());
        assert!(worth(&[rates(10.0, 100.0)]) * BETTER <= worth(&[rates(10.0, 100.0), rates(10.0, 100.0)]));
        // A slow one beside a fast one does not help.
        assert!(worth(&[rates(10.0, 100.0), rates(2.0, 20.0)]) < worth(&[rates(10.0, 100.0)]));
        // Two ranks that halve the time of a token win over two copies.
        assert!(worth(&[rates(18.0, 180.0)]) * BESIDE > worth(&[rates(10.0, 100.0), rates(10.0, 100.0)]));
    }
}
