/* Programs with every kind of behaviour, one for each argument: output, exit status, files, and observations of
 * themselves must be the same with and without an agent. tests/suite/host.rs compares them. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"
#include "gpumem.h"
#include "host.h"

/* Writes a result file, as a training would. */
static void leave_a_file(const char *name, int value) {
    FILE *file = fopen(name, "w");
    if (!file) return say("no %s: %d", name, errno);
    fprintf(file, "%s %d\n", name, value);
    fclose(file);
}

static void said_at_exit(void) { say("at exit"); }

static int plain(void) {
    atexit(said_at_exit);
    leave_a_file("before", 1);
    open_gpu();
    work(40);
    leave_a_file("between", 2);
    nap(25);
    work(40);
    printf("through stdio\n");
    fprintf(stderr, "and through stderr\n");
    view();
    leave_a_file("after", 3);
    return 7;
}

/* Outlasts a daemon's timeouts. */
static int long_one(void) {
    open_gpu();
    for (int i = 0; i < 12; i++) {
        work(30);
        nap(25);
    }
    view();
    return 0;
}

/* Sends more than a blocked daemon's socket and the agent's buffers can hold. Prints its end time, which the test
 * measures. */
static int much(void) {
    struct timespec now;
    open_gpu();
    nap(150);
    for (int i = 0; i < 1500; i++) work(30);
    clock_gettime(CLOCK_MONOTONIC, &now);
    say("ends at %lld", now.tv_sec * 1000000000ll + now.tv_nsec);
    return 0;
}

/* Names as no program should have them. */
static int bad_tags(void) {
    static char huge[1 << 20];
    char name[64];
    open_gpu();
    memset(huge, 'x', sizeof huge - 1);
    static const char *const names[] = {"", "/", "//", "\xff\xfe\x80", "a\nb\x1b[2J", "=cmd|' /C calc'!A0", "\"},{", "../../../etc/passwd", NULL};
    for (int i = 0; i < 9; i++) {
        gpumem_push(names[i]);
        gpumem_process_tag(names[i]);
        work(2);
    }
    gpumem_push(huge);
    gpumem_mark(huge);
    work(2);
    for (int i = 0; i < 100; i++) gpumem_pop(); /* far more than were opened */
    for (int i = 0; i < 2000; i++) {
        snprintf(name, sizeof name, "scope %d", i);
        gpumem_push(name); /* deeper than there is room, and never closed */
    }
    work(10);
    gpumem_phase(-5);
    gpumem_retag(99, 0xdead, "nothing", 77, -1);
    gpumem_pool_destroy(12345);
    gpumem_block_free(1, 2, 3);
    uint64_t pool = gpumem_pool_create(huge, 99, 4711);
    gpumem_segment_add(pool, ~0ull, ~0ull);
    gpumem_block_alloc(pool, ~0ull - 1, ~0ull, 0);
    gpumem_pool_check(pool, ~0ull);
    nap(25);
    view();
    return 0;
}

/* ---- threads ---- */

static pthread_key_t at_thread_end;
static void freed_at_thread_end(void *address) { give_back((unsigned long long)(uintptr_t)address); }

static void *worker(void *argument) {
    use_gpu();
    work(30 + (int)(long)argument);
    pthread_setspecific(at_thread_end, (void *)(uintptr_t)take_bytes(1 << 20));
    return NULL;
}

static int threads(void) {
    pthread_t some[8];
    pthread_attr_t small;
    open_gpu();
    pthread_key_create(&at_thread_end, freed_at_thread_end);
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 128 << 10);
    for (int round = 0; round < 9; round++) {
        for (long i = 0; i < 8; i++) pthread_create(&some[i], &small, worker, (void *)i);
        for (int i = 0; i < 8; i++) pthread_join(some[i], NULL);
    }
    nap(15);
    view();
    return 0;
}

static volatile int working;
static void cleaned(void *what) { say("cleaned up after %s", (const char *)what); }

/* Thread to cancel: it has no cancellation point. */
static void *cancelled(void *argument) {
    pthread_cleanup_push(cleaned, "itself");
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    use_gpu();
    working = 1;
    while (working == 1) {}
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
    void *module;
    uint64_t address;
    for (int i = 0; i < 20; i++) {
        cu.cuMemAlloc_v2(&address, 1ull << 50); /* fails, which is told at once */
        if (!cu.cuModuleLoadData(&module, "a module's source")) cu.cuModuleUnload(module);
        gpumem_push("cancelled");
        gpumem_mark("still here");
        gpumem_pop();
    }
    if (argument) gpumem_free(gpumem_dumps("json", 0, 0, 0)); /* waits for a daemon that does not answer */
    gpumem_counter_set("c", 1);
    say("here it ends");
    pthread_testcancel();
    say("was not cancelled");
    pthread_cleanup_pop(0);
    return NULL;
}

static int cancel(void) {
    pthread_t thread;
    void *result;
    open_gpu();
    nap(15);
    for (int i = 0; i < 3; i++) {
        working = 0;
        pthread_create(&thread, NULL, cancelled, i ? NULL : &thread);
        while (!working) {}
        pthread_cancel(thread);
        working = 2;
        pthread_join(thread, &result);
        say("joined: %s", result == PTHREAD_CANCELED ? "cancelled" : "returned");
    }
    work(10);
    view();
    return 0;
}

static volatile int working_on;

static void *exits(void *argument) {
    (void)argument;
    use_gpu();
    work(10);
    while (!working_on) nap(1); /* a thread that began after the end of the driver would fail */
    exit(5);
}
static void *works_on(void *argument) {
    (void)argument;
    use_gpu();
    working_on = 1;
    for (;;) cu.cuMemFree_v2(take_bytes(4096)); /* after the end of the driver, too */
    return NULL;
}

