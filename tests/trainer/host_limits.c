/* Habits that are about what a program may not do, or does not let its libraries do. */
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "driver.h"
#include "gpumem.h"
#include "host.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

/* ---- filters ---- */

static void forbid(const int *calls, int count, unsigned action) {
    struct sock_filter filter[32];
    int length = 0;
    filter[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int i = 0; i < count; i++) {
        filter[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)calls[i], 0, 1);
        filter[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, action);
    }
    filter[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {(unsigned short)length, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) say("no filters here");
}

#define REFUSE (SECCOMP_RET_ERRNO | EPERM)
#define KILL SECCOMP_RET_KILL_PROCESS

static const int no_socket[] = {SYS_socket, SYS_connect, SYS_sendmsg, SYS_sendto};
static const int no_memfd[] = {SYS_memfd_create};
static const int no_pidfd[] = {SYS_pidfd_open, SYS_process_vm_readv, SYS_tgkill, SYS_pipe2};

/* Before CUDA's start every thread that comes has the filter, afterwards only this one. */
static int filtered(const int *calls, int count, unsigned action, int late) {
    if (!late) forbid(calls, count, action);
    open_gpu();
    if (late) forbid(calls, count, action);
    work(20);
    nap(25);
    work(20);
    gpumem_free(gpumem_dumps("json", 0, 0, 0));
    nap(10);
    view();
    return 0;
}

#define FILTERED(name, calls, action, late) \
    static int name(void) { return filtered(calls, (int)(sizeof calls / sizeof *calls), action, late); }
FILTERED(socket_refused, no_socket, REFUSE, 0)
FILTERED(socket_kills, no_socket, KILL, 0)
FILTERED(socket_kills_late, no_socket, KILL, 1)
FILTERED(memfd_refused, no_memfd, REFUSE, 0)
FILTERED(memfd_kills, no_memfd, KILL, 0)
FILTERED(pidfd_refused, no_pidfd, REFUSE, 0)
FILTERED(pidfd_kills, no_pidfd, KILL, 0)

/* ---- limits ---- */

static void limit(__rlimit_resource_t kind, rlim_t soft) {
    struct rlimit now;
    getrlimit(kind, &now);
    now.rlim_cur = soft;
    setrlimit(kind, &now);
}

static int few_files(void) {
    limit(RLIMIT_NOFILE, 16);
    open_gpu();
    work(20);
    nap(20);
    int numbers[3];
    for (int i = 0; i < 3; i++) numbers[i] = open("/dev/null", O_RDONLY);
    say("opened %d %d %d more", numbers[1] - numbers[0], numbers[2] - numbers[1], numbers[0] >= 0);
    work(20);
    return 0;
}

/* All descriptors but two are used when CUDA starts. */
static int no_files(void) {
    int last = -1, fd;
    load_driver();
    limit(RLIMIT_NOFILE, 20);
    while ((fd = dup(0)) >= 0) last = fd;
    close(last);
    close(last - 1);
    open_gpu();
    work(20);
    nap(20);
    close(3);
    work(20);
    nap(20);
    work(20);
    return 0;
}

static unsigned long mapped(void) {
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%lu", &pages) != 1) pages = 0;
    if (file) fclose(file);
    return pages * (unsigned long)sysconf(_SC_PAGESIZE);
}

/* Takes all memory that there is, and lives without for a while: it is prepared for that. */
static int no_memory(void) {
    struct chunk {
        struct chunk *next;
    } *chunks = NULL, *chunk;
    char name[32];
    open_gpu();
    work(20);
    nap(150); /* a thread that enters a library for the first time needs memory, which nobody can do without */
    int listens = gpumem_available(); /* where nobody does, the header would look for a library with what memory there is */
    uint64_t address = take_bytes(4096);
    limit(RLIMIT_AS, mapped() + (48u << 20));
    for (size_t size = 4 << 20; size >= 16; size /= 2)
        while ((chunk = malloc(size))) {
            chunk->next = chunks;
            chunks = chunk;
        }
    say("out of memory: %d", errno == ENOMEM);
    for (int i = 0; i < 300 && listens; i++) {
        snprintf(name, sizeof name, "%d", i);
        gpumem_push(name);
        gpumem_retag(0, address, name, GPUMEM_ROLE_INPUT, 0);
        gpumem_pop();
        if (i % 20 == 0) nap(8);
    }
    if (listens) {
        gpumem_counter_set("in need", 1);
        char *text = gpumem_dumps("json", 0, 0, 0);
        gpumem_free(text);
        gpumem_configure("marks", "1");
    }
    nap(30);
    while (chunks) {
        chunk = chunks->next;
        free(chunks);
        chunks = chunk;
    }
    limit(RLIMIT_AS, RLIM_INFINITY);
    give_back(address);
    work(20);
    nap(15);
    view();
    return 0;
}

