//! Recognises workspaces of libraries among PyTorch's blocks. A workspace has an exact size, outlives steps and passes, and exists
//! once for each handle and stream. Handles belong to threads. So more than [`MAX_WORKSPACES`] blocks of a thread and stream with
//! this size are something else: an activation of 4096 x 4096 bf16 also has 32 MiB.

use crate::roles::state::Roles;
use crate::roles::state::WorkspaceSizes;
use crate::roles::undecided::{Entry, List, NOT_LISTED};
use crate::rules::holdings::Holdings;
use gpumem_wire::Role;

/// Maximum number of blocks of one size, thread and stream that can be workspaces: of cuBLAS and of cuBLASLt. Where streams are
/// unknown, all blocks of a thread count as those of one stream. A program that captures a graph uses three: the default one, one
/// for warm-up, and one for the capture.
const MAX_WORKSPACES: usize = 4;

impl Roles {
    /// Adds a block to a list of undecided blocks, or to [`List::Scratch`]. Returns its index.
    #[inline]
    pub(super) fn add(
        &mut self,
        sizes: &WorkspaceSizes,
        list: List,
        guess: Role,
        place: (u32, u64),
        bytes: u64,
        from: (u16, u32),
    ) -> u32 {
        let at = self.undecided.add(list, guess, place, bytes, from);
        let is_pass =
            matches!(list, List::Forward | List::Evaluation) && !self.is_trained && at != NOT_LISTED;
        if is_pass && sizes.index(bytes).is_some_and(|size| !self.ambiguous[size]) {
            self.undecided.move_to(at, List::Scratch);
        }
        at
    }
}

impl Holdings {
    /// Decides the role of blocks in [`List::Scratch`] that a thread allocated, when its next pass begins: a server has no steps
    /// to outlive. Results that a program keeps are soon too many for workspaces.
    pub(super) fn settle_workspaces(&mut self, book: u8, thread: u32) {
        let undecided = &self.roles[usize::from(book)].undecided;
        let of_thread = undecided.iter(List::Scratch).filter(|(_, entry)| entry.thread == thread);
        for (at, entry) in of_thread.collect::<Vec<_>>() {
            let size = self.workspaces.index(entry.bytes);
            match size.filter(|&size| !self.roles[usize::from(book)].ambiguous[size]) {
                Some(size) => self.make_workspace(book, at, &entry, size),
                None => self.roles[usize::from(book)].undecided.move_to(at, entry.born),
            }
        }
    }

    /// Returns the blocks of passes before the first training step to the lists of their phases. They may be activations.
    #[cold]
    pub(super) fn reconsider_workspaces(&mut self, book: u8) {
        let Roles { undecided, ambiguous, .. } = &mut self.roles[usize::from(book)];
        *ambiguous = Default::default();
        for list in [List::Workspace, List::Scratch] {
            while let Some((at, entry)) = undecided.first(list) {
                undecided.move_to(at, entry.born);
            }
        }
    }

    pub(super) fn make_workspace(&mut self, book: u8, at: u32, entry: &Entry, size: usize) {
        self.roles[usize::from(book)].undecided.move_to(at, List::Workspace);
        let before = self.assign(entry, Role::Workspace);
        if let (true, Some(cell)) = (entry.born == List::Backward, before) {
            self.correct_gradients(book, cell, entry.bytes as i64);
        }
        self.check_workspaces(book, size, entry);
    }

    /// Revokes the role of all workspaces of a size if the thread and stream of `newest` have more blocks of this size than they can
    /// have workspaces.
    fn check_workspaces(&mut self, book: u8, size: usize, newest: &Entry) {
        let undecided = &self.roles[usize::from(book)].undecided;
        let like: Vec<(u32, Entry)> =
            undecided.iter(List::Workspace).filter(|(_, entry)| entry.bytes == newest.bytes).collect();
        let owner = |entry: &Entry| (entry.thread, entry.stream);
        if like.iter().filter(|(_, entry)| owner(entry) == owner(newest)).count() <= MAX_WORKSPACES {
            return;
        }
        self.roles[usize::from(book)].ambiguous[size] = true;
        for (at, entry) in like {
            match self.roles[usize::from(book)].is_trained {
                true => self.unlist(book, at),
                false => self.roles[usize::from(book)].undecided.move_to(at, entry.born),
            }
            let is_backward = entry.born == List::Backward;
            let role = if is_backward { Role::Gradient } else { Role::Unknown };
            let before = self.assign(&entry, role);
            if let (true, Some(cell)) = (is_backward, before) {
                let cell = self.cells.with_role(cell, role);
                self.correct_gradients(book, cell, -(entry.bytes as i64));
            }
        }
    }

    /// Records that a parameter of this size exists, if it is the size of a workspace. Other parameters may be unknown.
    #[cold]
    pub fn note_parameter(&mut self, book: u8, bytes: u64) {
        let roles = &mut self.roles[usize::from(book)];
        self.workspaces.index(bytes).into_iter().for_each(|size| roles.parameters[size] = true);
    }
}
