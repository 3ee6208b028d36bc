//! A forward step as lists of calls: collected while the host describes it, launched when a result is needed, and
//! replayed as a recorded graph when the same list comes again. A short list of the first calls goes ahead, so that the GPU
//! works while the host describes the rest.
//! For: [`CudaDevice`](super::CudaDevice). Decode steps repeat: only the content of their inputs changes, so hundreds of
//! launches become two. Steps of other shapes are launched call by call.
//! Invariant: a list is launched in its order, after its inputs were sent; a recorded list shares the memory of its calls.

use std::sync::Arc;

use super::{
    Gpu, Graph, StepInputs,
    call::{Call, Launchers},
};
use crate::KernelError;

/// Shorter lists are not worth recording.
const MIN_RECORDED_CALLS: usize = 8;
/// Calls of a step that go ahead: two layers, which take longer than to describe all others.
const AHEAD_CALLS: usize = 16;
/// Lists that are remembered; the one that was not used for longest makes room.
const MAX_KNOWN_LISTS: usize = 128;
/// Calls that wait for other GPUs, launched one by one before the host waits for them. The driver keeps about a thousand
/// launches; if one that waits for a lost rank let them pile up, the next would block where nothing looks after the group.
const MAX_COLLECTIVES_AHEAD: usize = 16;

/// A list that came before.
struct KnownList {
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
    /// Whether some calls of the step went ahead.
    has_begun: bool,
    /// The latest first.
    known: Vec<KnownList>,
}

impl Steps {
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, KernelError> {
        Ok(Self {
            gpu: Arc::clone(gpu),
            launchers: Launchers::new(gpu)?,
            inputs: StepInputs::new(gpu)?,
            pending: Vec::new(),
            is_open: false,
            has_begun: false,
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
        self.has_begun = false;
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
        // Nothing before a matmul is taken back to be fused with what follows.
        if self.is_open && !self.has_begun && self.pending.len() >= AHEAD_CALLS && matches!(call, Call::Matmul(_)) {
            self.has_begun = true;
            self.flush()?;
        }
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
        // The calls are dropped once the GPU works.
        let launched = self.launch_pending();
        self.pending.clear();
        launched
    }

    fn launch_pending(&mut self) -> Result<(), KernelError> {
        // A rehearsal has launched nothing that a recording could rely on.
        if self.pending.len() < MIN_RECORDED_CALLS || self.gpu.is_rehearsing() {
            return self.launch_each(&self.pending);
        }
        let Some(index) = self.known.iter().position(|list| list.calls == self.pending) else {
            self.launch_each(&self.pending)?;
            self.known.truncate(MAX_KNOWN_LISTS - 1);
            let calls = std::mem::take(&mut self.pending);
            self.known.insert(0, KnownList { recording: Recording::None, calls });
            return Ok(());
        };
        self.known[..=index].rotate_right(1);
        let Some(KnownList { calls, recording }) = self.known.first_mut() else { return Ok(()) };
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
        match recording {
            Recording::Done(graph) => graph.replay(),
            _ => self.launch_each(&self.pending),
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
        self.known.iter_mut().for_each(|list| list.recording = Recording::None);
    }
}
