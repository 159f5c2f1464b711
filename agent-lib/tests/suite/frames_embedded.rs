//! An interpreter inside of this process: naming an allocation after its module allocates nothing, and neither does the stack
//! as text.

use crate::common::counting::counted;
use crate::common::daemon::{Folder, agent};
use gpumem_test_support::alone;
use std::ffi::{CString, c_char, c_int, c_void};
use std::process::Command;
use std::sync::Mutex;

/// Results in the program: number of allocations, and name of an allocation.
static SEEN: Mutex<Vec<(u64, String)>> = Mutex::new(Vec::new());

/// Called by Python, inside of modules.
extern "C" fn measure() {
    let mut room = [0_u8; 4096];
    // SAFETY: a C string, and room of that size.
    let (count, length) = counted(|| unsafe {
        let pool = gpumem::gpumem_pool_create(c"pool".as_ptr(), 0, 0);
        for n in 0..100 {
            gpumem::gpumem_block_alloc(pool, (1 << 40) + n * 512, 512, 0);
            gpumem::gpumem_block_free(pool, (1 << 40) + n * 512, 0);
        }
        gpumem::gpumem_pool_destroy(pool);
        gpumem::gpumem_here(room.as_mut_ptr().cast::<c_char>(), room.len() as u64)
    });
    let text = String::from_utf8_lossy(&room[..length as usize]).into_owned();
    SEEN.lock().expect("nobody panicked").push((count, text));
}

const PROGRAM: &str = r#"
import ctypes, sys
sys.path.insert(0, FOLDER)
import _frames
u64 = ctypes.c_uint64
class Library:
    gpumem_frames_selftest = ctypes.CFUNCTYPE(ctypes.c_int)(SELFTEST)
module = ctypes.CFUNCTYPE(None, u64, u64, u64, ctypes.c_char_p)(MODULE)
code = ctypes.CFUNCTYPE(None, u64, ctypes.c_int)(CODE)
measure = ctypes.CFUNCTYPE(None)(MEASURE)
reason = _frames.prove(Library)
assert reason == "", reason
class Module:
    def __call__(self, work):
        return work()
code(id(Module.__call__.__code__), _frames.MODULE)
outer, inner = Module(), Module()
module(id(outer), id(Module), 0, b"GPT")
module(id(inner), id(Module), id(outer), b"0")
def deep(depth):
    return deep(depth - 1) if depth else measure()
inner(measure)
outer(lambda: inner(lambda: deep(30)))
deep(30)
"#;

/// Returns the shared library of `python3`, and its prefix.
fn interpreter() -> Option<(String, String)> {
    let script = "import sys, sysconfig; get = sysconfig.get_config_var; \
                  print(get('LIBDIR') + '/' + get('INSTSONAME')); print(sys.base_prefix)";
    let output = Command::new("python3").args(["-c", script]).output().ok()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let (library, prefix) = said.trim().split_once('\n')?;
    let shared = library.contains(".so") && std::path::Path::new(library).is_file();
    shared.then(|| (library.to_owned(), prefix.to_owned()))
}

fn function(library: *mut c_void, name: &str) -> *mut c_void {
    let name = CString::new(name).expect("no 0");
    // SAFETY: a library that stays loaded, and a C string.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!found.is_null(), "{name:?}");
    found
}

/// Lane `python`: needs a CPython with a shared library.
mod python {
    use super::*;

    #[test]
    fn a_module_path_allocates_nothing() {
        alone(|| {
            let Some((path, prefix)) = interpreter() else {
                gpumem_test_support::skip("python3 has no shared library", "apt-get install libpython3-dev");
                return;
            };
            let folder = Folder::new("frames-embedded");
            agent(&folder.0.join("nobody.sock"), |settings| settings.ring_slots = 1 << 12);
            let [path, prefix] = [path, prefix].map(|text| CString::new(text).expect("no 0"));
            // SAFETY: no other thread reads the environment now; one interpreter is made, and its functions have these types.
            let failed = unsafe {
                libc::setenv(c"PYTHONHOME".as_ptr(), prefix.as_ptr(), 1);
                libc::setenv(c"PYTHONDONTWRITEBYTECODE".as_ptr(), c"1".as_ptr(), 1);
                let python = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL);
                assert!(!python.is_null(), "{path:?}");
                let initialize: extern "C" fn(c_int) =
                    std::mem::transmute(function(python, "Py_InitializeEx"));
                let run: extern "C" fn(*const c_char, *const c_void) -> c_int =
                    std::mem::transmute(function(python, "PyRun_SimpleStringFlags"));
                initialize(0);
                let frames = format!("{:?}", concat!(env!("CARGO_MANIFEST_DIR"), "/python/gpumem/torch"));
                let values = [
                    ("FOLDER", frames),
                    ("SELFTEST", (gpumem::gpumem_frames_selftest as *const () as usize).to_string()),
                    ("MODULE", (gpumem::gpumem_module as *const () as usize).to_string()),
                    ("CODE", (gpumem::gpumem_code as *const () as usize).to_string()),
                    ("MEASURE", (measure as *const () as usize).to_string()),
                ];
                let program = values
                    .iter()
                    .fold(PROGRAM.to_owned(), |program, (name, value)| {
                        program.replace(&format!("({name})"), &format!("({value})"))
                    })
                    .replace("(0, FOLDER)", &format!("(0, {})", values[0].1));
                let program = CString::new(program).expect("no 0");
                run(program.as_ptr(), std::ptr::null())
            };
            assert_eq!(failed, 0, "the program failed");
            let seen = SEEN.lock().expect("nobody panicked");
            let names: Vec<&str> =
                seen.iter().map(|(_, text)| text.lines().next().unwrap_or_default()).collect();
            assert_eq!(names, ["GPT.0 forward", "GPT.0 forward", " unknown"]);
            let depths: Vec<usize> = seen.iter().map(|(_, text)| text.lines().count()).collect();
            assert_eq!(depths, [3, 37, 33], "{seen:?}");
            assert!(seen.iter().all(|(count, _)| *count == 0), "{seen:?}");
        });
    }
}
