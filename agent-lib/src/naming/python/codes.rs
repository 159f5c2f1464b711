//! Table of the code objects with a known meaning, by address.
//!
//! Each walk looks up every frame here. Most lookups find nothing: they read one word that is 0. The code object is never read,
//! so a wrong address only finds nothing. Its registrar keeps it alive.

use crate::naming::sequence;
use gpumem_wire::{Phase, Role};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};

/// Words of the table; a power of two.
const PLACES: usize = 1024;
/// Maximum number of entries in use: a fourth of the table.
const MOST: usize = PLACES / 4;
/// Longest distance of an entry from its home position.
const REACH: usize = 8;
/// Address in the lower bits of a word; the meaning is above.
const ADDRESS: u64 = (1 << 48) - 1;
/// Local variables that can hold the module.
pub(crate) const SLOTS: u32 = 256;
/// Flag in the meaning: the variable lies in a cell.
const IN_CELL: u64 = 0x80;

/// Which local variable of a frame holds the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Variable {
    /// Its index among the local variables.
    pub slot: u16,
    /// It may lie in a cell, because inner functions use it. The object is not inspected: while CPython 3.11 takes a frame
    /// down, its variables may point to freed objects, and only objects known as modules are safe.
    pub in_cell: bool,
}

/// Meaning of a code object, and the local variable that it concerns.
pub(crate) type Meaning = (What, Variable);

/// Meaning of a frame with this code. The numbers are those of gpumem_code, without a gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum What {
    /// No meaning, or its meaning was withdrawn.
    Nothing,
    /// A call of a module, which is a local variable.
    Module,
    Optimizer,
    /// The start of a backward pass.
    Backward,
    /// Parameters are made, moved or loaded. A local variable may be the module.
    Setup,
    /// Allocations inside of this function belong to no module.
    Boundary,
    /// An optimizer's step with the optimizer as a local variable, registered like a module.
    Step,
    /// Allocations in this function and its callees are parameters. Its callers give the name and the phase.
    Parameter,
    /// Allocations in this function itself are gradients, but not those of Python functions that it calls.
    Gradient,
    /// Gradients are set to zero or freed. Looked up only when memory runs out.
    ZeroGrad,
    /// A function with its own backward pass: its forward pass runs without gradients. Looked up only when memory runs out.
    CustomFunction,
    /// Allocations in this function and its callees are gradients. Its callers give the name and the phase.
    Reduction,
    /// Allocations in this function and its callees hold keys and values of earlier tokens.
    KvCache,
    /// Allocations in this function and its callees are copies of parameters.
    ParameterCopy,
    /// Parameters are copied, perhaps with their modules. No hook of PyTorch reports this.
    Copying,
    /// Like `KvCache`, unless gradients are computed: then the memory is kept for the backward pass, even if a cache also holds
    /// it.
    CacheUpdate,
    /// Allocations in this function and its callees are optimizer state. Its callers give the name and the phase.
    OptimizerState,
}

/// Codes that are not needed to find a name; they are kept in a separate table.
pub(crate) const RARE: u32 = 1 << What::ZeroGrad as u32 | 1 << What::CustomFunction as u32;

impl What {
    pub(crate) fn from_code(code: u32) -> Option<Self> {
        // SAFETY: the numbers up to the last one are values.
        (code <= What::OptimizerState as u32).then(|| unsafe { std::mem::transmute::<u8, What>(code as u8) })
    }

    /// Whether it is in a set of bits. Where frames of all kinds alternate, the jump table of a match is often mispredicted.
    #[inline(always)]
    pub(crate) fn is_of(self, those: u32) -> bool {
        1 << self as u32 & those != 0
    }

    #[inline(always)]
    pub(crate) fn phase(self) -> Phase {
        const OF: [Phase; 17] = {
            let mut of = [Phase::Unknown; 17];
            of[What::Module as usize] = Phase::Forward;
            of[What::Optimizer as usize] = Phase::Optimizer;
            of[What::Step as usize] = Phase::Optimizer;
            of[What::Backward as usize] = Phase::Backward;
            of[What::Setup as usize] = Phase::Setup;
            of
        };
        OF[self as usize]
    }

    /// Returns the role that the frame implies for allocations of the calling thread.
    pub(crate) fn role(self) -> Role {
        match self {
            What::Parameter => Role::Parameter,
            What::Gradient | What::Reduction => Role::Gradient,
            What::CacheUpdate if sequence::has_gradients() == Some(true) => Role::Unknown,
            What::KvCache | What::CacheUpdate => Role::KvCache,
            What::ParameterCopy => Role::ParameterCopy,
            What::OptimizerState => Role::OptimizerState,
            _ => Role::Unknown,
        }
    }
}

