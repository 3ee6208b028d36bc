//! [`Parameters`]: where dispatches find their parameters on adapters without immediates, as in browsers: the rows of a
//! uniform buffer.
//! For: [`Commands`](super::commands::Commands).
//! Invariant: row `i` belongs to dispatch `i` of a submission, whose dispatches are executed before the rows are sent anew.

use wgpu::{
    BindGroup, BindGroupDescriptor, BindGroupEntry, BindGroupLayout, BindGroupLayoutDescriptor, BindGroupLayoutEntry,
    BindingResource, BindingType, Buffer, BufferBinding, BufferBindingType, BufferDescriptor, BufferSize, BufferUsages,
    Device, Queue, ShaderStages,
};

use super::gpu::PARAMETER_BYTES;

/// Bytes of a row: bindings of uniforms begin at multiples of it, on every adapter.
const ROW_BYTES: usize = 256;

/// Parameters as words.
pub type Words = [u32; PARAMETER_BYTES as usize / 4];

/// Rows in the memory of a GPU.
pub struct Parameters {
    buffer: Buffer,
    bind_group: BindGroup,
}

/// What a pipeline expects as its second group of bindings.
pub fn layout(device: &Device) -> BindGroupLayout {
    let ty = BindingType::Buffer {
        ty: BufferBindingType::Uniform,
        has_dynamic_offset: true,
        min_binding_size: BufferSize::new(PARAMETER_BYTES.into()),
    };
    let entry = BindGroupLayoutEntry { binding: 0, visibility: ShaderStages::COMPUTE, ty, count: None };
    device.create_bind_group_layout(&BindGroupLayoutDescriptor { label: Some("parameters"), entries: &[entry] })
}

impl Parameters {
    /// So many rows.
    pub fn new(device: &Device, layout: &BindGroupLayout, num_rows: usize) -> Self {
        let buffer = device.create_buffer(&BufferDescriptor {
            label: Some("parameters"),
            size: (num_rows * ROW_BYTES) as u64,
            usage: BufferUsages::UNIFORM | BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let row = BufferBinding { buffer: &buffer, offset: 0, size: BufferSize::new(PARAMETER_BYTES.into()) };
        let bind_group = device.create_bind_group(&BindGroupDescriptor {
            label: Some("parameters"),
            layout,
            entries: &[BindGroupEntry { binding: 0, resource: BindingResource::Buffer(row) }],
        });
        Self { buffer, bind_group }
    }

    /// Rows that there are.
    pub fn num_rows(&self) -> usize {
        self.buffer.size() as usize / ROW_BYTES
    }

    /// Sends the rows of the next submission.
    pub fn send<'a>(&self, queue: &Queue, rows: impl Iterator<Item = &'a Words>) {
        let mut bytes = Vec::new();
        for words in rows {
            bytes.extend_from_slice(bytemuck::cast_slice(words));
            bytes.resize(bytes.len().next_multiple_of(ROW_BYTES), 0);
        }
        queue.write_buffer(&self.buffer, 0, &bytes);
    }

    /// The binding of a row, with its offset.
    pub fn row(&self, index: usize) -> (&BindGroup, u32) {
        (&self.bind_group, (index * ROW_BYTES) as u32)
    }
}
