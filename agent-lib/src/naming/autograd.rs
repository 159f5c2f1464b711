//! Names the nodes of PyTorch's backward pass, so that their allocations have the names of the forward pass.
//!
//! PyTorch's engine calls `Engine::evaluate_function` for each node, through a slot (GOT entry) of libtorch_cpu. The agent puts
//! its own function into the slot. That function notes which node runs on the thread and calls the original, whose exceptions
//! pass through.
//!
//! A node carries the id of the thread that made it and its sequence number on that thread (sequence.rs). The offsets of both
//! words differ between releases, so they are found with a few nodes of known numbers. The agent runs no graph for that: a
//! process that has run one cannot fork children that run another.
//!
//! An in-place operation may allocate nothing, so no allocation names its node. PyTorch calls `rebase_history` with the node of
//! each in-place operation. The agent replaces that slot, too, and gives the node the thread's current name.
//!
//! Nodes that accumulate gradients have no number. They run as soon as they are ready and get the name of the node before them.

use crate::base::fault_injection;
use crate::base::hot::HOT_WORDS;
use crate::base::image::Image;
use crate::base::row::AllocationName;
use crate::driver::core::Core;
use crate::driver::guard;
use crate::naming::gradient;
use crate::naming::python::memory::{Careful, Memory, Pointer};
use crate::naming::sequence::{self, Node, Table, call_at};
use crate::naming::slot::{self, SlotResult};
use crate::record::status;
use crate::threads::{self, Thread};
use gpumem_wire::{Layer, LayerState, Phase};
use std::arch::naked_asm;
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, AtomicUsize, Ordering::*};

const EVALUATE: &CStr = c"_ZN5torch8autograd6Engine17evaluate_functionERSt10shared_ptrINS0_9GraphTaskEEPNS0_4NodeERNS0_11InputBufferERKS2_INS0_10ReadyQueueEE";
/// `rebase_history(const Variable&, Edge)`. The edge is passed by reference and begins with a node's address. What the function
/// returns differs between releases.
const REBASE: &CStr = c"_ZN5torch8autograd4impl14rebase_historyERKN2at6TensorENS0_4EdgeE";
const PEEK: &CStr = c"_ZN2at15sequence_number4peekEv";
const GRAD_MODE: &CStr = c"_ZN3c108GradMode10is_enabledEv";
const THREAD: &CStr = c"_ZN2at14RecordFunction15currentThreadIdEv";

/// Upper bound of the sequence numbers of nodes; nodes that accumulate gradients have the largest possible number instead.
const NO_NUMBER: u64 = 1 << 62;
/// Number of a node's words that are searched for its number.
const WORDS: usize = 12;
/// Distance from a node's number to its thread id, in words, in the releases known so far.
const THREAD_BEHIND: usize = 3;

/// `Engine::evaluate_function`: takes five words.
type Evaluate = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, *mut c_void, *mut c_void, *mut c_void);

/// Whether the search for PyTorch's engine has finished, with or without success.
static SEARCHED: AtomicBool = AtomicBool::new(false);
/// Original values of the replaced slots of `evaluate_function` and of `rebase_history`.
const NEXT: &AtomicUsize = &HOT_WORDS.next_evaluate;
static NEXT_REBASE: AtomicUsize = AtomicUsize::new(0);
/// Number of the register argument of `rebase_history` that points to the edge: `SECOND`, `THIRD` or `UNKNOWN`. It is the third
/// if the first one is the address for the result.
static EDGE: AtomicU8 = AtomicU8::new(UNKNOWN);
/// The first word that the second argument pointed to in the last call before calibration: the node's address, if that argument
/// is the edge.
static LAST_EDGE: AtomicU64 = AtomicU64::new(0);
const UNKNOWN: u8 = 0;
const SECOND: u8 = 2;
const THIRD: u8 = 3;
/// Bytes of stack above a call of `rebase_history` in which its caller keeps the edge.
const FRAME: usize = 64 << 10;
/// Addresses of two functions of PyTorch, which return the thread's next node number and the thread's id.
const PEEK_AT: &AtomicUsize = &HOT_WORDS.next_number;
static THREAD_AT: AtomicUsize = AtomicUsize::new(0);
const TABLE: &AtomicPtr<()> = &HOT_WORDS.nodes;
/// Byte offsets of the number and of the thread id within a node: number << 8 | thread. 0 while they are unknown.
const OFFSETS: &AtomicU64 = &HOT_WORDS.offsets;
/// The first word (vtable pointer) of nodes of additions; 0 while it is unknown.
const ADDITION: &AtomicU64 = &HOT_WORDS.addition;

