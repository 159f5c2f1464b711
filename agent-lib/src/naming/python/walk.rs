//! The walk: from the thread's state through its frames to the first one with a meaning.
//!
//! While a thread is inside of a call, its own frames do not change, whichever thread holds the GIL: the walk needs no lock and
//! no reference counts. It reads two words of each frame, code and caller; for a frame with a meaning also a local variable and
//! its module's type. The walk is bounded and follows only plausible pointers, so a damaged chain ends it.
//!
//! Special cases:
//!
//! - Generators and coroutines: while one runs, its frame is linked to the frame that resumed it.
//! - Greenlets: each has its own chain, which becomes the thread's when it runs. The walk finds the running greenlet's module.
//! - Sub-interpreters: each has its own thread state. Before 3.12, PyGILState knows only the first state that the thread had,
//!   so the walk finds the frame that called the sub-interpreter.

use crate::base::row::AllocationName;
use crate::naming::python::codes::{Codes, Meaning, Variable, What};
use crate::naming::python::layout::{self, Layout};
use crate::naming::python::memory::{Memory, Pointer};
use crate::naming::python::modules::Modules;
use crate::naming::python::text::Types;
use crate::record::names::Names;
use gpumem_wire::{Phase, Role};
use std::sync::atomic::Ordering::Relaxed;

pub(crate) const MOST: usize = 128;

/// Frames at which the walk continues.
const SAY_NO_END: u32 =
    1 << What::Nothing as u32 | 1 << What::Copying as u32 | 1 << What::Gradient as u32 | SAY_A_ROLE;
/// Frames that give the role of all memory allocated by their function and its callees.
const SAY_A_ROLE: u32 = 1 << What::Parameter as u32
    | 1 << What::Reduction as u32
    | 1 << What::KvCache as u32
    | 1 << What::CacheUpdate as u32
    | 1 << What::ParameterCopy as u32
    | 1 << What::OptimizerState as u32;
/// Frames with a module or an optimizer as a local variable.
const HAVE_A_MODULE: u32 = 1 << What::Module as u32 | 1 << What::Setup as u32 | 1 << What::Step as u32;

#[derive(Debug)]
pub(crate) struct Reader<'a, M> {
    pub memory: &'a M,
    pub layout: &'a Layout,
    pub types: &'a Types,
}

/// Iterates over the frames of a thread, the innermost first.
#[derive(Debug)]
pub(crate) struct Frames<'a, M> {
    reader: &'a Reader<'a, M>,
    next: Option<Pointer>,
    left: usize,
}

impl<M: Memory> Iterator for Frames<'_, M> {
    type Item = Pointer;

    #[inline(always)]
    fn next(&mut self) -> Option<Pointer> {
        let frame = self.next?;
        self.left = self.left.checked_sub(1)?;
        self.next = self.reader.memory.pointer(frame, self.reader.layout.previous);
        Some(frame)
    }
}

impl<M: Memory> Reader<'_, M> {
    #[inline(always)]
    pub(crate) fn frames(&self, state: u64) -> Frames<'_, M> {
        let first = || {
            let at = self.memory.pointer(Pointer::new(state)?, self.layout.frame)?;
            match self.layout.through {
                None => Some(at),
                Some(offset) => self.memory.pointer(at, offset),
            }
        };
        Frames { reader: self, next: first(), left: MOST }
    }

    #[inline(always)]
    pub(crate) fn code(&self, frame: Pointer) -> Option<u64> {
        Some(self.memory.word(frame, self.layout.code)? & self.layout.mask)
    }

    #[inline(always)]
    pub(crate) fn local(&self, frame: Pointer, slot: u16) -> Option<u64> {
        Some(self.memory.word(frame, self.layout.locals + slot * 8)? & self.layout.mask)
    }

    pub(crate) fn internal(&self, frame: Pointer) -> bool {
        let Some((at, first)) = self.layout.owner else { return false };
        self.memory.byte(frame, at).is_none_or(|owner| owner >= first)
    }
}

#[derive(Debug)]
pub(crate) struct Known<'a, M> {
    pub reader: &'a Reader<'a, M>,
    pub codes: &'a Codes,
    pub modules: &'a Modules,
    pub names: &'a Names,
}

