/* Linked into gpumemd and gpumemctl of a wheel, so that they run with glibc 2.17 independent of the build system.
 * build_wheel.py makes the linker redirect each call of a function below, also from the standard library, to
 * __wrap_NAME. The definitions here call the version that every glibc has. Functions that older systems lack are made
 * of system calls. (agent-lib/src/base/glibc.rs does the same for the agent, which is always built this way.) */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define FIRST "GLIBC_2.2.5"
#define NAMES "GLIBC_2.12" /* pthread_setname_np */
#define JUMP "jmp gpumem_old_"
#define PLT "@PLT"
#elif defined(__aarch64__)
#define FIRST "GLIBC_2.17"
#define NAMES "GLIBC_2.17"
#define JUMP "b gpumem_old_"
#define PLT ""
#else
#error "no wheel for this processor"
#endif

#define OLD(name, version)                                                 \
    __asm__(".symver gpumem_old_" #name "," #name "@" version "\n"         \
            ".pushsection .text\n.globl __wrap_" #name "\n"                \
            ".type __wrap_" #name ", %function\n"                          \
            "__wrap_" #name ":\n" JUMP #name PLT "\n"                      \
            ".size __wrap_" #name ", . - __wrap_" #name "\n.popsection");

OLD(dlopen, FIRST)
OLD(dlclose, FIRST)
OLD(dlsym, FIRST)
OLD(dlerror, FIRST)
OLD(exp, FIRST)
OLD(hypot, FIRST)
OLD(log, FIRST)
OLD(pow, FIRST)
OLD(pthread_attr_getguardsize, FIRST)
OLD(pthread_attr_getstack, FIRST)
OLD(pthread_attr_setstacksize, FIRST)
OLD(pthread_create, FIRST)
OLD(pthread_detach, FIRST)
OLD(pthread_getattr_np, FIRST)
OLD(pthread_join, FIRST)
OLD(pthread_key_create, FIRST)
OLD(pthread_key_delete, FIRST)
OLD(pthread_mutex_trylock, FIRST)
OLD(pthread_mutexattr_destroy, FIRST)
OLD(pthread_mutexattr_init, FIRST)
OLD(pthread_mutexattr_settype, FIRST)
OLD(pthread_once, FIRST)
OLD(pthread_setname_np, NAMES)
OLD(pthread_setspecific, FIRST)
OLD(pthread_sigmask, FIRST)

/* The kernel's struct is glibc's; syscall() sets errno. */

int __wrap_fstat(int fd, void *to) { return (int)syscall(SYS_fstat, fd, to); }
int __wrap_fstat64(int fd, void *to) { return (int)syscall(SYS_fstat, fd, to); }
int __wrap_stat64(const char *path, void *to) { return (int)syscall(SYS_newfstatat, AT_FDCWD, path, to, 0); }
int __wrap_lstat64(const char *path, void *to) {
    return (int)syscall(SYS_newfstatat, AT_FDCWD, path, to, AT_SYMLINK_NOFOLLOW);
}
int __wrap_stat(const char *path, void *to) { return __wrap_stat64(path, to); }
int __wrap_lstat(const char *path, void *to) { return __wrap_lstat64(path, to); }
int __wrap_fstatat64(int fd, const char *path, void *to, int flags) {
    return (int)syscall(SYS_newfstatat, fd, path, to, flags);
}

/* A 64-bit system has one fcntl. Its third argument is a word or missing. */
__asm__(".symver gpumem_old_fcntl,fcntl@" FIRST);
extern int gpumem_old_fcntl(int, int, ...);
int __wrap_fcntl64(int fd, int what, ...) {
    va_list rest;
    void *word;
    va_start(rest, what);
    word = va_arg(rest, void *);
    va_end(rest);
    return gpumem_old_fcntl(fd, what, word);
}

/* Before glibc 2.34 the program ran its own constructors. A start-up file from later leaves that to the C library, and an older
 * one would leave it to us. */
typedef void constructor(int, char **, char **);
extern constructor *const __init_array_start[] __attribute__((visibility("hidden")));
extern constructor *const __init_array_end[] __attribute__((visibility("hidden")));
extern void _init(void);

static void construct(int argc, char **argv, char **environment) {
    constructor *const *each;
    _init();
    for (each = __init_array_start; each != __init_array_end; each++) (*each)(argc, argv, environment);
}

__asm__(".symver gpumem_old_start,__libc_start_main@" FIRST);
extern int gpumem_old_start(int (*)(int, char **, char **), int, char **, constructor *, void (*)(void),
                            void (*)(void), void *);

int __wrap___libc_start_main(int (*run)(int, char **, char **), int argc, char **argv, constructor *init,
                             void (*fini)(void), void (*loader_fini)(void), void *stack) {
    (void)init;
    (void)fini;
    return gpumem_old_start(run, argc, argv, construct, NULL, loader_fini, stack);
}
