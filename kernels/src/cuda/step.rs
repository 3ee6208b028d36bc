//! A forward step as a list of calls: collected while the host describes it, launched when a result is needed, and
//! replayed as a recorded graph when the same list comes again.
//! For: [`CudaDevice`](super::CudaDevice). Decode steps repeat: only the content of their inputs changes, so hundreds of
//! launches become one. Steps of other shapes are launched call by call.
//! Invariant: a list is launched in its order, after its inputs were sent; a recorded list shares the memory of its calls.

use std::sync::Arc;

use super::{
    Gpu, Graph, StepInputs,
    call::{Call, Launchers},
};
use crate::KernelError;

/// Shorter lists are not worth recording.
const MIN_RECORDED_CALLS: usize = 8;
/// Lists that are remembered; the one that was not used for longest makes room.
const MAX_KNOWN_STEPS: usize = 64;
/// Calls that wait for other GPUs, launched one by one before the host waits for them. The driver keeps about a thousand
/// launches; if one that waits for a lost rank let them pile up, the next would block where nothing looks after the group.
const MAX_COLLECTIVES_AHEAD: usize = 16;

/// A list that came before.
struct KnownStep {
    /// Destroyed before the memory that it uses.
    recording: Recording,
    calls: Vec<Call>,
}

/// What became of recording a list.
enum Recording {
    /// Nothing yet: at the first time a list loads kernels and takes scratch memory, which cannot be recorded.
    None,
    Done(Graph),
    /// It cannot be recorded, for want of memory perhaps, and is launched call by call.
    Refused,
}

/// The step that is being described, and those that came before.
pub(super) struct Steps {
    gpu: Arc<Gpu>,
    pub launchers: Launchers,
    pub inputs: StepInputs,
    pending: Vec<Call>,
    is_open: bool,
    /// The latest first.
    known: Vec<KnownStep>,
}

impl Steps {
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, KernelError> {
        Ok(Self {
            gpu: Arc::clone(gpu),
            launchers: Launchers::new(gpu)?,
            inputs: StepInputs::new(gpu)?,
            pending: Vec::new(),
            is_open: false,
            known: Vec::new(),
        })
    }

    /// Whether calls are collected.
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// Begins a step: calls are collected from now on.
    pub fn open(&mut self) {
        self.discard();
        self.is_open = true;
    }

    /// Ends a step with what is still pending.
    pub fn close(&mut self) -> Result<(), KernelError> {
        self.is_open = false;
        self.flush()
    }

    /// Ends a step that failed.
    pub fn abandon(&mut self) {
        self.is_open = false;
        self.discard();
    }

    fn discard(&mut self) {
        self.pending.clear();
        self.inputs.clear();
    }

    /// Adds a call; outside a step it is launched at once.
    pub fn push(&mut self, call: Call) -> Result<(), KernelError> {
        self.pending.push(call);
        if self.is_open {
            return Ok(());
        }
        let launched = self.flush();
        self.discard();
        launched
    }

    /// Takes the last call back if it is still pending and `is_wanted`.
    pub fn pop_if(&mut self, is_wanted: impl FnOnce(&Call) -> bool) -> Option<Call> {
        self.pending.pop_if(|call| is_wanted(call))
    }

    /// Launches what is pending.
    pub fn flush(&mut self) -> Result<(), KernelError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        self.inputs.send()?;
        // A rehearsal has launched nothing that a recording could rely on.
        if self.pending.len() < MIN_RECORDED_CALLS || self.gpu.is_rehearsing() {
            let launched = self.launch_each(&self.pending);
            self.pending.clear();
            return launched;
        }
        match self.known.iter().position(|step| step.calls == self.pending) {
            Some(index) => self.known[..=index].rotate_right(1),
            None => {
                self.launch_each(&self.pending)?;
                self.known.truncate(MAX_KNOWN_STEPS - 1);
                let calls = std::mem::take(&mut self.pending);
                self.known.insert(0, KnownStep { recording: Recording::None, calls });
                return Ok(());
            }
        }
        self.pending.clear();
        let Some(KnownStep { calls, recording }) = self.known.first_mut() else { return Ok(()) };
        if matches!(recording, Recording::None) {
            let launch = || calls.iter().try_for_each(|call| self.launchers.launch(call));
            *recording = match Graph::record(&self.gpu, launch) {
                Ok(graph) => Recording::Done(graph),
                Err(error) => {
                    tracing::warn!(%error, num_calls = calls.len(), "a step is not recorded and stays slow");
                    Recording::Refused
                }
            };
        }
        match self.known.first() {
            Some(KnownStep { recording: Recording::Done(graph), .. }) => graph.replay(),
            Some(KnownStep { calls, .. }) => self.launch_each(calls),
            None => Ok(()),
        }
    }

    /// Launches calls one by one.
    fn launch_each(&self, calls: &[Call]) -> Result<(), KernelError> {
        let mut num_ahead = 0;
        for call in calls {
            self.launchers.launch(call)?;
            num_ahead += usize::from(matches!(call, Call::Collective(_) | Call::SumAndNorm(..)));
            if num_ahead == MAX_COLLECTIVES_AHEAD {
                self.gpu.synchronize()?;
                num_ahead = 0;
            }
        }
        Ok(())
    }
}

impl Drop for Steps {
    /// A communicator is closed once no recording of any step knows it.
    fn drop(&mut self) {
        self.known.iter_mut().for_each(|step| step.recording = Recording::None);
    }
}
