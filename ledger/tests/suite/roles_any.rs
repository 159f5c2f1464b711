//! Compares roles of blocks with a naive model of the same rules, over arbitrary sequences of phases, allocations, frees, retags,
//! steps, losses, resyncs and restarts.
//!
//! The model keeps all blocks in one list and visits each block at each phase boundary. Each block has a unique tag, so that
//! its role can be read from the ledger's cells.
use crate::common;
use crate::common::{KEY, verify};
use gpumem_ledger::{Class, Ledger, Origin, ProcessView};
use gpumem_wire::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const POOL: u64 = 3;
const BASE: u64 = 1 << 40;
const SEGMENT: u64 = 1 << 44;
const SIZES: [u64; 4] = [100, 700, 33_554_432, 8_519_680];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// Not followed.
    Rest,
    /// Its phase of allocation (`Unknown`: between phases) is in progress.
    Open,
    /// Settled; outlived this many steps since.
    Kept(u8),
    Workspace,
}

#[derive(Debug, Clone)]
struct Block {
    seq: u64,
    bytes: u64,
    stamped: Phase,
    born: Phase,
    role: Role,
    told: bool,
    /// The thread that allocated the block; 0 if a resync restated it.
    thread: u32,
    /// Allocated in a pass before anything was trained, with the size of a workspace.
    is_scratch: bool,
    at: At,
    /// Backward passes that began since, while its phase is `Unknown` and open.
    age: u8,
    live: bool,
    pending: bool,
    /// Its role was reported and it was freed: no further changes.
    is_final: bool,
}

impl Block {
    fn die(&mut self) {
        (self.live, self.is_final) = (false, self.told);
    }
}

/// Records that the ledger has received, and the expected roles.
#[derive(Debug, Default)]
struct Model {
    blocks: BTreeMap<u64, Block>,
    now: Phase,
    since: u64,
    said: Phase,
    stamped: bool,
    looks: bool,
    stepped: bool,
    trained: bool,
    optimized: u64,
    worked: bool,
    replays: bool,
    threads: BTreeSet<u32>,
    backward_threads: BTreeSet<u32>,
    outside: BTreeSet<u32>,
    pass_thread: u32,
    /// The thread of the last block of a forward pass, and the one that last called `backward()`.
    forward_thread: Option<u32>,
    caller: Option<u32>,
    has_backward: bool,
    backward_is_over: bool,
    /// The thread of the first block of the backward pass, while no other has made one.
    backward_caller: u32,
    /// Forward passes: since the last backward pass, between the last two, usually, and those with undecided blocks.
    passes: [u64; 4],
    kept: u64,
    parameter_sizes: BTreeSet<u64>,
    ambiguous: BTreeSet<u64>,
    knows_parameters: bool,
    /// Numbers of the blocks that were live at the fullest moment so far.
    fullest: (u64, Vec<u64>),
}

fn is_scratch_size(bytes: u64) -> bool {
    bytes == 33_554_432 || bytes == 8_519_680
}

impl Model {
    fn guess(&self, born: Phase) -> Role {
        match born {
            Phase::Forward if self.trained => Role::Activation,
            Phase::Backward => Role::Temporary,
            Phase::Optimizer if self.optimized == 0 => Role::OptimizerState,
            Phase::Optimizer => Role::Temporary,
            _ => Role::Unknown,
        }
    }

    fn only_works_in_backward(&self, thread: u32) -> bool {
        self.backward_threads.contains(&thread) && !self.threads.contains(&thread)
    }

