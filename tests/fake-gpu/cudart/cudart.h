/* Internals of a CUDA runtime on the simulated driver. Numbers and layouts are those of the runtime API, but no header
 * of CUDA is used. Built once per major version of CUDA (MAJOR), because structures and signatures differ.
 *
 *   cudart_core.c     the driver's functions, the thread's device, errors
 *   cudart_device.c   device properties
 *   cudart_memory.c   every allocation and free goes to the driver
 *   cudart_contents.c what was copied to a device since the last kernel
 *   cudart_stream.c   streams, events, graphs
 *   cudart_kernel.c   fat binaries, which the driver loads when the first of their kernels is launched
 *   cublas.c ...      hand-written parts of other libraries; stubs.py makes the rest
 *
 * Kernels compute nothing; device addresses have no memory behind them; copies to the host yield zeros, or what was copied to
 * the device since the last kernel. */
#ifndef FAKE_CUDART_H
#define FAKE_CUDART_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_DEVICES 128

typedef int result; /* CUresult and cudaError_t: the same numbers since CUDA 10.1 */
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INSUFFICIENT_DRIVER = 35,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    NOT_FOUND = 500,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
};

typedef struct {
    unsigned x, y, z;
} dim3;

typedef struct {
    uint64_t word[8];
} ipc_handle;

/* Every driver function that the runtime calls: X(name, types of its arguments). */
#define DRIVER(X) \
    X(cuInit, unsigned) \
    X(cuDriverGetVersion, int *) \
    X(cuGetProcAddress_v2, const char *, void **, int, uint64_t, int *) \
    X(cuDeviceGetCount, int *) \
    X(cuDeviceGetName, char *, int, int) \
    X(cuDeviceGetUuid_v2, uint8_t *, int) \
    X(cuDeviceTotalMem_v2, size_t *, int) \
    X(cuDeviceGetAttribute, int *, int, int) \
    X(cuDeviceGetPCIBusId, char *, int, int) \
    X(cuDeviceCanAccessPeer, int *, int, int) \
    X(cuDevicePrimaryCtxRetain, void **, int) \
    X(cuDevicePrimaryCtxReset_v2, int) \
    X(cuDeviceGetDefaultMemPool, void **, int) \
    X(cuDeviceGetMemPool, void **, int) \
    X(cuDeviceSetMemPool, int, void *) \
    X(cuDeviceGetGraphMemAttribute, int, int, void *) \
    X(cuDeviceGraphMemTrim, int) \
    X(cuCtxSetCurrent, void *) \
    X(cuCtxSynchronize, void) \
    X(cuCtxSetLimit, int, size_t) \
    X(cuCtxGetLimit, size_t *, int) \
    X(cuCtxEnablePeerAccess, void *, unsigned) \
    X(cuCtxDisablePeerAccess, void *) \
    X(cuMemGetInfo_v2, size_t *, size_t *) \
    X(cuMemAlloc_v2, uint64_t *, size_t) \
    X(cuMemAllocPitch_v2, uint64_t *, size_t *, size_t, size_t, unsigned) \
    X(cuMemFree_v2, uint64_t) \
    X(cuMemAllocManaged, uint64_t *, size_t, unsigned) \
    X(cuMemHostAlloc, void **, size_t, unsigned) \
    X(cuMemFreeHost, void *) \
    X(cuMemHostRegister_v2, void *, size_t, unsigned) \
    X(cuMemHostUnregister, void *) \
    X(cuMemAllocAsync, uint64_t *, size_t, void *) \
    X(cuMemAllocFromPoolAsync, uint64_t *, size_t, void *, void *) \
    X(cuMemFreeAsync, uint64_t, void *) \
    X(cuMemPoolCreate, void **, const void *) \
    X(cuMemPoolDestroy, void *) \
    X(cuMemPoolTrimTo, void *, size_t) \
    X(cuMemPoolSetAttribute, void *, int, void *) \
    X(cuMemPoolGetAttribute, void *, int, void *) \
    X(cuMemPoolSetAccess, void *, const void *, size_t) \
    X(cuPointerGetAttribute, void *, int, uint64_t) \
    X(cuIpcGetMemHandle, ipc_handle *, uint64_t) \
    X(cuIpcOpenMemHandle_v2, uint64_t *, ipc_handle, unsigned) \
    X(cuIpcCloseMemHandle, uint64_t) \
    X(cuStreamCreate, void **, unsigned) \
    X(cuStreamCreateWithPriority, void **, unsigned, int) \
    X(cuStreamDestroy_v2, void *) \
    X(cuStreamQuery, void *) \
    X(cuStreamSynchronize, void *) \
    X(cuStreamBeginCapture_v2, void *, int) \
    X(cuStreamEndCapture, void *, void **) \
    X(cuStreamIsCapturing, void *, int *) \
    X(cuStreamGetCaptureInfo_v2, void *, int *, uint64_t *, void **, const void **, size_t *) \
    X(cuEventCreate, void **, unsigned) \
    X(cuEventDestroy_v2, void *) \
    X(cuEventRecord, void *, void *) \
    X(cuEventQuery, void *) \
    X(cuEventSynchronize, void *) \
    X(cuGraphCreate, void **, unsigned) \
    X(cuGraphDestroy, void *) \
    X(cuGraphInstantiateWithFlags, void **, void *, uint64_t) \
    X(cuGraphLaunch, void *, void *) \
    X(cuGraphExecDestroy, void *) \
    X(cuLibraryLoadData, void **, const void *, int *, void **, unsigned, int *, void **, unsigned) \
    X(cuLibraryUnload, void *) \
    X(cuModuleLoadFatBinary, void **, const void *)

typedef struct {
#define X(name, ...) result (*name)(__VA_ARGS__);
    DRIVER(X)
#undef X
} driver_table;
extern driver_table driver;

/* Stores a call's result for cudaGetLastError, and returns it. */
result say(result r);
/* Loads and initialises the driver. Returns 0 or the error. */
result begin(void);
/* Also makes the context of this thread's device current. */
result use(void);
int device_count(void);
extern _Thread_local int thread_device;
void *primary_of(int device); /* NULL: none yet */

/* Contents of device memory, see cudart_contents.c. */
void contents_read(void *to, uint64_t address, size_t bytes);
void contents_write(uint64_t address, const void *from, size_t bytes);
void contents_fill(uint64_t address, int value, size_t bytes);
void contents_move(uint64_t to, uint64_t from, size_t bytes);
void contents_forget_all(void);

/* The body of an entry point that needs a context, or only the driver. */
#define RUN(work)                       \
    do {                                \
        result r_ = use();              \
        return say(r_ ? r_ : (work));   \
    } while (0)
#define ASK(work)                       \
    do {                                \
        result r_ = begin();            \
        return say(r_ ? r_ : (work));   \
    } while (0)

#endif
