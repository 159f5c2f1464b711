//! Import of the largest available log: gpumem-runs in this process, gpumemctl as a program, and a plain Python reader that only
//! sums.

use super::programs::{gpumemctl, run_quietly};
use super::rounds::{Contestant, Per, print_table};
use crate::samples::sample;
use gpumem_import::read_file;
use std::path::Path;
use std::process::Command;

const LARGEST: &str = "tbd-log/iwslt15-vi_en-tbd-partial_fw_prop-memory_profile.with-nvidia-smi.log";
const ROUNDS: usize = 9;

pub fn run() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let log = sample(LARGEST).unwrap_or_else(|| here.join("data/small-train.log"));
    let lines = std::fs::read_to_string(&log).expect("a log").lines().count();
    println!("{lines} lines, {} bytes\n", std::fs::metadata(&log).expect("a log").len());

    let mut library = Contestant::new("importer and ledger");
    let mut program = Contestant::new("gpumemctl report FILE");
    let mut python = Contestant::new("python3, sums only");
    let reader = here.join("data/tbd_reader.py");
    let has_python = run_quietly(Command::new("python3").arg(&reader).arg(&log));
    let gpumemctl = gpumemctl();
    for _ in 0..=ROUNDS {
        let mut allocations = 0;
        library.round(lines, || allocations = read_file(&log, None).expect("a log")[0].coverage.allocations);
        assert!(allocations > 0);
        if let Some(gpumemctl) = &gpumemctl {
            program.round(lines, || assert!(run_quietly(Command::new(gpumemctl).arg("report").arg(&log))));
        }
        if has_python {
            python.round(lines, || assert!(run_quietly(Command::new("python3").arg(&reader).arg(&log))));
        }
    }
    let mut contestants = vec![&mut library];
    match gpumemctl {
        Some(_) => contestants.push(&mut program),
        None => println!("gpumemctl is not built: cargo build --release -p gpumemctl"),
    }
    match has_python {
        true => contestants.push(&mut python),
        false => println!("no python3 here: nothing to compare with"),
    }
    contestants.iter_mut().for_each(|contestant| contestant.forget_warm_up());
    let contestants: Vec<&Contestant> = contestants.into_iter().map(|contestant| &*contestant).collect();
    print_table("per line of the log (programs: with their start)", Per::Event, &contestants);
}
