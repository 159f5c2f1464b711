//! Derives the role of blocks that have none, from the phase in which they were allocated and from the phases that they outlive.
//!
//! | allocated in | outlives | role | if freed before |
//! |---|---|---|---|
//! | forward | the beginning of backward, or of the optimizer | activation | temporary |
//! | forward without backward | the beginning of the next forward pass | unknown | temporary |
//! | backward | its end: the next block that the thread of the last forward pass makes outside, the beginning of the optimizer, or of the next forward pass | gradient | temporary |
//! | optimizer | its end | optimizer state | temporary |
//! | no phase, between two steps | the beginning of forward | input | temporary |
//! | evaluation | the beginning of the next forward pass, or training | unknown | temporary |
//! | setup, or no phase before anything was trained | | unknown | |
//!
//! Until then a block has a preliminary role, the most frequent one: activation in forward (once something was trained), temporary
//! in backward and in an optimizer, optimizer state in the first optimizer step. A role from a `Retag` or from the block's own
//! record is final. Every change shifts bytes between cells, also in the amounts at the peak, so no sum changes. A block that was
//! live when a request failed keeps its role when it is freed before its phase ends, because the failure is the reason why the
//! program frees it.
//!
//! **Phase boundaries.** A phase begins with a `PhaseBegin` record, or with the first block on a device whose record has the
//! phase. (The optimizer reports its begin and end.) A forward block on a thread that has run only backward passes is a
//! recomputation of activation checkpointing, and counts as backward. A block without a phase belongs to the forward pass in
//! progress, because loss code is in no module. Such a block belongs to the backward pass in progress if its thread has run only
//! backward passes, because the end of a backward pass runs outside its nodes. (The thread that calls `backward()` makes the first
//! gradient, and is none of these.) Threads that neither ran the last forward pass nor called `backward()`, such as one that
//! prefetches batches, do not wait for the backward pass, so their blocks do not end it. The agent gives blocks of the closure of an
//! optimizer's step the phase `Between`, so they do not belong to the optimizer. A `Step` ends all phases.
//!
//! **Forward passes.** One begins when a thread that allocated outside of modules allocates in a module. Under `torch.no_grad()` a
//! pass keeps only its results. If there are more passes than usual without a backward pass, and few of their blocks remain, these
//! are results and no activations. Without an optimizer, passes with a backward pass count as steps.
//!
//! **Blocks that outlive whole steps** are not activations or inputs, but copies of weights, caches, buckets. After three steps
//! with a forward pass, their role becomes unknown. (A replayed graph allocates no blocks, so its blocks keep their role.) A
//! block with the exact size of a library's workspace counts as a workspace (workspaces.rs). A block allocated in backward may be a
//! gradient. Such a block is a workspace only if the parameters are known and none has its size; then one step is enough. While
//! nothing is trained, as in a server, outliving a pass is enough. A program without modules has no forward passes: its blocks
//! outside of phases are not temporary if they outlive three beginnings of a backward pass.
//!
//! **After a loss of records** phase boundaries may be missing; the next boundary then decides the roles. Blocks that were
//! unknown before a resync are replayed in the order of their allocation. Two live blocks of different phases prove a boundary
//! between their allocations.

use crate::book::cells::CellId;
use crate::roles::state::{End, PassCounts, PhaseReports, RestatedBlock, Roles, list_of};
use crate::roles::undecided::{Entry, List, NOT_LISTED};
use crate::rows::row::{Extent, Row};
use crate::rules::holdings::Holdings;
use gpumem_wire::{Phase, Role, Stamp};

/// File name prefixes of libraries whose driver allocations are scratch memory. libnccl is not included: its memory is large, and
/// memory without a role is shown under the library's name.
const SCRATCH_LIBRARIES: [&str; 2] = ["libcublas", "libcudnn"];
/// Maximum number of ids of scratch libraries that a process may have.
const MAX_SCRATCH_LIBRARIES: usize = 32;
/// Number of outlived steps after which a block is not an activation or input. With two alternating optimizers, each step may
/// count twice.
const OLD_AGE: u8 = 3;

