//! [`Commands`]: dispatches that wait to be submitted, with the inputs that they share.
//! For: the operations, which add to it, and whoever needs to read what they computed.
//! Invariant: dispatches execute in the order in which they were added, each after all writes of those before. Inputs
//! and uploads reach the GPU before the dispatches that were added after them, and none added before sees them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use ahash::RandomState;
use wgpu::{
    BindGroup, BindGroupDescriptor, BindGroupEntry, Buffer, BufferBinding, CommandBuffer, CommandEncoderDescriptor,
    ComputePassDescriptor,
};

use super::{
    gpu::{Gpu, Pipeline},
    parameters::{Parameters, Words},
    reading::Reading,
};
use crate::KernelError;

/// Bytes of inputs that the first buffer holds.
const INPUT_BYTES: usize = 1 << 20;
/// Inputs begin at multiples of it, as bindings must.
const ALIGNMENT: usize = 256;
/// Dispatches below which a list is encoded when it is submitted.
const LEAST_PREPARED: usize = 8;
/// Rows of parameters that there are at least.
const MIN_PARAMETER_ROWS: usize = 512;
/// Bind groups that are kept.
const MAX_BIND_GROUPS: usize = 1 << 14;

/// A part of a buffer, for a binding.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Binding {
    /// The buffer, which every dispatch names anew: a handle of wgpu's takes several counters to share, this takes one.
    pub buffer: Arc<Buffer>,
    /// Where the part begins, a multiple of 256.
    pub offset: u64,
    /// Its bytes, a multiple of 4; not 0.
    pub num_bytes: u64,
}

impl Binding {
    /// All of a buffer.
    pub fn whole(buffer: &Arc<Buffer>) -> Self {
        Self { buffer: Arc::clone(buffer), offset: 0, num_bytes: buffer.size() }
    }
}

#[derive(PartialEq)]
struct Dispatch {
    pipeline: Arc<Pipeline>,
    bind_group: Arc<BindGroup>,
    parameters: Words,
    grid: [u32; 3],
}

/// A list of dispatches as it was submitted. One that came twice in a row is encoded once more while the GPU executes it, as it
/// may well come again: most decode steps are the lists of the step before, with other inputs.
struct SubmittedList {
    dispatches: Vec<Dispatch>,
    copy: Option<Copy>,
    is_repeated: bool,
    prepared: Option<CommandBuffer>,
}

/// What is read back after the dispatches.
#[derive(Clone, PartialEq)]
struct Copy {
    source: Binding,
    target: Buffer,
}

/// Inputs in one buffer.
struct Inputs {
    buffer: Arc<Buffer>,
    staged: Vec<u8>,
    /// Bytes that were sent.
    num_sent: usize,
}

impl Inputs {
    fn new(gpu: &Gpu, num_bytes: usize) -> Result<Self, KernelError> {
        Ok(Self { buffer: gpu.buffer("inputs", num_bytes as u64)?, staged: Vec::new(), num_sent: 0 })
    }

    fn has_room(&self, num_bytes: usize) -> bool {
        self.staged.len() + num_bytes <= self.buffer.size() as usize
    }
}

/// Dispatches that wait, and their inputs.
pub struct Commands {
    gpu: Arc<Gpu>,
    waiting: Vec<Dispatch>,
    /// Of the long lists, the last that began a step (or was all of it, or came outside of steps), and the last after a head start.
    submitted: [Option<SubmittedList>; 2],
    bind_groups: HashMap<(Arc<Pipeline>, Vec<Binding>), Arc<BindGroup>, RandomState>,
    /// Inputs of the open step, or since the last submission; the last one takes more.
    inputs: Vec<Inputs>,
    is_step_open: bool,
    /// Whether the open step had its head start.
    has_started: bool,
    is_rehearsal: bool,
    /// Rows for the parameters, where they are no immediates.
    parameters: Option<Parameters>,
    /// What was read last, to be used again.
    read_back: Arc<Mutex<Option<Buffer>>>,
    num_submissions: u64,
    num_dispatches: u64,
}

