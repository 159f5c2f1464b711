//! Module paths from Python frames, on every CPython found: tests/frames/program.py contains the checks. `python3.X` is
//! searched on the PATH and in pyenv's folder; GPUMEM_TEST_PYTHONS may name more, separated by colons. tests/tools/python.sh
//! fetches versions without a stable release.

use crate::common::daemon::Folder;
use crate::common::pythons::{free_threaded, library, own, pyenv, pythons, version};
use gpumem_wire::{Body, Layer, LayerState, frame};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Builds the C part of the program.
fn helper(folder: &Folder) -> Option<PathBuf> {
    let file = folder.0.join("program.so");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .arg(&file)
        .arg(here("tests/frames/program.c"))
        .status();
    if compiled.is_err() {
        gpumem_test_support::skip("no C compiler here", "apt-get install gcc");
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

fn what_the_frames_say_is_so_on(pythons: &[(String, PathBuf)]) {
    let folder = Folder::new("frames");
    let Some(helper) = helper(&folder) else { return };
    for (version, python) in pythons {
        let output = program(python, &folder, &helper).output().expect("it runs");
        let said = said(&output);
        assert!(output.status.success(), "CPython {version}: {said}");
        // It passed the last check and the end of the interpreter.
        assert!(
            said.contains("\nends\nsilent\n") && said.contains("\nreason \n"),
            "CPython {version}: {said}"
        );
        println!("CPython {version}: {}", said.lines().find(|line| line.starts_with("checks")).unwrap_or(""));
    }
}

#[test]
fn what_the_frames_say_is_so() {
    what_the_frames_say_is_so_on(&[own()]);
}

/// Ends the interpreter while a thread without its lock continues, repeatedly, to hit the critical moment.
fn the_interpreter_can_end_at_any_moment_on(pythons: &[(String, PathBuf)]) {
    let folder = Folder::new("frames-end");
    let Some(helper) = helper(&folder) else { return };
    for (version, python) in pythons {
        for _ in 0..4 {
            let output = program(python, &folder, &helper).arg("end").output().expect("it runs");
            let said = said(&output);
            assert!(
                output.status.success() && said.contains("\nends\nsilent\n"),
                "CPython {version}: {said}"
            );
        }
    }
}

#[test]
fn the_interpreter_can_end_at_any_moment() {
    the_interpreter_can_end_at_any_moment_on(&[own()]);
}

#[test]
fn switched_off_nothing_is_read() {
    let folder = Folder::new("frames-off");
    let Some(helper) = helper(&folder) else { return };
    let (_, python) = &own();
    let output = program(python, &folder, &helper).env("GPUMEM_FRAMES", "0").output().expect("it runs");
    assert_eq!(output.status.code(), Some(3));
    assert!(said(&output).contains("\nreason GPUMEM_FRAMES=0\n"), "{}", said(&output));
}

/// Returns the agent's recording of a program that runs this script in that interpreter.
fn recorded(python: &Path, folder: &Folder, script: &str, frames: &str) -> Vec<u8> {
    let recording = folder.0.join("recording.gpumem");
    let _ = std::fs::remove_file(&recording);
    let start = "import ctypes, sys; sys.path.insert(0, sys.argv[2]); import _frames\n\
                 agent = ctypes.CDLL(sys.argv[1])\n";
    let output = Command::new(python)
        .args(["-c", &format!("{start}{script}")])
        .arg(library())
        .arg(here("python/gpumem/torch"))
        .env("GPUMEM_RECORD", &recording)
        .env("GPUMEM_EXIT_WAIT_MS", "10000")
        .env("GPUMEM_FRAMES", frames)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{}", said(&output));
    std::fs::read(&recording).expect("a recording")
}

/// Returns the reports of the layer.
fn told(recording: &[u8]) -> Vec<(LayerState, String)> {
    let records = frame::records(&recording[frame::HEADER_BYTES..]).map(|record| record.expect("a frame"));
    let told = records.filter_map(|record| match record.expect("a record").body {
        Body::Layer { layer: Layer::ModulePath, state, reason } => Some((state, reason.to_owned())),
        _ => None,
    });
    told.collect()
}

#[test]
fn the_layer_says_how_it_is() {
    let folder = Folder::new("frames-layer");
    let (_, python) = &own();
    let layers =
        |folder: &Folder, script: &str, frames: &str| told(&recorded(python, folder, script, frames));
    let started = "assert agent.InitializeInjection() == 1\n";
    let absent = "Python is loaded, and has not imported PyTorch or gpumem yet";
    assert_eq!(layers(&folder, started, "1").pop(), Some((LayerState::Absent, absent.to_owned())));
    assert_eq!(layers(&folder, started, "0").pop(), Some((LayerState::Off, "GPUMEM_FRAMES=0".to_owned())));
    // In either order.
    let proved = "assert _frames.prove(agent) == ''\n";
    for script in [format!("{started}{proved}"), format!("{proved}{started}")] {
        let (state, reason) = layers(&folder, &script, "1").pop().expect("said");
        assert!(state == LayerState::Active && reason.starts_with("CPython 3."), "{state:?} {reason}");
    }
    // Python's list differs from the frames found: one frame less.
    let wrong = "chain = _frames._chain\n_frames._chain = lambda frame: list(chain(frame))[1:]\n\
                 assert 'another code object' in _frames.prove(agent)\n";
    let (state, reason) = layers(&folder, &format!("{started}{wrong}"), "1").pop().expect("said");
    assert_eq!(state, LayerState::Failed, "{reason}");
    let is_first = reason.starts_with("frame 0 of ") && reason.ends_with(": another code object");
    assert!(is_first, "{reason}");
}

/// Lane `python`.
mod python {
    use super::*;

    #[test]
    fn what_the_frames_say_is_so_on_every_interpreter() {
        what_the_frames_say_is_so_on(pythons());
    }

    #[test]
    fn the_interpreter_can_end_at_any_moment_on_every_interpreter() {
        the_interpreter_can_end_at_any_moment_on(pythons());
    }

    #[test]
    fn an_interpreter_that_is_not_known_is_not_read() {
        let folder = Folder::new("frames-old");
        let Some(helper) = helper(&folder) else { return };
        let mut candidates = pyenv();
        candidates.push("python3.8".into());
        let old = candidates.into_iter().find(|python| version(python).as_deref() == Some("3.8"));
        let Some(python) = old else {
            gpumem_test_support::skip("no CPython 3.8 here", "apt-get install python3.11");
            return;
        };
        let output = program(&python, &folder, &helper).output().expect("it runs");
        assert_eq!(output.status.code(), Some(3), "{}", said(&output));
        assert!(
            said(&output).contains("\nreason this agent does not know CPython 3.8\n"),
            "{}",
            said(&output)
        );
    }

    /// Without a GIL no frames are read, and the reason is reported. Data that programs report from concurrent threads is
    /// complete.
    #[test]
    fn without_a_gil_only_the_names_are_missing() {
        let Some(python) = free_threaded() else { return };
        let folder = Folder::new("frames-no-gil");
        let recording = recorded(&python, &folder, include_str!("../frames/without_gil.py"), "1");
        let why = "CPython without a GIL (free-threaded) is not supported";
        assert_eq!(told(&recording).pop(), Some((LayerState::Failed, why.to_owned())));
        let (mut made, mut gone, mut named) = (0, 0, 0);
        for record in frame::records(&recording[frame::HEADER_BYTES..]) {
            let record = record.expect("a frame").expect("a record");
            match record.body {
                Body::BlockAlloc { .. } => made += 1,
                Body::BlockFree { .. } => gone += 1,
                Body::Lost { .. } => panic!("history was lost"),
                _ => continue,
            }
            named += usize::from(record.stamp.tag != 0);
        }
        assert_eq!((made, gone, named), (4000, 2000, 0));
    }
}
