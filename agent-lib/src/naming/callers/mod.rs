//! Finds the library that made a driver call from return addresses on the stack, in the callback and without a lock.
//!
//! CUPTI passes the address of the call's parameters. They lie in the stack frame of the driver's entry function, and the stack
//! above belongs to that function and its callers. The return address of the entry function shows where the call came from. If
//! the address lies in the CUDA runtime or the C library, the search continues with that library's caller.
//!
//! A frame also holds pointers to functions and leftovers of earlier calls. Two properties distinguish the return address:
//!
//! - Its position is the same whenever the same function calls in the same way. So a position remains a candidate only if it
//!   held a pointer into a function in every call so far (`ReturnSlot`).
//! - Functions begin at multiples of 16, and a return address seldom is one.
//!
//! It is unverified on hardware that the parameters lie there. If they do not, the search begins at the agent's own frame, and
//! skips the frames of CUPTI and the driver.

mod loader;
pub(crate) mod modules;
pub(crate) mod sites;
mod symbols;

pub(crate) use crate::threads::stack::prepare;
pub(crate) use loader::changes_now;
pub use modules::{TABLES, update_table};
pub(crate) use modules::{after_fork, before_fork, in_child, in_loader, is_python, is_torch, reclaim};

use crate::driver::core::Core;
use crate::threads::Thread;
use crate::threads::per_feature::{CachedCaller, Callers, REMEMBERED};
use crate::threads::stack::Stack;
use modules::{Library, Part, Table, Target};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

const WORD: usize = size_of::<usize>();
/// Distance from the start, in stack words, after which the search ends if it finds no candidate.
const SEARCH_WORDS: usize = 512;
/// Number of stack words to search for one return address: the bits of a `CandidateWords`.
const WINDOW: usize = 64;
/// Maximum number of steps of a search: return addresses followed, and windows of words without a candidate.
const MAX_HOPS: usize = 24;
/// Compilers for aarch64 put the return address below the function's own variables, so the search begins this many words lower.
const WORDS_BELOW: usize = if cfg!(target_arch = "aarch64") { 32 } else { 0 };
/// Parameters further than this from the agent's own frame, in bytes, are not on the same stack.
const STACK_RANGE: usize = 1 << 20;
/// Upper bound of CUPTI's ids of driver calls, as in sources/cupti/table.rs.
const IDS: usize = 1024;

/// Candidate positions of a return address on the stack: one bit for each of the 64 words from the start of the search.
struct ReturnSlot {
    /// For `BETWEEN`: the return address, in a library that passes calls on, after which the search goes up the stack. 0 while
    /// the entry is unused, and in `ENTRIES`.
    from: AtomicUsize,
    /// Candidate positions that held a pointer into a function in every call.
    always: AtomicU64,
    /// Candidate positions that at least once held an address other than the beginning of a function.
    within: AtomicU64,
}

impl ReturnSlot {
    const fn new() -> Self {
        ReturnSlot { from: AtomicUsize::new(0), always: AtomicU64::new(0), within: AtomicU64::new(0) }
    }

    /// Returns the most likely position of the return address, given the candidates of this call; `None` without candidates.
    fn position(&self, now: CandidateWords) -> Option<usize> {
        if now.any == 0 {
            return None;
        }
        let before = CandidateWords { any: self.always.load(Relaxed), within: self.within.load(Relaxed) };
        let both = match before.any & now.any {
            0 => now, // the first call, or another function was loaded at this address
            any => CandidateWords { any, within: (before.within | now.within) & any },
        };
        if both != before {
            // If two threads store concurrently, one result is lost; the next call corrects this.
            self.always.store(both.any, Relaxed);
            self.within.store(both.within, Relaxed);
            if before.any != 0 && before.best() != both.best() {
                modules::invalidate();
            }
        }
        both.best()
    }
}

/// The words, of 64, that point into functions: one bit for each word.
#[derive(Clone, Copy, PartialEq, Eq)]
struct CandidateWords {
    any: u64,
    /// Words of `any` that point into a function, but not to a multiple of 16, where functions begin.
    within: u64,
}

impl CandidateWords {
    /// Returns the index of the most likely return address: the first word of `within`, or without such words, of `any`.
    fn best(self) -> Option<usize> {
        let likely = if self.within != 0 { self.within } else { self.any };
        (likely != 0).then_some(likely.trailing_zeros() as usize)
    }
}

/// Positions on the stack of the return addresses of driver calls, by the call's id.
static ENTRIES: [ReturnSlot; IDS] = [const { ReturnSlot::new() }; IDS];
/// Positions of the next return address above one in a library that passes calls on, by the hash of the latter (`from`).
static BETWEEN: [ReturnSlot; 256] = [const { ReturnSlot::new() }; 256];

/// Returns the entry of `BETWEEN` for a return address in a library that passes calls on; `None` if another address uses it.
fn slot_after(address: usize) -> Option<&'static ReturnSlot> {
    let slot = BETWEEN.get(crate::base::row::mix(address as u64, 0) as usize % BETWEEN.len())?;
    let known = slot.from.load(Relaxed);
    let is_free = || known == 0 && slot.from.compare_exchange(0, address, Relaxed, Relaxed).is_ok();
    (known == address || is_free()).then_some(slot)
}

