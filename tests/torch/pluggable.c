/* A third-party allocator for CUDAPluggableAllocator. */
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

extern int cudaMalloc(void **, size_t);
extern int cudaFree(void *);

static uint64_t held;

uint64_t plug_held(void) { return held; }
void *plug_malloc(ssize_t bytes, int device, void *stream) {
    void *address = NULL;
    (void)device, (void)stream;
    if (cudaMalloc(&address, (size_t)bytes)) return NULL;
    __atomic_add_fetch(&held, (uint64_t)bytes, __ATOMIC_RELAXED);
    return address;
}
void plug_free(void *address, ssize_t bytes, int device, void *stream) {
    (void)device, (void)stream;
    cudaFree(address);
    __atomic_sub_fetch(&held, (uint64_t)bytes, __ATOMIC_RELAXED);
}
