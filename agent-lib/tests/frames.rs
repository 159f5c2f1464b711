//! The module path from Python frames, on every CPython that is here: tests/frames/program.py has the checks. `python3.X` is looked for on
//! the PATH and in pyenv's folder; GPUMEM_TEST_PYTHONS may name more, with colons between.
#![allow(missing_docs)]

mod common;

use common::daemon::Folder;
use common::pythons::{library, pythons};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The C part of the program.
fn helper(folder: &Folder) -> Option<PathBuf> {
    let file = folder.0.join("program.so");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .arg(&file)
        .arg(here("tests/frames/program.c"))
        .status();
    if compiled.is_err() {
        println!("skipped: no C compiler here");
    }
    compiled.ok()?.success().then_some(file)
}

fn program(python: &Path, folder: &Folder, helper: &Path) -> Command {
    let mut command = Command::new(python);
    command.arg("-W").arg("ignore").arg(here("tests/frames/program.py"));
    command.arg(library()).arg(helper).arg(here("python/gpumem/torch"));
    command.env("GPUMEM_SOCKET", folder.0.join("nobody.sock")).env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

fn said(output: &Output) -> String {
    let [out, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    format!("{}\n{out}{errors}", output.status)
}

#[test]
fn what_the_frames_say_is_so_on_every_interpreter() {
    let folder = Folder::new("frames");
    let Some(helper) = helper(&folder) else { return };
    for (version, python) in pythons() {
        let output = program(&python, &folder, &helper).output().expect("it runs");
        let said = said(&output);
        assert!(output.status.success(), "CPython {version}: {said}");
        // It came to its end, past the last check, and through the end of the interpreter.
        assert!(
            said.contains("\nends\nsilent\n") && said.contains("\nreason \n"),
            "CPython {version}: {said}"
        );
        println!("CPython {version}: {}", said.lines().find(|line| line.starts_with("checks")).unwrap_or(""));
    }
}

/// The end of the interpreter, while a thread without its lock goes on: as often as it takes to meet the moment.
#[test]
fn the_interpreter_can_end_at_any_moment() {
    let folder = Folder::new("frames-end");
    let Some(helper) = helper(&folder) else { return };
    for (version, python) in pythons() {
        for _ in 0..4 {
            let output = program(&python, &folder, &helper).arg("end").output().expect("it runs");
            let said = said(&output);
            assert!(
                output.status.success() && said.contains("\nends\nsilent\n"),
                "CPython {version}: {said}"
            );
        }
    }
}

#[test]
fn switched_off_nothing_is_read() {
    let folder = Folder::new("frames-off");
    let Some(helper) = helper(&folder) else { return };
    let (_, python) = pythons().remove(0);
    let output = program(&python, &folder, &helper).env("GPUMEM_FRAMES", "0").output().expect("it runs");
    assert_eq!(output.status.code(), Some(3));
    assert!(said(&output).contains("\nreason GPUMEM_FRAMES=0\n"), "{}", said(&output));
}
