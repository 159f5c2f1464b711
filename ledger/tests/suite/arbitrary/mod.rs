//! Records with arbitrary fields: of any kind, from the host and from processes, with few ids so that records affect each other.

use crate::common::{verify, verify_blocks};
use gpumem_ledger::{Ledger, Origin, ProcessKey};
use gpumem_wire::*;
use proptest::prelude::*;

#[derive(Debug, Clone)]
pub struct Said {
    /// 0: the host.
    origin: u8,
    slot: Slot,
}

/// Numbers that a hostile peer with knowledge of the formats might choose.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => 0..12u64,
        3 => (0..8u64).prop_map(|n| n << 20),
        2 => (0..8u64).prop_map(|n| (1 << 48) - n),
        1 => (0..4u64).prop_map(|n| u64::MAX - n),
        1 => any::<u64>(),
    ]
}

pub fn said(most: usize) -> impl Strategy<Value = Vec<Said>> {
    let kinds: Vec<u8> = Body::KINDS.iter().map(|(_, number)| *number).collect();
    let ids = (prop_oneof![8 => 0..5u32, 1 => any::<u32>()], 0..4u32, 0..3u32);
    let small = (prop_oneof![8 => 0..3u16, 1 => any::<u16>()], 0..3u8, 0..16u8, 0..6u8);
    // Increment of `seq`: mostly one.
    let seq = prop_oneof![12 => Just(1u64), 2 => Just(0), 1 => 2..5u64, 1 => any::<u64>()];
    let one = (
        0..3u8,
        proptest::sample::select(kinds),
        (number(), number(), number()),
        ids,
        small,
        (seq, prop_oneof![8 => 0..100u64, 1 => number()]),
    );
    proptest::collection::vec(one, 1..most).prop_map(|all| {
        let (mut seq, mut time) = (0u64, 0u64);
        all.into_iter()
            .map(|(origin, kind, (address, bytes, aux), (tag, thread, context), small, (step, pause))| {
                let (result, device, flags, detail) = small;
                time = time.wrapping_add(pause);
                let this = if step == 0 { 0 } else { seq.wrapping_add(step) };
                if step < 5 {
                    seq = seq.wrapping_add(step);
                }
                let mut slot = [0; SLOT_BYTES];
                for (at, word) in [this, time, address, bytes, aux].into_iter().enumerate() {
                    slot[at * 8..at * 8 + 8].copy_from_slice(&word.to_le_bytes());
                }
                for (at, word) in [(40, tag), (48, thread), (52, context)] {
                    slot[at..at + 4].copy_from_slice(&word.to_le_bytes());
                }
                slot[58..60].copy_from_slice(&result.to_le_bytes());
                slot[60..64].copy_from_slice(&[kind, device, flags, detail]);
                Said { origin, slot }
            })
            .collect()
    })
}

pub fn run(all: &[Said]) {
    let mut ledger = Ledger::new();
    ledger.keep_blocks();
    for said in all {
        let record = Record::decode(&said.slot, b"").expect("every field is valid");
        let origin = match said.origin {
            0 => Origin::Host,
            pid => Origin::Process(ProcessKey { pid: pid.into(), start_ticks: 0 }),
        };
        ledger.observe(origin, &record);
        ledger.snapshot().processes.iter().for_each(|process| verify(process));
        for (_, _, sample) in ledger.take_samples() {
            if let (Some(tracked), Some((low, high))) = (sample.tracked_bytes, sample.tracked_range) {
                assert!(low <= tracked && tracked <= high);
                assert_eq!(crate::common::sum(&sample.amounts), tracked);
            }
        }
    }
    ledger.snapshot().processes.iter().for_each(|process| _ = verify_blocks(&ledger, process));
    ledger.end_windows();
    let windows = ledger.take_windows();
    assert!(windows.into_iter().all(|(.., window)| window.min <= window.last && window.last <= window.max));
}
