//! The requests of a process to PyTorch's allocator as a compact stream, which is kept with its run, for a replay after its end.
//!
//! The stream consists of pieces. Some begin with the state at that time, so that earlier pieces can be deleted:
//!
//! ```text
//! piece            entries
//! entry            operation | flags << 4, then its fields; a field is a LEB128 varint of 64 bits
//! State            time, Program, names, pools, mapped ranges, segments, blocks (with frees that are pending), phase, StateEnd
//! Allocate         address, bytes, what differs from the Allocate before (flags): request, pool, tag; time
//! Free, FreeLater  address, pool if it differs; time
//! Use              role and phase of the next Allocates; with a flag those of one block, and its tag (0: unchanged)
//! Phase            phase that the process enters; with a flag the number of a training step; time
//! ```
//!
//! An address is signed, minus the address of the entry before. A time is in units of `TICK_NS`, minus the time of the entry
//! before. Addresses and bytes are in units of 512 bytes where possible. The store compresses each piece. Measured with 12 training
//! programs (3.6 million allocations and frees): 6 to 9 bytes for each, and 2.3 to 4.7 when compressed.

mod blocks;
mod entry;
mod read;
mod write;

pub use blocks::{add_blocks, read_booked};
pub use entry::{POOL_NAME, Piece, allocator_settings};
pub use read::{Damaged, read};
pub use write::{KeepLimits, RequestLog};

#[cfg(test)]
mod tests {
    use super::entry::TICK_NS;
    use super::*;
    use crate::builder::{RunBuilder, Sink};
    use gpumem_ledger::{Origin, ProcessKey};
    use gpumem_model::blocks::{Block, Blocks};
    use gpumem_model::run::{Cell, Class, Run, Source};
    use gpumem_model::window::{Window, WindowKind};
    use gpumem_wire::{
        Body, Flags, FreeState, MemoryKind, Phase, PoolOwner, Reading, Record, Request, Role, Stamp,
    };
    use proptest::prelude::*;

    const KEY: ProcessKey = ProcessKey { pid: 7, start_ticks: 1 };
    const LIMITS: KeepLimits = KeepLimits { time_ns: u64::MAX, bytes: u64::MAX };

    /// Collects records as text, without their numbers.
    #[derive(Default)]
    struct Texts(Vec<String>);

    impl Sink for Texts {
        fn observe(&mut self, _: Origin, record: &Record<'_>) {
            let Stamp { tag, stack, context, flags, time_ns, .. } = record.stamp;
            let time = time_ns / TICK_NS;
            self.0.push(format!("{:?} {tag} {stack} {context} {flags:?} {time}", record.body));
        }
    }

    /// A process that reports to a log.
    #[derive(Default)]
    struct Reporter {
        log: RequestLog,
        seq: u64,
        time_ns: u64,
        records: Texts,
        device: u8,
        /// Takes the records, too, if it is there.
        builder: Option<RunBuilder>,
    }

    impl Reporter {
        fn new() -> Self {
            let mut reporter = Reporter::default();
            let claims = "host=a\nalloc_conf=max_split_size_mb:64\n";
            let hello = Body::Hello { start_ticks: 1, versions: 0, capabilities: 0, instance: 1, claims };
            reporter.log.observe(&Stamp::default(), &hello);
            reporter.log.observe(&Stamp { tag: 1, ..Stamp::default() }, &Body::Tag { path: POOL_NAME });
            reporter.log.observe(&Stamp { tag: 2, ..Stamp::default() }, &Body::Tag { path: "model/layer" });
            let owner = PoolOwner::Framework;
            let pool = Body::PoolCreate { pool: 0x7000_0001, parent: 0, reports_blocks: 1, owner };
            reporter.say(Stamp { tag: 1, ..Stamp::default() }, pool);
            reporter.records.0.clear();
            assert_eq!(reporter.log.take(LIMITS), None, "no memory yet");
            reporter
        }

        fn say(&mut self, stamp: Stamp, body: Body<'_>) {
            self.seq += 1;
            self.time_ns += 3 * TICK_NS;
            let stamp = Stamp { seq: self.seq, time_ns: self.time_ns, device: self.device, ..stamp };
            self.log.observe(&stamp, &body);
            self.records.observe(Origin::Process(KEY), &Record { stamp, body });
            if let Some(builder) = &mut self.builder {
                builder.observe(Origin::Process(KEY), &Record { stamp, body });
            }
        }

        fn segment(&mut self, address: u64, bytes: u64) {
            self.say(Stamp::default(), Body::SegmentAdd { address, bytes, pool: 0x7000_0001 });
        }

