//! [`Oracle`]: a device made of the plain-loop oracles, in f64 between f32 tensors.
//! For: whole steps of real devices. What those round by design is rounded here as well: keys and values to the type of
//! the cache, the activations that few rows multiply to 8 bits.

use std::collections::HashMap;

use lockstep_formats::Dtype;
use lockstep_kernels::{
    Device, KernelError,
    device::KvCacheSpec,
    group::{Collective, NoCommunicator, Sum},
    ops::{Attention, Candidates, Epilogue, HostMatrix, RopeAndStore, RopeTable, SampleRow},
    quant::dequantize,
    reference,
};

pub struct Oracle {
    /// Most rows that are multiplied as 8-bit activations.
    pub max_eight_bit_rows: usize,
}

/// Rows `[max_tokens, width]`.
pub struct Rows {
    width: usize,
    values: Vec<f32>,
}

/// Key and value by layer, slot and head.
pub struct Cache {
    block_size: usize,
    dtype: Dtype,
    tokens: HashMap<[usize; 3], (Vec<f32>, Vec<f32>)>,
}

impl Rows {
    fn first(&self, num_tokens: usize) -> &[f32] {
        &self.values[..num_tokens * self.width]
    }

    fn set(&mut self, values: impl IntoIterator<Item = f64>) {
        self.values.iter_mut().zip(values).for_each(|(to, value)| *to = value as f32);
    }
}

impl Oracle {
    fn products(&self, num_rows: usize, weight: &[HostMatrix], input: &Rows, epilogue: Epilogue) -> Vec<f64> {
        let mut input = input.first(num_rows).to_vec();
        if num_rows <= self.max_eight_bit_rows {
            input = reference::matmul::round_activations(&input);
        }
        reference::matmul::matmul(weight, &input, epilogue).into_iter().map(|(value, _)| value).collect()
    }
}

impl Device for Oracle {
    type Tensor = Rows;
    type Linear = Vec<HostMatrix>;
    type KvCache = Cache;
    type Communicator = NoCommunicator;

