//! The bytes of the wire format, as every released version wrote them: tests/golden/wire/vMAJOR.txt.
//!
//! ```text
//! recording MAJOR.MINOR   hex of a recording's header
//! memfd MAJOR.MINOR       hex of the used part of a memfd's header
//! KIND NAME               hex of one frame
//! ```
//!
//! A line is a promise: recordings and agents of that version exist. `UPDATE_GOLDEN=1` only adds missing lines; a
//! format change needs another MAJOR and another file.

use gpumem_tests::examples;
use gpumem_tests::golden::{self, hex, unhex};
use gpumem_wire::layout::Header;
use gpumem_wire::{Body, MAJOR, MINOR, frame};
use std::sync::LazyLock;

/// `KIND NAME` or `CONTAINER MAJOR.MINOR`, and hex.
type Line = (String, String);

fn parse(text: &str) -> Vec<Line> {
    let line = |line: &str| {
        let (what, bytes) = line.rsplit_once(' ').expect("a line is a name and hex");
        (what.to_owned(), bytes.to_owned())
    };
    text.lines().map(line).collect()
}

fn encoded() -> Vec<Line> {
    let mut lines = vec![
        (format!("recording {MAJOR}.{MINOR}"), hex(&frame::header())),
        (format!("memfd {MAJOR}.{MINOR}"), hex(&examples::memfd_header().encode())),
    ];
    for (record, (name, kind)) in examples::records().iter().zip(Body::KINDS) {
        assert_eq!(record.body.kind(), *kind, "the example of {name} is of another kind");
        let mut bytes = Vec::new();
        record.append_frame(&mut bytes);
        lines.push((format!("{kind} {name}"), hex(&bytes)));
    }
    lines
}

/// The file's lines. Read once: two tests must not write at the same time.
static GOLDEN: LazyLock<Vec<Line>> = LazyLock::new(golden);

/// Returns the file's lines, after adding missing ones if requested.
fn golden() -> Vec<Line> {
    let path = golden::path(&format!("wire/v{MAJOR}.txt"));
    let before = std::fs::read_to_string(&path).unwrap_or_default();
    if !golden::update() {
        return parse(&before);
    }
    let known = parse(&before);
    let mut after = before.clone();
    for (what, bytes) in encoded() {
        if !known.iter().any(|(name, _)| *name == what) {
            after += &format!("{what} {bytes}\n");
        }
    }
    assert!(after.starts_with(&before), "a golden line is never edited");
    std::fs::write(&path, &after).expect("the golden file can be written");
    parse(&after)
}

#[test]
fn examples_encode_to_the_golden_bytes() {
    for (what, bytes) in encoded() {
        let line = GOLDEN.iter().find(|(name, _)| *name == what);
        let (_, expected) = line.unwrap_or_else(|| panic!("{what} has no line; UPDATE_GOLDEN=1 adds it"));
        assert_eq!(bytes, *expected, "{what} is written differently from released versions");
    }
}

#[test]
fn golden_bytes_decode_to_the_examples() {
    let examples = examples::records();
    for (what, bytes) in &*GOLDEN {
        let bytes = unhex(bytes).unwrap_or_else(|| panic!("{what} is not hex"));
        match what.split_once(' ').expect("a name has two words") {
            ("recording", version) => {
                let (major, minor) = frame::read_header(&bytes).expect("a recording's header");
                assert_eq!(format!("{major}.{minor}"), version);
            }
            ("memfd", version) => {
                let expected = examples::memfd_header();
                let bytes = bytes.first_chunk().expect("72 bytes");
                let size = expected.file_bytes().expect("the example has a size");
                let header = Header::decode(bytes, size).expect("a memfd's header");
                assert_eq!(format!("{}.{}", header.major, header.minor), version);
                assert_eq!(Header { minor: MINOR, ..header }, expected);
            }
            (kind, name) => {
                let place = Body::KINDS.iter().position(|(_, number)| number.to_string() == kind);
                let place = place.unwrap_or_else(|| panic!("kind {kind} was released and is gone"));
                assert_eq!(Body::KINDS[place].0, name, "kind {kind} was released with this name");
                let records: Vec<_> = frame::records(&bytes).collect();
                assert_eq!(records, [Ok(Ok(examples[place]))], "{what}");
            }
        }
    }
}

#[test]
fn examples_fill_every_shared_byte() {
    for record in examples::records() {
        let (slot, _) = record.encode();
        let stamp_and_kind = (0..16).chain(40..58).chain(60..63);
        for at in stamp_and_kind {
            assert_ne!(slot[at], 0, "byte {at} of {:?}", record.body);
        }
    }
}
