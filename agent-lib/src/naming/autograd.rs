//! The backward pass: what its nodes are called.
//!
//! PyTorch's engine calls `Engine::evaluate_function` for each node, through a slot of its own library. Ours stands there,
//! notes which node runs on this thread, and calls the original; exceptions of nodes pass through it. The node carries the
//! thread that made it and its number there (sequence.rs), at offsets that differ between releases: they are found
//! with a few nodes that the bootstrap makes, whose numbers are known. No graph is run for it: a process in which a
//! backward pass has run cannot fork children that run one.
//!
//! An operation that changes a tensor in place may allocate nothing, so that no allocation names its node. PyTorch calls `rebase_history`
//! with the node of each; ours stands in the slot of that too, and names the node after where the thread is.
//!
//! Nodes that accumulate gradients have no number. The engine runs them as soon as they can be, so they belong to the node
//! that ran before them on the thread.

use crate::base::env::Layers;
use crate::base::fault_injection;
use crate::base::hot::HOT_WORDS;
use crate::base::image::Image;
use crate::base::row::FrameName;
use crate::driver::core::Core;
use crate::driver::guard;
use crate::naming::gradient;
use crate::naming::sequence;
use crate::naming::sequence::{Node, Table};
use crate::naming::slot::{self, Taken};
use crate::record::status;
use crate::threads::Thread;
use gpumem_wire::{Layer, LayerState, Phase};
use std::arch::naked_asm;
use std::ffi::{CStr, c_void};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, AtomicUsize, Ordering::*};

const EVALUATE: &CStr = c"_ZN5torch8autograd6Engine17evaluate_functionERSt10shared_ptrINS0_9GraphTaskEEPNS0_4NodeERNS0_11InputBufferERKS2_INS0_10ReadyQueueEE";
/// `rebase_history(const Variable&, Edge)`: the edge, which begins with the address of a node, is handed over by its own address. Releases
/// differ in what it returns.
const REBASE: &CStr = c"_ZN5torch8autograd4impl14rebase_historyERKN2at6TensorENS0_4EdgeE";
const PEEK: &CStr = c"_ZN2at15sequence_number4peekEv";
const GRAD_MODE: &CStr = c"_ZN3c108GradMode10is_enabledEv";
const THREAD: &CStr = c"_ZN2at14RecordFunction15currentThreadIdEv";

/// Numbers from here on are none: nodes that accumulate have the largest.
const NO_NUMBER: u64 = 1 << 62;
/// Words of a node in which its number is looked for.
const WORDS: usize = 12;
/// Words between a node's number and its thread, in releases known so far.
const THREAD_BEHIND: usize = 3;

/// `Engine::evaluate_function`, five words.
type Evaluate = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, *mut c_void, *mut c_void, *mut c_void);
type Count = unsafe extern "C" fn() -> u64;

/// The engine was found, for better or worse.
static LOOKED: AtomicBool = AtomicBool::new(false);
/// What the slot held.
const NEXT: &AtomicUsize = &HOT_WORDS.next_evaluate;
/// What that of `rebase_history` held.
static NEXT_REBASE: AtomicUsize = AtomicUsize::new(0);
/// Of its arguments in registers, which one leads to the node; and while that is not known, what the candidates led to in the last call.
static EDGE: AtomicU8 = AtomicU8::new(UNKNOWN);
static LAST_EDGE: AtomicU64 = AtomicU64::new(0);
const UNKNOWN: u8 = 0;
/// Nothing is returned, or not through memory.
const SECOND: u8 = 1;
/// The first one is where the result is to be put.
const THIRD: u8 = 2;
/// Bytes of stack above a call in which its caller keeps an edge.
const FRAME: usize = 64 << 10;
const PEEK_AT: &AtomicUsize = &HOT_WORDS.next_number;
static THREAD_AT: AtomicUsize = AtomicUsize::new(0);
const TABLE: &AtomicPtr<()> = &HOT_WORDS.nodes;
/// Where a node has its number and its thread, in bytes: number << 8 | thread. 0 while that is not known.
const OFFSETS: &AtomicU64 = &HOT_WORDS.offsets;
/// What nodes of additions begin with, their class; 0 while that is not known.
const ADDITION: &AtomicU64 = &HOT_WORDS.addition;