/// Value of `AutogradThread::running` for a node whose name is unknown. No real node has this value.
const UNNAMED: u64 = u64::MAX;

fn table() -> Option<&'static Table> {
    // SAFETY: the pointer is null or was leaked by `attach`.
    unsafe { TABLE.load(Acquire).cast::<Table>().as_ref() }
}

/// Guard for a running node. When the node ends, normally or by an exception, it restores the enclosing node of the thread.
struct RunningNode {
    thread: &'static Thread,
    node: u64,
    outer: u64,
    outer_scope: u32,
    outer_accumulating: u64,
}

impl RunningNode {
    #[inline(always)]
    fn end(&self) {
        let mine = &self.thread.autograd;
        mine.running.store(self.outer, Relaxed);
        mine.scope.store(self.outer_scope, Relaxed);
        mine.last.store(self.node, Relaxed);
        let accumulated = mine.accumulating.load(Relaxed);
        mine.accumulating.store(self.outer_accumulating, Relaxed);
        if accumulated != 0 {
            accumulated_in(accumulated);
        }
    }
}

/// Records the gradient of a node that has ended. The engine keeps the node alive until its call has returned or was left by an
/// exception.
#[unsafe(link_section = ".text.hot.gpumem")]
#[inline(never)]
fn accumulated_in(node: u64) {
    guard::guard((), |core, thread| core.record_gradient(thread, node));
}

/// Ends the node if an exception has left it.
impl Drop for RunningNode {
    #[cold]
    #[inline(never)]
    fn drop(&mut self) {
        self.end();
    }
}

#[inline(always)]
fn enter(thread: &'static Thread, node: *const c_void) -> RunningNode {
    fault_injection::at("torch.evaluate");
    let mine = &thread.autograd;
    let offsets = OFFSETS.load(Relaxed);
    let mut accumulating = 0;
    let name = if offsets == 0 {
        UNNAMED
    } else {
        // SAFETY: the offsets lie within every node; they were found in nodes of this process.
        let word = |offset: u64| unsafe { *node.byte_add((offset & 255) as usize).cast::<u64>() };
        let number = word(offsets >> 8);
        if number < NO_NUMBER {
            Node::new(word(offsets), number).adding(word(0) == ADDITION.load(Relaxed)).0
        } else {
            // SAFETY: this thread is about to run this node.
            accumulating = unsafe { gradient::accumulating(node.cast(), mine.running.load(Relaxed) != 0) };
            mine.last.load(Relaxed).max(1)
        }
    };
    let running = RunningNode {
        thread,
        node: name,
        outer: mine.running.load(Relaxed),
        outer_scope: mine.scope.load(Relaxed),
        outer_accumulating: mine.accumulating.load(Relaxed),
    };
    mine.running.store(name, Relaxed);
    mine.accumulating.store(accumulating, Relaxed);
    mine.scope.store(thread.scope.load(Relaxed), Relaxed);
    running
}

