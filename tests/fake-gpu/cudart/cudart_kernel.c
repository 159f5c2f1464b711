/* Fat binaries and kernels. A library registers both while it is loaded; the first launch of one of a binary's kernels
 * on a device loads the binary there, as lazy loading does. Nothing is computed. */
#include "cudart.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const void *image;
    void *loaded[MAX_DEVICES]; /* the driver's handle, set under the lock */
} binary;

/* Kernels by the address of their host function: open addressing, filled to a half at most. */
typedef struct {
    const void *function;
    binary *of;
} kernel;
static kernel *_Atomic kernels;
static size_t buckets, count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static kernel *place(kernel *table, size_t size, const void *function) {
    size_t at = ((uintptr_t)function >> 4) * 0x9e3779b97f4a7c15ull >> 20 & (size - 1);
    while (table[at].function && table[at].function != function) at = (at + 1) & (size - 1);
    return &table[at];
}

/* A replaced table is not freed, because a launch may still read it. */
static void grow(void) {
    size_t size = buckets ? buckets * 2 : 1024;
    kernel *table = calloc(size, sizeof *table), *old = kernels;
    if (!table) abort();
    for (size_t i = 0; i < buckets; i++)
        if (old[i].function) *place(table, size, old[i].function) = old[i];
    kernels = table;
    buckets = size;
}

/* A fat binary's wrapper points to its image. */
EXPORT void **__cudaRegisterFatBinary(void *wrapper) {
    struct {
        int magic, version;
        const void *image;
    } *w = wrapper;
    binary *b = calloc(1, sizeof *b);
    if (!b) abort();
    b->image = w->image;
    return (void **)b;
}
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
/* Called at the end of the program, when the driver has already freed everything. */
EXPORT void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
EXPORT void __cudaRegisterFunction(void **handle, const void *function, ...) {
    pthread_mutex_lock(&lock);
    if (2 * ++count > buckets) grow();
    *place(kernels, buckets, function) = (kernel){function, (binary *)handle};
    pthread_mutex_unlock(&lock);
}
EXPORT char __cudaInitModule(void **handle) {
    (void)handle;
    return 1;
}

static result load(binary *b) {
    result r = OK;
    pthread_mutex_lock(&lock);
    if (!b->loaded[thread_device])
        r = MAJOR >= 12 ? driver.cuLibraryLoadData(&b->loaded[thread_device], b->image, NULL, NULL, 0, NULL, NULL, 0)
                        : driver.cuModuleLoadFatBinary(&b->loaded[thread_device], b->image);
    pthread_mutex_unlock(&lock);
    return r;
}

static result launch(const void *function) {
    contents_forget_all();
    if (!kernels) return OK;
    const kernel *k = place(kernels, buckets, function);
    if (!k->function || k->of->loaded[thread_device]) return OK;
    return load(k->of);
}

EXPORT result cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
    (void)grid, (void)block, (void)arguments, (void)shared, (void)stream;
    RUN(launch(function));
}
EXPORT result cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                          void *stream) {
    (void)grid, (void)block, (void)arguments, (void)shared, (void)stream;
    RUN(launch(function));
}
EXPORT result __cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
    (void)grid, (void)block, (void)arguments, (void)shared, (void)stream;
    RUN(launch(function));
}
EXPORT result cudaLaunchKernelExC(const void *config, const void *function, void **arguments) {
    (void)config, (void)arguments;
    RUN(launch(function));
}
/* A kernel's handle is its host function. */
EXPORT result __cudaGetKernel(const void **out, const void *function) {
    *out = function;
    return OK;
}
EXPORT result cudaGetKernel(const void **out, const void *function) { return __cudaGetKernel(out, function); }

/* Arguments of <<<grid, block, shared, stream>>>, for the stub that it calls. */
static _Thread_local struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} call[8];
static _Thread_local unsigned calls;
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    unsigned at = calls++ % 8;
    call[at].grid = grid;
    call[at].block = block;
    call[at].shared = shared;
    call[at].stream = stream;
    return 0;
}
EXPORT result __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream) {
    unsigned at = --calls % 8;
    *grid = call[at].grid;
    *block = call[at].block;
    *shared = call[at].shared;
    *stream = call[at].stream;
    return OK;
}

/* cudaFuncAttributes: maxThreadsPerBlock at 24, numRegs, ptxVersion, binaryVersion, ..., maxDynamicSharedSizeBytes at 44. */
EXPORT result cudaFuncGetAttributes(char *out, const void *function) {
    static const int at24[] = {1024, 32, 90, 90, 0, 49152};
    (void)function;
    memset(out, 0, MAJOR >= 12 ? 144 : 56);
    memcpy(out + 24, at24, sizeof at24);
    return say(use());
}
EXPORT result cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int size, size_t shared) {
    (void)function, (void)size, (void)shared;
    RUN((*blocks = 2, OK));
}
EXPORT result cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int size,
                                                                     size_t shared, unsigned flags) {
    (void)function, (void)size, (void)shared, (void)flags;
    RUN((*blocks = 2, OK));
}

/* Variables of a module: addresses without memory, below those of allocations. */
EXPORT result cudaGetSymbolAddress(void **out, const void *symbol) {
    RUN((*out = (void *)(0x100000000000ull | ((uintptr_t)symbol & 0xffffffff)), OK));
}

EXPORT result cudaLibraryLoadData(void **library, const void *code, int *jit, void **jit_values, unsigned jit_count,
                                  int *options, void **values, unsigned option_count) {
    RUN(driver.cuLibraryLoadData(library, code, jit, jit_values, jit_count, options, values, option_count));
}
EXPORT result cudaLibraryUnload(void *library) { RUN(driver.cuLibraryUnload(library)); }
EXPORT result cudaLibraryGetKernel(void **out, void *library, const char *name) {
    (void)name;
    RUN((*out = library, OK));
}
EXPORT result cudaLibraryGetKernelCount(unsigned *out, void *library) {
    (void)library;
    RUN((*out = 0, OK));
}
