//! Records of driver calls by the real agent, on the simulated driver, in small C programs.
use gpumem_ledger::{Ledger, Origin, ProcessKey};
use gpumem_tests::live::Machine;
use gpumem_tests::live::programs::programs;
use gpumem_wire::{Body, DriverEventKind, Record, frame};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

const PROGRAM: u64 = 1;
const LATE: u64 = 4;
const LATER: u64 = 5;
const NAMES: [&str; 6] = ["", "/program", "/libone.so", "/libtwo.so", "/liblate.so", "/liblater.so"];
const COROUTINE: u64 = 3;

fn compile(to: &Path, source: &str, options: &[&str]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("suite/calls").join(source);
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]);
    cc.arg(to).arg(source).args(options);
    let output = cc.output().expect("a C compiler");
    assert!(output.status.success(), "{cc:?}\n{}", String::from_utf8_lossy(&output.stderr));
}

/// Builds in `folder` a program that allocates from many places, and its libraries.
fn callers(folder: &Path) -> PathBuf {
    let driver = format!("-L{}", programs().fake.join("lib").display());
    let here = format!("-L{}", folder.display());
    let library = |file: &str, name: &str, allocate: &str, other: &[&str]| {
        let (name, allocate) = (format!("-DNAME={name}"), format!("-DALLOCATE={allocate}"));
        let soname = format!("-Wl,-soname,{file}");
        let options = ["-shared", "-fPIC", &name, &allocate, &soname, &driver, &here];
        compile(&folder.join(file), "library.c", &[&options, other].concat());
    };
    library("libone.so", "one", "cuMemAlloc_v2", &["-lcuda"]);
    library("libcudart.so.12", "cudaMalloc", "cuMemAlloc_v2", &["-lcuda"]);
    library("libtwo.so", "two", "cudaMalloc", &["-l:libcudart.so.12"]);
    library("liblate.so", "late", "cuMemAlloc_v2", &["-lcuda"]);
    library("liblater.so", "later", "cuMemAlloc_v2", &["-lcuda"]);
    let program = folder.join("program");
    let here = here.as_str();
    compile(
        &program,
        "callers.c",
        &[&driver, here, "-lone", "-ltwo", "-l:libcudart.so.12", "-lcuda", "-ldl"],
    );
    program
}

/// Runs it with an agent that records to a file. Returns the recording.
fn recorded(machine: &Machine, program: &Path) -> Vec<u8> {
    let recording = machine.dir.join("recording");
    let mut command = machine.command(program);
    let libraries = format!("{}:{}", programs().fake.join("lib").display(), machine.dir.display());
    command.env("LD_LIBRARY_PATH", libraries);
    command.env("CUDA_INJECTION64_PATH", programs().ours.join("libgpumem.so"));
    command.env("GPUMEM_RECORD", &recording);
    let status = command.status().expect("it runs");
    assert!(status.success(), "{status}");
    std::fs::read(recording).expect("a recording")
}

fn records(recording: &[u8]) -> Vec<Record<'_>> {
    let frames = frame::records(&recording[frame::HEADER_BYTES..]);
    frames.map(|record| record.expect("whole frames").expect("known kinds")).collect()
}

