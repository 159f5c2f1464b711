//! Simulates a possible process: turns numbers into driver and pool calls that succeed or fail like real ones, sends them to the
//! [`World`] and to the ledger, and compares the two after every record.

use super::{Said, World};
use crate::common::{KEY, MIB, composition, sum, verify, verify_blocks};
use gpumem_ledger::{AnomalyCounts, ClosedSample, Ledger, Origin, ProcessView};
use gpumem_model::blocks::Block;
use gpumem_wire::*;

/// Next action; `a` and `b` select among existing objects.
#[derive(Debug, Clone, Copy)]
pub struct Op {
    pub what: u8,
    pub a: u16,
    pub b: u16,
}

/// Number of different values of `what`.
pub const KINDS: u8 = 40;
pub const POOL: u64 = 11;
pub const NESTED: u64 = 12;
pub const OPAQUE: u64 = 13;
pub const VA: u64 = 1 << 40;
pub const FAR: u64 = 1 << 44;

pub struct Drive {
    pub world: World,
    pub ledger: Ledger,
    pub seq: u64,
    pub time: u64,
    pub losses: bool,
    /// Number of next records that are lost.
    pub drop: u16,
    /// The ledger has received all records, or has been resynced since.
    pub exact: bool,
    pub clean_since: u64,
    pub first_watermark: Option<u64>,
    pub queue: Option<Vec<Said>>,
    /// Calls in flight: number, and whether they can fail.
    pub begun: Vec<(u64, bool)>,
    pub fresh: u64,
    pub unbound: Vec<u64>,
    pub driver_pool: u64,
    pub born: Vec<(u64, u64, u64)>,
    pub odd: AnomalyCounts,
    /// After each record: time, tracked bytes, bytes that may have been freed.
    pub history: Vec<(u64, i64, i64)>,
    pub sample: Option<(u64, bool)>,
    /// Times of some records, and the bytes in blocks after them.
    pub(super) in_blocks: Vec<(u64, i64)>,
    pub samples_checked: usize,
}

pub fn pick<T>(list: &[T], n: u16) -> Option<&T> {
    (!list.is_empty()).then(|| &list[usize::from(n) % list.len()])
}

impl Drive {
    pub fn new(losses: bool) -> Self {
        let mut drive = Drive {
            world: World::default(),
            ledger: Ledger::new(),
            seq: 0,
            time: 100,
            losses,
            drop: 0,
            exact: true,
            clean_since: 0,
            first_watermark: None,
            queue: None,
            begun: Vec::new(),
            fresh: 0x10_0000,
            unbound: Vec::new(),
            driver_pool: 100,
            born: Vec::new(),
            odd: AnomalyCounts::default(),
            history: vec![(0, 0, 0)],
            in_blocks: Vec::new(),
            sample: None,
            samples_checked: 0,
        };
        drive.ledger.keep_blocks();
        drive.world.peak.known = true;
        drive.introduce();
        drive.create_pools();
        drive
    }

    pub fn introduce(&mut self) {
        let stamp = Stamp { device: 0, ..Stamp::default() };
        let body = crate::common::device(9);
        self.ledger.observe(Origin::Host, &Record { stamp, body });
        self.tell(stamp, body);
        for tag in 1..=4 {
            self.tell(Stamp { tag, ..stamp }, Body::Tag { path: &format!("t{tag}") });
        }
    }

    pub fn create_pools(&mut self) {
        let owner = PoolOwner::Framework;
        for (pool, parent, reports_blocks) in [(POOL, 0, 1), (NESTED, POOL, 1), (OPAQUE, 0, 0)] {
            if !self.world.pools.iter().any(|known| known.id == pool) {
                self.emit(Body::PoolCreate { pool, parent, reports_blocks, owner }, 0, Flags(0), 1);
            }
        }
    }

    pub fn tell(&mut self, stamp: Stamp, body: Body<'_>) {
        self.ledger.observe(Origin::Process(KEY), &Record { stamp, body });
    }

    pub fn control(&mut self, body: Body<'_>) {
        self.tell(Stamp { time_ns: self.time, device: 0, ..Stamp::default() }, body);
    }

