/* GPU work of the programs host_main.c and host_cxx.cpp, and their observations of themselves. */
#include "host.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"
#include "gpumem.h"

/* The agent keeps its descriptors from here on; those below are the program's. */
#define OURS 256

static void *context;

void say(const char *format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    line[length] = '\n';
    for (int done = 0; done <= length;) { /* without stdio, so that output of a crashing program is not lost */
        ssize_t wrote = write(1, line + done, (size_t)(length + 1 - done));
        if (wrote < 0 && errno != EINTR) return;
        done += wrote > 0 ? (int)wrote : 0;
    }
}

void nap(int ms) {
    struct timespec left = {0, ms * 1000000l};
    while (nanosleep(&left, &left) && errno == EINTR) {}
}

void open_gpu(void) {
    load_driver();
    must(cu.cuInit(0), "cuInit");
    must(cu.cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
    use_gpu();
}

void use_gpu(void) { must(cu.cuCtxSetCurrent(context), "cuCtxSetCurrent"); }

unsigned long long take_bytes(unsigned long long bytes) {
    uint64_t address = 0;
    return cu.cuMemAlloc_v2(&address, bytes) ? 0 : address;
}

void give_back(unsigned long long address) { must(cu.cuMemFree_v2(address), "cuMemFree"); }

void work(int rounds) {
    uint64_t kept[4] = {0}, pinned_too = 0;
    void *pinned, *module;
    gpumem_push("work");
    for (int i = 0; i < rounds; i++) {
        gpumem_push(i % 2 ? "odd" : "even");
        if (kept[i % 4]) must(cu.cuMemFree_v2(kept[i % 4]), "cuMemFree");
        errno = 77;
        must(cu.cuMemAlloc_v2(&kept[i % 4], 4096u * (unsigned)(i + 1)), "cuMemAlloc");
        if (errno != 77) say("errno is %d after an allocation", errno);
        gpumem_pop();
        if (errno != 77) say("errno is %d after a scope", errno);
    }
    must(cu.cuMemAllocHost_v2(&pinned, 4096), "cuMemAllocHost");
    must(cu.cuMemFreeHost(pinned), "cuMemFreeHost");
    must(cu.cuModuleLoadData(&module, "a module's source"), "cuModuleLoadData");
    must(cu.cuModuleUnload(module), "cuModuleUnload");
    if (cu.cuMemAlloc_v2(&pinned_too, 1ull << 50) != OUT_OF_MEMORY) say("there was room for a pebibyte");
    gpumem_step((uint64_t)rounds);
    gpumem_mark("worked");
    gpumem_pop();
    for (int i = 0; i < 4; i++)
        if (kept[i]) must(cu.cuMemFree_v2(kept[i]), "cuMemFree");
}

static void descriptors(char *line, size_t room) {
    int first_free = dup(0);
    close(first_free);
    size_t length = (size_t)snprintf(line, room, "the next descriptor is %d, open are", first_free);
    for (int fd = 0; fd < OURS && length + 40 < room; fd++) {
        struct stat about;
        if (fstat(fd, &about)) continue;
        length += (size_t)snprintf(line + length, room - length, " %d:%o", fd, (unsigned)about.st_mode >> 12);
        if (S_ISCHR(about.st_mode)) length += (size_t)snprintf(line + length, room - length, "(%lx)", (unsigned long)about.st_rdev);
    }
}

/* Its descriptors, signals, limits, folder and children. */
void view(void) {
    char line[512], before[512] = "", link[64];
    for (int look = 0; look < 20; look++) { /* repeats, to ignore briefly opened files */
        descriptors(line, sizeof line);
        if (!strcmp(line, before)) break;
        strcpy(before, line);
        nap(1);
    }
    say("%s", line);
    for (int number = 1; number < NSIG; number++) {
        struct sigaction now;
        sigset_t blocked;
        pthread_sigmask(SIG_BLOCK, NULL, &blocked);
        if (sigaction(number, NULL, &now)) continue;
        if (now.sa_handler != SIG_DFL || sigismember(&blocked, number))
            say("signal %d: %s, %d", number, now.sa_handler == SIG_IGN ? "ignored" : now.sa_handler == SIG_DFL ? "default" : "handled",
                sigismember(&blocked, number));
    }
    for (int kind = 0; kind < (int)RLIM_NLIMITS; kind++) {
        struct rlimit limit;
        if (!getrlimit((__rlimit_resource_t)kind, &limit)) say("limit %d: %lu %lu", kind, limit.rlim_cur, limit.rlim_max);
    }
    stack_t stack = {0};
    sigaltstack(NULL, &stack);
    struct itimerval timer;
    getitimer(ITIMER_REAL, &timer);
    mode_t mask = umask(0);
    umask(mask);
    ssize_t named = readlink("/proc/self/cwd", link, sizeof link - 1);
    pid_t child = waitpid(-1, NULL, WNOHANG | __WALL);
    say("alternate stack %d, timer %ld, umask %o, folder %s, child %d, root %d", stack.ss_flags != SS_DISABLE, timer.it_interval.tv_usec,
        (unsigned)mask, named > 0 ? "known" : "unknown", child < 0 ? -1 : 1, geteuid() == 0);
    say("variable of ours: %s", getenv("GPUMEM_OF_MINE") ? "set" : "not set");
}
