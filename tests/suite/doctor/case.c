// A process to examine: `case [threadless] [cuda] [hold TAG] [filter] [fork]`, in that order. Prints `ready PID` (the
// child's after a fork) and waits.
#include "gpumem.h"
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

static int use_cuda(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    int (*init)(unsigned) = driver ? (int (*)(unsigned))dlsym(driver, "cuInit") : NULL;
    return init ? init(0) : -1;
}

// A megabyte on the first device, under a name.
static int hold(const char *tag) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
    int (*use)(void *) = (int (*)(void *))dlsym(driver, "cuCtxSetCurrent");
    int (*take)(unsigned long long *, size_t) = (int (*)(unsigned long long *, size_t))dlsym(driver, "cuMemAlloc_v2");
    void *context = NULL;
    unsigned long long address = 0;
    if (!retain || !use || !take || retain(&context, 0) || use(context)) return -1;
    gpumem_push(tag);
    return take(&address, 1 << 20);
}

// A filter that lets everything pass is one all the same.
static int filter(void) {
    struct sock_filter allow[] = {{BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW}};
    struct sock_fprog program = {1, allow};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

// As with RLIMIT_NPROC, which root does not have: no thread can be made.
static int threadless(void) {
    struct sock_filter refuse[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)), BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1),                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAGAIN),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {5, refuse};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

int main(int count, char **words) {
    for (int at = 1; at < count; at++) {
        if (!strcmp(words[at], "threadless") && threadless()) return 5;
        if (!strcmp(words[at], "cuda") && use_cuda()) return 2;
        if (!strcmp(words[at], "hold") && at + 1 < count && hold(words[++at])) return 4;
        if (!strcmp(words[at], "filter") && filter()) return 3;
        if (!strcmp(words[at], "fork") && fork() != 0) {
            pause();
            return 0;
        }
    }
    prctl(PR_SET_PDEATHSIG, 9);
    printf("ready %d\n", (int)getpid());
    fflush(stdout);
    pause();
    return 0;
}