    /// Detects the begin of a forward pass.
    fn note_pass(&mut self, stamped: Phase, thread: u32) {
        if stamped == Phase::Unknown && self.looks && !self.only_works_in_backward(thread) {
            self.outside.insert(thread);
        }
        if !matches!(stamped, Phase::Forward | Phase::Evaluation) || !self.outside.remove(&thread) {
            return;
        }
        let is_next = std::mem::replace(&mut self.pass_thread, thread) == thread;
        let is_step = std::mem::take(&mut self.has_backward) && self.optimized == 0;
        let open = |b: &&Block| b.live && b.at == At::Open && b.born == Phase::Forward;
        let remaining = self.blocks.values().filter(open).count() as u64;
        let [since, _, usual, undecided] = self.passes;
        let most = self.kept * undecided / (usual * 4).max(1);
        let is_done = usual > 0 && since > usual && remaining <= most;
        self.passes[0] += 1;
        self.passes[3] = if is_done { 1 } else { undecided + 1 };
        self.settle_scratch(thread);
        if is_next {
            self.settle(Phase::Evaluation, None);
        }
        if is_done {
            self.settle(Phase::Forward, Some(Role::Unknown));
        }
        if is_step && !self.stepped {
            self.grow_older(true);
        }
    }

    fn may_be_scratch(&self, born: Phase, bytes: u64) -> bool {
        let is_pass = matches!(born, Phase::Forward | Phase::Evaluation) && !self.trained;
        is_pass && is_scratch_size(bytes) && !self.ambiguous.contains(&bytes)
    }

    /// A pass begins: blocks that the thread's earlier passes kept may be workspaces.
    fn settle_scratch(&mut self, thread: u32) {
        let is_due = |b: &&Block| b.live && b.at == At::Open && b.is_scratch && b.thread == thread;
        let due: Vec<(u64, u64)> = self.blocks.values().filter(is_due).map(|b| (b.seq, b.bytes)).collect();
        for (seq, bytes) in due {
            let is_workspace = !self.ambiguous.contains(&bytes);
            let Some(block) = self.blocks.get_mut(&seq) else { continue };
            block.is_scratch = false;
            if !is_workspace {
                continue;
            }
            block.at = At::Workspace;
            if !block.told {
                block.role = Role::Workspace;
            }
            self.check_workspaces(bytes, thread);
        }
    }

    /// Revokes all workspaces of a size if a thread has more than four.
    fn check_workspaces(&mut self, bytes: u64, thread: u32) {
        let is_like = |b: &&Block| b.live && b.at == At::Workspace && (b.bytes, b.thread) == (bytes, thread);
        if self.blocks.values().filter(is_like).count() <= 4 {
            return;
        }
        self.ambiguous.insert(bytes);
        let like = |b: &&mut Block| b.live && b.at == At::Workspace && b.bytes == bytes;
        let next = if self.trained { At::Rest } else { At::Open };
        for block in self.blocks.values_mut().filter(like) {
            block.at = next;
            if !block.told {
                let is_gradient = block.born == Phase::Backward;
                block.role = if is_gradient { Role::Gradient } else { Role::Unknown };
            }
        }
    }

    /// Returns the phase in which a block is allocated, if its role can be derived from it; `Unknown`: between phases.
    fn phase_of_birth(&mut self, seq: u64, stamped: Phase, thread: u32) -> Option<Phase> {
        self.note_pass(stamped, thread);
        let phase = match stamped {
            Phase::Setup => return None,
            Phase::Unknown if !self.looks => return None,
            Phase::Unknown if self.said == Phase::Optimizer => Phase::Optimizer,
            Phase::Unknown if self.said == Phase::Setup => return None,
            Phase::Unknown if !self.stamped && self.said != Phase::Unknown => self.said,
            Phase::Unknown if self.now == Phase::Forward => Phase::Forward,
            Phase::Unknown if self.now == Phase::Backward && self.only_works_in_backward(thread) => {
                Phase::Backward
            }
            Phase::Unknown => {
                if self.now == Phase::Optimizer {
                    self.enter(Phase::Unknown, seq);
                }
                if self.now == Phase::Backward {
                    let waits = self.forward_thread.or(self.caller);
                    self.backward_is_over |= waits.is_none_or(|waits| waits == thread);
                    if self.forward_thread == Some(thread) {
                        self.settle(Phase::Backward, Some(Role::Gradient));
                    }
                }
                return (self.trained || self.stepped).then_some(Phase::Unknown);
            }
            Phase::Forward if self.now == Phase::Backward && !self.threads.contains(&thread) => {
                Phase::Backward
            }
            phase => phase,
        };
        if phase == Phase::Forward && stamped == Phase::Forward {
            self.threads.insert(thread);
            self.forward_thread = Some(thread);
        }
        if stamped == Phase::Backward {
            let caller = std::mem::take(&mut self.backward_caller);
            if self.now != Phase::Backward || self.backward_is_over || caller == thread {
                self.backward_caller = thread;
            } else {
                self.backward_threads.remove(&caller);
                self.caller = Some(caller).filter(|caller| *caller != 0).or(self.caller);
            }
            self.backward_threads.insert(thread);
        }
        self.stamped |= stamped != Phase::Unknown;
        self.looks = true;
        if (phase, self.now) == (Phase::Backward, Phase::Backward)
            && std::mem::take(&mut self.backward_is_over)
        {
            self.grow_older_outside();
        }
        self.enter(phase, seq);
        Some(phase)
    }

