//! Lane `python`: other interpreters and third-party Python packages.

mod mcp_client;
mod nvtx_libraries;
mod real;

use gpumem_tests::live::programs::target;
use std::path::PathBuf;
use std::process::Command;

/// Returns a Python with these packages in target/NAME; `None`, after printing the reason, if they are not available. With
/// GPUMEM_TOOLS_REQUIRED that is an error, because CI must not skip.
fn venv(name: &str, packages: &str) -> Option<PathBuf> {
    let target = target().join(name);
    let script = format!(
        "test -e '{dir}/done' || {{ rm -rf '{dir}' && python3 -m venv '{dir}' && \
         '{dir}/bin/python' -m pip install --quiet --disable-pip-version-check --no-input {packages} && touch '{dir}/done'; }}",
        dir = target.display()
    );
    let lock = target.with_extension("lock");
    let output = Command::new("flock").arg(lock).args(["sh", "-c", &script]).output();
    let why = match output {
        Ok(output) if output.status.success() => return Some(target.join("bin/python")),
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().lines().last().unwrap_or("").to_owned(),
        Err(error) => error.to_string(),
    };
    gpumem_test_support::skip(&format!("{packages} cannot be had: {why}"), "apt-get install python3-pip");
    None
}