impl Commands {
    /// None yet.
    ///
    /// # Errors
    /// [`KernelError::Device`] if memory is short.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, KernelError> {
        Ok(Self {
            inputs: vec![Inputs::new(gpu, INPUT_BYTES)?],
            is_step_open: false,
            has_started: false,
            is_rehearsal: false,
            gpu: Arc::clone(gpu),
            waiting: Vec::new(),
            submitted: [None, None],
            bind_groups: HashMap::default(),
            parameters: None,
            read_back: Arc::default(),
            num_submissions: 0,
            num_dispatches: 0,
        })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Submissions and dispatches so far.
    pub fn counts(&self) -> (u64, u64) {
        (self.num_submissions, self.num_dispatches)
    }

    /// From here on inputs are kept until the step ends.
    pub fn open_step(&mut self) {
        self.is_step_open = true;
    }

    /// Whether dispatches are forgotten instead of executed, once their pipelines are compiled.
    pub fn rehearse(&mut self, is_rehearsal: bool) {
        self.waiting.clear();
        self.is_rehearsal = is_rehearsal;
    }

    /// Whether inputs are kept until the step ends.
    pub fn is_step_open(&self) -> bool {
        self.is_step_open
    }

    /// Submits what waits.
    ///
    /// # Errors
    /// [`KernelError::Device`] if wgpu refuses it.
    pub fn close_step(&mut self) -> Result<(), KernelError> {
        self.is_step_open = false;
        let submitted = self.submit();
        self.has_started = false;
        self.forget_inputs();
        submitted
    }

    /// Forgets what waits. A head start is executed all the same.
    pub fn abandon_step(&mut self) {
        self.is_step_open = false;
        self.has_started = false;
        self.waiting.clear();
        self.forget_inputs();
    }

    fn forget_inputs(&mut self) {
        self.inputs.drain(..self.inputs.len() - 1);
        for inputs in &mut self.inputs {
            inputs.staged.clear();
            inputs.num_sent = 0;
        }
    }