    /// A backward pass begins: blocks outside of phases that outlive three are not temporary.
    fn grow_older_outside(&mut self) {
        let is_outside = |b: &&mut Block| b.live && (b.at, b.born) == (At::Open, Phase::Unknown);
        for block in self.blocks.values_mut().filter(is_outside) {
            block.age += 1;
            block.at = if block.age == 3 { At::Rest } else { At::Open };
        }
    }

    fn born(&mut self, seq: u64, bytes: u64, (role, stamped): (Role, Phase), thread: u32) {
        // Already counts when the birth ends a step.
        if role == Role::Parameter {
            self.parameter_sizes.insert(bytes);
        }
        let born = self.phase_of_birth(seq, stamped, thread);
        let told = role != Role::Unknown;
        let at = if told || born.is_none() { At::Rest } else { At::Open };
        let guess = born.map_or(Role::Unknown, |born| self.guess(born));
        let role = if told { role } else { guess };
        let born = born.unwrap_or_default();
        let is_scratch = at == At::Open && self.may_be_scratch(born, bytes);
        let (age, live, pending, is_final) = (0, true, false, false);
        let block = Block {
            seq,
            bytes,
            stamped,
            born,
            role,
            told,
            thread,
            is_scratch,
            at,
            age,
            live,
            pending,
            is_final,
        };
        self.blocks.insert(seq, block);
    }

    fn ends(&mut self, seq: u64, by_owner: bool) {
        let trained = self.trained;
        let Some(block) = self.blocks.get_mut(&seq) else { return };
        let is_early = block.at == At::Open && (trained || block.born != Phase::Forward);
        if by_owner && is_early && !block.told {
            block.role = Role::Temporary;
        }
        block.at = At::Rest;
    }

    fn retag(&mut self, seq: u64, role: Role) {
        let Some(block) = self.blocks.get_mut(&seq) else { return };
        if block.is_final {
            return;
        }
        (block.role, block.told) = (role, true);
        if role == Role::Parameter && block.live {
            self.knows_parameters = true;
            self.parameter_sizes.insert(block.bytes);
        }
    }

    fn settle(&mut self, born: Phase, role: Option<Role>) {
        let is_due = |b: &&mut Block| b.live && b.at == At::Open && b.born == born && !b.is_scratch;
        for block in self.blocks.values_mut().filter(is_due) {
            let is_kept = matches!(role, Some(Role::Activation | Role::Input))
                || role == Some(Role::Gradient) && is_scratch_size(block.bytes);
            block.at = if is_kept { At::Kept(0) } else { At::Rest };
            if let (Some(role), false) = (role, block.told) {
                block.role = role;
            }
        }
    }

