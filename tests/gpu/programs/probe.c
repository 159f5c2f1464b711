/* Asks a driver, in seconds, the questions that gpumemd's models depend on. Needs no header of CUDA, no nvcc, no PyTorch.
 *   probe [NAME...]          all probes, or only these
 * Each probe runs in a child process with a time limit, so that a crash or a hang costs only its own answers. Each fact is one
 * line with a JSON object on standard output. $PROBE_CUPTI and $PROBE_CUDART are the libcupti and the libcudart to use. */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cuda.h"

#define DEFINE(name, symbol, parameters) result(*cu##name) parameters;
FUNCTIONS(DEFINE)
#undef DEFINE

#define MIB ((size_t)1 << 20)
#define COUNT(list) (sizeof(list) / sizeof *(list))
/* Exit status of a probe that needs a missing library or function. */
enum { INCOMPLETE = 9 };

typedef struct {
    const char *name;
    void (*run)(void);
    unsigned limit_s;
} probe;
static const probe *current;
static void *driver;
int device;
static void *primary;

/* ---- output and time ---- */

/* Writes one fact of the current probe; FORMAT is the inside of a JSON object. */
__attribute__((format(printf, 1, 2))) static void emit(const char *format, ...) {
    printf("{\"probe\":\"%s\",", current->name);
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("}\n");
    fflush(stdout);
}

static _Noreturn void give_up(const char *key, const char *what) {
    emit("\"%s\":\"%s\"", key, what);
    _exit(INCOMPLETE);
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

/* ---- the driver ---- */

static void load(void) {
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!driver) give_up("error", "no libcuda.so.1");
#define FIND(name, symbol, parameters) *(void **)&cu##name = dlsym(driver, symbol);
    FUNCTIONS(FIND)
#undef FIND
}

/* Returns a function of the driver; ends the probe if the driver lacks it. */
#define CU(name) (cu##name ? cu##name : (give_up("missing", "cu" #name), cu##name))

static void *driver_symbol(const char *name) {
    void *found = dlsym(driver, name);
    if (!found) give_up("missing", name);
    return found;
}

/* ---- NVML ---- */

typedef struct {
    unsigned version;
    uint64_t total, reserved, free, used;
} memory_info;
typedef struct {
    unsigned pid;
    uint64_t used;
    unsigned gpu_instance, compute_instance;
} process_info;

static void *gpu;
static int (*nvml_memory)(void *, memory_info *), (*nvml_processes)(void *, unsigned *, process_info *);
/* Whether NVML lists this process; if it does not, `charged` reads the device. */
static int listed;

static void open_nvml(void) {
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    int (*init)(void) = NULL, (*handle)(unsigned, void **) = NULL;
    if (nvml) {
        *(void **)&init = dlsym(nvml, "nvmlInit_v2");
        *(void **)&handle = dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
        *(void **)&nvml_memory = dlsym(nvml, "nvmlDeviceGetMemoryInfo_v2");
        *(void **)&nvml_processes = dlsym(nvml, "nvmlDeviceGetComputeRunningProcesses_v3");
    }
    if (!init || !handle || !nvml_memory || !nvml_processes || init() || handle(0, &gpu))
        give_up("error", "no usable libnvidia-ml.so.1");
}

/* Bytes in use on the device; the negative NVML result if that is unknown. */
static long long device_used(void) {
    memory_info memory = {.version = 0x02000028};
    int r = nvml_memory(gpu, &memory);
    return r ? -r : (long long)memory.used;
}

/* Bytes that NVML charges to a process; -1000 if it is not listed or has no number, else the negative NVML result. */
static long long process_used(pid_t pid) {
    static process_info all[1024];
    unsigned count = COUNT(all);
    int r = nvml_processes(gpu, &count, all);
    if (r) return -r;
    for (unsigned i = 0; i < count; i++)
        if (all[i].pid == (unsigned)pid && all[i].used != UINT64_MAX) return (long long)all[i].used;
    return -1000;
}

/* Bytes of this process, or of the device where NVML does not list this process, as in some containers. Only differences
 * of two readings mean anything. */
