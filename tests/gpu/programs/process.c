/* Commands about the process: cuInit, contexts, limits, modules, tags, fork and exec, its own books. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda.h"

static void *primary, *contexts[16];
static int context_count;

static void init(void) {
    result r = cuInit(0);
    uint64_t end = now_ns();
    load_agent();
    reply(r, began(), "\"ns\":%llu,\"agent\":%s,\"pid\":%d", (unsigned long long)(end - began()),
          gpumem_push ? "true" : "false", (int)getpid());
}

static void about(void) {
    uuid id = {{0}};
    char name[96] = "", text[37] = "";
    size_t total = 0;
    int count = 0, version = 0, processors = 0, threads = 0;
    cuDeviceGetCount(&count);
    cuDriverGetVersion(&version);
    result r = cuDeviceGet(&device, (int)number());
    if (!r) r = cuDeviceGetUuid(&id, device);
    cuDeviceGetName(name, sizeof name, device);
    cuDeviceTotalMem(&total, device);
    if (cuDeviceGetAttribute) {
        cuDeviceGetAttribute(&processors, 16, device);
        cuDeviceGetAttribute(&threads, 39, device);
    }
    char *out = text;
    for (int i = 0; i < 16; i++)
        out += sprintf(out, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", (unsigned char)id.bytes[i]);
    reply(r, began(), "\"uuid\":\"GPU-%s\",\"name\":\"%s\",\"total\":%zu,\"count\":%d,\"driver\":%d,\"processors\":%d,"
          "\"threads_per_processor\":%d", text, name, total, count, version, processors, threads);
}

static void context(void) {
    result r = cuPrimaryRetain(&primary, device);
    if (!r) r = cuCtxSetCurrent(primary);
    done(r);
}

static void context_new(void) {
    void *made = NULL;
    result r = context_count < 16 ? cuCtxCreate(&made, 0, device) : -1;
    if (!r) contexts[context_count++] = made;
    reply(r, began(), "\"id\":%d", context_count - 1);
}

static void context_destroy(void) {
    uint64_t id = number();
    result r = id < 16 && contexts[id] ? cuCtxDestroy(contexts[id]) : -1;
    if (!r) contexts[id] = NULL;
    if (!r && primary) r = cuCtxSetCurrent(primary);
    done(r);
}

static void forget_all(void) {
    int count;
    row *all = rows(&count);
    for (int i = 0; i < count; i++) all[i].live = 0;
    stream = NULL;
    forget_modules();
}

static void reset(void) {
    result r = cuPrimaryReset(device);
    if (!r) forget_all();
    primary = NULL; /* `context` makes it anew */
    cuCtxSetCurrent(NULL);
    done(r);
}

static void release(void) {
    result r = cuPrimaryRelease(device);
    if (!r) forget_all();
    primary = NULL;
    done(r);
}

static void limit(void) {
    int which = (int)number();
    size_t value = number_or(SIZE_MAX), now = 0; /* without one it is only asked for */
    result r = value == SIZE_MAX ? 0 : cuCtxSetLimit(which, value);
    cuCtxGetLimit(&now, which);
    reply(r, began(), "\"value\":%zu", now);
}

static void tag(void) {
    const char *path = word();
    if (gpumem_push) gpumem_push(path);
    if (sim_tag) sim_tag(path);
    done(0);
}
static void untag(void) {
    if (gpumem_pop) gpumem_pop();
    if (sim_tag) sim_tag("");
    done(0);
}
static void step(void) {
    uint64_t n = number();
    if (gpumem_step) gpumem_step(n);
    done(0);
}
static void pause_agent(void) {
    if (gpumem_pause) gpumem_pause();
    done(gpumem_pause ? 0 : NOT_FOUND);
}
static void resume_agent(void) {
    if (gpumem_resume) gpumem_resume();
    done(gpumem_resume ? 0 : NOT_FOUND);
}

/* A child that ends by `exit`, by `_exit`, or that calls cuInit first. */
static void fork_child(void) {
    const char *how = word();
    int pipes[2], code = -1, status = 0;
    if (pipe(pipes)) abort();
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        close(0);
        code = !strcmp(how, "init") ? cuInit(0) : 0;
        address there = 0;
        if (!strcmp(how, "alloc")) code = cuMemAlloc(&there, 1 << 20);
        if (write(pipes[1], &code, sizeof code) != (ssize_t)sizeof code) _exit(9);
        if (!strcmp(how, "_exit")) _exit(7);
        exit(7);
    }
    close(pipes[1]);
    if (read(pipes[0], &code, sizeof code) != (ssize_t)sizeof code) code = -1;
    close(pipes[0]);
    waitpid(child, &status, 0);
    reply(0, began(), "\"child\":%d,\"code\":%d,\"status\":%d", (int)child, code, status);
}

static void exec_self(void) {
    char *const arguments[] = {(char *)"driver-after-exec", NULL};
    reply(0, began(), "\"pid\":%d", (int)getpid());
    execv("/proc/self/exe", arguments);
    abort();
}

static void end(void) {
    int code = (int)number();
    done(0);
    exit(code);
}

static void free_memory(void) {
    size_t left = 0, total = 0;
    result r = cuMemGetInfo(&left, &total);
    reply(r, began(), "\"free\":%zu,\"total\":%zu", left, total);
}

static void books(void) {
    static const char *const names[KINDS] = {"device", "pitched", "async", "managed", "pinned", "registered", "array",
                                             "mipmap", "imported", "handle", "mapping"};
    uint64_t bytes[KINDS] = {0}, count[KINDS] = {0};
    int total;
    const row *all = rows(&total);
    for (int i = 0; i < total; i++)
        if (all[i].live) {
            bytes[all[i].kind] += all[i].bytes;
            count[all[i].kind]++;
        }
    char text[1024], *out = text;
    for (int k = 0; k < KINDS; k++)
        out += sprintf(out, "%s\"%s\":[%llu,%llu]", k ? "," : "", names[k], (unsigned long long)count[k],
                       (unsigned long long)bytes[k]);
    reply(0, began(), "%s", text);
}

const command process_commands[] = {
    {"init", init, ""}, {"device", about, "ORDINAL"}, {"context", context, ""}, {"context_new", context_new, ""},
    {"context_destroy", context_destroy, "ID"}, {"release", release, ""}, {"reset", reset, ""},
    {"limit", limit, "WHICH [BYTES]"}, {"tag", tag, "PATH"},
    {"untag", untag, ""}, {"step", step, "N"}, {"pause", pause_agent, ""}, {"resume", resume_agent, ""},
    {"fork", fork_child, "exit|_exit|init|alloc"}, {"exec", exec_self, ""}, {"exit", end, "CODE"},
    {"info", free_memory, ""}, {"books", books, ""}, {NULL, NULL, NULL},
};
