//! Cost of an NVTX range in an annotated program: push and pop through the shared library, as NVTX calls it. The floor
//! is the same program without an injection library, where NVTX does nothing. The C API's scopes are measured for
//! comparison.

use super::rounds::{Contestant, Per, print_table};
use crate::live::programs::programs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const PAIRS: usize = 1_000_000;
const ROUNDS: usize = 20;

const MAIN: &str = r#"
#define _GNU_SOURCE
#include "gpumem.h"
#include <stdio.h>
#include <time.h>
void push_pop(const char *text, int pairs);
void push_pop_registered(const char *text, int pairs);
static long long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}
static void scopes(const char *text, int pairs) {
    for (; pairs > 0; pairs--) {
        gpumem_push(text);
        gpumem_pop();
    }
}
int main(int argc, char **argv) {
    int pairs = atoi(argv[1]), rounds = atoi(argv[2]);
    void (*work)(const char *, int) = argv[3][0] == 'n' ? push_pop : argv[3][0] == 'r' ? push_pop_registered : scopes;
    (void)argc;
    work("warm", 1000);
    for (; rounds > 0; rounds--) {
        long long start = now();
        work("layer.17", pairs);
        printf("%lld\n", now() - start);
    }
    return 0;
}
"#;

/// Builds the program that measures itself.
fn build() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let dir = std::env::temp_dir().join(format!("gpumem-nvtx-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    let (main, program) = (dir.join("main.c"), dir.join("program"));
    std::fs::write(&main, MAIN).expect("written");
    let mut command = Command::new("cc");
    command.args(["-O2", "-o"]).arg(&program).arg(&main).arg(root.join("agent-lib/tests/nvtx/client.c"));
    command.arg("-I").arg(root.join("agent-lib/include")).arg("-ldl");
    assert!(command.status().expect("cc runs").success());
    program
}

/// Prints the table.
pub fn run() {
    let program = build();
    let library = programs().ours.join("libgpumem.so");
    let mut ways = [
        (Contestant::new("nvtxRangePush + Pop"), "nvtx", true),
        (Contestant::new("with a registered string"), "registered", true),
        (Contestant::new("gpumem_push + pop, from C"), "scopes", true),
        (Contestant::new("NVTX with nothing injected"), "nvtx", false),
    ];
    for _ in 0..=1 {
        for (contestant, what, injected) in &mut ways {
            let mut command = Command::new(&program);
            command.args([&PAIRS.to_string(), &ROUNDS.to_string(), *what]);
            command.env_remove("NVTX_INJECTION64_PATH").env_remove("CUDA_INJECTION64_PATH");
            if *injected {
                command.env("NVTX_INJECTION64_PATH", &library).env("CUDA_INJECTION64_PATH", &library);
            }
            let output = command.env("GPUMEM_SOCKET", "/nonexistent").output().expect("it runs");
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let rounds: Vec<u64> = text.lines().filter_map(|line| line.parse().ok()).collect();
            assert_eq!(rounds.len(), ROUNDS, "{text}");
            rounds.iter().for_each(|&ns| contestant.took(PAIRS, Duration::from_nanos(ns)));
        }
    }
    ways.iter_mut().for_each(|(contestant, ..)| contestant.forget_warm_up());
    let contestants: Vec<&Contestant> = ways.iter().map(|(contestant, ..)| contestant).collect();
    print_table("an NVTX range", Per::Event, &contestants);
    if let Some(dir) = program.parent() {
        let _ = std::fs::remove_dir_all(dir);
    }
}
