//! Records of a process list as the driver wrote them into the buffer.

use super::{RECORD_BYTES, UNTOUCHED};
use crate::source::nvml::answer::Charge;

fn word(buffer: &[u64], byte: usize) -> u64 {
    buffer.get(byte / 8).copied().unwrap_or(0)
}

/// Distance of the records of a newest list: 24, but 32 if the driver has written exactly to the end of `count`
/// records of 32. A driver that wipes the whole array first leaves no trace; then the symbols decide.
pub(super) fn stride(buffer: &[u64], count: usize, looks_like_535: bool) -> usize {
    let untouched = u64::from_ne_bytes([UNTOUCHED; 8]);
    let records = buffer.len() * 8 / RECORD_BYTES;
    if count == 0 || count > records || word(buffer, count * 24) == untouched {
        return 24; // nothing was written behind the records of 24
    }
    let ends_at_32 = count == records || word(buffer, count * 32) == untouched;
    let wrote_last = word(buffer, count * 32 - 8) != untouched;
    let wiped = !ends_at_32;
    if (wiped && looks_like_535) || (!wiped && wrote_last) { 32 } else { 24 }
}

/// Reads `count` records, as far as the buffer goes.
pub(super) fn parse(
    buffer: &[u64],
    count: usize,
    stride: usize,
    has_protected: bool,
    charges: &mut Vec<Charge>,
) {
    let none = u32::MAX;
    for record in buffer.chunks_exact(stride / 8).take(count) {
        let instance = record.get(2).map_or((none, none), |&pair| halves(pair));
        charges.push(Charge {
            pid: halves(record[0]).0,
            bytes: Some(record[1]).filter(|&bytes| bytes != u64::MAX),
            instance: Some(instance).filter(|&(gpu, compute)| gpu != none && compute != none),
            protected_bytes: record.get(3).filter(|&&bytes| has_protected && bytes != u64::MAX).copied(),
        });
    }
}

/// The two u32 in memory order.
fn halves(word: u64) -> (u32, u32) {
    let bytes = word.to_ne_bytes();
    let [a, b, c, d, e, f, g, h] = bytes;
    (u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h]))
}
