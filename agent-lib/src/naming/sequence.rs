//! What the nodes of autograd's graph are called: a table from a node's number to the tag of the forward pass that made it.
//!
//! Each thread counts the nodes that it makes, from 0; so a node is known by its thread, in PyTorch's own count of
//! threads, and its number. An allocation in the forward pass belongs to the node that was made last, as PyTorch makes an
//! operation's node before it runs the operation. The first allocation decides: what follows, up to the next node, may be
//! another module's that makes no node.
//!
//! One word per number, and no lock: a forward pass writes, threads of the backward pass read. Numbers that are
//! `ENTRIES` apart share a word; the later one has it.

use crate::base::memfd::anonymous;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};

/// Nodes between the forward pass that makes one and its backward pass: more lose their names. 1 MiB of words.
const ENTRIES: usize = 1 << 17;
/// How many numbers away a name may lie: nodes that allocate nothing (views) have none of their own.
const NEAR: u64 = 16;
/// An operation may end with a node behind the one that allocates: a view of its product. (One that changes something in place is named
/// when it is made: autograd.rs.)
const VIEW_BEHIND: u64 = 1;
/// Behind that view a bias may be added, in place.
const ADDITION_BEHIND: u64 = 2;
/// Where the thread begins.
const THREAD_SHIFT: u32 = 48;
/// Whether it adds; the number is below.
const ADDS: u64 = 1 << 47;
/// Tags have fewer.
const TAG_BITS: u32 = 20;
/// Entries are told apart by these bits of a hash of thread and number.
const CHECK: u64 = !0 << TAG_BITS;

/// A node: its thread << 48 | whether it adds << 47 | its number. 0 is no node: threads count from 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Node(pub u64);

impl Node {
    /// Number `number` of `thread`.
    #[inline(always)]
    pub(crate) fn new(thread: u64, number: u64) -> Self {
        Node(thread << THREAD_SHIFT | number & (ADDS - 1))
    }

    /// The same, of an operation that adds.
    #[inline(always)]
    pub(crate) fn adding(self, adds: bool) -> Self {
        Node(self.0 | if adds { ADDS } else { 0 })
    }

    fn number(self) -> u64 {
        self.0 & (ADDS - 1)
    }

    /// Where it lies, and its entry without the tag.
    #[inline(always)]
    fn place(self) -> (usize, u64) {
        // Neighbours lie side by side: the threads are spread, the numbers are not.
        let thread = (self.0 >> THREAD_SHIFT).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let place = (self.0 as usize).wrapping_add((thread >> 40) as usize) & (ENTRIES - 1);
        (place, self.0.wrapping_mul(0xd6e8_feb8_6659_fd93) & CHECK)
    }
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Table {
    entries: &'static [AtomicU64],
}

impl Table {
    /// An empty one; `None` without memory for it.
    pub(crate) fn new() -> Option<Self> {
        Some(Table { entries: anonymous(ENTRIES)? })
    }

    /// `node` is called `tag`, unless it has a name; 0: it is known to have none.
    #[inline(always)]
    pub(crate) fn note(&self, node: Node, tag: u32) {
        let (place, check) = node.place();
        let entry = &self.entries[place];
        if tag >> TAG_BITS == 0 && entry.load(Relaxed) & CHECK != check {
            entry.store(check | u64::from(tag), Relaxed);
        }
    }

    /// Nodes get the tags that `new_tag` has for theirs; 0: it stays. A node that is named meanwhile keeps its name.
    pub(crate) fn rename(&self, mut new_tag: impl FnMut(u32) -> u32) {
        for entry in self.entries {
            let word = entry.load(Relaxed);
            let old = (word & !CHECK) as u32;
            let new = if old == 0 { 0 } else { new_tag(old) };
            if new != 0 && new >> TAG_BITS == 0 {
                let _ = entry.compare_exchange(word, word & CHECK | u64::from(new), Relaxed, Relaxed);
            }
        }
    }

