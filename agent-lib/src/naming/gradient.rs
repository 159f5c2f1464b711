//! Identifies the memory of a gradient as soon as autograd has accumulated it.
//!
//! A leaf is a tensor that no operation has computed, e.g. a parameter. The node that accumulates its gradient holds the leaf,
//! which leads to the gradient and to the block of memory that the gradient lies in:
//!
//! ```text
//! AccumulateGrad -> TensorImpl of the leaf -> AutogradMeta -> TensorImpl of the gradient -> StorageImpl -> address
//! ```
//!
//! The offsets differ between releases. The agent's Python code makes a few leaves on the CPU, and the offsets are found by
//! reading them through a pipe. If the layout is not found, this feature stays off, and gradients are identified at the next
//! phase (ledger/src/rules/derive.rs). At run time, the words are read on the thread that runs the node, which holds the leaf.
//! PyTorch does not allow another thread to change the leaf's gradient meanwhile.
//!
//! A reentrant checkpoint runs a backward pass inside of a node. The input of the checkpointed part is a leaf there, too, but
//! its gradient is passed on and not kept. So in such a pass, a leaf made in a forward or backward pass is ignored.
//!
//! A gradient gets the name of its parameter, once the agent's Python code has named the parameter. The name of the running
//! module is not reliable: a call may use another module's parameter (`F.linear(x, self.proj.weight)`), and several modules may
//! share tied parameters.
//!
//! The agent looks for the gradient when the node ends, allocates or runs out of memory: hooks of the leaf run inside of the
//! node.

use crate::base::row::{Key, first_use};
use crate::driver::core::Core;
use crate::naming::python;
use crate::naming::python::memory::{Careful, Memory, Plain, Pointer};
use crate::record::live::FoundRow;
use crate::threads::Thread;
use gpumem_wire::{Phase, Role};
use std::sync::atomic::{AtomicU64, Ordering::*};

/// The five offsets of the diagram above, in words of 8 bytes, `BITS` bits each; 0 while they are unknown.
static PATH: AtomicU64 = AtomicU64::new(0);
/// The first word (vtable pointer) of nodes that accumulate gradients; 0 while it is unknown.
static CLASS: AtomicU64 = AtomicU64::new(0);

const BITS: u32 = 12;
/// Number of a node's words that are searched for the leaf, which lies behind the shapes of its inputs.
const NODE: u16 = 192;
/// Number of words to search in each other object of the diagram.
const OBJECT: u16 = 20;
/// Bytes of a Python object's header: reference count and type in builds with a GIL, more in free-threaded builds.
pub(super) const HEADERS: [u16; 2] = [16, 32];
/// Number of words after the header of a tensor's Python object that are searched for the address of its TensorImpl.
const TENSOR: u16 = 4;

/// PyTorch's allocator splits a large block if more than this number of bytes stays unused.
const SPLIT_ABOVE: u64 = 1 << 20;

/// Offsets in words, in the order of the diagram in the module's docs.
type Offsets = [u16; 5];

/// An example: the Python objects of a node, of its leaf and of the leaf's gradient, and the address of the gradient's memory.
pub(crate) type Example = [u64; 4];

/// Finds the offsets with a few examples and uses them from now on. Returns whether they were found.
pub(crate) fn calibrate(examples: &[Example]) -> bool {
    let find = |memory| HEADERS.into_iter().find_map(|header| find_path(&memory, header, examples));
    let found = Careful::new().and_then(find);
    let (class, path) = found.unwrap_or_default();
    let packed = path.iter().fold(0, |packed, &offset| packed << BITS | u64::from(offset));
    PATH.store(packed, Relaxed);
    CLASS.store(class, Release);
    found.is_some()
}

/// Flag in a node's address: the node runs inside of another node.
const NESTED: u64 = 1;

