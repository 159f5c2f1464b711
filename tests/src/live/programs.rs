//! Programs that must be built before a test, once for each test program, with the tools that a user has.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Variable with the folder of copies that every user may execute, as `ours/` and `fake-gpu/`. Set by tests/tools/lanes.py if
/// other users cannot enter the folder target.
const COPIES: &str = "GPUMEM_TEST_PROGRAMS";

/// Folders of the built programs.
#[derive(Debug)]
pub struct Programs {
    /// gpumemd, gpumemctl, gpumem-mcp, libgpumem.so.
    pub ours: PathBuf,
    /// `lib/` with the fake driver, `bin/` with its tool and the programs that run on it.
    pub fake: PathBuf,
}

/// Returns the programs, and builds them if they are not up to date.
///
/// # Panics
/// If one cannot be built.
pub fn programs() -> &'static Programs {
    static PROGRAMS: OnceLock<Programs> = OnceLock::new();
    PROGRAMS.get_or_init(|| {
        if let Some(copies) = std::env::var_os(COPIES).map(PathBuf::from) {
            return Programs { ours: copies.join("ours"), fake: copies.join("fake-gpu") };
        }
        let ours = ours();
        if is_built() {
            return Programs { ours, fake: fake().to_owned() };
        }
        let profile = match ours.file_name().and_then(|name| name.to_str()) {
            Some("debug") | None => "dev".to_owned(),
            Some(name) => name.to_owned(),
        };
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut build = Command::new(cargo);
        build.args(["build", "--locked", "--quiet", "--profile", &profile]);
        build
            .args(["-p", "gpumemd", "-p", "gpumemctl", "-p", "gpumem-mcp", "-p", "gpumem-agent"])
            .current_dir(root());
        run(&mut build);
        Programs { ours, fake: fake().to_owned() }
    })
}

/// Returns the folder of the fake driver, and builds it if it is not up to date.
///
/// # Panics
/// If the build fails.
pub fn fake() -> &'static Path {
    static COPY: OnceLock<Option<PathBuf>> = OnceLock::new();
    let copy = COPY.get_or_init(|| Some(PathBuf::from(std::env::var_os(COPIES)?).join("fake-gpu")));
    copy.as_deref().unwrap_or_else(gpumem_test_support::simulated_gpu)
}

/// Copies a program so that it can be executed. Another process makes the copy. A child that another thread forks at
/// that moment would inherit the file open for writing, and such a file cannot be executed.
///
/// # Panics
/// If the copy fails.
pub fn copy_program(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    run(Command::new("install").args(["-m", "755"]).arg(from.as_ref()).arg(to.as_ref()));
}

/// Writes an executable shell script.
///
/// # Panics
/// If it cannot be written.
pub fn write_script(to: impl AsRef<Path>, text: &str) {
    let words = "printf '#!/bin/sh\\n%s\\n' \"$0\" > \"$1\" && chmod 755 \"$1\"";
    run(Command::new("sh").args(["-c", words, text]).arg(to.as_ref()));
}

/// Returns the folder of all build results: target.
///
/// # Panics
/// If this program is not in it.
pub fn target() -> PathBuf {
    ours().parent().expect("target").to_owned()
}

/// Returns whether tests/tools/lanes.py has built everything before the tests.
fn is_built() -> bool {
    std::env::var_os("GPUMEM_TEST_BUILT").is_some()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace")
}

/// Returns target/PROFILE of this program, which is target/PROFILE/deps/this-test or target/PROFILE/bench.
fn ours() -> PathBuf {
    let this = std::env::current_exe().expect("this program's path");
    let folder = this.parent().expect("a folder");
    let is_test = folder.file_name().is_some_and(|name| name == "deps");
    if is_test { folder.parent().expect("target/PROFILE") } else { folder }.to_owned()
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{said}", output.status);
}
