/* Every driver call that allocates or frees memory, resolved at program start. Layouts are those of the documented
 * driver interface; no header of CUDA is needed. */
#ifndef MIXER_DRIVER_H
#define MIXER_DRIVER_H

#include <stddef.h>
#include <stdint.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2 };

typedef struct {
    uint32_t type; /* 1: a device, 2: the host */
    int32_t id;
} place;
typedef struct {
    uint32_t type, handles; /* type 1: pinned; handles 1: file descriptors */
    place where;
    void *security;
    uint8_t flags[8];
} backing;
typedef struct {
    place where;
    uint32_t access; /* 3: read and write */
} grant;
typedef struct {
    uint32_t type, handles;
    place where;
    void *security;
    size_t most;
    uint16_t usage;
    uint8_t reserved[54];
} pool_shape;
typedef struct {
    pool_shape pool;
    const grant *grants;
    size_t grant_count, bytes;
    uint64_t address;
} memory_node;
typedef struct {
    uint32_t type, reserved[3]; /* 10: an allocation, 11: a free */
    union {
        memory_node alloc;
        uint64_t free;
        uint8_t room[240];
    };
} any_node;
typedef struct {
    size_t width, height;
    uint32_t format, channels; /* 0x20: float */
} plane;
typedef struct {
    size_t width, height, depth;
    uint32_t format, channels, flags;
} volume;
typedef struct {
    uint8_t bytes[64];
} sealed; /* what goes to another process, opaque */
typedef struct {
    uint32_t type;
    uint32_t pad;
    uint64_t handle[2];
    uint64_t bytes;
    uint32_t flags, reserved[17];
} foreign;
typedef struct {
    uint64_t offset, bytes;
    uint32_t flags, reserved[17];
} foreign_buffer;
typedef struct {
    uint32_t devices;
    size_t bytes;
    uint64_t handles, flags;
} team;
_Static_assert(sizeof(backing) == 32 && sizeof(pool_shape) == 88 && sizeof(memory_node) == 120, "as documented");
_Static_assert(sizeof(any_node) == 256 && sizeof(plane) == 24 && sizeof(volume) == 40, "as documented");
_Static_assert(sizeof(foreign) == 104 && offsetof(foreign, bytes) == 24 && sizeof(foreign_buffer) == 88, "as documented");

