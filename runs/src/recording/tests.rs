use super::*;
use gpumem_wire::{ClockKind, DeviceIdKind, Reading};
use std::path::Path;

/// Kinds of records that [`read`] decodes in different ways.
#[derive(Clone, Copy)]
enum Kind {
    /// Without a payload.
    Plain,
    Tag,
    Hello,
    Anchor,
    Device,
    Origin,
    /// A kind that this version does not know.
    Unknown,
}

/// Appends a frame of that kind; `number` makes its content unique.
fn append(kind: Kind, number: u64, bytes: &mut Vec<u8>) {
    let path = "x".repeat(number as usize * 7919 % 300);
    let body = match kind {
        Kind::Plain | Kind::Unknown => Body::FreeBegin { address: number },
        Kind::Tag => Body::Tag { path: &path },
        Kind::Hello => {
            Body::Hello { start_ticks: number, versions: 1, capabilities: 0, instance: 1, claims: &path }
        }
        Kind::Anchor => {
            Body::ClockAnchor { realtime_ns: number, boottime_ns: 1, clock: ClockKind::Monotonic }
        }
        Kind::Device => {
            let (total_bytes, id) = (Reading::of(number), DeviceIdKind::Gpu);
            Body::Device { uuid_high: 1, uuid_low: 2, total_bytes, ordinal: 0, id, name: "" }
        }
        Kind::Origin => Body::Origin { start_ticks: number },
    };
    let start = bytes.len();
    let thread = (number % 5) as u32;
    Record { stamp: Stamp { seq: number, thread, ..Stamp::default() }, body }.append_frame(bytes);
    if matches!(kind, Kind::Unknown) {
        bytes[start + frame::PREFIX_BYTES + 60] = 255; // the place of the kind in a slot
    }
}

/// What a sink took: origin and bytes of each record, and the number of rejected records.
#[derive(Default, PartialEq)]
struct Taken {
    records: Vec<(Origin, Vec<u8>)>,
    rejected: u64,
}

impl Sink for Taken {
    fn observe(&mut self, origin: Origin, record: &Record<'_>) {
        let mut bytes = Vec::new();
        record.append_frame(&mut bytes);
        self.records.push((origin, bytes));
    }

    fn reject(&mut self, count: u64) {
        self.rejected += count;
    }
}

/// Decodes one frame after the other.
fn one_by_one(mut rest: &[u8]) -> Taken {
    let mut origins = Origins { now: None, has_origin_record: false };
    let mut taken = Taken::default();
    while let Ok(Some((slot, payload, after))) = frame::split_frame(rest) {
        match Record::decode(slot, payload) {
            Ok(record) => match origins.origin_of(&record) {
                Some(origin) => taken.observe(origin, &record),
                None => taken.rejected += u64::from(origins.now.is_none()),
            },
            Err(_) => taken.rejected += 1,
        }
        rest = after;
    }
    taken
}

#[test]
fn mixed_records_keep_their_order_and_origin() {
    use Kind::{Anchor, Device, Hello, Origin, Plain, Tag, Unknown};
    const COMMON: [Kind; 12] =
        [Plain, Plain, Tag, Plain, Unknown, Anchor, Plain, Plain, Plain, Device, Tag, Plain];
    // Records before the first one that names an origin, and those that name origins.
    let cases: [(&[Kind], &[Kind]); 5] = [
        (&[Plain, Plain, Tag, Plain], &[Origin]),
        (&[Anchor, Plain, Device, Plain, Unknown], &[Hello]),
        (&[Origin], &[Origin, Hello]),
        (&[Hello], &[Hello, Origin]),
        (&[Plain], &[]),
    ];
    for (at, (first, naming)) in cases.into_iter().enumerate() {
        let mut bytes = Vec::new();
        let mut kinds = first.iter().chain(COMMON.iter()).copied().collect::<Vec<_>>();
        // Enough for several buffers. Origins change after a number of records that no other length divides.
        for number in 0..20_000 {
            let new = naming.get(number / 37 % naming.len().max(1)).filter(|_| number % 37 == 0);
            kinds.push(new.copied().unwrap_or(COMMON[number % COMMON.len()]));
        }
        (1..).zip(kinds).for_each(|(number, kind)| append(kind, number, &mut bytes));
        let expected = one_by_one(&bytes);
        let mut taken = Taken::default();
        let file = io::Cursor::new([&frame::header()[..], &bytes].concat());
        read(Input::new(Path::new("mixed.gpumem"), file).expect("an input"), &mut taken)
            .expect("a recording");
        assert_eq!(
            (taken.records.len(), taken.rejected),
            (expected.records.len(), expected.rejected),
            "{at}"
        );
        assert!(taken == expected, "case {at}: another order, origin or content");
        assert_eq!(
            taken.records.iter().any(|(origin, _)| matches!(origin, super::Origin::Process(_))),
            !naming.is_empty()
        );
    }
}
