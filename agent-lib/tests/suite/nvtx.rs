//! NVTX ranges of programs, as the agent records them. Two libraries that contain NVTX (a new and an old one) load the shared
//! library as NVTX would. It is the second copy in this process, so it forwards to the first.

use crate::common::cupti::*;
use crate::common::daemon::{Daemon, Folder, agent};
use gpumem_test_support::alone;
use gpumem_wire::{Layer, LayerState};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: u64 = 1 << 20;
type Handle = *mut c_void;

/// A library that contains NVTX.
struct Client(Handle);

macro_rules! calls {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        #[allow(non_snake_case)]
        impl Client {
            $(fn $name(&self, $($arg: $type),*) -> $result {
                let name = concat!(stringify!($name), "\0");
                // SAFETY: the client's function of that name has this type.
                unsafe {
                    let found = libc::dlsym(self.0, name.as_ptr().cast());
                    assert!(!found.is_null(), "{name}");
                    std::mem::transmute::<Handle, unsafe extern "C" fn($($type),*) -> $result>(found)($($arg),*)
                }
            })*
        }
    };
}

calls! {
    is_injected() -> c_int;
    version_told() -> u32;
    nvtxRangePushA(text: *const c_char) -> c_int;
    nvtxRangePushW(text: *const u32) -> c_int;
    nvtxRangePop() -> c_int;
    nvtxMarkA(text: *const c_char) -> ();
    nvtxRangeStartA(text: *const c_char) -> u64;
    nvtxRangeEnd(id: u64) -> ();
    nvtxDomainCreateA(name: *const c_char) -> Handle;
    nvtxDomainCreateW(name: *const u32) -> Handle;
    nvtxDomainRegisterStringA(domain: Handle, text: *const c_char) -> Handle;
    nvtxDomainRangePop(domain: Handle) -> c_int;
    push_event(domain: Handle, size: u16, kind: i32, message: *const c_void) -> c_int;
}

impl Client {
    fn build(folder: &Folder, name: &str, flags: &[&str]) -> Option<Self> {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nvtx/client.c");
        let library = folder.0.join(name);
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&library).arg(source);
        let Ok(status) = compiler.args(flags).arg("-ldl").status() else {
            gpumem_test_support::skip("there is no C compiler here", "apt-get install gcc");
            return None;
        };
        assert!(status.success(), "the client does not compile");
        let path = CString::new(library.to_str().expect("a path")).expect("no 0");
        // SAFETY: the test's own library, without initialisers.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null());
        Some(Client(handle))
    }

    fn push(&self, text: &CStr) -> c_int {
        self.nvtxRangePushA(text.as_ptr())
    }

    fn push_in(&self, domain: Handle, text: &CStr) -> c_int {
        self.push_event(domain, 48, 1, text.as_ptr().cast())
    }
}

fn library() -> PathBuf {
    let here = std::env::current_exe().expect("a path");
    let folders = here.ancestors().skip(1).take(2);
    let file = folders.map(|folder| folder.join("libgpumem.so")).find(|file| file.exists());
    file.expect("the library lies beside the test")
}

