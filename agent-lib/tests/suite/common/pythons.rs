//! CPython interpreters on this machine, and the library to load into them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const VERSIONS: [&str; 7] = ["3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "3.15"];

/// Versions that tests/tools/python.sh can fetch.
const BROUGHT: [&str; 2] = ["3.14", "3.15"];

/// Returns the path of the library that was built with this test.
pub fn library() -> PathBuf {
    let here = std::env::current_exe().expect("a path");
    let folders = here.ancestors().skip(1).take(2);
    let file = folders.map(|folder| folder.join("libgpumem.so")).find(|file| file.exists());
    file.expect("the library lies beside the test")
}

/// Returns an interpreter's version, with a `t` if it has no GIL; `None` if it does not run.
pub fn version(python: &Path) -> Option<String> {
    let script =
        "import sys; print('%d.%d' % sys.version_info[:2] + 't' * ('free-threading' in sys.version))";
    let output = Command::new(python).args(["-c", script]).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Returns the interpreters in pyenv's folder.
pub fn pyenv() -> Vec<PathBuf> {
    let home = PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
    let pyenv = std::env::var_os("PYENV_ROOT").map_or_else(|| home.join(".pyenv"), PathBuf::from);
    let installed = std::fs::read_dir(pyenv.join("versions")).into_iter().flatten().flatten();
    installed.map(|entry| entry.path().join("bin/python3")).collect()
}

/// Returns this machine's own `python3`.
///
/// # Panics
/// If there is none.
pub fn own() -> (String, PathBuf) {
    let python = PathBuf::from("python3");
    (version(&python).expect("python3 is needed"), python)
}

/// Returns one interpreter of each version: `python3.X` on the PATH and in pyenv's folder. GPUMEM_TEST_PYTHONS may name more,
/// separated by colons. Versions without a stable release are otherwise fetched with tests/tools/python.sh.
pub fn pythons() -> &'static [(String, PathBuf)] {
    static FOUND: OnceLock<Vec<(String, PathBuf)>> = OnceLock::new();
    FOUND.get_or_init(find_pythons)
}

fn find_pythons() -> Vec<(String, PathBuf)> {
    let mut candidates = candidates();
    candidates.extend(VERSIONS.map(|version| PathBuf::from(format!("python{version}"))));
    candidates.push("python3".into());
    let mut found: Vec<(String, PathBuf)> = Vec::new();
    for python in candidates {
        let Some(version) = version(&python) else { continue };
        if VERSIONS.contains(&version.as_str()) && !found.iter().any(|(known, _)| *known == version) {
            found.push((version, python));
        }
    }
    for version in VERSIONS {
        if found.iter().any(|(known, _)| known == version) {
            continue;
        }
        if BROUGHT.contains(&version) {
            found.extend(bring(version).map(|python| (version.to_owned(), python)));
        } else {
            gpumem_test_support::skip(&format!("no CPython {version} here"), "apt-get install python3.11");
        }
    }
    assert!(!found.is_empty(), "python3 is needed");
    found
}

fn candidates() -> Vec<PathBuf> {
    let named = std::env::var_os("GPUMEM_TEST_PYTHONS").unwrap_or_default();
    let mut candidates: Vec<PathBuf> = std::env::split_paths(&named).filter(|path| path.is_file()).collect();
    candidates.extend(pyenv());
    candidates
}

/// Returns one without a GIL, found in the same ways.
pub fn free_threaded() -> Option<PathBuf> {
    const VERSION: &str = "3.14t";
    let mut candidates = candidates();
    candidates.extend(["python3.15t", "python3.14t", "python3.13t"].map(PathBuf::from));
    let found =
        candidates.into_iter().find(|python| version(python).is_some_and(|found| found.ends_with('t')));
    found.or_else(|| bring(VERSION))
}

/// Fetches an interpreter with tests/tools/python.sh; `None`, with a message, if it is not available.
///
/// # Panics
/// With GPUMEM_TOOLS_REQUIRED set, if it could not be fetched although the archive may have it: CI must not skip.
fn bring(version: &str) -> Option<PathBuf> {
    let target = std::env::current_exe().ok()?.ancestors().nth(3)?.to_owned();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tools/python.sh");
    let output = Command::new("sh").arg(script).arg(version).env("CARGO_TARGET_DIR", target).output().ok()?;
    if output.status.success() {
        return Some(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()));
    }
    let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    let gone = output.status.code() == Some(2);
    if gone {
        println!("the archive has no CPython {version} any more: {why}");
        return None;
    }
    gpumem_test_support::skip(
        &format!("CPython {version} cannot be had: {why}"),
        "apt-get install python3.11",
    );
    None
}
