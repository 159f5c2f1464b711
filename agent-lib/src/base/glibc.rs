//! Compatibility with glibc 2.17 and later. The linker redirects each call of a function below, also from the standard library,
//! to the name with the prefix `__wrap_` (build.rs). The functions with the prefix call the symbol version that every glibc has,
//! or make the system call.
#![cfg(all(target_os = "linux", target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]

use std::ffi::{c_char, c_int, c_long, c_void};

/// Chooses a text for x86-64 or aarch64.
#[cfg(target_arch = "x86_64")]
macro_rules! arch {
    ($x86_64:literal, $aarch64:literal) => {
        $x86_64
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! arch {
    ($x86_64:literal, $aarch64:literal) => {
        $aarch64
    };
}
/// Symbol version of functions that the first glibc for the processor has.
macro_rules! first {
    () => {
        $crate::base::glibc::arch!("GLIBC_2.2.5", "GLIBC_2.17")
    };
}

/// Defines functions whose names are `$prefix` and `$name`. Each jumps to `$name` with the symbol version `$version`.
macro_rules! old {
    ($prefix:literal, $version:tt!$arguments:tt: $( $name:literal )*) => { $(
        std::arch::global_asm!(
            concat!(".symver gpumem_old_", $name, ",", $name, "@", $crate::base::glibc::$version!$arguments),
            concat!(".section .text.", $prefix, $name, ",\"ax\""),
            concat!(".globl ", $prefix, $name),
            concat!(".hidden ", $prefix, $name),
            concat!(".type ", $prefix, $name, ", %function"),
            concat!($prefix, $name, ":"),
            concat!(
                $crate::base::glibc::arch!("jmp", "b"), " gpumem_old_", $name, $crate::base::glibc::arch!("@PLT", "")
            ),
            concat!(".size ", $prefix, $name, ", . - ", $prefix, $name),
            ".previous",
        );
    )* };
}

old!("__wrap_", first!(): "dlopen" "dlclose" "dlsym"
    "pthread_attr_getguardsize" "pthread_attr_getstack" "pthread_attr_setstacksize" "pthread_getattr_np"
    "pthread_create" "pthread_detach" "pthread_join" "pthread_sigmask"
    "pthread_key_create" "pthread_key_delete" "pthread_setspecific");
old!("__wrap_", arch!("GLIBC_2.12", "GLIBC_2.17"): "pthread_setname_np");

/// Defines `__wrap_$name` as `$function`, because older systems do not have `$name` with any version.
macro_rules! own {
    ($( $name:literal = $function:path ),* $(,)?) => { $(
        std::arch::global_asm!(
            concat!(".section .text.gpumem_wrap_", $name, ",\"ax\""),
            concat!(".globl __wrap_", $name),
            concat!(".type __wrap_", $name, ", %function"),
            concat!("__wrap_", $name, ":"),
            concat!($crate::base::glibc::arch!("jmp", "b"), " {function}"),
            concat!(".size __wrap_", $name, ", . - __wrap_", $name),
            ".previous",
            function = sym $function,
        );
    )* };
}

pub(crate) use {arch, first, old, own};

own!("fstat" = fstat, "fstat64" = fstat, "stat64" = stat, "lstat64" = lstat, "gettid" = gettid);

// The kernel's `struct stat` equals glibc's on both processors; syscall() sets errno.

unsafe extern "C" fn fstat(fd: c_int, to: *mut c_void) -> c_int {
    // SAFETY: as fstat().
    unsafe { libc::syscall(libc::SYS_fstat, c_long::from(fd), to) as c_int }
}

unsafe extern "C" fn stat(path: *const c_char, to: *mut c_void) -> c_int {
    // SAFETY: as stat().
    unsafe { libc::syscall(libc::SYS_newfstatat, c_long::from(libc::AT_FDCWD), path, to, 0_usize) as c_int }
}

unsafe extern "C" fn lstat(path: *const c_char, to: *mut c_void) -> c_int {
    let flags = libc::AT_SYMLINK_NOFOLLOW as usize;
    // SAFETY: as lstat().
    unsafe { libc::syscall(libc::SYS_newfstatat, c_long::from(libc::AT_FDCWD), path, to, flags) as c_int }
}

unsafe extern "C" fn gettid() -> c_int {
    // SAFETY: takes no arguments.
    unsafe { libc::syscall(libc::SYS_gettid) as c_int }
}
