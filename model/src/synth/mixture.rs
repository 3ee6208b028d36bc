//! Which type each matrix of a synthesized checkpoint gets.
//! For: [`super::SynthSpec`].
//! Invariant: a row is a whole number of blocks of the type that is chosen.
//! Source: llama.cpp `llama_tensor_get_type`.

use std::{fmt, str::FromStr};

use lockstep_formats::{GgmlType, UnsupportedType};
use lockstep_sharding::TensorRole;

use super::SynthSpec;

/// Element types of the matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// One type for all.
    Uniform(GgmlType),
    /// llama.cpp's `Q4_K_M`: Q4_K, with Q6_K for the head and for half of the value and down projections.
    Q4KM,
}

impl FromStr for Quantization {
    type Err = UnsupportedType;

    /// `q4_k_m` or the name of a type, in any case.
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        if name.eq_ignore_ascii_case("q4_k_m") { Ok(Self::Q4KM) } else { name.parse().map(Self::Uniform) }
    }
}

impl fmt::Display for Quantization {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform(ggml_type) => ggml_type.fmt(formatter),
            Self::Q4KM => formatter.write_str("Q4_K_M"),
        }
    }
}

impl Quantization {
    /// The type of a matrix whose rows have `columns` elements.
    pub(super) fn type_of(self, spec: &SynthSpec, role: TensorRole, layer: Option<usize>, columns: usize) -> GgmlType {
        let wanted = match self {
            Self::Uniform(ggml_type) => ggml_type,
            Self::Q4KM => q4_k_m(spec, role, layer.unwrap_or(0)),
        };
        let fits = |ggml_type: GgmlType| columns.is_multiple_of(ggml_type.block_elements());
        if fits(wanted) {
            return wanted;
        }
        // A row that is no multiple of 256 takes a type of 32 that is at least as fine; other rows stay floats.
        let small = match wanted {
            GgmlType::Q2_K | GgmlType::Q3_K => GgmlType::Q4_0,
            GgmlType::Q4_K => GgmlType::Q5_0,
            GgmlType::Q5_K => GgmlType::Q5_1,
            _ => GgmlType::Q8_0,
        };
        if fits(small) { small } else { GgmlType::F16 }
    }
}

fn q4_k_m(spec: &SynthSpec, role: TensorRole, layer: usize) -> GgmlType {
    let layers = spec.num_hidden_layers;
    let eighth = layers / 8;
    let is_sensitive = layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2;
    let is_widely_shared = spec.num_attention_heads / spec.num_key_value_heads.max(1) >= 8;
    match role {
        TensorRole::Output => GgmlType::Q6_K,
        TensorRole::TokenEmbedding if spec.tie_word_embeddings => GgmlType::Q6_K,
        TensorRole::Value | TensorRole::Down if is_sensitive => GgmlType::Q6_K,
        // The 70B models, where eight query heads share a value head.
        TensorRole::Value if is_widely_shared => GgmlType::Q5_K,
        _ => GgmlType::Q4_K,
    }
}
