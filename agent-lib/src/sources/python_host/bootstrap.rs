//! Loads the agent's Python code into the program's interpreter: the unchanged files of the package `gpumem.torch`, as a module
//! with a private name. The program needs no package for it, and its own packages do not change.

use crate::sources::python_host::run::Api;
use std::ffi::{CStr, CString, c_char, c_int, c_long, c_ulonglong, c_void};

pub(crate) type Object = *mut c_void;

/// Names and sources of the Python modules. A module imports only modules before it.
const SOURCES: [(&CStr, &str); 18] = [
    (c"_agent", include_str!("../../../python/gpumem/torch/_agent.py")),
    (c"_changes", include_str!("../../../python/gpumem/torch/_changes.py")),
    (c"_objects", include_str!("../../../python/gpumem/torch/_objects.py")),
    (c"_places", include_str!("../../../python/gpumem/torch/_places.py")),
    (c"_models", include_str!("../../../python/gpumem/torch/_models.py")),
    (c"_modules", include_str!("../../../python/gpumem/torch/_modules.py")),
    (c"_caches", include_str!("../../../python/gpumem/torch/_caches.py")),
    (c"_copies", include_str!("../../../python/gpumem/torch/_copies.py")),
    (c"_frames", include_str!("../../../python/gpumem/torch/_frames.py")),
    (c"_codes", include_str!("../../../python/gpumem/torch/_codes.py")),
    (c"_sweep", include_str!("../../../python/gpumem/torch/_sweep.py")),
    (c"_steps", include_str!("../../../python/gpumem/torch/_steps.py")),
    (c"_adopt", include_str!("../../../python/gpumem/torch/_adopt.py")),
    (c"_variables", include_str!("../../../python/gpumem/torch/_variables.py")),
    (c"_cycles", include_str!("../../../python/gpumem/torch/_cycles.py")),
    (c"_keepers", include_str!("../../../python/gpumem/torch/_keepers.py")),
    (c"_observer", include_str!("../../../python/gpumem/torch/_observer.py")),
    (c"_core", include_str!("../../../python/gpumem/torch/_core.py")),
];
const LOADER: &str = include_str!("../../../python/gpumem/torch/_load.py");
/// Py_file_input.
const FILE: c_int = 257;

/// Declares functions of the interpreter's C API by name and type. All exist in every version since 3.8. On a thread that does
/// not hold the interpreter's lock they may unwind.
macro_rules! functions {
    ($( $field:ident = $symbol:literal : fn($($argument:ty),*) -> $result:ty ),* $(,)?) => {
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct Functions {
            $( pub $field: unsafe extern "C-unwind" fn($($argument),*) -> $result, )*
        }

        impl Functions {
            pub(crate) fn find(symbol: impl Fn(&CStr) -> Option<*mut c_void>) -> Option<Self> {
                // SAFETY: the functions of the C API have these types.
                Some(unsafe { Functions {
                    $( $field: std::mem::transmute::<*mut c_void, unsafe extern "C-unwind" fn($($argument),*) -> $result>(symbol($symbol)?), )*
                } })
            }
        }
    };
}

functions! {
    add_pending = c"Py_AddPendingCall": fn(extern "C" fn(*mut c_void) -> c_int, *mut c_void) -> c_int,
    is_initialized = c"Py_IsInitialized": fn() -> c_int,
    compile = c"Py_CompileString": fn(*const c_char, *const c_char, c_int) -> Object,
    evaluate = c"PyEval_EvalCode": fn(Object, Object, Object) -> Object,
    builtins = c"PyEval_GetBuiltins": fn() -> Object,
    dict = c"PyDict_New": fn() -> Object,
    set = c"PyDict_SetItemString": fn(Object, *const c_char, Object) -> c_int,
    get = c"PyDict_GetItemString": fn(Object, *const c_char) -> Object,
    text = c"PyUnicode_FromString": fn(*const c_char) -> Object,
    number = c"PyLong_FromUnsignedLongLong": fn(c_ulonglong) -> Object,
    as_long = c"PyLong_AsLong": fn(Object) -> c_long,
    call = c"PyObject_CallObject": fn(Object, Object) -> Object,
    drop = c"Py_DecRef": fn(Object) -> (),
    is_raised = c"PyErr_Occurred": fn() -> Object,
    is_of = c"PyErr_ExceptionMatches": fn(Object) -> c_int,
    clear = c"PyErr_Clear": fn() -> (),
    ensure = c"PyGILState_Ensure": fn() -> c_int,
    release = c"PyGILState_Release": fn(c_int) -> (),
}