static long long charged(void) {
    long long bytes = process_used(getpid());
    listed = bytes >= 0;
    return listed ? bytes : device_used();
}

/* Loads both libraries and makes the primary context current. */
static void begin(void) {
    load();
    open_nvml();
    int r = CU(Init)(0);
    if (r) {
        emit("\"cuInit\":%d", r);
        _exit(INCOMPLETE);
    }
    if (CU(DeviceGet)(&device, 0) || CU(PrimaryRetain)(&primary, device) || CU(CtxSetCurrent)(primary))
        give_up("error", "no primary context");
}

/* ---- CUPTI ---- */

enum { DRIVER_API = 1, RUNTIME_API = 2, RESOURCE = 3, CONTEXT_CREATED = 1 };
typedef struct {
    unsigned site; /* 0: the call begins, 1: it returns */
    const char *name;
    const void *parameters;
    const unsigned *returned;
    const char *symbol;
    void *context;
} call_data;
typedef struct {
    void *context, *stream, *descriptor;
} resource_data;
typedef void callback(void *, int, uint32_t, const void *);
typedef struct {
    size_t size;
    const char *name;
    char *old_name;
    size_t old_size;
    uint8_t several;
} subscriber_params;

static void *cupti, *subscriber;
static unsigned callbacks_seen, on_other_threads;
static pthread_t own_thread;
/* The callbacks of one call, as a list of JSON strings. */
static struct {
    int on;
    char text[1 << 16];
    size_t length;
} trace;
/* CUPTI's data of a context, queried inside the callback that announces it. */
static struct {
    unsigned announced;
    uint32_t result, device;
} context_created;

static void *cupti_function(const char *name) { return cupti ? dlsym(cupti, name) : NULL; }

static void record(const char *word) {
    size_t length = strlen(word);
    if (trace.length + length + 4 > sizeof trace.text) return;
    trace.length += (size_t)sprintf(trace.text + trace.length, "%s\"%s\"", trace.length ? "," : "", word);
}

/* "(NAME#ID" begins a call of the driver, "[NAME#ID" one of the runtime, ")NAME#ID" ends either; "~": there is no current
 * context, "!": the call failed. "D3.1" is callback 1 of domain 3. */
static void heard(void *user, int domain, uint32_t id, const void *data) {
    (void)user;
    callbacks_seen++;
    if (!pthread_equal(own_thread, pthread_self())) {
        on_other_threads++;
        return;
    }
    if (domain == RESOURCE && id == CONTEXT_CREATED) {
        const resource_data *of = data;
        uint32_t (*device_of)(void *, uint32_t *);
        *(void **)&device_of = cupti_function("cuptiGetDeviceId");
        context_created.announced++;
        context_created.result = device_of ? device_of(of->context, &context_created.device) : UINT32_MAX;
    }
    if (!trace.on) return;
    char word[160];
    if (domain == DRIVER_API || domain == RUNTIME_API) {
        const call_data *call = data;
        if (!strncmp(call->name, "cuGetProc", 9)) return; /* hundreds of them */
        const char *bracket = call->site ? ")" : domain == DRIVER_API ? "(" : "[";
        const char *mark = call->site && call->returned && *call->returned ? "!" : call->context ? "" : "~";
        snprintf(word, sizeof word, "%s%s#%u%s", bracket, call->name, id, mark);
    } else {
        snprintf(word, sizeof word, "D%d.%u", domain, id);
    }
    record(word);
}

/* The driver calls that the agent listens to, as agent-lib/src/sources/cupti/table.rs has them. */
static const uint16_t agent_calls[] = {
    /* direct and host memory, arrays */
    243, 29, 244, 31, 371, 245, 33, 294, 37, 39, 38, 301, 379, 302, 272, 274, 87, 90, 89, 347, 349,
    /* stream-ordered memory and pools */
    598, 599, 611, 612, 600, 601, 607, 608, 602, 603, 614, 616, 609, 803,
    /* handles, imports */
    549, 550, 551, 552, 565, 555, 706, 329, 567, 330, 485, 486, 487, 488,
    /* graphs */
    638, 639, 712, 723, 863, 578, 643, 656, 657, 516, 640,
    /* contexts, limits, modules */
    10, 235, 645, 757, 386, 389, 545, 136, 313, 743, 678, 679, 680, 18, 19, 20, 21, 22};