impl Holdings {
    /// Returns the preliminary role of a block that is about to be booked, and the list to which it will be added.
    #[inline]
    pub fn role_at_birth(&mut self, book: u8, stamp: &Stamp, use_as: (Role, Phase)) -> (Role, Option<List>) {
        let (role, phase) = use_as;
        if phase == Phase::Unknown && !self.phases.any_phase {
            return (role, None);
        }
        let list = self.list_at_birth(book, stamp, phase);
        match (role, list) {
            (Role::Unknown, Some(list)) => (self.roles[usize::from(book)].likely_role(list), Some(list)),
            _ => (role, None), // a reported role, or no phase
        }
    }

    /// Returns whether a block begins a forward pass: its thread allocates in a module after it allocated outside of modules.
    fn detect_forward_pass(&mut self, book: u8, stamp: &Stamp, phase: Phase) -> bool {
        let roles = &mut self.roles[usize::from(book)];
        match phase {
            Phase::Unknown | Phase::Between if !roles.is_backward_thread(stamp.thread) => {
                roles.outside_threads.note(stamp.thread);
                return false;
            }
            Phase::Forward | Phase::Evaluation if roles.outside_threads.remove(stamp.thread) => {}
            _ => return false,
        }
        self.pass_begins = true;
        // Passes of several threads may overlap.
        let is_next = std::mem::replace(&mut roles.pass_thread, stamp.thread) == stamp.thread;
        let is_step = std::mem::take(&mut roles.has_backward) && roles.optimized == 0;
        let has_only_results = roles.begin_pass();
        self.settle_workspaces(book, stamp.thread);
        if is_next {
            self.end_list(book, List::Evaluation, None);
        }
        if has_only_results {
            self.end_list(book, List::Forward, Some(Role::Unknown));
        }
        if is_step && !self.phases.has_steps {
            self.grow_older(book, true);
        }
        true
    }

    /// Handles a failed request. Blocks that are live now keep their roles if the program frees them before their phase ends. If
    /// an optimizer has allocated more than the temporary bytes of earlier steps, its oldest blocks are the state of a new
    /// optimizer. If a backward pass has, its oldest blocks may be gradients, so their role becomes unknown. The blocks of the
    /// first forward pass are activations, because no pass has ended that could have kept results.
    pub fn note_failure(&mut self, book: u8, seq: u64) {
        let roles = &mut self.roles[usize::from(book)];
        roles.failed_seq = seq;
        if !roles.is_trained && roles.passes.is_first() {
            let lists = [List::Forward, List::Scratch];
            let blocks = lists.into_iter().flat_map(|list| roles.undecided.iter(list));
            for (_, entry) in blocks.filter(|(_, entry)| entry.born == List::Forward).collect::<Vec<_>>() {
                self.assign(&entry, Role::Activation);
            }
            return;
        }
        let of_optimizer = (List::Optimizer, Some(roles.optimizer_temporary), Role::OptimizerState);
        let of_backward = (List::Backward, roles.backward_temporary, Role::Unknown);
        for (list, temporary, role) in [of_optimizer, of_backward] {
            let Some(temporary) = temporary else { continue };
            let undecided = &self.roles[usize::from(book)].undecided;
            let mut more = undecided.sum(list).saturating_sub(temporary);
            let blocks: Vec<Entry> = undecided.iter(list).map(|(_, entry)| entry).collect();
            for entry in blocks {
                if more <= 0 {
                    break;
                }
                more -= entry.bytes as i64;
                self.assign(&entry, role);
            }
        }
    }

    /// Returns the numbers of forward passes.
    pub(crate) fn passes(&self, book: u8) -> &PassCounts {
        &self.roles[usize::from(book)].passes
    }