#[test]
fn each_allocation_is_attributed_to_its_library() {
    let machine = Machine::new(&["devices=1"]);
    let recording = recorded(&machine, &callers(&machine.dir));
    let records = records(&recording);
    let mut names: BTreeMap<u16, &str> = BTreeMap::new();
    for record in &records {
        if let Body::Module { path, base, bytes } = record.body {
            assert!(base != 0 && (bytes != 0 || path.starts_with('(')), "{path}");
            let other = names.insert(record.stamp.module, path);
            assert!(other.is_none_or(|other| other == path), "{path} and {other:?} share a number");
        }
    }
    let name_of = |module: u16| names.get(&module).copied().unwrap_or("");

    // (stack, caller) -> records by attribution.
    let mut printed: BTreeMap<(u64, u64), BTreeMap<&str, u64>> = BTreeMap::new();
    for record in &records {
        if let Body::AllocEnd { bytes, .. } = record.body {
            let key = ((bytes >> 4) & 15, bytes & 15);
            *printed.entry(key).or_default().entry(name_of(record.stamp.module)).or_default() += 1;
        }
    }
    println!("{printed:?}");
    for (&(stack, caller), names) in &printed {
        // One library is already unloaded when its name is resolved.
        let gone = |name: &str| caller == LATER && name == "(a library that is gone)";
        let right = |name: &str| name.ends_with(NAMES[caller as usize]) || gone(name);
        let (total, known): (u64, u64) = names.iter().fold((0, 0), |(total, known), (name, count)| {
            (total + count, known + if name.is_empty() { 0 } else { *count })
        });
        assert!(names.keys().all(|name| name.is_empty() || right(name)), "({stack}, {caller}): {names:?}");
        // On a coroutine's stack only one page is scanned, so the caller may not be found.
        let at_least = if stack == COROUTINE { total / 2 } else { total };
        assert!(known >= at_least, "({stack}, {caller}): {names:?}");
    }
    assert_eq!(printed.len(), 5 * 3 + 2, "every stack, every caller");
    assert_eq!(printed[&(0, LATE)].values().sum::<u64>(), 40);
    assert!(printed[&(0, PROGRAM)].keys().all(|name| name.starts_with('/')), "the program by its whole path");

    // Also calls that change the gap.
    for event in [
        DriverEventKind::ContextCreating,
        DriverEventKind::ContextCreated,
        DriverEventKind::ModuleLoaded,
        DriverEventKind::StackLimit,
    ] {
        let is_it = |record: &&Record<'_>| matches!(record.body, Body::DriverEvent { event: kind, .. } if kind == event);
        let mut found = records.iter().filter(is_it);
        let record = found.next().unwrap_or_else(|| panic!("no {event:?}"));
        assert!(found.next().is_none(), "{event:?} twice");
        assert!(name_of(record.stamp.module).ends_with("/program"), "{event:?}");
        assert_eq!(record.stamp.device, 0, "{event:?}");
    }
    // The ledger has it in its cells.
    let mut ledger = Ledger::new();
    let key = ProcessKey { pid: 1, start_ticks: 1 };
    records.iter().for_each(|record| ledger.observe(Origin::Process(key), record));
    let snapshot = ledger.snapshot();
    for name in &NAMES[1..=3] {
        let has = |library: Option<&str>| library.is_some_and(|library| library.ends_with(name));
        let cells = &snapshot.processes[0].cells;
        assert!(cells.iter().any(|cell| has(cell.library.as_deref())), "{name}: {cells:?}");
    }
    let device = records.iter().find(|record| matches!(record.body, Body::Device { .. })).expect("a device");
    assert_eq!(device.stamp.context, 132 << 16 | 2048);
}

#[test]
fn contexts_are_recorded_once_before_they_are_charged() {
    let machine = Machine::new(&["devices=2"]);
    let program = machine.dir.join("contexts");
    let driver = format!("-L{}", programs().fake.join("lib").display());
    compile(&program, "contexts.c", &[&driver, "-lcuda"]);
    let recording = recorded(&machine, &program);
    let mut story = Vec::new();
    for record in records(&recording) {
        let device = record.stamp.device;
        match record.body {
            Body::DriverEvent { event, .. } => story.push(format!("{event:?} {device}")),
            Body::ContextCreate { .. } => story.push(format!("context {device}")),
            Body::ContextDestroy { scope } => story.push(format!("{scope:?} gone {device}")),
            Body::AllocEnd { bytes, .. } => story.push(format!("{bytes} bytes {device}")),
            _ => {}
        }
    }
    let expected = [
        // Retained twice.
        "ContextCreating 1",
        "context 1",
        "ContextCreated 1",
        "1001 bytes 1",
        // A green context is found; it does not count as a created one.
        "GreenContextCreated 1",
        "context 1",
        "1002 bytes 1",
        "Context gone 1",
        // Released once: it lives. Released twice.
        "1003 bytes 1",
        "Context gone 1",
        "ContextCreating 0",
        "context 0",
        "ContextCreated 0",
        "1004 bytes 0",
        "Context gone 0",
        // Retained anew, and reset.
        "ContextCreating 1",
        "context 1",
        "ContextCreated 1",
        "Context gone 1",
        "Device gone 1",
        // On a device that does not exist: nothing.
    ];
    assert_eq!(story, expected);
}