static const uint8_t agent_resources[] = {1, 2, 6, 7, 13};

/* Subscribes to the agent's callbacks, or with ALL to every driver and resource callback. Returns CUPTI's result, -1
 * without a library. */
static int subscribe(int all) {
    const char *path = getenv("PROBE_CUPTI");
    const char *const names[] = {path, "libcupti.so.13", "libcupti.so.12"};
    for (size_t i = path ? 0 : 1; i < COUNT(names) && !cupti; i++) cupti = dlopen(names[i], RTLD_NOW);
    int (*make)(void **, callback *, void *), (*enable)(uint32_t, void *, int, uint32_t), (*domain)(uint32_t, void *, int);
    *(void **)&make = cupti_function("cuptiSubscribe");
    *(void **)&enable = cupti_function("cuptiEnableCallback");
    *(void **)&domain = cupti_function("cuptiEnableDomain");
    if (!make || !enable || !domain) return -1;
    own_thread = pthread_self();
    int r = make(&subscriber, heard, NULL);
    if (r) return r;
    if (all) {
        domain(1, subscriber, DRIVER_API);
        domain(1, subscriber, RESOURCE);
        return 0;
    }
    /* The library refuses ids newer than itself, which is fine. */
    for (size_t i = 0; i < COUNT(agent_calls); i++) enable(1, subscriber, DRIVER_API, agent_calls[i]);
    for (size_t i = 0; i < COUNT(agent_resources); i++) enable(1, subscriber, RESOURCE, agent_resources[i]);
    return 0;
}

static int unsubscribe(void) {
    int (*end)(void *);
    *(void **)&end = cupti_function("cuptiUnsubscribe");
    int r = end && subscriber ? end(subscriber) : -1;
    subscriber = NULL;
    return r;
}

/* ---- what a context costs ---- */

static void probe_context(void) {
    load();
    open_nvml();
    long long before = device_used();
    int r = CU(Init)(0);
    long long after_init = device_used();
    if (!r) r = CU(DeviceGet)(&device, 0);
    if (!r) r = CU(PrimaryRetain)(&primary, device);
    long long with_primary = device_used(), process = process_used(getpid());
    void *second = NULL;
    if (!r) CU(CtxSetCurrent)(primary);
    int second_result = cuCtxCreate ? cuCtxCreate(&second, 0, device) : -1;
    emit("\"cuInit_device\":%lld,\"primary\":%d,\"primary_device\":%lld,\"primary_process\":%lld,\"second\":%d,"
         "\"second_process\":%lld,\"second_device\":%lld",
         after_init - before, r, with_primary - after_init, process, second_result, process_used(getpid()) - process,
         device_used() - with_primary);
}

/* ---- which callbacks announce which call ---- */

static void *runtime;

static void *runtime_function(const char *name) {
    void *found = dlsym(runtime, name);
    if (!found) give_up("missing", name);
    return found;
}
#define RT(name, parameters) ((int(*) parameters)runtime_function(#name))
#define TRACE(label, expression)                                                                      \
    do {                                                                                              \
        trace.length = 0;                                                                             \
        trace.text[0] = 0;                                                                            \
        trace.on = 1;                                                                                 \
        int traced = (expression);                                                                    \
        trace.on = 0;                                                                                 \
        emit("\"call\":\"%s\",\"result\":%d,\"seen\":[%s]", label, traced, trace.text);               \
    } while (0)

/* Layouts of the runtime's headers. */
typedef struct {
    int x, y, z, w, kind;
} channel_format;
typedef struct {
    size_t width, height, depth;
} extent;
typedef struct {
    void *where;
    size_t pitch, width, height;
} pitched;