    fn list_at_birth(&mut self, book: u8, stamp: &Stamp, phase: Phase) -> Option<List> {
        let is_pass = self.detect_forward_pass(book, stamp, phase);
        let now = self.roles[usize::from(book)].now;
        let is_stamped = phase != Phase::Unknown;
        // The closure of an optimizer's step runs while the optimizer does.
        let is_of_closure = phase == Phase::Between && self.phases.last == Phase::Optimizer;
        let phase = match phase {
            Phase::Setup => return None,
            Phase::Unknown | Phase::Between => match self.phases.last {
                Phase::Optimizer if !is_of_closure => Phase::Optimizer,
                Phase::Setup => return None,
                reported if !self.phases.in_blocks && !is_of_closure && list_of(reported).is_some() => {
                    reported
                }
                _ => match now {
                    Phase::Forward => now,
                    Phase::Backward if self.roles[usize::from(book)].is_backward_thread(stamp.thread) => now,
                    Phase::Backward => {
                        self.end_backward(book, stamp.thread);
                        return Some(List::Between);
                    }
                    Phase::Optimizer => {
                        // A closure has begun, or the record of the optimizer's end was lost: the agent gives this phase to each
                        // block that the optimizer makes. The block was made between two steps.
                        self.enter_phase(book, Phase::Unknown, stamp.seq, stamp.time_ns);
                        return Some(List::Between);
                    }
                    _ => {
                        let has_begun = self.roles[usize::from(book)].is_trained || self.phases.has_steps;
                        return has_begun.then_some(List::Between);
                    }
                },
            },
            Phase::Forward => {
                let roles = &mut self.roles[usize::from(book)];
                if now == Phase::Backward && !roles.forward_threads.has(stamp.thread) {
                    Phase::Backward
                } else {
                    roles.forward_threads.note(stamp.thread);
                    roles.forward_thread = stamp.thread;
                    Phase::Forward
                }
            }
            Phase::Backward => {
                self.roles[usize::from(book)].note_backward(stamp.thread);
                Phase::Backward
            }
            phase => phase,
        };
        self.phases.in_blocks |= is_stamped;
        self.phases.any_phase = true;
        if phase != now {
            self.enter_phase(book, phase, stamp.seq, stamp.time_ns);
        } else if phase == Phase::Backward {
            self.begin_another_backward(book);
        }
        if is_pass && phase == Phase::Forward {
            // The pass may have begun an iteration, to which it belongs.
            let Roles { undecided, iterations, passes, .. } = &mut self.roles[usize::from(book)];
            passes.with_gradients += 1;
            iterations.add_pass(passes.with_gradients, undecided.sum(List::Forward));
        }
        list_of(phase)
    }

    /// Handles a block that a thread makes outside of the backward pass in progress. If the thread waits for the pass, that is over.
    /// If it also ran the forward pass, what is left of the backward pass are gradients.
    fn end_backward(&mut self, book: u8, thread: u32) {
        let roles = &mut self.roles[usize::from(book)];
        roles.is_backward_over |= roles.may_wait_for_backward(thread);
        if roles.forward_thread == thread && !roles.undecided.is_empty(List::Backward) {
            self.end_list(book, List::Backward, Some(Role::Gradient));
        }
    }

    /// Handles a block of a backward pass after one of a backward pass. If blocks were made outside meanwhile, this is another pass.
    fn begin_another_backward(&mut self, book: u8) {
        if std::mem::take(&mut self.roles[usize::from(book)].is_backward_over) {
            self.grow_older_outside(book);
        }
    }

    /// Counts one more backward pass for all blocks that were made outside of phases and that no forward pass has followed. Those
    /// that have outlived several are not temporary.
    fn grow_older_outside(&mut self, book: u8) {
        let mut next = self.roles[usize::from(book)].undecided.first(List::Between);
        while let Some((at, entry)) = next {
            let undecided = &mut self.roles[usize::from(book)].undecided;
            next = undecided.next(&entry);
            if undecided.grow_older(at) >= OLD_AGE {
                self.unlist(book, at);
            }
        }
    }

