//! Programs that are measured from outside.

use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Returns gpumemctl next to this program, if it is built.
pub fn gpumemctl() -> Option<PathBuf> {
    let path = std::env::current_exe().ok()?.with_file_name("gpumemctl");
    path.exists().then_some(path)
}

/// Disconnects a command's input and output.
pub fn silenced(command: &mut Command) -> &mut Command {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null())
}

/// Runs a command and returns whether it succeeds.
pub fn run_quietly(command: &mut Command) -> bool {
    silenced(command).status().is_ok_and(|status| status.success())
}
