/* Checks the device memory that single driver calls cost, measured with cuMemGetInfo. Part of the self-test. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MIB (1ull << 20)
#define CALLS(X)                                                                                     \
    X(cuInit, (unsigned)) X(cuDevicePrimaryCtxRetain, (void **, int)) X(cuDevicePrimaryCtxReset_v2, (int)) \
    X(cuCtxCreate_v2, (void **, unsigned, int)) X(cuCtxDestroy_v2, (void *)) X(cuCtxSetCurrent, (void *)) \
    X(cuCtxSynchronize, (void)) X(cuCtxSetLimit, (int, size_t)) X(cuMemGetInfo_v2, (size_t *, size_t *)) \
    X(cuMemAlloc_v2, (uint64_t *, size_t)) X(cuMemFree_v2, (uint64_t))                               \
    X(cuMemAllocPitch_v2, (uint64_t *, size_t *, size_t, size_t, unsigned))                          \
    X(cuMemAllocManaged, (uint64_t *, size_t, unsigned)) X(cuMemAllocHost_v2, (void **, size_t))     \
    X(cuMemFreeHost, (void *)) X(cuMemAllocAsync, (uint64_t *, size_t, void *)) X(cuMemFreeAsync, (uint64_t, void *)) \
    X(cuMemPoolCreate, (void **, const void *)) X(cuMemPoolDestroy, (void *)) X(cuMemPoolTrimTo, (void *, size_t)) \
    X(cuMemAllocFromPoolAsync, (uint64_t *, size_t, void *, void *))                                 \
    X(cuMemPoolGetAttribute, (void *, int, void *)) X(cuMemPoolSetAttribute, (void *, int, void *))  \
    X(cuMemCreate, (uint64_t *, size_t, const void *, unsigned long long)) X(cuMemRelease, (uint64_t)) \
    X(cuMemAddressReserve, (uint64_t *, size_t, size_t, uint64_t, unsigned long long))               \
    X(cuMemAddressFree, (uint64_t, size_t)) X(cuMemMap, (uint64_t, size_t, size_t, uint64_t, unsigned long long)) \
    X(cuMemUnmap, (uint64_t, size_t)) X(cuMemRetainAllocationHandle, (uint64_t *, uint64_t))         \
    X(cuModuleLoadData, (void **, const void *)) X(cuModuleUnload, (void *)) X(cuArrayDestroy, (uint64_t)) \
    X(cuArrayCreate_v2, (uint64_t *, const void *)) X(cuStreamCreate, (void **, unsigned))           \
    X(cuStreamBeginCapture_v2, (void *, int)) X(cuStreamEndCapture, (void *, void **))               \
    X(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long)) X(cuGraphLaunch, (void *, void *)) \
    X(cuGraphExecDestroy, (void *)) X(cuDeviceGraphMemTrim, (int)) X(cuGetProcAddress, (const char *, void **, int, uint64_t)) \
    X(cuStreamDestroy_v2, (void *)) X(cuEventCreate, (void **, unsigned)) X(cuEventDestroy_v2, (void *))  \
    X(cuModuleGetFunction, (void **, void *, const char *)) X(cuCtxGetLimit, (size_t *, int))            \
    X(cuCtxEnablePeerAccess, (void *, unsigned)) X(cuCtxDisablePeerAccess, (void *))                     \
    X(cuGreenCtxCreate, (void **, void *, int, unsigned)) X(cuGreenCtxDestroy, (void *))                 \
    X(cuLaunchKernel, (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))

#define DECLARE(name, parameters) static int (*name) parameters;
CALLS(DECLARE)
static int failures;

#define EXPECT(condition)                                                           \
    do {                                                                            \
        if (!(condition)) {                                                         \
            failures++;                                                             \
            fprintf(stderr, "calls.c:%d: not so: %s\n", __LINE__, #condition);      \
        }                                                                           \
    } while (0)

static uint64_t used(void) {
    size_t free = 0, total = 0;
    cuMemGetInfo_v2(&free, &total);
    return total - free;
}

static uint64_t mark;
/* Returns the growth of the device's used memory since the last call, in MiB. */
static int64_t more(void) {
    uint64_t now = used();
    int64_t change = ((int64_t)now - (int64_t)mark) / (int64_t)MIB;
    mark = now;
    return change;
}

