//! Frames, headers, slots: parsed data serialises to the same bytes.
#![no_main]

use gpumem_wire::layout::Header;
use gpumem_wire::{Body, CodecError, Record, SLOT_BYTES, Slot, frame};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    frames(bytes);
    if let Some(slot) = bytes.first_chunk::<SLOT_BYTES>() {
        let kind = slot[60];
        match Record::decode(slot, &bytes[SLOT_BYTES..]) {
            Ok(record) => again(&record),
            Err(CodecError::UnknownKind(other)) => assert_eq!(kind, other),
            Err(CodecError::Payload(other)) => {
                assert_eq!(kind, other);
                assert!(std::str::from_utf8(&bytes[SLOT_BYTES..]).is_err(), "only text can be wrong");
            }
        }
    }
    if let Some((head, rest)) = bytes.split_first_chunk::<72>() {
        let mut rest = rest;
        let file_bytes = gpumem_fuzz::number(&mut rest, 8);
        if let Ok(header) = Header::decode(head, file_bytes) {
            assert_eq!(header.encode(), *head);
            assert!(header.file_bytes().is_some_and(|need| need <= file_bytes));
            let live = header.live_offset().expect("it fits");
            let seq = gpumem_fuzz::number(&mut rest, 8);
            assert!(header.slot_offset(seq) + SLOT_BYTES as u64 <= live);
            assert!(header.names_offset().expect("it fits") + header.names_end <= file_bytes);
        }
    }
    if let Some((major, minor)) = frame::read_header(bytes) {
        assert_eq!(bytes[8..12], [major.to_le_bytes(), minor.to_le_bytes()].concat());
    }
});

/// Frames consume all bytes, or end with one error that has a position.
fn frames(bytes: &[u8]) {
    let mut used = 0;
    let mut rest = bytes;
    let ended = loop {
        match frame::split_frame(rest) {
            Ok(Some((slot, payload, after))) => {
                used += frame::PREFIX_BYTES + SLOT_BYTES + payload.len();
                assert_eq!(used, bytes.len() - after.len());
                if let Ok(record) = Record::decode(slot, payload) {
                    again(&record);
                }
                rest = after;
            }
            Ok(None) => break true,
            Err(frame::Error::Cut { have, need }) => {
                assert!(
                    have == rest.len() && have < need && need <= frame::PREFIX_BYTES + frame::MAX_FRAME_BYTES
                );
                break false;
            }
            Err(frame::Error::Length(length)) => {
                assert!(!(SLOT_BYTES..=frame::MAX_FRAME_BYTES).contains(&(length as usize)));
                break false;
            }
        }
    };
    let read = frame::records(bytes);
    assert_eq!(read.filter(Result::is_err).count(), usize::from(!ended), "one error at most, the last one");
}

/// Asserts that encoding and decoding give the same record.
fn again(record: &Record<'_>) {
    let (slot, payload): (Slot, &[u8]) = record.encode();
    assert_eq!(Record::decode(&slot, payload).as_ref(), Ok(record));
    assert!(Body::KINDS.iter().any(|(_, kind)| *kind == record.body.kind()));
    let mut written = Vec::new();
    record.append_frame(&mut written);
    let mut read = frame::records(&written);
    if written.len() == record.frame_bytes() {
        assert_eq!(read.next(), Some(Ok(Ok(*record))));
    } else {
        // A payload too long for a frame is truncated; the frame is still a record.
        assert!(matches!(read.next(), Some(Ok(Ok(_)))));
    }
    assert!(read.next().is_none());
}
