//! Derives the role of blocks that have none, from the phase in which they were allocated and from the phases that they outlive.
//!
//! | allocated in | outlives | role | if freed before |
//! |---|---|---|---|
//! | forward | the beginning of backward, or of the optimizer | activation | temporary |
//! | backward | the beginning of the optimizer, or of the next forward pass (gradients are accumulated) | gradient | temporary |
//! | optimizer | its end | optimizer state | temporary |
//! | no phase, between two steps | the beginning of forward | input | temporary |
//! | evaluation | | unknown | temporary |
//! | setup, or no phase before anything was trained | | unknown | |
//!
//! Until then, a block has the most frequent role of its kind: activation in forward, temporary in backward and in an optimizer,
//! but optimizer state in the first optimizer step. A role from a `Retag` or from the block's own record is final. Every change
//! is a shift between cells: no sum changes, and the composition at the peak is corrected as by a `Retag`.
//!
//! **Phase boundaries.** A phase begins with a `PhaseBegin`, or with the first block that is stamped with it on a device. (The
//! optimizer reports its begin and end.) A forward block on a thread that has only worked in backward so far is a recomputation
//! of activation checkpointing, and counts as backward. Blocks without a phase belong to forward while that is in progress,
//! because loss and glue code are in no module. They belong to backward while that is in progress, if their thread has only
//! worked in backward: the end of a backward pass runs outside its nodes. A `Step` ends all phases.
//!
//! **Blocks that outlive whole steps** are not activations or inputs, but copies of weights, caches, buckets. After three steps
//! with a forward pass, their role becomes unknown. (A replayed graph allocates no blocks, so its blocks keep their role.) A
//! block with the exact size of a library's workspace counts as one if there are at most eight blocks of that size. Size alone
//! proves nothing: an activation of 4096 x 4096 bf16 has 32 MiB, too. A block allocated in backward is a workspace only if
//! parameters are known and none has its size, as its gradient would have. Then one step is enough.
//!
//! **After a loss** phase boundaries may be missing: the next boundary settles their blocks. Blocks that only a resync restated
//! are replayed in the order of their allocation. A younger live block of another phase proves that a boundary lies between them.

use crate::book::cells::CellId;
use crate::roles::state::{
    End, PhaseReports, RestatedBlock, Roles, WORKSPACE_BYTES, list_of, workspace_index,
};
use crate::roles::undecided::{Entry, List, NOT_FOLLOWED};
use crate::rows::row::{Extent, Row};
use crate::rules::holdings::Holdings;
use gpumem_wire::{Phase, Role, Stamp};

/// File name prefixes of libraries whose own driver allocations are scratch memory. Does not include libnccl: its memory is large
/// enough to be shown under the library's name, which happens if it has no role.
const SCRATCH_LIBRARIES: [&str; 2] = ["libcublas", "libcudnn"];
/// Maximum number of such libraries: one id for each file.
const MAX_SCRATCH_LIBRARIES: usize = 32;
/// Maximum number of blocks of one size that can be workspaces: one for each handle and stream, on two threads. A program that
/// captures a graph uses three streams: the default one, one for warm-up, and one for the capture.
const MOST_WORKSPACES: usize = 8;
/// Number of steps after which a block is neither an activation nor an input. Two alternating optimizers may count each step
/// twice.
const OLD_AGE: u8 = 3;

impl Holdings {
    /// Returns the preliminary role of a block that is about to be allocated on `book`, and the list that will follow it.
    #[inline]
    pub fn role_at_birth(&mut self, book: u8, stamp: &Stamp, use_as: (Role, Phase)) -> (Role, Option<List>) {
        let (role, phase) = use_as;
        if phase == Phase::Unknown && !self.phases.checks_unstamped {
            return (role, None);
        }
        let list = self.list_at_birth(book, stamp, phase);
        match (role, list) {
            (Role::Unknown, Some(list)) => (self.roles[usize::from(book)].likely(list), Some(list)),
            _ => (role, None), // it has a role, or belongs to no phase
        }
    }

