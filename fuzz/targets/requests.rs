//! The stream of requests that is kept with a run: any bytes are read in bounded memory, and what they request can be replayed.
#![no_main]

use gpumem_fuzz::memory::bounded;
use gpumem_import::recorded::kept_requests;
use gpumem_import::torch_snapshot::Requests;
use gpumem_replay::{Device, EventReturn, Options, Release, Replay, SegmentAddresses, Settings};
use libfuzzer_sys::fuzz_target;
use std::path::Path;

/// Bytes of memory that reading may use, plus `PER_BYTE` for each byte of the stream.
const FIXED: usize = 1 << 20;
const PER_BYTE: usize = 2000;

fuzz_target!(|bytes: &[u8]| {
    // Two pieces, so that the second may begin with a state.
    let pieces: Vec<Vec<u8>> = bytes.splitn(2, |byte| *byte == 0xff).map(<[u8]>::to_vec).collect();
    let limit = FIXED + bytes.len() * PER_BYTE;
    let Ok(devices) = bounded(limit, || kept_requests(&pieces, Path::new("r7"), None, true)) else { return };
    devices.iter().for_each(replay);
});

/// Replays the requests of a device.
fn replay(requests: &Requests) {
    let options = Options {
        release: Release::LAST,
        settings: Settings::default(),
        fraction: None,
        device: Device { total_bytes: 1 << 48, other_bytes: 0 },
        addresses: SegmentAddresses::LowestFree,
        returns: EventReturn::AsRecorded,
    };
    let mut replay = Replay::new(options);
    for event in &requests.events {
        replay.apply(event).expect("ids are unique");
    }
    let figures = replay.figures();
    assert!(figures.allocated.now <= figures.active.now && figures.active.now <= figures.reserved.now);
}
