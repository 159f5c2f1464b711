//! Walks from the thread's Python state through its frames to the first one that runs a registered code object (codes.rs).
//!
//! While a thread is inside of a call, its own frames do not change, whichever thread holds the GIL. So the walk needs no lock
//! and no reference counts. It reads two words of each frame, code and caller; for a frame with registered code also a local
//! variable (a module or an optimizer) and the type of that object. The walk is bounded and follows only plausible pointers, so a damaged chain ends it.
//!
//! Special cases:
//!
//! - Generators and coroutines: while one runs, its frame is linked to the frame that resumed it.
//! - Greenlets: each has its own chain, which becomes the thread's when it runs. The walk finds the running greenlet's module.
//! - Sub-interpreters: each has its own thread state. Before 3.12, PyGILState knows only the first state that the thread had,
//!   so the walk finds the frame that called the sub-interpreter.

use crate::base::row::AllocationName;
use crate::naming::python::codes::{CodeKind, CodeKind::*, Codes, Meaning, Variable};
use crate::naming::python::layout::{self, Layout};
use crate::naming::python::memory::{Memory, Pointer};
use crate::naming::python::modules::Modules;
use crate::naming::python::text::Types;
use crate::record::names::Names;
use gpumem_wire::{Phase, Role};
use std::sync::atomic::Ordering::Relaxed;

pub(crate) const MAX_FRAMES: usize = 128;
/// Maximum number of threads to search in each direction of the interpreter's list, from the calling thread on.
const MAX_THREADS: usize = 256;

/// Kinds of frames (`CodeKind`) at which the walk continues with the calling frame.
const CONTINUE: u32 = 1 << Nothing as u32 | 1 << Copying as u32 | 1 << Gradient as u32 | GIVE_ROLE;
/// Kinds of frames that give a role to all memory allocated by their function and its callees.
const GIVE_ROLE: u32 = 1 << Parameter as u32
    | 1 << Reduction as u32
    | 1 << KvCache as u32
    | 1 << CacheUpdate as u32
    | 1 << ParameterCopy as u32
    | 1 << OptimizerState as u32;
/// Kinds of frames that have a module or an optimizer in a local variable.
const HAVE_MODULE: u32 = 1 << Module as u32 | 1 << Setup as u32 | 1 << Step as u32;
/// Positions at which a hook of the program can have its module as an argument: the first one, or in a method the second one.
const HOOK_ARGUMENTS: [u16; 2] = [0, 1];

/// Reads a thread's frames: has the memory to read, the offsets in CPython's structures, and the addresses of Python's types.
pub(crate) struct Reader<'a, M> {
    pub memory: &'a M,
    pub layout: &'a Layout,
    pub types: &'a Types,
}

/// Iterates over the frames of a thread, the innermost first.
pub(crate) struct Frames<'a, M> {
    reader: &'a Reader<'a, M>,
    next: Option<Pointer>,
    /// Maximum number of frames still to be returned.
    left: usize,
}

impl<M> Frames<'_, M> {
    pub(crate) fn up_to(self, left: usize) -> Self {
        Frames { left, ..self }
    }
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
        Frames { reader: self, next: self.innermost(state), left: MAX_FRAMES }
    }

    /// Returns the innermost frame of the thread with this state; `None` if it runs no Python code.
    #[inline(always)]
    pub(crate) fn innermost(&self, state: u64) -> Option<Pointer> {
        let at = self.memory.pointer(Pointer::new(state)?, self.layout.frame)?;
        match self.layout.through {
            None => Some(at),
            Some(offset) => self.memory.pointer(at, offset),
        }
    }

    /// Returns the states of the interpreter's other threads. Each state begins with pointers to the previous and the next one.
    pub(crate) fn states(&self, own: u64) -> impl Iterator<Item = u64> {
        let walk = move |offset: u16| {
            let next = move |at: &Pointer| self.memory.pointer(*at, offset);
            std::iter::successors(Pointer::new(own).and_then(|own| next(&own)), next).take(MAX_THREADS)
        };
        walk(0).chain(walk(8)).map(Pointer::address)
    }

    #[inline(always)]
    pub(crate) fn code(&self, frame: Pointer) -> Option<u64> {
        Some(self.memory.word(frame, self.layout.code)? & self.layout.mask)
    }

    #[inline(always)]
    pub(crate) fn local(&self, frame: Pointer, slot: u16) -> Option<u64> {
        let at = slot.checked_mul(8)?.checked_add(self.layout.locals)?;
        Some(self.memory.word(frame, at)? & self.layout.mask)
    }

    /// Whether the interpreter made the frame for itself, without Python code.
    pub(crate) fn internal(&self, frame: Pointer) -> bool {
        let Some((at, first)) = self.layout.owner else { return false };
        self.memory.byte(frame, at).is_none_or(|owner| owner >= first)
    }
}

/// Searches a thread's Python frames for the name of its allocation.
pub(crate) struct NameSearch<'a, M> {
    pub reader: Reader<'a, M>,
    pub codes: &'a Codes,
    pub modules: &'a Modules,
    pub names: &'a Names,
}

