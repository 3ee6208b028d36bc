//! Chat templates: Jinja as Hugging Face checkpoints use it.
//!
//! For: the coordinator, which renders a conversation to the prompt that the model was trained on.
//! The environment is that of Hugging Face's `apply_chat_template`: blocks trimmed, loop controls, Python's methods on
//! strings and lists, `raise_exception`, `strftime_now`, its `tojson`; `tools` and `documents` are none.
//! Invariant: templates come with checkpoints and are not trusted: [`FUEL`] bounds the steps of a rendering and
//! [`MAX_PROMPT_BYTES`] its output; they reach nothing but the conversation and the date. What texts they build on the way
//! is not bounded: one that doubles a text in a loop takes the process's memory.
//! Not here: what becomes of special tokens in the prompt (`tokenizer`).

use std::{
    io::{self, Write},
    time::{SystemTime, UNIX_EPOCH},
};

use minijinja::{
    Environment, Error, ErrorKind, UndefinedBehavior, Value, context, filters, syntax::SyntaxConfig, value::Kwargs,
};
use serde::{Deserialize, Serialize};

use crate::ModelError;

/// Instructions of one rendering. A thousand messages take some hundred thousand; all of it takes under a second.
const FUEL: u64 = 5_000_000;

/// Longest prompt that a template may print.
const MAX_PROMPT_BYTES: usize = 16 << 20;

/// What errors call the template.
const NAME: &str = "chat_template";

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// system, user, assistant, or what the template knows.
    pub role: String,
    /// Text.
    pub content: String,
}

/// A parsed chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
}

impl ChatTemplate {
    /// Parses the Jinja source. `bos_token` and `eos_token` are the texts that the template may print.
    ///
    /// # Errors
    /// [`ModelError::ChatTemplate`] with line and cause.
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<Self, ModelError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(describe)?;
        environment.set_syntax(syntax);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_fuel(Some(FUEL));
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", tojson);
        environment.add_template_owned(NAME, source.to_owned()).map_err(describe)?;
        Ok(Self { environment, bos_token: bos_token.to_owned(), eos_token: eos_token.to_owned() })
    }

    /// The prompt of a conversation, ending where the assistant is to speak.
    ///
    /// # Errors
    /// [`ModelError::ChatTemplate`] with what the template raised.
    pub fn render(&self, messages: &[ChatMessage]) -> Result<String, ModelError> {
        let messages: Vec<Value> = messages
            .iter()
            .map(|message| context! { role => message.role.as_str(), content => message.content.as_str() })
            .collect();
        let context = context! {
            messages,
            add_generation_prompt => true,
            bos_token => self.bos_token.as_str(),
            eos_token => self.eos_token.as_str(),
            // Given as none, not left undefined: templates ask `tools is not none`.
            tools => (),
            documents => (),
        };
        let mut prompt = BoundedOutput(Vec::new());
        let template = self.environment.get_template(NAME).map_err(describe)?;
        template.render_captured_to(context, &mut prompt).map_err(describe)?;
        String::from_utf8(prompt.0).map_err(|error| ModelError::ChatTemplate(error.to_string()))
    }
}

/// Collects the prompt and refuses to grow past [`MAX_PROMPT_BYTES`].
struct BoundedOutput(Vec<u8>);

impl Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len().saturating_add(bytes.len()) > MAX_PROMPT_BYTES {
            return Err(io::Error::other(format!("the prompt exceeds {MAX_PROMPT_BYTES} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The error with its line and its causes.
fn describe(error: Error) -> ModelError {
    let mut text = match (error.detail(), error.line()) {
        (Some(detail), Some(line)) => format!("line {line}: {}: {detail}", error.kind()),
        (None, Some(line)) => format!("line {line}: {}", error.kind()),
        (_, None) => error.to_string(),
    };
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    ModelError::ChatTemplate(text)
}

fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()))
}

/// Python's `json.dumps(value, ensure_ascii=False)`: minijinja's filter escapes for HTML in addition, and separates
/// otherwise.
fn tojson(value: &Value, indent: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<Value>>("indent")?,
    };
    let indent = indent.filter(|indent| !indent.is_none()).map(usize::try_from).transpose()?;
    let failed = |error| Error::new(ErrorKind::BadSerialization, "tojson").with_source(error);
    let escaped = filters::tojson(value, None, Kwargs::from_iter(Vec::<(String, Value)>::new()))?.to_string();
    let parsed: serde_json::Value = serde_json::from_str(&escaped).map_err(failed)?;
    let mut bytes = Vec::new();
    match indent {
        Some(indent) if indent <= 16 => {
            let indent = " ".repeat(indent);
            let pretty = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, pretty);
            parsed.serialize(&mut serializer).map_err(failed)?;
        }
        Some(indent) => {
            return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: indent {indent} exceeds 16")));
        }
        None => {
            let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, PythonFormatter);
            parsed.serialize(&mut serializer).map_err(failed)?;
        }
    }
    let json = String::from_utf8(bytes)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, "tojson").with_source(error))?;
    Ok(Value::from_safe_string(json))
}

/// `[1, 2]` and `{"a": 1}`, as Python separates by default.
struct PythonFormatter;

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// The date for templates that print it, in UTC.
fn strftime_now(format: &str) -> Result<String, Error> {
    if cfg!(target_family = "wasm") {
        return Err(Error::new(ErrorKind::InvalidOperation, "there is no clock here"));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
    strftime(format, now)
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// The directives of Python's `strftime` that concern dates and times of day; `-` drops a leading zero.
fn strftime(format: &str, seconds_since_epoch: u64) -> Result<String, Error> {
    let (days, second_of_day) = (seconds_since_epoch / 86_400, seconds_since_epoch % 86_400);
    let (year, month, day) = civil_date(days);
    let (hour, minute, second) = (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    let month_name = MONTHS[(month - 1) as usize];
    let weekday = WEEKDAYS[(days % 7) as usize];
    let mut text = String::new();
    let mut characters = format.chars().peekable();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        let is_unpadded = characters.next_if_eq(&'-').is_some();
        let number = |value: u64| if is_unpadded { value.to_string() } else { format!("{value:02}") };
        let directive = characters.next();
        text.push_str(&match directive {
            Some('Y') => year.to_string(),
            Some('y') => number(year % 100),
            Some('m') => number(month),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name[..3].to_owned(),
            Some('d') => number(day),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('H') => number(hour),
            Some('I') => number((hour + 11) % 12 + 1),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('M') => number(minute),
            Some('S') => number(second),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                let directive = other.map(String::from).unwrap_or_default();
                let detail = format!("strftime_now: directive \"%{directive}\" is not supported");
                return Err(Error::new(ErrorKind::InvalidOperation, detail));
            }
        });
    }
    Ok(text)
}

/// Year, month and day in the Gregorian calendar, counted in eras of 400 years that begin on 1 March.
fn civil_date(days_since_epoch: u64) -> (u64, u64, u64) {
    let days = days_since_epoch + 719_468;
    let day_of_era = days % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    (days / 146_097 * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests;
