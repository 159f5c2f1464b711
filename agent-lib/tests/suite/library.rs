//! The shared library as a file: its exports, its dependencies, and two copies in one process.

use crate::common::daemon::{Daemon, Folder};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Returns the path of the library that was built with this test.
fn library() -> PathBuf {
    let here = std::env::current_exe().expect("a path");
    let folders = here.ancestors().skip(1).take(2);
    let file = folders.map(|folder| folder.join("libgpumem.so")).find(|file| file.exists());
    file.expect("the library lies beside the test")
}

fn word(bytes: &[u8], at: usize, len: usize) -> usize {
    bytes[at..at + len].iter().rev().fold(0, |word, &byte| word << 8 | usize::from(byte))
}

fn text(bytes: &[u8], at: usize) -> &str {
    let end = bytes[at..].iter().position(|&byte| byte == 0).expect("an end");
    std::str::from_utf8(&bytes[at..at + end]).expect("ASCII")
}

/// Returns the sections of a 64-bit ELF file: type, offset, size, link, info.
fn sections(elf: &[u8]) -> Vec<(usize, usize, usize, usize, usize)> {
    let (start, size, count) = (word(elf, 40, 8), word(elf, 58, 2), word(elf, 60, 2));
    let section = |index: usize| {
        let at = start + index * size;
        (
            word(elf, at + 4, 4),
            word(elf, at + 24, 8),
            word(elf, at + 32, 8),
            word(elf, at + 40, 4),
            word(elf, at + 44, 4),
        )
    };
    (0..count).map(section).collect()
}

#[test]
fn it_runs_with_glibc_2_17() {
    let elf = std::fs::read(library()).expect("a library");
    let sections = sections(&elf);
    let (_, needs, _, names, count) =
        *sections.iter().find(|section| section.0 == 0x6fff_fffe).expect(".gnu.version_r");
    let names = sections[names].1;
    let (mut found, mut at) = (Vec::new(), needs);
    for _ in 0..count {
        let mut need = at + word(&elf, at + 8, 4);
        for _ in 0..word(&elf, at + 2, 2) {
            found.push(text(&elf, names + word(&elf, need + 8, 4)).to_owned());
            need += word(&elf, need + 12, 4);
        }
        at += word(&elf, at + 12, 4);
    }
    assert!(found.iter().any(|version| version.starts_with("GLIBC_2.")), "{found:?}");
    for version in found {
        if let Some(version) = version.strip_prefix("GLIBC_2.") {
            let minor: u32 = version.split('.').next().expect("a number").parse().expect("a number");
            assert!(minor <= 17, "GLIBC_2.{version}: see build.rs");
        }
    }
}

/// Functions for the driver, NVTX and the agent's Python code, which no header declares.
const UNDECLARED: &[&str] = &[
    "InitializeInjection",
    "InitializeInjectionNvtx2",
    // For the agent's Python code, not for C programs.
    "gpumem_adopt",
    "gpumem_adoption_begins",
    "gpumem_auto_step",
    "gpumem_autograd_calibrate",
    "gpumem_autograd_gradients",
    "gpumem_autograd_number",
    "gpumem_code",
    "gpumem_frames_selftest",
    "gpumem_here",
    "gpumem_intern",
    "gpumem_keepers",
    "gpumem_keepers_wanted",
    "gpumem_locals",
    "gpumem_module",
    "gpumem_module_gone",
    "gpumem_modules_settle",
    "gpumem_modules_unknown",
    "gpumem_parameters_named",
    "gpumem_rename",
    "gpumem_models",
    "gpumem_roles",
    "gpumem_scope_edge",
    "gpumem_scope_word",
    "gpumem_step_number",
];

#[test]
fn it_exports_its_interface_alone_and_stays() {
    let elf = std::fs::read(library()).expect("a library");
    let sections = sections(&elf);
    let (_, symbols, bytes, names, _) = *sections.iter().find(|section| section.0 == 11).expect(".dynsym");
    let names = sections[names].1;
    let mut exported: Vec<&str> = (0..bytes / 24)
        .map(|index| symbols + index * 24)
        .filter(|&at| word(&elf, at + 6, 2) != 0) // defined here
        .map(|at| text(&elf, names + word(&elf, at, 4)))
        .collect();
    exported.sort_unstable();
    let header = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("include/gpumem.h"))
        .expect("a header");
    let mut wanted: Vec<String> = header
        .lines()
        .filter_map(|line| {
            let line = line.trim();
            let name = line.strip_prefix("GPUMEM_FIND(").or_else(|| line.strip_prefix("GPUMEM_FIND_NEWER("));
            name?.strip_suffix(");")
        })
        .map(|name| format!("gpumem_{name}"))
        .collect();
    wanted.extend(UNDECLARED.iter().map(|name| (*name).to_owned()));
    wanted.sort_unstable();
    assert_eq!(exported, wanted);
    // DT_FLAGS_1 with DF_1_NODELETE.
    let (_, dynamic, bytes, ..) = *sections.iter().find(|section| section.0 == 6).expect(".dynamic");
    let mut entries = (0..bytes / 16).map(|index| dynamic + index * 16);
    let flags = entries.find(|&at| word(&elf, at, 8) == 0x6fff_fffb).map_or(0, |at| word(&elf, at + 8, 8));
    assert!(flags & 8 != 0, "not linked with -z nodelete");
}

