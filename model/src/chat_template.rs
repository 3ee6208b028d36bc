//! Chat templates: Jinja as Hugging Face checkpoints use it.

use serde::{Deserialize, Serialize};

use crate::ModelError;

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// system, user, assistant, or what the template knows.
    pub role: String,
    /// Text.
    pub content: String,
}

/// A parsed chat template.
pub struct ChatTemplate {}

impl ChatTemplate {
    /// Parses the Jinja source. `bos_token` and `eos_token` are the texts that the template may print.
    ///
    /// # Errors
    /// [`ModelError::ChatTemplate`] with line and cause.
    pub fn new(_source: &str, _bos_token: &str, _eos_token: &str) -> Result<Self, ModelError> {
        todo!()
    }

    /// The prompt of a conversation, ending where the assistant is to speak.
    ///
    /// # Errors
    /// [`ModelError::ChatTemplate`] with what the template raised.
    pub fn render(&self, _messages: &[ChatMessage]) -> Result<String, ModelError> {
        todo!()
    }
}