    fn host(&mut self, thread: u32, body: Body<'_>) {
        self.time += 3;
        let stamp = Stamp { time_ns: self.time, device: 0, thread, ..Stamp::default() };
        self.ledger.observe(Origin::Host, &Record { stamp, body });
    }

    pub fn emit(&mut self, body: Body<'static>, tag: u32, flags: Flags, context: u32) -> u64 {
        self.seq += 1;
        self.time += 10;
        let (seq, time_ns) = (self.seq, self.time);
        let context = if matches!(body, Body::VmmCreate { .. }) { 0 } else { context }; // of VmmCreate: the duration of the call
        let stamp = Stamp { seq, time_ns, device: 0, context, tag, flags, ..Stamp::default() };
        let said = Said { stamp, body };
        self.world.apply(&said);
        if let Some(queue) = &mut self.queue {
            queue.push(said);
        } else if self.drop > 0 {
            self.drop -= 1;
            self.exact = false;
        } else {
            self.tell(stamp, body);
            self.compare();
        }
        seq
    }

    pub fn say(&mut self, body: Body<'static>, choice: u16) -> u64 {
        self.emit(body, u32::from(choice % 5), Flags(0), u32::from(choice / 5 % 2) + 1)
    }

    pub fn view(&self) -> ProcessView {
        let processes = self.ledger.snapshot().processes;
        (**processes.iter().find(|process| process.key == KEY).expect("it spoke")).clone()
    }

    /// Called after every record.
    pub fn compare(&mut self) {
        let view = self.view();
        verify(&view);
        // Reading the ring after every record would take most of the test's time.
        if self.seq.is_multiple_of(16) {
            self.in_blocks.push((self.time, verify_blocks(&self.ledger, &view)));
        }
        if self.seq.is_multiple_of(128) {
            self.check_past_blocks();
        }
        self.check_samples();
        if !self.exact {
            return;
        }
        self.world.settle();
        let account = &view.accounts[0];
        let now = self.world.composition();
        assert_eq!(account.tracked_bytes, self.world.tracked());
        assert_eq!(composition(&view.cells, &account.amounts), now.line());
        assert_eq!(account.beside, self.world.beside());
        assert_eq!(view.odd, self.odd, "a process without losses does nothing odd");
        assert!(!view.coverage.partial_state);
        let peak = &self.world.peak;
        assert_eq!(account.peak.tracked_bytes, peak.bytes);
        if peak.known {
            let found = composition(&view.cells, &account.peak.amounts);
            if !self.world.as_full.iter().any(|other| !other.known || other.line() == found) {
                assert_eq!(found, peak.line(), "peak");
            }
        }
        self.history.push((self.time, self.world.tracked(), self.world.leaving()));
    }

    /// The lives of the blocks give the bytes that were in blocks after each earlier record.
    fn check_past_blocks(&self) {
        let blocks = self.ledger.blocks(KEY, 0);
        for (time, bytes) in &self.in_blocks {
            let is_live = |block: &&Block| {
                block.made_ns.is_none_or(|made| made <= *time)
                    && block.freed_ns.is_none_or(|freed| freed > *time)
            };
            let live: u64 = blocks.blocks.iter().filter(is_live).map(|block| block.bytes).sum();
            assert_eq!(live as i64, *bytes, "at {time}");
        }
    }

    fn check_samples(&mut self) {
        let taken: Vec<_> = self.ledger.take_samples().collect();
        for (_, _, sample) in taken {
            let Some(tracked) = sample.tracked_bytes else { continue };
            assert_eq!(sum(&sample.amounts), tracked);
            let used = sample.used_bytes.ok().map(|used| used as i64);
            let untrackable = sample.untrackable_bytes();
            assert_eq!(used, untrackable.map(|rest| sample.predates_bytes + tracked + rest));
            let (low, high) = sample.tracked_range.expect("covered");
            assert!(low <= tracked && tracked <= high);
            assert!(sample.torn || low == high);
            if self.exact && sample.t0_ns > self.clean_since {
                self.check_sample(&sample);
            }
        }
    }

