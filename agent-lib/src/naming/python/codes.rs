//! Table of the code objects that determine names: maps the address of a code object to its kind (e.g. the call of a module).
//!
//! Each walk (walk.rs) looks up every frame here. Most lookups find nothing: they read one word that is 0. The code object is
//! never read, so a wrong address only finds nothing. The Python code that registers a code object keeps it alive.

use crate::naming::sequence;
use gpumem_wire::{Phase, Role};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};

/// Number of words of the table; a power of two.
const PLACES: usize = 1024;
/// Maximum number of entries in use: a quarter of the table.
const MOST: usize = PLACES / 4;
/// Number of words, from the hashed position on, in which an entry can be.
const REACH: usize = 8;
/// Bits of a word with the address of the code object; the bits above are its kind and its variable.
const ADDRESS: u64 = (1 << 48) - 1;
/// Upper bound of the index of the local variable that holds the module.
pub(crate) const SLOTS: u32 = 256;
/// Flag in the byte of the kind: the variable lies in one of Python's cell objects.
const IN_CELL: u64 = 0x80;

/// Which local variable of a frame holds the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Variable {
    /// Index of the variable among the frame's local variables.
    pub slot: u16,
    /// Whether it may lie in a cell object, because inner functions use it. While CPython 3.11 takes a frame down, variables may
    /// point to freed objects. So the object in a variable without this flag is read only if its address is registered as a
    /// module's.
    pub in_cell: bool,
}

/// Kind of a code object, and the local variable that holds its module.
pub(crate) type Meaning = (CodeKind, Variable);

/// What it means for the name of an allocation that a frame runs a code object. `gpumem_code` uses the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum CodeKind {
    /// The code object is not registered, or its registration was withdrawn.
    Nothing,
    /// A call of a module. A local variable is the module.
    Module,
    /// A step of an optimizer, where no local variable is used.
    Optimizer,
    Backward,
    /// Parameters are made, moved or loaded. A local variable may be the module.
    Setup,
    /// Allocations in this function and its callees belong to no module.
    Boundary,
    /// An optimizer's step. A local variable is the optimizer, which is registered like a module.
    Step,
    /// Allocations in this function and its callees are parameters. Its callers give the name and the phase.
    Parameter,
    /// Allocations in this function itself are gradients, but not those of Python functions that it calls.
    Gradient,
    /// The function sets gradients to zero or frees them. Looked up only when memory runs out.
    ZeroGrad,
    /// A function with its own backward pass: its forward pass runs without gradients. Looked up only when memory runs out.
    CustomFunction,
    /// Allocations in this function and its callees are gradients. Its callers give the name and the phase.
    Reduction,
    /// Allocations in this function and its callees hold keys and values of earlier tokens.
    KvCache,
    /// Allocations in this function and its callees are copies of parameters.
    ParameterCopy,
    /// The function copies parameters, perhaps with their modules. No hook of PyTorch reports this.
    Copying,
    /// Like `KvCache`, unless gradients are computed: then the memory is kept for the backward pass, too.
    CacheUpdate,
    /// Allocations in this function and its callees are optimizer state. Its callers give the name and the phase.
    OptimizerState,
    /// A function that an optimizer's step calls to compute the loss. What it allocates outside of modules and backward passes is
    /// not the optimizer's.
    Closure,
    /// Calls backward hooks of a module, which get the module as an argument.
    ModuleHook,
}

/// Bit set of the kinds that are needed only when memory runs out; their code objects are in a separate table.
pub(crate) const RARE: u32 = 1 << CodeKind::ZeroGrad as u32 | 1 << CodeKind::CustomFunction as u32;

impl CodeKind {
    pub(crate) fn from_code(code: u32) -> Option<Self> {
        // SAFETY: all numbers up to the last one are values of the enum.
        (code <= CodeKind::ModuleHook as u32)
            .then(|| unsafe { std::mem::transmute::<u8, CodeKind>(code as u8) })
    }

    /// Whether the kind's bit is in a set. A `match` would be slower: where frames of all kinds alternate, its jump is often
    /// mispredicted.
    #[inline(always)]
    pub(crate) fn is_in(self, set: u32) -> bool {
        1 << self as u32 & set != 0
    }

    #[inline(always)]
    pub(crate) fn phase(self) -> Phase {
        const PHASES: [Phase; CodeKind::ModuleHook as usize + 1] = {
            let mut phases = [Phase::Unknown; CodeKind::ModuleHook as usize + 1];
            phases[CodeKind::Module as usize] = Phase::Forward;
            phases[CodeKind::Optimizer as usize] = Phase::Optimizer;
            phases[CodeKind::Step as usize] = Phase::Optimizer;
            phases[CodeKind::Backward as usize] = Phase::Backward;
            phases[CodeKind::ModuleHook as usize] = Phase::Backward;
            phases[CodeKind::Setup as usize] = Phase::Setup;
            phases[CodeKind::Closure as usize] = Phase::Between;
            phases
        };
        PHASES[self as usize]
    }

