//! Properties of every imported file and of the runs it contains.

use crate::memory;
use gpumem_import::{Format, read_with_blocks};
use gpumem_model::run::Run;
use gpumem_report::text::escape;
use gpumem_runs::input::{Error, Input};
use std::io::Cursor;
use std::path::Path;

/// File name that is passed to the importers.
pub const NAME: &str = "input";

/// Imports bytes as a file of that format, in bounded memory: `fixed` plus `per_byte` for each byte. The run's sums
/// must be consistent, and an error must have one line.
pub fn import(bytes: &[u8], format: Option<&str>, fixed: usize, per_byte: usize) -> Vec<Run> {
    let format: Option<&'static Format> =
        format.map(|name| gpumem_import::format(name).expect("a format's name"));
    let most = fixed + per_byte * bytes.len();
    let runs = memory::bounded(most, || {
        Input::new(Path::new(NAME), Cursor::new(bytes.to_vec()))
            .and_then(|input| read_with_blocks(input, format))
    });
    match runs {
        Ok(runs) => {
            runs.iter().for_each(sound);
            runs
        }
        Err(error) => {
            told(&error);
            Vec::new()
        }
    }
}

fn told(error: &Error) {
    let text = error.to_string();
    assert!(text.starts_with(NAME), "an error names its file: {text}");
    harmless(&text);
}

/// Asserts that `text` is one line without control characters.
pub fn harmless(text: &str) {
    assert_eq!(escape(text), *text, "a sentence is harmless");
}

/// Asserts the invariants of every run.
pub fn sound(run: &Run) {
    for device in &run.devices {
        for moment in [&device.last, &device.peak] {
            let sum = moment.amounts.iter().map(|(_, bytes)| bytes).sum::<i64>();
            assert!(moment.tracked_bytes.is_none_or(|tracked| tracked == sum), "cells sum to tracked");
            let known = |(cell, _): &(u32, i64)| (*cell as usize) < run.cells.len();
            assert!(moment.amounts.iter().all(known), "amounts are of cells that there are");
            assert!(moment.amounts.is_sorted_by(|(one, _), (other, _)| one < other), "each cell once");
            let parts = moment.gap_parts().map(|parts| parts.sum());
            assert!(parts.is_none() || parts == moment.untrackable_bytes, "parts sum to untrackable");
        }
        for bucket in &device.series.buckets {
            for extremes in [&bucket.tracked, &bucket.untrackable].into_iter().flatten() {
                assert!(extremes.min <= extremes.max);
            }
        }
    }
}
