/* The driver's functions, the thread's device, errors. */
#include "cudart.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

driver_table driver;
_Thread_local int thread_device;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int begun; /* 1: all resolved and cuInit has said OK */
static void *library;
static int devices;
static void *_Atomic primaries[MAX_DEVICES];
static _Thread_local int bound; /* 1 + device whose context this thread was given */
static _Thread_local result last;

result say(result r) {
    if (r) last = r;
    return r;
}
EXPORT result cudaGetLastError(void) {
    result r = last;
    last = OK;
    return r;
}
EXPORT result cudaPeekAtLastError(void) { return last; }

static result resolve(void) {
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return INSUFFICIENT_DRIVER;
#define X(name, ...)                                     \
    *(void **)&driver.name = dlsym(library, #name);      \
    if (!driver.name) {                                  \
        fprintf(stderr, "the driver lacks %s\n", #name); \
        return INSUFFICIENT_DRIVER;                      \
    }
    DRIVER(X)
#undef X
    return OK;
}

/* Retries after each failure, as the real runtime does. */
result begin(void) {
    if (__atomic_load_n(&begun, __ATOMIC_ACQUIRE)) return OK;
    pthread_mutex_lock(&lock);
    result r = OK;
    if (!begun) {
        r = library ? OK : resolve();
        if (r == OK) r = driver.cuInit(0);
        if (r == OK) r = driver.cuDeviceGetCount(&devices);
        if (r == OK && devices > MAX_DEVICES) devices = MAX_DEVICES;
        if (r == OK) __atomic_store_n(&begun, 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&lock);
    return r;
}

int device_count(void) { return devices; }
void *primary_of(int device) { return device >= 0 && device < devices ? primaries[device] : NULL; }

static result primary(int device) {
    result r = OK;
    pthread_mutex_lock(&lock);
    if (!primaries[device]) {
        void *made = NULL;
        r = driver.cuDevicePrimaryCtxRetain(&made, device);
        if (r == OK) primaries[device] = made;
    }
    pthread_mutex_unlock(&lock);
    return r;
}

result use(void) {
    if (bound == thread_device + 1) return OK;
    result r = begin();
    if (r == OK && thread_device >= devices) r = INVALID_DEVICE;
    if (r == OK && !primaries[thread_device]) r = primary(thread_device);
    if (r == OK) r = driver.cuCtxSetCurrent(primaries[thread_device]);
    if (r == OK) bound = thread_device + 1;
    return r;
}

EXPORT result cudaGetDeviceCount(int *count) {
    result r = begin();
    *count = r == OK ? devices : 0;
    return say(r);
}
EXPORT result cudaGetDevice(int *device) { ASK((*device = thread_device, OK)); }
/* Since CUDA 12 this makes the device's context. */
EXPORT result cudaSetDevice(int device) {
    result r = begin();
    if (r == OK && (device < 0 || device >= devices)) r = INVALID_DEVICE;
    if (r != OK) return say(r);
    thread_device = device;
    return say(MAJOR >= 12 ? use() : OK);
}
EXPORT result cudaInitDevice(int device, unsigned device_flags, unsigned flags) {
    (void)device_flags, (void)flags;
    result r = begin();
    if (r == OK) r = device >= 0 && device < devices ? OK : INVALID_DEVICE;
    return say(r == OK && !primaries[device] ? primary(device) : r);
}
EXPORT result cudaDeviceSynchronize(void) { RUN(driver.cuCtxSynchronize()); }
EXPORT result cudaDeviceReset(void) {
    result r = use();
    if (r != OK) return say(r);
    pthread_mutex_lock(&lock);
    primaries[thread_device] = NULL;
    bound = 0;
    pthread_mutex_unlock(&lock);
    return say(driver.cuDevicePrimaryCtxReset_v2(thread_device));
}

EXPORT result cudaRuntimeGetVersion(int *version) {
    *version = MAJOR * 1000 + (MAJOR == 11 ? 80 : MAJOR == 12 ? 10 : 20);
    return OK;
}
EXPORT result cudaDriverGetVersion(int *version) {
    result r = begin();
    *version = 0;
    return r == INSUFFICIENT_DRIVER ? OK : driver.cuDriverGetVersion(version);
}

/* ---- driver functions by name: one that the simulated driver lacks is there and does nothing ---- */

static result unsupported(void) { return NOT_SUPPORTED; }

static result entry(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    int found = 0;
    if (driver.cuGetProcAddress_v2(symbol, function, version, flags, &found) != OK || !*function)
        *(result(**)(void))function = unsupported;
    if (status) *status = 0;
    return OK;
}
EXPORT result cudaGetDriverEntryPoint(const char *symbol, void **function, uint64_t flags, int *status) {
    ASK(entry(symbol, function, MAJOR * 1000, flags, status));
}
EXPORT result cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, uint64_t flags,
                                               int *status) {
    ASK(entry(symbol, function, (int)version, flags, status));
}

/* ---- names of errors ---- */

static const struct {
    result code;
    const char *name, *text;
} errors[] = {
    {OK, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {NOT_INITIALIZED, "cudaErrorInitializationError", "initialization error"},
    {4, "cudaErrorCudartUnloading", "driver shutting down"},
    {INSUFFICIENT_DRIVER, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"},
    {NO_DEVICE, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {201, "cudaErrorDeviceUninitialized", "invalid device context"},
    {304, "cudaErrorOperatingSystem", "OS call failed or operation not supported on this OS"},
    {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {NOT_FOUND, "cudaErrorSymbolNotFound", "named symbol not found"},
    {NOT_READY, "cudaErrorNotReady", "device not ready"},
    {704, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {NOT_SUPPORTED, "cudaErrorNotSupported", "operation not supported"},
};

static const char *describe(result code, int text) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return text ? errors[i].text : errors[i].name;
    return text ? "unrecognized error code" : "cudaErrorUnknown";
}
EXPORT const char *cudaGetErrorName(result code) { return describe(code, 0); }
EXPORT const char *cudaGetErrorString(result code) { return describe(code, 1); }