    /// Removes a block from its list of undecided blocks. If the program frees it before its phase ends, its role is temporary.
    /// Returns the row with its new role.
    pub fn role_at_end(&mut self, extent: Extent, row: &Row, end: End) -> Row {
        let roles = &mut self.roles[usize::from(row.book)];
        let entry = roles.undecided.remove(row.owner);
        let is_settled = matches!(entry.list, List::Decided | List::Workspace);
        let is_known = row.is(Row::EXACT) || entry.born == List::Forward && !roles.is_trained;
        let mut row = Row { owner: NOT_LISTED, ..*row };
        let has_failed = row.seq < roles.failed_seq;
        if end == End::Removed || is_settled || is_known || has_failed {
            self.note_role(&row, None);
            return row;
        }
        self.note_role(&row, Some(Role::Temporary));
        // Bytes that are removed now matter only for the amounts at the peak.
        if end == End::Pending || self.books[usize::from(row.book)].live_at_peak(row.first_epoch) {
            let to = self.cells.with_role(row.cell, Role::Temporary);
            if to != row.cell {
                self.move_row(extent, &row, (to, to));
                row.cell = to;
            }
        }
        row
    }

    /// Handles a `PhaseBegin` record: the process enters another phase on all devices.
    pub fn begin_phase(&mut self, phase: Phase, seq: u64, time_ns: u64) {
        self.phases.last = phase;
        self.phases.any_phase = true;
        for book in 0..self.books.len() as u8 {
            let now = self.roles[usize::from(book)].now;
            let next = match phase {
                Phase::Backward | Phase::Optimizer | Phase::Evaluation => phase,
                Phase::Setup | Phase::Between | Phase::Unknown => Phase::Unknown,
                // If block records have phases, this only ends the optimizer or evaluation; the forward pass begins with its first
                // block.
                Phase::Forward if !self.phases.in_blocks => phase,
                Phase::Forward if matches!(now, Phase::Optimizer | Phase::Evaluation) => Phase::Unknown,
                Phase::Forward => continue,
            };
            self.enter_phase(book, next, seq, time_ns);
        }
    }

    /// Handles a `Step` record: all phases end.
    pub fn begin_iteration(&mut self, number: u64, seq: u64, time_ns: u64) {
        self.phases.has_steps = true;
        for book in 0..self.books.len() as u8 {
            self.enter_phase(book, Phase::Unknown, seq, time_ns);
            let is_trained = self.roles[usize::from(book)].is_trained;
            self.end_list(book, List::Backward, Some(Role::Gradient));
            self.end_list(book, List::Forward, is_trained.then_some(Role::Activation));
            self.end_list(book, List::Evaluation, None);
            let has_worked = std::mem::take(&mut self.roles[usize::from(book)].has_worked);
            self.grow_older(book, has_worked);
            self.begin_next_iteration(book, number, time_ns);
        }
    }

