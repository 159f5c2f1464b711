//! The project's examples, built with the commands in their first lines, on a simulated machine.

use super::machine::Machine;
use super::programs::programs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the folder of the examples.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").join("examples")
}

/// Builds `source` with `compiler` and these arguments; returns the program.
///
/// # Panics
/// If it does not build without warnings.
pub fn build(machine: &Machine, compiler: &str, arguments: &[&str], source: &str) -> PathBuf {
    let program = machine.dir.join(source.replace('.', "-"));
    let mut command = Command::new(compiler);
    command.args(arguments).arg(folder().join(source)).arg("-o").arg(&program);
    if compiler != "rustc" {
        command.arg("-I").arg(folder().join("../agent-lib/include")).arg("-ldl");
    }
    let output = command.output().unwrap_or_else(|error| panic!("{compiler}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{command:?}: {said}");
    let _ = programs();
    program
}
