/* Cost of NVML's calls: one JSON object with the wall time of every repetition of each call, in ns.
 *   nvml_cost INDEX REPETITIONS */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef struct {
    uint64_t total, free, used;
} memory_v1;
typedef struct {
    unsigned version;
    uint64_t total, reserved, free, used;
} memory_v2;
/* Room for the longest record that any driver writes under this name. */
typedef struct {
    uint64_t words[4];
} process;

static void *library, *device;
static unsigned found;
static int code;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#define CALL(name, parameters, ...) \
    static int (*name) parameters; \
    __VA_ARGS__
CALL(memory1, (void *, memory_v1 *), static int run_memory1(void) { memory_v1 m; return memory1(device, &m); })
CALL(memory2, (void *, memory_v2 *), static int run_memory2(void) {
    memory_v2 m = {.version = 0x02000028};
    return memory2(device, &m);
})
CALL(list, (void *, unsigned *, process *), static int run_list(void) {
    static process rows[1024];
    unsigned count = 1024;
    int r = list(device, &count, rows);
    found = count;
    return r;
})
static int run_size(void) {
    unsigned count = 0;
    int r = list(device, &count, NULL);
    return r == 7 ? 0 : r; /* 7: the list is not empty, which is a valid result */
}
static int (*graphics)(void *, unsigned *, process *);
static int run_graphics(void) {
    static process rows[1024];
    unsigned count = 1024;
    return graphics(device, &count, rows);
}

static void measure(const char *name, int there, int (*run)(void), int repetitions) {
    static const char *between = "";
    printf("%s\"%s\":", between, name);
    between = ",";
    if (!there) {
        printf("null");
        return;
    }
    code = run();
    printf("{\"result\":%d,\"ns\":[", code);
    for (int i = 0; i < repetitions && !code; i++) {
        int64_t since = now();
        code = run();
        printf("%s%lld", i ? "," : "", (long long)(now() - since));
    }
    printf("]}");
}

int main(int count, char **words) {
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library || count != 3) {
        fprintf(stderr, "nvml_cost INDEX REPETITIONS, with a libnvidia-ml.so.1\n");
        return 2;
    }
    int (*init)(void), (*handle)(unsigned, void **), repetitions = atoi(words[2]);
    *(void **)&init = dlsym(library, "nvmlInit_v2");
    *(void **)&handle = dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
    *(void **)&memory1 = dlsym(library, "nvmlDeviceGetMemoryInfo");
    *(void **)&memory2 = dlsym(library, "nvmlDeviceGetMemoryInfo_v2");
    *(void **)&list = dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v3");
    *(void **)&graphics = dlsym(library, "nvmlDeviceGetGraphicsRunningProcesses_v3");
    int64_t since = now();
    if (!init || init() || !handle || handle((unsigned)atoi(words[1]), &device)) return 1;
    int64_t started = now() - since;
    printf("{");
    measure("memory_1", memory1 != NULL, run_memory1, repetitions * 4);
    measure("memory_2", memory2 != NULL, run_memory2, repetitions * 4);
    measure("list", list != NULL, run_list, repetitions);
    measure("size_query", list != NULL, run_size, repetitions);
    measure("graphics_list", graphics != NULL, run_graphics, repetitions);
    printf(",\"processes\":%u,\"init_ns\":%lld}\n", found, (long long)started);
    return 0;
}