/// No thread has that many nodes.
const UNNAMED: u64 = u64::MAX;

fn function(at: &AtomicUsize) -> Option<Count> {
    let address = at.load(Acquire);
    // SAFETY: 0, or a function without arguments that returns a count (`attach`).
    (address != 0).then(|| unsafe { std::mem::transmute::<usize, Count>(address) })
}

fn table() -> Option<&'static Table> {
    // SAFETY: null, or leaked by `attach`.
    unsafe { TABLE.load(Acquire).cast::<Table>().as_ref() }
}

/// A node is running; when it ends, in whatever way, the thread goes on with the one outside of it.
struct Running {
    thread: &'static Thread,
    node: u64,
    outer: u64,
    outer_scope: u32,
    outer_accumulating: u64,
}

impl Drop for Running {
    fn drop(&mut self) {
        let mine = &self.thread.autograd;
        mine.running.store(self.outer, Relaxed);
        mine.scope.store(self.outer_scope, Relaxed);
        mine.last.store(self.node, Relaxed);
        let accumulated = mine.accumulating.load(Relaxed);
        mine.accumulating.store(self.outer_accumulating, Relaxed);
        if accumulated != 0 {
            // The engine holds the node until its call has returned, or was left by an exception.
            guard::guard((), |core, thread| core.tell_gradient(thread, accumulated));
        }
    }
}

