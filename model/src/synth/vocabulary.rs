//! The tokenizer of every synthesized checkpoint: byte-level BPE with a few merges, and a ChatML template.
//! For: the streaming writer.
//! Invariant: every token has a text of its own, so that whatever random weights say can be shown.

use crate::gguf::{Metadata, MetadataArray, MetadataValue};

const SPECIAL_TOKENS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
const END_OF_TURN: u32 = 2;

/// Frequent pairs of English; each makes a token of two characters.
const MERGES: [&str; 24] = [
    "Ġ t", "Ġ a", "h e", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "Ġ w", "Ġ o", "e n", "Ġ c", "i t", "i s",
    "a n", "o r", "e s", "Ġ b", "e d", "Ġ f", "in g", "Ġ p",
];

/// Special tokens, bytes and merged tokens.
pub(super) const NUM_FIXED_TOKENS: usize = SPECIAL_TOKENS.len() + 256 + MERGES.len();

const CHAT_TEMPLATE: &str = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + \
     message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
     {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Adds the `tokenizer.*` keys for a vocabulary of at least [`NUM_FIXED_TOKENS`].
pub(super) fn put_vocabulary(metadata: &mut Metadata, vocab_size: usize) {
    let mut tokens: Vec<String> = SPECIAL_TOKENS.map(str::to_owned).into();
    tokens.extend((0..=255).map(|byte| byte_symbol(byte).to_string()));
    tokens.extend(MERGES.map(|merge| merge.replace(' ', "")));
    tokens.extend((tokens.len()..vocab_size).map(|id| format!("Ġtoken{id}")));
    // 3 is a control token, 1 a normal one.
    let types = (0..tokens.len()).map(|id| if id < SPECIAL_TOKENS.len() { 3 } else { 1 }).collect();
    let text = |value: &str| MetadataValue::String(value.to_owned());
    let strings = |values| MetadataValue::Array(MetadataArray::String(values));
    let mut put = |key: &str, value| metadata.insert(format!("tokenizer.{key}"), value);
    put("ggml.model", text("gpt2"));
    put("ggml.pre", text("smollm"));
    put("ggml.tokens", strings(tokens));
    put("ggml.token_type", MetadataValue::Array(MetadataArray::I32(types)));
    put("ggml.merges", strings(MERGES.map(str::to_owned).into()));
    put("ggml.bos_token_id", MetadataValue::U32(0));
    put("ggml.eos_token_id", MetadataValue::U32(END_OF_TURN));
    put("ggml.add_bos_token", MetadataValue::Bool(false));
    put("chat_template", text(CHAT_TEMPLATE));
}

/// The character that stands for a byte in byte-level BPE: printable Latin-1 for itself, the others from U+0100 on.
fn byte_symbol(byte: u8) -> char {
    let is_itself = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_itself(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&other| !is_itself(other)).count() as u32;
    char::from_u32(0x100 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
}
