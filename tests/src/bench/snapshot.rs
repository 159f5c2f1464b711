//! Import of PyTorch's snapshots: gpumem-runs in this process, gpumemctl as a program, and Python's own reader, which only builds
//! its lists and dicts. The sample is small; the large file is generated, and resembles that of a training of some hours.

use super::memory::peak_bytes;
use super::programs::{gpumemctl, run_quietly};
use super::rounds::{Contestant, Per, print_table};
use crate::samples::sample;
use gpumem_import::read_file;
use std::path::Path;
use std::process::Command;

const SAMPLE: &str = "pytorch-snapshot/memory_ctx128_forward_.pickle";
const LOAD: &str = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))";
const MIB: u64 = 1 << 20;

pub fn run() {
    if let Some(path) = sample(SAMPLE) {
        compare("the sample", &path, 9);
    }
    let path = std::env::temp_dir().join(format!("gpumem-bench-{}.pickle", std::process::id()));
    std::fs::write(&path, made()).expect("a file");
    compare("one of 400,000 entries, 60 frames deep", &path, 3);
    let _ = std::fs::remove_file(&path);
}

fn compare(title: &str, path: &Path, rounds: usize) {
    println!("{title}: {} bytes", std::fs::metadata(path).expect("a file").len());
    let mut library = Contestant::new("importer and ledger");
    let mut program = Contestant::new("gpumemctl report FILE");
    let mut python = Contestant::new("python3, pickle.load only");
    let load = || {
        let mut command = Command::new("python3");
        command.args(["-c", LOAD]).arg(path);
        command
    };
    let report = gpumemctl().map(|gpumemctl| {
        move || {
            let mut command = Command::new(&gpumemctl);
            command.arg("report").arg(path);
            command
        }
    });
    let has_python = run_quietly(&mut load());
    for _ in 0..=rounds {
        library.round(1, || assert!(read_file(path, None).expect("a snapshot")[0].coverage.events > 0));
        if let Some(report) = &report {
            program.round(1, || assert!(run_quietly(&mut report())));
        }
        if has_python {
            python.round(1, || assert!(run_quietly(&mut load())));
        }
    }
    let mut contestants = vec![&mut library];
    match &report {
        Some(_) => contestants.push(&mut program),
        None => println!("gpumemctl is not built: cargo build --release -p gpumemctl"),
    }
    match has_python {
        true => contestants.push(&mut python),
        false => println!("no python3 here: nothing to compare with"),
    }
    contestants.iter_mut().for_each(|contestant| contestant.forget_warm_up());
    let contestants: Vec<&Contestant> = contestants.into_iter().map(|contestant| &*contestant).collect();
    print_table("a whole file (programs: with their start)", Per::Round, &contestants);
    if let Some(report) = &report {
        println!("most memory of gpumemctl: {} MiB", peak_bytes(&mut report()) / MIB);
    }
    if has_python {
        println!("most memory of python3:   {} MiB", peak_bytes(&mut load()) / MIB);
    }
    println!();
}

const ENTRIES: u64 = 400_000;
const SLOTS: u64 = 20_000;
const STACKS: u64 = 500;
const FRAMES: u64 = 2_000;
const DEPTH: u64 = 60;
const ADDRESS: u64 = 0x7f00_0000_0000;

/// Makes a pickle of protocol 4: blocks allocated and freed in one segment, each entry with its own list of frames.
fn made() -> Vec<u8> {
    let mut out = Pickle { bytes: b"\x80\x04}(".to_vec(), memo: 0 };
    let names = ["action", "addr", "size", "stream", "time_us", "frames", "name", "filename", "line"];
    let keys: Vec<u32> = names.iter().map(|name| out.text(name)).collect();
    out.bytes.extend(b"1("); // pop from the stack; they stay in the memo
    let actions: Vec<u32> = ["alloc", "free_requested", "free_completed"].map(|name| out.text(name)).to_vec();
    let frames: Vec<u32> = (0..FRAMES)
        .map(|frame| {
            out.bytes.extend(b"}(");
            out.get(keys[6]);
            out.text(&format!("at::native::operator_{frame}(at::Tensor const&)"));
            out.get(keys[7]);
            out.text(if frame % 8 == 0 { "/home/me/model.py" } else { "??" });
            out.get(keys[8]);
            out.int(frame);
            out.bytes.extend(b"u\x94");
            out.memo += 1;
            out.memo - 1
        })
        .collect();
    out.bytes.extend(b"1(");
    out.text("segments");
    out.bytes.extend(b"](}(");
    for (name, number) in [("device", 0), ("address", ADDRESS), ("total_size", SLOTS * MIB), ("stream", 0)] {
        out.text(name);
        out.int(number);
    }
    out.text("blocks");
    out.bytes.extend(b"]ue");
    out.text("device_traces");
    out.bytes.extend(b"](](");
    for entry in 0..ENTRIES {
        let (slot, action) = (entry / 3 % SLOTS, (entry % 3) as usize);
        out.bytes.extend(b"}\x94(");
        out.memo += 1;
        out.get(keys[0]);
        out.get(actions[action]);
        for (key, number) in
            [(1, ADDRESS + slot * MIB), (2, 700_000), (3, 0), (4, 1_700_000_000_000_000 + entry)]
        {
            out.get(keys[key]);
            out.int(number);
        }
        out.get(keys[5]);
        out.bytes.extend(b"]\x94(");
        out.memo += 1;
        let stack = entry / 3 % STACKS;
        (0..DEPTH).for_each(|depth| out.get(frames[((stack * 7 + depth * 31) % FRAMES) as usize]));
        out.bytes.extend(b"eu");
    }
    out.bytes.extend(b"eeu.");
    out.bytes
}

struct Pickle {
    bytes: Vec<u8>,
    memo: u32,
}

impl Pickle {
    /// Writes a string and puts it into the memo.
    fn text(&mut self, text: &str) -> u32 {
        self.bytes.push(b'X');
        self.bytes.extend((text.len() as u32).to_le_bytes());
        self.bytes.extend(text.bytes());
        self.bytes.push(0x94);
        self.memo += 1;
        self.memo - 1
    }

    fn get(&mut self, place: u32) {
        self.bytes.push(b'j');
        self.bytes.extend(place.to_le_bytes());
    }

    fn int(&mut self, number: u64) {
        self.bytes.extend([0x8a, 8]);
        self.bytes.extend(number.to_le_bytes());
    }
}
