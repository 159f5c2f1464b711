//! Live blocks whose role is not final, in one list for each phase in which they were allocated. A list is doubly linked, so a
//! freed block leaves it in constant time, and only live blocks are visited when the phase ends.
//!
//! **Maximum of temporary bytes in a phase.** Temporary blocks are those freed before their phase ends. The end of the phase
//! shows which blocks these are. So each entry keeps the maximum sum of the list from its allocation until that of the next entry.
//! An entry that leaves passes its maximum to the previous entry. At the end only blocks that outlive the phase are left. The
//! temporary bytes at an entry are its maximum minus the bytes of the remaining entries up to it.

use gpumem_wire::Role;

/// Value in a block's row instead of an entry index: the block is in no list.
pub(crate) const NOT_LISTED: u32 = u32::MAX;
const NONE: u32 = u32::MAX;
/// Maximum number of entries for each device (48 bytes each); the role of further blocks stays unknown.
const MAX_ENTRIES: usize = 262_144;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum List {
    /// The block was allocated in the forward pass in progress; the next three variants likewise, in their phases.
    Forward,
    Backward,
    Optimizer,
    Evaluation,
    /// The block has the size of a library's workspace, and was allocated in a forward pass or an evaluation before anything was
    /// trained.
    Scratch,
    /// The block was allocated outside every phase, before a forward pass.
    Between,
    /// The block has a role, which changes if the block outlives whole steps.
    Decided,
    /// The block counts as a library's workspace.
    Workspace,
}

const LISTS: usize = 8;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub address: u64,
    pub bytes: u64,
    /// Maximum sum (bytes) of the entry's list, from the block's allocation until that of the next entry.
    high: i64,
    /// Index of the block's pool.
    pub pool: u32,
    /// The sender's number of the block's stream; 0 if it is unknown.
    pub stream: u16,
    /// The thread that allocated the block; 0 if it is unknown.
    pub thread: u32,
    next: u32,
    before: u32,
    pub list: List,
    /// The list (phase of allocation) to which the block was added first.
    pub born: List,
    /// Preliminary role that the block got in its first list.
    pub guess: Role,
    /// Number of steps that the block has outlived in its list.
    pub age: u8,
}

#[derive(Debug, Clone, Copy)]
struct Chain {
    first: u32,
    last: u32,
    /// Sum of the sizes of the list's blocks (bytes).
    bytes: i64,
    /// Maximum sum before the first remaining block was allocated (bytes).
    high: i64,
}

const EMPTY: Chain = Chain { first: NONE, last: NONE, bytes: 0, high: 0 };

#[derive(Debug)]
pub(crate) struct UndecidedBlocks {
    entries: Vec<Entry>,
    /// Index of the first free entry; free entries are linked by `next`.
    vacant: u32,
    chains: [Chain; LISTS],
}

impl Default for UndecidedBlocks {
    fn default() -> Self {
        UndecidedBlocks { entries: Vec::new(), vacant: NONE, chains: [EMPTY; LISTS] }
    }
}

impl UndecidedBlocks {
    pub fn bytes(&self) -> usize {
        self.entries.capacity() * std::mem::size_of::<Entry>()
    }

    /// Adds a block at the end of a list. `guess`: its preliminary role. Returns its index, or [`NOT_LISTED`] if there is no
    /// room.
    #[inline]
    pub fn add(
        &mut self,
        list: List,
        guess: Role,
        (pool, address): (u32, u64),
        bytes: u64,
        (stream, thread): (u16, u32),
    ) -> u32 {
        let (high, next, before, born, age) = (0, NONE, NONE, list, 0);
        let entry =
            Entry { address, bytes, high, pool, stream, thread, next, before, list, born, guess, age };
        let at = if self.vacant != NONE {
            let at = self.vacant;
            self.vacant = self.entries[at as usize].next;
            self.entries[at as usize] = entry;
            at
        } else if self.entries.len() < MAX_ENTRIES {
            self.entries.push(entry);
            (self.entries.len() - 1) as u32
        } else {
            return NOT_LISTED;
        };
        self.link(at, list);
        at
    }

    #[inline]
    fn link(&mut self, at: u32, list: List) {
        let chain = &mut self.chains[list as usize];
        chain.bytes = chain.bytes.wrapping_add(self.entries[at as usize].bytes as i64);
        let (last, bytes) = (chain.last, chain.bytes);
        chain.last = at;
        if last == NONE {
            chain.first = at;
        } else {
            self.entries[last as usize].next = at;
        }
        let entry = &mut self.entries[at as usize];
        (entry.high, entry.before, entry.next, entry.list) = (bytes, last, NONE, list);
    }

    #[inline]
    fn unlink(&mut self, at: u32) -> Entry {
        let entry = self.entries[at as usize];
        let chain = &mut self.chains[entry.list as usize];
        chain.bytes = chain.bytes.wrapping_sub(entry.bytes as i64);
        if entry.next == NONE {
            chain.last = entry.before;
        }
        if entry.before == NONE {
            chain.first = entry.next;
            chain.high = chain.high.max(entry.high);
        } else {
            let before = &mut self.entries[entry.before as usize];
            before.next = entry.next;
            before.high = before.high.max(entry.high);
        }
        if entry.next != NONE {
            self.entries[entry.next as usize].before = entry.before;
        }
        entry
    }