static void direct(void) {
    uint64_t a, b, c;
    size_t pitch;
    EXPECT(!cuMemAlloc_v2(&a, 1) && more() == 2);
    EXPECT(!cuMemAlloc_v2(&b, 1000000) && more() == 0 && b == a + 512);
    EXPECT(!cuMemFree_v2(a) && more() == 0 && !cuMemFree_v2(b) && more() == -2);
    EXPECT(!cuMemAlloc_v2(&c, MIB) && more() == 2 && c == a);
    EXPECT(!cuMemFree_v2(c) && cuMemFree_v2(c) == 1 && !cuMemFree_v2(0) && more() == -2);
    EXPECT(cuMemAlloc_v2(&c, 0) == 1 && cuMemAlloc_v2(&c, 1ull << 40) == 2 && cuMemAlloc_v2(&c, ~0ull) == 2);
    EXPECT(!cuMemAllocPitch_v2(&a, &pitch, 1000, 4096, 4) && pitch == 1024 && more() == 4 && !cuMemFree_v2(a));
    EXPECT(!cuMemAllocManaged(&b, 3 * MIB, 1) && !cuMemFree_v2(b));
    void *host;
    EXPECT(!cuMemAllocHost_v2(&host, 4096) && memset(host, 1, 4096) && !cuMemFreeHost(host) && more() == -4);
    struct {
        size_t width, height;
        uint32_t format, channels;
    } array = {1024, 1024, 0x20, 4};
    EXPECT(!cuArrayCreate_v2(&a, &array) && more() == 16 && !cuArrayDestroy(a) && more() == -16);
    void *module;
    EXPECT(!cuModuleLoadData(&module, "text") && more() == 6 && !cuModuleUnload(module) && more() == -6);
    EXPECT(!cuCtxSetLimit(0, 2048) && more() == 264 && !cuCtxSetLimit(0, 1024) && more() == -264);
    EXPECT(!cuCtxSetLimit(1, 17 * MIB) && more() == 16 && !cuCtxSetLimit(2, 72 * MIB) && more() == 64);
    EXPECT(!cuCtxSetLimit(1, 4096) && more() == -16 && !cuCtxSetLimit(2, 8 * MIB) && more() == -64);
    EXPECT(cuCtxSetLimit(2, 1ull << 40) == 2 && more() == 0 && cuCtxSetLimit(8, 0) == 1);
}

/* A kernel that needs more stack than the limit makes the stacks grow; they stay grown, and the limit as it is. */
static void launches(void) {
    void *module, *function;
    size_t limit;
    const char *text = ".version 7.0\n.visible .global .align 8 .b8 data[3145728];\n.local .align 8 .b8 depot[3072];\n";
    EXPECT(!cuModuleLoadData(&module, text) && more() == 10 && !cuModuleGetFunction(&function, module, "work"));
    EXPECT(!cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) && more() == 528);
    EXPECT(!cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) && more() == 0);
    EXPECT(!cuCtxGetLimit(&limit, 0) && limit == 1024 && !cuModuleUnload(module) && more() == -10);
    EXPECT(!cuCtxSetLimit(0, 1024) && more() == -528);
}