/// The dict with the global variables of the agent's Python code, after it was loaded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Namespace(pub Object);

/// Reason why Python code did not finish.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The agent's code raised an error, which was cleared.
    Failed,
    /// The program was interrupted (e.g. KeyboardInterrupt) while the agent's code ran. The error is still raised.
    Interrupted,
}

impl Api {
    /// Returns why the code ended: reads the raised error, and clears it if it comes from the agent's code.
    unsafe fn ended(&self) -> Ended {
        let call = &self.functions;
        // SAFETY: the caller holds the interpreter's lock. The class is never freed, and `get` keeps the raised error.
        unsafe {
            if (call.is_raised)().is_null() {
                return Ended::Failed;
            }
            let builtins = (call.builtins)();
            let ours =
                if builtins.is_null() { builtins } else { (call.get)(builtins, c"Exception".as_ptr()) };
            if !ours.is_null() && (call.is_of)(ours) == 0 {
                return Ended::Interrupted;
            }
            (call.clear)();
        }
        Ended::Failed
    }

    /// Puts a new object into a dict; `None` if there is no object or it fails.
    unsafe fn put(&self, dict: Object, name: &CStr, value: Object) -> Option<()> {
        // SAFETY: called with the interpreter's lock; the dict takes its own reference.
        unsafe {
            let done = !value.is_null() && (self.functions.set)(dict, name.as_ptr(), value) == 0;
            (self.functions.drop)(value);
            done.then_some(())
        }
    }

    unsafe fn text(&self, text: &str) -> Object {
        // SAFETY: called with the interpreter's lock; the text is a C string.
        CString::new(text)
            .map_or(std::ptr::null_mut(), |text| unsafe { (self.functions.text)(text.as_ptr()) })
    }

    /// Puts everything into the namespace that the loader (`_load.py`) needs; `None` if that fails.
    unsafe fn fill(&self, namespace: Object) -> Option<()> {
        let call = &self.functions;
        // SAFETY: called with the interpreter's lock.
        unsafe {
            let builtins = (call.builtins)();
            if builtins.is_null() || (call.set)(namespace, c"__builtins__".as_ptr(), builtins) != 0 {
                return None;
            }
            self.put(namespace, c"__name__", self.text("_gpumem_load"))?;
            let sources = (call.dict)();
            for (name, source) in SOURCES {
                self.put(sources, name, self.text(source))?;
            }
            self.put(namespace, c"sources", sources)?;
            let addresses = (call.dict)();
            for (name, address) in crate::addresses() {
                let name = CString::new(name).ok()?;
                self.put(addresses, &name, (call.number)(address as c_ulonglong))?;
            }
            self.put(namespace, c"addresses", addresses)
        }
    }

    /// Loads and runs the agent's Python code for the first time.
    ///
    /// # Safety
    /// The caller must hold the interpreter's lock, and no error may be raised.
    pub(crate) unsafe fn load(&self) -> Result<Namespace, Ended> {
        let call = &self.functions;
        let Ok(loader) = CString::new(LOADER) else { return Err(Ended::Failed) };
        // SAFETY: the caller holds the interpreter's lock.
        unsafe {
            let namespace = (call.dict)();
            if namespace.is_null() || self.fill(namespace).is_none() {
                return Err(self.ended());
            }
            let code = (call.compile)(loader.as_ptr(), c"<gpumem>".as_ptr(), FILE);
            let done = if code.is_null() { code } else { (call.evaluate)(code, namespace, namespace) };
            (call.drop)(code);
            (call.drop)(done);
            // The namespace stays for as long as the process lives.
            if done.is_null() { Err(self.ended()) } else { Ok(Namespace(namespace)) }
        }
    }

    /// Calls the agent's Python function `name` and returns the number that it returns.
    ///
    /// # Safety
    /// As `load`.
    pub(crate) unsafe fn call(&self, namespace: Namespace, name: &CStr) -> Result<i64, Ended> {
        let call = &self.functions;
        // SAFETY: the caller holds the interpreter's lock; the function belongs to the namespace.
        unsafe {
            let function = (call.get)(namespace.0, name.as_ptr());
            let answer =
                if function.is_null() { function } else { (call.call)(function, std::ptr::null_mut()) };
            let number = if answer.is_null() { -1 } else { (call.as_long)(answer) };
            (call.drop)(answer);
            if number == -1 { Err(self.ended()) } else { Ok(number as i64) }
        }
    }
}