static void trace_memory(void) {
    void *plain = NULL, *other = NULL, *host = NULL, *array = NULL;
    size_t pitch = 0;
    pitched solid;
    const channel_format one_float = {32, 0, 0, 0, 2};
    TRACE("cudaMalloc", RT(cudaMalloc, (void **, size_t))(&plain, 1000));
    TRACE("cudaMallocPitch", RT(cudaMallocPitch, (void **, size_t *, size_t, size_t))(&other, &pitch, 1000, 100));
    TRACE("cudaMalloc3D", RT(cudaMalloc3D, (pitched *, extent))(&solid, (extent){256, 64, 4}));
    TRACE("cudaMallocArray",
          RT(cudaMallocArray, (void **, const channel_format *, size_t, size_t, unsigned))(&array, &one_float, 256, 64, 0));
    TRACE("cudaFreeArray", RT(cudaFreeArray, (void *))(array));
    TRACE("cudaMallocManaged", RT(cudaMallocManaged, (void **, size_t, unsigned))(&other, 2 * MIB, 1));
    TRACE("cudaMallocHost", RT(cudaMallocHost, (void **, size_t))(&host, 4096));
    TRACE("cudaHostAlloc", RT(cudaHostAlloc, (void **, size_t, unsigned))(&host, 4096, 0));
    TRACE("cudaFree", RT(cudaFree, (void *))(plain));
}

static void trace_streams(void) {
    void *pooled = NULL, *queue = NULL, *graph = NULL, *executable = NULL;
    int (*take)(void **, size_t, void *) = RT(cudaMallocAsync, (void **, size_t, void *));
    int (*give)(void *, void *) = RT(cudaFreeAsync, (void *, void *));
    TRACE("cudaMallocAsync", take(&pooled, 4096, NULL));
    TRACE("cudaFreeAsync", give(pooled, NULL));
    if (!take(&pooled, 4096, NULL)) TRACE("cudaFree of async", RT(cudaFree, (void *))(pooled));
    TRACE("cudaStreamCreate", RT(cudaStreamCreate, (void **))(&queue));
    TRACE("capture: begin", RT(cudaStreamBeginCapture, (void *, int))(queue, 2));
    TRACE("capture: cudaMallocAsync", take(&pooled, 64 * MIB, queue));
    TRACE("capture: cudaFreeAsync", give(pooled, queue));
    TRACE("capture: end", RT(cudaStreamEndCapture, (void *, void **))(queue, &graph));
    TRACE("cudaGraphInstantiate", RT(cudaGraphInstantiate, (void **, void *, unsigned long long))(&executable, graph, 0));
    TRACE("cudaGraphLaunch", RT(cudaGraphLaunch, (void *, void *))(executable, queue));
    TRACE("cudaStreamSynchronize", RT(cudaStreamSynchronize, (void *))(queue));
}

static void probe_callbacks(void) {
    load();
    double started = now_ms();
    int r = CU(Init)(0);
    double initialised = now_ms();
    int subscribed = subscribe(1);
    double ready = now_ms();
    uint32_t version = 0, (*get)(uint32_t *);
    *(void **)&get = cupti_function("cuptiGetVersion");
    if (get) get(&version);
    const char *path = getenv("PROBE_CUDART");
    const char *const names[] = {path, "libcudart.so.13", "libcudart.so.12"};
    for (size_t i = path ? 0 : 1; i < COUNT(names) && !runtime; i++) runtime = dlopen(names[i], RTLD_NOW | RTLD_GLOBAL);
    emit("\"cuInit\":%d,\"cuInit_ms\":%.1f,\"subscribe\":%d,\"subscribe_ms\":%.1f,\"cupti\":%u,\"cudart\":%s", r,
         initialised - started, subscribed, ready - initialised, version, runtime ? "true" : "false");
    if (subscribed) return;
    if (!runtime) {
        /* The driver's own call at least. */
        TRACE("cuDevicePrimaryCtxRetain", CU(PrimaryRetain)(&primary, 0));
    } else {
        int (*domain)(uint32_t, void *, int);
        *(void **)&domain = cupti_function("cuptiEnableDomain");
        domain(1, subscriber, RUNTIME_API);
        TRACE("cudaFree(0)", RT(cudaFree, (void *))(NULL));
    }
    emit("\"context_created\":%u,\"device_of\":%u,\"device\":%u", context_created.announced, context_created.result,
         context_created.device);
    if (!runtime) return;
    trace_memory();
    trace_streams();
    TRACE("cudaDeviceReset", RT(cudaDeviceReset, (void))());
    emit("\"on_other_threads\":%u", on_other_threads);
}

