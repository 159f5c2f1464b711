//! The Python package with the real ones of others: IPython, JAX, mypy, PyTorch's compiler.
use gpumem_tests::live::programs::programs;
use gpumem_tests::live::torch::{VERSIONS, versions, wheel};
use gpumem_tests::live::{Daemon, Machine};
use std::path::{Path, PathBuf};
use std::process::Command;

fn package() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").join("agent-lib/python")
}

fn done(command: &mut Command) -> String {
    let output = command.env("PYTHONDONTWRITEBYTECODE", "1").output().expect("it starts");
    let printed = [&output.stdout[..], &output.stderr[..]].concat();
    let printed = String::from_utf8_lossy(&printed).into_owned();
    assert!(output.status.success(), "{command:?}: {printed}");
    printed
}

#[test]
fn memory_per_cell_in_real_ipython() {
    let Some(python) = super::venv("python-real", "ipython jax mypy") else { return };
    let machine = Machine::new(&["devices=1"]);
    let mut command = machine.command(python);
    command.arg(package().join("tests/real/test_ipython.py"));
    command.env("GPUMEM_LIBRARY", programs().ours.join("libgpumem.so"));
    command.env("GPUMEM_SOCKET", machine.dir.join("nobody.sock"));
    let printed = done(&mut command);
    assert!(printed.contains("OK") && !printed.contains("skipped"), "{printed}");
}

#[test]
fn live_arrays_of_real_jax() {
    let Some(python) = super::venv("python-real", "ipython jax mypy") else { return };
    let printed = done(Command::new(python).arg(package().join("tests/real/test_jax.py")));
    assert!(printed.contains("OK") && !printed.contains("skipped"), "{printed}");
}

#[test]
fn package_passes_mypy() {
    let Some(python) = super::venv("python-real", "ipython jax mypy") else { return };
    let mut command = Command::new(python);
    command.args(["-m", "mypy", "--no-incremental", "--cache-dir=/dev/null"]).current_dir(package());
    assert!(done(&mut command).contains("Success"), "mypy has no complaints");
}

#[test]
fn scopes_break_no_graph() {
    let machine = Machine::new(&["devices=1"]);
    for version in versions() {
        let Some(wheel) = wheel(&version) else { continue };
        let mut command = wheel.bare(&machine, "compiled_scopes.py", &[]);
        command.env("GPUMEM_PACKAGE", package());
        command.env("CUDA_INJECTION64_PATH", programs().ours.join("libgpumem.so"));
        command.env("GPUMEM_SOCKET", machine.dir.join("nobody.sock"));
        let printed = done(&mut command);
        assert!(printed.lines().any(|line| line == "ok"), "{version}: {printed}");
    }
}

#[test]
fn figures_equal_torchs() {
    let machine = gpumem_tests::live::torch::machine(&[]);
    for version in versions() {
        let Some(wheel) = wheel(&version) else { continue };
        let mut command = wheel.covered(&machine, &machine.dir, "asked.py", &[]);
        command.env("GPUMEM_PACKAGE", package());
        let printed = done(&mut command);
        assert!(printed.lines().any(|line| line == "ok"), "{version}: {printed}");
    }
}

#[test]
fn program_receives_its_out_of_memory_record() {
    let machine = gpumem_tests::live::torch::machine(&[]);
    let Some(wheel) = wheel(VERSIONS[1]) else { return };
    let daemon = Daemon::start(&machine, "told", "");
    let mut command = wheel.covered(&machine, &daemon.runtime, "oom_told.py", &[]);
    command.env("GPUMEM_PACKAGE", package());
    let printed = done(&mut command);
    assert!(printed.lines().any(|line| line == "ok"), "{printed}");
}
