//! Every format's reader on untrusted input: files of other formats, truncated or changed files, and noise. Within the time
//! limit, each gives a run whose sums add up, or an error that names the file.
mod examples;

use examples::example;
use gpumem_import::{FORMATS, Format, format, read_file};
use gpumem_model::run::Run;
use gpumem_report::rules::Groupings;
use gpumem_report::text::{Layout, text};
use gpumem_report::{GroupBy, Report};
use proptest::prelude::*;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A temporary file, removed on drop.
struct File(PathBuf);

impl File {
    fn new(bytes: &[u8]) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("gpumem-hostile-{}-{number}", std::process::id()));
        std::fs::write(&path, bytes).expect("a file");
        File(path)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Imports `bytes` and checks that every run adds up. A refusal must be one line that names the file.
fn read(bytes: &[u8], forced: Option<&'static Format>) -> Result<Vec<Run>, String> {
    let file = File::new(bytes);
    let start = Instant::now();
    let runs = read_file(&file.0, forced);
    gpumem_test_support::bar(&format!("import as {forced:?}"), start.elapsed(), Duration::from_secs(30));
    let runs = match runs {
        Ok(runs) => runs,
        Err(error) => {
            let error = error.to_string();
            assert!(error.starts_with(&file.0.display().to_string()) && !error.contains('\n'), "{error}");
            return Err(error);
        }
    };
    for run in &runs {
        let report = Report::new(run, Groupings::of_run(run), Some(GroupBy::Tag));
        for device in &run.devices {
            for moment in [&device.last, &device.peak] {
                if let Some(tracked) = moment.tracked_bytes {
                    assert_eq!(tracked, moment.amounts.iter().map(|(_, bytes)| bytes).sum::<i64>());
                }
            }
            assert!(report.statement(device, 8, 0).adds_up(), "{forced:?}");
        }
        let told = text(&report, Layout::default());
        assert!(!told.contains('\u{1b}'), "nothing that a terminal acts on: {told:?}");
    }
    Ok(runs)
}

#[test]
fn every_format_knows_its_own_example() {
    for of in FORMATS {
        let runs = read(&example(of.name), None).unwrap_or_else(|error| panic!("{}: {error}", of.name));
        assert_eq!(runs[0].source.kind, of.name, "guessed from its content");
        assert!(read(&example(of.name), Some(of)).is_ok(), "{}", of.name);
    }
}

#[test]
fn a_file_of_another_format_is_refused_or_read_as_what_it_is() {
    for of in FORMATS {
        for other in FORMATS {
            let _ = read(&example(of.name), Some(other));
        }
    }
}

#[test]
fn a_file_that_ends_anywhere_is_no_surprise() {
    for of in FORMATS {
        let whole = example(of.name);
        for end in 0..whole.len() {
            let _ = read(&whole[..end], Some(of));
        }
    }
}

#[test]
fn noise_and_long_runs_of_one_byte_are_refused() {
    let mut state = 88_172_645_463_325_252_u64;
    let mut noise = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    let noise: Vec<u8> = (0..300_000).map(|_| noise()).collect();
    for of in FORMATS {
        let head = example(of.name);
        let _ = read(&noise, Some(of));
        let _ = read(&[&head[..], &noise].concat(), Some(of));
        for byte in *b"\0\xff([{\"\\,:\n 9e]-" {
            let _ = read(&vec![byte; 300_000], Some(of));
            let _ = read(&[&head[..head.len() / 2], &vec![byte; 300_000]].concat(), Some(of));
        }
    }
}

#[test]
fn names_that_a_terminal_would_act_on_do_not_reach_it() {
    for of in FORMATS {
        let evil =
            String::from_utf8_lossy(&example(of.name)).replace("fc_weight", "fc\u{1b}[2J\u{202e}\u{7}");
        let _ = read(evil.as_bytes(), Some(of));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn some_other_bytes_are_read_or_refused(
        which in any::<prop::sample::Index>(),
        as_which in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        moves in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 1..60_usize), 0..4),
    ) {
        let own = which.get(FORMATS);
        let mut bytes = example(own.name);
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        for (from, to, len) in moves {
            let (from, to) = (from.index(bytes.len()), to.index(bytes.len()));
            let piece = bytes[from..(from + len).min(bytes.len())].to_vec();
            bytes.splice(to..to, piece);
        }
        let _ = read(&bytes, None);
        for of in [own, as_which.get(FORMATS)] {
            let _ = read(&bytes, format(of.name));
        }
    }
}