/* ---- what an allocation costs ---- */

static void probe_sizes(void) {
    begin();
    static const size_t sizes[] = {512,     4096,     65536,    262144,      262145,      393216,      524288,
                                   524289,  786432,   MIB - 1,  MIB,         MIB + 1,     3 * MIB / 2, 2 * MIB,
                                   2 * MIB + 1, 3 * MIB, 4 * MIB + 1, 20 * MIB, 32 * MIB + 1, 64 * MIB};
    address kept = 0, all[64];
    CU(MemAlloc)(&kept, 16 * MIB);
    for (size_t i = 0; i < COUNT(sizes); i++) {
        int wanted = sizes[i] > 8 * MIB ? 8 : 64, made = 0;
        long long before = charged(), first = 0;
        for (; made < wanted && !CU(MemAlloc)(&all[made], sizes[i]); made++)
            if (!made) first = charged() - before;
        long long after = charged();
        for (int k = 0; k < made; k++) CU(MemFree)(all[k]);
        emit("\"bytes\":%zu,\"first\":%lld,\"n\":%d,\"each\":%.1f,\"left\":%lld,\"listed\":%d", sizes[i], first, made,
             made ? (double)(after - before) / made : 0, charged() - before, listed);
    }
}

/* ---- whether a subscription costs device memory ---- */

static void *empty_kernel(void) {
    static const char text[] = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry empty()\n{\nret;\n}\n";
    void *module = NULL, *function = NULL;
    if (CU(ModuleLoad)(&module, text) || CU(ModuleFunction)(&function, module, "empty")) return NULL;
    return function;
}
static int launch(void *function, void *queue) {
    return CU(Launch)(function, 1, 1, 1, 32, 1, 1, 0, queue, NULL, NULL);
}

static void observe(int on) {
    load();
    open_nvml();
    long long before = device_used();
    CU(Init)(0);
    int r = on ? subscribe(0) : 0;
    CU(DeviceGet)(&device, 0);
    CU(PrimaryRetain)(&primary, device);
    CU(CtxSetCurrent)(primary);
    long long base = process_used(getpid()) >= 0 ? 0 : before, with_context = charged() - base;
    void *function = empty_kernel();
    if (function) {
        launch(function, NULL);
        CU(CtxSynchronize)();
    }
    long long launched = charged() - base;
    address where = 0;
    CU(MemAlloc)(&where, 64 * MIB);
    emit("\"subscribed\":%d,\"result\":%d,\"context\":%lld,\"after_launch\":%lld,\"after_64MiB\":%lld,\"listed\":%d", on, r,
         with_context, launched, charged() - base, listed);
}

static void probe_observer(void) {
    for (int on = 0; on < 2; on++) {
        pid_t child = fork();
        if (!child) {
            observe(on);
            _exit(0);
        }
        waitpid(child, NULL, 0);
    }
}

/* ---- who pays for shared memory ---- */

static int receive(int socket, void *out, size_t size) { return read(socket, out, size) == (ssize_t)size; }
static int transmit(int socket, const void *what, size_t size) { return write(socket, what, size) == (ssize_t)size; }

/* The importer makes its context before the owner allocates, so that the device's bytes have one cause for each change. */
static void import_memory(int socket) {
    begin();
    char ready = 1;
    ipc_handle handle;
    if (!transmit(socket, &ready, 1) || !receive(socket, &handle, sizeof handle)) _exit(1);
    long long before = charged();
    address where = 0;
    int r = CU(IpcOpen)(&where, handle, 1);
    emit("\"open\":%d,\"importer\":%lld,\"of\":%zu,\"listed\":%d", r, charged() - before, 64 * MIB, listed);
    r = r ? -1 : CU(IpcClose)(where);
    emit("\"close\":%d,\"importer_left\":%lld", r, charged() - before);
    /* Its context is destroyed only after the owner has read the device's bytes. */
    if (!transmit(socket, &ready, 1) || !receive(socket, &ready, 1)) _exit(1);
    _exit(0);
}