    fn enter(&mut self, next: Phase, seq: u64) {
        let from = std::mem::replace(&mut self.now, next);
        if from == next {
            return;
        }
        self.since = seq;
        self.backward_is_over = false;
        if next == Phase::Backward && !self.replays {
            self.grow_older_outside();
        }
        if from == Phase::Optimizer {
            self.settle(Phase::Optimizer, Some(Role::OptimizerState));
            self.optimized += 1;
            if !self.stepped && !self.replays && std::mem::take(&mut self.worked) {
                self.grow_older(true);
            }
        }
        let is_training = matches!(next, Phase::Backward | Phase::Optimizer);
        if is_training && !std::mem::replace(&mut self.trained, true) {
            self.ambiguous.clear();
            for block in self.blocks.values_mut().filter(|b| b.live) {
                block.is_scratch = false;
                block.at = if block.at == At::Workspace { At::Open } else { block.at };
            }
        }
        if matches!(next, Phase::Forward | Phase::Evaluation | Phase::Optimizer) {
            self.settle(Phase::Backward, Some(Role::Gradient));
        }
        if matches!(next, Phase::Forward | Phase::Optimizer) {
            self.settle(Phase::Evaluation, None);
        }
        if matches!(next, Phase::Forward | Phase::Evaluation) {
            self.settle(Phase::Unknown, Some(Role::Input));
        }
        if is_training {
            self.has_backward |= next == Phase::Backward;
            if next == Phase::Backward && !self.replays {
                self.passes[3] = 0;
                if self.passes[0] > 0 {
                    let [passes, last, usual, _] = self.passes;
                    self.passes = [0, passes, if passes == last { passes } else { usual }, 0];
                    let open = |b: &&Block| b.live && b.at == At::Open && b.born == Phase::Forward;
                    self.kept = self.blocks.values().filter(open).count() as u64;
                }
            }
            self.settle(Phase::Forward, Some(Role::Activation));
        }
        self.worked |= next == Phase::Forward && !self.replays;
    }

    fn grow_older(&mut self, has_worked: bool) {
        let grows = |b: &&Block| matches!(b.at, At::Kept(_)) && (has_worked || is_scratch_size(b.bytes));
        let kept: Vec<u64> = self.blocks.values().filter(grows).map(|b| b.seq).collect();
        // The longest kept first: the order matters if there are too many workspaces.
        for seq in kept {
            let Some(block) = self.blocks.get_mut(&seq) else { continue };
            let At::Kept(age) = block.at else { continue };
            block.at = At::Kept(age + 1);
            let (bytes, thread) = (block.bytes, block.thread);
            let may_be_gradient = !self.knows_parameters || self.parameter_sizes.contains(&bytes);
            let is_gradient = block.born == Phase::Backward;
            if age + 1 < 3 && (may_be_gradient || !is_gradient || !is_scratch_size(bytes)) {
                continue;
            }
            let is_workspace = is_scratch_size(bytes)
                && block.born != Phase::Unknown
                && !self.ambiguous.contains(&bytes)
                && !(is_gradient && may_be_gradient);
            block.at = if is_workspace { At::Workspace } else { At::Rest };
            if !block.told && (is_workspace || !is_gradient) {
                block.role = if is_workspace { Role::Workspace } else { Role::Unknown };
            }
            if is_workspace {
                self.check_workspaces(bytes, thread);
            }
        }
    }

    fn begin_phase(&mut self, phase: Phase, seq: u64) {
        (self.said, self.looks) = (phase, true);
        match phase {
            Phase::Setup | Phase::Unknown => self.enter(Phase::Unknown, seq),
            Phase::Forward if self.stamped => {
                if matches!(self.now, Phase::Optimizer | Phase::Evaluation) {
                    self.enter(Phase::Unknown, seq);
                }
            }
            phase => self.enter(phase, seq),
        }
    }

    fn step(&mut self, seq: u64) {
        self.stepped = true;
        self.enter(Phase::Unknown, seq);
        self.settle(Phase::Backward, Some(Role::Gradient));
        self.settle(Phase::Forward, self.trained.then_some(Role::Activation));
        self.settle(Phase::Evaluation, None);
        let has_worked = std::mem::take(&mut self.worked);
        self.grow_older(has_worked);
    }