    /// Changes the phase in which blocks are allocated, and decides the roles of those that outlive the old one.
    fn enter_phase(&mut self, book: u8, next: Phase, seq: u64, time_ns: u64) {
        let roles = &mut self.roles[usize::from(book)];
        let from = std::mem::replace(&mut roles.now, next);
        if from == next {
            return;
        }
        roles.since_seq = seq;
        roles.is_backward_over = false;
        if from == Phase::Optimizer {
            self.end_list(book, List::Optimizer, Some(Role::OptimizerState));
            let roles = &mut self.roles[usize::from(book)];
            roles.optimized += 1;
            roles.is_iterated = true;
            if !self.phases.has_steps && !self.phases.is_replay && std::mem::take(&mut roles.has_worked) {
                self.grow_older(book, true);
            }
        }
        if matches!(next, Phase::Backward | Phase::Optimizer) && !self.roles[usize::from(book)].is_trained {
            self.reconsider_workspaces(book);
        }
        match next {
            Phase::Forward | Phase::Evaluation => {
                self.end_list(book, List::Backward, Some(Role::Gradient));
                if next == Phase::Forward {
                    self.end_list(book, List::Evaluation, None);
                    self.begin_forward(book, time_ns);
                }
                // Inputs belong to the iteration that has just begun.
                self.end_list(book, List::Between, Some(Role::Input));
            }
            Phase::Backward => {
                let roles = &mut self.roles[usize::from(book)];
                (roles.is_trained, roles.has_backward) = (true, true);
                if !self.phases.is_replay {
                    roles.passes.begin_backward(roles.undecided.iter(List::Forward).count());
                    self.grow_older_outside(book);
                }
                self.end_list(book, List::Forward, Some(Role::Activation));
            }
            Phase::Optimizer => {
                self.roles[usize::from(book)].is_trained = true;
                self.end_list(book, List::Backward, Some(Role::Gradient));
                self.end_list(book, List::Forward, Some(Role::Activation));
                self.end_list(book, List::Evaluation, None);
            }
            Phase::Setup | Phase::Between | Phase::Unknown => {}
        }
        if !self.phases.is_replay {
            self.measure(book);
        }
    }

    /// Begins an iteration with the first forward pass after an optimizer step, if the program does not report its steps.
    fn begin_forward(&mut self, book: u8, time_ns: u64) {
        if self.phases.is_replay {
            return;
        }
        let roles = &mut self.roles[usize::from(book)];
        let is_first = !std::mem::replace(&mut roles.has_worked, true);
        let is_new = std::mem::take(&mut roles.is_iterated) || !roles.iterations.is_open();
        if is_new && !self.phases.has_steps {
            let number = roles.iterations.next_number(self.phases.epoch);
            self.begin_next_iteration(book, number, time_ns);
        }
        if is_first {
            let at = usize::from(book);
            self.books[at].learn_roles(&self.cells.keys);
            self.roles[at].iterations.measure_kept_gradients(&self.books[at]);
        }
    }

    fn begin_next_iteration(&mut self, book: u8, number: u64, time_ns: u64) {
        self.measure(book);
        self.block_ring.iter_mut().for_each(|ring| ring.note_step(book, number));
        let at = usize::from(book);
        let number = (self.phases.epoch, number);
        self.roles[at].iterations.begin(number, time_ns, &mut self.books[at]);
        self.measure(book);
    }

    /// Ends the phase of a list of undecided blocks: each block gets `role`, unless its role was reported. `None`: no role
    /// changes.
    fn end_list(&mut self, book: u8, list: List, role: Option<Role>) {
        let roles = &mut self.roles[usize::from(book)];
        if list != List::Between && !self.phases.is_replay {
            let temporary = roles.undecided.max_temporary(list);
            roles.iterations.add_temporary(temporary, list == List::Backward);
            match list {
                List::Optimizer => roles.optimizer_temporary = roles.optimizer_temporary.max(temporary),
                List::Backward if roles.is_trained => {
                    roles.backward_temporary = roles.backward_temporary.max(Some(temporary));
                }
                _ => {}
            }
        }
        let may_grow_old = matches!(role, Some(Role::Activation | Role::Input));
        while let Some((at, entry)) = self.roles[usize::from(book)].undecided.first(list) {
            // Activations, inputs and possible workspaces may still change when they outlive steps. All other blocks keep their
            // role.
            if may_grow_old || role == Some(Role::Gradient) && self.workspaces.index(entry.bytes).is_some() {
                self.roles[usize::from(book)].undecided.move_to(at, List::Decided);
            } else {
                self.unlist(book, at);
            }
            if let Some(role) = role.filter(|role| *role != entry.guess) {
                self.assign(&entry, role);
            }
        }
        self.roles[usize::from(book)].undecided.restart_list(list);
    }

