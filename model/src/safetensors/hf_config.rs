//! Hyper-parameters from `config.json`: `LlamaForCausalLM` and `MistralForCausalLM`.
//! For: the folder reader in the parent module.
//! Invariant: a setting that would change the result and is not implemented is refused by name, never ignored.

use super::json::JsonObject;
use crate::{
    ModelConfig, ModelError, RopeConfig, RopeStyle,
    rope::{RopeScaling, rope_config},
};

/// Reads the configuration, and whether the logits use the token embedding.
pub(super) fn read(json: &JsonObject) -> Result<(ModelConfig, bool), ModelError> {
    check_architecture(json)?;
    let hidden_size = json.require("hidden_size")?;
    let num_attention_heads: usize = json.require("num_attention_heads")?;
    let head_dim = match json.get("head_dim")? {
        Some(head_dim) => head_dim,
        None => usize::checked_div(hidden_size, num_attention_heads).unwrap_or(0),
    };
    let context: usize = json.get("max_position_embeddings")?.unwrap_or(2048);
    let mut config = ModelConfig {
        architecture: "llama".into(),
        hidden_size,
        intermediate_size: json.require("intermediate_size")?,
        num_hidden_layers: json.require("num_hidden_layers")?,
        num_attention_heads,
        num_key_value_heads: json.get("num_key_value_heads")?.unwrap_or(num_attention_heads),
        head_dim,
        vocab_size: json.require("vocab_size")?,
        max_position_embeddings: context,
        rms_norm_eps: json.get("rms_norm_eps")?.unwrap_or(1e-6),
        rope: RopeConfig { style: RopeStyle::Halves, rotary_dim: head_dim, frequencies: Vec::new(), magnitude: 1.0 },
    };
    config.check(json.path())?;
    let (theta, scaling) = rope_scaling(json, context)?;
    config.rope = rope_config(RopeStyle::Halves, head_dim, theta, &scaling)
        .map_err(|problem| json.invalid("rope_scaling", problem))?;
    // Inside its window sliding attention is full attention: Mistral 0.1 serves as much as the window holds.
    if let Some(window) = json.get::<usize>("sliding_window")? {
        config.max_position_embeddings = context.min(window);
        config.check(json.path())?;
    }
    Ok((config, json.get("tie_word_embeddings")?.unwrap_or(false)))
}

fn check_architecture(json: &JsonObject) -> Result<(), ModelError> {
    let architectures: Vec<String> = json.get("architectures")?.unwrap_or_default();
    let model_type: String = json.get("model_type")?.unwrap_or_default();
    let (field, name) = match architectures.first() {
        Some(name) => ("architectures", name.as_str()),
        None => ("model_type", model_type.as_str()),
    };
    if !["LlamaForCausalLM", "MistralForCausalLM", "llama", "mistral"].contains(&name) {
        return Err(json.unsupported(field, name));
    }
    for field in ["attention_bias", "mlp_bias"] {
        if json.get::<bool>(field)? == Some(true) {
            return Err(json.unsupported(field, "true"));
        }
    }
    if let Some(activation) = json.get::<String>("hidden_act")?.filter(|name| name != "silu" && name != "swish") {
        return Err(json.unsupported("hidden_act", activation));
    }
    if json.value("quantization_config").is_some() {
        return Err(json.unsupported("quantization_config", "quantized weights in safetensors"));
    }
    Ok(())
}

/// Base and scaling, from `rope_parameters` or the older `rope_scaling` and `rope_theta`.
fn rope_scaling(json: &JsonObject, context: usize) -> Result<(f32, RopeScaling), ModelError> {
    let theta: f32 = json.get("rope_theta")?.unwrap_or(10_000.0);
    let none = RopeScaling::Linear { factor: 1.0, magnitude: 1.0 };
    let scaling = match json.object("rope_parameters")? {
        Some(parameters) => Some(parameters),
        None => json.object("rope_scaling")?,
    };
    let Some(scaling) = scaling else { return Ok((theta, none)) };
    let theta = scaling.get("rope_theta")?.unwrap_or(theta);
    for holder in [json, &scaling] {
        if let Some(part) = holder.get::<f32>("partial_rotary_factor")?.filter(|&part| part != 1.0) {
            return Err(holder.unsupported("partial_rotary_factor", part.to_string()));
        }
    }
    let (kind_key, kind) = match scaling.get::<String>("rope_type")? {
        Some(kind) => ("rope_type", kind),
        None => ("type", scaling.get("type")?.unwrap_or_else(|| "default".into())),
    };
    let positive = |key: &str| -> Result<Option<f32>, ModelError> {
        let number = scaling.get::<f32>(key)?;
        match number.filter(|number| !(number.is_finite() && *number > 0.0)) {
            Some(number) => Err(scaling.invalid(key, format!("expected a number above 0, got {number}"))),
            None => Ok(number),
        }
    };
    let required = |key: &str| positive(key)?.ok_or_else(|| scaling.invalid(key, "missing, expected a number above 0"));
    let scaling = match kind.as_str() {
        "default" => none,
        "linear" => RopeScaling::Linear { factor: required("factor")?, magnitude: 1.0 },
        "llama3" => RopeScaling::Llama3 {
            factor: required("factor")?,
            low_freq_factor: required("low_freq_factor")?,
            high_freq_factor: required("high_freq_factor")?,
            original_context: required("original_max_position_embeddings")?,
        },
        "yarn" => yarn(&scaling, context as f32, positive)?,
        other => return Err(scaling.unsupported(kind_key, other)),
    };
    Ok((theta, scaling))
}

fn yarn(
    scaling: &JsonObject,
    context: f32,
    positive: impl Fn(&str) -> Result<Option<f32>, ModelError>,
) -> Result<RopeScaling, ModelError> {
    for key in ["mscale", "mscale_all_dim"] {
        if let Some(number) = scaling.get::<f32>(key)? {
            return Err(scaling.unsupported(key, number.to_string()));
        }
    }
    if scaling.get::<bool>("truncate")? == Some(false) {
        return Err(scaling.unsupported("truncate", "false"));
    }
    let original_context = positive("original_max_position_embeddings")?.unwrap_or(context);
    let factor = positive("factor")?.unwrap_or(context / original_context);
    Ok(RopeScaling::Yarn {
        factor,
        original_context,
        beta_fast: positive("beta_fast")?.unwrap_or(32.0),
        beta_slow: positive("beta_slow")?.unwrap_or(1.0),
        magnitude: positive("attention_factor")?.unwrap_or(1.0 + 0.1 * factor.max(1.0).ln()),
    })
}