    /// Returns the role that a frame of this kind gives to allocations of the calling thread.
    pub(crate) fn role(self) -> Role {
        match self {
            CodeKind::Parameter => Role::Parameter,
            CodeKind::Gradient | CodeKind::Reduction => Role::Gradient,
            CodeKind::CacheUpdate if sequence::has_gradients() == Some(true) => Role::Unknown,
            CodeKind::KvCache | CodeKind::CacheUpdate => Role::KvCache,
            CodeKind::ParameterCopy => Role::ParameterCopy,
            CodeKind::OptimizerState => Role::OptimizerState,
            _ => Role::Unknown,
        }
    }
}

/// Decodes a word of the table.
#[inline(always)]
fn meaning(word: u64) -> Option<Meaning> {
    let kind = CodeKind::from_code((word >> 48 & 0x7f) as u32)?;
    Some((kind, Variable { slot: (word >> 56) as u16, in_cell: word >> 48 & IN_CELL != 0 }))
}

/// The table of code objects. A word is address | kind << 48 | whether the variable is in a cell object << 55 | its index << 56.
pub(crate) struct Codes {
    places: [AtomicU64; PLACES],
    used: AtomicUsize,
}

impl Codes {
    pub(crate) const fn new() -> Self {
        Codes { places: [const { AtomicU64::new(0) }; PLACES], used: AtomicUsize::new(0) }
    }

    /// Returns the words that may have the entry of a code object.
    #[inline(always)]
    fn probes(&self, code: u64) -> impl Iterator<Item = &AtomicU64> {
        let home = (code.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - PLACES.trailing_zeros())) as usize;
        (home..home + REACH).map(|place| &self.places[place % PLACES])
    }

    #[inline(always)]
    pub(crate) fn get(&self, code: u64) -> Option<Meaning> {
        match self.probes(code).next()?.load(Relaxed) {
            0 => None,
            found if found & ADDRESS == code => meaning(found),
            _ => self.search(code),
        }
    }

    #[cold]
    #[inline(never)]
    fn search(&self, code: u64) -> Option<Meaning> {
        for place in self.probes(code) {
            let found = place.load(Relaxed);
            if found == 0 {
                return None;
            }
            if found & ADDRESS == code {
                return meaning(found);
            }
        }
        None
    }

    /// Registers the kind of a code object and its variable; `Nothing` withdraws it. Returns false for an invalid code object or
    /// index, or without room in the table.
    pub(crate) fn register(&self, code: u64, kind: CodeKind, slot: u32, in_cell: bool) -> bool {
        let is_valid = code != 0 && code & !ADDRESS == 0 && slot < SLOTS;
        let kind_byte = kind as u64 | if in_cell { IN_CELL } else { 0 };
        let word = code | kind_byte << 48 | u64::from(slot) << 56;
        for place in self.probes(code).take(if is_valid { REACH } else { 0 }) {
            let mut found = place.load(Relaxed);
            if found == 0 {
                if kind == CodeKind::Nothing {
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
            // An entry of kind `Nothing` can be replaced: its code object may be gone.
            let is_free = found >> 48 & 0x7f == 0 && kind != CodeKind::Nothing;
            if (found & ADDRESS == code || is_free)
                && place.compare_exchange(found, word, AcqRel, Relaxed).is_ok()
            {
                return true;
            }
        }
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
        assert!(codes.register(0x5555_0000_1000, CodeKind::Module, 3, false));
        assert_eq!(
            codes.get(0x5555_0000_1000),
            Some((CodeKind::Module, Variable { slot: 3, in_cell: false }))
        );
        assert!(codes.register(0x5555_0000_1000, CodeKind::Backward, 0, true));
        assert_eq!(
            codes.get(0x5555_0000_1000),
            Some((CodeKind::Backward, Variable { slot: 0, in_cell: true }))
        );
        assert!(codes.register(0x5555_0000_1000, CodeKind::Nothing, 0, false));
        assert_eq!(codes.get(0x5555_0000_1000).map(|(kind, _)| kind.phase()), Some(Phase::Unknown));
        assert!(
            codes.register(0x5555_0000_2000, CodeKind::Nothing, 0, false),
            "kind was never said can be taken back"
        );
        for (code, slot) in [(0, 0), (1 << 48, 0), (0x5555_0000_1000, SLOTS)] {
            assert!(!codes.register(code, CodeKind::Module, slot, false), "{code:x} {slot}");
        }
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
            all.iter().copied().filter(|&code| codes.register(code, CodeKind::Optimizer, 0, false)).collect();
        assert_eq!(said.len(), MOST);
        for code in all {
            let expected =
                said.contains(&code).then_some((CodeKind::Optimizer, Variable { slot: 0, in_cell: false }));
            assert_eq!(codes.get(code), expected);
        }
    }
}
