/* Habits with other processes, and with libraries that are loaded and unloaded. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "driver.h"
#include "gpumem.h"
#include "host.h"

extern char **environ;

/* How a child has ended, in words. */
static void waited(pid_t child, const char *what) {
    int status = -1;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    if (WIFEXITED(status)) say("%s ended with %d", what, WEXITSTATUS(status));
    else say("%s was ended by signal %d", what, WTERMSIG(status));
}

/* Calls in a child that must not hang. */
static void calls_in_child(void) {
    alarm(20);
    gpumem_push("child");
    gpumem_counter_set("of a child", 1);
    gpumem_mark("child");
    gpumem_pop();
}

static int forks(void) {
    open_gpu();
    work(20);
    for (int i = 0; i < 6; i++) {
        pid_t child = fork();
        if (child == 0) {
            uint64_t address;
            calls_in_child();
            say("the child's call gives %d", cu.cuMemAlloc_v2(&address, 4096));
            view();
            if (i % 2) exit(i);
            _exit(i);
        }
        waited(child, "the child");
    }
    work(20);
    nap(20);
    pid_t stays = fork(); /* outlives its parent, without open descriptors of the parent */
    if (stays == 0) {
        nap(120);
        say("the child that stays");
        _exit(0);
    }
    return 0;
}

static int forks_first(void) {
    pid_t children[3];
    gpumem_push("before");
    for (int i = 0; i < 3; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            alarm(20);
            open_gpu();
            work(20 + i);
            nap(20);
            exit(i);
        }
    }
    for (int i = 0; i < 3; i++) waited(children[i], "a child with a GPU");
    gpumem_pop();
    view();
    return 0;
}

static volatile int done;
static void *busy(void *argument) {
    (void)argument;
    use_gpu();
    while (!done) {
        uint64_t address = take_bytes(4096);
        gpumem_push("busy");
        gpumem_counter_add("busy", 1);
        gpumem_pop();
        give_back(address);
    }
    return NULL;
}

/* Forks while other threads are inside of the driver and of the agent. */
static int forks_amid(void) {
    pthread_t some[3];
    open_gpu();
    for (int i = 0; i < 3; i++) pthread_create(&some[i], NULL, busy, NULL);
    for (int i = 0; i < 12; i++) {
        pid_t child = fork();
        if (child == 0) {
            calls_in_child();
            exit(0);
        }
        int status = -1;
        waitpid(child, &status, 0);
        if (status) say("a child ended with %x", (unsigned)status);
    }
    done = 1;
    for (int i = 0; i < 3; i++) pthread_join(some[i], NULL);
    say("all children are gone");
    view();
    return 0;
}

static void *first_scope(void *argument) {
    pthread_barrier_wait(argument);
    gpumem_push("the very first");
    gpumem_counter_add("first", 1);
    gpumem_pop();
    return NULL;
}

/* Forks while another thread makes the agent's memory. */
static int forks_at_first(void) {
    /* The loader's own business is not what this is about: a child that is forked amid dlopen() has half a library. */
    const char *agent = getenv("CUDA_INJECTION64_PATH");
    if (agent && !dlopen(agent, RTLD_NOW)) say("%s", dlerror());
    for (int i = 0; i < 6; i++) {
        pid_t process = fork(); /* each time it is the first one */
        if (process == 0) {
            pthread_barrier_t both;
            pthread_t thread;
            pthread_barrier_init(&both, NULL, 2);
            pthread_create(&thread, NULL, first_scope, &both);
            pthread_barrier_wait(&both);
            for (volatile int wait = 0; wait < i * 8000; wait++) {}
            pid_t child = fork();
            if (child == 0) {
                calls_in_child();
                open_gpu();
                gpumem_counter_set("mine", 2);
                work(2);
                _exit(0);
            }
            int status = -1;
            waitpid(child, &status, 0);
            pthread_join(thread, NULL);
            if (status) say("the child ended with %x", (unsigned)status);
            _exit(0);
        }
        waitpid(process, NULL, 0);
    }
    say("every child came through");
    return 0;
}

/* A fork for which the C library calls no handlers. */
static int clones(void) {
    open_gpu();
    work(10);
    long child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (child == 0) {
        calls_in_child();
        _exit(9);
    }
    waited((pid_t)child, "the clone");
    work(10);
    nap(15);
    view();
    return 0;
}

static char itself[4096];
static char *const another[] = {itself, "plain", NULL};
static void find_itself(void) {
    ssize_t length = readlink("/proc/self/exe", itself, sizeof itself - 1);
    if (length < 0) exit(66);
}

static int forks_and_execs(void) {
    find_itself();
    open_gpu();
    work(10);
    pid_t child = fork();
    if (child == 0) {
        execv(itself, another);
        _exit(65);
    }
    waited(child, "another program");
    work(10);
    view();
    return 0;
}

static int spawns(void) {
    pid_t child;
    find_itself();
    open_gpu();
    work(10);
    child = vfork();
    if (child == 0) {
        execv(itself, another);
        _exit(65);
    }
    waited(child, "what was started by vfork");
    if (posix_spawn(&child, itself, NULL, NULL, another, environ)) return 1;
    waited(child, "what was spawned");
    say("the shell gives %d", WEXITSTATUS(system("echo a shell; exit 3")));
    work(10);
    view();
    return 0;
}

static int execs(void) {
    find_itself();
    open_gpu();
    work(10);
    nap(20);
    execv(itself, another);
    return 65;
}

/* Starts like a daemon: forks twice, with a new session, no terminal, no descriptors. */
static int daemonizes(void) {
    int ends[2];
    char line[256];
    if (pipe(ends)) return 1;
    if (fork() == 0) {
        setsid();
        if (fork()) _exit(0);
        if (chdir("/")) _exit(1);
        umask(0);
        int report = fcntl(ends[1], F_DUPFD_CLOEXEC, 100);
        for (int fd = 0; fd < 100; fd++) close(fd);
        for (int fd = 0; fd < 3; fd++)
            if (open("/dev/null", O_RDWR) != fd) _exit(2);
        open_gpu();
        work(40);
        nap(20);
        work(40);
        dup2(report, 1);
        close(report);
        view();
        exit(0);
    }
    close(ends[1]);
    for (ssize_t got; (got = read(ends[0], line, sizeof line)) > 0;)
        if (write(1, line, (size_t)got) != got) return 2;
    waited(-1, "the first of two");
    return 0;
}

/* A plug-in that uses the GPU and is unloaded, several times. */
static int plugins(void) {
    char path[4200];
    find_itself();
    *strrchr(itself, '/') = 0;
    snprintf(path, sizeof path, "%s/host-plugin.so", itself);
    for (int i = 0; i < 5; i++) {
        void *plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!plugin) {
            say("%s", dlerror());
            return 1;
        }
        int (*use)(int);
        *(void **)&use = dlsym(plugin, "plugin_use");
        say("the plug-in gives %d", use(10));
        nap(8);
        dlclose(plugin);
    }
    view();
    return 0;
}

const habit families[] = {
    {"fork", forks},       {"fork-first", forks_first},   {"fork-amid", forks_amid}, {"fork-at-first", forks_at_first},
    {"clone", clones},     {"fork-exec", forks_and_execs}, {"spawn", spawns},        {"exec", execs},
    {"daemonize", daemonizes}, {"plugin", plugins},       {NULL, NULL},
};
