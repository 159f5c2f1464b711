/* The self-test of the simulated machine: check DIR (what `make OUT=DIR` built). No product code. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static char dir[512], machine[600], truth[600], probe_out[600];
static int failures, hush; /* hush: children that are meant to fail say so elsewhere */

#define EXPECT(condition)                                                       \
    do {                                                                        \
        if (!(condition)) {                                                     \
            failures++;                                                         \
            fprintf(stderr, "check.c:%d: not so: %s\n", __LINE__, #condition);  \
        }                                                                       \
    } while (0)

typedef struct {
    uint32_t pid;
    uint64_t bytes;
    uint32_t gi, ci;
} record;
typedef struct {
    uint32_t version;
    uint64_t total, reserved, free, used;
} memory;

static struct {
    uint32_t (*init)(void), (*shutdown)(void);
    uint32_t (*by_index)(unsigned, void **);
    uint32_t (*list)(void *, unsigned *, void *), (*graphics)(void *, unsigned *, void *);
    uint32_t (*memory)(void *, memory *);
    uint32_t (*mig)(void *, unsigned, void **);
} nvml;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int tool(const char *format, ...) {
    char words[1024], command[1800];
    va_list a;
    va_start(a, format);
    vsnprintf(words, sizeof words, format, a);
    va_end(a);
    snprintf(command, sizeof command, "%s/bin/fake-gpu %s", dir, words);
    return system(command);
}

/* Starts a program of DIR/bin; `out`: its standard output. */
static pid_t start(FILE **out, char *const words[], char *const extra[]) {
    int ends[2];
    char path[700];
    if (pipe(ends)) exit(1);
    snprintf(path, sizeof path, "%s/bin/%s", dir, words[0]);
    pid_t pid = fork();
    if (pid == 0) {
        for (int i = 0; extra && extra[i]; i++) putenv(extra[i]);
        if (hush) dup2(open("/dev/null", O_WRONLY), 2);
        dup2(ends[1], 1);
        close(ends[0]);
        close(ends[1]);
        execv(path, words);
        _exit(127);
    }
    close(ends[1]);
    *out = fdopen(ends[0], "r");
    return pid;
}

static int wait_line(FILE *f, const char *start) {
    char text[512];
    while (fgets(text, sizeof text, f))
        if (!strncmp(text, start, strlen(start))) return 1;
    return 0;
}

static int finish(pid_t pid) {
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int run(char *const words[], char *const extra[]) {
    FILE *out;
    pid_t pid = start(&out, words, extra);
    while (fgetc(out) != EOF) {}
    fclose(out);
    return finish(pid);
}

static uint64_t number(const char *line, const char *key) {
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char *at = strstr(line, quoted);
    return at ? strtoull(at + strlen(quoted), NULL, 10) : UINT64_MAX;
}

/* Checks that each line adds up. Returns the number of lines, and the last `used` of a pid in a list call. */
static int read_truth(uint32_t pid, int last_of_device, uint64_t *used) {
    FILE *f = fopen(truth, "r");
    char line[65536], want[40];
    int lines = 0;
    snprintf(want, sizeof want, "00000%x\",", last_of_device);
    while (f && fgets(line, sizeof line, f)) {
        lines++;
        uint64_t tracked = number(line, "tracked"), sum = number(line, "idle");
        char *tags = strstr(line, "\"tags\":{"), *end = tags ? strstr(tags, "},\"beside\"") : NULL;
        EXPECT(end);
        for (char *at = tags ? tags + 8 : NULL; at && at < end;) {
            at = strstr(at, "\":");
            if (!at || at >= end) break;
            sum += strtoull(at + 2, &at, 10);
        }
        EXPECT(sum == tracked);
        EXPECT(number(line, "used") == number(line, "context") + number(line, "modules") + number(line, "local") +
                                           number(line, "other") + number(line, "rounding") + tracked);
        if (used && number(line, "pid") == pid && strstr(line, want)) *used = number(line, "used");
    }
    if (f) fclose(f);
    return lines;
}

static uint64_t listed(int device, uint32_t pid, int *count) {
    record rows[64];
    void *h = NULL;
    unsigned n = 64;
    EXPECT(nvml.by_index((unsigned)device, &h) == 0);
    EXPECT(nvml.list(h, &n, rows) == 0);
    if (count) *count = (int)n;
    for (unsigned i = 0; i < n; i++)
        if (rows[i].pid == pid) return rows[i].bytes;
    return 0;
}

static memory info(int device) {
    memory m = {.version = 0x02000028};
    void *h = NULL;
    nvml.by_index((unsigned)device, &h);
    EXPECT(nvml.memory(h, &m) == 0);
    EXPECT(m.total == m.reserved + m.used + m.free);
    return m;
}

static void no_machine(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    uint32_t (*init)(unsigned) = NULL;
    *(void **)&init = dlsym(cuda, "cuInit");
    unsetenv("GPUMEM_SIM");
    EXPECT(init(0) == 100);
    EXPECT(nvml.init() == 9);
    setenv("GPUMEM_SIM", machine, 1);
}

/* A trainer's managed memory counts in the device's sum and in no process's. */
#define MANAGED (6ull << 20)

static void processes(void) {
    FILE *one, *two;
    char *first[] = {"trainer", "--quiet", "--devices", "0,1", "--steps", "9", "--hold", "60", NULL};
    char *second[] = {"trainer", "--quiet", "--devices", "1", "--steps", "1000000", "--seed", "7", NULL};
    pid_t a = start(&one, first, NULL), b = start(&two, second, NULL);
    EXPECT(wait_line(one, "ready") && wait_line(two, "ready"));
    for (int i = 0; i < 40; i++) {
        int count = 0;
        uint64_t used = 0;
        EXPECT(listed(1, (uint32_t)b, &count) > 0 && count == 2);
        EXPECT(listed(0, (uint32_t)a, &count) > 0 && count == 1);
        read_truth((uint32_t)a, 0, &used);
        usleep(1000);
    }
    EXPECT(wait_line(one, "device=1")); /* from here on it only holds */
    uint64_t bytes = listed(0, (uint32_t)a, NULL), said = 0;
    EXPECT(read_truth((uint32_t)a, 0, &said) >= 120);
    EXPECT(bytes == said && info(0).used == bytes + MANAGED);
    kill(b, SIGKILL);
    finish(b);
    EXPECT(listed(1, (uint32_t)b, NULL) == 0);
    EXPECT(info(1).used == listed(1, (uint32_t)a, NULL) + MANAGED);

    /* Others than real ones. */
    int count = 0;
    EXPECT(!tool("set %s gpu0.ghosts=5 gpu0.graphics=1", machine) && !tool("hold %s %d 0 1000", machine, getpid()));
    EXPECT(listed(0, (uint32_t)getpid(), &count) == 1000 && count == 7);
    EXPECT(info(0).used == bytes + MANAGED + 1000 + 5 * (256ull << 20));
    EXPECT(!tool("hold %s %d 0 0", machine, getpid()) && !tool("set %s ghosts=0", machine));
    EXPECT(!tool("grow %s %d 0 4096", machine, a));
    EXPECT(listed(0, (uint32_t)a, NULL) == bytes + 4096);
    record rows[8];
    void *h;
    unsigned n = 8;
    nvml.by_index(0, &h);
    EXPECT(nvml.graphics(h, &n, rows) == 0 && n == 1 && rows[0].bytes == bytes + 4096 && rows[0].gi == UINT32_MAX);
    kill(a, SIGTERM);
    EXPECT(finish(a) == 0);
    EXPECT(info(0).used == 0 && info(1).used == 0);
    fclose(one);
    fclose(two);
}

static void *hanging(void *h) {
    record rows[8];
    unsigned n = 8;
    return (void *)(uintptr_t)nvml.list(h, &n, rows);
}

static void faults(void) {
    void *h, *other, *instance, *result;
    record rows[8];
    unsigned n = 8;
    memory m = {.version = 0x02000028};
    nvml.by_index(0, &h);
    nvml.by_index(1, &other);
    static const struct {
        const char *name;
        uint32_t list, memory;
    } all[] = {{"lost", 15, 15}, {"no_permission", 4, 0}, {"not_supported", 3, 3}, {"unknown", 999, 999},
               {"code:27", 27, 27}};
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++) {
        EXPECT(!tool("set %s gpu0.fault=%s", machine, all[i].name));
        EXPECT(nvml.list(h, &n, rows) == all[i].list && nvml.memory(h, &m) == all[i].memory);
        EXPECT(nvml.list(other, &n, rows) == 0);
    }
    EXPECT(tool("set %s gpu0.fault=code:70000 2>/dev/null", machine) && tool("set %s gpu0.fault=code: 2>/dev/null", machine));
    EXPECT(!tool("set %s gpu0.fault=none unified=1 nvml.wsl=1 gpu0.ghosts=1", machine));
    n = 8;
    EXPECT(nvml.memory(h, &m) == 3 && nvml.list(h, &n, rows) == 0 && n == 1 && rows[0].bytes == UINT64_MAX);
    EXPECT(!tool("set %s unified=0 nvml.wsl=0", machine));
    EXPECT(!tool("set %s gpu0.fault=bytes_unavailable gpu0.ghosts=1", machine));
    n = 8;
    EXPECT(nvml.list(h, &n, rows) == 0 && n == 1 && rows[0].bytes == UINT64_MAX);
    n = 0;
    EXPECT(nvml.list(h, &n, NULL) == 7 && n == 1);
    EXPECT(!tool("set %s gpu0.fault=none nvml.race=100", machine));
    n = 8;
    EXPECT(nvml.list(h, &n, rows) == 7 && n == 9);
    EXPECT(!tool("set %s nvml.race=0 ghosts=0 gpu0.fault=hang", machine));
    pthread_t thread;
    pthread_create(&thread, NULL, hanging, h);
    struct timespec soon;
    clock_gettime(CLOCK_REALTIME, &soon);
    soon.tv_nsec += 50000000;
    soon.tv_sec += soon.tv_nsec / 1000000000;
    soon.tv_nsec %= 1000000000;
    EXPECT(pthread_timedjoin_np(thread, &result, &soon) == ETIMEDOUT);
    n = 8;
    EXPECT(nvml.list(other, &n, rows) == 0);
    EXPECT(!tool("set %s gpu0.fault=none gpu0.mig=2", machine));
    EXPECT(pthread_join(thread, &result) == 0 && result == NULL);
    EXPECT(nvml.mig(h, 0, &instance) == 0 && nvml.mig(h, 1, &instance) == 6 && nvml.mig(h, 2, &instance) == 0);
    EXPECT(!tool("set %s mig=0", machine));
}

static void older_libraries(void) {
    char path[600];
    static const struct {
        const char *folder;
        int v3, v2, memory_v2, conf, detail;
    } all[] = {{"lib", 1, 1, 1, 1, 1}, {"lib-535", 1, 1, 1, 1, 0}, {"lib-470", 0, 1, 0, 0, 0}, {"lib-v1", 0, 0, 0, 0, 0}};
    for (unsigned i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s/%s/libnvidia-ml.so.1", dir, all[i].folder);
        void *l = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        EXPECT(l && !!dlsym(l, "nvmlDeviceGetComputeRunningProcesses_v3") == all[i].v3);
        EXPECT(!!dlsym(l, "nvmlDeviceGetComputeRunningProcesses_v2") == all[i].v2);
        EXPECT(!!dlsym(l, "nvmlDeviceGetMemoryInfo_v2") == all[i].memory_v2);
        EXPECT(!!dlsym(l, "nvmlDeviceGetConfComputeMemSizeInfo") == all[i].conf);
        EXPECT(!!dlsym(l, "nvmlDeviceGetRunningProcessDetailList") == all[i].detail);
        EXPECT(dlsym(l, "nvmlDeviceGetComputeRunningProcesses") && !dlsym(l, "sim_open"));
    }
}

static void injection(void) {
    char inject[700], out[700], cupti[64];
    snprintf(inject, sizeof inject, "CUDA_INJECTION64_PATH=%s/bin/probe.so", dir);
    snprintf(out, sizeof out, "PROBE_OUT=%s", probe_out);
    char *trainer[] = {"trainer", "--quiet", "--free", "--fork", "--race", "4", "--race-loops", "1000", NULL};
    /* A free that sleeps between giving the memory back and returning lets the others overtake, however busy the
     * machine that this runs on. */
    EXPECT(!tool("set %s cuda.free_us=2 latency=sleep", machine));
    static const char *const versions[] = {"libcupti.so.11.8", "libcupti.so.12"};
    for (unsigned v = 0; v < 2; v++) {
        unlink(probe_out);
        snprintf(cupti, sizeof cupti, "PROBE_CUPTI=%s", versions[v]);
        char *extra[] = {inject, out, cupti, NULL};
        EXPECT(run(trainer, extra) == 0);
        FILE *f = fopen(probe_out, "r");
        unsigned result = 9, second = 9;
        unsigned long long enters = 0, exits = 1, allocations = 0, frees = 1, bytes, resources = 0, overtaken = 0, bad = 1;
        EXPECT(f && fscanf(f, "loaded %u %u ", &result, &second) == 2);
        EXPECT(result == 0 && second == 39);
        /* The forked child ends first and has its parent's handlers. */
        while (f && fscanf(f, "seen %llu %llu %llu %llu %llu %llu %llu %llu ", &enters, &exits, &allocations, &frees,
                           &bytes, &resources, &overtaken, &bad) == 8) {}
        EXPECT(enters > 8000 && enters == exits && bad == 0);
        EXPECT(allocations > 4000 && frees >= allocations && resources >= 2);
        EXPECT(overtaken > 0);
        if (f) fclose(f);
    }
    EXPECT(!tool("set %s cuda.free_us=0 latency=spin", machine));
    /* A library that returns 0 is closed, and the next cuInit loads it again. */
    unlink(probe_out);
    char *twice[] = {"check", "--init-twice", NULL}, *extra[] = {inject, out, "PROBE_RETURN=0", NULL};
    EXPECT(run(twice, extra) == 0);
    FILE *f = fopen(probe_out, "r");
    char line[128];
    int loads = 0;
    while (f && fgets(line, sizeof line, f)) loads += !strncmp(line, "loaded", 6);
    EXPECT(loads == 2);
    if (f) fclose(f);
    unlink(probe_out);
}

static void ends(void) {
    char *fatal[] = {"trainer", "--quiet", "--oom-fatal", "--steps", "4", NULL};
    char *survived[] = {"trainer", "--quiet", "--oom", "--fork", "--steps", "4", "--free", NULL};
    char *full[] = {"trainer", "--quiet", "--leak", "4096", "--oom-fatal", "--steps", "40", "--step-ms", "0", NULL};
    EXPECT(run(survived, NULL) == 0);
    hush = 1;
    EXPECT(run(fatal, NULL) == 1);
    char *missing[] = {"trainer", "--devices", "7", NULL}, *hidden[] = {"CUDA_VISIBLE_DEVICES=", NULL};
    EXPECT(run(missing, NULL) == 4);
    EXPECT(run(survived, hidden) == 4);
    EXPECT(run(full, NULL) == 1);
    hush = 0;
    EXPECT(info(0).used == 0);
}

static void calls(void) {
    char *words[] = {"calls", NULL};
    EXPECT(run(words, NULL) == 0);
    EXPECT(info(0).used == 0);
}

/* A cost table overrides built-in values, keys override the table; an error names the invalid line. */
static void costs(void) {
    char table[600], other[700], said[256] = "";
    snprintf(table, sizeof table, "%s/check.costs", dir);
    snprintf(other, sizeof other, "%s/check.other", dir);
    FILE *f = fopen(table, "w");
    fprintf(f, "# a table\n\ncontext = 300M # measured on X\ncontext_next=100M\ncost.stream = 20000\ncost.event = 1000\n"
               "cost.graph_exec = 2M\ncost.peer = 4M\ncost.module_granule = 2M\ncost.module_overhead = 100K\n"
               "cost.green_context = 8M\ncost.small_unit = 4K\ncost.granule = 1M\ncost.small_limit = 16K\n");
    fclose(f);
    EXPECT(!tool("init %s cost.granule=2M costs=%s devices=2 cuda.lazy=1", other, table));
    EXPECT(!tool("show %s | grep -q '^gpu0.context=314572800'", other));
    EXPECT(!tool("show %s | grep -q '^cost.granule=2097152'", other));
    EXPECT(!tool("set %s cost.granule=1M cost.module_overhead=0", other));
    char place[800], *words[] = {"calls", "costs", NULL}, *extra[] = {place, NULL};
    snprintf(place, sizeof place, "GPUMEM_SIM=%s", other);
    EXPECT(run(words, extra) == 0);
    unlink(other);
    static const char *const bad[] = {"cost.granul = 1\n", "\ncontext = many", "context 5", "memory = 5", "cost.granule = 0"};
    for (unsigned i = 0; i < 5; i++) {
        f = fopen(table, "w");
        fputs(bad[i], f);
        fclose(f);
        EXPECT(tool("init %s costs=%s 2>%s.said", other, table, table) != 0 && access(other, F_OK));
    }
    snprintf(other, sizeof other, "%s.said", table);
    EXPECT((f = fopen(other, "r")) && fgets(said, sizeof said, f) && strstr(said, "cost.granule must be"));
    if (f) fclose(f);
    unlink(other);
    unlink(table);
}

static int init_twice(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    uint32_t (*init)(unsigned) = NULL;
    *(void **)&init = dlsym(cuda, "cuInit");
    return init(0) || init(0);
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "--init-twice")) return init_twice();
    if (argc != 2) return 2;
    snprintf(dir, sizeof dir, "%s", argv[1]);
    snprintf(machine, sizeof machine, "%s/check.machine", dir);
    snprintf(truth, sizeof truth, "%s/check.truth", dir);
    snprintf(probe_out, sizeof probe_out, "%s/check.probe", dir);
    unlink(truth);
    setenv("GPUMEM_SIM_TRUTH", truth, 1);
    double begin = now();
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    *(void **)&nvml.init = dlsym(library, "nvmlInit_v2");
    *(void **)&nvml.shutdown = dlsym(library, "nvmlShutdown");
    *(void **)&nvml.by_index = dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
    *(void **)&nvml.list = dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v3");
    *(void **)&nvml.graphics = dlsym(library, "nvmlDeviceGetGraphicsRunningProcesses_v3");
    *(void **)&nvml.memory = dlsym(library, "nvmlDeviceGetMemoryInfo_v2");
    *(void **)&nvml.mig = dlsym(library, "nvmlDeviceGetMigDeviceHandleByIndex");
    /* The expected values must not depend on the committed table, which runs on hardware replace. */
    EXPECT(!tool("init %s devices=2 context=498M cost.granule=2M cost.small_limit=1M cost.small_unit=512 cost.vmm_granule=2M "
                 "cuda.pool_step=32M cost.module_granule=2M cost.module_overhead=0 cost.stack_default=1K cost.stack_percent=100 "
                 "processors=132 threads=2048 cost.printf_default=1M cost.printf_percent=100 cost.heap_default=8M "
                 "cost.heap_percent=100 cost.stream=0 cost.event=0 cost.graph_exec=0 cost.peer=0 cost.green_context=0", machine));
    no_machine();
    EXPECT(nvml.init() == 0);
    calls();
    costs();
    processes();
    faults();
    older_libraries();
    injection();
    ends();
    EXPECT(nvml.shutdown() == 0);
    unlink(truth);
    unlink(machine);
    printf("%s, %.1f s\n", failures ? "FAILED" : "fake-gpu: all well", now() - begin);
    return failures != 0;
}
