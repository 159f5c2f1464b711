//! Blocks of memory, and the segments that they are parts of.

use crate::event::StreamId;
use std::ops::{Index, IndexMut};

/// Index of an entry in a [`Slab`].
pub(crate) type Number = u32;
/// Stands for a neighbour that does not exist.
pub(crate) const NONE: Number = Number::MAX;

/// Refers to the small or the large pool of a [`Pair`](super::pools::Pair).
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolRef {
    /// Index in `Allocator::pairs`.
    pub(crate) pair: usize,
    pub(crate) is_large: bool,
}

/// A contiguous part of a segment: one allocation, or free or unmapped memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) segment: Number,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// Bytes that the program requested; `bytes` is this after rounding.
    pub(crate) requested: u64,
    /// Adjacent blocks of the segment; [`NONE`] if there is none.
    pub(crate) left: Number,
    pub(crate) right: Number,
    /// Creation number of the block; later blocks have greater ones.
    pub(crate) order: u64,
    /// Value of [`Pool::searches`](super::pools::Pool::searches) when the block became free; shows for how many searches the block
    /// has been unused.
    pub(crate) searches: u64,
    pub(crate) pool: PoolRef,
    pub(crate) stream: StreamId,
    pub(crate) state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Free,
    /// Address range of an expandable segment to which no memory is mapped.
    Unmapped,
    Allocated,
    /// Freed by the program, but another stream may still use the memory.
    Pending,
}

/// Memory from one driver call, or the address range of an expandable segment.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// Creation number of the segment; later segments have greater ones.
    pub(crate) order: u64,
    pub(crate) is_expandable: bool,
}

/// A list whose entries keep their index; the index of a removed entry is used for a later one.
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

    /// Frees the index of an entry. The entry stays readable until the index is used again.
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
