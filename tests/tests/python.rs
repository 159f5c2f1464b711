//! The Python package: its own tests, with the agent on the simulated GPU.
#![allow(missing_docs)]

use gpumem_tests::live::Machine;
use gpumem_tests::live::programs::programs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn unittest(command: &mut Command) -> String {
    let package =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").join("agent-lib/python");
    command.args(["-m", "unittest", "discover", "-s"]).arg(package.join("tests"));
    let output = command.env("PYTHONDONTWRITEBYTECODE", "1").output().expect("python3 is needed");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    said
}

#[test]
fn the_packages_own_tests_pass_without_an_agent() {
    let said = unittest(Command::new("python3").env_remove("CUDA_INJECTION64_PATH"));
    assert!(said.contains("skipped="), "{said}");
}

/// The oldest that is promised, and what lies between it and the newest: those that are on PATH or that pyenv has.
#[test]
fn they_pass_on_every_python_that_is_there() {
    let pyenv = std::env::var_os("PYENV_ROOT").map(PathBuf::from);
    let pyenv = pyenv.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".pyenv")));
    let pyenv = pyenv.unwrap_or_default().join("versions");
    let mut found = 0;
    for minor in 9..=14 {
        let name = format!("3.{minor}");
        let in_pyenv = std::fs::read_dir(&pyenv).into_iter().flatten().flatten();
        let in_pyenv =
            in_pyenv.filter(|entry| entry.file_name().to_string_lossy().starts_with(&format!("{name}.")));
        let mut pythons = in_pyenv.map(|entry| entry.path().join("bin/python3"));
        let python = pythons.next().unwrap_or_else(|| format!("python{name}").into());
        let version = Command::new(&python).arg("--version").output();
        if !version.is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: there is no CPython {name}");
            continue;
        }
        let said = unittest(Command::new(&python).env_remove("CUDA_INJECTION64_PATH"));
        assert!(said.contains("OK"), "{name}: {said}");
        found += 1;
    }
    assert!(found > 0, "python3 is needed");
}

#[test]
fn the_packages_own_tests_pass_with_the_agent() {
    let machine = Machine::new(&["devices=1"]);
    let mut command = machine.command("python3");
    command.env("CUDA_INJECTION64_PATH", programs().ours.join("libgpumem.so"));
    command.env("GPUMEM_SOCKET", machine.dir.join("nobody.sock")).env("GPUMEM_TEST_AGENT", "1");
    let said = unittest(&mut command);
    assert!(said.contains("OK") && !said.contains("skipped"), "{said}");
    let shown = machine.tool("show", &[]);
    assert!(shown.contains("\nviolations=0\n"), "{shown}");
}