/// Replacement for `Engine::evaluate_function` in its slot.
#[unsafe(link_section = ".text.hot.gpumem")]
unsafe extern "C-unwind" fn evaluate(
    engine: *mut c_void,
    task: *mut c_void,
    node: *mut c_void,
    inputs: *mut c_void,
    queue: *mut c_void,
) {
    let running = match threads::known() {
        // In the usual case nothing is called before PyTorch's function, so its arguments stay in their registers.
        Some(thread) => guard::guard_known(thread, None, |_| Some(enter(thread, node))),
        None => first_entered(node),
    };
    // SAFETY: calls the slot's original function with the same arguments.
    unsafe {
        let next: Evaluate = std::mem::transmute(next(NEXT));
        next(engine, task, node, inputs, queue);
    }
    if let Some(running) = running {
        running.end();
        std::mem::forget(running);
    }
}

/// Like `enter`, for a thread that may not have a place so far.
#[cold]
#[inline(never)]
fn first_entered(node: *const c_void) -> Option<RunningNode> {
    guard::guard(None, |_, thread| Some(enter(thread, node)))
}

/// Replacement for `rebase_history` in its slot. Passes the arguments to `rebased` and then jumps to the original function.
///
/// # Safety
/// Must be called with PyTorch's arguments.
#[unsafe(naked)]
unsafe extern "C-unwind" fn rebase() {
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "sub rsp, 8",
        "mov rdi, rsi", "mov rsi, rdx", "lea rdx, [rsp + 56]",
        "call {look}",
        "add rsp, 8", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
        "jmp rax",
        look = sym rebased
    );
    // On aarch64 the address for the result is in x8 and is not an argument.
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        "stp x29, x30, [sp, #-64]!", "stp x0, x1, [sp, #16]", "stp x2, x3, [sp, #32]", "str x8, [sp, #48]",
        "mov x0, x1", "add x2, sp, #64",
        "bl {look}",
        "mov x16, x0", "ldr x8, [sp, #48]", "ldp x2, x3, [sp, #32]", "ldp x0, x1, [sp, #16]", "ldp x29, x30, [sp], #64",
        "br x16",
        look = sym rebased
    );
}

/// Names the node of an in-place operation. Gets two of the call's arguments and the stack pointer; returns the address of the
/// original function.
unsafe extern "C" fn rebased(second: usize, third: usize, stack: usize) -> usize {
    guard::guard((), |core, thread| {
        fault_injection::at("torch.rebase");
        let named = core.named(thread); // also names the thread's last node
        let tag = if named.flags.0 == 0 { named.tag } else { 0 };
        // SAFETY: the arguments are those of `rebase_history`, as the caller guarantees.
        if let (Some(node), Some(table)) = (unsafe { node_of(second, third, stack) }, table()) {
            table.note(node, tag);
        }
    });
    next(&NEXT_REBASE)
}

/// Returns the node of the edge, which is the second or the third argument. Returns `None` while it is unknown which of them,
/// or for a node without a number.
unsafe fn node_of(second: usize, third: usize, stack: usize) -> Option<Node> {
    // While it is unknown which argument is the edge, the second one is the edge or a tensor.
    let edge = if EDGE.load(Relaxed) == THIRD { third } else { second };
    if !edge.is_multiple_of(8) || (EDGE.load(Relaxed) != UNKNOWN && !(stack..stack + FRAME).contains(&edge)) {
        return None;
    }
    // SAFETY: a reference to a tensor or to an edge, both of which begin with an address; or it lies on the stack above.
    let node = unsafe { *(edge as *const u64) };
    let offsets = OFFSETS.load(Relaxed);
    if EDGE.load(Relaxed) == UNKNOWN || offsets == 0 || node == 0 {
        LAST_EDGE.store(node, Relaxed);
        return None;
    }
    // SAFETY: calibration showed that this argument is an edge, so this is a node; the offsets lie within every node.
    let word = |offset: u64| unsafe { *((node + (offset & 255)) as *const u64) };
    let number = word(offsets >> 8);
    (number < NO_NUMBER).then(|| Node::new(word(offsets), number))
}

