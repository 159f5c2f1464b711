//! Libraries are loaded and unloaded while calls are made and processes fork: callers are still named, and nothing blocks.

use crate::common::cupti::{CONTEXT, context};
use crate::common::daemon::{Folder, agent};
use gpumem::naming::callers;
use gpumem_test_support::alone;
use gpumem_wire::{Body, frame};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_void};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A driver function with its parameters on the stack and a callback before and after, and a library's function that calls it.
const SOURCE: &str = "
typedef unsigned long word;
typedef void callback(void *, unsigned, unsigned, const void *);
typedef void driver(callback *, unsigned id, word first, word second, word *out, word value);

void drive(callback *call, unsigned id, word first, word second, word *out, word value) {
    word params[2] = {first, second}, data[9] = {0};
    unsigned result = 0;
    data[2] = (word)params;
    data[5] = 0x5555001000, data[6] = 1, data[8] = 7;
    call(0, 1, id, data);
    if (out) *out = value;
    data[0] = 1, data[3] = (word)&result;
    call(0, 1, id, data);
}

void through(driver *drive, callback *call, word address) {
    static volatile int calls;
    word out = 0;
    drive(call, 243, (word)&out, 4096, &out, address);
    drive(call, 245, address, 0, 0, 0);
    calls = calls + 1;
}
";

/// Address of the temporary libraries' allocations. Bit 0 gives the library; bit 1 is set after an update of the table.
const PASSING: u64 = 0x6000_0000_0000;

type Callback = unsafe extern "C" fn(*mut c_void, u32, u32, *const c_void);
type Through = unsafe extern "C" fn(*mut c_void, Callback, u64);

/// The library is loaded while this value lives.
struct Loaded(*mut c_void);

// SAFETY: the loader does its own locking.
unsafe impl Sync for Loaded {}

impl Loaded {
    fn new(path: &str) -> Self {
        let path = CString::new(path).expect("no 0");
        // SAFETY: the path is a C string.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null(), "{path:?}");
        Loaded(library)
    }

    fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: a live handle and a C string.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!found.is_null(), "{name:?}");
        found
    }

    /// Allocates and frees at `address`.
    fn through(&self, driver: &Loaded, address: u64) {
        // SAFETY: these libraries' functions have these types.
        unsafe {
            let through = std::mem::transmute::<*mut c_void, Through>(self.symbol(c"through"));
            through(driver.symbol(c"drive"), gpumem::sources::cupti::callback, address);
        }
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: loaded by `new`.
        unsafe { libc::dlclose(self.0) };
    }
}

fn build(folder: &Folder, name: &str) -> Option<String> {
    let (source, library) = (folder.0.join("through.c"), folder.0.join(name));
    std::fs::write(&source, SOURCE).expect("a file");
    let mut cc = Command::new("cc");
    match cc.args(["-O2", "-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status() {
        Ok(status) => {
            assert!(status.success());
            Some(library.to_str().expect("UTF-8").to_owned())
        }
        Err(_) => {
            gpumem_test_support::skip("there is no C compiler here", "apt-get install gcc");
            None
        }
    }
}

/// Returns the caller's number of each allocation, in order, and the paths by number.
fn told(recording: &[u8]) -> (Vec<(u64, u16)>, BTreeMap<u16, String>) {
    let (mut calls, mut paths) = (Vec::new(), BTreeMap::new());
    for record in frame::records(&recording[frame::HEADER_BYTES..]) {
        let record = record.expect("a frame").expect("a kind");
        match record.body {
            Body::Module { path, .. } => {
                let other: Option<String> = paths.insert(record.stamp.module, path.to_owned());
                assert!(other.is_none_or(|other| other == path), "a number has two names");
            }
            Body::AllocEnd { address, .. } => calls.push((address, record.stamp.module)),
            _ => {}
        }
    }
    (calls, paths)
}

/// Forks while another thread continuously reads the loader's list; each child reads it, too. (Since glibc 2.31 the C
/// library makes this safe.)
fn forks(core: &'static gpumem::driver::core::Core) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                callers::update_table(core);
                std::thread::yield_now();
            }
        });
        for _ in 0..100 {
            // SAFETY: the child asks the loader once and ends; an alarm ends it if it hangs.
            unsafe {
                let child = libc::fork();
                if child == 0 {
                    libc::alarm(10);
                    libc::dl_iterate_phdr(Some(nothing), std::ptr::null_mut());
                    libc::_exit(0);
                }
                let mut status = 0;
                assert_eq!(libc::waitpid(child, &mut status, 0), child);
                assert_eq!(status, 0, "the child waits for a lock that nobody will give back");
            }
        }
        stop.store(true, Relaxed);
    });
}

unsafe extern "C" fn nothing(_: *mut libc::dl_phdr_info, _: usize, _: *mut c_void) -> i32 {
    0
}

#[test]
fn libraries_that_come_and_go_keep_their_numbers() {
    alone(|| {
        let folder = Folder::new("libraries");
        let names = ["libred.so", "libgreen.so"];
        let Some(red) = build(&folder, names[0]) else { return };
        let green = build(&folder, names[1]).expect("a compiler");
        let recording = folder.0.join("recording");
        let core = agent(&folder.0.join("nobody.sock"), |settings| settings.record = Some(recording.clone()));
        context(CONTEXT, 0);
        forks(core);

        // Runs longer than old tables are kept, while a thread calls continuously through a library that stays loaded.
        let driver = Loaded::new(&build(&folder, "libcuda.so.9").expect("a compiler"));
        let stays = Loaded::new(&build(&folder, "libblue.so").expect("a compiler"));
        let stop = AtomicBool::new(false);
        let tables = callers::TABLES.load(Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut address = 0x5000_0000_u64;
                while !stop.load(Relaxed) {
                    stays.through(&driver, address);
                    address += 4096;
                    std::thread::sleep(Duration::from_micros(20));
                }
            });
            let end = Instant::now() + Duration::from_millis(2500);
            let mut turn = 0_u64;
            while Instant::now() < end {
                let library = Loaded::new(if turn.is_multiple_of(2) { &red } else { &green });
                // Until the next check it may be taken for the other library at the same address.
                let looked = turn & 2 != 0;
                while looked && !callers::update_table(core) {}
                library.through(&driver, PASSING + turn % 4);
                turn += 1;
            }
            stop.store(true, Relaxed);
        });
        assert!(callers::TABLES.load(Relaxed) > tables + 4, "tables were made and thrown away");
        assert!(core.recorder.live.scan().count() == 0 && gpumem::record::status::armed());
        gpumem::sender::finish();
        let (calls, paths) = told(&std::fs::read(recording).expect("a recording"));
        let name = |module: u16| paths.get(&module).map_or("", String::as_str);
        let (passing, staying): (Vec<_>, Vec<_>) =
            calls.iter().partition(|(address, _)| *address & !3 == PASSING);
        assert!(passing.len() > 100 && staying.len() > 1000);
        assert!(staying.iter().all(|(_, module)| name(*module).ends_with("libblue.so")), "{paths:?}");
        for (address, module) in passing.into_iter().filter(|(address, _)| address & 2 != 0) {
            assert!(name(module).ends_with(names[(address & 1) as usize]), "{address:x}: {:?}", name(module));
        }
        assert!(paths.len() < 1000, "numbers are given sparingly: {}", paths.len());
    });
}
