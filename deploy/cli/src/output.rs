//! Results on standard output. A reader that goes away, such as `head`, ends the command quietly.

use std::io::{ErrorKind, Write};

/// Nobody reads the results any more.
#[derive(Debug, thiserror::Error)]
#[error("nobody reads the output")]
pub struct ReaderGone;

/// Writes a piece of the results at once.
///
/// # Errors
/// [`ReaderGone`], which is no failure of the command; or what the system says.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut output = std::io::stdout();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(ReaderGone.into()),
        written => Ok(written?),
    }
}

/// Writes a line.
///
/// # Errors
/// As [`print`].
pub fn print_line(text: &str) -> anyhow::Result<()> {
    print(&format!("{text}\n"))
}