    /// Keeps values for the dispatches that are added until the step ends or, outside of steps, until the next
    /// submission.
    ///
    /// # Errors
    /// [`KernelError::Device`] if memory is short.
    pub fn stage<T: bytemuck::NoUninit>(&mut self, values: &[T]) -> Result<Binding, KernelError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let room = bytes.len().max(16).next_multiple_of(ALIGNMENT);
        if !self.inputs.last().is_some_and(|inputs| inputs.has_room(room)) {
            let size = self.inputs.iter().map(|inputs| inputs.buffer.size() as usize).max().unwrap_or(0);
            self.inputs.push(Inputs::new(&self.gpu, size.max(2 * room))?);
        }
        let index = self.inputs.len() - 1;
        let Inputs { buffer, staged, .. } = &mut self.inputs[index];
        let offset = staged.len();
        staged.extend_from_slice(bytes);
        staged.resize(offset + room, 0);
        // All of the buffer from there on: equal calls then have equal bindings, whatever their lengths.
        let num_bytes = buffer.size() - offset as u64;
        Ok(Binding { buffer: buffer.clone(), offset: offset as u64, num_bytes })
    }

    /// Adds a dispatch of `grid` workgroups. The bindings are those of the pipeline's source, in order.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the grid is larger than the adapter takes.
    pub fn dispatch(
        &mut self,
        pipeline: &Arc<Pipeline>,
        bindings: Vec<Binding>,
        parameters: &[u32],
        grid: [usize; 3],
    ) -> Result<(), KernelError> {
        let limit = self.gpu.limits().max_compute_workgroups_per_dimension;
        let is_small = |size: &usize| u32::try_from(*size).is_ok_and(|size| size <= limit);
        let mut words = Words::default();
        if !grid.iter().all(is_small) || parameters.len() > words.len() {
            return Err(self.gpu.error(format!("{}: a grid of {grid:?} workgroups, at most {limit}", pipeline.name)));
        }
        if grid.contains(&0) {
            return Ok(());
        }
        words[..parameters.len()].copy_from_slice(parameters);
        let bind_group = self.bind_group(pipeline, bindings);
        let grid = grid.map(|size| size as u32);
        self.waiting.push(Dispatch { pipeline: Arc::clone(pipeline), bind_group, parameters: words, grid });
        Ok(())
    }

    /// The number of the dispatch that was added last.
    pub fn last_dispatch(&self) -> u64 {
        self.num_dispatches + self.waiting.len() as u64
    }

    /// Takes a dispatch back if it waits and none was added since; whether it did.
    pub fn take_back(&mut self, number: u64) -> bool {
        self.last_dispatch() == number && self.waiting.pop().is_some()
    }

    fn bind_group(&mut self, pipeline: &Arc<Pipeline>, bindings: Vec<Binding>) -> Arc<BindGroup> {
        let key = (Arc::clone(pipeline), bindings);
        if let Some(known) = self.bind_groups.get(&key) {
            return Arc::clone(known);
        }
        let mut entries = Vec::with_capacity(key.1.len());
        for (number, binding) in pipeline.bindings.iter().zip(&key.1) {
            let size = std::num::NonZeroU64::new(binding.num_bytes);
            let buffer = BufferBinding { buffer: &binding.buffer, offset: binding.offset, size };
            entries.push(BindGroupEntry { binding: *number, resource: wgpu::BindingResource::Buffer(buffer) });
        }
        let bind_group = Arc::new(self.gpu.device.create_bind_group(&BindGroupDescriptor {
            label: Some(pipeline.name),
            layout: &pipeline.layout,
            entries: &entries,
        }));
        if self.bind_groups.len() >= MAX_BIND_GROUPS {
            self.bind_groups.clear();
        }
        self.bind_groups.insert(key, Arc::clone(&bind_group));
        bind_group
    }

    /// Sends what waits to the GPU, without waiting for it.
    ///
    /// # Errors
    /// [`KernelError::Device`] if wgpu refuses it.
    pub fn submit(&mut self) -> Result<(), KernelError> {
        self.submit_and_copy(None)?;
        self.prepare();
        Ok(())
    }

    /// Submits what waits if it is the first of the open step and enough for a head start, so that the GPU computes while the
    /// rest is described. Nothing of it can be taken back then.
    ///
    /// # Errors
    /// [`KernelError::Device`] if wgpu refuses it.
    pub fn start(&mut self) -> Result<(), KernelError> {
        if !self.is_step_open || self.has_started || self.waiting.len() < self.gpu.options().head_start {
            return Ok(());
        }
        self.submit_and_copy(None)?;
        self.has_started = true;
        Ok(())
    }

    fn submit_and_copy(&mut self, copy: Option<Copy>) -> Result<(), KernelError> {
        if self.is_rehearsal {
            self.waiting.clear();
        }
        if self.waiting.is_empty() && copy.is_none() {
            return Ok(());
        }
        for Inputs { buffer, staged, num_sent } in &mut self.inputs {
            if *num_sent < staged.len() {
                self.gpu.queue.write_buffer(buffer, *num_sent as u64, &staged[*num_sent..]);
                *num_sent = staged.len();
            }
        }
        let dispatches = std::mem::take(&mut self.waiting);
        self.send_parameters(&dispatches);
        self.num_dispatches += dispatches.len() as u64;
        self.num_submissions += 1;
        if dispatches.len() < LEAST_PREPARED {
            self.gpu.queue.submit([self.encode(&dispatches, copy.as_ref())]);
        } else {
            self.submit_long(dispatches, copy);
        }
        if !self.is_step_open {
            self.forget_inputs();
        }
        self.gpu.check()
    }

    /// Sends the parameters of dispatches where these are no immediates.
    fn send_parameters(&mut self, dispatches: &[Dispatch]) {
        let Some(layout) = self.gpu.parameter_layout() else { return };
        let known = self.parameters.take().filter(|known| known.num_rows() >= dispatches.len());
        let parameters = known.unwrap_or_else(|| {
            // What was prepared refers to the rows of before.
            self.submitted = [None, None];
            Parameters::new(&self.gpu.device, layout, dispatches.len().next_power_of_two().max(MIN_PARAMETER_ROWS))
        });
        parameters.send(&self.gpu.queue, dispatches.iter().map(|dispatch| &dispatch.parameters));
        self.parameters = Some(parameters);
    }

    /// Submits what was prepared if that is the list.
    fn submit_long(&mut self, dispatches: Vec<Dispatch>, copy: Option<Copy>) {
        let place = usize::from(self.has_started);
        let before = self.submitted[place].take().filter(|list| list.dispatches == dispatches && list.copy == copy);
        let is_repeated = before.is_some();
        let prepared = before.and_then(|list| list.prepared);
        let commands = prepared.unwrap_or_else(|| self.encode(&dispatches, copy.as_ref()));
        self.gpu.queue.submit([commands]);
        self.submitted[place] = Some(SubmittedList { dispatches, copy, is_repeated, prepared: None });
    }

    /// Encodes what came twice once more.
    fn prepare(&mut self) {
        let mut lists = std::mem::take(&mut self.submitted);
        for list in lists.iter_mut().flatten().filter(|list| list.is_repeated && list.prepared.is_none()) {
            list.prepared = Some(self.encode(&list.dispatches, list.copy.as_ref()));
        }
        self.submitted = lists;
    }

    fn encode(&self, dispatches: &[Dispatch], copy: Option<&Copy>) -> CommandBuffer {
        let mut encoder = self.gpu.device.create_command_encoder(&CommandEncoderDescriptor { label: Some("step") });
        if !dispatches.is_empty() {
            let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor { label: None, timestamp_writes: None });
            for (index, dispatch) in dispatches.iter().enumerate() {
                pass.set_pipeline(&dispatch.pipeline.pipeline);
                pass.set_bind_group(0, &*dispatch.bind_group, &[]);
                match &self.parameters {
                    Some(parameters) => {
                        let (row, offset) = parameters.row(index);
                        pass.set_bind_group(1, row, &[offset]);
                    }
                    None => pass.set_immediates(0, bytemuck::cast_slice(&dispatch.parameters)),
                }
                pass.dispatch_workgroups(dispatch.grid[0], dispatch.grid[1], dispatch.grid[2]);
            }
        }
        if let Some(Copy { source, target }) = copy {
            encoder.copy_buffer_to_buffer(&source.buffer, source.offset, target, 0, source.num_bytes);
        }
        encoder.finish()
    }

    /// Writes to the start of a buffer, after what waits.
    ///
    /// # Errors
    /// [`KernelError::Device`] if wgpu refuses it.
    pub fn write(&mut self, buffer: &Buffer, values: &[f32]) -> Result<(), KernelError> {
        self.submit()?;
        self.gpu.queue.write_buffer(buffer, 0, bytemuck::cast_slice(values));
        self.gpu.check()
    }

    /// What a part of a buffer holds once all that waits is done, as 32-bit values. Waits for the GPU.
    ///
    /// # Errors
    /// [`KernelError::Device`] if the GPU fails or does not answer.
    pub fn read<T: bytemuck::Pod>(&mut self, part: &Binding) -> Result<Vec<T>, KernelError> {
        if self.is_rehearsal {
            self.submit()?;
            return Ok(vec![T::zeroed(); part.num_bytes as usize / size_of::<T>()]);
        }
        let reading = self.read_later(part)?;
        self.gpu.wait()?;
        reading.arrived()
    }

    /// The same without waiting.
    ///
    /// # Errors
    /// [`KernelError::Device`] if wgpu refuses it.
    pub fn read_later(&mut self, part: &Binding) -> Result<Reading, KernelError> {
        let target = Reading::target(&self.gpu, &self.read_back, part.num_bytes);
        self.submit_and_copy(Some(Copy { source: part.clone(), target: target.clone() }))?;
        self.prepare();
        Ok(Reading::new(&self.gpu, &self.read_back, target, part.num_bytes))
    }
}