    fn name(&self) -> &'static str {
        "oracle"
    }

    fn tensor(&self, max_tokens: usize, width: usize) -> Result<Rows, KernelError> {
        Ok(Rows { width, values: vec![0.0; max_tokens * width] })
    }

    fn vector(&self, values: &[f32]) -> Result<Rows, KernelError> {
        Ok(Rows { width: values.len(), values: values.to_vec() })
    }

    fn linear(&self, matrices: Vec<HostMatrix>) -> Result<Vec<HostMatrix>, KernelError> {
        Ok(matrices)
    }

    fn kv_cache(&self, spec: KvCacheSpec, dtype: Dtype) -> Result<Cache, KernelError> {
        Ok(Cache { block_size: spec.block_size, dtype, tokens: HashMap::new() })
    }

    fn collective(
        &mut self,
        _: usize,
        _: &mut Rows,
        _: Collective,
        communicator: &NoCommunicator,
    ) -> Result<(), KernelError> {
        match *communicator {}
    }

    fn step<T, E: From<KernelError>>(&mut self, body: impl FnOnce(&mut Self) -> Result<T, E>) -> Result<T, E> {
        body(self)
    }

    fn embed(
        &mut self,
        table: &Vec<HostMatrix>,
        first_row: u32,
        token_ids: &[u32],
        output: &mut Rows,
    ) -> Result<(), KernelError> {
        let HostMatrix { ggml_type, columns, bytes, .. } = &table[0];
        let row_bytes = ggml_type.bytes_of(*columns).unwrap();
        for (id, row) in token_ids.iter().zip(output.values.chunks_exact_mut(*columns)) {
            dequantize(*ggml_type, &bytes[(id - first_row) as usize * row_bytes..][..row_bytes], row);
        }
        Ok(())
    }

    fn rms_norm(
        &mut self,
        num_tokens: usize,
        input: &Rows,
        weight: &Rows,
        epsilon: f32,
        output: &mut Rows,
    ) -> Result<(), KernelError> {
        output.set(reference::rms_norm::rms_norm(input.first(num_tokens), &weight.values, epsilon));
        Ok(())
    }

    fn matmul(
        &mut self,
        num_tokens: usize,
        weight: &Vec<HostMatrix>,
        input: &Rows,
        epilogue: Epilogue,
        output: &mut Rows,
    ) -> Result<(), KernelError> {
        output.set(self.products(num_tokens, weight, input, epilogue));
        Ok(())
    }

    fn matmul_add<E: From<KernelError>>(
        &mut self,
        num_tokens: usize,
        weight: &Vec<HostMatrix>,
        input: &Rows,
        hidden: &mut Rows,
        sum: Sum<'_, NoCommunicator, E>,
    ) -> Result<(), E> {
        let mut sums = self.products(num_tokens, weight, input, Epilogue::Store);
        match sum {
            Sum::Own => {}
            Sum::Hosts(all_reduce) => all_reduce(&mut sums)?,
            Sum::Devices(communicator) => match *communicator {},
        }
        let before = hidden.first(num_tokens).to_vec();
        hidden.set(before.into_iter().zip(sums).map(|(before, sum)| f64::from(before) + sum));
        Ok(())
    }

    fn rope_and_store(
        &mut self,
        call: &RopeAndStore<'_>,
        table: &RopeTable,
        qkv: &mut Rows,
        cache: &mut Cache,
    ) -> Result<(), KernelError> {
        qkv.set(reference::rope_and_store::rope(call, table, qkv.first(call.num_tokens())));
        let dtype = cache.dtype;
        let round = |value: &f32| match dtype {
            Dtype::F32 => *value,
            Dtype::F16 => half::f16::from_f32(*value).to_f32(),
            Dtype::Bf16 => half::bf16::from_f32(*value).to_f32(),
        };
        let round = |values: &[f32]| values.iter().map(round).collect();
        for (row, slot) in qkv.values.chunks_exact(qkv.width).zip(call.slot_mapping) {
            let heads: Vec<&[f32]> = row.chunks_exact(call.head_dim).skip(call.num_heads).collect();
            let (keys, values) = heads.split_at(call.num_key_value_heads);
            for (head, (key, value)) in keys.iter().zip(values).enumerate() {
                let place = [call.layer, *slot as usize, head];
                cache.tokens.insert(place, (round(key), round(value)));
            }
        }
        Ok(())
    }

    fn attention(
        &mut self,
        call: &Attention<'_>,
        qkv: &Rows,
        cache: &Cache,
        output: &mut Rows,
    ) -> Result<(), KernelError> {
        let rows = qkv.first(call.num_tokens());
        output.set(reference::attention::attention(call, rows, |sequence, position, head| {
            let block = call.sequences[sequence].block_table[position / cache.block_size] as usize;
            cache.tokens[&[call.layer, block * cache.block_size + position % cache.block_size, head]].clone()
        }));
        Ok(())
    }

    fn gather_rows(&mut self, rows: &[u32], input: &Rows, output: &mut Rows) -> Result<(), KernelError> {
        for (row, to) in rows.iter().zip(output.values.chunks_exact_mut(input.width)) {
            to.copy_from_slice(&input.values[*row as usize * input.width..][..input.width]);
        }
        Ok(())
    }

    fn sample(
        &mut self,
        rows: &[SampleRow],
        first_token: u32,
        logits: &mut Rows,
    ) -> Result<Vec<Candidates>, KernelError> {
        let logits = logits.values.chunks_exact(logits.width);
        Ok(rows.iter().zip(logits).map(|(row, logits)| reference::sample::sample(row, first_token, logits)).collect())
    }

    fn with_host<T, E: From<KernelError>>(
        &mut self,
        num_tokens: usize,
        tensor: &mut Rows,
        body: impl FnOnce(&mut [f32]) -> Result<T, E>,
    ) -> Result<T, E> {
        body(&mut tensor.values[..num_tokens * tensor.width])
    }
}
