//! Names for the backward pass, with a library that has the parts of PyTorch that the agent uses.

use crate::common::daemon::{Folder, agent};
use gpumem::base::row::AllocationName;
use gpumem::naming::autograd;
use gpumem::record::status;
use gpumem::threads;
use gpumem::{gpumem_autograd_calibrate, gpumem_autograd_number};
use gpumem_test_support::alone;
use gpumem_wire::{Layer, LayerState, Phase};
use std::ffi::{CStr, CString, c_int, c_void};
use std::process::Command;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

type Work = extern "C" fn(*mut c_void) -> c_int;
type Make = unsafe extern "C" fn(Option<Work>, *mut c_void) -> u64;
type Run = unsafe extern "C" fn(u64) -> c_int;

#[derive(Clone, Copy)]
struct Torch {
    make: Make,
    add: Make,
    accumulate: Make,
    run: Run,
}

fn build(folder: &Folder) -> Option<CString> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/libtorch_cpu.cpp");
    let library = folder.0.join("libtorch_cpu.so");
    let mut compiler = Command::new("c++");
    let arguments = ["-std=c++14", "-O2", "-shared", "-fPIC", "-Wl,-z,lazy", "-o"];
    match compiler.args(arguments).arg(&library).arg(source).status() {
        Ok(status) => {
            assert!(status.success());
            CString::new(library.to_str().expect("UTF-8")).ok()
        }
        Err(_) => {
            gpumem_test_support::skip("there is no C++ compiler here", "apt-get install g++");
            None
        }
    }
}

fn load(path: &CStr) -> Torch {
    // SAFETY: the test's own library, whose functions have these types.
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        assert!(!library.is_null());
        let symbol = |name: &CStr| libc::dlsym(library, name.as_ptr());
        Torch {
            make: std::mem::transmute::<*mut c_void, Make>(symbol(c"make_node")),
            add: std::mem::transmute::<*mut c_void, Make>(symbol(c"make_addition")),
            accumulate: std::mem::transmute::<*mut c_void, Make>(symbol(c"make_accumulate")),
            run: std::mem::transmute::<*mut c_void, Run>(symbol(c"run_node")),
        }
    }
}

fn now() -> AllocationName {
    let core = gpumem::driver::core::Core::get().expect("an agent");
    core.named(threads::current().expect("a place"))
}

/// Returns the name and phase that an allocation would get now.
fn name() -> (String, Phase) {
    let named = now();
    let core = gpumem::driver::core::Core::get().expect("an agent");
    (
        String::from_utf8_lossy(core.recorder.names.path(named.tag).unwrap_or_default()).into_owned(),
        named.phase,
    )
}

/// Runs `work` in a scope, like a module's call.
fn within<T>(scope: &str, work: impl FnOnce() -> T) -> T {
    let core = gpumem::driver::core::Core::get().expect("an agent");
    let thread = threads::current().expect("a place");
    core.push_scope(thread, scope.as_bytes());
    let value = work();
    core.pop_scope(thread);
    value
}

static SEEN: Mutex<Vec<(String, Phase)>> = Mutex::new(Vec::new());

fn seen() -> MutexGuard<'static, Vec<(String, Phase)>> {
    SEEN.lock().expect("nobody has panicked")
}

/// Node that allocates.
extern "C" fn allocate(_: *mut c_void) -> c_int {
    let name = name();
    seen().push(name);
    0
}

/// Node that allocates and throws.
extern "C" fn throw(_: *mut c_void) -> c_int {
    allocate(std::ptr::null_mut());
    1
}

/// Node that allocates, runs the given node, and allocates again, as a checkpoint does.
extern "C" fn run_inner(inner: *mut c_void) -> c_int {
    // SAFETY: a function and a node, both kept by the test.
    let (run, node) = unsafe { *inner.cast::<(Run, u64)>() };
    allocate(std::ptr::null_mut());
    // SAFETY: as above.
    let thrown = unsafe { run(node) };
    allocate(std::ptr::null_mut());
    thrown
}

const NOTHING: *mut c_void = std::ptr::null_mut();

fn backward(name: &str) -> (String, Phase) {
    (name.to_owned(), Phase::Backward)
}

