/* cuInit with injection, callbacks, the state of the process, cuGetProcAddress. */
#include "cuda_internal.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

sim_machine *machine;
int slot = -1;

static _Atomic(const sim_hook *) hook;
static _Atomic uint32_t correlation_ids;
static _Atomic int initialized, ended, forked;
static _Thread_local int in_init, in_resource;
static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
static void *injected; /* library that stays */

void find_devices(void);

void enter(void) { sim_lock(machine); }
void leave(void) { sim_unlock(machine); }

/* The state of the machine changes between the two halves of a call's time. */
void cost_before(uint64_t us) { sim_wait_us(machine, us / 2); }
void cost_after(uint64_t us) { sim_wait_us(machine, us - us / 2); }

CUresult ready(void) {
    if (atomic_load_explicit(&ended, memory_order_relaxed)) return DEINITIALIZED;
    if (!atomic_load_explicit(&initialized, memory_order_acquire)) return NOT_INITIALIZED;
    if (atomic_load_explicit(&forked, memory_order_relaxed)) return NOT_INITIALIZED;
    if (in_resource) {
        /* A real driver may hold its locks here: the call would hang. */
        enter();
        machine->violations++;
        leave();
        return UNKNOWN;
    }
    return OK;
}

EXPORT void gpumemSimSetHook(const sim_hook *h) { atomic_store_explicit(&hook, h, memory_order_release); }
EXPORT sim_machine *gpumemSimMachine(void) {
    if (!machine) machine = sim_open(NULL);
    return machine;
}

void api_enter(api_frame *frame, uint32_t cbid, const char *name, const void *params) {
    const sim_hook *h = atomic_load_explicit(&hook, memory_order_acquire);
    frame->hook = NULL;
    if (machine && machine->cuda_muted == cbid) return;
    if (!h || !(atomic_load_explicit(&h->api[cbid / 32], memory_order_relaxed) >> (cbid % 32) & 1)) return;
    frame->hook = h;
    frame->correlation = 0;
    frame->result = OK;
    const context *c = current();
    frame->call = (sim_api_call){0, cbid, name, params, &frame->result, (void *)(uintptr_t)c, c ? c->uid : 0,
                                 atomic_fetch_add_explicit(&correlation_ids, 1, memory_order_relaxed) + 1,
                                 &frame->correlation};
    h->on_api(&frame->call);
}

CUresult api_exit(api_frame *frame, CUresult result) {
    if (!frame->hook) return result;
    const context *c = current();
    frame->result = result;
    frame->call.site = 1;
    frame->call.context = (void *)(uintptr_t)c;
    frame->call.context_uid = c ? c->uid : 0;
    frame->hook->on_api(&frame->call);
    return result;
}

void tell_resource(uint32_t cbid, void *context, void *stream, const void *descriptor) {
    const sim_hook *h = atomic_load_explicit(&hook, memory_order_acquire);
    if (!h || !(atomic_load_explicit(&h->resource, memory_order_relaxed) >> cbid & 1)) return;
    sim_resource r = {cbid, context, stream, descriptor};
    in_resource++;
    h->on_resource(&r);
    in_resource--;
}

/* As in the driver, the library stays if its function returns non-zero. Else it is closed, and the next cuInit loads it
 * again. Every failure is silent. */
static void inject(void) {
    const char *path = getenv("CUDA_INJECTION64_PATH");
    if (injected || !path || !*path) return;
    void *library = dlopen(path, RTLD_LAZY);
    if (!library) return;
    int (*initialize)(void);
    *(void **)&initialize = dlsym(library, "InitializeInjection");
    if (initialize && initialize())
        injected = library;
    else
        dlclose(library);
}

static void after_fork(void) { atomic_store(&forked, 1); }
static void end(void) { atomic_store(&ended, 1); }

