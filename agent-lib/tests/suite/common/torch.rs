//! Libraries with the names and calls of PyTorch's, built by the test: reports go through slots of libc10_cuda.so.

use super::daemon::Folder;
use std::ffi::{CString, c_int, c_long, c_ulong, c_ushort, c_void};
use std::path::Path;
use std::process::Command;

const C10: &str = r#"
extern "C" {
int c10_reports, c10_ooms;
#ifdef SIGNED
void _ZN3c1027reportMemoryUsageToProfilerEPvlllNS_6DeviceE
#else
void _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE
#endif
(void *, long bytes, unsigned long, unsigned long, unsigned short) {
    c10_reports++;
    if (bytes == 777) throw 42;
}
void _ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE(long, unsigned long, unsigned long, unsigned short) { c10_ooms++; }
}
"#;

const CUDART: &str = r#"
extern "C" {
int cudart_busy;
int cudaEventRecord(void *, void *) { return 0; }
int cudaEventQuery(void *) { return cudart_busy ? 600 : 0; }
int cudaEventSynchronize(void *) { return 0; }
}
"#;

const C10_CUDA: &str = r#"
typedef unsigned long word;
typedef void callback(void *, unsigned, unsigned, const void *);
extern "C" {
#ifdef SIGNED
#define REPORT _ZN3c1027reportMemoryUsageToProfilerEPvlllNS_6DeviceE
#else
#define REPORT _ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE
#endif
#define OOM _ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE
#ifdef WITHOUT
static void REPORT(void *, long, word, word, unsigned short) {}
static void OOM(long, word, word, unsigned short) {}
#else
void REPORT(void *, long, word, word, unsigned short);
void OOM(long, word, word, unsigned short);
#endif
int cudaEventRecord(void *, void *);
int cudaEventQuery(void *);
int cudaEventSynchronize(void *);

int torch_report(void *p, long bytes, word allocated, word reserved, unsigned short device) {
    try { REPORT(p, bytes, allocated, reserved, device); } catch (int what) { return what; }
    return 0;
}
void torch_oom(long bytes, word allocated, word reserved, unsigned short device) { OOM(bytes, allocated, reserved, device); }
int torch_record(void *event) { return cudaEventRecord(event, 0); }
__attribute__((noinline)) static void insert_events(void **events, int count) {
    volatile char room[200];
    room[0] = 0;
    for (int n = 0; n < count; n++) cudaEventRecord(events[n], 0);
}
void torch_free(void *p, long bytes, word allocated, word reserved, unsigned short device, void **events, int count) {
    insert_events(events, count);
    REPORT(p, -bytes, allocated, reserved, device);
    static volatile int frees;
    frees = frees + 1;
}
int torch_query(void *event) { return cudaEventQuery(event); }
int torch_synchronize(void *event) { return cudaEventSynchronize(event); }

#ifdef SLOW
/* The loader asks for the function while it relocates this file, before it gets to the slots of calls. */
static void nothing(void) {}
static void (*chosen(void))(void) {
    for (volatile long turn = 0; turn < 100000000; turn = turn + 1) {}
    return nothing;
}
void slow(void) __attribute__((ifunc("chosen")));
void (*const volatile slow_one)(void) = slow;
#endif

/* Stands for libcuda.so: another file, so that the caller is this library. */
void torch_driver(void (*enter)(callback *, unsigned, word, word, word *, word, unsigned), callback *call, unsigned id, word bytes, word address, unsigned result) {
    static volatile int calls;
    word out = 0;
    enter(call, id, (word)&out, bytes, &out, address, result);
    calls = calls + 1;
}
}
"#;

/// Source of a stand-in for the driver's library.
const DRIVER: &str = r#"
typedef unsigned long word;
typedef void callback(void *, unsigned, unsigned, const void *);
extern "C" void drive(callback *call, unsigned id, word first, word second, word *out, word value, unsigned result) {
    word params[4] = {first, second, 0, 0}, data[9] = {0};
    data[2] = (word)params;
    data[5] = 0x5555001000, data[6] = 1, data[8] = 7;
    call(0, 1, id, data);
    if (out) *out = value;
    data[0] = 1, data[3] = (word)&result;
    call(0, 1, id, data);
}
"#;

