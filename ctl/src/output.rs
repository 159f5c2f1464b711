//! Standard output: fitted to a terminal, plain in a pipe.

use std::io::{self, IsTerminal, Write};

/// Columns of the terminal; `None` when output is piped.
pub fn width() -> Option<usize> {
    let stdout = io::stdout();
    if !stdout.is_terminal() {
        return None;
    }
    terminal_size::terminal_size_of(&stdout).map(|(width, _)| usize::from(width.0))
}

/// Writes everything, now.
///
/// # Errors
/// What the system says, a closed pipe among it.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Whether the reader of our output has gone.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let broken = |error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe;
    error.downcast_ref::<io::Error>().is_some_and(broken)
}
