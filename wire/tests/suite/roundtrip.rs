//! Every field of a record survives every container. Arbitrary bytes of a peer give a result,
//! never a panic. The bytes themselves are fixed by tests/golden/wire.

use gpumem_wire::frame::{self, Error, MAX_FRAME_BYTES, PREFIX_BYTES};
use gpumem_wire::layout::{self, Header};
use gpumem_wire::*;
use proptest::array::uniform32;
use proptest::collection::vec;
use proptest::prelude::*;

/// Bytes of a frame before its payload.
const HEAD_BYTES: usize = PREFIX_BYTES + SLOT_BYTES;

fn stamps() -> impl Strategy<Value = Stamp> {
    let ids = (any::<u32>(), any::<u32>(), any::<u32>(), any::<u32>());
    (any::<u64>(), any::<u64>(), ids, any::<u16>(), any::<u8>(), any::<u8>()).prop_map(
        |(seq, time_ns, (tag, stack, thread, context), module, device, flags)| {
            let flags = Flags(flags);
            Stamp { seq, time_ns, tag, stack, thread, context, module, device, flags }
        },
    )
}

/// A slot of a known kind with random other bytes. Its code is a known one half of the time.
fn slots() -> impl Strategy<Value = Slot> {
    let kinds = proptest::sample::select(Body::KINDS);
    let details = prop_oneof![0_u8..0x60, any::<u8>()];
    (kinds, details, uniform32(any::<u8>()), uniform32(any::<u8>())).prop_map(
        |((_, kind), detail, front, back)| {
            let mut slot = [0; SLOT_BYTES];
            slot[..32].copy_from_slice(&front);
            slot[32..].copy_from_slice(&back);
            (slot[60], slot[63]) = (kind, detail);
            slot
        },
    )
}

