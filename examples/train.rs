//! The same in Rust, with no crate: the functions are found at run time, as gpumem.h finds them.
//!
//!     rustc -O train.rs
//!     gpumemctl run -- ./train

use std::ffi::{CStr, CString, c_char, c_int, c_void};

#[link(name = "dl")]
unsafe extern "C" {
    fn dlopen(path: *const c_char, mode: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}
const RTLD_NOW: c_int = 2;
const MIB: usize = 1 << 20;

/// A function of a library, as a pointer of the type that is wanted; `None` if it has no such function.
///
/// # Safety
/// `F` is the type of a pointer to that function.
unsafe fn find<F: Copy>(library: *mut c_void, name: &CStr) -> Option<F> {
    assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
    // SAFETY: a C string; a pointer is read as one of the type that the caller vouches for.
    unsafe {
        let found = dlsym(library, name.as_ptr());
        (!found.is_null()).then(|| std::mem::transmute_copy(&found))
    }
}

/// The agent's functions; each does nothing where there is no agent.
#[derive(Clone, Copy, Default)]
struct Gpumem {
    push: Option<unsafe extern "C" fn(*const c_char)>,
    pop: Option<unsafe extern "C" fn()>,
    step: Option<unsafe extern "C" fn(u64)>,
    retag: Option<unsafe extern "C" fn(u64, u64, *const c_char, c_int, c_int)>,
    report: Option<unsafe extern "C" fn(*const c_char, *const c_char) -> *mut c_char>,
}

/// Ends the scope when it goes.
struct Scope(Gpumem);

impl Drop for Scope {
    fn drop(&mut self) {
        // SAFETY: no arguments.
        self.0.pop.into_iter().for_each(|pop| unsafe { pop() });
    }
}

impl Gpumem {
    fn find() -> Self {
        let path = std::env::var("CUDA_INJECTION64_PATH").unwrap_or_default();
        let is_agent = path.rsplit('/').next().is_some_and(|file| file.starts_with("libgpumem"));
        let Some(path) = CString::new(path).ok().filter(|_| is_agent) else { return Gpumem::default() };
        // SAFETY: the agent's library, and its functions with their types.
        unsafe {
            let library = dlopen(path.as_ptr(), RTLD_NOW);
            if library.is_null() {
                return Gpumem::default();
            }
            Gpumem {
                push: find(library, c"gpumem_push"),
                pop: find(library, c"gpumem_pop"),
                step: find(library, c"gpumem_step"),
                retag: find(library, c"gpumem_retag"),
                report: find(library, c"gpumem_report"),
            }
        }
    }

    #[must_use = "the scope ends when this goes"]
    fn scope(self, name: &str) -> Scope {
        let name = CString::new(name).unwrap_or_default();
        // SAFETY: a C string.
        self.push.into_iter().for_each(|push| unsafe { push(name.as_ptr()) });
        Scope(self)
    }
}

/// Of the CUDA driver.
struct Cuda {
    alloc: unsafe extern "C" fn(*mut u64, usize) -> c_int,
    free: unsafe extern "C" fn(u64) -> c_int,
}

impl Cuda {
    fn begin() -> Self {
        // SAFETY: the functions have the CUDA driver's types, and the pointers point to their results.
        unsafe {
            let driver = dlopen(c"libcuda.so.1".as_ptr(), RTLD_NOW);
            assert!(!driver.is_null(), "no CUDA driver");
            let init: unsafe extern "C" fn(u32) -> c_int = find(driver, c"cuInit").expect("cuInit");
            let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int =
                find(driver, c"cuDevicePrimaryCtxRetain").expect("cuDevicePrimaryCtxRetain");
            let make_current: unsafe extern "C" fn(*mut c_void) -> c_int =
                find(driver, c"cuCtxSetCurrent").expect("cuCtxSetCurrent");
            let mut context = std::ptr::null_mut();
            assert_eq!(init(0), 0);
            assert_eq!(retain(&mut context, 0), 0);
            assert_eq!(make_current(context), 0);
            Cuda {
                alloc: find(driver, c"cuMemAlloc_v2").expect("cuMemAlloc_v2"),
                free: find(driver, c"cuMemFree_v2").expect("cuMemFree_v2"),
            }
        }
    }

    fn alloc(&self, bytes: usize) -> u64 {
        let mut address = 0;
        // SAFETY: a place for the address.
        assert_eq!(unsafe { (self.alloc)(&mut address, bytes) }, 0);
        address
    }

    fn free(&self, address: u64) {
        // SAFETY: allocated above.
        assert_eq!(unsafe { (self.free)(address) }, 0);
    }
}

const PARAMETER: c_int = 1;

fn main() {
    let (cuda, gpumem) = (Cuda::begin(), Gpumem::find());
    let layers: Vec<u64> = {
        let _model = gpumem.scope("model");
        let layer = |number: usize| {
            let _layer = gpumem.scope(&format!("layer.{number}"));
            let weights = cuda.alloc(8 * MIB);
            // SAFETY: no path, which is allowed.
            gpumem.retag.into_iter().for_each(|retag| unsafe { retag(0, weights, std::ptr::null(), PARAMETER, 0) });
            weights
        };
        (0..3).map(layer).collect()
    };
    for step in 1..=4 {
        // SAFETY: a number.
        gpumem.step.into_iter().for_each(|begin| unsafe { begin(step) });
        let _here = gpumem.scope("activations");
        let activations = cuda.alloc(6 * MIB);
        cuda.free(activations);
    }
    if let Some(report) = gpumem.report {
        // SAFETY: C strings; the report is one that is ours. It is not freed: the program ends.
        unsafe {
            let text = report(c"text".as_ptr(), c"by=tag\nall=1".as_ptr());
            if !text.is_null() {
                print!("{}", CStr::from_ptr(text).to_string_lossy());
            }
        }
    }
    layers.into_iter().for_each(|weights| cuda.free(weights));
}
