/* As much of the CUDA driver as the examples need, loaded at run time: they are built without CUDA. */
#ifndef EXAMPLE_CUDA_H
#define EXAMPLE_CUDA_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    uint32_t type, handle_types;
    struct {
        uint32_t type;
        int32_t id;
    } location;
    void *security;
    uint8_t flags[8];
} cuda_memory; /* CUmemAllocationProp */

typedef struct {
    struct {
        uint32_t type;
        int32_t id;
    } location;
    uint32_t flags;
} cuda_access; /* CUmemAccessDesc */

#define CUDA_CALLS(X)                                                                           \
    X(cuInit, (unsigned))                                                                       \
    X(cuDevicePrimaryCtxRetain, (void **, int))                                                 \
    X(cuDevicePrimaryCtxRelease_v2, (int))                                                      \
    X(cuCtxSetCurrent, (void *))                                                                \
    X(cuMemAlloc_v2, (uint64_t *, size_t))                                                      \
    X(cuMemFree_v2, (uint64_t))                                                                 \
    X(cuMemAddressReserve, (uint64_t *, size_t, size_t, uint64_t, unsigned long long))          \
    X(cuMemAddressFree, (uint64_t, size_t))                                                     \
    X(cuMemCreate, (uint64_t *, size_t, const cuda_memory *, unsigned long long))               \
    X(cuMemRelease, (uint64_t))                                                                 \
    X(cuMemMap, (uint64_t, size_t, size_t, uint64_t, unsigned long long))                       \
    X(cuMemUnmap, (uint64_t, size_t))                                                           \
    X(cuMemSetAccess, (uint64_t, size_t, const cuda_access *, size_t))

#define CUDA_FIELD(name, parameters) int(*name) parameters;
static struct { CUDA_CALLS(CUDA_FIELD) } cu;

static inline void must(int result, const char *what) {
    if (result == 0) return;
    fprintf(stderr, "%s: CUDA error %d\n", what, result);
    exit(1);
}
#define MUST(call) must(call, #call)

/* The driver, and the primary context of device 0. */
static inline void cuda_begin(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    void *found, *context;
    if (library == NULL) {
        fprintf(stderr, "no CUDA driver: %s\n", dlerror());
        exit(1);
    }
#define CUDA_LOAD(name, parameters)              \
    found = dlsym(library, #name);               \
    must(found == NULL, "no " #name);            \
    memcpy(&cu.name, &found, sizeof found);
    CUDA_CALLS(CUDA_LOAD)
    MUST(cu.cuInit(0));
    MUST(cu.cuDevicePrimaryCtxRetain(&context, 0));
    MUST(cu.cuCtxSetCurrent(context));
}

static inline uint64_t cuda_alloc(size_t bytes) {
    uint64_t address = 0;
    MUST(cu.cuMemAlloc_v2(&address, bytes));
    return address;
}

#ifdef __cplusplus
}
#endif
#endif
