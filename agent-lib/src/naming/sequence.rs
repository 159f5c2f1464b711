//! Table of the names of autograd's nodes: maps a node's number to the tag of the forward pass that made it.
//!
//! Each thread numbers its nodes from 0, so PyTorch's thread id and the number identify a node. PyTorch makes an operation's node
//! before it runs the operation, so an allocation in the forward pass belongs to the node made last. The node gets the tag of the
//! first such allocation. Later allocations, up to the next node, may belong to another module that makes no node, so they do not
//! change the tag.
//!
//! Each number has one word, and there is no lock: a forward pass writes, threads of the backward pass read. Two numbers that
//! are `ENTRIES` apart share a word, and the later node replaces the earlier one.

use crate::base::memfd::anonymous;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};

/// Number of entries of the table, which takes 1 MiB. If more nodes than this are made between a node's forward and backward
/// pass, the node loses its name.
const ENTRIES: usize = 1 << 17;
/// Maximum distance, in numbers, of a neighbour whose name an unnamed node gets. A node that allocates nothing (a view) has no
/// name of its own.
const NEAR: u64 = 16;
/// Maximum distance, in numbers, from a named node to a node that ends the same operation (a view).
const VIEW_BEHIND: u64 = 1;
/// Like `VIEW_BEHIND`, if the node that ends the operation is an addition: a bias may be added in place after the view.
const ADDITION_BEHIND: u64 = 2;
const THREAD_SHIFT: u32 = 48;
/// Flag in a `Node`: the operation is an addition. The number has the bits below.
const ADDS: u64 = 1 << 47;
const TAG_BITS: u32 = 20;
/// Bits of an entry that hold the hash of thread and number; the lower bits hold the tag.
const CHECK: u64 = !0 << TAG_BITS;

/// Identity of a node: thread << 48 | whether it adds << 47 | number. 0 is not a node: threads count from 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Node(pub u64);

impl Node {
    #[inline(always)]
    pub(crate) fn new(thread: u64, number: u64) -> Self {
        Node(thread << THREAD_SHIFT | number & (ADDS - 1))
    }

    #[inline(always)]
    pub(crate) fn adding(self, adds: bool) -> Self {
        Node(self.0 | if adds { ADDS } else { 0 })
    }

    /// Returns the index of the node's entry, and the entry without its tag.
    #[inline(always)]
    fn place(self) -> (usize, u64) {
        // Only the thread id is hashed, not the number, so that neighbours have adjacent entries.
        let thread = (self.0 >> THREAD_SHIFT).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let place = (self.0 as usize).wrapping_add((thread >> 40) as usize) & (ENTRIES - 1);
        (place, self.0.wrapping_mul(0xd6e8_feb8_6659_fd93) & CHECK)
    }
}

pub(crate) struct Table {
    entries: &'static [AtomicU64],
}

impl Table {
    pub(crate) fn new() -> Option<Self> {
        Some(Table { entries: anonymous(ENTRIES)? })
    }

    /// Names `node` with `tag`, unless it has an entry. Tag 0 means that it has no name.
    #[inline(always)]
    pub(crate) fn note(&self, node: Node, tag: u32) {
        let (place, check) = node.place();
        let entry = &self.entries[place];
        if tag >> TAG_BITS == 0 && entry.load(Relaxed) & CHECK != check {
            entry.store(check | u64::from(tag), Relaxed);
        }
    }

    /// Replaces each tag by the one that `new_tag` returns for it; 0 keeps it. A node that is named concurrently keeps its name.
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

    /// Returns the tag of `node`; 0 if it has no name.
    ///
    /// A node without an entry is taken for a view. Directly after a named node it ends that node's operation and has the name of
    /// that node. So does an addition after such a view (of a bias to a product). A node further away begins the next operation
    /// and has that operation's name. If the next operation has none, it has the name of the nearest earlier node within `NEAR`.
    #[inline]
    pub(crate) fn look_up(&self, node: Node) -> u32 {
        let ends = if node.0 & ADDS == 0 { VIEW_BEHIND } else { ADDITION_BEHIND };
        let node = Node(node.0 & !ADDS);
        let number = node.0 & (ADDS - 1);
        let earlier = |from, to: u64| (from..=to.min(number)).find_map(|back| self.name(Node(node.0 - back)));
        let following = || (1..=NEAR).find_map(|ahead| self.name(Node(node.0 + ahead)));
        let own = self.name(node).or_else(|| earlier(1, ends));
        own.or_else(|| following().filter(|&tag| tag != 0)).or_else(|| earlier(ends + 1, NEAR)).unwrap_or(0)
    }

    #[inline(always)]
    fn name(&self, node: Node) -> Option<u32> {
        let (place, check) = node.place();
        let entry = self.entries[place].load(Relaxed);
        (entry & CHECK == check && entry != 0).then_some((entry & !CHECK) as u32)
    }
}

/// Address of the function that returns whether the thread records operations for a backward pass; 0 while unknown.
pub(crate) static GRAD_MODE_AT: AtomicUsize = AtomicUsize::new(0);

/// Whether results computed on the calling thread can have gradients; `None` without PyTorch's engine.
pub(crate) fn has_gradients() -> Option<bool> {
    // SAFETY: a function of this type, which reads a thread-local variable.
    unsafe { call_at(&GRAD_MODE_AT) }
}

/// Calls the function at an address and returns its result; `None` if the address is 0.
///
/// # Safety
/// A function at the address must take no arguments and return a `T`.
#[inline(always)]
pub(crate) unsafe fn call_at<T>(address: &AtomicUsize) -> Option<T> {
    let address = address.load(Acquire);
    // SAFETY: the caller guarantees the type.
    (address != 0).then(|| unsafe { std::mem::transmute::<usize, unsafe extern "C" fn() -> T>(address)() })
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
        // Node 40 is a product, 41 its view. An addition at 42 adds the bias and has the product's name; another operation, such as
        // a split of the tensor, has the name of the next operation.
        let adding = |number| table.look_up(Node::new(1, number).adding(true));
        assert_eq!((adding(40), adding(41), adding(42), adding(43), adding(59)), (7, 7, 7, 9, 9));
        // Further away, and before all named nodes: the next operation's name.
        assert_eq!((of(1, 23), of(1, 24), of(1, 39)), (0, 7, 7));
        table.note(Node::new(1, 46), 10);
        assert_eq!((of(1, 44), of(1, 45), of(1, 46)), (9, 10, 10));
        table.note(Node::new(1, 37), 6);
        assert_eq!((of(1, 38), of(1, 39)), (6, 7));
        // Each thread has its own numbers.
        assert_eq!(of(2, 40), 0);
        table.note(Node::new(2, 40), 11);
        assert_eq!((of(1, 40), of(2, 40)), (7, 11));
        assert_eq!(of(1, 0), 0);
        table.note(Node::new(1, 0), 3);
        assert_eq!((of(1, 0), of(1, 1), of(1, 16), of(1, 17)), (3, 3, 3, 0));
        // A node recorded as nameless ends the search.
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

    /// A lookup returns only the newest name of an entry, with numbers of many threads.
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