    /// What `node` is called; 0 for nothing. One that has no name of its own is a view. That just
    /// behind a named node is what that node's operation ends with, and so is an addition behind such a view (of a bias to a
    /// product); those further behind are what the next operation begins with, unless that is in no module.
    #[inline]
    pub(crate) fn look_up(&self, node: Node) -> u32 {
        let ends = if node.0 & ADDS == 0 { VIEW_BEHIND } else { ADDITION_BEHIND };
        let node = Node(node.0 & !ADDS);
        let back = |from, to| (from..=to).find_map(|back| self.before(node, back));
        let following = || (1..=NEAR).find_map(|ahead| self.name(Node(node.0 + ahead)));
        let own = self.name(node).or_else(|| back(1, ends));
        own.or_else(|| following().filter(|&tag| tag != 0)).or_else(|| back(ends + 1, NEAR)).unwrap_or(0)
    }

    fn before(&self, node: Node, back: u64) -> Option<u32> {
        if node.number() < back { None } else { self.name(Node(node.0 - back)) }
    }

    #[inline(always)]
    fn name(&self, node: Node) -> Option<u32> {
        let (place, check) = node.place();
        let entry = self.entries[place].load(Relaxed);
        (entry & CHECK == check && entry != 0).then_some((entry & !CHECK) as u32)
    }
}

/// Whether the calling thread records operations for a backward pass.
pub(crate) static GRAD_MODE_AT: AtomicUsize = AtomicUsize::new(0);

/// Whether what the calling thread computes can have gradients; `None` without PyTorch's engine.
pub(crate) fn has_gradients() -> Option<bool> {
    let at = GRAD_MODE_AT.load(Acquire);
    // SAFETY: a function without arguments that reads a variable of the thread's.
    (at != 0).then(|| unsafe { std::mem::transmute::<usize, unsafe extern "C" fn() -> bool>(at)() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_name_stays_and_views_take_that_of_a_neighbour() {
        let table = Table::new().expect("memory");
        table.note(Node::new(1, 40), 7);
        table.note(Node::new(1, 40), 8);
        table.note(Node::new(1, 43), 9);
        let of = |thread, number| table.look_up(Node::new(thread, number));
        assert_eq!((of(1, 40), of(1, 41), of(1, 42), of(1, 43), of(1, 59), of(1, 60)), (7, 7, 9, 9, 9, 0));
        // A bias is added behind the view of a product, a split there is the next operation's.
        let adding = |number| table.look_up(Node::new(1, number).adding(true));
        assert_eq!((adding(40), adding(41), adding(42), adding(43), adding(59)), (7, 7, 7, 9, 9));
        // Further behind, and before everything: what comes next.
        assert_eq!((of(1, 23), of(1, 24), of(1, 39)), (0, 7, 7));
        table.note(Node::new(1, 46), 10);
        assert_eq!((of(1, 44), of(1, 45), of(1, 46)), (9, 10, 10));
        table.note(Node::new(1, 37), 6);
        assert_eq!((of(1, 38), of(1, 39)), (6, 7));
        // Numbers are a thread's own.
        assert_eq!(of(2, 40), 0);
        table.note(Node::new(2, 40), 11);
        assert_eq!((of(1, 40), of(2, 40)), (7, 11));
        assert_eq!(of(1, 0), 0);
        table.note(Node::new(1, 0), 3);
        assert_eq!((of(1, 0), of(1, 1), of(1, 16), of(1, 17)), (3, 3, 3, 0));
        // One that is known to have no name ends the search.
        table.note(Node::new(1, 50), 0);
        assert_eq!((of(1, 44), of(1, 50), of(1, 51)), (9, 0, 0));
    }

    #[test]
    fn old_nodes_make_room_for_new_ones() {
        let table = Table::new().expect("memory");
        let (early, late) = (Node::new(3, 5), Node::new(3, 5 + ENTRIES as u64));
        table.note(early, 1);
        assert_eq!(table.look_up(late), 0);
        table.note(late, 2);
        assert_eq!((table.look_up(early), table.look_up(late)), (0, 2));
    }

    /// Whatever was noted last under a place is what is found there, for numbers of many threads.
    #[test]
    fn numbers_of_many_threads_are_told_apart() {
        let table = Table::new().expect("memory");
        for thread in 1..200_u64 {
            for number in 0..100 {
                table.note(Node::new(thread, number * 1000), (thread * 100 + number) as u32);
            }
        }
        let mut found = 0;
        for thread in 1..200_u64 {
            for number in 0..100 {
                let tag = table.look_up(Node::new(thread, number * 1000));
                assert!(tag == 0 || tag == (thread * 100 + number) as u32);
                found += u32::from(tag != 0);
            }
        }
        assert!(found > 15_000, "{found} of 19,900");
    }
}
