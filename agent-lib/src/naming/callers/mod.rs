//! Finds the library that made a driver call from return addresses on the stack, in the callback and without a lock.
//!
//! CUPTI passes the address of the call's parameters, in the frame of the driver's entry function. The stack above them belongs
//! to that function and its callers. The entry function's return address is where the call came from. If it lies in the CUDA
//! runtime or the C library, the search continues with that library's caller.
//!
//! A frame also holds pointers to functions and leftovers of earlier calls. Two properties distinguish the return address:
//!
//! - Its position is the same whenever the same function calls in the same way. So only those positions remain candidates that
//!   held such a word in every call so far (`ReturnSlot`).
//! - Functions begin at multiples of 16, and a return address seldom does.
//!
//! It is unverified on hardware that the parameters lie there. If they do not, the search begins at the agent's own frame.
//! It then meets frames of the driver and of CUPTI first, which are skipped.

mod loader;
pub(crate) mod modules;
pub(crate) mod sites;
mod symbols;

pub(crate) use crate::threads::stack::prepare;
pub(crate) use loader::changes_now;
pub use modules::{TABLES, look};
pub(crate) use modules::{after_fork, before_fork, in_child, in_loader, is_torch, reclaim};

use crate::driver::core::Core;
use crate::threads::Thread;
use crate::threads::per_feature::{CachedCaller, Callers, REMEMBERED};
use crate::threads::stack::Stack;
use modules::{Library, Part, Place, Table};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

const WORD: usize = size_of::<usize>();
/// Words of the stack to search.
const MOST: usize = 512;
/// Words to search for the next return address.
const NEAR: usize = 64;
/// Maximum number of intermediate functions between the driver and the caller.
const HOPS: usize = 24;
/// Compilers for aarch64 put the return address below the function's own variables, so the search begins this many words lower.
const BELOW: usize = if cfg!(target_arch = "aarch64") { 32 } else { 0 };
/// Parameters further than this from the agent's own frame, in bytes, are not on its stack.
const FAR: usize = 1 << 20;
/// Upper bound of the ids of calls, as in sources/cupti/table.rs.
const IDS: usize = 1024;

/// Candidate positions of a return address: one bit for each of the 64 words from the start of the search.
#[derive(Debug)]
struct ReturnSlot {
    /// The return address above which the search starts; 0 while the entry is unused.
    from: AtomicUsize,
    /// Positions that held a pointer into a function in every call.
    always: AtomicU64,
    /// Candidates that at least once held an address other than the beginning of a function.
    within: AtomicU64,
}

impl ReturnSlot {
    const fn new() -> Self {
        ReturnSlot { from: AtomicUsize::new(0), always: AtomicU64::new(0), within: AtomicU64::new(0) }
    }

    /// Returns the most likely position, given the candidates of this call. `None` if there are none.
    fn place(&self, now: CandidateWords) -> Option<usize> {
        let before = CandidateWords { any: self.always.load(Relaxed), within: self.within.load(Relaxed) };
        let both = match before.any & now.any {
            0 => now, // the first time, or another function was loaded there
            any => CandidateWords { any, within: (before.within | now.within) & any },
        };
        if both != before && now.any != 0 {
            // If two threads store concurrently, one result is lost; the next call corrects this.
            self.always.store(both.any, Relaxed);
            self.within.store(both.within, Relaxed);
            if before.any != 0 && before.best() != both.best() {
                modules::look_again(); // cached results may have been wrong
            }
        }
        if now.any == 0 { None } else { both.best() }
    }
}

/// Which of 64 words point into functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CandidateWords {
    any: u64,
    /// Words that do not point to the beginning of a function.
    within: u64,
}

impl CandidateWords {
    /// Returns the most likely return address: the first one.
    fn best(self) -> Option<usize> {
        let likely = if self.within != 0 { self.within } else { self.any };
        (likely != 0).then_some(likely.trailing_zeros() as usize)
    }
}

