//! Runs one program to its end and observes it from outside.

use rustix::time::{ClockId, clock_gettime};
use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Timeout of a program, long because the machine may be very busy.
const PATIENCE: Duration = Duration::from_secs(300);

/// Observed end, output and files of a program.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub pid: u32,
    status: ExitStatus,
    pub out: String,
    error: String,
    files: BTreeMap<String, Vec<u8>>,
    /// From its start until the last process has closed its output.
    pub took: Duration,
    /// Time of that close, in ns of CLOCK_MONOTONIC.
    pub ended_ns: i64,
}

/// Runs it in `folder`, where it may leave files; returns when the last process has closed its output.
pub fn run(command: &mut Command, folder: &Path) -> Outcome {
    command.current_dir(folder).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let since = Instant::now();
    let child = command.spawn().expect("started");
    let pid = child.id();
    let (send, ended) = channel::<()>();
    let watch = std::thread::spawn(move || {
        if ended.recv_timeout(PATIENCE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            let _ = Command::new("kill").args(["-s", "KILL", &pid.to_string()]).status();
        }
    });
    let output = child.wait_with_output().expect("it ends");
    let (took, now) = (since.elapsed(), clock_gettime(ClockId::Monotonic));
    drop(send);
    watch.join().expect("no panic");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Outcome {
        pid,
        status: output.status,
        out: text(&output.stdout),
        error: text(&output.stderr),
        files: files(folder),
        took,
        ended_ns: now.tv_sec * 1_000_000_000 + now.tv_nsec,
    }
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).expect("a folder").flatten();
    let name = |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    entries.map(|entry| (name(&entry), std::fs::read(entry.path()).unwrap_or_default())).collect()
}

fn lines(text: &str, unordered: bool) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    if unordered {
        lines.sort_unstable();
    }
    lines
}

/// "the next descriptor is N" becomes "the next descriptor is free".
fn without_next_descriptor(text: &str) -> String {
    const NEXT: &str = "the next descriptor is ";
    let hide = |line: &str| match line.split_once(NEXT) {
        Some((before, after)) => {
            format!("{before}{NEXT}free{}\n", after.trim_start_matches(|digit: char| digit.is_ascii_digit()))
        }
        None => format!("{line}\n"),
    };
    text.lines().map(hide).collect()
}

impl Outcome {
    /// Returns the outcome without the number of the next free descriptor. The agent may briefly use that number while a
    /// peer makes it open files, as any other thread of the program could.
    pub fn without_next_descriptor(&self) -> Outcome {
        Outcome { out: without_next_descriptor(&self.out), ..self.clone() }
    }

    /// Returns the exit code, or `signal N`.
    pub fn end(&self) -> String {
        match self.status.code() {
            Some(code) => code.to_string(),
            None => format!("signal {}", self.status.signal().unwrap_or(0)),
        }
    }

    /// Describes the differences; empty if there are none.
    pub fn differs_from(&self, bare: &Outcome, unordered: bool) -> String {
        let mut reported = String::new();
        if self.end() != bare.end() {
            reported += &format!("\n  ended with {} instead of {}", self.end(), bare.end());
        }
        for (what, ours, bare) in [("output", &self.out, &bare.out), ("errors", &self.error, &bare.error)] {
            let (ours, bare) = (lines(ours, unordered), lines(bare, unordered));
            if ours != bare {
                let new: Vec<&&str> = ours.iter().filter(|line| !bare.contains(line)).take(5).collect();
                let gone: Vec<&&str> = bare.iter().filter(|line| !ours.contains(line)).take(5).collect();
                reported += &format!(
                    "\n  {what}: {} lines, without an agent {}\n   new {new:#?}\n   gone {gone:#?}",
                    ours.len(),
                    bare.len()
                );
            }
        }
        let names = |files: &BTreeMap<String, Vec<u8>>| files.keys().cloned().collect::<Vec<_>>();
        if self.files != bare.files {
            reported +=
                &format!("\n  files {:?}, without an agent {:?}", names(&self.files), names(&bare.files));
        }
        reported
    }
}
