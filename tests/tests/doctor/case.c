// A program to look at: `case [cuda] [fork] [filter]`, in that order. It says `ready PID` (its child's after a fork) and waits.
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>

static int use_cuda(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    int (*init)(unsigned) = driver ? (int (*)(unsigned))dlsym(driver, "cuInit") : NULL;
    return init ? init(0) : -1;
}

// A filter that lets everything pass is one all the same.
static int filter(void) {
    struct sock_filter allow[] = {{BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW}};
    struct sock_fprog program = {1, allow};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

int main(int count, char **words) {
    for (int at = 1; at < count; at++) {
        if (!strcmp(words[at], "cuda") && use_cuda()) return 2;
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