        fn block(&mut self, address: u64, bytes: u64, tag: u32, request: Option<Request>) {
            let mut stamp = Stamp { tag, ..Stamp::default() };
            if let Some(request) = request {
                let (stack, context) = (request.unused_bytes, request.context());
                stamp = Stamp { flags: Flags::REQUEST, stack, context, ..stamp };
            }
            let use_as = (Role::Unknown, Phase::Unknown);
            self.say(stamp, Body::BlockAlloc { address, bytes, pool: 0x7000_0001, use_as });
        }

        fn free(&mut self, address: u64, state: FreeState) {
            self.say(Stamp::default(), Body::BlockFree { address, pool: 0x7000_0001, state });
        }
    }

    fn asked(unused_bytes: u32, stream: u16, pool: u16) -> Option<Request> {
        Some(Request { unused_bytes, stream, pool })
    }

    fn texts(pieces: &[Piece]) -> Vec<String> {
        let mut texts = Texts::default();
        read(pieces.iter().map(|piece| piece.bytes.as_slice()), KEY, &mut texts).expect("a valid stream");
        texts.0
    }

    #[test]
    fn records_of_the_stream_are_those_of_the_process() {
        let mut reporter = Reporter::new();
        reporter.segment(1 << 40, 2 << 20);
        reporter.block(1 << 40, 512, 2, asked(412, 3, 1));
        let mut pieces: Vec<Piece> = reporter.log.take(LIMITS).into_iter().collect();
        reporter.block((1 << 40) + 512, 1001, 0, None);
        reporter.free(1 << 40, FreeState::Pending);
        let device_free_bytes = Reading::of(7 << 20);
        reporter.say(Stamp::default(), Body::Pressure { bytes: 20 << 20, device_free_bytes });
        reporter.free(1 << 40, FreeState::Done);
        reporter.say(
            Stamp::default(),
            Body::SegmentRemove { address: 1 << 40, bytes: 2 << 20, pool: 0x7000_0001 },
        );
        pieces.extend(reporter.log.take(LIMITS));
        assert_eq!(
            pieces.iter().map(|piece| (piece.number, piece.first)).collect::<Vec<_>>(),
            [(0, 0), (1, 0)]
        );
        let read = texts(&pieces);
        assert!(read.iter().any(|text| text.contains("alloc_conf=max_split_size_mb:64")), "{read:?}");
        assert!(read.iter().any(|text| text.contains("model/layer")), "{read:?}");
        let read: Vec<_> = read.into_iter().filter(|text| reporter.records.0.contains(text)).collect();
        assert_eq!(read, reporter.records.0);
    }

    #[test]
    fn later_pieces_begin_with_the_state_and_earlier_ones_are_not_needed() {
        let mut reporter = Reporter::new();
        reporter.segment(1 << 40, 20 << 20);
        reporter.block(1 << 40, 4096, 2, asked(96, 0, 0));
        let limits = KeepLimits { time_ns: 1, bytes: u64::MAX };
        let mut pieces = Vec::new();
        for round in 0..200_000_u64 {
            let address = (1 << 40) + 4096 + round % 1000 * 4096;
            reporter.block(address, 4096, 2, asked((round % 512) as u32, 0, 0));
            reporter.free(address, FreeState::Done);
            if round % 1000 == 0 {
                pieces.extend(reporter.log.take(limits));
            }
        }
        let Piece { number, first, .. } = *pieces.last().expect("pieces");
        assert!(first > 1 && first < number, "{first} of {number}");
        let kept = &pieces[first as usize..];
        let read = texts(kept);
        let is_old =
            |text: &&String| text.contains("BlockAlloc") && text.contains(&format!("{}", 1_u64 << 40));
        assert_eq!(read.iter().filter(is_old).count(), 1, "the block that is older than the kept pieces");
        let bytes: usize = pieces.iter().map(|piece| piece.bytes.len()).sum();
        assert!(bytes / 400_000 <= 8, "{bytes} bytes for 400,000 events");
    }