impl<M: Memory> NameSearch<'_, M> {
    /// Returns the name that the frames from `innermost` on give, the innermost frame of the thread with this state.
    #[inline(always)]
    pub(crate) fn find(&self, state: u64, innermost: Pointer) -> Option<AllocationName> {
        let mut frame = innermost;
        for _ in 0..MAX_FRAMES {
            if let Some(meaning) = self.codes.get(self.reader.code(frame)?) {
                if let Some(name) = self.name_at(state, frame, meaning) {
                    return name;
                }
                return self.search_callers(state, frame, meaning.0);
            }
            frame = self.reader.memory.pointer(frame, self.reader.layout.previous)?;
        }
        None
    }

    /// Returns `Some` with the result of the walk if it ends at this frame, else `None`.
    #[inline(always)]
    fn name_at(
        &self,
        state: u64,
        frame: Pointer,
        (kind, variable): Meaning,
    ) -> Option<Option<AllocationName>> {
        if kind.is_in(CONTINUE) {
            return None;
        }
        if kind == Boundary {
            return Some(None);
        }
        let tag = match kind {
            _ if kind.is_in(HAVE_MODULE) => self.module(frame, variable),
            ModuleHook => self.module_of_hook(state, frame),
            _ => Some(0),
        };
        let tag = if kind == Step { tag.unwrap_or(0) } else { tag? };
        Some(Some(AllocationName { tag, phase: kind.phase(), ..AllocationName::default() }))
    }

    /// Continues the walk at the callers of a frame that has a meaning but gives no module. There are three cases:
    ///
    /// - A call of an unregistered module: the name is its caller's, but the phase is that of this call.
    /// - A call of a module that a compiler generated: the phase is its caller's, too.
    /// - A frame that gives only a role.
    #[cold]
    #[inline(never)]
    fn search_callers(&self, state: u64, from: Pointer, from_kind: CodeKind) -> Option<AllocationName> {
        let reader = &self.reader;
        let is_innermost = reader.frames(state).next() == Some(from);
        let (mut role, mut phase, mut generated) = (Role::Unknown, None, None);
        if is_innermost && from_kind == Gradient {
            role = Role::Gradient;
        }
        for frame in (Frames { reader, next: Some(from), left: MAX_FRAMES + 1 }) {
            let Some(code) = reader.code(frame) else { break };
            let Some((kind, variable)) = self.codes.get(code) else { continue };
            if frame != from
                && let Some(found) = self.name_at(state, frame, (kind, variable))
            {
                let name = found.unwrap_or_default();
                let is_known = found.is_some() || phase.is_some() || role != Role::Unknown;
                let phase = phase.unwrap_or(name.phase);
                return is_known.then_some(AllocationName { phase, role, ..name });
            }
            if kind == Copying {
                self.modules.unknown.fetch_add(1, Relaxed);
            }
            if kind.is_in(GIVE_ROLE) && kind.role() != Role::Unknown {
                role = kind.role();
            }
            match self.generated(frame, (kind, variable)) {
                Some(tag) => generated = Some(tag),
                None => phase = phase.or(Some(kind.phase()).filter(|phase| *phase != Phase::Unknown)),
            }
        }
        // No caller has a name, so the generated module's own name is used.
        let phase = phase.or(generated.map(|_| Module.phase())).unwrap_or_default();
        let name = AllocationName { tag: generated.unwrap_or(0), phase, role, ..AllocationName::default() };
        (phase != Phase::Unknown || role != Role::Unknown).then_some(name)
    }

    /// Returns the tag of a generated module, if the frame is a call of one.
    fn generated(&self, frame: Pointer, (kind, variable): Meaning) -> Option<u32> {
        let object = self.object(frame, variable).filter(|_| kind == Module)?;
        self.modules.generated(self.names, object.address())
    }

    /// Returns the tag of the module in a local variable. The object is read only if its address is registered as a module.
    #[inline(always)]
    fn module(&self, frame: Pointer, variable: Variable) -> Option<u32> {
        self.modules.tag(self.names, &self.reader, self.object(frame, variable)?)
    }

    /// Returns the tag of the module whose hook the frame `caller` calls. The module is an argument of the hook, the function that
    /// `caller` has called. PyTorch runs such a hook in a node that it made after the module's forward pass, so the node may have
    /// the name of a part of the module.
    #[cold]
    #[inline(never)]
    fn module_of_hook(&self, state: u64, caller: Pointer) -> Option<u32> {
        // C code between the two, such as a partial function, has a frame of the interpreter.
        let frames = || self.reader.frames(state).filter(|frame| !self.reader.internal(*frame));
        let (hook, _) = frames().zip(frames().skip(1)).find(|(_, outer)| *outer == caller)?;
        HOOK_ARGUMENTS.into_iter().find_map(|slot| {
            let object = Pointer::new(self.reader.local(hook, slot)?)?;
            let is_module = self.modules.has(object.address());
            is_module.then(|| self.modules.tag(self.names, &self.reader, object)).flatten()
        })
    }

    /// Returns the object in a local variable.
    #[inline(always)]
    fn object(&self, frame: Pointer, variable: Variable) -> Option<Pointer> {
        let reader = &self.reader;
        let object = Pointer::new(reader.local(frame, variable.slot)?)?;
        if variable.in_cell && reader.memory.word(object, layout::TYPE)? == reader.types.cell {
            return reader.memory.pointer(object, layout::CELL);
        }
        Some(object)
    }
}