#[test]
fn ranges_are_scopes() {
    alone(|| {
        let folder = Folder::new("nvtx");
        let socket = folder.0.join("agent.sock");
        let daemon = Daemon::listen(&socket);
        // SAFETY: no other thread runs yet.
        unsafe { std::env::set_var("NVTX_INJECTION64_PATH", library()) };
        let core = agent(&socket, |settings| {
            settings.nvtx_domains = vec!["ours".to_owned(), "wide\u{e9}".to_owned()];
            settings.nvtx_ranges = true;
            settings.layers.nvtx = true;
            settings.nvtx_injection = Some(library());
        });
        let mut peer = daemon.accept();
        peer.resync(1);
        let layer = || gpumem::record::status::layers().into_iter().find(|said| said.layer == Layer::Nvtx);
        peer.until("the layer", |_| layer().is_some());
        let said = layer().expect("said");
        assert_eq!((said.state, &*said.reason), (LayerState::Absent, "the program has made no NVTX call"));

        let Some(new) = Client::build(&folder, "new.so", &[]) else { return };
        let Some(old) = Client::build(&folder, "old.so", &["-DVERSION2"]) else { return };
        assert_eq!((new.is_injected(), new.version_told()), (1, 3));
        assert_eq!((old.is_injected(), old.version_told()), (1, 0));
        context(CONTEXT, 0);
        let mut next = 0x7000_0000;
        let mut expected = std::collections::BTreeMap::new();
        let mut expect = |tag: &str| {
            alloc(next, MIB);
            next += 0x100_0000;
            *expected.entry(tag.to_owned()).or_insert(0) += MIB as i64;
        };

        // Depths as NVTX defines them: of the range that begins, and of the one that ends. Two libraries share one stack.
        assert_eq!(new.push(c"step"), 0);
        assert_eq!(old.push(c"forward"), 1);
        expect("step/forward");
        assert_eq!(old.nvtxRangePop(), 1);
        expect("step");
        // With the C API.
        // SAFETY: a C string.
        unsafe { gpumem::gpumem_push(c"scope".as_ptr()) };
        assert_eq!(new.push(c"inner"), 1);
        expect("step/scope/inner");
        assert_eq!(new.nvtxRangePop(), 1);
        // SAFETY: takes no arguments.
        unsafe { gpumem::gpumem_pop() };
        assert_eq!(new.nvtxRangePop(), 0);
        assert_eq!(new.nvtxRangePop(), -1, "nothing is open");
        expect("");

        // Domains: the same name is the same domain in every library; each pop closes the last range of the same domain.
        let ours = new.nvtxDomainCreateA(c"ours".as_ptr());
        assert_eq!(ours, old.nvtxDomainCreateA(c"ours".as_ptr()));
        let wide: Vec<u32> = "wide\u{e9}\0".chars().map(u32::from).collect();
        assert!(new.nvtxDomainCreateW(wide.as_ptr()) as usize > 1);
        let theirs = new.nvtxDomainCreateA(c"NCCL".as_ptr());
        assert_eq!(new.push_in(theirs, c"ncclAllReduce"), -2, "left out");
        expect("");
        assert_eq!(new.nvtxDomainRangePop(theirs), -2);
        // SAFETY: C strings.
        let ranges = |value: &CStr| unsafe { gpumem::gpumem_configure(c"ranges".as_ptr(), value.as_ptr()) };
        assert_eq!(ranges(c"on"), 1);
        assert_eq!(new.push_in(ours, c"a"), 0);
        assert_eq!(new.push(c"b"), 0);
        assert_eq!(new.nvtxDomainRangePop(ours), 0, "beneath another one");
        expect("a/b"); // it keeps its original path
        assert_eq!(new.nvtxRangePop(), 0);
        expect("");
        assert_eq!(ranges(c"off"), 1);

        // Registered strings, also in a second library; wide texts; attributes that end before the message; no message.
        let text = new.nvtxDomainRegisterStringA(ours, c"registered".as_ptr());
        old.push_in(ours, c"outer");
        old.push_event(ours, 48, 3, text);
        expect("outer/registered");
        old.nvtxDomainRangePop(ours);
        old.nvtxDomainRangePop(ours);
        let wide: Vec<u32> = "h\u{f6}he\0".chars().map(u32::from).chain([0xd800, 0]).collect();
        new.nvtxRangePushW(wide.as_ptr());
        assert_eq!(new.push_event(std::ptr::null_mut(), 40, 1, 8 as *const c_void), 1);
        assert_eq!(new.push_event(std::ptr::null_mut(), 48, 77, 8 as *const c_void), 2);
        assert_eq!(new.nvtxRangePushA(std::ptr::null()), 3);
        expect("h\u{f6}he");
        (0..4).for_each(|level| assert_eq!(new.nvtxRangePop(), 3 - level));

        // More than the stack holds: the innermost that fit count, and the depth stays right.
        for level in 0..70 {
            assert_eq!(if level % 2 == 0 { new.push(c"d") } else { new.push_in(ours, c"o") }, level / 2);
        }
        for level in (0..35).rev() {
            assert_eq!(new.nvtxRangePop(), level);
        }
        for level in (0..35).rev() {
            assert_eq!(new.nvtxDomainRangePop(ours), level);
        }
        expect("");

        // Ranges of the process: for threads without any other name, marked as inherited.
        let first = new.nvtxRangeStartA(c"epoch".as_ptr());
        let second = old.nvtxRangeStartA(c"batch".as_ptr());
        assert!(first != 0 && second != first);
        expect("epoch/batch");
        new.nvtxRangeEnd(second);
        expect("epoch");
        new.nvtxRangeEnd(first);
        new.nvtxRangeEnd(12345);
        expect("");
        new.nvtxMarkA(c"here".as_ptr());

        // Names with numbers: unchanged at first, then without the numbers.
        for number in 0..6000 {
            let name = CString::new(format!("iteration {number}")).expect("no 0");
            new.push(&name);
            new.nvtxRangePop();
        }
        new.push(c"iteration 17");
        expect("iteration 17");
        new.nvtxRangePop();
        new.push(c"iteration 5999");
        expect("iteration #");
        new.nvtxRangePop();

        peer.catch_up();
        assert_eq!(peer.tags(), expected);
        // Only allocations of a thread without its own name have the process's name.
        let cells = peer.view().cells;
        let inherited = cells.iter().filter(|cell| cell.inherited).filter_map(|cell| cell.tag.as_deref());
        assert_eq!(inherited.collect::<Vec<_>>(), ["epoch/batch", "epoch"]);
        // Each range has its own end, in any order.
        let own = peer.ledger.own(peer.key);
        let told = own.ranges.iter().map(|range| (range.name.as_deref(), range.count, range.open));
        assert_eq!(told.collect::<Vec<_>>(), [(Some("a"), 1, 0), (Some("a/b"), 1, 0)]);
        let times = |at: usize| (own.spans[at].2, own.spans[at].3);
        assert!(times(0).0 < times(1).0 && times(0).1 < times(1).1, "{own:?}");
        assert_eq!(own.ranges_broken, 0);
        assert_eq!(peer.seen.iter().filter(|kind| *kind == "Marker").count(), 1);
        assert!(core.recorder.names.refused.load(std::sync::atomic::Ordering::Relaxed) == 0);
        peer.until("the layer", |_| layer().is_some_and(|said| said.state == LayerState::Active));
        let reason = layer().expect("said").reason;
        let wanted = "ranges of the default domain and ours, wide\u{e9}; other domains are left out (GPUMEM_NVTX_DOMAINS)";
        assert_eq!(reason, wanted);
    });
}
