//! A GGUF file field by field, so that each can be made wrong.

/// Type id of F32.
const F32: u32 = 0;

/// An encoded string: length and bytes.
pub fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text].concat()
}

/// An encoded array: element type, count and whatever elements are given.
pub fn array(type_id: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [&type_id.to_le_bytes()[..], &count.to_le_bytes(), elements].concat()
}

/// One key and value as they stand in the file.
pub struct RawPair {
    pub key_length: u64,
    pub key: Vec<u8>,
    pub type_id: u32,
    pub value: Vec<u8>,
}

/// One tensor entry; `None` stands for what the other fields imply.
pub struct RawTensor {
    pub name_length: Option<u64>,
    pub name: Vec<u8>,
    pub num_dimensions: Option<u32>,
    pub dimensions: Vec<u64>,
    pub type_id: u32,
    pub offset: u64,
}

/// A whole file.
pub struct RawGguf {
    pub magic: [u8; 4],
    pub version: u32,
    pub num_tensors: Option<u64>,
    pub num_pairs: Option<u64>,
    pub pairs: Vec<RawPair>,
    pub tensors: Vec<RawTensor>,
    pub data_bytes: usize,
}

impl RawGguf {
    /// A `llama` of one layer: hidden 32, two heads of 16, one key/value head, intermediate 48, four tokens, all F32.
    pub fn sound() -> Self {
        let mut file = Self {
            magic: *b"GGUF",
            version: 3,
            num_tensors: None,
            num_pairs: None,
            pairs: Vec::new(),
            tensors: Vec::new(),
            data_bytes: 0,
        };
        file.set("general.architecture", 8, string(b"llama"));
        let numbers = [
            ("context_length", 64),
            ("embedding_length", 32),
            ("feed_forward_length", 48),
            ("block_count", 1),
            ("attention.head_count", 2),
            ("attention.head_count_kv", 1),
        ];
        for (key, number) in numbers {
            file.set_u32(&format!("llama.{key}"), number);
        }
        file.set_f32("llama.attention.layer_norm_rms_epsilon", 1e-5);
        file.set("tokenizer.ggml.tokens", 9, array(8, 1, &string(b"a")));
        let tensors: [(&str, &[u64]); 11] = [
            ("blk.0.attn_k", &[32, 16]),
            ("blk.0.attn_norm", &[32]),
            ("blk.0.attn_output", &[32, 32]),
            ("blk.0.attn_q", &[32, 32]),
            ("blk.0.attn_v", &[32, 16]),
            ("blk.0.ffn_down", &[48, 32]),
            ("blk.0.ffn_gate", &[32, 48]),
            ("blk.0.ffn_norm", &[32]),
            ("blk.0.ffn_up", &[32, 48]),
            ("output_norm", &[32]),
            ("token_embd", &[32, 4]),
        ];
        for (name, dimensions) in tensors {
            file.tensors.push(RawTensor {
                name_length: None,
                name: format!("{name}.weight").into_bytes(),
                num_dimensions: None,
                dimensions: dimensions.to_vec(),
                type_id: F32,
                offset: file.data_bytes as u64,
            });
            // Every size here is a multiple of the alignment.
            file.data_bytes += 4 * dimensions.iter().product::<u64>() as usize;
        }
        file
    }

    pub fn remove(&mut self, key: &str) {
        self.pairs.retain(|pair| pair.key != key.as_bytes());
    }

    /// Sets a key in place of its former value.
    pub fn set(&mut self, key: &str, type_id: u32, value: Vec<u8>) {
        self.remove(key);
        self.pairs.push(RawPair { key_length: key.len() as u64, key: key.into(), type_id, value });
    }

    pub fn set_u32(&mut self, key: &str, value: u32) {
        self.set(key, 4, value.to_le_bytes().to_vec());
    }

    pub fn set_f32(&mut self, key: &str, value: f32) {
        self.set(key, 6, value.to_le_bytes().to_vec());
    }

    /// Puts a pair first, its key length as given.
    pub fn raw_pair(&mut self, key_length: u64, key: &[u8], type_id: u32, value: &[u8]) {
        self.pairs.insert(0, RawPair { key_length, key: key.into(), type_id, value: value.into() });
    }

    /// The bytes of the file.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.magic.to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.num_tensors.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        bytes.extend(self.num_pairs.unwrap_or(self.pairs.len() as u64).to_le_bytes());
        for pair in &self.pairs {
            bytes.extend(pair.key_length.to_le_bytes());
            bytes.extend(&pair.key);
            bytes.extend(pair.type_id.to_le_bytes());
            bytes.extend(&pair.value);
        }
        for tensor in &self.tensors {
            bytes.extend(tensor.name_length.unwrap_or(tensor.name.len() as u64).to_le_bytes());
            bytes.extend(&tensor.name);
            bytes.extend(tensor.num_dimensions.unwrap_or(tensor.dimensions.len() as u32).to_le_bytes());
            bytes.extend(tensor.dimensions.iter().flat_map(|length| length.to_le_bytes()));
            bytes.extend(tensor.type_id.to_le_bytes());
            bytes.extend(tensor.offset.to_le_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(32) + self.data_bytes, 0);
        bytes
    }
}