static CUresult init(void) {
    static int tried;
    if (!tried && (tried = 1)) {
        machine = gpumemSimMachine();
        pthread_atfork(NULL, NULL, after_fork);
        atexit(end); /* before the hook can register its own, so it runs after that one */
    }
    in_init = 1;
    inject();
    in_init = 0;
    if (!machine || machine->device_count == 0) return NO_DEVICE;
    if (machine->nvml_driver == SIM_DRIVER_ABSENT) return NO_DEVICE;
    if (!atomic_load(&initialized)) {
        enter();
        slot = sim_claim(machine);
        leave();
        if (slot < 0) return UNKNOWN;
        find_devices();
        if (visible_count == 0) return NO_DEVICE;
        atomic_store_explicit(&initialized, 1, memory_order_release);
    }
    return OK;
}

EXPORT CUresult cuInit(unsigned flags) {
    struct {
        unsigned flags;
    } params = {flags};
    if (in_init) return OK; /* called by the hook */
    if (atomic_load(&forked)) return OS_CALL; /* after cuInit */
    api_frame frame;
    api_enter(&frame, 1, __func__, &params);
    pthread_mutex_lock(&init_lock);
    int first = !atomic_load(&initialized);
    CUresult result = flags ? INVALID_VALUE : init();
    pthread_mutex_unlock(&init_lock);
    if (first && result == OK) tell_resource(INIT_FINISHED, NULL, NULL, NULL);
    return api_exit(&frame, result);
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    if (!version) return INVALID_VALUE;
    const sim_machine *m = gpumemSimMachine();
    *version = m ? (int)m->cuda_version : 12080;
    return OK;
}

/* ---- names of errors and functions ---- */

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {OK, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {OS_CALL, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static CUresult describe(CUresult code, int text, const char **out) {
    for (size_t i = 0; out && i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) {
            *out = text ? errors[i].text : errors[i].name;
            return OK;
        }
    if (out) *out = NULL;
    return INVALID_VALUE;
}
EXPORT CUresult cuGetErrorName(CUresult code, const char **name) { return describe(code, 0, name); }
EXPORT CUresult cuGetErrorString(CUresult code, const char **text) { return describe(code, 1, text); }

/* Returns the newest suffix that CUDA of that version requests for the plain name. */
static void *lookup(const char *symbol, int version, uint64_t flags) {
    static void *self;
    if (!self) {
        Dl_info info;
        if (!dladdr((void *)(uintptr_t)&cuInit, &info)) return NULL;
        self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }
    static const struct {
        const char *name, *suffix;
        int version;
    } newer[] = {{"cuCtxCreate", "_v4", 13000}, {"cuGetProcAddress", "_v2", 12000}, {"cuDeviceGetUuid", "_v2", 11040},
                 {"cuDevicePrimaryCtxRelease", "_v2", 11000}, {"cuDevicePrimaryCtxReset", "_v2", 11000}};
    char name[160];
    void *found;
    for (size_t i = 0; i < sizeof newer / sizeof *newer; i++) {
        if (strcmp(symbol, newer[i].name)) continue;
        snprintf(name, sizeof name, "%s%s", symbol, version >= newer[i].version ? newer[i].suffix : "");
        if ((found = dlsym(self, name))) return found;
    }
    static const char *const suffixes[] = {"_v2_ptsz", "_ptsz", "_v2", ""};
    for (size_t i = flags & 2 ? 0 : 2; i < 4; i++) {
        snprintf(name, sizeof name, "%s%s", symbol, version >= 3020 ? suffixes[i] : "");
        if ((found = dlsym(self, name))) return found;
    }
    return NULL;
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    if (!symbol || !function) return INVALID_VALUE;
    *function = lookup(symbol, version, flags);
    return *function ? OK : NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    struct {
        const char *symbol;
        void **function;
        int version;
        uint64_t flags;
        int *status;
    } params = {symbol, function, version, flags, status};
    api_frame frame;
    api_enter(&frame, 677, __func__, &params);
    CUresult result = cuGetProcAddress(symbol, function, version, flags);
    if (status) *status = result == OK ? 0 : 1;
    return api_exit(&frame, result);
}

/* Private tables belong to the real driver. */
EXPORT CUresult cuGetExportTable(const void **table, const void *id) {
    (void)id;
    if (table) *table = NULL;
    return NOT_SUPPORTED;
}