    /// Ends a resync that restated `world`: unknown rows are allocated again, in order among the open ones.
    fn resync(&mut self, world: &BTreeMap<u64, Block>) {
        let gone: Vec<u64> =
            self.blocks.values().filter(|b| b.live && !world.contains_key(&b.seq)).map(|b| b.seq).collect();
        for seq in gone {
            self.ends(seq, false);
            self.blocks.entry(seq).and_modify(Block::die);
        }
        let mut again = Vec::new();
        for block in world.values() {
            if self.blocks.contains_key(&block.seq) {
                continue;
            }
            let role = if block.told { block.role } else { Role::Unknown };
            if block.told && role == Role::Parameter {
                self.knows_parameters = true;
                self.parameter_sizes.insert(block.bytes);
            }
            let is_phase = !matches!(block.stamped, Phase::Setup | Phase::Unknown);
            if is_phase {
                again.push(block.seq);
            }
            let block = Block { role, at: At::Rest, born: block.stamped, thread: 0, ..block.clone() };
            self.blocks.insert(block.seq, block);
        }
        // Roles and frees whose records were lost.
        for block in world.values() {
            if block.told {
                self.retag(block.seq, block.role);
            }
            if block.pending && self.blocks.get(&block.seq).is_some_and(|known| !known.pending) {
                self.ends(block.seq, true);
                self.blocks.entry(block.seq).and_modify(|known| known.pending = true);
            }
        }
        if again.is_empty() {
            return;
        }
        for block in self.blocks.values_mut().filter(|b| b.live && b.at == At::Open) {
            block.at = At::Rest;
            again.push(block.seq);
        }
        again.sort_unstable();
        let before = (self.now, self.since);
        self.now = Phase::Unknown;
        self.replays = true;
        for seq in again {
            let block = &self.blocks[&seq];
            if block.told || block.pending || !block.live {
                continue;
            }
            let born = block.born;
            if born != Phase::Unknown {
                self.enter(born, seq);
                self.since = seq;
            }
            let role = self.guess(born);
            let is_scratch = self.may_be_scratch(born, self.blocks[&seq].bytes);
            self.blocks.entry(seq).and_modify(|block| {
                (block.at, block.role, block.age) = (At::Open, role, 0);
                block.is_scratch = is_scratch;
            });
        }
        if before.1 > self.since {
            self.enter(before.0, before.1);
        }
        self.replays = false;
    }

    fn note_fullest(&mut self) {
        let live: Vec<u64> = self.blocks.values().filter(|b| b.live).map(|b| b.seq).collect();
        let sum = live.iter().map(|seq| self.blocks[seq].bytes).sum();
        if sum > self.fullest.0 {
            self.fullest = (sum, live);
        }
    }
}

struct Drive {
    ledger: Ledger,
    model: Model,
    /// Live blocks, whether the ledger knows them or not.
    world: BTreeMap<u64, Block>,
    seq: u64,
    drop: u16,
    was_lost: bool,
    /// No record was lost: the peak is exact, too.
    is_whole: bool,
    /// Records were lost since the last resync.
    is_partial: bool,
    losses: bool,
}

#[derive(Debug, Clone, Copy)]
struct Op {
    what: u8,
    a: u16,
    b: u16,
}

const KINDS: u8 = 24;
const PHASES: [Phase; 6] =
    [Phase::Unknown, Phase::Setup, Phase::Forward, Phase::Backward, Phase::Optimizer, Phase::Evaluation];
const ROLES: [Role; 3] = [Role::Parameter, Role::Gradient, Role::Buffer];

fn address(seq: u64) -> u64 {
    BASE + seq * (64 << 20)
}