/// Indexed by the driver call's id.
static ENTRIES: [ReturnSlot; IDS] = [const { ReturnSlot::new() }; IDS];
/// Hashed by return address in a library that passes calls on.
static BETWEEN: [ReturnSlot; 256] = [const { ReturnSlot::new() }; 256];

fn hop_from(address: usize) -> Option<&'static ReturnSlot> {
    let hop = BETWEEN.get(crate::base::row::mix(address as u64, 0) as usize % BETWEEN.len())?;
    let known = hop.from.load(Relaxed);
    let ours =
        known == address || known == 0 && hop.from.compare_exchange(0, address, Relaxed, Relaxed).is_ok();
    ours.then_some(hop)
}

/// Returns the word at an address of the calling thread's stack; on aarch64 without the bits that sign return addresses.
///
/// # Safety
/// The address must be mapped.
#[inline(always)]
unsafe fn word(at: usize) -> usize {
    // SAFETY: the caller guarantees that it is mapped. The read is volatile because the owner of the word may write it later.
    let word = unsafe { (at as *const usize).read_volatile() };
    if cfg!(target_arch = "aarch64") { word & 0xffff_ffff_ffff } else { word }
}

impl Core {
    /// Returns the number of the library that called `call` with its parameters at `params`; 0 if unknown.
    #[inline(always)]
    pub fn caller(&self, thread: &Thread, call: u32, params: usize, frame: usize) -> u16 {
        let on_stack = params > frame && params - frame < FAR;
        let start = match on_stack {
            true => (params & !(WORD - 1)).saturating_sub(BELOW * WORD).max(frame & !(WORD - 1)),
            false => frame & !(WORD - 1),
        };
        // SAFETY: only the calling thread uses its own data; the reference ends with this function.
        let callers = unsafe { &mut thread.own().callers };
        let known = &callers.known[place_of(start, call)];
        if known.start == start && known.generation == modules::generation() && u32::from(known.call) == call
        {
            let end = callers.stack.known_end(start);
            // SAFETY: `start` is in use, so the stack from there to `end` is mapped.
            let same = known.far.0 + WORD <= end
                && unsafe { word(known.near.0) == known.near.1 && word(known.far.0) == known.far.1 };
            if same {
                callers.site = known.far.1;
                return known.module;
            }
        }
        self.find_caller(callers, call, start, on_stack)
    }

    #[cold]
    #[inline(never)]
    fn find_caller(&self, callers: &mut Callers, call: u32, start: usize, on_stack: bool) -> u16 {
        callers.site = 0;
        let generation = modules::generation();
        let Some(table) = modules::table() else { return 0 };
        let end = callers.stack.find_end(start);
        let search = Search { core: self, table, stack: &callers.stack, start, words: (end - start) / WORD };
        let entry = ENTRIES.get(call as usize).filter(|_| on_stack);
        let Some((near, far, module)) = search.run(entry) else { return 0 };
        let at = |index: usize| {
            let at = start + index * WORD;
            // SAFETY: the address is below `end`.
            (at, unsafe { word(at) })
        };
        let (near, far) = (at(near), at(far));
        callers.site = far.1;
        callers.known[place_of(start, call)] =
            CachedCaller { start, near, far, generation, call: call as u16, module };
        module
    }
}

#[inline(always)]
fn place_of(start: usize, call: u32) -> usize {
    (start >> 4 ^ start >> 9 ^ call as usize) & (REMEMBERED - 1)
}

struct Search<'a> {
    core: &'a Core,
    table: &'a Table,
    stack: &'a Stack,
    start: usize,
    /// Words that can be read.
    words: usize,
}