/// Build variants of libc10_cuda.so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Make {
    pub name: &'static str,
    flags: &'static [&'static str],
    c10_flags: &'static [&'static str],
    /// Strip everything that is not needed to run.
    strip: bool,
}

const LAZY: &[&str] = &["-Wl,-z,lazy,-z,relro"];

pub const MAKES: &[Make] = &[
    Make { name: "lazy", flags: LAZY, c10_flags: &[], strip: false },
    Make { name: "bound", flags: LAZY, c10_flags: &[], strip: false },
    Make { name: "now", flags: &["-Wl,-z,now,-z,relro"], c10_flags: &[], strip: false },
    Make { name: "no-plt", flags: &["-fno-plt", "-Wl,-z,now,-z,relro"], c10_flags: &[], strip: false },
    Make { name: "signed", flags: &["-DSIGNED", "-Wl,-z,lazy"], c10_flags: &["-DSIGNED"], strip: false },
    Make {
        name: "sysv",
        flags: &["-Wl,-z,lazy,-z,norelro,--hash-style=sysv"],
        c10_flags: &["-Wl,--hash-style=sysv"],
        strip: false,
    },
    Make { name: "stripped", flags: LAZY, c10_flags: &[], strip: true },
];

/// A library that the loader needs 0.1 s to load.
pub const SLOW: Make =
    Make { name: "slow", flags: &["-DSLOW", "-Wl,-z,lazy,-z,relro"], c10_flags: &[], strip: false };

/// A library whose reports go through no slot.
pub const STATIC: Make = Make { name: "static", flags: &["-DWITHOUT"], c10_flags: &[], strip: false };

fn compile(folder: &Path, name: &str, source: &str, flags: &[&str], libraries: &[&str]) -> Option<()> {
    let file = folder.join(format!("{name}.cpp"));
    std::fs::write(&file, source).expect("a file");
    let mut compiler = Command::new("c++");
    compiler
        .args(["-O2", "-shared", "-fPIC"])
        .args(flags)
        .arg("-o")
        .arg(folder.join(format!("lib{name}.so")));
    compiler.arg(&file).arg("-L").arg(folder).args(libraries).arg("-Wl,-rpath,$ORIGIN");
    match compiler.status() {
        Ok(status) => {
            assert!(status.success(), "{name} does not compile");
            Some(())
        }
        Err(_) => {
            gpumem_test_support::skip("there is no C++ compiler here", "apt-get install g++");
            None
        }
    }
}

/// Builds the libraries; `None` without a compiler.
pub fn build(folder: &Folder, make: &Make) -> Option<()> {
    let folder = &folder.0;
    compile(folder, "c10", C10, make.c10_flags, &[])?;
    compile(folder, "cudart", CUDART, &[], &[])?;
    compile(folder, "cuda", DRIVER, &["-Wl,-soname,libcuda.so.1"], &[])?;
    std::fs::rename(folder.join("libcuda.so"), folder.join("libcuda.so.1")).expect("renamed");
    compile(folder, "c10_cuda", C10_CUDA, make.flags, &["-lc10", "-lcudart"])?;
    if make.strip {
        let file = folder.join("libc10_cuda.so");
        let _ = Command::new("strip").arg("-s").arg(file).status();
    }
    Some(())
}

/// The libraries, never unloaded.
pub struct Torch {
    c10: *mut c_void,
    cudart: *mut c_void,
    cuda: *mut c_void,
    c10_cuda: *mut c_void,
}

fn open(path: &Path) -> *mut c_void {
    let path = CString::new(path.to_str().expect("UTF-8")).expect("no 0");
    // SAFETY: the path is a C string.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
    assert!(!library.is_null(), "{path:?}");
    library
}

fn symbol(library: *mut c_void, name: &str) -> *mut c_void {
    let text = CString::new(name).expect("no 0");
    // SAFETY: a live handle and a C string.
    let found = unsafe { libc::dlsym(library, text.as_ptr()) };
    assert!(!found.is_null(), "{name}");
    found
}