static int exit_thread(void) {
    pthread_t thread;
    atexit(said_at_exit);
    open_gpu();
    pthread_create(&thread, NULL, works_on, NULL);
    pthread_create(&thread, NULL, exits, NULL);
    for (;;) pause();
    return 0;
}

static void *lasts(void *argument) {
    (void)argument;
    use_gpu();
    nap(30);
    work(10);
    say("the last thread");
    return NULL;
}
static int leave(void) {
    pthread_t thread;
    atexit(said_at_exit);
    open_gpu();
    pthread_create(&thread, NULL, lasts, NULL);
    pthread_exit(NULL);
}

/* ---- signals ---- */

static volatile sig_atomic_t rang;
static uint64_t in_handler;
static void rings(int number) {
    (void)number;
    rang++;
    if (in_handler) cu.cuMemFree_v2(in_handler);
    in_handler = 0;
    cu.cuMemAlloc_v2(&in_handler, 8192);
    gpumem_push("handler");
    gpumem_pop();
}

/* The simulated driver's own lock is not for handlers: they come between its calls. */
static int handlers(void) {
    sigset_t alarm_only;
    struct sigaction action = {.sa_handler = rings, .sa_flags = SA_RESTART};
    open_gpu();
    sigemptyset(&alarm_only);
    sigaddset(&alarm_only, SIGALRM);
    sigaction(SIGALRM, &action, NULL);
    struct itimerval often = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &often, NULL);
    while (rang < 20) {
        pthread_sigmask(SIG_BLOCK, &alarm_only, NULL);
        uint64_t address = take_bytes(4096);
        give_back(address);
        pthread_sigmask(SIG_UNBLOCK, &alarm_only, NULL);
        for (int i = 0; i < 50; i++) { /* handlers may come in the middle of these */
            gpumem_push("scope");
            gpumem_block_alloc(1, address, 512, 0);
            gpumem_block_free(1, address, 0);
            gpumem_pop();
        }
    }
    setitimer(ITIMER_REAL, &never, NULL);
    say("rang");
    view();
    return 0;
}

/* Signals must reach the thread that waits for them: no thread of the agent may take them. */
static int waits(void) {
    sigset_t all;
    int got = 0;
    open_gpu();
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    for (int number = 1; number <= 31; number++) {
        if (number == SIGKILL || number == SIGSTOP || number == SIGCONT) continue;
        kill(getpid(), number);
        nap(1);
        struct timespec soon = {5, 0};
        got += sigtimedwait(&all, NULL, &soon) == number;
    }
    say("%d signals came", got);
    work(10);
    return 0;
}

static volatile int *volatile nowhere;
static sigjmp_buf back;
static void faulted(int number) {
    (void)number;
    siglongjmp(back, 1);
}
static int faults(void) {
    struct sigaction action = {.sa_handler = faulted, .sa_flags = SA_NODEFER};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    open_gpu();
    int met = 0;
    for (int i = 0; i < 50; i++) {
        gpumem_push("fault");
        if (sigsetjmp(back, 1)) met++;
        else *nowhere = 1;
        gpumem_pop();
        work(2);
    }
    say("%d faults", met);
    nap(15);
    view();
    return 0;
}

static int interrupted(void) { /* SA_RESTART is not set: reads end with EINTR only when the program's own signal comes */
    struct sigaction action = {.sa_handler = rings};
    int ends[2];
    char byte;
    if (pipe(ends)) return 1;
    sigaction(SIGALRM, &action, NULL);
    open_gpu();
    struct itimerval once = {{0, 0}, {0, 150000}};
    setitimer(ITIMER_REAL, &once, NULL);
    errno = 0;
    ssize_t got = read(ends[0], &byte, 1);
    say("read gave %zd, %d, after %d", got, errno, (int)rang);
    return 0;
}

/* ---- ends ---- */

static void begin(void) {
    atexit(said_at_exit);
    at_quick_exit(said_at_exit);
    open_gpu();
    work(20);
    nap(15);
}
static int end_at_once(void) {
    begin();
    _exit(3);
}
static int end_quickly(void) {
    begin();
    quick_exit(4);
}
static int end_by_abort(void) {
    begin();
    abort();
}
static int end_by_fault(void) {
    begin();
    *nowhere = 1;
    return 0;
}
static int end_by_kill(void) {
    begin();
    kill(getpid(), SIGKILL);
    return 0;
}
static int end_by_term(void) {
    begin();
    raise(SIGTERM);
    return 0;
}
static int end_twice(void) { /* while the driver has never been there */
    gpumem_push("a scope and no GPU");
    gpumem_pop();
    view();
    return 0;
}

static const habit own[] = {
    {"plain", plain},           {"long", long_one},       {"much", much},           {"tags", bad_tags},
    {"threads", threads},
    {"cancel", cancel},         {"exit-thread", exit_thread}, {"leave", leave},       {"handlers", handlers},
    {"waits", waits},           {"faults", faults},       {"interrupted", interrupted}, {"_exit", end_at_once},
    {"quick_exit", end_quickly}, {"abort", end_by_abort}, {"segv", end_by_fault},     {"kill", end_by_kill},
    {"term", end_by_term},      {"no-gpu", end_twice},    {NULL, NULL},
};

int main(int argc, char **argv) {
    const habit *const all[] = {own, families, limits};
    for (int list = 0; list < 3; list++)
        for (const habit *h = all[list]; h->name; h++) {
            if (argc == 1) printf("%s\n", h->name);
            else if (!strcmp(h->name, argv[1])) return h->run();
        }
    return argc == 1 ? 0 : 64;
}
