//! The agent's Python code in the program's interpreter, on every CPython found, with a stand-in for PyTorch
//! (tests/bootstrap/torch and tests/libtorch_cpu.cpp): names, an interrupt while it runs, and the interpreter's end.

use crate::common::daemon::Folder;
use crate::common::pythons::{free_threaded, library, own, pythons};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn engine(folder: &Folder) -> Option<PathBuf> {
    let file = folder.0.join("libtorch_cpu.so");
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++14", "-O2", "-shared", "-fPIC", "-o"]).arg(&file);
    match compiler.arg(here("tests/libtorch_cpu.cpp")).status() {
        Ok(status) => {
            assert!(status.success());
            Some(file)
        }
        Err(_) => {
            gpumem_test_support::skip("there is no C++ compiler here", "apt-get install g++");
            None
        }
    }
}

fn program(python: &Path, folder: &Folder, engine: &Path, what: &[&str]) -> Output {
    let mut command = Command::new(python);
    command.arg("-W").arg("error").arg(here("tests/bootstrap/program.py")).arg(library()).args(what);
    command.env("TORCH_CPU", engine).env("GPUMEM_SOCKET", folder.0.join("nobody.sock"));
    command.env("PYTHONPATH", here("tests/bootstrap")).env("PYTHONDONTWRITEBYTECODE", "1");
    command.output().expect("it runs")
}

/// Checks that the program finished and printed only its own output; returns that output.
fn is_done(version: &str, output: &Output) -> String {
    let [out, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(
        output.status.success() && errors.is_empty(),
        "CPython {version}: {}\n{out}{errors}",
        output.status
    );
    assert!(out.ends_with("done\n"), "CPython {version}: {out}");
    out.into_owned()
}

fn modules_and_optimizers_are_found_on(pythons: &[(String, PathBuf)]) {
    let folder = Folder::new("bootstrap");
    let Some(engine) = engine(&folder) else { return };
    for (version, python) in pythons {
        is_done(version, &program(python, &folder, &engine, &["names"]));
        println!("CPython {version}");
    }
}

#[test]
fn modules_and_optimizers_are_found() {
    modules_and_optimizers_are_found_on(&[own()]);
}

fn an_interrupt_while_our_code_runs_is_the_programs_on(pythons: &[(String, PathBuf)]) {
    let folder = Folder::new("bootstrap-interrupt");
    let Some(engine) = engine(&folder) else { return };
    for (version, python) in pythons {
        is_done(version, &program(python, &folder, &engine, &["interrupt"]));
    }
}

#[test]
fn an_interrupt_while_our_code_runs_is_the_programs() {
    an_interrupt_while_our_code_runs_is_the_programs_on(&[own()]);
}

fn the_interpreter_can_end_while_our_code_is_asked_for_on(pythons: &[(String, PathBuf)]) {
    let folder = Folder::new("bootstrap-end");
    let Some(engine) = engine(&folder) else { return };
    for (version, python) in pythons {
        for pause in ["0", "0.002", "0.01", "0.1"] {
            is_done(version, &program(python, &folder, &engine, &["end", pause]));
        }
    }
}

#[test]
fn the_interpreter_can_end_while_our_code_is_asked_for() {
    the_interpreter_can_end_while_our_code_is_asked_for_on(&[own()]);
}

/// Lane `python`.
mod python {
    use super::*;

    #[test]
    fn modules_and_optimizers_are_found_on_every_interpreter() {
        modules_and_optimizers_are_found_on(pythons());
    }

    /// Only the names of modules are missing, and the program ends normally.
    #[test]
    fn without_a_gil_the_rest_is_found_too() {
        let folder = Folder::new("bootstrap-no-gil");
        let (Some(engine), Some(python)) = (engine(&folder), free_threaded()) else { return };
        for what in [&["unread"][..], &["interrupt"], &["end", "0.002"], &["end", "0.1"]] {
            is_done("without a GIL", &program(&python, &folder, &engine, what));
        }
    }

    #[test]
    fn an_interrupt_while_our_code_runs_is_the_programs_on_every_interpreter() {
        an_interrupt_while_our_code_runs_is_the_programs_on(pythons());
    }

    #[test]
    fn the_interpreter_can_end_while_our_code_is_asked_for_on_every_interpreter() {
        the_interpreter_can_end_while_our_code_is_asked_for_on(pythons());
    }
}