impl<M: Memory> Known<'_, M> {
    /// Returns the name that the frames of the thread with this state give.
    #[inline(always)]
    pub(crate) fn find(&self, state: u64) -> Option<AllocationName> {
        for frame in self.reader.frames(state) {
            if let Some(meaning) = self.codes.get(self.reader.code(frame)?) {
                if let Some(known) = self.meets(frame, meaning) {
                    return known;
                }
                return self.beyond(state, frame, meaning);
            }
        }
        None
    }

    /// Returns the result if this frame ends the walk, else `None`.
    #[inline(always)]
    fn meets(&self, frame: Pointer, (what, variable): Meaning) -> Option<Option<AllocationName>> {
        if what.is_of(SAY_NO_END) {
            return None;
        }
        if what == What::Boundary {
            return Some(None);
        }
        let tag = if what.is_of(HAVE_A_MODULE) { self.module(frame, variable) } else { Some(0) };
        let tag = if what == What::Step { tag.unwrap_or(0) } else { tag? };
        Some(Some(AllocationName { tag, phase: what.phase(), ..AllocationName::default() }))
    }

    /// Continues from a frame that has a meaning but gives no module. There are three cases:
    ///
    /// - An unregistered module: what happens in it belongs to its caller, but its phase counts.
    /// - A module that a compiler generated: the phase is its caller's, too.
    /// - A frame that gives only a role.
    #[cold]
    #[inline(never)]
    fn beyond(&self, state: u64, from: Pointer, (what, variable): Meaning) -> Option<AllocationName> {
        let reader = self.reader;
        if what == What::Copying {
            self.modules.unknown.fetch_add(1, Relaxed);
        }
        let is_innermost = || reader.frames(state).next() == Some(from);
        let mut role = if what != What::Gradient || is_innermost() { what.role() } else { Role::Unknown };
        let mut generated = self.generated(from, (what, variable));
        let said = |what: What| Some(what.phase()).filter(|phase| *phase != Phase::Unknown);
        let mut phase = if generated.is_some() { None } else { said(what) };
        let rest = Frames { reader, next: reader.memory.pointer(from, reader.layout.previous), left: MOST };
        for frame in rest {
            let Some(code) = reader.code(frame) else { break };
            let Some((what, variable)) = self.codes.get(code) else { continue };
            if let Some(known) = self.meets(frame, (what, variable)) {
                let said = known.unwrap_or_default();
                let is_known = known.is_some() || phase.is_some() || role != Role::Unknown;
                return is_known.then_some(AllocationName {
                    phase: phase.unwrap_or(said.phase),
                    role,
                    ..said
                });
            }
            if what == What::Copying {
                self.modules.unknown.fetch_add(1, Relaxed);
            }
            if what.is_of(SAY_A_ROLE) && what.role() != Role::Unknown {
                role = what.role();
            }
            match self.generated(frame, (what, variable)) {
                Some(tag) => generated = Some(tag),
                None => phase = phase.or(said(what)),
            }
        }
        // No caller has a name, so the generated module's own name is used.
        let tag = generated.unwrap_or(0);
        let phase = phase.or(generated.map(|_| What::Module.phase())).unwrap_or_default();
        let name = AllocationName { tag, phase, role, ..AllocationName::default() };
        (phase != Phase::Unknown || role != Role::Unknown).then_some(name)
    }

    /// Returns the tag of a generated module, if the frame belongs to one.
    fn generated(&self, frame: Pointer, (what, variable): Meaning) -> Option<u32> {
        let object = self.object(frame, variable).filter(|_| what == What::Module)?;
        self.modules.generated(self.names, object.address())
    }

    /// Returns the tag of the module in a local variable. The object is read only if its address is registered as a module.
    #[inline(always)]
    fn module(&self, frame: Pointer, variable: Variable) -> Option<u32> {
        let object = self.object(frame, variable)?;
        self.modules.tag(self.names, self.reader, object)
    }

    #[inline(always)]
    fn object(&self, frame: Pointer, variable: Variable) -> Option<Pointer> {
        let reader = self.reader;
        let object = Pointer::new(reader.local(frame, variable.slot)?)?;
        if variable.in_cell && reader.memory.word(object, layout::TYPE)? == reader.types.cell {
            return reader.memory.pointer(object, layout::CELL);
        }
        Some(object)
    }
}
