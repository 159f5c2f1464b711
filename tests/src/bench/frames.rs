//! Cost of the module path for a framework's block: alloc and free from C below a number of Python frames. Two processes
//! alternate, one that reads the frames and one with GPUMEM_FRAMES=0. Only the alloc is named. The agent writes a recording to
//! /dev/null.

use super::rounds::{Contestant, Per, print_table};
use crate::live::programs::programs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

const EVENTS: u64 = 10_000;
const ROUNDS: usize = 60;

/// Runs pairs with 1,000 live blocks in between, and prints their time.
const LOOP: &str = "
#include <stdint.h>
#include <time.h>
static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
uint64_t pairs(void (*alloc)(uint64_t, uint64_t, uint64_t, uint32_t), void (*release)(uint64_t, uint64_t, int),
               uint64_t pool, uint64_t events) {
    uint64_t start = now();
    for (uint64_t done = 0; done < events; done += 1000) {
        for (uint64_t n = 0; n < 1000; n++) alloc(pool, 0x700000000000u + n * 512, 512, 0);
        for (uint64_t n = 0; n < 1000; n++) release(pool, 0x700000000000u + n * 512, 0);
    }
    return now() - start;
}
";

struct Program {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Program {
    /// Starts a process that prints how it reads the frames.
    fn start(folder: &Path, frames: &str) -> (Self, String) {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut child = Command::new("python3")
            .arg(here.join("src/bench/frames.py"))
            .arg(programs().ours.join("libgpumem.so"))
            .arg(folder.join("loop.so"))
            .arg(here.join("../agent-lib/python/gpumem/torch"))
            .arg(EVENTS.to_string())
            .env("GPUMEM_RECORD", "/dev/null")
            .env("GPUMEM_FRAMES", frames)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 is needed");
        let to = child.stdin.take().expect("a pipe");
        let from = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut program = Program { child, to, from };
        let said = program.line();
        (program, said)
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.from.read_line(&mut line).expect("a line");
        line.trim().to_owned()
    }

    fn round(&mut self, contestant: &mut Contestant, depth: usize, named: bool) {
        writeln!(self.to, "{depth} {}", u8::from(named)).expect("it listens");
        let took = self.line().parse().expect("nanoseconds");
        contestant.took(EVENTS as usize, Duration::from_nanos(took));
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn compiled() -> PathBuf {
    let folder = std::env::temp_dir().join(format!("gpumem-bench-frames-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let source = folder.join("loop.c");
    std::fs::write(&source, LOOP).expect("written");
    let mut compiler = Command::new("cc");
    let compiler = compiler.args(["-shared", "-fPIC", "-O2", "-o"]).arg(folder.join("loop.so")).arg(&source);
    assert!(compiler.status().expect("cc is needed").success());
    folder
}

/// Runs the whole benchmark.
pub fn run() {
    let folder = compiled();
    let (mut off, said) = Program::start(&folder, "0");
    assert_eq!(said, "GPUMEM_FRAMES=0");
    let (mut on, said) = Program::start(&folder, "1");
    assert_eq!(said, "proved");
    let [mut near, mut middle, mut far, mut nothing, mut floor, mut again] = [
        "module 5 frames up",
        "module 20 frames up",
        "module 40 frames up",
        "no module, 40 frames",
        "frames not read, 20 frames",
        "the same once more",
    ]
    .map(Contestant::new);
    for _ in 0..=ROUNDS {
        on.round(&mut near, 5, true);
        off.round(&mut floor, 20, true);
        on.round(&mut middle, 20, true);
        off.round(&mut again, 20, true);
        on.round(&mut far, 40, true);
        on.round(&mut nothing, 40, false);
    }
    let mut all = [near, middle, far, nothing, again, floor];
    all.iter_mut().for_each(Contestant::forget_warm_up);
    let all: Vec<&Contestant> = all.iter().collect();
    print_table("a block's alloc and free, per pair; the alloc is named after its module", Per::Event, &all);
    drop((on, off));
    let _ = std::fs::remove_dir_all(folder);
}
