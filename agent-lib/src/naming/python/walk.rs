//! The walk: from the thread's state through its frames to the first one that means something.
//!
//! While a thread is inside of a call, its own frames stay as they are, whoever has the GIL: so nothing is locked and no reference
//! counted. Of each frame two words are read, its code and who called it; of a frame that means something one local variable, and of the
//! module that it is the type. A chain that is damaged ends the walk: it is bounded, and follows only what may be a pointer.
//!
//! What runs where: a generator's or coroutine's frame is linked to whoever resumed it, as long as it runs. Greenlets have a chain each, which
//! becomes the thread's when they are switched to: what is found is the module that the running one is in. A sub-interpreter has a
//! state of its own; before 3.12 PyGILState knows only the first one that the thread had, so what is found is where that one called from.

use crate::base::row::FrameName;
use crate::naming::python::codes::{Codes, Variable, What};
use crate::naming::python::layout::{self, Layout};
use crate::naming::python::memory::{Memory, Pointer};
use crate::naming::python::modules::Modules;
use crate::record::names::Names;
use gpumem_wire::{Phase, Role};
use std::sync::atomic::Ordering::Relaxed;

/// Frames that are looked at.
pub(crate) const MOST: usize = 128;

/// Frames that do not end the walk.
const SAY_NO_END: u32 =
    1 << What::Nothing as u32 | 1 << What::Copying as u32 | 1 << What::Gradient as u32 | SAY_A_ROLE;
/// Frames that say what all memory is for that is allocated inside of them.
const SAY_A_ROLE: u32 = 1 << What::Parameter as u32
    | 1 << What::Reduction as u32
    | 1 << What::KvCache as u32
    | 1 << What::CacheUpdate as u32
    | 1 << What::ParameterCopy as u32
    | 1 << What::OptimizerState as u32;
/// Frames in which a module, or an optimizer, is a local variable.
const HAVE_A_MODULE: u32 = 1 << What::Module as u32 | 1 << What::Setup as u32 | 1 << What::Step as u32;

/// Memory, and where things are in it.
#[derive(Debug)]
pub(crate) struct Reader<'a, M> {
    /// Read with it.
    pub memory: &'a M,
    /// By this.
    pub layout: &'a Layout,
}

/// Frames of a thread, the innermost first.
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
    /// Of the thread with this state.
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

    /// The frame's code object.
    #[inline(always)]
    pub(crate) fn code(&self, frame: Pointer) -> Option<u64> {
        Some(self.memory.word(frame, self.layout.code)? & self.layout.mask)
    }

    /// A local variable of the frame.
    #[inline(always)]
    pub(crate) fn local(&self, frame: Pointer, slot: u16) -> Option<u64> {
        Some(self.memory.word(frame, self.layout.locals + slot * 8)? & self.layout.mask)
    }

    /// Whether the interpreter made it for itself.
    pub(crate) fn internal(&self, frame: Pointer) -> bool {
        let Some((at, first)) = self.layout.owner else { return false };
        self.memory.byte(frame, at).is_none_or(|owner| owner >= first)
    }
}

/// What the walk looks for.
#[derive(Debug)]
pub(crate) struct Known<'a> {
    /// What code means.
    pub codes: &'a Codes,
    /// Where modules belong.
    pub modules: &'a Modules,
    /// Where tags come from.
    pub names: &'a Names,
    /// The type of cells: a variable that an inner function uses lies in one.
    pub cell: u64,
}

