//! Blocks of memory, and the segments that they are parts of.

use crate::event::StreamId;
use std::ops::{Index, IndexMut};

/// Number of an entry of a [`Slab`].
pub(crate) type Number = u32;
/// No neighbour.
pub(crate) const NONE: Number = Number::MAX;

/// One of the two pools of a pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolRef {
    /// Index of the pair.
    pub(crate) pair: usize,
    pub(crate) is_large: bool,
}

/// A part of a segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) segment: Number,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// Bytes that the program asked for.
    pub(crate) requested: u64,
    /// Neighbours in the segment.
    pub(crate) left: Number,
    pub(crate) right: Number,
    /// Rises with each block that is made.
    pub(crate) order: u64,
    /// Searches of the pool when the block became free.
    pub(crate) searches: u64,
    pub(crate) pool: PoolRef,
    pub(crate) stream: StreamId,
    pub(crate) state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Free,
    /// Part of an expandable segment without memory.
    Unmapped,
    Allocated,
    /// Freed by the program, while another stream may still use the memory.
    Pending,
}

/// Memory from one driver call, or the address range of an expandable segment.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// Rises with each segment that is made.
    pub(crate) order: u64,
    pub(crate) is_expandable: bool,
}

/// Entries with numbers that are used again.
#[derive(Clone, Debug)]
pub(crate) struct Slab<T> {
    entries: Vec<T>,
    unused: Vec<Number>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab { entries: Vec::new(), unused: Vec::new() }
    }
}

impl<T> Slab<T> {
    pub(crate) fn insert(&mut self, entry: T) -> Number {
        if let Some(number) = self.unused.pop() {
            self[number] = entry;
            return number;
        }
        self.entries.push(entry);
        self.entries.len() as Number - 1
    }

    /// The entry stays readable until its number is used again.
    pub(crate) fn remove(&mut self, number: Number) {
        self.unused.push(number);
    }
}

impl<T> Index<Number> for Slab<T> {
    type Output = T;

    fn index(&self, number: Number) -> &T {
        &self.entries[number as usize]
    }
}

impl<T> IndexMut<Number> for Slab<T> {
    fn index_mut(&mut self, number: Number) -> &mut T {
        &mut self.entries[number as usize]
    }
}
