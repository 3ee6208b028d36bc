//! Random matrices of every type: random bits, but scales of a sane size.

use half::{bf16, f16};
use lockstep_formats::GgmlType;
use lockstep_kernels::ops::HostMatrix;
use rand::{Rng, RngCore, SeedableRng, rngs::StdRng};

/// Where a block of the type has f16 fields, and how large their values are to be.
fn f16_fields(ggml_type: GgmlType) -> &'static [(usize, f32)] {
    match ggml_type {
        GgmlType::Q4_0 | GgmlType::Q5_0 | GgmlType::Q8_0 => &[(0, 0.05)],
        GgmlType::Q4_1 | GgmlType::Q5_1 | GgmlType::Q8_1 => &[(0, 0.05), (2, 0.5)],
        GgmlType::Q2_K => &[(80, 0.02), (82, 0.02)],
        GgmlType::Q3_K => &[(108, 0.01)],
        GgmlType::Q4_K | GgmlType::Q5_K => &[(0, 0.002), (2, 0.01)],
        GgmlType::Q6_K => &[(208, 0.0005)],
        _ => &[],
    }
}

/// Rows of random bits with scales of both signs.
pub fn random_matrix(ggml_type: GgmlType, rows: usize, columns: usize, seed: u64) -> HostMatrix {
    let mut random = StdRng::seed_from_u64(seed);
    let mut bytes = vec![0; ggml_type.bytes_of(columns).unwrap() * rows];
    random.fill_bytes(&mut bytes);
    for block in bytes.chunks_exact_mut(ggml_type.block_bytes()) {
        let value = random.random_range(-1.0..1.0_f32);
        match ggml_type {
            GgmlType::F32 => block.copy_from_slice(&value.to_le_bytes()),
            GgmlType::F16 => block.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
            GgmlType::BF16 => block.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
            GgmlType::Q8_K => block[..4].copy_from_slice(&(value * 0.01).to_le_bytes()),
            _ => {}
        }
        for &(offset, size) in f16_fields(ggml_type) {
            let value = f16::from_f32(random.random_range(-size..size));
            block[offset..offset + 2].copy_from_slice(&value.to_le_bytes());
        }
    }
    HostMatrix { ggml_type, rows, columns, bytes }
}

/// Makes the values of blocks smaller by a power of two, as far as f16 goes.
#[allow(dead_code, reason = "not every test needs small values")]
pub fn shrink(matrix: &mut HostMatrix, factor: f32) {
    let HostMatrix { ggml_type, ref mut bytes, .. } = *matrix;
    for block in bytes.chunks_exact_mut(ggml_type.block_bytes()) {
        for &(offset, _) in f16_fields(ggml_type) {
            let field = &mut block[offset..offset + 2];
            let value = f16::from_le_bytes([field[0], field[1]]).to_f32() * factor;
            field.copy_from_slice(&f16::from_f32(value).to_le_bytes());
        }
    }
}