/* As much as the driver needs, and less than the agent would like to have. */
static int little_memory(void) {
    unsigned long needed = 0;
    int ends[2];
    load_driver();
    if (pipe(ends)) return 1;
    if (fork() == 0) {
        unsigned long before = mapped();
        unsetenv("CUDA_INJECTION64_PATH");
        open_gpu();
        needed = mapped() - before;
        _exit(write(ends[1], &needed, sizeof needed) != sizeof needed);
    }
    if (read(ends[0], &needed, sizeof needed) != sizeof needed) return 2;
    wait(NULL);
    limit(RLIMIT_AS, mapped() + needed + (8u << 20));
    open_gpu();
    work(20);
    nap(15);
    work(20);
    view();
    return 0;
}

static void *nothing(void *argument) { return argument; }

static int small_files(void) {
    limit(RLIMIT_FSIZE, 4096);
    open_gpu();
    work(20);
    nap(15);
    work(20);
    view();
    return 0;
}

static int locked_memory(void) {
    limit(RLIMIT_MEMLOCK, 1 << 20);
    say("locked: %d", mlockall(MCL_FUTURE | MCL_ONFAULT));
    open_gpu();
    work(20);
    nap(15);
    view();
    return 0;
}

/* No thread can be made any more. The limit is one of users, and not for root: another user's in name, with root's rights but those
 * that lift limits, it keeps its files and its GPU. */
static int no_threads(void) {
    struct __user_cap_header_struct version = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct rights[2];
    pthread_t thread;
    limit(RLIMIT_NPROC, 1);
    if (geteuid() == 0 && !setresuid(64999, 0, 0) && !syscall(SYS_capget, &version, rights)) {
        rights[0].effective &= ~(1u << CAP_SYS_ADMIN | 1u << CAP_SYS_RESOURCE);
        syscall(SYS_capset, &version, rights);
    }
    open_gpu();
    work(20);
    nap(20);
    int refused = pthread_create(&thread, NULL, nothing, NULL);
    say("a thread of its own: %s", refused == EAGAIN ? "refused" : "made");
    work(20);
    gpumem_free(gpumem_dumps("json", 0, 0, 0)); /* who would send or write it? */
    gpumem_configure("marks", "1");
    view();
    return 0;
}

/* ---- descriptors ---- */

static int closed(void) {
    int saved = fcntl(1, F_DUPFD_CLOEXEC, 100);
    load_driver();
    close(0);
    close(1);
    open_gpu();
    work(20);
    nap(20);
    ssize_t out = write(1, "lost words\n", 11);
    int number = open("first", O_WRONLY | O_CREAT, 0600);
    ssize_t wrote = write(number, "a file\n", 7);
    nap(15);
    work(20);
    close(number);
    dup2(saved, 1);
    say("wrote %zd, and %zd to number %d", out, wrote, number);
    return 0;
}

/* As daemons and sandboxes do: whatever is open is closed, and the numbers are used for other things. */
static int closes_all(void) {
    char name[16];
    open_gpu();
    work(20);
    nap(20);
    for (int fd = 3; fd < 1024; fd++) { /* but the driver's: the machine takes a process without it for dead */
        char place[32], path[512];
        snprintf(place, sizeof place, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(place, path, sizeof path - 1);
        const char *machine = getenv("GPUMEM_SIM");
        if (length > 0 && machine && !strncmp(path, machine, (size_t)length)) continue;
        close(fd);
    }
    for (int i = 0; i < 10; i++) {
        snprintf(name, sizeof name, "file%d", i);
        int fd = open(name, O_WRONLY | O_CREAT, 0600);
        dup2(fd, 512 + i); /* where another's may have been */
        if (write(fd, name, strlen(name)) < 0) return 1;
    }
    work(40);
    nap(60);
    work(40);
    nap(60);
    view();
    return 0;
}

/* ---- who and where ---- */

static int elsewhere(void) {
    open_gpu();
    work(10);
    mkdir("gone", 0700);
    if (chdir("gone") || rmdir("../gone")) return 1;
    work(10);
    nap(20);
    if (!chdir("/tmp")) work(10);
    return 0;
}

static int jailed(void) {
    open_gpu();
    work(10);
    nap(10); // the agent's thread has found its daemon, mostly: later it cannot
    mkdir("jail", 0700);
    say("chroot: %d", chroot("jail") ? errno : 0);
    if (chdir("/")) return 1;
    work(10);
    nap(120);
    work(10);
    return 0;
}

static int somebody_else(void) {
    open_gpu();
    work(10);
    nap(10);
    say("setuid: %d", setgid(65534) || setuid(65534) ? errno : 0);
    work(10);
    nap(120);
    work(10);
    prctl(PR_SET_DUMPABLE, 0);
    nap(20);
    view();
    return 0;
}

const habit limits[] = {
    {"no-socket", socket_refused}, {"no-socket-kill", socket_kills}, {"late-filter", socket_kills_late},
    {"no-memfd", memfd_refused},   {"no-memfd-kill", memfd_kills},   {"no-pidfd", pidfd_refused},
    {"no-pidfd-kill", pidfd_kills}, {"few-files", few_files},        {"no-files", no_files},
    {"no-memory", no_memory},      {"little-memory", little_memory}, {"small-files", small_files},
    {"locked", locked_memory},     {"no-threads", no_threads},       {"closed", closed},               {"closefrom", closes_all},
    {"elsewhere", elsewhere},      {"chroot", jailed},               {"setuid", somebody_else},
    {NULL, NULL},
};