    fn check_sample(&mut self, sample: &ClosedSample) {
        self.samples_checked += 1;
        let at = self.history.iter().rposition(|(time, ..)| *time <= sample.t0_ns).expect("from the start");
        assert_eq!(sample.tracked_bytes, Some(self.history[at].1), "tracked at the sample's own time");
        let (low, high) = sample.tracked_range.expect("covered");
        let inside = self.history[at..].iter().take_while(|(time, ..)| *time <= sample.t1_ns);
        let mut moved = false;
        for (_, tracked, leaving) in inside {
            assert!(low <= tracked - leaving && *tracked <= high, "the range holds the truth");
            moved |= Some(*tracked) != sample.tracked_bytes || *leaving != 0;
        }
        assert_eq!(sample.torn, moved);
    }

    fn address(&mut self, op: Op, bytes: u64) -> u64 {
        // Half of the time, an address that was freed (or is being freed) is reused.
        if op.b.is_multiple_of(2) && !self.unbound.is_empty() {
            let address = self.unbound.remove(usize::from(op.b / 2) % self.unbound.len());
            let clash = |a: &super::Alloc| {
                a.freeing.is_none() && super::overlap(a.address, a.bytes, address, bytes) > 0
            };
            let in_segment = |s: &super::Segment| super::overlap(s.address, s.bytes, address, bytes) > 0;
            if !self.world.allocs.iter().any(clash) && !self.world.segments.iter().any(in_segment) {
                for (seq, can_fail) in &mut self.begun {
                    let freed = self.world.allocs.iter().find(|a| a.freeing == Some(*seq));
                    *can_fail &=
                        freed.is_none_or(|a| super::overlap(a.address, a.bytes, address, bytes) == 0);
                }
                return address;
            }
        }
        self.fresh += 4 * MIB; // larger than any allocation
        self.fresh - 4 * MIB
    }

    fn size(op: Op) -> u64 {
        match op.a % 4 {
            0 => 2 * MIB,
            1 => MIB + u64::from(op.a),
            _ => u64::from(op.a) + 1,
        }
    }