/// Meaning of a word on the stack.
#[derive(Clone, Copy)]
enum SearchStep {
    /// Not a return address of interest: a number, a pointer to data, an address in the driver.
    Nothing,
    /// A function of the CUDA runtime or the C library; the search continues with its caller.
    Between,
    /// A function of this library.
    Caller(&'static Library),
    /// An address in a file that begins here and is not in the table yet.
    New(usize),
}

impl Search<'_> {
    fn says(&self, index: usize) -> SearchStep {
        // SAFETY: callers pass an index below `words`.
        let address = unsafe { word(self.start + index * WORD) };
        // A call may be the last instruction of a function, so the search uses the byte before the return address.
        match self.table.find(address.wrapping_sub(1)) {
            Place::Code(library) => match library.part {
                Part::Driver => SearchStep::Nothing,
                Part::Between => SearchStep::Between,
                Part::Caller => SearchStep::Caller(library),
            },
            Place::Data => SearchStep::Nothing,
            Place::Elsewhere if address < 1 << 16 || address >> 47 != 0 || self.stack.holds(address) => {
                SearchStep::Nothing
            }
            Place::Elsewhere => match modules::mapped_at(address) {
                Some(start) => SearchStep::New(start),
                None => SearchStep::Nothing,
            },
        }
    }

    fn words(&self, from: usize) -> CandidateWords {
        let mut words = CandidateWords { any: 0, within: 0 };
        for index in from..self.words.min(from + NEAR) {
            if !matches!(self.says(index), SearchStep::Nothing) {
                words.any |= 1 << (index - from);
                // SAFETY: the index is below `words`.
                let address = unsafe { word(self.start + index * WORD) };
                words.within |= u64::from(address & 15 != 0) << (index - from);
            }
        }
        words
    }

    /// Returns the word indexes of the entry function's return address and of that which identifies the caller; its number.
    fn run(&self, entry: Option<&ReturnSlot>) -> Option<(usize, usize, u16)> {
        let (mut hop, mut from, mut near) = (entry, 0, None);
        for _ in 0..HOPS {
            // Without an entry, the driver's frames come first.
            let window = self.words(from);
            let place = match hop {
                Some(hop) => hop.place(window),
                None => window.best(),
            };
            let Some(index) = place.map(|place| from + place).filter(|&index| index < self.words) else {
                from += NEAR;
                hop = None;
                if from >= self.words.min(MOST) {
                    return None;
                }
                continue;
            };
            let near = *near.get_or_insert(index);
            match self.says(index) {
                SearchStep::Caller(library) => {
                    return Some((near, index, modules::number(self.core, library)));
                }
                SearchStep::New(start) => return Some((near, index, modules::number_of_new(start))),
                SearchStep::Nothing => {} // not in this call, though in each one before
                // SAFETY: the index is below `words`.
                SearchStep::Between => hop = hop_from(unsafe { word(self.start + index * WORD) }),
            }
            from = index + 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Positions that a slot returns, call by call. Each call has the words that point into functions, and those that are not
    /// beginnings.
    fn places(calls: &[(u64, u64)]) -> Vec<Option<usize>> {
        let hop = ReturnSlot::new();
        calls.iter().map(|&(any, within)| hop.place(CandidateWords { any, within })).collect()
    }

    #[test]
    fn places_that_are_not_always_there_are_forgotten() {
        let calls = [(0b1010_0100, !0), (0b1010_0000, !0), (0b1010_0100, !0), (0b1000_0100, !0), (0b10, !0)];
        // At the first call, only the order of the words decides. Later calls show that the lowest word was a leftover.
        let calls = calls.map(|(any, within)| (any, any & within));
        assert_eq!(
            places(&calls),
            [2, 5, 5, 7, 1].map(Some),
            "the last is another frame: from the beginning"
        );
        assert_eq!(places(&[(0, 0), (4, 4), (0, 0), (4, 4)]), [None, Some(2), None, Some(2)]);
    }

    #[test]
    fn pointers_to_functions_are_no_return_addresses_if_there_is_a_better_one() {
        assert_eq!(places(&[(0b1010, 0b1000)]), [Some(3)]);
        assert_eq!(places(&[(0b1010, 0)]), [Some(1)]);
        // A return address that happens to be a multiple of 16, until another call decides.
        assert_eq!(places(&[(0b1010, 0b1000), (0b1010, 0b1010), (0b1010, 0b1000)]), [3, 1, 1].map(Some));
    }
}
