/* The CUDA driver, real or simulated, loaded at run time. */
#ifndef TRAINER_DRIVER_H
#define TRAINER_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint32_t type, handle_types;
    struct {
        uint32_t type;
        int32_t id;
    } location;
    void *security;
    uint8_t flags[8];
} vmm_prop;

typedef struct {
    struct {
        uint32_t type;
        int32_t id;
    } location;
    uint32_t flags;
} vmm_access;

/* name, parameters */
#define DRIVER_CALLS(X)                                                       \
    X(cuInit, (unsigned))                                                     \
    X(cuDeviceGetCount, (int *))                                              \
    X(cuDevicePrimaryCtxRetain, (void **, int))                               \
    X(cuDevicePrimaryCtxRelease_v2, (int))                                    \
    X(cuCtxSetCurrent, (void *))                                              \
    X(cuCtxSynchronize, (void))                                               \
    X(cuMemGetInfo_v2, (size_t *, size_t *))                                  \
    X(cuMemAlloc_v2, (uint64_t *, size_t))                                    \
    X(cuMemFree_v2, (uint64_t))                                               \
    X(cuMemAllocManaged, (uint64_t *, size_t, unsigned))                      \
    X(cuMemAllocHost_v2, (void **, size_t))                                   \
    X(cuMemFreeHost, (void *))                                                \
    X(cuMemAllocAsync, (uint64_t *, size_t, void *))                          \
    X(cuMemFreeAsync, (uint64_t, void *))                                     \
    X(cuDeviceGetDefaultMemPool, (void **, int))                              \
    X(cuMemPoolGetAttribute, (void *, int, void *))                           \
    X(cuMemPoolSetAttribute, (void *, int, void *))                           \
    X(cuMemAddressReserve, (uint64_t *, size_t, size_t, uint64_t, unsigned long long)) \
    X(cuMemAddressFree, (uint64_t, size_t))                                   \
    X(cuMemCreate, (uint64_t *, size_t, const vmm_prop *, unsigned long long)) \
    X(cuMemRelease, (uint64_t))                                               \
    X(cuMemMap, (uint64_t, size_t, size_t, uint64_t, unsigned long long))     \
    X(cuMemUnmap, (uint64_t, size_t))                                         \
    X(cuMemSetAccess, (uint64_t, size_t, const vmm_access *, size_t))         \
    X(cuModuleLoadData, (void **, const void *))                              \
    X(cuModuleUnload, (void *))                                               \
    X(cuStreamCreate, (void **, unsigned))

#define DRIVER_FIELD(name, parameters) int (*name) parameters;
typedef struct {
    DRIVER_CALLS(DRIVER_FIELD)
} driver_calls;
extern driver_calls cu;

enum { OUT_OF_MEMORY = 2 };

void *load_driver(void);                     /* the library's handle; exits when there is none */
void must(int result, const char *what);     /* exits unless the driver returned 0 */
uint64_t now_ns(void);

#endif