fn frame() -> [(u64, Body<'static>); 3] {
    let (owner, memory) = (PoolOwner::Framework, MemoryKind::Device);
    [
        (1, Body::PoolCreate { pool: POOL, parent: 0, reports_blocks: 1, owner }),
        (2, Body::AllocEnd { address: BASE, bytes: SEGMENT, pool: 0, took_us: 0, memory }),
        (3, Body::SegmentAdd { address: BASE, bytes: SEGMENT, pool: POOL }),
    ]
}

impl Drive {
    fn new(losses: bool) -> Self {
        let (ledger, model, world) = (Ledger::new(), Model::default(), BTreeMap::new());
        let mut drive = Drive {
            ledger,
            model,
            world,
            seq: 3,
            drop: 0,
            was_lost: false,
            is_whole: true,
            is_partial: false,
            losses,
        };
        drive.introduce();
        for (seq, body) in frame() {
            drive.tell(Stamp { seq, device: 0, time_ns: seq, ..Stamp::default() }, body);
        }
        drive
    }

    fn introduce(&mut self) {
        self.tell(Stamp { device: 0, ..Stamp::default() }, common::device(9));
    }

    fn tell(&mut self, stamp: Stamp, body: Body<'_>) {
        self.ledger.observe(Origin::Process(KEY), &Record { stamp, body });
    }

    /// Sends a record unless it is to be lost; returns whether it was sent.
    fn say(&mut self, thread: u32, body: Body<'_>) -> bool {
        self.seq += 1;
        if self.drop > 0 {
            self.drop -= 1;
            (self.was_lost, self.is_whole, self.is_partial) = (true, false, true);
            return false;
        }
        if std::mem::take(&mut self.was_lost) {
            self.model.said = Phase::Unknown;
        }
        let tag = if matches!(body, Body::BlockAlloc { .. }) { self.seq as u32 } else { 0 };
        if tag != 0 {
            let path = &format!("b{tag}");
            self.tell(Stamp { tag, ..Stamp::default() }, Body::Tag { path });
        }
        let (seq, time_ns) = (self.seq, self.seq * 10);
        self.tell(Stamp { seq, time_ns, thread, tag, device: 0, ..Stamp::default() }, body);
        true
    }

    fn born(&mut self, phase: Phase, thread: u32, bytes: u64, role: Role) {
        let use_as = (role, phase);
        let heard =
            self.say(thread, Body::BlockAlloc { address: address(self.seq + 1), bytes, pool: POOL, use_as });
        let (seq, told) = (self.seq, role != Role::Unknown);
        let (at, pending) = (At::Rest, false);
        let block = Block {
            seq,
            bytes,
            stamped: phase,
            born: phase,
            role,
            told,
            thread,
            is_scratch: false,
            at,
            age: 0,
            live: true,
            pending,
            is_final: false,
        };
        self.world.insert(seq, block);
        if heard {
            self.model.born(seq, bytes, use_as, thread);
        }
    }

    fn pick(&self, n: u16) -> Option<u64> {
        let at = usize::from(n) % self.world.len().max(1);
        self.world.keys().nth(at).copied()
    }

    fn run(&mut self, op: Op) {
        let Op { what, a, b } = op;
        let phase = PHASES[usize::from(a) % 6];
        let thread = u32::from(b % 3) + 1;
        let bytes = SIZES[usize::from(b / 3 % 8).min(7) / 2];
        match what {
            0..=2 => self.born(Phase::Forward, 1, bytes, Role::Unknown),
            3 | 4 => self.born(Phase::Backward, 2, bytes, Role::Unknown),
            5 => self.born(Phase::Optimizer, 1, bytes, Role::Unknown),
            6 => self.born(Phase::Unknown, thread, bytes, Role::Unknown),
            7 | 8 => self.born(phase, thread, bytes, Role::Unknown),
            9 if b.is_multiple_of(3) => self.born(phase, thread, bytes, ROLES[usize::from(a) % 3]),
            10..=13 => {
                let Some(seq) = self.pick(a) else { return };
                let block = self.world.remove(&seq).expect("picked");
                let state = FreeState::Done;
                let heard = self.say(thread, Body::BlockFree { address: address(seq), pool: POOL, state });
                if heard && self.model.blocks.contains_key(&seq) {
                    self.model.ends(seq, !block.pending);
                    self.model.blocks.entry(seq).and_modify(Block::die);
                }
            }
            14 if b.is_multiple_of(2) => {
                let Some(seq) = self.pick(a) else { return };
                self.world.entry(seq).and_modify(|block| block.pending = true);
                let state = FreeState::Pending;
                let heard = self.say(thread, Body::BlockFree { address: address(seq), pool: POOL, state });
                if heard && self.model.blocks.get(&seq).is_some_and(|known| !known.pending) {
                    self.model.ends(seq, true);
                    self.model.blocks.entry(seq).and_modify(|block| block.pending = true);
                }
            }
            15 => {
                let Some(seq) = self.pick(a) else { return };
                self.retag(seq, ROLES[usize::from(b) % 3]);
            }
            16 if self.is_whole => {
                // A removed block: only the peak can still contain it.
                let gone: Vec<u64> = self.model.blocks.values().filter(|b| !b.live).map(|b| b.seq).collect();
                let Some(&seq) = gone.get(usize::from(a) % gone.len().max(1)) else { return };
                self.retag(seq, ROLES[usize::from(b) % 3]);
            }
            17 => {
                if self.say(thread, Body::PhaseBegin { phase }) {
                    self.model.begin_phase(phase, self.seq);
                }
            }
            18 | 19 => {
                let phase = if what == 18 { Phase::Optimizer } else { Phase::Forward };
                if self.say(thread, Body::PhaseBegin { phase }) {
                    self.model.begin_phase(phase, self.seq);
                }
            }
            20 if a.is_multiple_of(4) => {
                if self.say(thread, Body::Step { number: b.into() }) {
                    self.model.step(self.seq);
                }
            }
            21 if self.losses && self.drop == 0 => self.drop = b % 8 + 1,
            22 if self.losses || b.is_multiple_of(4) => self.resync(op),
            _ => return,
        }
        if self.drop == 0 && !self.was_lost {
            self.model.note_fullest();
        }
        self.compare();
    }

    fn retag(&mut self, block_seq: u64, role: Role) {
        self.world.entry(block_seq).and_modify(|block| (block.role, block.told) = (role, true));
        let use_as = (role, Phase::Unknown);
        if self.say(1, Body::Retag { address: address(block_seq), block_seq, pool: POOL, use_as }) {
            self.model.retag(block_seq, role);
        }
    }

    fn resync(&mut self, op: Op) {
        let begins_anew = self.losses && op.a.is_multiple_of(3);
        if begins_anew {
            self.ledger = Ledger::new();
            self.model = Model::default();
            self.is_whole = false;
            self.introduce();
        }
        self.drop = 0;
        // Known rows are only confirmed, and none is removed.
        let is_known = !std::mem::take(&mut self.is_partial) && !begins_anew;
        if std::mem::take(&mut self.was_lost) {
            self.model.said = Phase::Unknown;
        }
        let control = Stamp { time_ns: self.seq * 10, device: 0, ..Stamp::default() };
        self.tell(control, Body::ResyncBegin { epoch: 1, after_seq: self.seq });
        let again = |seq: u64| Stamp { seq, device: 0, flags: Flags::RESTATED, ..Stamp::default() };
        let mut rows = 3;
        for (seq, body) in frame() {
            self.tell(again(seq), body);
        }
        let mut said: Vec<Block> = self.world.values().cloned().collect();
        said.sort_by_key(|block| block.seq.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        for block in said {
            let (address, tag) = (address(block.seq), block.seq as u32);
            self.tell(Stamp { tag, ..Stamp::default() }, Body::Tag { path: &format!("b{tag}") });
            let use_as = (Role::Unknown, block.stamped);
            let stamp = Stamp { tag, ..again(block.seq) };
            self.tell(stamp, Body::BlockAlloc { address, bytes: block.bytes, pool: POOL, use_as });
            rows += 1;
            if block.told {
                let use_as = (block.role, Phase::Unknown);
                self.tell(stamp, Body::Retag { address, block_seq: block.seq, pool: POOL, use_as });
                rows += 1;
            }
            if block.pending {
                self.tell(stamp, Body::BlockFree { address, pool: POOL, state: FreeState::Pending });
                rows += 1;
            }
        }
        self.tell(control, Body::ResyncEnd { epoch: 1, head_seq: self.seq, rows });
        if !is_known {
            self.model.resync(&self.world.clone());
        }
    }

    fn view(&self) -> ProcessView {
        let processes = self.ledger.snapshot().processes;
        (**processes.iter().find(|process| process.key == KEY).expect("it spoke")).clone()
    }

    /// Returns role and bytes by tag; every block must have a single role.
    fn roles(view: &ProcessView, amounts: &[i64]) -> BTreeMap<u64, (Role, i64)> {
        let mut roles = BTreeMap::new();
        for (cell, &bytes) in view.cells.iter().zip(amounts) {
            if cell.class == Class::Block && bytes != 0 {
                let seq =
                    cell.tag.as_deref().and_then(|tag| tag[1..].parse().ok()).expect("each has its tag");
                assert_eq!(roles.insert(seq, (cell.role, bytes)), None, "b{seq} has one role");
            }
        }
        roles
    }

    fn compare(&mut self) {
        let view = self.view();
        verify(&view);
        let account = &view.accounts[0];
        assert_eq!(account.tracked_bytes, SEGMENT as i64, "roles move no sum");
        let known = self.model.blocks.values();
        let live: BTreeMap<u64, (Role, i64)> =
            known.filter(|b| b.live).map(|b| (b.seq, (b.role, b.bytes as i64))).collect();
        assert_eq!(Self::roles(&view, &account.amounts), live);
        let pool = &account.pools[0];
        let pending = self.model.blocks.values().filter(|b| b.live && b.pending).map(|b| b.bytes);
        assert_eq!(pool.pending_bytes, pending.sum::<u64>());
        if self.is_whole {
            let blocks = self.model.fullest.1.iter().map(|seq| &self.model.blocks[seq]);
            let expected: BTreeMap<u64, (Role, i64)> =
                blocks.map(|b| (b.seq, (b.role, b.bytes as i64))).collect();
            assert_eq!(Self::roles(&view, &account.peak.amounts), expected, "at the peak");
        }
        let iterations = self.ledger.iterations(KEY, 0);
        for row in iterations.rows.iter().chain(&iterations.open) {
            let mut row = *row;
            for &role in Role::ALL {
                let Some(level) = row.role_mut(role) else { continue };
                assert!(level.peak_bytes >= level.last_bytes && level.last_bytes >= 0, "{role:?}");
            }
            assert!(row.intermediate_gradients.peak_bytes >= 0 && row.temporaries.peak_bytes >= 0);
        }
    }
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = (0..KINDS, any::<u16>(), any::<u16>()).prop_map(|(what, a, b)| Op { what, a, b });
    proptest::collection::vec(op, 1..100)
}

fn config() -> ProptestConfig {
    let mut config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = 400; // some seconds of one core in a debug build
    }
    config
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn roles_are_those_of_the_model(ops in ops()) {
        let mut drive = Drive::new(false);
        ops.iter().for_each(|op| drive.run(*op));
    }

    #[test]
    fn roles_are_those_of_the_model_after_losses_and_restarts(ops in ops()) {
        let mut drive = Drive::new(true);
        ops.iter().for_each(|op| drive.run(*op));
    }
}

/// The properties would be trivially true if no block got a role.
#[test]
fn drive_reaches_every_role() {
    let mut state = 3u64;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    for losses in [false, true] {
        let mut drive = Drive::new(losses);
        let mut seen = BTreeSet::new();
        for _ in 0..700 {
            drive.run(Op { what: (next() % u64::from(KINDS)) as u8, a: next() as u16, b: next() as u16 });
            seen.extend(drive.model.blocks.values().filter(|b| b.live && !b.told).map(|b| b.role));
            drive.model.blocks.retain(|seq, b| b.live || drive.model.fullest.1.contains(seq));
        }
        let all = [
            Role::Unknown,
            Role::Gradient,
            Role::OptimizerState,
            Role::Activation,
            Role::Input,
            Role::Temporary,
            Role::Workspace,
        ];
        assert!(all.iter().all(|role| seen.contains(role)), "{seen:?}");
    }
}