/// Returns `node`, with the flag `NESTED` if it `is_nested`. Returns 0 if the node does not accumulate a gradient, or while the
/// offsets are unknown.
///
/// # Safety
/// `node` must be a node that the calling thread runs.
#[inline(always)]
pub(crate) unsafe fn accumulating(node: *const u64, is_nested: bool) -> u64 {
    // SAFETY: the caller guarantees a running node.
    let accumulates = unsafe { *node } == CLASS.load(Relaxed);
    let flag = if is_nested { NESTED } else { 0 };
    if accumulates { node as u64 | flag } else { 0 }
}

fn word(memory: &impl Memory, at: u64, index: u16) -> Option<u64> {
    memory.word(Pointer::new(at)?, index * 8).filter(|&word| word != 0)
}

/// Whether a tensor's Python object contains the address of the TensorImpl `tensor`.
fn holds(memory: &impl Memory, object: u64, header: u16, tensor: u64) -> bool {
    (header / 8..header / 8 + TENSOR).any(|index| word(memory, object, index) == Some(tensor))
}

/// Finds the first word of nodes that accumulate gradients, and the first offsets that fit all examples. `header` is the size of
/// the header of Python objects.
fn find_path(memory: &impl Memory, header: u16, examples: &[Example]) -> Option<(u64, Offsets)> {
    // A single example could match by chance.
    if examples.len() < 2 {
        return None;
    }
    // Each of these lists has one word for each example.
    let follow = |objects: &[u64], offset: u16| -> Option<Vec<u64>> {
        objects.iter().map(|&object| word(memory, object, offset)).collect()
    };
    let follow_two = |objects: &[u64], (first, second)| follow(&follow(objects, first)?, second);
    let column = |index: usize| examples.iter().map(move |example| example[index]);
    let are_tensors = |tensors: &[u64], index: usize| {
        column(index).zip(tensors).all(|(object, &tensor)| holds(memory, object, header, tensor))
    };
    let nodes = follow(&column(0).collect::<Vec<_>>(), header / 8)?;
    let classes = follow(&nodes, 0)?;
    if classes.iter().any(|class| *class != classes[0]) {
        return None;
    }
    let is_leaf = |leaves: Vec<u64>| are_tensors(&leaves, 1);
    let leaf = (1..NODE).find(|&offset| follow(&nodes, offset).is_some_and(is_leaf))?;
    let leaves = follow(&nodes, leaf)?;
    let pairs = || (0..OBJECT).flat_map(|first| (0..OBJECT).map(move |second| (first, second)));
    let is_gradient = |gradients: Vec<u64>| are_tensors(&gradients, 2);
    let (meta, gradient) = pairs().find(|&pair| follow_two(&leaves, pair).is_some_and(is_gradient))?;
    let gradients = follow_two(&leaves, (meta, gradient))?;
    let is_data = |addresses: Vec<u64>| column(3).eq(addresses);
    let (storage, data) = pairs().find(|&pair| follow_two(&gradients, pair).is_some_and(is_data))?;
    Some((classes[0], [leaf, meta, gradient, storage, data]))
}

/// Returns the addresses of the memory of a node's gradient and of its leaf, by the arrows of the diagram in the module's docs. Each is
/// `None` while a word on the way is 0.
#[inline(always)]
fn follow(memory: &impl Memory, node: u64) -> (Option<u64>, Option<u64>) {
    let path = PATH.load(Relaxed);
    let step =
        |at: u64, step: u32| word(memory, at, (path >> ((4 - step) * BITS) & ((1 << BITS) - 1)) as u16);
    let memory_of = |tensor: u64| step(step(tensor, 3)?, 4);
    let Some(leaf) = step(node, 0) else { return (None, None) };
    let gradient = step(leaf, 1).and_then(|meta| step(meta, 2));
    (gradient.and_then(memory_of), memory_of(leaf))
}