static void probe_ipc(void) {
    int sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets)) give_up("error", "socketpair");
    pid_t child = fork();
    if (!child) import_memory(sockets[1]);
    close(sockets[1]);
    begin();
    char ready;
    if (!receive(sockets[0], &ready, 1)) give_up("error", "the importer ended");
    long long before = charged(), device_before = device_used();
    address where = 0;
    ipc_handle handle;
    CU(MemAlloc)(&where, 64 * MIB);
    int r = CU(IpcGet)(&handle, where);
    long long owner = charged() - before;
    if (!transmit(sockets[0], &handle, sizeof handle) || !receive(sockets[0], &ready, 1))
        give_up("error", "the importer ended");
    emit("\"get\":%d,\"owner\":%lld,\"owner_after\":%lld,\"device_after\":%lld", r, owner, charged() - before,
         device_used() - device_before);
    if (!transmit(sockets[0], &ready, 1)) kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

/* An exported descriptor: does it keep the memory after the last release of the handle? */
static void probe_vmmfd(void) {
    begin();
    const allocation_properties shared = {.type = 1, .handle_types = 1, .where = {1, device}};
    uint64_t handle = 0, again = 0;
    int descriptor = -1;
    long long before = charged();
    int made = CU(MemCreate)(&handle, 64 * MIB, &shared, 0);
    long long with_handle = charged() - before;
    int exported = made ? -1 : CU(MemExport)(&descriptor, handle, 1, 0);
    int released = made ? -1 : CU(MemRelease)(handle);
    long long held = charged() - before;
    int imported = exported ? -1 : CU(MemImport)(&again, (void *)(intptr_t)descriptor, 1);
    long long with_import = charged() - before;
    if (!imported) CU(MemRelease)(again);
    if (descriptor >= 0) close(descriptor);
    /* This call lets the driver notice the close. */
    address small = 0;
    if (!CU(MemAlloc)(&small, 1)) CU(MemFree)(small);
    emit("\"create\":%d,\"made\":%lld,\"export\":%d,\"release\":%d,\"held_by_fd\":%lld,\"import_own\":%d,\"imported\":%lld,"
         "\"after_close\":%lld,\"listed\":%d",
         made, with_handle, exported, released, held, imported, with_import, charged() - before, listed);
}

/* ---- by which step a pool grows and shrinks ---- */

static void probe_pools(void) {
    begin();
    static const size_t sizes[] = {1, 65536, 32 * MIB, 32 * MIB + 1, 100 * MIB};
    enum { RESERVED_NOW = 5 };
    void *pool = NULL;
    if (CU(DefaultPool)(&pool, device)) give_up("error", "no default pool");
    for (size_t i = 0; i < COUNT(sizes); i++) {
        address where = 0;
        uint64_t reserved = 0, left = 0;
        long long before = charged();
        int r = CU(MemAllocAsync)(&where, sizes[i], NULL);
        CU(PoolGet)(pool, RESERVED_NOW, &reserved);
        long long taken = charged() - before;
        if (!r) CU(MemFreeAsync)(where, NULL);
        CU(CtxSynchronize)();
        CU(PoolGet)(pool, RESERVED_NOW, &left);
        emit("\"bytes\":%zu,\"result\":%d,\"reserved\":%llu,\"process\":%lld,\"reserved_after_sync\":%llu,"
             "\"process_after\":%lld,\"listed\":%d",
             sizes[i], r, (unsigned long long)reserved, taken, (unsigned long long)left, charged() - before, listed);
    }
}

/* ---- what a subscription costs in time ---- */

enum { LAUNCHES = 20000, NODES = 1000, REPLAYS = 300, PAIRS = 2000 };

/* A graph of NODES launches, captured; ms it took, -1 if it cannot be. */
static double capture(void *function, void *queue, void **graph) {
    double since = now_ms();
    if (CU(StreamBeginCapture)(queue, 2)) return -1;
    for (int i = 0; i < NODES; i++) launch(function, queue);
    return CU(StreamEndCapture)(queue, graph) ? -1 : now_ms() - since;
}