#[test]
fn nodes_are_called_as_their_forward_pass_was() {
    alone(|| {
        let folder = Folder::new("autograd");
        let Some(path) = build(&folder) else { return };
        let core = agent(&folder.0.join("none.sock"), |_| ());
        assert_eq!(gpumem_autograd_number_now(), u64::MAX, "no PyTorch so far");
        let torch = load(&path);
        soon("PyTorch is seen", autograd::is_torch_loaded);
        soon("its nodes are counted", || gpumem_autograd_number_now() == 0);
        assert_eq!(status::layer(Layer::Autograd), Some(LayerState::Degraded));

        // Before the offsets of nodes are known, only the phase is.
        let early = within("early", || {
            // SAFETY: a function of the library.
            let node = unsafe { (torch.make)(Some(allocate), NOTHING) };
            now();
            node
        });
        // SAFETY: a node of the library.
        unsafe { (torch.run)(early) };
        assert_eq!(std::mem::take(&mut *seen()), [backward("")]);
        calibrate(torch);
        assert_eq!(status::layer(Layer::Autograd), Some(LayerState::Active));
        // SAFETY: as above.
        unsafe { (torch.run)(early) };
        assert_eq!(std::mem::take(&mut *seen()), [backward("early")]);

        on_another_thread(torch);
        inside_of_each_other(torch);
        in_scopes(torch);
        between_names(torch);
        behind_a_product(torch);
        through_exceptions(torch);
        by_thread(torch);
        // A thread that has run nodes returns to its earlier state.
        assert_eq!(name(), (String::new(), Phase::Unknown));
        assert_eq!(core.recorder.names.refused.load(std::sync::atomic::Ordering::Relaxed), 0);
    });
}

/// Waits for a condition. A search while the sender searches may time out and is repeated, as the bootstrap does.
fn soon(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(30), "{what}: not so");
        std::thread::yield_now();
    }
}

fn gpumem_autograd_number_now() -> u64 {
    // SAFETY: takes no arguments.
    unsafe { gpumem_autograd_number() }
}

/// Calibrates like the bootstrap: nodes in Python objects.
fn calibrate(torch: Torch) {
    let first = gpumem_autograd_number_now();
    // SAFETY: functions of the library.
    let nodes: Vec<u64> = unsafe {
        let made = [torch.make, torch.make, torch.make, torch.add, torch.accumulate];
        made.map(|make| make(None, NOTHING)).to_vec()
    };
    let objects: Vec<[u64; 3]> = nodes.iter().map(|&node| [1, 2, node]).collect();
    let objects: Vec<u64> = objects.iter().map(|object| object.as_ptr() as u64).collect();
    // SAFETY: the objects exist.
    let known = |first| unsafe { gpumem_autograd_calibrate(objects.as_ptr(), objects.len() as u32, first) };
    assert_eq!(known(first + 1), 0, "other numbers");
    assert_eq!(status::layer(Layer::Autograd), Some(LayerState::Degraded));
    assert_eq!(known(first), 1);
}

/// Forward pass here, backward pass on a thread of the engine. A node that accumulates gets the name of the node before it.
fn on_another_thread(torch: Torch) {
    let nodes: Vec<u64> = ["net/one", "net/two"]
        .into_iter()
        .flat_map(|scope| {
            within(scope, || {
                // SAFETY: functions of the library.
                let node = unsafe { (torch.make)(Some(allocate), NOTHING) };
                now(); // the operation's output
                // SAFETY: as above.
                [node, unsafe { (torch.make)(Some(allocate), NOTHING) }]
            })
        })
        .collect();
    std::thread::spawn(move || {
        for node in nodes.iter().rev() {
            // SAFETY: a function and nodes of the library.
            unsafe {
                (torch.run)(*node);
                (torch.run)((torch.accumulate)(Some(allocate), NOTHING));
            }
        }
        assert_eq!(name(), (String::new(), Phase::Unknown));
    })
    .join()
    .expect("no panic");
    let (one, two) = (backward("net/one"), backward("net/two"));
    let expected = [two.clone(), two.clone(), two.clone(), two, one.clone(), one.clone(), one.clone(), one];
    assert_eq!(std::mem::take(&mut *seen()), expected);
}

/// A checkpoint on the engine's thread: forward and backward passes inside of a node. The inner nodes have numbers of that
/// thread, which equal those of the outer ones.
fn inside_of_each_other(torch: Torch) {
    let mut inner = (torch.run, 0);
    let place = (&raw mut inner).cast::<c_void>();
    let outer = within("net/outer", || {
        // SAFETY: as above; `inner` lives until the node has run.
        let node = unsafe { (torch.make)(Some(run_inner), place) };
        now();
        node
    });
    let (place, outer_at) = (place as usize, outer);
    std::thread::spawn(move || {
        let node = within("net/inner", || {
            // SAFETY: as above.
            let node = unsafe { (torch.make)(Some(allocate), NOTHING) };
            now();
            node
        });
        // SAFETY: no other reference is in use now.
        unsafe { (*(place as *mut (Run, u64))).1 = node };
        // SAFETY: as above.
        unsafe {
            (torch.run)(outer_at);
            (torch.run)((torch.accumulate)(Some(allocate), NOTHING));
        }
    })
    .join()
    .expect("no panic");
    let (outer, inner) = (backward("net/outer"), backward("net/inner"));
    assert_eq!(std::mem::take(&mut *seen()), [outer.clone(), inner, outer.clone(), outer]);
}

