//! Output of `make demo` and `make test` on a machine that lacks requirements: one line for each, with the remedy.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

/// Programs that the check runs, and those that it requires.
const PROGRAMS: [&str; 19] = [
    "sh", "sed", "sort", "head", "cut", "du", "df", "awk", "touch", "rm", "mkdir", "dirname", "env", "cargo",
    "cc", "gcc", "objcopy", "make", "python3",
];

/// A machine with every requirement.
struct Surroundings {
    dir: PathBuf,
}

impl Drop for Surroundings {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

impl Surroundings {
    fn whole() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("gpumem-surroundings-{}-{number}", std::process::id()));
        fs::create_dir_all(dir.join("bin")).expect("a folder");
        let here = Surroundings { dir };
        let path = std::env::var_os("PATH").expect("a path");
        for program in PROGRAMS {
            let found =
                std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file());
            let found = found.unwrap_or_else(|| panic!("{program} is needed to test without it"));
            symlink(found, here.bin(program)).expect("a link");
        }
        here.says("cargo", "cargo 99.0.0");
        here
    }

    fn bin(&self, program: &str) -> PathBuf {
        self.dir.join("bin").join(program)
    }

    fn lacks(&self, program: &str) -> &Self {
        fs::remove_file(self.bin(program)).expect("it was there");
        self
    }

    /// Creates a program that prints these lines. Another process writes it: a child that any thread forks meanwhile would keep
    /// a file of this process open for writing, and the file could not be executed.
    fn says(&self, program: &str, lines: &str) -> &Self {
        self.lacks(program);
        let script = format!("#!/bin/sh\ncat << 'END'\n{lines}\nEND\n");
        let write = r#"printf %s "$1" > "$2" && chmod 755 "$2""#;
        let mut shell = Command::new("sh");
        shell.args(["-c", write, "sh", &script]).arg(self.bin(program));
        assert!(shell.status().expect("a shell").success());
        if !self.bin("cat").exists() {
            symlink("/bin/cat", self.bin("cat")).expect("a link");
        }
        self
    }

    fn check(&self, goal: &str, variables: &[(&str, &Path)]) -> Output {
        let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tools/surroundings.sh"));
        command.arg(goal).env_clear().env("PATH", self.dir.join("bin"));
        command.env("CARGO_TARGET_DIR", self.dir.join("target"));
        command.envs(variables.iter().copied()).output().expect("it runs")
    }

    /// Returns the lines about missing requirements.
    fn missing(&self, goal: &str, variables: &[(&str, &Path)]) -> Vec<String> {
        let output = self.check(goal, variables);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let printed = String::from_utf8(output.stderr).expect("text");
        printed.lines().map(str::to_owned).collect()
    }
}

fn is_one(printed: &[String], what: &str, remedy: &str) {
    let [line] = printed else { panic!("one line on {what}: {printed:?}") };
    assert!(line.contains(what) && line.contains(remedy), "{what}, {remedy}: {line}");
}

#[test]
fn no_output_if_nothing_is_missing() {
    let here = Surroundings::whole();
    for goal in ["demo", "test"] {
        let output = here.check(goal, &[]);
        assert!(
            output.status.success() && output.stderr.is_empty() && output.stdout.is_empty(),
            "{output:?}"
        );
    }
}

#[test]
fn missing_program_is_reported_with_its_package() {
    for (program, what, remedy) in [
        ("cc", "there is no C compiler", "apt-get install gcc"),
        ("objcopy", "there is no C compiler", "binutils"),
        ("cargo", "there is no cargo", "https://rustup.rs"),
        ("make", "there is no make", "apt-get install make"),
        ("python3", "there is no python3", "apt-get install python3"),
    ] {
        let here = Surroundings::whole();
        here.lacks(program);
        is_one(&here.missing("test", &[]), what, remedy);
    }
    let here = Surroundings::whole();
    here.lacks("python3");
    assert!(here.check("demo", &[]).status.success(), "the demo needs no Python");
}

#[test]
fn old_version_is_reported_with_the_required_one() {
    let here = Surroundings::whole();
    here.says("cargo", "cargo 1.60.0 (d1fd9fe2c 2022-03-01)");
    is_one(&here.missing("demo", &[]), "cargo 1.60 is too old", "rustup update");
}

#[test]
fn unusable_folders_are_reported() {
    let here = Surroundings::whole();
    let nowhere = Path::new("/dev/null/target");
    let printed = here.missing("test", &[("CARGO_TARGET_DIR", nowhere)]);
    is_one(&printed, "/dev/null/target cannot be written", "CARGO_TARGET_DIR");
    let spaced = here.dir.join("a b");
    is_one(
        &here.missing("test", &[("CARGO_TARGET_DIR", &spaced)]),
        "has a space in it",
        "a path without one",
    );
    let printed = here.missing("test", &[("TMPDIR", Path::new("/dev/null/tmp"))]);
    is_one(&printed, "/dev/null/tmp cannot be written", "TMPDIR");
    // A socket's path has 107 bytes: a folder that is too long is not used, so it needs not be there.
    let long = PathBuf::from(format!("/nowhere/{}", "long-".repeat(20)));
    assert!(here.check("test", &[("TMPDIR", &long)]).status.success());
}

#[test]
fn full_disk_and_small_shared_memory_are_reported() {
    let here = Surroundings::whole();
    here.says("df", "Filesystem 1M-blocks Used Available Capacity Mounted on\nnone 100 70 30 70% /");
    let printed = here.missing("test", &[]);
    assert_eq!(printed.len(), 2, "{printed:?}");
    is_one(&printed[..1], "30 MiB are free below", "a folder with more room");
    is_one(&printed[1..], "30 MiB are free in /dev/shm, 60 are needed", "--shm-size");
}
