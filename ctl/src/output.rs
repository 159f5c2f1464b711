//! Standard output: fitted to a terminal, plain in a pipe.

use crate::exit;
use gpumem_runs::report::text::clean;
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

/// Says on standard error what went wrong, with causes that are not said already, and returns the exit
/// code. Names in it may come from strangers.
pub fn complain(error: &anyhow::Error) -> u8 {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    let lines: Vec<String> = text.lines().map(clean).collect();
    // Standard error may be full or closed: the exit code still tells.
    let _ = writeln!(io::stderr(), "gpumemctl: {}", lines.join("\n"));
    exit::code(error)
}

/// Whether the reader of our output has gone.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let broken = |error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe;
    error.downcast_ref::<io::Error>().is_some_and(broken)
}