/// Whether a gradient in a block of `bytes` gets the name of its leaf, a block of `own` bytes to which Python code has given `role`.
/// Not if that code has not named the leaf as a parameter, or if the gradient's block is larger: it may hold gradients of other
/// parameters, too. For parameters of `SPLIT_ABOVE` bytes or more, a difference up to `SPLIT_ABOVE` is allowed.
fn gets_name(role: Role, own: u64, bytes: u64) -> bool {
    let unused = if own < SPLIT_ABOVE { 0 } else { SPLIT_ABOVE };
    role == Role::Parameter && bytes <= own + unused
}

impl Core {
    /// Records that a block is a gradient, if the node that the thread runs has accumulated one. `accumulating` is the result
    /// of the function of that name.
    #[unsafe(link_section = ".text.hot.gpumem")]
    #[inline(never)]
    pub(crate) fn record_gradient(&self, thread: &Thread, accumulating: u64) {
        // SAFETY: calibration proved the layout, and the node holds the objects that are read (see the module's docs).
        let memory = unsafe { Plain::new() };
        let (Some(gradient), leaf) = follow(&memory, accumulating & !NESTED) else { return };
        let Some((key, row)) = self.row_of_tensor(gradient) else { return };
        let live = &self.recorder.live;
        let role = match live.extra(&row).later_use().0 {
            Role::Unknown => first_use(row.word(7)).0,
            role => role,
        };
        if !matches!(role, Role::Unknown | Role::Temporary) {
            return;
        }
        let leaf = leaf.and_then(|address| self.row_of_tensor(address)).map(|(_, leaf)| leaf);
        let born = leaf.map_or(Phase::Unknown, |leaf| first_use(leaf.word(7)).1);
        if accumulating & NESTED != 0 && matches!(born, Phase::Forward | Phase::Backward) {
            return;
        }
        // The gradient has the name of its parameter if Python code has named that. If a module was moved since, the parameter's
        // row has an outdated name. Then the gradient keeps the name with which its block was recorded.
        let is_named = |leaf: &FoundRow| {
            python::MODULES.has_current_parameters()
                && gets_name(live.extra(leaf).later_use().0, leaf.word(3), row.word(3))
        };
        let tag = leaf.filter(is_named).map_or(0, |leaf| leaf.word(5) as u32);
        self.record_retag(thread, key, Some(row), (Role::Gradient, Phase::Unknown), tag);
    }

    /// Returns the key and the row of the block or allocation that begins at an address.
    #[inline(always)]
    fn row_of_tensor(&self, address: u64) -> Option<(Key, FoundRow)> {
        for pool in self.torch.pools() {
            let key = Key::Block(pool.id, address);
            if let Some(found) = self.recorder.live.find_row(key) {
                return Some((key, found));
            }
        }
        // Without a caching allocator, each tensor is a separate allocation.
        let is_separate = self.torch.single_tensors.load(Relaxed) != 0;
        let key = Key::Allocation(address);
        is_separate.then(|| self.recorder.live.find_row(key).map(|found| (key, found))).flatten()
    }