    #[test]
    fn a_loss_begins_a_new_stream_after_the_state_is_restated() {
        let mut reporter = Reporter::new();
        reporter.segment(1 << 40, 20 << 20);
        reporter.block(1 << 40, 4096, 2, asked(96, 0, 0));
        assert!(reporter.log.take(LIMITS).is_some());
        reporter.seq += 5;
        reporter.block((1 << 40) + 4096, 4096, 2, asked(96, 0, 0));
        let lost = reporter.log.take(LIMITS).expect("a piece");
        assert!(texts(&[lost])[0].contains("Lost { count: 5"), "records are missing");
        let begin = Body::ResyncBegin { epoch: 1, after_seq: reporter.seq };
        reporter.log.observe(&Stamp::default(), &begin);
        let restated = Stamp { seq: 3, device: 0, flags: Flags::RESTATED, tag: 2, ..Stamp::default() };
        let use_as = (Role::Unknown, Phase::Unknown);
        let block = Body::BlockAlloc { address: 1 << 41, bytes: 512, pool: 0x7000_0001, use_as };
        reporter.log.observe(&restated, &block);
        reporter
            .log
            .observe(&Stamp::default(), &Body::ResyncEnd { epoch: 1, head_seq: reporter.seq, rows: 1 });
        let pieces: Vec<Piece> = reporter.log.take(LIMITS).into_iter().collect();
        assert_eq!((pieces[0].number, pieces[0].first), (2, 2));
        let blocks: Vec<_> = texts(&pieces).into_iter().filter(|text| text.contains("BlockAlloc")).collect();
        assert!(matches!(&blocks[..], [block] if block.contains(&format!("{}", 1_u64 << 41))), "{blocks:?}");
    }

    #[test]
    fn records_that_only_a_resync_shows_as_missing_begin_a_new_stream() {
        let mut reporter = Reporter::new();
        reporter.segment(1 << 40, 20 << 20);
        reporter.block(1 << 40, 4096, 2, asked(96, 0, 0));
        assert!(reporter.log.take(LIMITS).is_some());
        reporter.seq += 5;
        let (epoch, after_seq) = (1, reporter.seq);
        reporter.log.observe(&Stamp::default(), &Body::ResyncBegin { epoch, after_seq });
        reporter.log.observe(&Stamp::default(), &Body::ResyncEnd { epoch, head_seq: after_seq, rows: 0 });
        reporter.block(1 << 41, 512, 2, asked(96, 0, 0));
        let piece = reporter.log.take(LIMITS).expect("a piece");
        assert_eq!(piece.number, piece.first);
        let blocks: Vec<_> = texts(&[piece]).into_iter().filter(|text| text.contains("BlockAlloc")).collect();
        assert!(matches!(&blocks[..], [block] if block.contains(&format!("{}", 1_u64 << 41))), "{blocks:?}");
    }

    #[test]
    fn a_stream_that_is_not_taken_is_bounded_and_begins_anew_with_the_state() {
        let mut reporter = Reporter::new();
        reporter.segment(1 << 40, 20 << 20);
        reporter.block(1 << 40, 4096, 2, asked(96, 0, 0));
        for round in 0..300_000_u64 {
            reporter.block((1 << 40) + 4096, 4096, 2, asked((round % 512) as u32, 0, 0));
            reporter.free((1 << 40) + 4096, FreeState::Done);
        }
        assert!(reporter.log.held_bytes() < 4 << 20, "{}", reporter.log.held_bytes());
        let read = texts(&[reporter.log.take(LIMITS).expect("a piece")]);
        assert!(read.iter().all(|text| !text.contains("Lost")));
        let old = read.iter().find(|text| text.contains("BlockAlloc")).expect("a block");
        assert!(old.contains(&format!("{}", 1_u64 << 40)), "the stream begins with the oldest block: {old}");
    }

    #[test]
    fn a_process_with_too_many_blocks_ends_its_stream_and_frees_its_memory() {
        let mut reporter = Reporter::new();
        reporter.segment(1 << 40, 20 << 20);
        for block in 0..20_000 {
            reporter.block((1 << 40) + block * 512, 512, 2, asked(12, 0, 0));
        }
        assert!(reporter.log.held_bytes() < 2 << 20, "{}", reporter.log.held_bytes());
        let read = texts(&[reporter.log.take(LIMITS).expect("a piece")]);
        assert!(read.last().expect("records").contains("Lost"), "{:?}", read.last());
        reporter.block(1 << 41, 512, 2, asked(12, 0, 0));
        assert_eq!(reporter.log.take(LIMITS), None);
    }

    fn new_run() -> RunBuilder {
        RunBuilder::new(Source { kind: "daemon".into(), origin: "host".into(), preset: None }).with_blocks()
    }