    /// Removes a block from its list of undecided blocks, because its role will not change.
    pub(super) fn unlist(&mut self, book: u8, at: u32) {
        let entry = self.roles[usize::from(book)].undecided.remove(at);
        if let Some(row) = self.pools[entry.pool as usize].blocks.get_mut(entry.address) {
            row.owner = NOT_LISTED;
        }
    }

    /// Assigns a derived role to a block; returns its former cell. `None` if its role was reported.
    pub(super) fn assign(&mut self, entry: &Entry, role: Role) -> Option<CellId> {
        let row = self.pools[entry.pool as usize].blocks.get(entry.address).copied();
        let row = row.filter(|row| !row.is(Row::EXACT))?;
        self.derive(Extent::Block(entry.pool, entry.address), row, role);
        Some(row.cell)
    }

    /// Counts one more outlived step for all blocks with a decided role. If the step had no forward pass (`has_worked` is false),
    /// only possible workspaces count, because other blocks are not expected to be freed.
    fn grow_older(&mut self, book: u8, has_worked: bool) {
        let mut next = self.roles[usize::from(book)].undecided.first(List::Decided);
        while let Some((at, entry)) = next {
            let roles = &mut self.roles[usize::from(book)];
            next = roles.undecided.next(&entry);
            let size = self.workspaces.index(entry.bytes);
            if !has_worked && size.is_none() {
                continue;
            }
            let was_called_gradient = entry.born == List::Backward;
            let is_mistaken = was_called_gradient && size.is_some_and(|size| !roles.may_be_gradient(size));
            if roles.undecided.grow_older(at) >= OLD_AGE || is_mistaken {
                self.retire(book, at, &entry);
            }
        }
    }

    /// Decides the role of a block that has outlived whole steps: workspace or unknown.
    fn retire(&mut self, book: u8, at: u32, entry: &Entry) {
        let roles = &mut self.roles[usize::from(book)];
        let is_backward = entry.born == List::Backward;
        let size = self
            .workspaces
            .index(entry.bytes)
            .filter(|&size| !(roles.ambiguous[size] || is_backward && roles.may_be_gradient(size)));
        let size = size.filter(|_| entry.born != List::Between);
        match size {
            Some(size) => self.make_workspace(book, at, entry, size),
            None => {
                self.unlist(book, at);
                if !is_backward {
                    self.assign(entry, Role::Unknown);
                }
            }
        }
    }

    pub(super) fn correct_gradients(&mut self, book: u8, cell: CellId, mistaken: i64) {
        let at = usize::from(book);
        self.roles[at].iterations.correct_gradients(cell, mistaken, &self.books[at]);
    }

    /// Measures the bytes of each role for the open iteration. A role counts only if no undecided block has it.
    fn measure(&mut self, book: u8) {
        let at = usize::from(book);
        self.books[at].learn_roles(&self.cells.keys);
        let Roles { undecided, iterations, .. } = &mut self.roles[at];
        let mut known: u16 = !(1 << Role::Unknown.to_code() | 1 << Role::Temporary.to_code());
        for (list, role) in [(List::Forward, Role::Activation), (List::Optimizer, Role::OptimizerState)] {
            if !undecided.is_empty(list) {
                known &= !(1 << role.to_code());
            }
        }
        iterations.measure(&self.books[at], &self.cells.keys, known);
    }

    /// Records whether a library's driver allocations are scratch memory.
    pub fn note_library(&mut self, module: u16, path: &str) {
        let name = path.rsplit('/').next().unwrap_or(path);
        let is_scratch = SCRATCH_LIBRARIES.iter().any(|library| name.starts_with(library));
        self.scratch_libraries.retain(|&id| id != module);
        if is_scratch && self.scratch_libraries.len() < MAX_SCRATCH_LIBRARIES {
            self.scratch_libraries.push(module);
        }
    }