/* On a machine with other costs: the driver's internal memory, and lazily loaded modules. */
static void costs(void *primary) {
    void *stream[150], *event[150], *graph, *exec, *module, *function, *other, *green;
    uint64_t a, b;
    for (int i = 0; i < 150; i++) EXPECT(!cuStreamCreate(&stream[i], 1));
    EXPECT(more() == 3); /* 150 of 20000 bytes */
    for (int i = 0; i < 150; i++) EXPECT(!cuEventCreate(&event[i], 0));
    EXPECT(more() == 1); /* 1000 each, together with those */
    EXPECT(!cuStreamBeginCapture_v2(stream[0], 0) && !cuStreamEndCapture(stream[0], &graph));
    EXPECT(!cuGraphInstantiateWithFlags(&exec, graph, 0) && more() == 2 && !cuGraphExecDestroy(exec) && more() == -2);
    for (int i = 0; i < 150; i++) EXPECT(!cuStreamDestroy_v2(stream[i]) && !cuEventDestroy_v2(event[i]));
    EXPECT(more() == -4);
    EXPECT(!cuModuleLoadData(&module, "text") && more() == 4 && !cuModuleGetFunction(&function, module, "work"));
    EXPECT(!cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) && more() == 2 && !cuModuleUnload(module));
    EXPECT(more() == -6);
    EXPECT(!cuMemAlloc_v2(&a, 1) && !cuMemAlloc_v2(&b, 2048) && more() == 1 && b == a + 4096);
    EXPECT(!cuMemFree_v2(a) && !cuMemFree_v2(b) && !cuMemAlloc_v2(&a, 4096 * 3) && more() == 0 && !cuMemFree_v2(a));
    EXPECT(more() == -1);
    EXPECT(!cuGreenCtxCreate(&green, NULL, 0, 1) && more() == 8 && !cuGreenCtxDestroy(green) && more() == -8);
    EXPECT(!cuCtxCreate_v2(&other, 0, 0) && more() == 100 && !cuCtxDestroy_v2(other) && more() == -100);
    EXPECT(cuCtxEnablePeerAccess(primary, 0) == 217 && !cuCtxCreate_v2(&other, 0, 1) && !cuCtxSetCurrent(primary));
    more();
    EXPECT(!cuCtxEnablePeerAccess(other, 0) && more() == 4 && cuCtxEnablePeerAccess(other, 0) == 704);
    EXPECT(!cuCtxDisablePeerAccess(other) && more() == -4 && cuCtxDisablePeerAccess(other) == 705);
}

static void pools(void) {
    struct {
        uint32_t type, handles, place;
        int32_t id;
        uint8_t rest[72];
    } props = {1, 0, 1, 0, {0}};
    uint64_t a, b, reserved, threshold = 64 * MIB;
    void *pool;
    EXPECT(!cuMemPoolCreate(&pool, &props) && more() == 0);
    EXPECT(!cuMemAllocFromPoolAsync(&a, 1000, pool, NULL) && more() == 32);
    EXPECT(!cuMemAllocFromPoolAsync(&b, 40 * MIB, pool, NULL) && more() == 64);
    EXPECT(!cuMemPoolGetAttribute(pool, 5, &reserved) && reserved == 96 * MIB);
    EXPECT(!cuMemPoolGetAttribute(pool, 7, &reserved) && reserved == 40 * MIB + 1024);
    EXPECT(!cuMemFreeAsync(b, NULL) && more() == 0 && !cuMemPoolSetAttribute(pool, 4, &threshold));
    EXPECT(!cuCtxSynchronize() && more() == 0); /* 32 is less than the threshold */
    threshold = 0;
    EXPECT(!cuMemPoolSetAttribute(pool, 4, &threshold) && !cuCtxSynchronize() && more() == -64);
    EXPECT(!cuMemPoolDestroy(pool) && more() == 0 && !cuMemFree_v2(a) && more() == -32);
    EXPECT(!cuMemAllocAsync(&a, 1, NULL) && more() == 32 && !cuMemFreeAsync(a, NULL) && !cuCtxSynchronize());
    EXPECT(more() == -32);
}