    /// Trains for `steps` steps, at first with a weight: each has a forward block that lives until its backward, and a block of the optimizer.
    fn train(reporter: &mut Reporter, steps: u64, is_new: bool) {
        const BASE: u64 = 1 << 40;
        let pool = 0x7000_0001;
        let block = |reporter: &mut Reporter, address, tag, use_as| {
            let stamp = Stamp { tag, ..Stamp::default() };
            reporter.say(stamp, Body::BlockAlloc { address, bytes: 1 << 20, pool, use_as });
            reporter.seq
        };
        if is_new {
            let weight = block(reporter, BASE, 2, (Role::Unknown, Phase::Setup));
            let use_as = (Role::Parameter, Phase::Unknown);
            let retag = Body::Retag { address: BASE, block_seq: weight, pool, use_as };
            reporter.say(Stamp { tag: 3, ..Stamp::default() }, retag);
        }
        for _ in 0..steps {
            reporter.say(Stamp::default(), Body::PhaseBegin { phase: Phase::Forward });
            block(reporter, BASE + (1 << 20), 2, (Role::Unknown, Phase::Forward));
            block(reporter, BASE + (2 << 20), 2, (Role::Unknown, Phase::Backward));
            reporter.free(BASE + (1 << 20), FreeState::Done);
            block(reporter, BASE + (3 << 20), 0, (Role::Workspace, Phase::Optimizer));
            reporter.free(BASE + (3 << 20), FreeState::Done);
            reporter.free(BASE + (2 << 20), FreeState::Done);
        }
    }

    /// A training program whose stream begins before its memory, or after two of its steps. Returns the run of its records, and the
    /// same run with the blocks of the stream.
    fn trained(is_late: bool, window: Option<Window>) -> (Run, Run) {
        let mut reporter = Reporter { builder: Some(new_run()), ..Reporter::default() };
        let claims = "host=a\n";
        let hello = Body::Hello { start_ticks: 1, versions: 0, capabilities: 0, instance: 1, claims };
        reporter.say(Stamp::default(), hello);
        for (tag, path) in [(1, POOL_NAME), (2, "model/layer"), (3, "model/weight")] {
            reporter.say(Stamp { tag, ..Stamp::default() }, Body::Tag { path });
        }
        let (pool, owner) = (0x7000_0001, PoolOwner::Framework);
        reporter.say(
            Stamp { tag: 1, ..Stamp::default() },
            Body::PoolCreate { pool, parent: 0, reports_blocks: 1, owner },
        );
        let (address, bytes, memory) = (1 << 40, 16 << 20, MemoryKind::Device);
        reporter.say(Stamp::default(), Body::AllocEnd { address, bytes, pool: 0, took_us: 1, memory });
        reporter.segment(address, bytes);
        let mut pieces = Vec::new();
        train(&mut reporter, 2, true);
        pieces.extend(reporter.log.take(LIMITS));
        if is_late {
            pieces.clear();
            reporter.log.begin_part();
        }
        train(&mut reporter, 3, false);
        pieces.extend(reporter.log.take(LIMITS));
        let run = reporter.builder.take().map(|mut builder| builder.runs(false).remove(0)).expect("a run");
        let mut stored = run.clone();
        stored.devices[0].details.blocks = Blocks::default();
        let bytes = pieces.iter().map(|piece| piece.bytes.as_slice());
        add_blocks(&mut stored, bytes, window.as_ref()).expect("a valid stream");
        (run, stored)
    }

    /// Each block with its cell; time and number of each step.
    type Shown = (Vec<(Cell, Block)>, Vec<(u64, u64)>);

    /// Returns cell, bytes and times of each block of the pool, in units of the stream, and the times and numbers of the steps.
    fn shown(run: &Run) -> Shown {
        let ticks = |time_ns: u64| time_ns / TICK_NS;
        let Blocks { blocks, steps, .. } = &run.devices[0].details.blocks;
        let block = |block: &Block| {
            let (made_ns, freed_ns) = (block.made_ns.map(ticks), block.freed_ns.map(ticks));
            (run.cells[block.cell as usize].clone(), Block { made_ns, freed_ns, cell: 0, ..*block })
        };
        let is_block = |(cell, _): &(Cell, Block)| cell.class == Class::Block;
        (
            blocks.iter().map(block).filter(is_block).collect(),
            steps.iter().map(|&(time_ns, number)| (ticks(time_ns), number)).collect(),
        )
    }

    #[test]
    fn blocks_of_a_stream_are_those_of_the_records() {
        let (run, stored) = trained(false, None);
        assert_eq!(shown(&run).1.len(), 5, "steps");
        assert_eq!(shown(&stored), shown(&run));
        assert_eq!(stored.cells, run.cells);
        let blocks = &stored.devices[0].details.blocks;
        assert_eq!(blocks.tracked.last().map(|(_, bytes)| *bytes), Some(16 << 20));
        let is_weight = |(cell, _): &&(Cell, Block)| cell.tag.as_deref() == Some("model/weight");
        let shown = shown(&stored).0;
        let (cell, weight) = shown.iter().find(is_weight).expect("the retagged block");
        assert_eq!((cell.role.as_deref(), weight.freed_ns), (Some("parameter"), None));
    }