/// A C program that uses the header; with `second`, it also loads that copy and calls it.
const PROGRAM: &str = r#"
#include "gpumem.h"
#include <stdio.h>
#include <unistd.h>
int main(int argc, char **argv) {
    int (*initialize)(void) = 0;
    int (*available)(void) = 0;
    void (*step)(uint64_t) = 0;
    gpumem_push("early");
    printf("%d", gpumem_available());
    if (argc > 1) { /* as the driver does */
        void *injected = dlopen(argv[1], RTLD_LAZY);
        void *found = dlsym(injected, "InitializeInjection");
        memcpy(&initialize, &found, sizeof found);
        printf(" %d", initialize());
    }
    if (argc > 2) {
        void *wheel = dlopen(argv[2], RTLD_NOW);
        void *found = dlsym(wheel, "InitializeInjection");
        memcpy(&initialize, &found, sizeof found);
        printf(" %d", initialize());
        found = dlsym(wheel, "gpumem_available");
        memcpy(&available, &found, sizeof found);
        found = dlsym(wheel, "gpumem_step");
        memcpy(&step, &found, sizeof found);
        step(41);
        printf(" second %d", available());
    }
    gpumem_step(42);
    gpumem_pop();
    if (!gpumem_available()) { /* nothing of it is there */
        uint64_t free_bytes = 7;
        char *text = gpumem_dumps(0, 0, 0, 0);
        if (text != 0 || gpumem_report("json", 0) != 0 || gpumem_dump("x", 1) || gpumem_start() || gpumem_stop()) return 2;
        if (gpumem_memory_info(0, &free_bytes, 0) || free_bytes != 7 || gpumem_configure("marks", "1")) return 3;
        gpumem_mute();
        gpumem_unmute();
        gpumem_counter_set("c", 1);
        gpumem_counter_add("c", -1);
        gpumem_free(text);
    }
    printf(" %d\n", gpumem_available());
    fflush(stdout);
    if (argc > 1) {
        char byte;
        (void)!read(0, &byte, 1);
    }
    return 0;
}
"#;

fn compile(folder: &Folder) -> Option<PathBuf> {
    let (source, program) = (folder.0.join("program.c"), folder.0.join("program"));
    std::fs::write(&source, PROGRAM).expect("a file");
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c99", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"]);
    match compiler.arg(include).arg("-o").arg(&program).arg(&source).arg("-ldl").status() {
        Ok(status) => {
            assert!(status.success(), "the header does not compile");
            Some(program)
        }
        Err(_) => {
            gpumem_test_support::skip("there is no C compiler here", "apt-get install gcc");
            None
        }
    }
}

#[test]
fn the_header_is_c_and_cpp() {
    let folder = Folder::new("header");
    let source = folder.0.join("empty.c");
    std::fs::write(&source, "#include \"gpumem.h\"\nint main(void) { return gpumem_available(); }\n")
        .expect("a file");
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    for (language, standards) in
        [("c", ["c99", "c11", "c17", "c23"]), ("c++", ["c++98", "c++11", "c++17", "c++23"])]
    {
        if language == "c++" && !gpumem_test_support::has_cxx() {
            continue;
        }
        for standard in standards {
            let mut compiler = Command::new("cc");
            compiler.args([
                "-x",
                language,
                "-Wall",
                "-Wextra",
                "-Werror",
                "-pedantic",
                "-fsyntax-only",
                "-I",
            ]);
            let Ok(output) = compiler.arg(&include).arg(format!("-std={standard}")).arg(&source).output()
            else {
                gpumem_test_support::skip("there is no C compiler here", "apt-get install gcc");
                return;
            };
            let told = String::from_utf8_lossy(&output.stderr).into_owned();
            let is_unknown = told.contains("not found") || told.contains("unrecognized command-line option");
            assert!(output.status.success() || is_unknown, "{standard}: {told}");
        }
    }
}

#[test]
fn without_the_library_the_header_is_inert() {
    let folder = Folder::new("inert");
    let Some(program) = compile(&folder) else { return };
    let output = Command::new(program).env_remove("CUDA_INJECTION64_PATH").output().expect("it runs");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0 0\n");
    assert!(output.status.success(), "{:?}", output.status);
}

#[test]
fn two_copies_in_a_process_are_one_agent() {
    let folder = Folder::new("copies");
    let Some(program) = compile(&folder) else { return };
    let socket = folder.0.join("agent.sock");
    let daemon = Daemon::listen(&socket);
    let wheel = folder.0.join("wheel.so");
    std::fs::copy(library(), &wheel).expect("a copy");
    let mut child = Command::new(program)
        .arg(library())
        .arg(&wheel)
        .env("CUDA_INJECTION64_PATH", library())
        .env("GPUMEM_SOCKET", &socket)
        .env_remove("GPUMEM_DISABLE")
        .env_remove("GPUMEM_RECORD")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut peer = daemon.accept_from(child.id());
    peer.resync_from(1);
    peer.until("both steps", |peer| peer.ledger.snapshot().processes[0].coverage.steps == 2);
    assert!(!daemon.is_called(Duration::from_millis(300)), "a second agent");
    drop(child.stdin.take());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "1 1 1 second 1 1\n");
    peer.until("good-bye", |peer| peer.bye);
}

#[test]
fn disabled_means_nothing_at_all() {
    let folder = Folder::new("disabled");
    let Some(program) = compile(&folder) else { return };
    let socket = folder.0.join("agent.sock");
    let daemon = Daemon::listen(&socket);
    let mut child = Command::new(program)
        .arg(library())
        .env("CUDA_INJECTION64_PATH", library())
        .env("GPUMEM_SOCKET", &socket)
        .env("GPUMEM_DISABLE", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    assert!(!daemon.is_called(Duration::from_millis(300)), "an agent");
    drop(child.stdin.take());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0 1 0\n");
}
