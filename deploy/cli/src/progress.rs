//! Progress bars on standard error; nothing is drawn where that is not a terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar that counts bytes; its total may be set later.
pub fn bytes_bar(message: &str) -> ProgressBar {
    let template = "{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(0).with_style(style.progress_chars("=> ")).with_message(message.to_owned())
}