#[inline(always)]
fn enter(thread: &'static Thread, node: *const c_void) -> Running {
    let mine = &thread.autograd;
    let offsets = OFFSETS.load(Relaxed);
    let mut accumulating = 0;
    let name = if offsets == 0 {
        UNNAMED
    } else {
        // SAFETY: offsets within every node, as nodes of this process were looked at.
        let word = |offset: u64| unsafe { *node.byte_add((offset & 255) as usize).cast::<u64>() };
        let number = word(offsets >> 8);
        if number < NO_NUMBER {
            Node::new(word(offsets), number).adding(word(0) == ADDITION.load(Relaxed)).0
        } else {
            // SAFETY: the node that this thread is about to run.
            accumulating = unsafe { gradient::accumulating(node.cast(), mine.running.load(Relaxed) != 0) };
            mine.last.load(Relaxed).max(1)
        }
    };
    let running = Running {
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

/// Stands in the slot.
unsafe extern "C-unwind" fn evaluate(
    engine: *mut c_void,
    task: *mut c_void,
    node: *mut c_void,
    inputs: *mut c_void,
    queue: *mut c_void,
) {
    let _running = guard::guard(None, |_, thread| {
        fault_injection::at("torch.evaluate");
        Some(enter(thread, node))
    });
    // SAFETY: what the slot held; the same arguments.
    unsafe {
        let next: Evaluate = std::mem::transmute(next(NEXT));
        next(engine, task, node, inputs, queue);
    }
}

/// Stands in the slot of `rebase_history`: lets `rebased` look at the arguments and goes on to the function, as if that had been called.
///
/// # Safety
/// PyTorch's arguments.
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
    // Where the result is to be put is in x8 and no argument.
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

/// The second and third argument of a call, and the stack above it. Returns what to go on with.
unsafe extern "C" fn rebased(second: usize, third: usize, stack: usize) -> usize {
    guard::guard((), |core, thread| {
        fault_injection::at("torch.rebase");
        let named = core.named(thread); // which names the thread's last node
        let tag = if named.flags.0 == 0 { named.tag } else { 0 };
        // SAFETY: as our caller says.
        if let (Some(node), Some(table)) = (unsafe { node_of(second, third, stack) }, table()) {
            table.note(node, tag);
        }
    });
    next(&NEXT_REBASE)
}

/// The node of the edge that is the second or third argument; `None` while it is not known which, or if it has no number.
unsafe fn node_of(second: usize, third: usize, stack: usize) -> Option<Node> {
    let edge = match EDGE.load(Relaxed) {
        THIRD => third,
        _ => second, // or a tensor
    };
    if !edge.is_multiple_of(8) || (EDGE.load(Relaxed) != UNKNOWN && !(stack..stack + FRAME).contains(&edge)) {
        return None;
    }
    // SAFETY: a tensor, whose first word is its address, or an edge; or on the stack above.
    let node = unsafe { *(edge as *const u64) };
    let offsets = OFFSETS.load(Relaxed);
    if EDGE.load(Relaxed) == UNKNOWN || offsets == 0 || node == 0 {
        LAST_EDGE.store(node, Relaxed);
        return None;
    }
    // SAFETY: a node, as this one was found to be an edge; offsets within every node.
    let word = |offset: u64| unsafe { *((node + (offset & 255)) as *const u64) };
    let number = word(offsets >> 8);
    (number < NO_NUMBER).then(|| Node::new(word(offsets), number))
}

/// What a slot held: written before the slot was, but read on another processor, perhaps a moment too early.
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

/// What the thread's running node is called.
#[inline(always)]
pub(crate) fn here(thread: &Thread) -> Option<FrameName> {
    let node = thread.autograd.running.load(Relaxed);
    if node == 0 {
        return None;
    }
    let tag = if node == UNNAMED { 0 } else { table().map_or(0, |table| table.look_up(Node(node))) };
    Some(FrameName { tag, phase: Phase::Backward, ..FrameName::default() })
}

/// The thread has allocated under `tag`: so is called what it made last, unless it has a name. 0: under none, so that it does
/// not take the name of what was made before it.
#[inline(always)]
pub(crate) fn note_forward(thread: &Thread, tag: u32) {
    let mut id = thread.autograd.id.load(Relaxed);
    if id == 0 && tag == 0 {
        return; // maybe not one of PyTorch's
    }
    let (Some(peek), Some(table)) = (function(PEEK_AT), table()) else { return };
    // SAFETY: reads a word of the thread's own.
    let next = unsafe { peek() };
    if next == 0 {
        return;
    }
    if id == 0 {
        // SAFETY: reads, or counts up, a word.
        id = function(&THREAD_AT).map_or(0, |ask| unsafe { ask() });
        thread.autograd.id.store(id, Relaxed);
    }
    table.note(Node::new(id, next - 1), tag);
}

/// Tags of nodes that `new_tag` has another one for; 0: none.
pub(crate) fn rename(new_tag: impl FnMut(u32) -> u32) {
    if let Some(table) = table() {
        table.rename(new_tag);
    }
}

fn is_library(file: &[u8]) -> bool {
    file == b"libtorch_cpu.so"
}

/// Whether PyTorch is loaded.
pub fn is_seen() -> bool {
    NEXT.load(Acquire) != 0 || slot::with(is_library, |_| ()).is_some()
}

/// Before PyTorch is there, or if it is left alone.
pub(crate) fn say_absent(may: Layers) {
    if status::layer(Layer::Autograd).is_some() {
        return;
    }
    let (state, reason) = match (may.torch, may.autograd) {
        (false, _) => (LayerState::Off, "switched off with GPUMEM_TORCH=0"),
        (_, false) => (LayerState::Off, "switched off with GPUMEM_AUTOGRAD=0"),
        _ => (LayerState::Absent, "no PyTorch in this process"),
    };
    status::report_layer(Layer::Autograd, state, reason);
}

/// Looks for the engine and takes its slot, once. Not in a hook.
pub(crate) fn attach(core: &Core) {
    let may = core.settings.layers;
    if LOOKED.load(Acquire) || !may.torch || !may.autograd {
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
        None | Some(Ok(Taken::NotYet)) => return,
        Some(Ok(Taken::Ours)) => (LayerState::Degraded, "where nodes have their numbers is not known so far"),
        Some(Ok(Taken::NoSlot)) => {
            (LayerState::Failed, "this PyTorch calls Engine::evaluate_function directly")
        }
        Some(Err(reason)) => (LayerState::Failed, reason),
    };
    let grad_mode = slot::with(|file| file == b"libc10.so", |image| image.defines(GRAD_MODE));
    sequence::GRAD_MODE_AT.store(grad_mode.flatten().unwrap_or(0), Release);
    if !LOOKED.swap(true, AcqRel) {
        status::report_layer(Layer::Autograd, state, reason);
    }
}

fn take_slot(image: &Image<'_>) -> Result<Taken, &'static str> {
    let evaluates =
        image.defines(EVALUATE).ok_or("this PyTorch has no Engine::evaluate_function that is known")?;
    let peek = image.defines(PEEK).ok_or("this PyTorch does not count its nodes")?;
    let thread = image.defines(THREAD).ok_or("this PyTorch does not count its threads")?;
    let ours = evaluate as *const () as usize;
    let taken = slot::take(image, EVALUATE, evaluates, ours, NEXT);
    if taken == Taken::Ours {
        THREAD_AT.store(thread, Release);
        PEEK_AT.store(peek, Release);
        // Without it, nodes of in-place operations have the name of their neighbour.
        if let Some(rebases) = image.defines(REBASE) {
            slot::take(image, REBASE, rebases, rebase as *const () as usize, &NEXT_REBASE);
        }
    }
    Ok(taken)
}

/// The number that the calling thread's next node will have; `None` without an engine.
pub(crate) fn next_number() -> Option<u64> {
    // SAFETY: reads a word of the thread's own.
    function(PEEK_AT).map(|peek| unsafe { peek() })
}

/// Finds out where nodes have their numbers. `objects`: Python's objects of nodes that the calling thread has made,
/// numbered from `first` on, the last of them by an addition, the others by something else; and behind them one that
/// accumulates gradients. Whether it is known now.
///
/// # Safety
/// The objects exist.
pub(crate) unsafe fn calibrate(objects: &[u64], first: u64) -> bool {
    let Some(thread) = function(&THREAD_AT) else { return false };
    // SAFETY: reads, or counts up, a word.
    let thread = unsafe { thread() };
    let found = find_offsets(objects, first, thread);
    match found {
        Some((number, thread, addition)) => {
            ADDITION.store(addition, Release);
            EDGE.store(which_edge(objects), Release);
            OFFSETS.store((number * 8 * 256 + thread * 8) as u64, Release);
            status::report_layer(Layer::Autograd, LayerState::Active, "");
        }
        None => {
            let why = "nodes of this PyTorch do not have their numbers where they were looked for";
            status::report_layer(Layer::Autograd, LayerState::Degraded, why);
        }
    }
    found.is_some()
}

/// Which argument of `rebase_history` is the edge. Its last call on this thread was for the last numbered of these nodes.
fn which_edge(objects: &[u64]) -> u8 {
    let last = LAST_EDGE.load(Relaxed);
    let is_node = |header: &u64| {
        let memory = std::fs::File::open("/proc/self/mem").ok()?;
        let [node] = read::<1>(&memory, objects.iter().nth_back(1)?.checked_add(*header)?)?;
        Some(node == last)
    };
    match (last, cfg!(target_arch = "x86_64")) {
        (0, _) => UNKNOWN, // it was not called
        _ if HEADERS.iter().any(|header| is_node(header) == Some(true)) => SECOND,
        (_, true) => THIRD,
        (_, false) => UNKNOWN,
    }
}

/// Bytes of an object before what is its own: with a GIL the count of references and the type, without one more.
const HEADERS: [u64; 2] = [16, 32];

/// Which words of the nodes are the number and the thread, and what an addition begins with: 0 if its class is not told by that.
fn find_offsets(objects: &[u64], first: u64, thread: u64) -> Option<(usize, usize, u64)> {
    HEADERS.into_iter().find_map(|header| find_behind(header, objects, first, thread))
}

fn find_behind(header: u64, objects: &[u64], first: u64, thread: u64) -> Option<(usize, usize, u64)> {
    let (accumulates, numbered) = objects.split_last()?;
    // Fewer could have such words by chance; a read that fails ends it.
    if numbered.len() < 3 || thread == 0 {
        return None;
    }
    let memory = std::fs::File::open("/proc/self/mem").ok()?;
    let node = |object: &u64| -> Option<[u64; WORDS]> {
        let [at] = read::<1>(&memory, object.checked_add(header)?)?;
        read(&memory, at)
    };
    let nodes: Vec<[u64; WORDS]> = numbered.iter().map(node).collect::<Option<_>>()?;
    let last = node(accumulates)?;
    let is_number = |&word: &usize| {
        let right = |(node, at): (&[u64; WORDS], u64)| node[word] == first + at;
        nodes.iter().zip(0..).all(right) && last[word] >= NO_NUMBER
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
    let (adds, others) = nodes.split_last()?;
    let is_told = others.iter().all(|node| node[0] == others[0][0] && node[0] != adds[0]);
    Some((number, thread, if is_told { adds[0] } else { 0 }))
}

fn read<const COUNT: usize>(memory: &std::fs::File, at: u64) -> Option<[u64; COUNT]> {
    let mut words = [0; COUNT];
    for (index, word) in words.iter_mut().enumerate() {
        let mut bytes = [0; 8];
        memory.read_exact_at(&mut bytes, at.checked_add(index as u64 * 8)?).ok()?;
        *word = u64::from_ne_bytes(bytes);
    }
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    const THREAD: u64 = 1;
    const ADDS: u64 = 0x7f00_0000_2000;

    /// A node as PyTorch has them: `lead` words, number, depth, whether it has a parent, thread.
    fn node(lead: usize, number: u64, depth: u64) -> Vec<u64> {
        let mut words = vec![if depth == 4 { ADDS } else { 0x7f00_0000_1000 }; lead];
        words.extend([number, depth, u64::from(depth != 4), THREAD, 0, 0, 0, 0, 0, 0, 0, 0]);
        words
    }

    /// In objects with a header of so many words.
    fn offsets_behind(header: usize, lead: usize, first: u64) -> Option<(usize, usize, u64)> {
        let mut nodes: Vec<Vec<u64>> = (0..4).map(|at| node(lead, first + at, at + 1)).collect();
        nodes.push(node(lead, u64::MAX, 0));
        let object = |node: &Vec<u64>| [vec![1; header], vec![node.as_ptr() as u64]].concat();
        let objects: Vec<Vec<u64>> = nodes.iter().map(object).collect();
        let objects: Vec<u64> = objects.iter().map(|object| object.as_ptr() as u64).collect();
        find_offsets(&objects, first, THREAD)
    }

    fn offsets(lead: usize, first: u64) -> Option<(usize, usize, u64)> {
        offsets_behind(2, lead, first)
    }

    #[test]
    fn the_number_and_the_thread_are_found_wherever_they_are() {
        for lead in 1..6 {
            assert_eq!(offsets(lead, 1000), Some((lead, lead + 3, ADDS)));
            // The first numbers of a process: the depth of a node counts as they do.
            assert_eq!(offsets(lead, 1), Some((lead, lead + 3, ADDS)));
            // Without a GIL.
            assert_eq!(offsets_behind(4, lead, 1000), Some((lead, lead + 3, ADDS)));
        }
    }

    #[test]
    fn what_is_no_node_is_not_read_as_one() {
        assert_eq!(find_offsets(&[8, 8, 8, 8], 0, THREAD), None);
        assert_eq!(find_offsets(&[], 0, THREAD), None);
        let object = [1_u64, 2, 3];
        assert_eq!(find_offsets(&[object.as_ptr() as u64; 5], 0, THREAD), None);
        assert_eq!(offsets(12, 1000), None, "beyond what is looked at");
        assert_eq!(offsets_behind(3, 2, 1000), None, "in no object that is known");
    }
}