/// Decodes a slot of random bytes and passes the record to `check`, because the record borrows its
/// payload.
fn with_record(stamp: Stamp, slot: &Slot, text: &str, check: impl FnOnce(Record<'_>)) {
    let Record { body, .. } = Record::decode(slot, text.as_bytes()).expect("known kind, UTF-8");
    check(Record { stamp, body });
}

fn frame_of(record: &Record<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    record.append_frame(&mut bytes);
    bytes
}

fn raw_frame(slot: &Slot, payload: &[u8]) -> Vec<u8> {
    let length = (SLOT_BYTES + payload.len()) as u32;
    [&length.to_le_bytes(), &slot[..], payload].concat()
}

fn slot_of_kind(kind: u8) -> Slot {
    let mut slot = [0; SLOT_BYTES];
    slot[60] = kind;
    slot
}

fn is_known(kind: u8) -> bool {
    Body::KINDS.iter().any(|&(_, known)| known == kind)
}

fn header() -> Header {
    Header {
        major: MAJOR,
        minor: MINOR,
        pid: 4711,
        start_ticks: 99,
        ring_slots: 1 << 10,
        live_rows: 77,
        name_bytes: 4096,
        head_seq: 5000,
        lost: 3,
        names_end: 4000,
    }
}

proptest! {
    #[test]
    fn a_record_survives_slot_frame_and_packet(
        stamp in stamps(), many in vec((slots(), ".{0,40}"), 1..8)
    ) {
        let mut packet = Vec::new();
        for (slot, text) in &many {
            with_record(stamp, slot, text, |record| {
                let (slot, payload) = record.encode();
                assert_eq!(Record::decode(&slot, payload), Ok(record));

                let bytes = frame_of(&record);
                assert_eq!(bytes.len(), record.frame_bytes());
                packet.extend(bytes);
            });
        }
        let read: Vec<_> = frame::records(&packet).collect();
        assert_eq!(read.len(), many.len());
        for ((slot, text), read) in many.iter().zip(read) {
            with_record(stamp, slot, text, |record| assert_eq!(read, Ok(Ok(record))));
        }
    }

    #[test]
    fn a_record_survives_its_place_in_the_ring(
        stamp in stamps(), slot in slots(), bits in 0_u32..12, seq in 1_u64..u64::MAX
    ) {
        let header = Header { ring_slots: 1 << bits, ..header() };
        let mut file = vec![0; header.file_bytes().expect("it is small") as usize];
        with_record(Stamp { seq, ..stamp }, &slot, "", |record| {
            let at = header.slot_offset(seq) as usize;
            assert!(at >= header.ring_offset() as usize);
            assert!(at + SLOT_BYTES <= header.live_offset().expect("it is small") as usize);
            assert_eq!(header.slot_offset(seq), header.slot_offset(seq % header.ring_slots + header.ring_slots));
            if header.ring_slots > 1 {
                assert_ne!(header.slot_offset(seq), header.slot_offset(seq + 1));
            }
            file[at..at + SLOT_BYTES].copy_from_slice(&record.encode().0);
            let slot = file[at..].first_chunk().expect("a slot");
            assert_eq!(Record::decode(slot, b""), Ok(record));
        });
    }

    #[test]
    fn an_unknown_kind_is_named_and_skipped(
        kind in any::<u8>().prop_filter("not known", |&kind| !is_known(kind)),
        payload in vec(any::<u8>(), 0..100), next in slots()
    ) {
        let packet = [raw_frame(&slot_of_kind(kind), &payload), raw_frame(&next, b"next")].concat();
        let read: Vec<_> = frame::records(&packet).collect();
        assert_eq!(read[0], Ok(Err(CodecError::UnknownKind(kind))));
        assert_eq!(read[1], Ok(Record::decode(&next, b"next")));
        assert_eq!(read.len(), 2);
    }

    #[test]
    fn a_cut_packet_gives_its_whole_frames_and_says_how_much_is_missing(
        first in slots(), second in slots(), text in ".{0,40}"
    ) {
        let whole = [raw_frame(&first, b""), raw_frame(&second, text.as_bytes())].concat();
        for end in HEAD_BYTES + 1..whole.len() {
            let read: Vec<_> = frame::records(&whole[..end]).collect();
            let have = end - HEAD_BYTES;
            let need = if have < PREFIX_BYTES { HEAD_BYTES } else { whole.len() - HEAD_BYTES };
            assert!(matches!(read[0], Ok(Ok(_))));
            assert_eq!(read[1..], [Err(Error::Cut { have, need })]);
        }
    }

    #[test]
    fn random_bytes_are_an_answer(bytes in vec(any::<u8>(), 0..600), file_bytes in any::<u64>()) {
        let _ = frame::records(&bytes).count();
        let _ = frame::read_header(&bytes);
        // The same after the magic number, which a reader checks first.
        let _ = frame::read_header(&[&frame::MAGIC[..], &bytes].concat());
        let framed: Vec<u8> = bytes.chunks(200).flat_map(raw_frame_of).collect();
        let _ = frame::records(&framed).count();
        if let Some(chunk) = bytes.first_chunk::<72>() {
            let mut chunk = *chunk;
            let _ = Header::decode(&chunk, file_bytes);
            chunk[..8].copy_from_slice(&layout::MAGIC);
            chunk[8..10].copy_from_slice(&MAJOR.to_le_bytes());
            let _ = Header::decode(&chunk, file_bytes);
        }
    }

    #[test]
    fn a_memfd_header_that_is_read_fits_its_file(
        bits in 0_u32..64, sizes in (any::<u64>(), any::<u64>(), any::<u64>()),
        shift in 0_u32..64, file_bytes in any::<u64>(), seq in any::<u64>()
    ) {
        let header = Header {
            ring_slots: 1 << bits,
            live_rows: sizes.0 >> shift,
            name_bytes: sizes.1 >> shift,
            names_end: sizes.2 >> shift,
            ..header()
        };
        match Header::decode(&header.encode(), file_bytes) {
            Ok(read) => {
                assert_eq!(read, header);
                let names = header.names_offset().expect("checked when read");
                assert!(names + header.names_end <= file_bytes);
                assert!(header.slot_offset(seq) + SLOT_BYTES as u64 <= header.live_offset().expect("checked"));
            }
            Err(error) => {
                assert_eq!(error, layout::Error::Size);
                let fits = header.file_bytes().is_some_and(|need| need <= file_bytes);
                assert!(!fits || header.names_end > header.name_bytes);
            }
        }
    }

    #[test]
    fn a_text_too_long_for_a_frame_is_cut_between_characters(
        pad in 0_usize..8, character in "[a-zä-ü€𝄞]", extra in 0_usize..5
    ) {
        let room = MAX_FRAME_BYTES - SLOT_BYTES;
        let mut text = "x".repeat(room - pad);
        while text.len() <= room + extra {
            text += &character;
        }
        let record = Record { stamp: Stamp::default(), body: Body::Tag { path: &text } };
        let bytes = frame_of(&record);
        assert!(bytes.len() <= PREFIX_BYTES + MAX_FRAME_BYTES);
        let read: Vec<_> = frame::records(&bytes).collect();
        let Ok(Ok(Record { body: Body::Tag { path }, .. })) = read[0] else { panic!("{:?}", read[0]) };
        assert!(text.starts_with(path));
        assert!(path.len() > room - character.len(), "no more than one character is given up");
        assert_eq!(read.len(), 1);
    }
}

/// A frame whose slot and payload are random.
fn raw_frame_of(part: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; SLOT_BYTES.max(part.len())];
    frame[..part.len()].copy_from_slice(part);
    [&(frame.len() as u32).to_le_bytes()[..], &frame].concat()
}

