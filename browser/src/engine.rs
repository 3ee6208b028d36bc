//! What the page calls: a model on the browser's GPU, and the text side of it.
//! For: `browser/worker.js`, in a worker of the page, whose `readAt` reads the model's file and may wait for that.
//! Invariant: errors become exceptions with the words of a worker's errors.

use std::{io, path::Path};

use js_sys::Function;
use lockstep_kernels::webgpu::WebGpuDevice;
use lockstep_model::{
    ChatMessage, ChatTemplate, Checkpoint, IncrementalDecoder, ModelError, Tokenizer,
    positioned_file::{PositionedFile, ReadAt},
};
use wasm_bindgen::prelude::*;

use crate::Session;

/// Longest sequence.
const MAX_TOKENS: usize = 2048;

#[wasm_bindgen]
extern "C" {
    /// Fills the buffer from a position of the model's file on.
    #[wasm_bindgen(catch, js_name = readAt)]
    fn read_at(offset: f64, buffer: &mut [u8]) -> Result<(), JsValue>;
}

/// The model's file, which the worker of the page reads.
#[derive(Debug)]
struct PageFile {
    num_bytes: u64,
}

impl ReadAt for PageFile {
    fn num_bytes(&self) -> u64 {
        self.num_bytes
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        read_at(offset as f64, buffer).map_err(|error| {
            // Of an Error its words alone: written out it has the stack, too.
            let words = error.dyn_ref::<js_sys::Error>().map(|error| String::from(error.message()));
            io::Error::other(words.unwrap_or_else(|| format!("{error:?}")))
        })
    }
}

/// A model in a page.
#[wasm_bindgen]
pub struct Engine {
    session: Session<WebGpuDevice>,
    device: String,
    tokenizer: Tokenizer,
    chat_template: Option<ChatTemplate>,
    decoder: IncrementalDecoder,
}

#[wasm_bindgen]
impl Engine {
    /// Loads the file that `readAt` reads, of so many bytes. `progress` is told how many of how many bytes were read.
    ///
    /// # Errors
    /// If the browser has no GPU for pages, or the file cannot be served.
    pub async fn load(name: String, num_bytes: f64, progress: Function) -> Result<Engine, JsError> {
        console_error_panic_hook::set_once();
        let device = WebGpuDevice::open_in_browser().await?;
        let file = PositionedFile::new(Path::new(&name), Box::new(PageFile { num_bytes: num_bytes as u64 }));
        let checkpoint = Checkpoint::open_gguf(file)?;
        let tokenizer = checkpoint.tokenizer()?;
        let chat_template = chat_template(&checkpoint, &tokenizer)?;
        let device_name = device.gpu().name().to_owned();
        let tell = |read: u64, total: u64| {
            // Whoever shows the progress does not end the load.
            let _ = progress.call2(&JsValue::NULL, &JsValue::from(read as f64), &JsValue::from(total as f64));
        };
        let session = Session::load(device, &checkpoint, MAX_TOKENS, &tell)?;
        let decoder = tokenizer.incremental();
        Ok(Self { session, device: device_name, tokenizer, chat_template, decoder })
    }

    /// What computes.
    #[wasm_bindgen(getter)]
    pub fn device(&self) -> String {
        self.device.clone()
    }

    /// Begins another sequence: the tokens of a prompt, of a conversation if the model has a template for those.
    ///
    /// # Errors
    /// If the text cannot be tokenized.
    pub fn begin(&mut self, text: &str, is_chat: bool) -> Result<Vec<u32>, JsError> {
        self.session.restart();
        self.decoder = self.tokenizer.incremental();
        match self.chat_template.as_ref().filter(|_| is_chat) {
            Some(template) => {
                let message = ChatMessage { role: "user".to_owned(), content: text.to_owned() };
                Ok(self.tokenizer.encode(&template.render(&[message])?, false)?)
            }
            None => Ok(self.tokenizer.encode(text, true)?),
        }
    }

    /// Computes the next tokens of the sequence; the token that follows them with the highest probability.
    ///
    /// # Errors
    /// If the sequence is too long or the GPU fails.
    pub async fn next(&mut self, token_ids: Vec<u32>) -> Result<u32, JsError> {
        let pending = self.session.advance(&token_ids, |device, logits| {
            Ok(device.sample_later(logits.rows, logits.first_token, logits.values)?)
        })?;
        let candidates = pending.arrive().await?;
        let best = candidates.first().and_then(|row| row.top.first());
        best.map(|(token_id, _)| *token_id).ok_or_else(|| JsError::new("the GPU found no token"))
    }

    /// Computes the next tokens of the sequence; the logits of all tokens that could follow.
    ///
    /// # Errors
    /// If the sequence is too long or the GPU fails.
    pub async fn logits(&mut self, token_ids: Vec<u32>) -> Result<Vec<f32>, JsError> {
        let pending = self.session.advance(&token_ids, |device, logits| Ok(device.rows_later(1, logits.values)?))?;
        Ok(pending.arrive().await?)
    }

    /// The text that a token of the output adds, perhaps none yet; nothing if it ends the output.
    ///
    /// # Errors
    /// If there is no such token.
    pub fn text(&mut self, token_id: u32) -> Result<Option<String>, JsError> {
        if self.tokenizer.config().eos_token_ids.contains(&token_id) {
            return Ok(None);
        }
        Ok(Some(self.decoder.push(token_id)?))
    }
}

fn chat_template(checkpoint: &Checkpoint, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>, ModelError> {
    let text = |token_id: Option<u32>| token_id.and_then(|token_id| tokenizer.token_text(token_id)).unwrap_or_default();
    let config = tokenizer.config();
    let (bos, eos) = (text(config.bos_token_id), text(config.eos_token_ids.first().copied()));
    checkpoint.chat_template().map(|source| ChatTemplate::new(source, &bos, &eos)).transpose()
}