    fn list_at_birth(&mut self, book: u8, stamp: &Stamp, phase: Phase) -> Option<List> {
        let now = self.roles[usize::from(book)].now;
        let is_stamped = phase != Phase::Unknown;
        let phase = match phase {
            Phase::Setup => return None,
            Phase::Unknown | Phase::Between => match self.phases.said {
                Phase::Optimizer => Phase::Optimizer,
                Phase::Setup => return None,
                said if !self.phases.stamped && list_of(said).is_some() => said,
                _ => match now {
                    Phase::Forward => now,
                    Phase::Backward if self.roles[usize::from(book)].is_backward_thread(stamp.thread) => now,
                    Phase::Optimizer => {
                        // The optimizer's end was lost: otherwise its frame would have stamped this block.
                        self.enter_phase(book, Phase::Unknown, stamp.seq, stamp.time_ns);
                        return Some(List::Between);
                    }
                    _ => {
                        let has_begun = self.roles[usize::from(book)].is_trained || self.phases.stepped;
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
                    Phase::Forward
                }
            }
            Phase::Backward => {
                self.roles[usize::from(book)].backward_threads.note(stamp.thread);
                Phase::Backward
            }
            phase => phase,
        };
        self.phases.stamped |= is_stamped;
        self.phases.checks_unstamped = true;
        if phase != now {
            self.enter_phase(book, phase, stamp.seq, stamp.time_ns);
        }
        list_of(phase)
    }

    /// Ends a followed block. If its owner frees it before its phase ends, it was temporary. Returns the row with its new role.
    pub fn role_at_end(&mut self, extent: Extent, row: &Row, end: End) -> Row {
        let roles = &mut self.roles[usize::from(row.book)];
        let entry = roles.young.leave(row.owner);
        let is_settled = matches!(entry.list, List::Kept | List::Workspace);
        let is_known = row.is(Row::EXACT) || entry.list == List::Forward && !roles.is_trained;
        let mut row = Row { owner: NOT_FOLLOWED, ..*row };
        if end == End::Taken || is_settled || is_known {
            return row;
        }
        // If the bytes are about to be removed, only the peak matters.
        if end == End::LetGo || self.books[usize::from(row.book)].live_at_peak(row.first_epoch) {
            let to = self.cells.with_role(row.cell, Role::Temporary);
            if to != row.cell {
                self.move_row(extent, &row, (to, to));
                row.cell = to;
            }
        }
        row
    }

    /// Handles `PhaseBegin`: the process enters another phase, on all devices.
    pub fn begin_phase(&mut self, phase: Phase, seq: u64, time_ns: u64) {
        self.phases.said = phase;
        self.phases.checks_unstamped = true;
        for book in 0..self.books.len() as u8 {
            let now = self.roles[usize::from(book)].now;
            let next = match phase {
                Phase::Backward | Phase::Optimizer | Phase::Evaluation => phase,
                Phase::Setup | Phase::Between | Phase::Unknown => Phase::Unknown,
                // After an optimizer this only ends the optimizer; the first block of forward begins forward.
                Phase::Forward if !self.phases.stamped => phase,
                Phase::Forward if matches!(now, Phase::Optimizer | Phase::Evaluation) => Phase::Unknown,
                Phase::Forward => continue,
            };
            self.enter_phase(book, next, seq, time_ns);
        }
    }

    /// Handles `Step`: all phases end.
    pub fn begin_iteration(&mut self, number: u64, seq: u64, time_ns: u64) {
        self.phases.stepped = true;
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

    /// Changes the phase in which blocks are allocated.
    fn enter_phase(&mut self, book: u8, next: Phase, seq: u64, time_ns: u64) {
        let roles = &mut self.roles[usize::from(book)];
        let from = std::mem::replace(&mut roles.now, next);
        if from == next {
            return;
        }
        roles.since_seq = seq;
        if from == Phase::Optimizer {
            self.end_list(book, List::Optimizer, Some(Role::OptimizerState));
            let roles = &mut self.roles[usize::from(book)];
            roles.optimized += 1;
            roles.is_iterated = true;
            if !self.phases.stepped && !self.phases.replays && std::mem::take(&mut roles.has_worked) {
                self.grow_older(book, true);
            }
        }
        match next {
            Phase::Forward | Phase::Evaluation => {
                self.end_list(book, List::Backward, Some(Role::Gradient));
                if next == Phase::Forward {
                    self.end_list(book, List::Evaluation, None);
                    self.begin_forward(book, time_ns);
                }
                // These blocks belong to the iteration that has just begun.
                self.end_list(book, List::Between, Some(Role::Input));
            }
            Phase::Backward => {
                self.roles[usize::from(book)].is_trained = true;
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
        if !self.phases.replays {
            self.measure(book);
        }
    }

    fn begin_forward(&mut self, book: u8, time_ns: u64) {
        if self.phases.replays {
            return;
        }
        let roles = &mut self.roles[usize::from(book)];
        roles.has_worked = true;
        let is_new = std::mem::take(&mut roles.is_iterated) || !roles.iterations.is_open();
        if is_new && !self.phases.stepped {
            let number = roles.iterations.next_number(self.phases.epoch);
            self.begin_next_iteration(book, number, time_ns);
        }
    }

    fn begin_next_iteration(&mut self, book: u8, number: u64, time_ns: u64) {
        self.measure(book);
        let at = usize::from(book);
        let number = (self.phases.epoch, number);
        self.roles[at].iterations.begin(number, time_ns, &mut self.books[at]);
        self.measure(book);
    }

    /// Ends the phase of a list: its blocks get this role, unless they were given another.
    fn end_list(&mut self, book: u8, list: List, role: Option<Role>) {
        let roles = &mut self.roles[usize::from(book)];
        if list != List::Between && !self.phases.replays {
            roles.iterations.freed_in_phase(roles.young.temporary(list), list == List::Backward);
        }
        let may_grow_old = matches!(role, Some(Role::Activation | Role::Input));
        while let Some((at, entry)) = self.roles[usize::from(book)].young.first(list) {
            // A block of any other size than a workspace's keeps its role, or cannot be distinguished by its size.
            if may_grow_old || role == Some(Role::Gradient) && workspace_index(entry.bytes).is_some() {
                self.roles[usize::from(book)].young.change(at, List::Kept);
            } else {
                self.stop_following(book, at);
            }
            self.correct(&entry, role);
        }
        self.roles[usize::from(book)].young.restart_list(list);
    }

    /// Settles a role, which may differ from the preliminary one.
    fn correct(&mut self, entry: &Entry, role: Option<Role>) {
        if let Some(role) = role.filter(|role| *role != entry.guess) {
            self.assign(entry, role);
        }
    }

    fn stop_following(&mut self, book: u8, at: u32) {
        let entry = self.roles[usize::from(book)].young.leave(at);
        if let Some(row) = self.pools[entry.pool as usize].blocks.get_mut(&entry.address) {
            row.owner = NOT_FOLLOWED;
        }
    }

    /// Assigns a derived role to a block without a reported one; returns its former cell.
    fn assign(&mut self, entry: &Entry, role: Role) -> Option<CellId> {
        let row = self.pools[entry.pool as usize].blocks.get(&entry.address).copied();
        let row = row.filter(|row| !row.is(Row::EXACT))?;
        self.derive(Extent::Block(entry.pool, entry.address), row, role);
        Some(row.cell)
    }

    /// Ages blocks that have outlived a step. Without a forward pass in the step, only possible workspaces age: other blocks are
    /// not expected to be freed.
    fn grow_older(&mut self, book: u8, has_worked: bool) {
        let mut next = self.roles[usize::from(book)].young.first(List::Kept);
        while let Some((at, entry)) = next {
            let roles = &mut self.roles[usize::from(book)];
            next = roles.young.next(&entry);
            let size = workspace_index(entry.bytes);
            if !has_worked && size.is_none() {
                continue;
            }
            let was_called_gradient = entry.born == List::Backward;
            let is_mistaken = was_called_gradient && size.is_some_and(|size| !roles.may_be_gradient(size));
            if roles.young.grow_older(at) >= OLD_AGE || is_mistaken {
                self.retire(book, at, &entry);
            }
        }
    }

    /// Settles a block that has outlived whole steps.
    fn retire(&mut self, book: u8, at: u32, entry: &Entry) {
        let roles = &mut self.roles[usize::from(book)];
        let is_backward = entry.born == List::Backward;
        let size = workspace_index(entry.bytes)
            .filter(|&size| !(roles.ambiguous[size] || is_backward && roles.may_be_gradient(size)));
        let size = size.filter(|_| entry.born != List::Between);
        match size {
            Some(size) => {
                roles.young.change(at, List::Workspace);
                let before = self.assign(entry, Role::Workspace);
                if let (true, Some(cell)) = (is_backward, before) {
                    self.correct_gradients(book, cell, entry.bytes as i64);
                }
                self.count_workspaces(book, size);
            }
            None => {
                self.stop_following(book, at);
                if !is_backward {
                    self.assign(entry, Role::Unknown);
                }
            }
        }
    }

    /// Checks whether there are more blocks of a workspace size than there can be workspaces: then they are something else.
    fn count_workspaces(&mut self, book: u8, size: usize) {
        let young = &self.roles[usize::from(book)].young;
        let of_size = |entry: &Entry| entry.bytes == WORKSPACE_BYTES[size];
        let like: Vec<(u32, Entry)> = young.of(List::Workspace).filter(|(_, entry)| of_size(entry)).collect();
        if like.len() <= MOST_WORKSPACES {
            return;
        }
        self.roles[usize::from(book)].ambiguous[size] = true;
        for (at, entry) in like {
            self.stop_following(book, at);
            let is_backward = entry.born == List::Backward;
            let role = if is_backward { Role::Gradient } else { Role::Unknown };
            let before = self.assign(&entry, role);
            if let (true, Some(cell)) = (is_backward, before) {
                let cell = self.cells.with_role(cell, role);
                self.correct_gradients(book, cell, -(entry.bytes as i64));
            }
        }
    }

    /// Corrects the gradients of the open iteration by `mistaken` bytes of a cell.
    fn correct_gradients(&mut self, book: u8, cell: CellId, mistaken: i64) {
        let at = usize::from(book);
        self.roles[at].iterations.correct_gradients(cell, mistaken, &self.books[at]);
    }

    /// Notes the size of a parameter. (A few parameters named by frames do not mean that all are known.)
    #[cold]
    pub fn note_parameter(&mut self, book: u8, bytes: u64) {
        let roles = &mut self.roles[usize::from(book)];
        workspace_index(bytes).into_iter().for_each(|size| roles.parameters[size] = true);
    }

    fn measure(&mut self, book: u8) {
        let at = usize::from(book);
        self.books[at].learn_roles(&self.cells.keys);
        let Roles { young, iterations, .. } = &mut self.roles[at];
        let mut known: u16 = !(1 << Role::Unknown.to_code() | 1 << Role::Temporary.to_code());
        for (list, role) in [(List::Forward, Role::Activation), (List::Optimizer, Role::OptimizerState)] {
            if !young.is_empty(list) {
                known &= !(1 << role.to_code());
            }
        }
        iterations.measure(&self.books[at], &self.cells.keys, known);
    }

    /// Notes the id of a library with scratch memory.
    pub fn note_library(&mut self, module: u16, path: &str) {
        let name = path.rsplit('/').next().unwrap_or(path);
        let is_scratch = SCRATCH_LIBRARIES.iter().any(|library| name.starts_with(library));
        self.scratch_libraries.retain(|&known| known != module);
        if is_scratch && self.scratch_libraries.len() < MAX_SCRATCH_LIBRARIES {
            self.scratch_libraries.push(module);
        }
    }

    /// Replays allocations in order after a resync that added unknown blocks: those of new blocks, and of blocks without a
    /// settled role.
    pub fn replay(&mut self) {
        if self.restated.is_empty() {
            return;
        }
        let mut born: Vec<RestatedBlock> = std::mem::take(&mut self.restated);
        for book in 0..self.books.len() as u8 {
            for list in [List::Forward, List::Backward, List::Optimizer, List::Evaluation, List::Between] {
                while let Some((at, entry)) = self.roles[usize::from(book)].young.first(list) {
                    self.stop_following(book, at);
                    let Some(row) = self.pools[entry.pool as usize].blocks.get(&entry.address) else {
                        continue;
                    };
                    born.push(RestatedBlock { seq: row.seq, list, pool: entry.pool, address: entry.address });
                }
            }
        }
        born.sort_unstable_by_key(|born| born.seq);
        self.phases.replays = true;
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
        self.phases.replays = false;
    }

    fn replay_birth(&mut self, born: &RestatedBlock) {
        let place = (born.pool, born.address);
        let row = self.pools[place.0 as usize].blocks.get(&place.1).copied();
        let Some(row) = row.filter(|row| row.seq == born.seq && !row.is(Row::EXACT | Row::PENDING)) else {
            return;
        };
        let phase = match born.list {
            List::Forward => Phase::Forward,
            List::Backward => Phase::Backward,
            List::Optimizer => Phase::Optimizer,
            List::Evaluation => Phase::Evaluation,
            List::Between | List::Kept | List::Workspace => Phase::Unknown,
        };
        if phase != Phase::Unknown {
            self.enter_phase(row.book, phase, born.seq, 0);
            self.roles[usize::from(row.book)].since_seq = born.seq;
        }
        let roles = &mut self.roles[usize::from(row.book)];
        let guess = roles.likely(born.list);
        let at = roles.young.join(born.list, guess, place, row.bytes);
        self.derive(Extent::Block(place.0, place.1), row, guess);
        if let Some(row) = self.pools[place.0 as usize].blocks.get_mut(&place.1) {
            row.owner = at;
        }
    }

    /// Resets all phases, because another program has begun.
    pub fn forget_phases(&mut self, time_ns: u64) {
        self.phases = PhaseReports::default();
        self.restated.clear();
        for (roles, book) in self.roles.iter_mut().zip(&self.books) {
            roles.iterations.end(time_ns, book);
            let iterations = std::mem::take(&mut roles.iterations);
            *roles = Roles { iterations, ..Roles::default() };
        }
    }
}

impl Holdings {
    /// Returns the phase of a failed request of a thread whose frames name none. Loss and glue code belong to the pass in
    /// progress, as in `list_at_birth`. For a thread that runs forward passes and is in no backward node, the backward pass has
    /// ended.
    pub fn phase_of_request(&self, book: u8, thread: u32) -> Phase {
        let roles = &self.roles[usize::from(book)];
        match (self.phases.said, roles.now) {
            (Phase::Optimizer, _) => Phase::Optimizer,
            (said, _) if !self.phases.stamped => said,
            (_, Phase::Forward) => Phase::Forward,
            (_, Phase::Evaluation) => Phase::Evaluation,
            (_, Phase::Backward) if roles.is_backward_thread(thread) => Phase::Backward,
            (Phase::Setup, Phase::Unknown) => Phase::Setup,
            (_, Phase::Unknown) if !roles.is_trained && !self.phases.stepped => Phase::Unknown,
            _ => Phase::Between,
        }
    }
}