#[test]
fn addresses_too_many_for_a_frame_are_cut_between_addresses() {
    let room = MAX_FRAME_BYTES - SLOT_BYTES;
    // Bytes that look like the inside or the start of a character must not cause an address to be split.
    for byte in [0x00, 0x80, 0xbf, 0xc3, 0xf0] {
        let frames = vec![byte; room + 16];
        let body = Body::Stack { format: FrameFormat::Address, frames: &frames };
        let bytes = frame_of(&Record { stamp: Stamp::default(), body });
        let (_, payload, rest) = frame::split_frame(&bytes).expect("a frame").expect("a frame");
        assert_eq!((payload.len() % 8, payload, rest), (0, &frames[..room], &[][..]), "byte {byte:#x}");
    }
}

#[test]
fn unknown_codes_read_as_unknown() {
    for &(name, kind) in Body::KINDS {
        let mut slot = slot_of_kind(kind);
        slot[63] = 0xff;
        slot[58..60].copy_from_slice(&0x0101_u16.to_le_bytes()); // 257: no code, though its low byte is one
        let Record { body, .. } = Record::decode(&slot, b"").expect(name);
        match body {
            Body::ClockAnchor { clock, .. } => assert_eq!(clock, ClockKind::Unknown),
            Body::Device { id, .. } => assert_eq!(id, DeviceIdKind::Unknown),
            Body::Stack { format, .. } => assert_eq!(format, FrameFormat::Unknown),
            Body::AllocEnd { memory, .. }
            | Body::AllocFailed { memory, .. }
            | Body::VmmCreate { memory, .. } => assert_eq!(memory, MemoryKind::Unknown),
            Body::Import { source, .. } => assert_eq!(source, ImportSource::Unknown),
            Body::PoolCreate { owner, .. } => assert_eq!(owner, PoolOwner::Unknown),
            Body::ContextDestroy { scope } => assert_eq!(scope, DestroyScope::Unknown),
            Body::BlockAlloc { use_as, .. } | Body::Retag { use_as, .. } => {
                assert_eq!(use_as, (Role::Unknown, Phase::Unknown));
            }
            Body::BlockFree { state, .. } => assert_eq!(state, FreeState::Unknown),
            Body::PhaseBegin { phase } => assert_eq!(phase, Phase::Unknown),
            Body::Oom { outcome, .. } => assert_eq!(outcome, OomOutcome::Unknown),
            Body::DriverEvent { event, .. } => assert_eq!(event, DriverEventKind::Unknown),
            Body::Scope { edge } => assert_eq!(edge, Edge::Unknown),
            Body::Bye { reason } => assert_eq!(reason, ByeReason::Unknown),
            Body::Agent { state, .. } => assert_eq!(state, AgentState::Unknown),
            Body::ProcessSample { absence, .. } => assert_eq!(absence, Absence::Unknown),
            _ => {}
        }
    }
}

#[test]
fn every_code_survives_its_number() {
    macro_rules! check {
        ($($code:ident),*) => { $(
            for &value in $code::ALL {
                assert_eq!($code::from_code(value.to_code()), value);
            }
            let known = (0..=u8::MAX).filter(|&code| $code::from_code(code) != $code::Unknown).count();
            assert_eq!(known, $code::ALL.len() - 1);
        )* };
    }
    check!(MemoryKind, Role, Phase, PoolOwner, ImportSource, FreeState, AgentState, DestroyScope);
    check!(
        DriverEventKind,
        ClockKind,
        DeviceIdKind,
        Absence,
        FrameFormat,
        Edge,
        ByeReason,
        OomOutcome,
        Layer,
        LayerState,
        AskKind
    );
    // Role and phase share a byte.
    assert!(Role::ALL.iter().all(|role| role.to_code() < 16));
    assert!(Phase::ALL.iter().all(|phase| phase.to_code() < 16));
}

