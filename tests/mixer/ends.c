/* Commands for a process's end, its exec, and its children, which the soak test mixes. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"
#include "gpumem.h"
#include "names.h"
#include "words.h"

#define WORD(name) static int name(void)
#define NOT_INITIALIZED 3

static void pause_ms(uint64_t ms) {
    struct timespec pause = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000};
    nanosleep(&pause, NULL);
}

/* Closes inherited pipes, so that waiting for the end of this program's output does not wait for its children. */
static void leave_pipes(void) {
    for (int fd = 0; fd < 2; fd++) close(fd);
}

WORD(die) { return raise(SIGKILL); }
WORD(leave) { /* STATUS: ends without exit handlers */
    _exit((int)number());
}
WORD(quit) { /* STATUS: ends with exit handlers */
    exit((int)number());
}
WORD(crash) { /* SIGNAL: as a program would get it */
    int which = (int)number();
    volatile int *volatile nowhere = NULL;
    if (which == SIGABRT) abort();
    if (which == SIGSEGV) *nowhere = 1; /* NOLINT: on purpose */
    return raise(which);
}

/* Forks a child whose driver calls fail and whose names have no effect; prints how it ended. */
WORD(child) {
    pid_t pid = fork();
    if (pid < 0) return -1;
    if (!pid) {
        uint64_t address;
        leave_pipes();
        gpumem_push("child");
        int result = cu.cuMemAlloc_v2(&address, 4096);
        gpumem_pop();
        _exit(result == NOT_INITIALIZED ? 0 : 1);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    say_number((uint64_t)status);
    return OK;
}

/* Forks a child that is soon orphaned; returns its pid. */
static pid_t forked(void) {
    int ends[2];
    pid_t pid = -1;
    if (pipe(ends)) return -1;
    pid_t between = fork();
    if (!between) {
        pid = fork();
        if (pid) {
            ssize_t wrote = write(ends[1], &pid, sizeof pid);
            _exit(wrote != (ssize_t)sizeof pid);
        }
        close(ends[0]);
        close(ends[1]);
        leave_pipes();
        return 0;
    }
    if (read(ends[0], &pid, sizeof pid) != (ssize_t)sizeof pid) pid = -1;
    close(ends[0]);
    close(ends[1]);
    waitpid(between, NULL, 0);
    return pid;
}

WORD(orphan) { /* MS: forks a child that outlives this program; prints its pid */
    uint64_t ms = number();
    pid_t pid = forked();
    if (!pid) {
        pause_ms(ms);
        _exit(0);
    }
    say_number((uint64_t)pid);
    return pid < 0 ? -1 : OK;
}

WORD(brief) { /* CALLS: forks and executes another program, which soon ends; prints its pid */
    const char *calls = word();
    pid_t pid = forked();
    if (!pid) {
        execl("/proc/self/exe", "mixer", "brief", calls, (char *)NULL);
        _exit(127);
    }
    say_number((uint64_t)pid);
    return pid < 0 ? -1 : OK;
}

WORD(again) { /* executes this program again in the same process; it prints that it is ready in place of a reply */
    execl("/proc/self/exe", "mixer", (char *)NULL);
    return -1;
}

WORD(churn) { /* COUNT BYTES: allocates and frees under changing names; prints the number of refused calls */
    static const char *const paths[] = {"churn/a", "churn/b", "churn/c", "churn/d"};
    uint64_t count = number(), bytes = number(), refused = 0, address;
    for (uint64_t i = 0; i < count; i++) {
        if (i % 16 == 0) name_is(paths[i / 16 % 4]);
        if (cu.cuMemAlloc_v2(&address, bytes + i % 7 * 512) || cu.cuMemFree_v2(address)) refused++;
    }
    name_is("");
    say_number(refused);
    return OK;
}

int brief_life(uint64_t calls) {
    uint64_t kept[8] = {0};
    void *mine = NULL;
    if (cu.cuDevicePrimaryCtxRetain(&mine, 0) || cu.cuCtxSetCurrent(mine)) return 1;
    for (uint64_t i = 0; i < calls; i++) {
        uint64_t *place = &kept[i % 8];
        name_is(i % 2 ? "brief/odd" : "brief/even");
        if (*place) cu.cuMemFree_v2(*place);
        if (cu.cuMemAlloc_v2(place, 4096 + i * 512)) *place = 0;
    }
    return 0;
}

const command end_words[] = {
    {"die", die}, {"leave", leave}, {"quit", quit}, {"crash", crash},
    {"child", child}, {"orphan", orphan}, {"brief", brief}, {"again", again}, {"churn", churn},
    {NULL, NULL},
};
