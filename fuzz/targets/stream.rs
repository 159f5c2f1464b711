//! Packets from an agent to the ledger: accepted records are valid for an agent, and a second validation changes
//! nothing.
#![no_main]
#![allow(dead_code)]

#[path = "../../daemon/src/source/agent/frames.rs"]
mod frames;

use frames::{Fault, PacketChecker};
use gpumem_wire::{Body, CodecError, Record, frame};
use libfuzzer_sys::fuzz_target;

const NOW_NS: u64 = 1 << 40;
const AHEAD_NS: u64 = 2_000_000_000;

fuzz_target!(|bytes: &[u8]| {
    // A byte selects packet boundaries and whether times are adjusted.
    let Some((&how, bytes)) = bytes.split_first() else { return };
    let rebase = if how & 1 == 0 { 0 } else { i64::from(how) << 20 };
    let mut stream = PacketChecker::new(rebase);
    let mut second = PacketChecker::new(0);
    for packet in parted(bytes, how & 2 != 0) {
        match stream.check(packet.to_vec(), NOW_NS) {
            Ok((kept, seen)) => {
                assert!(kept.len() <= packet.len());
                let mut records = 0;
                for record in frame::records(&kept) {
                    match record.expect("frames are whole") {
                        Ok(record) => {
                            assert!(record.stamp.time_ns <= NOW_NS + AHEAD_NS);
                            let kind = record.body.kind();
                            assert!(
                                kind < 96 && !matches!(kind, 1 | 2 | 7),
                                "kind {kind} is reserved for the host"
                            );
                            if let Body::Tag { path } = record.body {
                                assert!(path.len() <= gpumem_wire::MAX_TAG_BYTES);
                            }
                        }
                        Err(error) => panic!("{error}"),
                    }
                    records += 1;
                }
                let all = frame::records(packet).count() as u64;
                assert_eq!(
                    records + seen.unknown + seen.forbidden + seen.devices,
                    all,
                    "each is counted once"
                );
                let (again, _) = second.check(kept.clone(), NOW_NS).expect("it was checked");
                assert_eq!(again, kept);
                assert_eq!((second.last_seq, second.has_gaps), (stream.last_seq, stream.has_gaps));
                assert!(stream.take_hints().eq(second.take_hints()));
            }
            Err(fault) => {
                let wrong = frame::records(packet).any(|record| match record {
                    Err(_) => matches!(fault, Fault::Framing(_)),
                    Ok(Err(CodecError::Payload(_))) => {
                        matches!(fault, Fault::Payload(_) | Fault::Time { .. })
                    }
                    Ok(Ok(Record { stamp, body })) => {
                        let late = stamp.time_ns.saturating_add_signed(rebase) > NOW_NS + AHEAD_NS;
                        let long =
                            matches!(body, Body::Tag { path } if path.len() > gpumem_wire::MAX_TAG_BYTES);
                        matches!(fault, Fault::Time { .. }) && late
                            || matches!(fault, Fault::Payload(_)) && long
                    }
                    Ok(Err(_)) => matches!(fault, Fault::Time { .. }),
                });
                assert!(wrong, "{fault} is nowhere in it");
                return; // the connection has ended
            }
        }
    }
});

/// One packet, or a packet for each frame.
fn parted(mut bytes: &[u8], each: bool) -> Vec<&[u8]> {
    let mut packets = Vec::new();
    while each && let Ok(Some((.., after))) = frame::split_frame(bytes) {
        let (packet, rest) = bytes.split_at(bytes.len() - after.len());
        packets.push(packet);
        bytes = rest;
    }
    if !bytes.is_empty() {
        packets.push(bytes);
    }
    packets
}