    /// After a resync that added unknown blocks: replays the allocations of these and of undecided blocks in order, to derive
    /// their roles.
    pub fn replay(&mut self) {
        if self.restated.is_empty() {
            return;
        }
        let mut born: Vec<RestatedBlock> = std::mem::take(&mut self.restated);
        for book in 0..self.books.len() as u8 {
            for list in [
                List::Forward,
                List::Backward,
                List::Optimizer,
                List::Evaluation,
                List::Between,
                List::Scratch,
            ] {
                while let Some((at, entry)) = self.roles[usize::from(book)].undecided.first(list) {
                    self.unlist(book, at);
                    let Some(row) = self.pools[entry.pool as usize].blocks.get(entry.address) else {
                        continue;
                    };
                    let Entry { pool, address, stream, thread, born: list, .. } = entry;
                    born.push(RestatedBlock { seq: row.seq, list, pool, address, stream, thread });
                }
            }
        }
        born.sort_unstable_by_key(|born| born.seq);
        self.phases.is_replay = true;
        let before: Vec<(Phase, u64)> = self.roles.iter().map(|roles| (roles.now, roles.since_seq)).collect();
        self.roles.iter_mut().for_each(|roles| roles.now = Phase::Unknown);
        for born in born {
            self.replay_birth(&born);
        }
        for (book, (now, since_seq)) in before.into_iter().enumerate() {
            if since_seq > self.roles[book].since_seq {
                self.enter_phase(book as u8, now, since_seq, 0);
            }
        }
        self.phases.is_replay = false;
    }

    fn replay_birth(&mut self, born: &RestatedBlock) {
        let RestatedBlock { seq, list, pool, address, stream, thread } = *born;
        let row = self.pools[pool as usize].blocks.get(address).copied();
        let Some(row) = row.filter(|row| row.seq == seq && !row.is(Row::EXACT | Row::PENDING)) else {
            return;
        };
        let phase = match list {
            List::Forward => Phase::Forward,
            List::Backward => Phase::Backward,
            List::Optimizer => Phase::Optimizer,
            List::Evaluation => Phase::Evaluation,
            List::Between | List::Decided | List::Workspace | List::Scratch => Phase::Unknown,
        };
        if phase != Phase::Unknown {
            self.enter_phase(row.book, phase, seq, 0);
            self.roles[usize::from(row.book)].since_seq = seq;
        }
        let roles = &mut self.roles[usize::from(row.book)];
        let guess = roles.likely_role(list);
        let at = roles.add(&self.workspaces, list, guess, (pool, address), row.bytes, (stream, thread));
        self.derive(Extent::Block(pool, address), row, guess);
        if let Some(row) = self.pools[pool as usize].blocks.get_mut(address) {
            row.owner = at;
        }
    }

    /// Resets all phases, because another program has begun.
    pub fn reset_phases(&mut self, time_ns: u64) {
        self.phases = PhaseReports::default();
        self.restated.clear();
        for (roles, book) in self.roles.iter_mut().zip(&self.books) {
            roles.iterations.end(time_ns, book);
            let iterations = std::mem::take(&mut roles.iterations);
            *roles = Roles { iterations, ..Roles::default() };
        }
    }

    /// Returns the phase of a thread's failed request whose record has no phase, by the rules of `list_at_birth`. If a thread
    /// that runs forward passes is in no backward node, the backward pass has ended.
    pub fn phase_of_request(&self, book: u8, thread: u32) -> Phase {
        let roles = &self.roles[usize::from(book)];
        match (self.phases.last, roles.now) {
            (Phase::Optimizer, _) => Phase::Optimizer,
            (reported, _) if !self.phases.in_blocks => reported,
            (_, Phase::Forward) => Phase::Forward,
            (_, Phase::Evaluation) => Phase::Evaluation,
            (_, Phase::Backward) if roles.is_backward_thread(thread) => Phase::Backward,
            (Phase::Setup, Phase::Unknown) => Phase::Setup,
            (_, Phase::Unknown) if !roles.is_trained && !self.phases.has_steps => Phase::Unknown,
            _ => Phase::Between,
        }
    }
}