/// Returns the word at an address of the calling thread's stack; on aarch64 without the bits that sign return addresses.
///
/// # Safety
/// The address must be mapped.
#[inline(always)]
unsafe fn word(at: usize) -> usize {
    // SAFETY: the caller guarantees mapped memory. The read is volatile because the function that owns the word may write it.
    let word = unsafe { (at as *const usize).read_volatile() };
    if cfg!(target_arch = "aarch64") { word & 0xffff_ffff_ffff } else { word }
}

impl Core {
    /// Returns the number of the library that made the driver call `call`, whose parameters are at `params`; 0 if unknown.
    /// `frame` is an address in the agent's own stack frame.
    #[inline(always)]
    pub fn caller(&self, thread: &Thread, call: u32, params: usize, frame: usize) -> u16 {
        let on_stack = params > frame && params - frame < STACK_RANGE;
        let start = match on_stack {
            true => (params & !(WORD - 1)).saturating_sub(WORDS_BELOW * WORD).max(frame & !(WORD - 1)),
            false => frame & !(WORD - 1),
        };
        // SAFETY: only the calling thread uses its own data; the reference ends with this function.
        let callers = unsafe { &mut thread.own().callers };
        let known = &callers.known[cache_index(start, call)];
        if known.start == start && known.generation == modules::generation() && u32::from(known.call) == call
        {
            let end = callers.stack.known_end(start);
            // SAFETY: `start` is in use, so the stack from there to `end` is mapped.
            let is_same = known.far.0 + WORD <= end
                && unsafe { word(known.near.0) == known.near.1 && word(known.far.0) == known.far.1 };
            if is_same {
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
        let Some((near, far, module)) = search.find(entry) else { return 0 };
        let (near, far) = ((start + near * WORD, search.word(near)), (start + far * WORD, search.word(far)));
        callers.site = far.1;
        callers.known[cache_index(start, call)] =
            CachedCaller { start, near, far, generation, call: call as u16, module };
        module
    }
}

#[inline(always)]
fn cache_index(start: usize, call: u32) -> usize {
    (start >> 4 ^ start >> 9 ^ call as usize) & (REMEMBERED - 1)
}

struct Search<'a> {
    core: &'a Core,
    table: &'a Table,
    stack: &'a Stack,
    start: usize,
    /// Number of stack words from `start` on that can be read.
    words: usize,
}

/// What a word on the stack means for the search.
enum SearchStep {
    /// The word is not a caller: it is a number, a pointer to data, or an address in the driver.
    Nothing,
    /// An address in a library that passes calls on, as the CUDA runtime does.
    Between,
    /// An address in the given library, which made the driver call.
    Caller(&'static Library),
    /// An address in a file that begins here and is not in the table yet.
    New(usize),
}

impl Search<'_> {
    /// Returns the word at an index below `words`.
    fn word(&self, index: usize) -> usize {
        // SAFETY: the first `words` words from `start` on are mapped.
        unsafe { word(self.start + index * WORD) }
    }

    fn meaning(&self, index: usize) -> SearchStep {
        let address = self.word(index);
        // A call may be the last instruction of a function, so the search uses the byte before the return address.
        match self.table.find(address.wrapping_sub(1)) {
            Target::Code(library) => match library.part {
                Part::Driver => SearchStep::Nothing,
                Part::Between => SearchStep::Between,
                Part::Caller => SearchStep::Caller(library),
            },
            Target::Elsewhere if address >= 1 << 16 && address >> 47 == 0 && !self.stack.holds(address) => {
                modules::mapped_at(address).map_or(SearchStep::Nothing, SearchStep::New)
            }
            _ => SearchStep::Nothing,
        }
    }

    /// Returns the candidates among the `WINDOW` words from index `from` on.
    fn candidates(&self, from: usize) -> CandidateWords {
        let mut words = CandidateWords { any: 0, within: 0 };
        for index in from..self.words.min(from + WINDOW) {
            if !matches!(self.meaning(index), SearchStep::Nothing) {
                words.any |= 1 << (index - from);
                words.within |= u64::from(self.word(index) & 15 != 0) << (index - from);
            }
        }
        words
    }

    /// Finds the caller. Returns the indexes of two words, the entry function's return address and the one that lies in the
    /// caller, and the number of the caller's library.
    fn find(&self, entry: Option<&ReturnSlot>) -> Option<(usize, usize, u16)> {
        let (mut slot, mut from, mut near) = (entry, 0, None);
        for _ in 0..MAX_HOPS {
            let candidates = self.candidates(from);
            let position = slot.map_or_else(|| candidates.best(), |slot| slot.position(candidates));
            let index = position.map(|position| from + position).filter(|&index| index < self.words);
            let Some(index) = index else {
                from += WINDOW;
                slot = None;
                if from >= self.words.min(SEARCH_WORDS) {
                    return None;
                }
                continue;
            };
            let near = *near.get_or_insert(index);
            match self.meaning(index) {
                SearchStep::Caller(library) => {
                    return Some((near, index, modules::number(self.core, library)));
                }
                SearchStep::New(start) => return Some((near, index, modules::number_of_new(start))),
                SearchStep::Nothing => {} // the slot's usual position, which holds another word in this call
                SearchStep::Between => slot = slot_after(self.word(index)),
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
        let slot = ReturnSlot::new();
        calls.iter().map(|&(any, within)| slot.position(CandidateWords { any, within })).collect()
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