/// Returns a slot's original value. It is written before the slot, but another processor may read it a moment too early.
#[inline(always)]
fn next(held: &AtomicUsize) -> usize {
    loop {
        let next = held.load(Relaxed);
        if next != 0 {
            return next;
        }
        std::hint::spin_loop();
    }
}

/// Returns the name of the node that the thread runs, if it runs one; its tag is 0 if the node has no name.
#[inline(always)]
pub(crate) fn name_of_running(thread: &Thread) -> Option<AllocationName> {
    let node = thread.autograd.running.load(Relaxed);
    if node == 0 {
        return None;
    }
    let tag = if node == UNNAMED { 0 } else { tag_of(Node(node)) };
    Some(AllocationName { tag, phase: Phase::Backward, ..AllocationName::default() })
}

/// Returns the tag that the forward pass gave a node; 0 for none.
#[unsafe(link_section = ".text.hot.gpumem")]
#[inline(never)]
fn tag_of(node: Node) -> u32 {
    table().map_or(0, |table| table.look_up(node))
}

/// Gives the tag of an allocation to the node that the thread made last, unless that node has an entry. Tag 0 marks the node as
/// one without a name.
#[inline(always)]
pub(crate) fn name_last_node(thread: &Thread, tag: u32) {
    let mut id = thread.autograd.id.load(Relaxed);
    if id == 0 && tag == 0 {
        return; // possibly not a thread of PyTorch
    }
    let Some(table) = table() else { return };
    // SAFETY: both are addresses of functions that return an integer (`take_slot`).
    let Some(next @ 1..) = (unsafe { call_at::<u64>(PEEK_AT) }) else { return };
    if id == 0 {
        // SAFETY: as above.
        id = unsafe { call_at(&THREAD_AT) }.unwrap_or(0);
        thread.autograd.id.store(id, Relaxed);
    }
    table.note(Node::new(id, next - 1), tag);
}

/// Replaces the tags of nodes by those that `new_tag` returns; 0 keeps a tag.
pub(crate) fn rename(new_tag: impl FnMut(u32) -> u32) {
    if let Some(table) = table() {
        table.rename(new_tag);
    }
}

fn is_library(file: &[u8]) -> bool {
    file == b"libtorch_cpu.so"
}

/// Whether libtorch_cpu is loaded. Returns false if the lock of `callers::in_loader` is not free.
pub fn is_torch_loaded() -> bool {
    NEXT.load(Acquire) != 0 || slot::with(is_library, |_| ()).is_some()
}

/// Finds the engine and replaces the slot of `Engine::evaluate_function`, once. Not for callbacks: it allocates.
pub(crate) fn attach(core: &Core) {
    let enabled = core.settings.layers;
    if SEARCHED.load(Acquire) || !enabled.torch || !enabled.autograd {
        return;
    }
    if TABLE.load(Acquire).is_null() {
        let Some(table) = Table::new() else {
            return status::report_layer(
                Layer::Autograd,
                LayerState::Failed,
                "no memory for the table of nodes",
            );
        };
        TABLE.store(Box::into_raw(Box::new(table)).cast(), Release);
    }
    let (state, reason) = match slot::with(is_library, take_slot) {
        None | Some(Ok(SlotResult::NotYet)) => return,
        Some(Ok(SlotResult::Replaced)) => {
            (LayerState::Degraded, "the offset of autograd's node numbers is unknown so far")
        }
        Some(Ok(SlotResult::NoSlot)) => {
            (LayerState::Failed, "this PyTorch calls Engine::evaluate_function directly")
        }
        Some(Err(reason)) => (LayerState::Failed, reason),
    };
    let grad_mode = slot::with(|file| file == b"libc10.so", |image| image.defines(GRAD_MODE));
    sequence::GRAD_MODE_AT.store(grad_mode.flatten().unwrap_or(0), Release);
    if !SEARCHED.swap(true, AcqRel) {
        status::report_layer(Layer::Autograd, state, reason);
    }
}