/* name, parameters */
#define DRIVER_CALLS(X)                                                                 \
    X(cuInit, (unsigned))                                                               \
    X(cuDevicePrimaryCtxRetain, (void **, int))                                         \
    X(cuDevicePrimaryCtxRelease_v2, (int))                                              \
    X(cuDevicePrimaryCtxReset_v2, (int))                                                \
    X(cuCtxCreate_v2, (void **, unsigned, int))                                         \
    X(cuCtxDestroy_v2, (void *))                                                        \
    X(cuCtxSetCurrent, (void *))                                                        \
    X(cuCtxSynchronize, (void))                                                         \
    X(cuCtxSetLimit, (int, size_t))                                                     \
    X(cuGreenCtxCreate, (void **, void *, int, unsigned))                               \
    X(cuGreenCtxDestroy, (void *))                                                      \
    X(cuCtxFromGreenCtx, (void **, void *))                                             \
    X(cuMemAlloc_v2, (uint64_t *, size_t))                                              \
    X(cuMemAllocPitch_v2, (uint64_t *, size_t *, size_t, size_t, unsigned))             \
    X(cuMemFree_v2, (uint64_t))                                                         \
    X(cuMemAllocManaged, (uint64_t *, size_t, unsigned))                                \
    X(cuMemAllocHost_v2, (void **, size_t))                                             \
    X(cuMemHostAlloc, (void **, size_t, unsigned))                                      \
    X(cuMemFreeHost, (void *))                                                          \
    X(cuMemHostRegister_v2, (void *, size_t, unsigned))                                 \
    X(cuMemHostUnregister, (void *))                                                    \
    X(cuArrayCreate_v2, (void **, const plane *))                                       \
    X(cuArray3DCreate_v2, (void **, const volume *))                                    \
    X(cuArrayDestroy, (void *))                                                         \
    X(cuMipmappedArrayCreate, (void **, const volume *, unsigned))                      \
    X(cuMipmappedArrayDestroy, (void *))                                                \
    X(cuStreamCreate, (void **, unsigned))                                              \
    X(cuStreamDestroy_v2, (void *))                                                     \
    X(cuStreamBeginCapture_v2, (void *, int))                                           \
    X(cuStreamEndCapture, (void *, void **))                                            \
    X(cuMemAllocAsync, (uint64_t *, size_t, void *))                                    \
    X(cuMemAllocFromPoolAsync, (uint64_t *, size_t, void *, void *))                    \
    X(cuMemFreeAsync, (uint64_t, void *))                                               \
    X(cuMemPoolCreate, (void **, const pool_shape *))                                   \
    X(cuMemPoolDestroy, (void *))                                                       \
    X(cuMemPoolTrimTo, (void *, size_t))                                                \
    X(cuMemPoolSetAttribute, (void *, int, void *))                                     \
    X(cuMemPoolExportToShareableHandle, (void *, void *, int, unsigned long long))      \
    X(cuMemPoolImportFromShareableHandle, (void **, void *, int, unsigned long long))   \
    X(cuMemPoolExportPointer, (sealed *, uint64_t))                                     \
    X(cuMemPoolImportPointer, (uint64_t *, void *, sealed *))                           \
    X(cuDeviceGetDefaultMemPool, (void **, int))                                        \
    X(cuDeviceSetMemPool, (int, void *))                                                \
    X(cuMemCreate, (uint64_t *, size_t, const backing *, unsigned long long))           \
    X(cuMemRelease, (uint64_t))                                                         \
    X(cuMemRetainAllocationHandle, (uint64_t *, void *))                                \
    X(cuMemAddressReserve, (uint64_t *, size_t, size_t, uint64_t, unsigned long long))  \
    X(cuMemAddressFree, (uint64_t, size_t))                                             \
    X(cuMemMap, (uint64_t, size_t, size_t, uint64_t, unsigned long long))               \
    X(cuMemUnmap, (uint64_t, size_t))                                                   \
    X(cuMemSetAccess, (uint64_t, size_t, const grant *, size_t))                        \
    X(cuMemExportToShareableHandle, (void *, uint64_t, int, unsigned long long))        \
    X(cuMemImportFromShareableHandle, (uint64_t *, void *, int))                        \
    X(cuMulticastCreate, (uint64_t *, const team *))                                    \
    X(cuMulticastAddDevice, (uint64_t, int))                                            \
    X(cuMulticastBindMem, (uint64_t, size_t, uint64_t, size_t, size_t, unsigned long long)) \
    X(cuMulticastUnbind, (uint64_t, int, size_t, size_t))                               \
    X(cuIpcGetMemHandle, (sealed *, uint64_t))                                          \
    X(cuIpcOpenMemHandle_v2, (uint64_t *, sealed, unsigned))                            \
    X(cuIpcCloseMemHandle, (uint64_t))                                                  \
    X(cuImportExternalMemory, (void **, const foreign *))                               \
    X(cuExternalMemoryGetMappedBuffer, (uint64_t *, void *, const foreign_buffer *))    \
    X(cuDestroyExternalMemory, (void *))                                                \
    X(cuGraphCreate, (void **, unsigned))                                               \
    X(cuGraphDestroy, (void *))                                                         \
    X(cuGraphAddMemAllocNode, (void **, void *, void *const *, size_t, memory_node *))  \
    X(cuGraphAddMemFreeNode, (void **, void *, void *const *, size_t, uint64_t))        \
    X(cuGraphAddNode, (void **, void *, void *const *, size_t, any_node *))             \
    X(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long))               \
    X(cuGraphLaunch, (void *, void *))                                                  \
    X(cuGraphExecDestroy, (void *))                                                     \
    X(cuDeviceGraphMemTrim, (int))                                                      \
    X(cuModuleLoadData, (void **, const void *))                                        \
    X(cuModuleUnload, (void *))                                                         \
    X(cuLibraryLoadData, (void **, const void *, int *, void **, unsigned, int *, void **, unsigned)) \
    X(cuLibraryUnload, (void *))

#define DRIVER_FIELD(name, parameters) int (*name) parameters;
typedef struct {
    DRIVER_CALLS(DRIVER_FIELD)
} driver_calls;
extern driver_calls cu;

void *driver_load(void); /* the library's handle; exits when something is missing */
uint64_t now_ns(void);

#endif