    #[test]
    fn blocks_of_a_late_stream_were_made_before_it() {
        let (run, stored) = trained(true, None);
        let (blocks, steps) = shown(&stored);
        assert_eq!(steps.len(), 3);
        let (cell, weight) = &blocks[0];
        assert_eq!((cell.role.as_deref(), weight.made_ns, weight.freed_ns), (Some("parameter"), None, None));
        let since = steps[0].0;
        let later = |run: &Run| -> Vec<Block> {
            let is_later = |block: &Block| block.made_ns > Some(since);
            shown(run).0.into_iter().map(|(_, block)| block).filter(is_later).collect()
        };
        assert_eq!(later(&stored), later(&run));
        assert!(!later(&run).is_empty());
    }

    #[test]
    fn window_chooses_the_blocks_of_a_stream() {
        let (run, _) = trained(false, None);
        let steps = &run.devices[0].details.blocks.steps;
        let (from_ns, to_ns) = (steps[1].0, steps[3].0 - 1);
        let window = Window { part: WindowKind::Between, from_ns, to_ns, exact: false };
        let (_, stored) = trained(false, Some(window));
        let blocks = &stored.devices[0].details.blocks;
        assert_eq!(blocks.steps.iter().map(|(_, number)| *number).collect::<Vec<_>>(), [1, 2]);
        assert!(blocks.from_ns >= from_ns && blocks.to_ns <= to_ns);
        let (_, at) = trained(false, Some(Window { part: WindowKind::At, from_ns: to_ns, ..window }));
        assert_eq!(at.devices[0].details.blocks.steps.len(), 3, "all steps until then");
    }

    #[test]
    fn run_cut_to_one_device_has_the_blocks_of_that_device() {
        let mut reporter = Reporter { builder: Some(new_run()), ..Reporter::default() };
        let claims = "host=a\n";
        let hello = Body::Hello { start_ticks: 1, versions: 0, capabilities: 0, instance: 1, claims };
        reporter.say(Stamp::default(), hello);
        reporter.say(Stamp { tag: 1, ..Stamp::default() }, Body::Tag { path: POOL_NAME });
        let devices = [(0, 0x7000_0001, 1 << 40), (1, 0x7000_0002, 1 << 41)];
        for (device, pool, address) in devices {
            reporter.device = device;
            let (bytes, memory, owner) = (2 << 20, MemoryKind::Device, PoolOwner::Framework);
            let create = Body::PoolCreate { pool, parent: 0, reports_blocks: 1, owner };
            reporter.say(Stamp { tag: 1, ..Stamp::default() }, create);
            reporter.say(Stamp::default(), Body::AllocEnd { address, bytes, pool: 0, took_us: 1, memory });
            reporter.say(Stamp::default(), Body::SegmentAdd { address, bytes, pool });
            let use_as = (Role::Unknown, Phase::Unknown);
            reporter.say(Stamp::default(), Body::BlockAlloc { address, bytes: 1 << 20, pool, use_as });
        }
        let piece = reporter.log.take(LIMITS).expect("requests");
        let run = reporter.builder.take().map(|mut builder| builder.runs(false).remove(0)).expect("a run");
        for (index, (.., address)) in devices.into_iter().enumerate() {
            let mut one = Run { devices: vec![run.devices[index].clone()], ..run.clone() };
            one.devices[0].details.blocks = Blocks::default();
            add_blocks(&mut one, [piece.bytes.as_slice()], None).expect("a valid stream");
            let blocks: Vec<u64> = shown(&one).0.iter().map(|(_, block)| block.address).collect();
            assert_eq!(blocks, [address]);
        }
    }

    proptest! {
        #[test]
        fn damaged_streams_do_not_panic(
            cut in 0..400_usize, place in 0..400_usize, byte in any::<u8>(), noise in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut reporter = Reporter::new();
            reporter.segment(1 << 40, 20 << 20);
            for block in 0..20 {
                reporter.block((1 << 40) + block * 512, 512, 2, asked(12, 0, 0));
            }
            let mut bytes = reporter.log.take(LIMITS).expect("a piece").bytes;
            if let Some(changed) = bytes.get_mut(place) {
                *changed = byte;
            }
            bytes.truncate(cut);
            for bytes in [&bytes, &noise] {
                let _ = read([bytes.as_slice()], KEY, &mut Texts::default());
            }
        }
    }
}