#[test]
fn lengths_that_no_frame_has_end_the_packet() {
    let good = raw_frame(&slot_of_kind(4), b"path");
    let wrong =
        (0..SLOT_BYTES as u32).chain([MAX_FRAME_BYTES as u32 + 1, 1 << 20, i32::MAX as u32, u32::MAX]);
    for length in wrong {
        let bad = [&length.to_le_bytes()[..], &vec![0; 2 * MAX_FRAME_BYTES]].concat();
        for bytes in [&bad[..], &bad[..PREFIX_BYTES]] {
            let packet = [&good, bytes, &good].concat();
            let read: Vec<_> = frame::records(&packet).collect();
            assert!(matches!(read[0], Ok(Ok(_))));
            assert_eq!(read[1..], [Err(Error::Length(length))]);
        }
    }
    for length in [SLOT_BYTES, SLOT_BYTES + 1, 70, MAX_FRAME_BYTES] {
        let packet = raw_frame(&slot_of_kind(4), &vec![b'a'; length - SLOT_BYTES]);
        assert!(matches!(frame::records(&packet).collect::<Vec<_>>()[..], [Ok(Ok(_))]), "{length}");
    }
    assert_eq!(frame::records(&[]).count(), 0);
}

#[test]
fn a_payload_that_is_not_text_concerns_its_record_only() {
    let text_kinds = [1, 3, 4, 5, 85, 86, 87, 88, 89, 100, 102, 108, 114, 117, 118];
    for &(name, kind) in Body::KINDS {
        let packet =
            [raw_frame(&slot_of_kind(kind), b"\xff\xfe"), raw_frame(&slot_of_kind(4), b"a/b")].concat();
        let read: Vec<_> = frame::records(&packet).collect();
        if text_kinds.contains(&kind) {
            assert_eq!(read[0], Ok(Err(CodecError::Payload(kind))), "{name}");
        } else {
            assert!(matches!(read[0], Ok(Ok(_))), "{name}");
        }
        let path = Body::Tag { path: "a/b" };
        assert!(matches!(read[1], Ok(Ok(Record { body, .. })) if body == path), "{name}");
    }
}

#[test]
fn an_absent_reading_stays_absent() {
    for total_bytes in [Reading::ABSENT, Reading::of(0), Reading::of(u64::MAX - 1)] {
        let (uuid_high, uuid_low, ordinal, id) = (1, 2, 3, DeviceIdKind::Gpu);
        let body = Body::Device { uuid_high, uuid_low, total_bytes, ordinal, id, name: "" };
        let record = Record { stamp: Stamp::default(), body };
        assert_eq!(frame::records(&frame_of(&record)).next(), Some(Ok(Ok(record))));
    }
}

#[test]
fn a_newer_minor_is_read_and_another_major_is_refused() {
    let newer = Header { minor: MINOR + 1, ..header() };
    let file_bytes = newer.file_bytes().expect("it is small");
    assert_eq!(Header::decode(&newer.encode(), file_bytes), Ok(newer));
    assert_eq!(Header::decode(&newer.encode(), file_bytes - 1), Err(layout::Error::Size));
    for major in [0, MAJOR + 1, u16::MAX] {
        let other = Header { major, ..header() };
        assert_eq!(Header::decode(&other.encode(), file_bytes), Err(layout::Error::Version(major)));
    }
    let mut strange = header().encode();
    strange[0] ^= 1;
    assert_eq!(Header::decode(&strange, file_bytes), Err(layout::Error::Magic));
    for ring_slots in [0, 3, 1000] {
        let odd = Header { ring_slots, ..header() };
        assert_eq!(Header::decode(&odd.encode(), u64::MAX), Err(layout::Error::Size));
    }

    // A recording's header with an unknown version is returned, and the caller decides.
    let mut recording = frame::header();
    recording[8..10].copy_from_slice(&(MAJOR + 1).to_le_bytes());
    recording[10..12].copy_from_slice(&(MINOR + 1).to_le_bytes());
    assert_eq!(frame::read_header(&recording), Some((MAJOR + 1, MINOR + 1)));
    assert_eq!(frame::read_header(&recording[..15]), None);
    recording[7] = b'\r';
    assert_eq!(frame::read_header(&recording), None);
}
