//! How the shared library is linked.
//!
//! `-z nodelete`: callbacks may be on their way at any time, so the code must stay mapped.
//!
//! `--wrap`: built on a new system, the standard library would be bound to versions of functions that older systems do not
//! have (glibc 2.34 moved libpthread and libdl into libc). src/base/glibc.rs has the other end. On the old systems those
//! functions live in libpthread and libdl, so these are asked for by name; since 2.34 they are empty.

/// Functions that are bound to their old versions. agent-lib/tests/suite/library.rs fails when one is missing here.
const OLD: &[&str] = &[
    "dlopen",
    "dlclose",
    "dlsym",
    "fstat",
    "fstat64",
    "gettid",
    "lstat64",
    "pthread_attr_getguardsize",
    "pthread_attr_getstack",
    "pthread_attr_setstacksize",
    "pthread_create",
    "pthread_detach",
    "pthread_getattr_np",
    "pthread_join",
    "pthread_key_create",
    "pthread_key_delete",
    "pthread_setname_np",
    "pthread_setspecific",
    "pthread_sigmask",
    "stat64",
];

/// The allocator: see src/base/arena_allocator.rs.
const MEMORY: &[&str] = &["malloc", "calloc", "realloc", "posix_memalign", "free"];

/// Functions that the standard library uses if they are there: glibc 2.17 has none of them. They are wrapped into nothing, so
/// that it takes the way that it has without them.
const ABSENT: &[&str] = &["__cxa_thread_atexit_impl", "getrandom", "statx"];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    let target = |name: &str| std::env::var(format!("CARGO_CFG_TARGET_{name}")).unwrap_or_default();
    if target("OS") == "linux"
        && target("ENV") == "gnu"
        && matches!(target("ARCH").as_str(), "x86_64" | "aarch64")
    {
        for name in OLD.iter().chain(ABSENT).chain(MEMORY) {
            println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap={name}");
        }
        for library in ["libpthread.so.0", "libdl.so.2"] {
            println!("cargo:rustc-cdylib-link-arg=-Wl,--no-as-needed,-l:{library},--as-needed");
        }
    }
}