static void vmm(void) {
    struct {
        uint32_t type, handles, place;
        int32_t id;
        uint8_t rest[16];
    } prop = {1, 0, 1, 0, {0}};
    uint64_t handle, again, at;
    EXPECT(!cuMemAddressReserve(&at, 1ull << 36, 0, 0, 0) && more() == 0);
    EXPECT(cuMemCreate(&handle, 1000, &prop, 0) == 1 && !cuMemCreate(&handle, 4 * MIB, &prop, 0) && more() == 4);
    EXPECT(cuMemMap(at, 4 * MIB, 0, handle + 77, 0) == 1 && !cuMemMap(at, 4 * MIB, 0, handle, 0));
    EXPECT(cuMemMap(at + 2 * MIB, 4 * MIB, 0, handle, 0) == 1);
    EXPECT(!cuMemRetainAllocationHandle(&again, at + 100) && again == handle);
    EXPECT(!cuMemRelease(handle) && !cuMemRelease(handle) && more() == 0);
    EXPECT(cuMemAddressFree(at, 1ull << 36) == 1 && cuMemUnmap(at, 2 * MIB) == 1);
    EXPECT(!cuMemUnmap(at, 4 * MIB) && more() == -4 && !cuMemAddressFree(at, 1ull << 36));
}

static void graphs(void) {
    void *stream, *graph, *exec;
    uint64_t a;
    EXPECT(!cuStreamCreate(&stream, 1) && !cuStreamBeginCapture_v2(stream, 0));
    EXPECT(!cuMemAllocAsync(&a, 5 * MIB, stream) && more() == 0 && !cuStreamEndCapture(stream, &graph));
    EXPECT(!cuGraphInstantiateWithFlags(&exec, graph, 0) && more() == 0 && !cuGraphLaunch(exec, stream) && more() == 32);
    EXPECT(!cuGraphLaunch(exec, stream) && !cuGraphExecDestroy(exec) && !cuCtxSynchronize() && more() == 0);
    EXPECT(!cuDeviceGraphMemTrim(0) && more() == -32);
}

static void contexts(void *primary) {
    void *other;
    uint64_t a, handle, pooled;
    struct {
        uint32_t type, handles, place;
        int32_t id;
        uint8_t rest[16];
    } prop = {1, 0, 1, 0, {0}};
    EXPECT(!cuCtxCreate_v2(&other, 0, 0) && more() == 498 && !cuMemAlloc_v2(&a, 10 * MIB) && more() == 10);
    EXPECT(!cuCtxDestroy_v2(other) && more() == -508);
    EXPECT(!cuCtxSetCurrent(primary) && cuMemFree_v2(a) == 1);
    EXPECT(!cuMemAlloc_v2(&a, 100) && !cuMemCreate(&handle, 2 * MIB, &prop, 0));
    EXPECT(!cuMemAllocAsync(&pooled, 5, NULL) && more() == 36);
    EXPECT(!cuDevicePrimaryCtxReset_v2(0));
    EXPECT(!cuDevicePrimaryCtxRetain(&primary, 0) && !cuCtxSetCurrent(primary) && more() == -36);
}

int main(int argc, char **argv) {
    (void)argv;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *found, *primary;
    if (!driver) return 2;
#define LOAD(name, parameters) *(void **)&name = dlsym(driver, #name);
    CALLS(LOAD)
    EXPECT(cuMemAlloc_v2((uint64_t[1]){0}, 1) == 3);
    EXPECT(!cuInit(0) && !cuDevicePrimaryCtxRetain(&primary, 0));
    EXPECT(cuMemAlloc_v2((uint64_t[1]){0}, 1) == 201);
    EXPECT(!cuCtxSetCurrent(primary));
    EXPECT(!cuGetProcAddress("cuMemAlloc", &found, 12000, 0) && found == (void *)(uintptr_t)cuMemAlloc_v2);
    EXPECT(cuGetProcAddress("cuNothing", &found, 12000, 0) == 500);
    more();
    if (argc > 1) {
        costs(primary);
        return failures != 0;
    }
    direct();
    launches();
    pools();
    vmm();
    graphs();
    contexts(primary);
    return failures != 0;
}