type Report = unsafe extern "C" fn(u64, c_long, c_ulong, c_ulong, c_ushort) -> c_int;
type Free = unsafe extern "C" fn(u64, c_long, c_ulong, c_ulong, c_ushort, *const u64, c_int);
type Oom = unsafe extern "C" fn(c_long, c_ulong, c_ulong, c_ushort);
type Event = unsafe extern "C" fn(u64) -> c_int;
type Callback = unsafe extern "C" fn(*mut c_void, u32, u32, *const c_void);
type Drive = unsafe extern "C" fn(*mut c_void, Callback, u32, u64, u64, u32);

impl Torch {
    pub fn load(folder: &Path) -> Self {
        Torch {
            c10: open(&folder.join("libc10.so")),
            cudart: open(&folder.join("libcudart.so")),
            cuda: open(&folder.join("libcuda.so.1")),
            c10_cuda: open(&folder.join("libc10_cuda.so")),
        }
    }

    /// Reports a block; returns the value of an exception that passed through the report, 0 for none.
    pub fn report(&self, address: u64, bytes: i64, allocated: u64, reserved: u64, device: u16) -> i32 {
        // SAFETY: the library's function has this type.
        unsafe {
            let report = std::mem::transmute::<*mut c_void, Report>(symbol(self.c10_cuda, "torch_report"));
            report(address, bytes, allocated, reserved, device)
        }
    }

    pub fn out_of_memory(&self, bytes: i64, allocated: u64, reserved: u64) {
        // SAFETY: as above.
        unsafe {
            let oom = std::mem::transmute::<*mut c_void, Oom>(symbol(self.c10_cuda, "torch_oom"));
            oom(bytes, allocated, reserved, 1);
        }
    }

    /// Calls `record`, `query` or `synchronize` for an event.
    pub fn event(&self, what: &str, event: u64) -> i32 {
        // SAFETY: as above.
        unsafe {
            let name = format!("torch_{what}");
            std::mem::transmute::<*mut c_void, Event>(symbol(self.c10_cuda, &name))(event)
        }
    }

    /// Makes a driver call from the library.
    pub fn driver(&self, call: u32, bytes: u64, address: u64, result: u32) {
        // SAFETY: as above.
        unsafe {
            let through = std::mem::transmute::<*mut c_void, Drive>(symbol(self.c10_cuda, "torch_driver"));
            through(
                symbol(self.cuda, "drive"),
                gpumem::sources::cupti::callback,
                call,
                bytes,
                address,
                result,
            );
        }
    }

    /// Sets whether queried events are still pending.
    pub fn set_busy(&self, busy: bool) {
        // SAFETY: a number of the library.
        unsafe { symbol(self.cudart, "cudart_busy").cast::<c_int>().write_volatile(busy.into()) };
    }

    /// Returns the reports and failures that the original functions received.
    pub fn arrived(&self) -> (i32, i32) {
        // SAFETY: numbers of the library.
        let read = |name| unsafe { symbol(self.c10, name).cast::<c_int>().read_volatile() };
        (read("c10_reports"), read("c10_ooms"))
    }
}

/// A caching allocator of one device, with PyTorch's totals.
pub struct Allocator<'a> {
    torch: &'a Torch,
    pub allocated: u64,
    pub reserved: u64,
    device: u16,
}

impl<'a> Allocator<'a> {
    pub fn new(torch: &'a Torch, ordinal: u16) -> Self {
        Allocator { torch, allocated: 0, reserved: 0, device: 1 | ordinal << 8 }
    }
    pub fn alloc(&mut self, address: u64, bytes: u64) {
        self.allocated += bytes;
        self.torch.report(address, bytes as i64, self.allocated, self.reserved, self.device);
    }
    pub fn free(&mut self, address: u64, bytes: u64) {
        self.allocated -= bytes;
        self.torch.report(address, -(bytes as i64), self.allocated, self.reserved, self.device);
    }
    /// Frees a block that other streams have used, with an event for each.
    pub fn free_behind(&mut self, address: u64, bytes: u64, events: &[u64]) {
        self.allocated -= bytes;
        let (allocated, reserved) = (self.allocated, self.reserved);
        // SAFETY: the library's function has this type.
        unsafe {
            let free = std::mem::transmute::<*mut c_void, Free>(symbol(self.torch.c10_cuda, "torch_free"));
            let count = events.len() as c_int;
            free(address, bytes as i64, allocated, reserved, self.device, events.as_ptr(), count);
        }
    }
}