fn take_slot(image: &Image<'_>) -> Result<SlotResult, &'static str> {
    let evaluates = image.defines(EVALUATE).ok_or("this PyTorch has no known Engine::evaluate_function")?;
    let peek = image.defines(PEEK).ok_or("this PyTorch does not count its nodes")?;
    let thread = image.defines(THREAD).ok_or("this PyTorch does not count its threads")?;
    let [Some(slot)] = image.slots(&[&[EVALUATE]]) else { return Ok(SlotResult::NoSlot) };
    let taken = slot::replace(image, slot, evaluate as *const () as usize, NEXT, || Some(evaluates));
    if taken == SlotResult::Replaced {
        THREAD_AT.store(thread, Release);
        PEEK_AT.store(peek, Release);
        // Without `rebase_history`, nodes of in-place operations have the name of their neighbour.
        if let (Some(rebases), [Some(slot)]) = (image.defines(REBASE), image.slots(&[&[REBASE]])) {
            slot::replace(image, slot, rebase as *const () as usize, &NEXT_REBASE, || Some(rebases));
        }
    }
    Ok(taken)
}

/// Returns the number that the calling thread's next node will have; `None` without an engine.
pub(crate) fn next_number() -> Option<u64> {
    // SAFETY: as in `name_last_node`.
    unsafe { call_at(PEEK_AT) }
}

/// Finds the offsets of a node's number and thread id. Returns whether they are known now.
///
/// `objects` are Python objects of nodes that the calling thread has made, numbered from `first`. The last numbered one is an
/// addition, the others are not. The last object is a node that accumulates gradients and has no number.
///
/// # Safety
/// The objects must exist.
pub(crate) unsafe fn calibrate(objects: &[u64], first: u64) -> bool {
    // SAFETY: as in `name_last_node`.
    let Some(thread) = (unsafe { call_at(&THREAD_AT) }) else { return false };
    let found = gradient::HEADERS.into_iter().find_map(|header| find_offsets(header, objects, first, thread));
    let (state, reason) = match found {
        Some((number, thread, addition)) => {
            ADDITION.store(addition, Release);
            EDGE.store(find_edge(objects), Release);
            OFFSETS.store((number * 8 * 256 + thread * 8) as u64, Release);
            (LayerState::Active, "")
        }
        None => (LayerState::Degraded, "the offset of node numbers was not found in this PyTorch"),
    };
    status::report_layer(Layer::Autograd, state, reason);
    found.is_some()
}

/// Finds which argument of `rebase_history` is the edge. PyTorch's last call was for the last numbered node of `objects`.
fn find_edge(objects: &[u64]) -> u8 {
    let last = LAST_EDGE.load(Relaxed);
    let is_node = |header: &u16| {
        let object = Pointer::new(*objects.iter().nth_back(1)?)?;
        Some(Careful::new()?.word(object, *header)? == last)
    };
    match (last, cfg!(target_arch = "x86_64")) {
        (0, _) => UNKNOWN, // `rebase_history` was not called
        _ if gradient::HEADERS.iter().any(|header| is_node(header) == Some(true)) => SECOND,
        (_, true) => THIRD,
        (_, false) => UNKNOWN,
    }
}

/// Returns the indexes of two words of a node, the number and the thread id. Also returns the first word of additions; 0 if
/// other nodes have the same one. `header` is the size of the header of Python objects.
fn find_offsets(header: u16, objects: &[u64], first: u64, thread: u64) -> Option<(usize, usize, u64)> {
    let (accumulates, numbered) = objects.split_last()?;
    // With fewer nodes, other words could match by chance. A failed read ends the search.
    if numbered.len() < 3 || thread == 0 {
        return None;
    }
    let memory = Careful::new()?;
    let node = |object: &u64| -> Option<[u64; WORDS]> {
        let at = memory.pointer(Pointer::new(*object)?, header)?;
        let mut words = [0; WORDS];
        for (word, offset) in words.iter_mut().zip((0..).step_by(8)) {
            *word = memory.word(at, offset)?;
        }
        Some(words)
    };
    let nodes: Vec<[u64; WORDS]> = numbered.iter().map(node).collect::<Option<_>>()?;
    let last = node(accumulates)?;
    let is_number = |&word: &usize| {
        nodes.iter().zip(first..).all(|(node, number)| node[word] == number) && last[word] >= NO_NUMBER
    };
    let number = (0..WORDS).find(is_number)?;
    let is_thread = |&word: &usize| nodes.iter().chain([&last]).all(|node| node[word] == thread);
    let behind = number + THREAD_BEHIND;
    let thread = if behind < WORDS && is_thread(&behind) {
        behind
    } else {
        let mut words = (0..WORDS).filter(is_thread);
        words.next().filter(|_| words.next().is_none())?
    };
    let (addition, others) = nodes.split_last()?;
    let is_distinct = others.iter().all(|node| node[0] == others[0][0] && node[0] != addition[0]);
    Some((number, thread, if is_distinct { addition[0] } else { 0 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const THREAD: u64 = 1;
    const ADDS: u64 = 0x7f00_0000_2000;

    /// A node with PyTorch's layout: `lead` words, number, depth, whether it has a parent, thread.
    fn node(lead: usize, number: u64, depth: u64) -> Vec<u64> {
        let mut words = vec![if depth == 4 { ADDS } else { 0x7f00_0000_1000 }; lead];
        words.extend([number, depth, u64::from(depth != 4), THREAD, 0, 0, 0, 0, 0, 0, 0, 0]);
        words
    }

    fn find(objects: &[u64], first: u64, thread: u64) -> Option<(usize, usize, u64)> {
        gradient::HEADERS.into_iter().find_map(|header| find_offsets(header, objects, first, thread))
    }

    /// Finds the offsets in objects with a header of `header` words.
    fn offsets_behind(header: usize, lead: usize, first: u64) -> Option<(usize, usize, u64)> {
        let mut nodes: Vec<Vec<u64>> = (0..4).map(|at| node(lead, first + at, at + 1)).collect();
        nodes.push(node(lead, u64::MAX, 0));
        let object = |node: &Vec<u64>| [vec![1; header], vec![node.as_ptr() as u64]].concat();
        let objects: Vec<Vec<u64>> = nodes.iter().map(object).collect();
        let objects: Vec<u64> = objects.iter().map(|object| object.as_ptr() as u64).collect();
        find(&objects, first, THREAD)
    }

    fn offsets(lead: usize, first: u64) -> Option<(usize, usize, u64)> {
        offsets_behind(2, lead, first)
    }

    #[test]
    fn the_number_and_the_thread_are_found_wherever_they_are() {
        for lead in 1..6 {
            assert_eq!(offsets(lead, 1000), Some((lead, lead + 3, ADDS)));
            // With the first numbers of a process, a node's depth increases as its number does.
            assert_eq!(offsets(lead, 1), Some((lead, lead + 3, ADDS)));
            // A free-threaded build.
            assert_eq!(offsets_behind(4, lead, 1000), Some((lead, lead + 3, ADDS)));
        }
    }

    #[test]
    fn what_is_no_node_is_not_read_as_one() {
        assert_eq!(find(&[8, 8, 8, 8], 0, THREAD), None);
        assert_eq!(find(&[], 0, THREAD), None);
        let object = [1_u64, 2, 3];
        assert_eq!(find(&[object.as_ptr() as u64; 5], 0, THREAD), None);
        assert_eq!(offsets(12, 1000), None, "beyond what is looked at");
        assert_eq!(offsets_behind(3, 2, 1000), None, "in no object that is known");
    }
}