    pub fn run(&mut self, op: Op) {
        let racing = self.queue.is_some();
        match op.what {
            0..=4 => {
                let (bytes, memory) = (Self::size(op), MemoryKind::Device);
                let address = self.address(op, bytes);
                let pool = if op.what == 4 { [POOL, OPAQUE][usize::from(op.b / 64 % 2)] } else { 0 };
                let waits = |s: &super::Segment| super::overlap(s.address, s.bytes, address, bytes) > 0;
                if pool != 0 && self.world.segments.iter().any(waits) {
                    return; // already reported under another name
                }
                self.create_pools();
                let seq = self.say(Body::AllocEnd { address, bytes, pool, took_us: 0, memory }, op.b);
                self.born.push((seq, address, 0));
            }
            5 => {
                let device_free_bytes = Reading::ABSENT;
                let memory = MemoryKind::Device;
                self.say(
                    Body::AllocFailed { bytes: 1 << 40, pool: 0, device_free_bytes, result: 2, memory },
                    0,
                );
            }
            6 => {
                let memory = [MemoryKind::Pinned, MemoryKind::Managed][usize::from(op.b / 2 % 2)];
                let bytes = Self::size(op);
                let address = self.address(op, bytes);
                self.say(Body::AllocEnd { address, bytes, pool: 0, took_us: 0, memory }, op.b);
            }
            7 => {
                let bytes = Self::size(op);
                let address = self.address(op, bytes);
                let body = Body::AllocEnd { address, bytes, pool: 0, took_us: 0, memory: MemoryKind::Device };
                self.emit(body, 1, Flags::CAPTURED, 1);
            }
            8..=10 => self.free(op),
            11..=14 => self.end(op),
            15 | 16 if !racing => {
                let (bytes, pool) = (u64::from(op.a) + 1, self.driver_pool + u64::from(op.b / 2 % 2));
                let address = self.address(op, bytes);
                let memory = MemoryKind::StreamOrdered;
                let seq = self.say(Body::AllocEnd { address, bytes, pool, took_us: 0, memory }, op.b);
                self.born.push((seq, address, pool));
            }
            17 if !racing => {
                let (pool, reserved_bytes) = (self.driver_pool + u64::from(op.b % 2), u64::from(op.a) * 2);
                self.say(Body::PoolState { pool, reserved_bytes, used_bytes: 0, took_us: 0 }, 0);
            }
            18 if !racing && op.a.is_multiple_of(4) => {
                if let Some(pool) = pick(&self.world.driver_pools, op.b).filter(|pool| !pool.gone) {
                    let pool = pool.id;
                    if self.losses && self.world.live_in(pool) > 0 {
                        return; // it has no row to restate
                    }
                    self.driver_pool += 2;
                    self.say(Body::PoolDestroy { pool }, 0);
                }
            }
            19..=23 => self.vmm(op),
            24..=26 => self.segment(op),
            27..=29 => self.block(op),
            30 | 31 => {
                let carved = self.world.carved();
                let free: Vec<_> =
                    self.world.blocks.iter().filter(|b| !carved.keys().any(|key| key.0 == b.seq)).collect();
                if let Some(block) = pick(&free, op.a) {
                    let (address, pool) = (block.address, block.pool);
                    let state = if op.b.is_multiple_of(4) { FreeState::Pending } else { FreeState::Done };
                    self.say(Body::BlockFree { address, pool, state }, 0);
                }
            }
            32 | 33 => {
                if let Some(&(block_seq, address, pool)) = pick(&self.born, op.a) {
                    let role = [Role::Unknown, Role::Parameter, Role::Gradient][usize::from(op.b / 8 % 3)];
                    let use_as = (role, Phase::Unknown);
                    self.say(Body::Retag { address, block_seq, pool, use_as }, op.b % 5);
                }
            }
            // Not while the table is read: a block restated before it, whose segment is not restated after it, would lose its
            // segment for good. Not while records are lost: new pools with the same number would be taken for the old ones.
            34 if !racing && self.drop == 0 && op.a.is_multiple_of(8) => {
                let reset = op.b.is_multiple_of(4);
                let scope = if reset { DestroyScope::Device } else { DestroyScope::Context };
                self.say(Body::ContextDestroy { scope }, op.b);
                self.driver_pool += if reset { 2 } else { 0 };
                self.create_pools();
            }
            35 if !racing && self.losses && op.a.is_multiple_of(2) => self.drop = op.b % 6 + 1,
            36 if !racing => self.resync(op),
            37 | 38 if !racing => self.reading(op),
            39 if !racing && self.drop == 0 => {
                self.time += 1;
                self.control(Body::Watermark { last_seq: self.seq, in_flight_since_ns: 0 });
                self.first_watermark.get_or_insert(self.time);
                self.check_samples();
            }
            _ => {}
        }
    }

    pub fn begin(&mut self, body: Body<'static>) {
        let seq = self.say(body, 0);
        self.begun.push((seq, true));
    }

    fn reading(&mut self, op: Op) {
        match self.sample {
            None => {
                // With watermarks, the begin of a reading may arrive late.
                let late = if op.a.is_multiple_of(3) { u64::from(op.b % 60) } else { 0 };
                let began = self.time.saturating_sub(late).max(self.clean_since + 1);
                let known = self.first_watermark.is_some_and(|first| first <= began);
                let began = if known { began.min(self.time) } else { self.time };
                let now = std::mem::replace(&mut self.time, began);
                self.host(0, Body::SampleBegin { number: began });
                self.time = now.max(self.time);
                self.sample = Some((began, false));
            }
            Some((number, listed)) if listed || op.a.is_multiple_of(2) => {
                self.host(0, Body::SampleEnd { number, result: 0 });
                self.sample = None;
            }
            Some((number, _)) => {
                let used_bytes = Reading::of(u64::from(op.b) * 1000);
                let absence = Absence::Unknown;
                let start_ticks = KEY.start_ticks;
                self.host(KEY.pid, Body::ProcessSample { start_ticks, used_bytes, absence, lists: 1 });
                self.sample = Some((number, true));
            }
        }
        self.check_samples();
    }
}