    /// Calls `record_gradient` for the node that the thread still runs, if that node accumulates a gradient.
    #[inline(always)]
    pub(crate) fn record_gradient_of_running_node(&self, thread: &Thread) {
        let accumulating = thread.autograd.accumulating.load(Relaxed);
        if accumulating != 0 {
            self.record_gradient(thread, accumulating);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::naming::gradient;

    const CLASS: u64 = 0x7f00_0000_1000;

    /// Objects with PyTorch's layout at some offsets, together with the objects that they point to.
    struct Image {
        example: Example,
        node: u64,
        leaf_meta: *mut u64,
        _kept: Vec<Box<[u64]>>,
    }

    fn find(memory: &impl Memory, examples: &[Example]) -> Option<(u64, Offsets)> {
        HEADERS.into_iter().find_map(|header| find_path(memory, header, examples))
    }

    fn object(kept: &mut Vec<Box<[u64]>>, words: usize, at: &[(usize, u64)]) -> *mut u64 {
        let mut object = vec![0_u64; words].into_boxed_slice();
        at.iter().for_each(|&(index, word)| object[index] = word);
        kept.push(object);
        kept.last_mut().expect("pushed").as_mut_ptr()
    }

    fn image(address: u64, header: usize, [leaf, meta, gradient, storage, data]: [usize; 5]) -> Image {
        let mut kept = Vec::new();
        let mut make = |words: usize, at: &[(usize, u64)]| object(&mut kept, words, at);
        let its_storage = make(12, &[(data, address)]) as u64;
        let its_gradient = make(20, &[(0, 7), (storage, its_storage)]) as u64;
        let leaf_meta = make(8, &[(0, 8), (gradient, its_gradient)]);
        let leaf_storage = make(12, &[(data, address + 1)]) as u64;
        let its_leaf = make(20, &[(0, 7), (meta, leaf_meta as u64), (storage, leaf_storage)]) as u64;
        let node = make(leaf + 1, &[(0, CLASS), (1, address), (leaf, its_leaf)]) as u64;
        let place = header / 8;
        let python = |kept: &mut Vec<Box<[u64]>>, word: u64, at: usize| {
            object(kept, place + 4, &[(0, 1), (1, 2), (place + at, word)]) as u64
        };
        let objects =
            [(node, 0), (its_leaf, 1), (its_gradient, 1)].map(|(word, at)| python(&mut kept, word, at));
        let example = [objects[0], objects[1], objects[2], address];
        Image { example, node, leaf_meta, _kept: kept }
    }

    #[test]
    fn gradient_of_a_node_is_found_wherever_its_release_keeps_it() {
        let memory = Careful::new().expect("a pipe");
        for header in [16, 32] {
            for offsets in [[90, 4, 1, 3, 3], [40, 5, 2, 2, 2]] {
                let images: Vec<Image> =
                    (1..3).map(|number| image(0x10_0000 * number, header, offsets)).collect();
                let examples: Vec<Example> = images.iter().map(|image| image.example).collect();
                let found = find(&memory, &examples);
                assert_eq!(found, Some((CLASS, offsets.map(|offset| offset as u16))));
                assert!(gradient::calibrate(&examples));
                for (image, at) in images.iter().zip([0x10_0000, 0x20_0000]) {
                    assert_eq!(follow(&memory, image.node), (Some(at), Some(at + 1)));
                    // SAFETY: the word belongs to the image.
                    unsafe { *image.leaf_meta.add(offsets[2]) = 0 };
                    assert_eq!(follow(&memory, image.node), (None, Some(at + 1)), "no gradient so far");
                }
            }
        }
    }

    #[test]
    fn gradient_has_the_name_of_its_parameter_if_it_may_be_that_alone() {
        let large = 8 << 20;
        assert!(gets_name(Role::Parameter, 1024, 1024));
        assert!(!gets_name(Role::Parameter, 1024, 1536), "of several");
        assert!(gets_name(Role::Parameter, large, large + (1 << 20)), "not split off");
        assert!(!gets_name(Role::Parameter, large, large + (2 << 20)));
        assert!(!gets_name(Role::Unknown, 1024, 1024), "no sweep has seen the parameter");
        assert!(!gets_name(Role::Buffer, 1024, 1024));
    }

    #[test]
    fn other_objects_are_no_nodes() {
        let memory = Careful::new().expect("a pipe");
        let [one, two] = [1, 2].map(|number| image(0x10_0000 * number, 16, [90, 4, 1, 3, 3]));
        assert_eq!(find(&memory, &[one.example]), None, "one alone");
        assert_eq!(find(&memory, &[one.example, [two.example[0], 0, two.example[2], 7]]), None);
        let mut swapped = two.example;
        swapped.swap(1, 2);
        assert_eq!(find(&memory, &[one.example, swapped]), None);
        assert_eq!(find(&memory, &[[8; 4], [16; 4]]), None);
    }
}