static void measure_cost(const char *state, int subscribed, double subscribe_ms, void *function, void *queue, void *executable) {
    for (int i = 0; i < LAUNCHES / 10; i++) launch(function, queue);
    CU(CtxSynchronize)();
    double t0 = now_ms();
    for (int i = 0; i < LAUNCHES; i++) launch(function, queue);
    double t1 = now_ms();
    CU(CtxSynchronize)();
    double t2 = now_ms();
    for (int i = 0; executable && i < REPLAYS; i++) CU(GraphLaunch)(executable, queue);
    CU(CtxSynchronize)();
    double t3 = now_ms();
    for (int i = 0; i < PAIRS; i++) {
        address where = 0;
        if (!CU(MemAlloc)(&where, 4096)) CU(MemFree)(where);
    }
    double t4 = now_ms();
    void *graph = NULL;
    double captured = capture(function, queue, &graph);
    if (graph) CU(GraphDestroy)(graph);
    emit("\"state\":\"%s\",\"subscribe\":%d,\"subscribe_ms\":%.1f,\"launch_ns\":%.0f,\"graph_of_1000_us\":%.1f,"
         "\"alloc_free_ns\":%.0f,\"capture_1000_ms\":%.2f",
         state, subscribed, subscribe_ms, (t1 - t0) * 1e6 / LAUNCHES, (t3 - t2) * 1e3 / REPLAYS, (t4 - t3) * 1e6 / PAIRS,
         captured);
}

static void probe_cost(void) {
    begin();
    void *function = empty_kernel(), *queue = NULL, *graph = NULL, *executable = NULL;
    if (!function) give_up("error", "no kernel");
    CU(StreamCreate)(&queue, 1);
    if (capture(function, queue, &graph) >= 0 && CU(GraphInstantiate)(&executable, graph, 0)) executable = NULL;
    measure_cost("without", 0, 0, function, queue, executable);
    double since = now_ms();
    int r = subscribe(0);
    measure_cost("subscribed", r, now_ms() - since, function, queue, executable);
    since = now_ms();
    r = unsubscribe();
    measure_cost("unsubscribed", r, now_ms() - since, function, queue, executable);
}

/* ---- two clients of CUPTI ---- */

/* Callbacks of one allocation. */
static unsigned callbacks_of_alloc(void) {
    unsigned before = callbacks_seen;
    address where = 0;
    CU(MemAlloc)(&where, 1000);
    return callbacks_seen - before;
}

static void probe_twice(void) {
    begin();
    int first = subscribe(0);
    if (first) {
        emit("\"late_subscribe\":%d", first);
        return;
    }
    unsigned heard_first = callbacks_of_alloc();
    uint32_t version = 0, (*get)(uint32_t *);
    *(void **)&get = cupti_function("cuptiGetVersion");
    if (get) get(&version);
    char holder[128] = "";
    subscriber_params params = {version >= 130200 ? 40 : 32, "probe", holder, sizeof holder - 1, 0};
    int (*older)(void **, callback *, void *), (*newer)(void **, callback *, void *, subscriber_params *), (*finalize)(void);
    *(void **)&older = cupti_function("cuptiSubscribe");
    *(void **)&newer = cupti_function("cuptiSubscribe_v2");
    *(void **)&finalize = cupti_function("cuptiFinalize");
    void *second = NULL;
    int second_v1 = older(&second, heard, NULL), second_v2 = newer ? newer(&second, heard, NULL, &params) : -1;
    holder[strcspn(holder, "\"\\\n")] = 0;
    int finalized = finalize ? finalize() : -1;
    unsigned heard_then = callbacks_of_alloc();
    int again = subscribe(0);
    emit("\"late_subscribe\":%d,\"heard\":%u,\"second_v1\":%d,\"second_v2\":%d,\"holder\":\"%s\",\"finalize\":%d,"
         "\"heard_after_finalize\":%u,\"again\":%d,\"heard_again\":%u",
         first, heard_first, second_v1, second_v2, holder, finalized, heard_then, again, callbacks_of_alloc());
}