/// Node with a hook that opens a scope. A scope opened outside of the node belongs to the caller.
extern "C" fn allocate_in_a_scope(_: *mut c_void) -> c_int {
    within("hook", || allocate(NOTHING));
    allocate(NOTHING)
}

fn in_scopes(torch: Torch) {
    let node = within("net/hooked", || {
        // SAFETY: as above.
        let node = unsafe { (torch.make)(Some(allocate_in_a_scope), NOTHING) };
        now();
        node
    });
    // SAFETY: as above.
    within("outside", || unsafe { (torch.run)(node) });
    let expected = [backward("outside/hook/net/hooked"), backward("net/hooked")];
    assert_eq!(std::mem::take(&mut *seen()), expected);
}

/// A node made outside of every module does not get the name of the last module.
fn between_names(torch: Torch) {
    // SAFETY: as above.
    let make = || unsafe { (torch.make)(Some(allocate), NOTHING) };
    let named = within("net/last", || {
        let node = make();
        now();
        node
    });
    let view = make();
    let loss = make();
    now();
    for node in [loss, view, named] {
        // SAFETY: as above.
        unsafe { (torch.run)(node) };
    }
    let expected = [backward(""), backward("net/last"), backward("net/last")];
    assert_eq!(std::mem::take(&mut *seen()), expected);
}

/// A bias added to the view of a product belongs to the product. A node that splits that view belongs to the next operation.
fn behind_a_product(torch: Torch) {
    for (second, expected) in [(torch.add, "net/attention/linear"), (torch.make, "net/attention")] {
        let node = |make: Make| {
            // SAFETY: as above.
            unsafe { make(Some(allocate), NOTHING) }
        };
        let product = within("net/attention/linear", || {
            let product = node(torch.make);
            now();
            product
        });
        let (view, behind) = (node(torch.make), node(second));
        let next = within("net/attention", || {
            let next = node(torch.make);
            now();
            next
        });
        for node in [next, behind, view, product] {
            // SAFETY: as above.
            unsafe { (torch.run)(node) };
        }
        let linear = backward("net/attention/linear");
        let expected = [backward("net/attention"), backward(expected), linear.clone(), linear];
        assert_eq!(std::mem::take(&mut *seen()), expected);
    }
}

/// A C++ exception passes through the hook, and afterwards the thread is in no node.
fn through_exceptions(torch: Torch) {
    let nodes = within("net/bad", || {
        // SAFETY: as above.
        let node = unsafe { (torch.make)(Some(throw), NOTHING) };
        now();
        node
    });
    for _ in 0..3 {
        // SAFETY: as above.
        assert_eq!(unsafe { (torch.run)(nodes) }, 1, "it was thrown and caught");
        assert_eq!(name(), (String::new(), Phase::Unknown));
    }
    let mut inner = (torch.run, nodes);
    let place = (&raw mut inner).cast::<c_void>();
    // SAFETY: as above.
    let outer = within("net/around", || unsafe {
        let node = (torch.make)(Some(run_inner), place);
        now();
        node
    });
    // SAFETY: as above.
    assert_eq!(unsafe { (torch.run)(outer) }, 1);
    let (bad, around) = (backward("net/bad"), backward("net/around"));
    let expected = [bad.clone(), bad.clone(), bad.clone(), around.clone(), bad, around];
    assert_eq!(std::mem::take(&mut *seen()), expected);
}

/// Two threads make nodes with the same numbers under different names.
fn by_thread(torch: Torch) {
    let make = move |scope: &'static str| {
        std::thread::spawn(move || {
            within(scope, || {
                (0..100)
                    .map(|_| {
                        // SAFETY: as above.
                        let node = unsafe { (torch.make)(Some(allocate), NOTHING) };
                        now();
                        node
                    })
                    .collect::<Vec<u64>>()
            })
        })
    };
    for (thread, scope) in [make("net/left"), make("net/right")].into_iter().zip(["net/left", "net/right"]) {
        for node in thread.join().expect("no panic") {
            // SAFETY: as above.
            unsafe { (torch.run)(node) };
        }
        let found = std::mem::take(&mut *seen());
        assert!(found.len() == 100 && found.iter().all(|found| *found == backward(scope)));
    }
}
