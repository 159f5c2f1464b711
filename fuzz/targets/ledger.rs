//! Arbitrary records keep the ledger's sums consistent. The input selects kinds and numbers: mostly small ones, which
//! collide with each other, and sometimes a large one.
#![no_main]

#[path = "../../ledger/tests/suite/common/mod.rs"]
mod common;

use common::verify;
use gpumem_fuzz::number;
use gpumem_ledger::{Ledger, Origin, ProcessKey};
use gpumem_wire::{Body, Record, SLOT_BYTES};
use libfuzzer_sys::fuzz_target;

/// Maximum number of records. Longer sequences reach no further states.
const MOST: usize = 200;

/// Takes a 64-bit word of a slot: close to other words, large, or arbitrary.
fn word(from: &mut &[u8]) -> u64 {
    let form = number(from, 1);
    let low = form & 15;
    match form >> 4 {
        0..=7 => low,
        8 | 9 => low << 20,
        10 => (1 << 48) - low,
        11 => u64::MAX - low,
        12 => number(from, 2),
        13 => number(from, 4),
        14 => low << 40 | number(from, 1) << 9,
        _ => number(from, 8),
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut rest = bytes;
    let mut ledger = Ledger::new();
    let (mut seq, mut time) = (0_u64, 0_u64);
    for _ in 0..MOST {
        if rest.is_empty() {
            break;
        }
        let (head, kind) = (number(&mut rest, 1), number(&mut rest, 1));
        let kind = Body::KINDS[kind as usize % Body::KINDS.len()].1;
        let step = match head >> 2 & 7 {
            0 => 0,
            1..=5 => 1,
            6 => 2,
            _ => word(&mut rest),
        };
        let this = if step == 0 { 0 } else { seq.wrapping_add(step) };
        seq = if step < 5 { seq.wrapping_add(step) } else { seq };
        time = time.wrapping_add(if head & 32 == 0 { 10 } else { word(&mut rest) });
        let places = [word(&mut rest), word(&mut rest), word(&mut rest)];
        let small = number(&mut rest, 2) as u16;
        let mut slot = [0; SLOT_BYTES];
        for (at, value) in [this, time].into_iter().chain(places).enumerate() {
            slot[at * 8..][..8].copy_from_slice(&value.to_le_bytes());
        }
        // tag, thread, context, result, device, flags, detail
        slot[40] = (small & 7) as u8;
        slot[48] = (small >> 3 & 3) as u8;
        slot[52] = (small >> 5 & 3) as u8;
        let wide = if head & 64 == 0 { number(&mut rest, 2) } else { 0 };
        slot[58] = (wide & 7) as u8;
        slot[60..64].copy_from_slice(&[
            kind,
            (small >> 7 & 1) as u8,
            (small >> 8 & 15) as u8,
            (wide >> 8) as u8,
        ]);
        let (slot, payload) = (&slot, if small >> 12 & 1 == 0 { &b""[..] } else { b"a/b" });
        let Ok(record) = Record::decode(slot, payload) else { continue };
        let origin = match head & 3 {
            0 => Origin::Host,
            pid => Origin::Process(ProcessKey { pid: pid as u32, start_ticks: 0 }),
        };
        ledger.observe(origin, &record);
        for (_, _, sample) in ledger.take_samples() {
            if let (Some(tracked), Some((low, high))) = (sample.tracked_bytes, sample.tracked_range) {
                assert!(low <= tracked && tracked <= high);
                assert_eq!(common::sum(&sample.amounts), tracked);
            }
        }
    }
    let snapshot = ledger.snapshot();
    snapshot.processes.iter().for_each(|process| verify(process));
    for (at, process) in snapshot.processes.iter().enumerate() {
        for account in 0..process.accounts.len() {
            let _ =
                (ledger.trend(snapshot.processes[at].key, account), ledger.iterations(process.key, account));
            let _ = ledger.parameters(process.key, account);
            let timeline = ledger.timeline(process.key, account);
            assert!(timeline.points.len() <= gpumem_ledger::MAX_POINTS);
        }
    }
    ledger.end_windows();
    let windows = ledger.take_windows();
    assert!(windows.into_iter().all(|(.., window)| window.min <= window.last && window.last <= window.max));
});