/* ---- unloading libcupti, with the thread that used it ending afterwards ---- */

static void *subscribe_and_unload(void *unused) {
    int r = subscribe(0);
    emit("\"subscribe\":%d", r);
    if (!r) unsubscribe();
    if (cupti) dlclose(cupti);
    return unused;
}
static void unload_in_a_thread(void) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, subscribe_and_unload, NULL)) give_up("error", "no thread");
    pthread_join(thread, NULL);
    emit("\"survived\":1");
}

static void probe_dlclose(void) {
    begin();
    unload_in_a_thread();
}

static void probe_hidden(void) {
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    load();
    emit("\"cuInit\":%d", CU(Init)(0));
    unload_in_a_thread();
}

/* ---- what NVML charges to a process whose memory was checkpointed ---- */

static void checkpointed(int socket) {
    begin();
    address where = 0;
    char word = 1;
    CU(MemAlloc)(&where, 256 * MIB);
    if (!transmit(socket, &word, 1) || !receive(socket, &word, 1)) _exit(1);
    _exit(0);
}

static void probe_checkpoint(void) {
    int sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets)) give_up("error", "socketpair");
    pid_t child = fork();
    if (!child) checkpointed(sockets[1]);
    close(sockets[1]);
    load();
    open_nvml();
    char word = 1;
    if (!receive(sockets[0], &word, 1)) give_up("error", "the other process ended");
    CU(Init)(0);
    typedef int step(int, void *);
    char arguments[64] = {0};
    step *lock, *checkpoint, *restore, *unlock;
    *(void **)&lock = driver_symbol("cuCheckpointProcessLock");
    *(void **)&checkpoint = driver_symbol("cuCheckpointProcessCheckpoint");
    *(void **)&restore = driver_symbol("cuCheckpointProcessRestore");
    *(void **)&unlock = driver_symbol("cuCheckpointProcessUnlock");
    long long before = process_used(child), device_before = device_used();
    int locked = lock(child, arguments), saved = checkpoint(child, arguments);
    long long meanwhile = process_used(child), device_meanwhile = device_used();
    int restored = restore(child, arguments), unlocked = unlock(child, arguments);
    emit("\"lock\":%d,\"checkpoint\":%d,\"restore\":%d,\"unlock\":%d,\"before\":%lld,\"while\":%lld,\"device_change\":%lld,"
         "\"after\":%lld",
         locked, saved, restored, unlocked, before, meanwhile, device_meanwhile - device_before, process_used(child));
    if (!transmit(sockets[0], &word, 1)) kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

/* ---- */

static const probe probes[] = {
    {"context", probe_context, 30},   {"callbacks", probe_callbacks, 40}, {"sizes", probe_sizes, 60},
    {"observer", probe_observer, 40}, {"ipc", probe_ipc, 30},             {"vmmfd", probe_vmmfd, 30},
    {"pools", probe_pools, 30},       {"cost", probe_cost, 60},           {"twice", probe_twice, 30},
    {"dlclose", probe_dlclose, 30},   {"hidden", probe_hidden, 30},       {"checkpoint", probe_checkpoint, 60},
};

static int is_wanted(const char *name, int count, char **names) {
    for (int i = 1; i < count; i++)
        if (!strcmp(names[i], name)) return 1;
    return count < 2;
}

int main(int count, char **names) {
    for (size_t i = 0; i < COUNT(probes); i++) {
        if (!is_wanted(probes[i].name, count, names)) continue;
        current = &probes[i];
        double since = now_ms();
        pid_t child = fork();
        if (!child) {
            setpgid(0, 0);
            alarm(current->limit_s);
            current->run();
            exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        kill(-child, SIGKILL); /* its own children, if it left any */
        emit("\"seconds\":%.2f,\"status\":%d,\"signal\":%d", (now_ms() - since) / 1e3,
             WIFEXITED(status) ? WEXITSTATUS(status) : -1, WIFSIGNALED(status) ? WTERMSIG(status) : 0);
    }
    return 0;
}