impl Known<'_> {
    /// What the frames of the thread with this state say.
    #[inline(always)]
    pub(crate) fn find<M: Memory>(&self, reader: &Reader<'_, M>, state: u64) -> Option<FrameName> {
        for frame in reader.frames(state) {
            if let Some((what, variable)) = self.codes.get(reader.code(frame)?) {
                if let Some(known) = self.meets(reader, frame, what, variable) {
                    return known;
                }
                return self.beyond(reader, state, frame, what, variable);
            }
        }
        None
    }

    /// Whether a frame that means something ends the walk, and with what.
    #[inline(always)]
    fn meets<M: Memory>(
        &self,
        reader: &Reader<'_, M>,
        frame: Pointer,
        what: What,
        variable: Variable,
    ) -> Option<Option<FrameName>> {
        if what.is_of(SAY_NO_END) {
            return None;
        }
        if what == What::Boundary {
            return Some(None);
        }
        let tag = if what.is_of(HAVE_A_MODULE) { self.module(reader, frame, variable) } else { Some(0) };
        let tag = if what == What::Step { tag.unwrap_or(0) } else { tag? };
        Some(Some(FrameName { tag, phase: what.phase(), role: Role::Unknown }))
    }

    /// From a frame on that means something and names nothing. A module that nobody has said: what happens in it is its caller's, and
    /// the phase is known. One that a compiler made: the phase is its caller's, too. Or one that says what memory is for, and no more.
    #[cold]
    #[inline(never)]
    fn beyond<M: Memory>(
        &self,
        reader: &Reader<'_, M>,
        state: u64,
        from: Pointer,
        what: What,
        variable: Variable,
    ) -> Option<FrameName> {
        if what == What::Copying {
            self.modules.unknown.fetch_add(1, Relaxed);
        }
        let is_innermost = || reader.frames(state).next() == Some(from);
        let mut role = if what != What::Gradient || is_innermost() { what.role() } else { Role::Unknown };
        let mut generated = self.generated(reader, from, what, variable);
        let said = |what: What| Some(what.phase()).filter(|phase| *phase != Phase::Unknown);
        let mut phase = if generated.is_some() { None } else { said(what) };
        let rest = Frames { reader, next: reader.memory.pointer(from, reader.layout.previous), left: MOST };
        for frame in rest {
            let Some(code) = reader.code(frame) else { break };
            let Some((what, variable)) = self.codes.get(code) else { continue };
            if let Some(known) = self.meets(reader, frame, what, variable) {
                let said = known.unwrap_or_default();
                let is_known = known.is_some() || phase.is_some() || role != Role::Unknown;
                return is_known.then_some(FrameName { phase: phase.unwrap_or(said.phase), role, ..said });
            }
            if what == What::Copying {
                self.modules.unknown.fetch_add(1, Relaxed);
            }
            if what.is_of(SAY_A_ROLE) && what.role() != Role::Unknown {
                role = what.role();
            }
            match self.generated(reader, frame, what, variable) {
                Some(tag) => generated = Some(tag),
                None => phase = phase.or(said(what)),
            }
        }
        // Called by nobody who has a name: its own is better than none.
        let tag = generated.unwrap_or(0);
        let phase = phase.or(generated.map(|_| What::Module.phase())).unwrap_or_default();
        (phase != Phase::Unknown || role != Role::Unknown).then_some(FrameName { tag, phase, role })
    }

    /// The tag of a module that a compiler made, if the frame is one's.
    fn generated<M: Memory>(
        &self,
        reader: &Reader<'_, M>,
        frame: Pointer,
        what: What,
        variable: Variable,
    ) -> Option<u32> {
        let object = self.object(reader, frame, variable).filter(|_| what == What::Module)?;
        self.modules.generated(self.names, object.address())
    }

    /// The tag of the module that a local variable holds. The object is read only once its address is known as a module's.
    #[inline(always)]
    fn module<M: Memory>(&self, reader: &Reader<'_, M>, frame: Pointer, variable: Variable) -> Option<u32> {
        let object = self.object(reader, frame, variable)?;
        self.modules.tag(self.names, reader, object)
    }

    #[inline(always)]
    fn object<M: Memory>(
        &self,
        reader: &Reader<'_, M>,
        frame: Pointer,
        variable: Variable,
    ) -> Option<Pointer> {
        let object = Pointer::new(reader.local(frame, variable.slot)?)?;
        if variable.in_cell && reader.memory.word(object, layout::TYPE)? == self.cell {
            return reader.memory.pointer(object, layout::CELL);
        }
        Some(object)
    }
}
