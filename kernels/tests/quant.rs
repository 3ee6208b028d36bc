//! Reference dequantization against candle-core's, on random blocks of every type that candle has.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod blocks;

use blocks::random_matrix;
use candle_core::{
    Device,
    quantized::{GgmlDType, ggml_file::qtensor_from_ggml},
};
use lockstep_formats::GgmlType;
use lockstep_kernels::quant::{BlockParts, dequantize};

fn candle_type(ggml_type: GgmlType) -> Option<GgmlDType> {
    Some(match ggml_type {
        GgmlType::F32 => GgmlDType::F32,
        GgmlType::F16 => GgmlDType::F16,
        GgmlType::Q4_0 => GgmlDType::Q4_0,
        GgmlType::Q4_1 => GgmlDType::Q4_1,
        GgmlType::Q5_0 => GgmlDType::Q5_0,
        GgmlType::Q5_1 => GgmlDType::Q5_1,
        GgmlType::Q8_0 => GgmlDType::Q8_0,
        GgmlType::Q2_K => GgmlDType::Q2K,
        GgmlType::Q3_K => GgmlDType::Q3K,
        GgmlType::Q4_K => GgmlDType::Q4K,
        GgmlType::Q5_K => GgmlDType::Q5K,
        GgmlType::Q6_K => GgmlDType::Q6K,
        // candle cannot load tensors of these; `other_types_are_what_ggml_says` has them.
        GgmlType::BF16 | GgmlType::Q8_1 | GgmlType::Q8_K => return None,
    })
}

#[test]
fn dequantization_is_candles() {
    let mut num_types = 0;
    for ggml_type in GgmlType::all() {
        let Some(candle_type) = candle_type(ggml_type) else { continue };
        num_types += 1;
        let (rows, columns) = (64, 512);
        let matrix = random_matrix(ggml_type, rows, columns, 11);
        let mut values = vec![0.0; rows * columns];
        dequantize(ggml_type, &matrix.bytes, &mut values);
        let tensor = qtensor_from_ggml(candle_type, &matrix.bytes, vec![rows, columns], &Device::Cpu).unwrap();
        let expected = tensor.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (index, (value, expected)) in values.iter().zip(&expected).enumerate() {
            let error = (value - expected).abs();
            assert!(error <= 1e-6 * expected.abs() + 1e-9, "{ggml_type} {index}: {value}, candle says {expected}");
        }
    }
    assert_eq!(num_types, 12);
}

#[test]
fn other_types_are_what_ggml_says() {
    let matrix = random_matrix(GgmlType::Q8_1, 1, 64, 1);
    let mut values = vec![0.0; 64];
    dequantize(GgmlType::Q8_1, &matrix.bytes, &mut values);
    for (index, value) in values.iter().enumerate() {
        let block = &matrix.bytes[index / 32 * 36..];
        let d = half::f16::from_le_bytes([block[0], block[1]]).to_f32();
        assert_eq!(*value, d * f32::from(block[4 + index % 32] as i8));
    }
    let matrix = random_matrix(GgmlType::Q8_K, 1, 512, 1);
    let mut values = vec![0.0; 512];
    dequantize(GgmlType::Q8_K, &matrix.bytes, &mut values);
    for (index, value) in values.iter().enumerate() {
        let block = &matrix.bytes[index / 256 * 292..];
        let d = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
        assert_eq!(*value, d * f32::from(block[4 + index % 256] as i8));
    }
    let mut value = [0.0];
    dequantize(GgmlType::BF16, &[0x49, 0xc0], &mut value);
    assert_eq!(value, [-3.140_625]);
}

#[test]
fn short_bytes_read_as_zeros() {
    for ggml_type in GgmlType::all() {
        let parts = BlockParts::read(ggml_type, &[]);
        assert!(parts.d == 0.0 && parts.m == 0.0);
        let mut values = [7.0; 256];
        dequantize(ggml_type, &[1], &mut values);
        assert_eq!(values, [7.0; 256], "{ggml_type}: no whole block, nothing written");
    }
}