/// The table. A word is address | meaning << 48 | in a cell << 55 | number of the local variable << 56.
#[derive(Debug)]
pub(crate) struct Codes {
    places: [AtomicU64; PLACES],
    used: AtomicUsize,
    /// Code objects that found no room.
    pub refused: AtomicU64,
}

impl Codes {
    pub(crate) const fn new() -> Self {
        Codes {
            places: [const { AtomicU64::new(0) }; PLACES],
            used: AtomicUsize::new(0),
            refused: AtomicU64::new(0),
        }
    }

    #[inline(always)]
    fn home(code: u64) -> usize {
        (code.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - PLACES.trailing_zeros())) as usize
    }

    #[inline(always)]
    fn at(&self, code: u64, probe: usize) -> &AtomicU64 {
        &self.places[(Self::home(code) + probe) % PLACES]
    }

    #[inline(always)]
    pub(crate) fn get(&self, code: u64) -> Option<Meaning> {
        let first = self.at(code, 0).load(Relaxed);
        if first == 0 { None } else { self.search(code, first) }
    }

    #[inline]
    fn search(&self, code: u64, first: u64) -> Option<Meaning> {
        let mut found = first;
        for probe in 1..=REACH {
            if found & ADDRESS == code {
                let what = What::from_code((found >> 48 & 0x7f) as u32)?;
                let variable = Variable { slot: (found >> 56) as u16, in_cell: found >> 48 & IN_CELL != 0 };
                return Some((what, variable));
            }
            if found == 0 || probe == REACH {
                break;
            }
            found = self.at(code, probe).load(Relaxed);
        }
        None
    }

    /// Registers the meaning of a code object; `Nothing` withdraws it. Returns whether there was room.
    pub(crate) fn say(&self, code: u64, what: What, slot: u32, in_cell: bool) -> bool {
        let known = code != 0 && code & !ADDRESS == 0 && slot < SLOTS;
        let what_byte = what as u64 | if in_cell { IN_CELL } else { 0 };
        let word = code | what_byte << 48 | u64::from(slot) << 56;
        for probe in 0..if known { REACH } else { 0 } {
            let place = self.at(code, probe);
            let mut found = place.load(Relaxed);
            if found == 0 {
                if what == What::Nothing {
                    return true;
                }
                if self.used.load(Relaxed) >= MOST {
                    break;
                }
                match place.compare_exchange(0, word, AcqRel, Relaxed) {
                    Ok(_) => {
                        self.used.fetch_add(1, Relaxed);
                        return true;
                    }
                    Err(other) => found = other,
                }
            }
            // Its own entry; or one without a meaning, whose code object may be gone.
            let free = found >> 48 & 0x7f == 0 && what != What::Nothing;
            if (found & ADDRESS == code || free)
                && place.compare_exchange(found, word, AcqRel, Relaxed).is_ok()
            {
                return true;
            }
        }
        self.refused.fetch_add(1, Relaxed);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_said_changed_and_taken_back() {
        let codes = Codes::new();
        assert_eq!(codes.get(0x5555_0000_1000), None);
        assert!(codes.say(0x5555_0000_1000, What::Module, 3, false));
        assert_eq!(codes.get(0x5555_0000_1000), Some((What::Module, Variable { slot: 3, in_cell: false })));
        assert!(codes.say(0x5555_0000_1000, What::Backward, 0, true));
        assert_eq!(codes.get(0x5555_0000_1000), Some((What::Backward, Variable { slot: 0, in_cell: true })));
        assert!(codes.say(0x5555_0000_1000, What::Nothing, 0, false));
        assert_eq!(codes.get(0x5555_0000_1000).map(|(what, _)| what.phase()), Some(Phase::Unknown));
        assert!(
            codes.say(0x5555_0000_2000, What::Nothing, 0, false),
            "what was never said can be taken back"
        );
        for (code, slot) in [(0, 0), (1 << 48, 0), (0x5555_0000_1000, SLOTS)] {
            assert!(!codes.say(code, What::Module, slot, false), "{code:x} {slot}");
        }
        assert_eq!(codes.refused.load(Relaxed), 3);
        // A frame whose code is null or garbage has no meaning.
        for code in [0, 1, u64::MAX, 1 << 48, 0x5555_0000_1000 | 1 << 48] {
            assert_eq!(codes.get(code), None, "{code:x}");
        }
    }

    #[test]
    fn a_full_table_refuses_and_finds_what_it_has() {
        let codes = Codes::new();
        let all: Vec<u64> = (1..600).map(|n| 0x7f00_0000_0000 + n * 0xd0).collect();
        let said: Vec<u64> =
            all.iter().copied().filter(|&code| codes.say(code, What::Optimizer, 0, false)).collect();
        assert_eq!(said.len(), MOST);
        for code in all {
            let expected =
                said.contains(&code).then_some((What::Optimizer, Variable { slot: 0, in_cell: false }));
            assert_eq!(codes.get(code), expected);
        }
    }
}
