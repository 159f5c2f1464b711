//! Requests of PyTorch's allocator under any settings text: the model's amounts agree, and everything is given back at the end.
#![no_main]

use gpumem_replay::{
    Device, Event, EventReturn, Options, PoolKind, Release, Replay, SegmentAddresses, Settings,
};
use libfuzzer_sys::fuzz_target;

/// Reads numbers from the input; 0 at its end.
struct Numbers<'a>(&'a [u8]);

impl Numbers<'_> {
    fn next(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }
}

fuzz_target!(|bytes: &[u8]| {
    let end = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(0);
    let release = Release::new(u16::from(bytes.first().copied().unwrap_or(0) % 17));
    let Ok(text) = std::str::from_utf8(bytes.get(1..end).unwrap_or_default()) else { return };
    let Ok(settings) = Settings::parse(text, release) else { return };
    let mut numbers = Numbers(bytes.get(end + 1..).unwrap_or_default());
    let returns = [EventReturn::AsRecorded, EventReturn::AtOnce, EventReturn::AtSynchronisation];
    let addresses = [SegmentAddresses::Rising, SegmentAddresses::Falling, SegmentAddresses::LowestFree];
    let device = Device { total_bytes: 1 << 30, other_bytes: 0 };
    let options = Options {
        release,
        settings,
        fraction: None,
        device,
        addresses: addresses[usize::from(numbers.next()) % 3],
        returns: returns[usize::from(numbers.next()) % 3],
    };
    let mut replay = Replay::new(options);
    let own_allocator = PoolKind::User { has_own_allocator: true, no_split: true, use_on_oom: true };
    while !numbers.0.is_empty() {
        let (kind, id, stream) =
            (numbers.next(), u64::from(numbers.next() % 32), u32::from(numbers.next() % 3));
        let pool = stream;
        let event = match kind % 12 {
            0..=3 => {
                let bytes = u64::from(numbers.next()) << (numbers.next() % 24);
                Event::Request { id, bytes, stream, pool: u32::from(kind / 12 % 4), has_failed: kind > 250 }
            }
            4..=5 => Event::Free { id, is_pending: kind % 2 == 0 },
            6 => Event::Return { id },
            7 => Event::EmptyCache { pool: (stream > 0).then_some(pool) },
            8 => Event::PoolBegins {
                pool: pool + 1,
                kind: if stream > 1 { own_allocator } else { PoolKind::Graph },
            },
            9 => Event::PoolEnds { pool },
            10 if stream > 0 => Event::ScopeBegins { pool },
            10 => Event::ScopeEnds { pool: u32::from(numbers.next() % 3) },
            _ if stream > 0 => Event::OtherMemory { bytes: u64::from(numbers.next()) << 22 },
            _ => Event::Fraction(f64::from(numbers.next()) / 200.0),
        };
        if replay.apply(&event).is_err() {
            continue;
        }
        let figures = replay.figures();
        assert!(figures.allocated.now <= figures.active.now && figures.active.now <= figures.reserved.now);
        assert!(
            figures.allocated.now <= figures.allocated.peak && figures.reserved.now <= figures.reserved.peak
        );
        assert!(
            figures.allocated_at_peak <= figures.reserved.peak && figures.requested.now <= figures.active.now
        );
    }
    for id in 0..32 {
        let _ = replay.apply(&Event::Free { id, is_pending: false });
    }
    for pool in 1..5 {
        let _ = replay.apply(&Event::PoolEnds { pool });
    }
    let _ = replay.apply(&Event::EmptyCache { pool: None });
    let figures = replay.figures();
    if !replay.has_ended() {
        assert_eq!((figures.allocated.now, figures.active.now), (0, 0));
    }
});