    #[inline]
    pub fn remove(&mut self, at: u32) -> Entry {
        let entry = self.unlink(at);
        self.entries[at as usize].next = self.vacant;
        self.vacant = at;
        entry
    }

    pub fn move_to(&mut self, at: u32, list: List) {
        self.unlink(at);
        self.link(at, list);
        self.entries[at as usize].age = 0;
    }

    /// Counts one more step that the block has outlived; returns the total.
    pub fn grow_older(&mut self, at: u32) -> u8 {
        let entry = &mut self.entries[at as usize];
        entry.age = entry.age.saturating_add(1);
        entry.age
    }

    pub fn first(&self, list: List) -> Option<(u32, Entry)> {
        self.at(self.chains[list as usize].first)
    }

    pub fn next(&self, entry: &Entry) -> Option<(u32, Entry)> {
        self.at(entry.next)
    }

    fn at(&self, at: u32) -> Option<(u32, Entry)> {
        self.entries.get(at as usize).map(|entry| (at, *entry))
    }

    pub fn sum(&self, list: List) -> i64 {
        self.chains[list as usize].bytes
    }

    pub fn is_empty(&self, list: List) -> bool {
        self.chains[list as usize].first == NONE
    }

    pub fn iter(&self, list: List) -> impl Iterator<Item = (u32, Entry)> {
        std::iter::successors(self.first(list), |(_, entry)| self.next(entry))
    }

    /// Returns the maximum of temporary bytes in a list's phase. Must be called when the phase ends.
    pub fn max_temporary(&self, list: List) -> i64 {
        let (mut max, mut remaining) = (self.chains[list as usize].high, 0_i64);
        for (_, entry) in self.iter(list) {
            remaining = remaining.wrapping_add(entry.bytes as i64);
            max = max.max(entry.high.wrapping_sub(remaining));
        }
        max
    }

    /// Restarts the maximum of a list, because later blocks belong to another phase.
    pub fn restart_list(&mut self, list: List) {
        self.chains[list as usize].high = self.chains[list as usize].bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Allocations and frees in any order: compares with the maximum computed from known lifetimes.
    #[test]
    fn temporaries_are_told_exactly_at_the_end() {
        let mut state = 7u64;
        let mut next = move |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..500 {
            let mut undecided = UndecidedBlocks::default();
            // (index, bytes, time of allocation, time of free)
            let mut blocks: Vec<(u32, u64, usize, Option<usize>)> = Vec::new();
            let steps = next(60) as usize + 1;
            for step in 0..steps {
                let live: Vec<usize> = (0..blocks.len()).filter(|&at| blocks[at].3.is_none()).collect();
                if live.is_empty() || next(2) == 0 {
                    let bytes = next(100) + 1;
                    blocks.push((
                        undecided.add(List::Backward, Role::Temporary, (3, 4), bytes, (0, 0)),
                        bytes,
                        step,
                        None,
                    ));
                } else {
                    let at = live[next(live.len() as u64) as usize];
                    assert_eq!(undecided.remove(blocks[at].0).bytes, blocks[at].1);
                    blocks[at].3 = Some(step);
                }
            }
            let sum = |step: usize| -> u64 {
                let dies = blocks.iter().filter(|b| b.3.is_some_and(|death| b.2 <= step && step < death));
                dies.map(|b| b.1).sum()
            };
            let expected = (0..steps).map(sum).max().unwrap_or(0);
            assert_eq!(undecided.max_temporary(List::Backward), expected as i64);
            assert_eq!(
                undecided.iter(List::Backward).count(),
                blocks.iter().filter(|b| b.3.is_none()).count()
            );
        }
    }

    #[test]
    fn places_are_used_again_and_lists_keep_their_order() {
        let join = |undecided: &mut UndecidedBlocks, n| {
            undecided.add(List::Forward, Role::Unknown, (0, n), 1, (0, 0))
        };
        let mut undecided = UndecidedBlocks::default();
        let places: Vec<u32> = (0..6).map(|n| join(&mut undecided, n)).collect();
        undecided.remove(places[1]);
        undecided.move_to(places[3], List::Decided);
        undecided.remove(places[5]);
        let mut other = UndecidedBlocks::default();
        let settle = |other: &mut UndecidedBlocks| {
            while let Some((at, _)) = other.first(List::Forward) {
                other.move_to(at, List::Decided);
            }
        };
        (0..2).for_each(|n| _ = join(&mut other, n));
        settle(&mut other);
        (2..4).for_each(|n| _ = join(&mut other, n));
        settle(&mut other);
        assert_eq!(
            other.iter(List::Decided).map(|(_, entry)| entry.address).collect::<Vec<_>>(),
            [0, 1, 2, 3]
        );
        assert!(other.is_empty(List::Forward));
        other.remove(1);
        other.remove(3);
        assert_eq!(other.iter(List::Decided).map(|(_, entry)| entry.address).collect::<Vec<_>>(), [0, 2]);
        assert_eq!(join(&mut undecided, 6), places[5]);
        assert_eq!(join(&mut undecided, 7), places[1]);
        let addresses = |list| undecided.iter(list).map(|(_, entry)| entry.address).collect::<Vec<_>>();
        assert_eq!(addresses(List::Forward), [0, 2, 4, 6, 7]);
        assert_eq!(addresses(List::Decided), [3]);
    }
}
