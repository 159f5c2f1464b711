//! gpumemd's own recordings: the records that were written are read, also from a truncated or damaged file.
use gpumem_import::{observe_file, read_file, read_with_blocks};
use gpumem_ledger::{Ledger, Origin};
use gpumem_runs::builder::Sink;
use gpumem_runs::input::{Error, Input};
use gpumem_runs::recording::Writer;
use gpumem_tests::examples;
use gpumem_tests::node::{A, B, device, said};
use gpumem_wire::{Body, FreeState, MemoryKind, Phase, Record, Role, Stamp};
use std::path::PathBuf;

/// Collects the records as frames, because records borrow.
#[derive(Default)]
struct Kept {
    said: Vec<(Origin, Vec<u8>)>,
    caveats: Vec<String>,
    rejected: u64,
}

impl Sink for Kept {
    fn observe(&mut self, origin: Origin, record: &Record<'_>) {
        let mut frame = Vec::new();
        record.append_frame(&mut frame);
        self.said.push((origin, frame));
    }
    fn caveat(&mut self, code: &str, _: String) {
        self.caveats.push(code.to_owned());
    }
    fn reject(&mut self, count: u64) {
        self.rejected += count;
    }
}

struct File(PathBuf);

impl File {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("gpumem-recordings-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).expect("a file");
        File(path)
    }
    fn read(&self) -> (Result<(), Error>, Kept) {
        let mut kept = Kept::default();
        (observe_file(&self.0, None, &mut kept), kept)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn recorded(said: &[(Origin, Record<'_>)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = Writer::new(&mut bytes).expect("a header");
    for (origin, record) in said {
        writer.write(*origin, record).expect("written");
    }
    writer.flush().expect("flushed");
    bytes
}

fn frames(said: &[(Origin, Record<'_>)]) -> Vec<(Origin, Vec<u8>)> {
    let frame = |record: &Record<'_>| {
        let mut frame = Vec::new();
        record.append_frame(&mut frame);
        frame
    };
    said.iter().map(|(origin, record)| (*origin, frame(record))).collect()
}

#[test]
fn records_are_read_with_their_origins() {
    let said = said();
    let file = File::new("whole", &recorded(&said));
    let (done, kept) = file.read();
    done.expect("a recording");
    assert_eq!(kept.said, frames(&said));
    assert_eq!((kept.caveats.len(), kept.rejected), (0, 0));
}

#[test]
fn replay_gives_the_original_figures() {
    let said = said();
    let mut live = Ledger::new();
    said.iter().for_each(|(origin, record)| live.observe(*origin, record));
    let file = File::new("replay", &recorded(&said));
    let runs = read_file(&file.0, None).expect("a recording");
    let pids: Vec<u32> = runs.iter().map(|run| run.process.pid).collect();
    assert_eq!(pids, [A.pid, B.pid]);

    let snapshot = live.snapshot();
    let device = &runs[0].devices[0];
    assert_eq!(device.last.tracked_bytes, Some(snapshot.processes[0].accounts[0].tracked_bytes));
    assert_eq!(device.last.used_bytes(), Some(600 << 20));
    assert_eq!(device.last.untrackable_bytes, Some(501 << 20));
    let parts = device.last.parts.expect("parts");
    assert_eq!(parts.sum(), 501 << 20);
    assert_eq!(
        (parts.context_bytes, parts.modules_bytes, parts.rounding_bytes),
        (488 << 20, 12 << 20, 1 << 20)
    );
    assert_eq!(device.peak.parts, Some(parts));
    assert_eq!(device.details.steps.len(), 1);
    assert_eq!(device.unaccounted_bytes, Some(100 << 20), "1000 used - 600 - 300");
    assert_eq!(device.tenants, [(B.pid, Some(300 << 20))]);
    assert_eq!(device.name, "GPU-00000000-0000-0001-0000-000000000002");
    assert_eq!(runs[0].process.facts["user"], "alice");
    assert!(!runs[1].coverage.covered, "no agent: NVML only");
    assert_eq!(runs[1].devices[0].last.used_bytes(), Some(300 << 20));
    assert_eq!(runs[1].devices[0].last.tracked_bytes, None);
}

#[test]
fn blocks_have_their_bytes_times_and_names() {
    const MIB: u64 = 1 << 20;
    const BASE: u64 = 1 << 40;
    let pool = 7;
    let block = |offset: u64, bytes| Body::BlockAlloc {
        address: BASE + offset * MIB,
        bytes: bytes * MIB,
        pool,
        use_as: (Role::Unknown, Phase::Unknown),
    };
    let segment =
        Body::AllocEnd { address: BASE, bytes: 8 * MIB, pool, took_us: 0, memory: MemoryKind::Device };
    let free = Body::BlockFree { address: BASE + 2 * MIB, pool, state: FreeState::Done };
    let direct =
        Body::AllocEnd { address: 4096, bytes: MIB, pool: 0, took_us: 0, memory: MemoryKind::Device };
    let events = [(0, segment), (1, block(0, 2)), (2, block(2, 1)), (0, free), (2, block(2, 3)), (1, direct)];
    let plain = Stamp { device: 0, ..Stamp::default() };
    let mut said = vec![(Origin::Host, Record { stamp: plain, body: device() })];
    let mut say = |stamp, body| said.push((Origin::Process(A), Record { stamp, body }));
    say(plain, device());
    say(Stamp { tag: 1, ..plain }, Body::Tag { path: "model/weights" });
    say(Stamp { tag: 2, ..plain }, Body::Tag { path: "model/layers.0" });
    for (seq, (tag, body)) in (1..).zip(events) {
        say(Stamp { seq, tag, time_ns: seq * 1000, ..plain }, body);
    }
    let file = File::new("blocks", &recorded(&said));
    let input = Input::open(&file.0).expect("a recording");
    let run = read_with_blocks(input, None).expect("a recording").remove(0);
    let blocks = &run.devices[0].details.blocks;
    let found: Vec<_> = blocks
        .blocks
        .iter()
        .map(|block| {
            let tag = run.cells[block.cell as usize].tag.as_deref();
            (
                tag.expect("a tag"),
                block.address - BASE.min(block.address),
                block.bytes / MIB,
                block.made_ns,
                block.freed_ns,
            )
        })
        .collect();
    let expected = [
        ("model/weights", 0, 2, Some(2000), None),
        ("model/layers.0", 2 * MIB, 1, Some(3000), Some(4000)),
        ("model/layers.0", 2 * MIB, 3, Some(5000), None),
        ("model/weights", 0, 1, Some(6000), None),
    ];
    assert_eq!(found, expected);
    assert_eq!(blocks.tracked, [(1000, 8 * MIB as i64), (6000, 9 * MIB as i64)]);
    let last = run.devices[0].series.buckets.last().and_then(|bucket| bucket.tracked).expect("tracked");
    assert_eq!(Some(last.last), blocks.tracked.last().map(|(_, bytes)| *bytes), "as in the course");
}

#[test]
fn an_agents_own_recording_is_its_own_process() {
    let hello =
        Body::Hello { start_ticks: 7, versions: 1 << 16, capabilities: 0, instance: 0, claims: "rank=3" };
    let records = [
        Record { stamp: Stamp { thread: 41, ..Stamp::default() }, body: hello },
        Record { stamp: Stamp { device: 0, ..Stamp::default() }, body: device() },
    ];
    let mut bytes = gpumem_wire::frame::header().to_vec();
    records.iter().for_each(|record| record.append_frame(&mut bytes));
    let file = File::new("agent", &bytes);
    let (done, kept) = file.read();
    done.expect("a recording");
    assert!(kept.said.iter().all(|(origin, _)| *origin == Origin::Process(A)));
}

#[test]
fn records_without_a_process_are_counted_and_create_none() {
    let said = said();
    let mut bytes = gpumem_wire::frame::header().to_vec();
    for (_, record) in &said {
        if matches!(record.body, Body::ClockAnchor { .. } | Body::Device { .. } | Body::AllocEnd { .. }) {
            record.append_frame(&mut bytes);
        }
    }
    bytes.extend_from_slice(&recorded(&said)[gpumem_wire::frame::HEADER_BYTES..]);
    let file = File::new("orphans", &bytes);
    let (done, kept) = file.read();
    done.expect("a recording");
    assert_eq!((kept.caveats, kept.rejected), (vec!["no_origin".to_owned()], 1));
    assert!(kept.said[..3].iter().all(|(origin, _)| *origin == Origin::Host), "a clock, and two devices");
    let runs = read_file(&file.0, None).expect("a recording");
    assert_eq!(runs.iter().map(|run| run.process.pid).collect::<Vec<_>>(), [A.pid, B.pid]);
}

#[test]
fn truncated_recording_is_read_up_to_the_cut() {
    let said = said();
    let (whole, frames) = (recorded(&said), frames(&said));
    for end in 0..whole.len() {
        let file = File::new("cut", &whole[..end]);
        let (done, kept) = file.read();
        assert!(frames.starts_with(&kept.said), "cut at {end}");
        match done {
            Ok(()) => assert_eq!(
                kept.caveats,
                if is_frame_end(&whole, end) { vec![] } else { vec!["cut".to_owned()] }
            ),
            // The words of an error are those of the command line's tests; here: no record, no success.
            Err(_) => assert!(kept.said.is_empty(), "cut at {end}"),
        }
    }
}

fn is_frame_end(whole: &[u8], end: usize) -> bool {
    let mut at = gpumem_wire::frame::HEADER_BYTES;
    while at < end {
        at += 4 + u32::from_le_bytes(whole[at..at + 4].try_into().expect("a length")) as usize;
    }
    at == end
}

#[test]
fn flipped_byte_causes_no_panic() {
    let whole = recorded(&said());
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x41;
        let file = File::new("flipped", &bytes);
        // Reading must not panic, and the resulting runs must add up.
        for run in read_file(&file.0, None).unwrap_or_default() {
            for device in &run.devices {
                for moment in [&device.last, &device.peak] {
                    let sum: i64 = moment.amounts.iter().map(|(_, bytes)| bytes).sum();
                    assert_eq!(moment.tracked_bytes.unwrap_or(sum), sum, "byte {at}");
                }
            }
        }
    }
}

#[test]
fn kinds_of_a_newer_version_are_skipped_and_counted() {
    let mut bytes = recorded(&said());
    let mut newer = Vec::new();
    Record { stamp: Stamp::default(), body: Body::Tick {} }.append_frame(&mut newer);
    newer[4 + 60] = 250;
    bytes.extend_from_slice(&newer);
    let file = File::new("newer", &bytes);
    let (done, kept) = file.read();
    done.expect("a recording");
    assert_eq!((kept.said.len(), kept.rejected), (said().len(), 1));
    assert_eq!(kept.caveats, ["unknown_kinds"]);
}

#[test]
fn every_kind_of_record_survives_a_recording() {
    let all: Vec<(Origin, Record<'_>)> = examples::records()
        .into_iter()
        .filter(|record| !matches!(record.body, Body::Origin { .. }))
        .map(|record| (Origin::Process(B), record))
        .collect();
    assert_eq!(all.len(), Body::KINDS.len() - 1);
    let file = File::new("all", &recorded(&all));
    let (done, kept) = file.read();
    done.expect("a recording");
    assert_eq!(kept.said, frames(&all));
}
