//! CPythons on this machine, and the library for them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const VERSIONS: [&str; 7] = ["3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "3.15"];

/// The library that was built with this test.
pub fn library() -> PathBuf {
    let here = std::env::current_exe().expect("a path");
    let folders = here.ancestors().skip(1).take(2);
    let file = folders.map(|folder| folder.join("libgpumem.so")).find(|file| file.exists());
    file.expect("the library lies beside the test")
}

/// What an interpreter says that it is; none for what does not run.
pub fn version(python: &Path) -> Option<String> {
    let script = "import sys; print('%d.%d' % sys.version_info[:2])";
    let output = Command::new(python).args(["-c", script]).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Those in pyenv's folder.
pub fn pyenv() -> Vec<PathBuf> {
    let home = PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
    let pyenv = std::env::var_os("PYENV_ROOT").map_or_else(|| home.join(".pyenv"), PathBuf::from);
    let installed = std::fs::read_dir(pyenv.join("versions")).into_iter().flatten().flatten();
    installed.map(|entry| entry.path().join("bin/python3")).collect()
}

/// One of each version: `python3.X` on the PATH and in pyenv's folder; GPUMEM_TEST_PYTHONS may name more, with colons between.
pub fn pythons() -> &'static [(String, PathBuf)] {
    static FOUND: OnceLock<Vec<(String, PathBuf)>> = OnceLock::new();
    FOUND.get_or_init(find_pythons)
}

fn find_pythons() -> Vec<(String, PathBuf)> {
    let named = std::env::var_os("GPUMEM_TEST_PYTHONS").unwrap_or_default();
    let mut candidates: Vec<PathBuf> = std::env::split_paths(&named).filter(|path| path.is_file()).collect();
    candidates.extend(pyenv());
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
        if !found.iter().any(|(known, _)| known == version) {
            println!("skipped: no CPython {version} here");
        }
    }
    assert!(!found.is_empty(), "python3 is needed");
    found
}
