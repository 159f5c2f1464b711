/* The part of the driver API that these programs use, from its documentation: no CUDA header is needed to build them.
 * Every function is resolved in libcuda.so.1 at program start; NULL if the driver lacks it. */
#ifndef GPU_SUITE_CUDA_H
#define GPU_SUITE_CUDA_H

#include <stddef.h>
#include <stdint.h>

typedef uint64_t address; /* CUdeviceptr */
typedef int result;       /* CUresult */

enum { OUT_OF_MEMORY = 2, NOT_FOUND = 500 };

typedef struct {
    char bytes[64];
} ipc_handle;
typedef struct {
    char bytes[16];
} uuid;
typedef struct {
    size_t width, height;
    unsigned format, channels; /* format 0x20: float */
} array_descriptor;
typedef struct {
    size_t width, height, depth;
    unsigned format, channels, flags;
} array3d_descriptor;
typedef struct {
    unsigned type; /* 1: a device */
    int id;
} location;
typedef struct {
    unsigned type; /* 1: pinned, on the device of the location */
    unsigned handle_types;
    location where;
    void *windows;
    struct {
        unsigned char compression, rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
} allocation_properties;
typedef struct {
    location where;
    unsigned access; /* 3: read and write */
} access_descriptor;
typedef struct {
    unsigned type, handle_types;
    location where;
    void *windows;
    size_t max_bytes;
    unsigned short usage;
    unsigned char reserved[54];
} pool_properties;
typedef struct {
    unsigned devices;
    size_t bytes;
    uint64_t handle_types, flags;
} multicast_properties;
typedef struct {
    pool_properties pool;
    const access_descriptor *access;
    size_t access_count, bytes;
    address where;
} memory_node;

/* name, exported name, parameters */
#define FUNCTIONS(F)                                                                                     \
    F(Init, "cuInit", (unsigned))                                                                        \
    F(DriverGetVersion, "cuDriverGetVersion", (int *))                                                   \
    F(DeviceGet, "cuDeviceGet", (int *, int))                                                            \
    F(DeviceGetCount, "cuDeviceGetCount", (int *))                                                       \
    F(DeviceGetName, "cuDeviceGetName", (char *, int, int))                                              \
    F(DeviceGetUuid, "cuDeviceGetUuid", (uuid *, int))                                                   \
    F(DeviceGetAttribute, "cuDeviceGetAttribute", (int *, int, int))                                     \
    F(DeviceTotalMem, "cuDeviceTotalMem_v2", (size_t *, int))                                            \
    F(PrimaryRetain, "cuDevicePrimaryCtxRetain", (void **, int))                                         \
    F(PrimaryRelease, "cuDevicePrimaryCtxRelease_v2", (int))                                             \
    F(PrimaryReset, "cuDevicePrimaryCtxReset_v2", (int))                                                 \
    F(CtxCreate, "cuCtxCreate_v2", (void **, unsigned, int))                                             \
    F(CtxDestroy, "cuCtxDestroy_v2", (void *))                                                           \
    F(CtxSetCurrent, "cuCtxSetCurrent", (void *))                                                        \
    F(CtxSynchronize, "cuCtxSynchronize", (void))                                                        \
    F(CtxSetLimit, "cuCtxSetLimit", (int, size_t))                                                       \
    F(CtxGetLimit, "cuCtxGetLimit", (size_t *, int))                                                     \
    F(MemGetInfo, "cuMemGetInfo_v2", (size_t *, size_t *))                                               \
    F(MemAlloc, "cuMemAlloc_v2", (address *, size_t))                                                    \
    F(MemAllocPitch, "cuMemAllocPitch_v2", (address *, size_t *, size_t, size_t, unsigned))              \
    F(MemAllocManaged, "cuMemAllocManaged", (address *, size_t, unsigned))                               \
    F(MemPrefetch, "cuMemPrefetchAsync", (address, size_t, int, void *))                                 \
    F(MemFree, "cuMemFree_v2", (address))                                                                \
    F(MemHostAlloc, "cuMemHostAlloc", (void **, size_t, unsigned))                                       \
    F(MemFreeHost, "cuMemFreeHost", (void *))                                                            \
    F(MemHostRegister, "cuMemHostRegister_v2", (void *, size_t, unsigned))                               \
    F(MemHostUnregister, "cuMemHostUnregister", (void *))                                                \
    F(ArrayCreate, "cuArrayCreate_v2", (void **, const array_descriptor *))                              \
    F(Array3DCreate, "cuArray3DCreate_v2", (void **, const array3d_descriptor *))                        \
    F(ArrayDestroy, "cuArrayDestroy", (void *))                                                          \
    F(MipmapCreate, "cuMipmappedArrayCreate", (void **, const array3d_descriptor *, unsigned))           \
    F(MipmapDestroy, "cuMipmappedArrayDestroy", (void *))                                                \
    F(MemGranularity, "cuMemGetAllocationGranularity", (size_t *, const allocation_properties *, int))   \
    F(MemCreate, "cuMemCreate", (uint64_t *, size_t, const allocation_properties *, uint64_t))           \
    F(MemRelease, "cuMemRelease", (uint64_t))                                                            \
    F(MemExport, "cuMemExportToShareableHandle", (void *, uint64_t, unsigned, uint64_t))                 \
    F(MemImport, "cuMemImportFromShareableHandle", (uint64_t *, void *, unsigned))                       \
    F(MemRetain, "cuMemRetainAllocationHandle", (uint64_t *, void *))                                    \
    F(MemReserve, "cuMemAddressReserve", (address *, size_t, size_t, address, uint64_t))                 \
    F(MemAddressFree, "cuMemAddressFree", (address, size_t))                                             \
    F(MemMap, "cuMemMap", (address, size_t, size_t, uint64_t, uint64_t))                                 \
    F(MemUnmap, "cuMemUnmap", (address, size_t))                                                         \
    F(MemSetAccess, "cuMemSetAccess", (address, size_t, const access_descriptor *, size_t))              \
    F(StreamCreate, "cuStreamCreate", (void **, unsigned))                                               \
    F(StreamDestroy, "cuStreamDestroy_v2", (void *))                                                     \
    F(EventCreate, "cuEventCreate", (void **, unsigned))                                                 \
    F(EventDestroy, "cuEventDestroy_v2", (void *))                                                       \
    F(MemsetAsync, "cuMemsetD8Async", (address, unsigned char, size_t, void *))                          \
    F(CanAccessPeer, "cuDeviceCanAccessPeer", (int *, int, int))                                         \
    F(EnablePeer, "cuCtxEnablePeerAccess", (void *, unsigned))                                           \
    F(DisablePeer, "cuCtxDisablePeerAccess", (void *))                                                   \
    F(DeviceResource, "cuDeviceGetDevResource", (int, void *, int))                                      \
    F(ResourceDescribe, "cuDevResourceGenerateDesc", (void **, void *, unsigned))                        \
    F(GreenCreate, "cuGreenCtxCreate", (void **, void *, int, unsigned))                                 \
    F(GreenDestroy, "cuGreenCtxDestroy", (void *))                                                       \
    F(MulticastCreate, "cuMulticastCreate", (uint64_t *, const multicast_properties *))                  \
    F(MulticastAdd, "cuMulticastAddDevice", (uint64_t, int))                                             \
    F(MulticastBind, "cuMulticastBindMem", (uint64_t, size_t, uint64_t, size_t, size_t, uint64_t))       \
    F(MulticastGranularity, "cuMulticastGetGranularity", (size_t *, const multicast_properties *, int))  \
    F(StreamSynchronize, "cuStreamSynchronize", (void *))                                                \
    F(StreamBeginCapture, "cuStreamBeginCapture_v2", (void *, int))                                      \
    F(StreamEndCapture, "cuStreamEndCapture", (void *, void **))                                         \
    F(MemAllocAsync, "cuMemAllocAsync", (address *, size_t, void *))                                     \
    F(MemAllocFromPool, "cuMemAllocFromPoolAsync", (address *, size_t, void *, void *))                  \
    F(MemFreeAsync, "cuMemFreeAsync", (address, void *))                                                 \
    F(DefaultPool, "cuDeviceGetDefaultMemPool", (void **, int))                                          \
    F(PoolCreate, "cuMemPoolCreate", (void **, const pool_properties *))                                 \
    F(PoolDestroy, "cuMemPoolDestroy", (void *))                                                         \
    F(PoolTrim, "cuMemPoolTrimTo", (void *, size_t))                                                     \
    F(PoolGet, "cuMemPoolGetAttribute", (void *, int, void *))                                           \
    F(PoolSet, "cuMemPoolSetAttribute", (void *, int, void *))                                           \
    F(GraphMemory, "cuDeviceGetGraphMemAttribute", (int, int, void *))                                   \
    F(GraphTrim, "cuDeviceGraphMemTrim", (int))                                                          \
    F(GraphCreate, "cuGraphCreate", (void **, unsigned))                                                 \
    F(GraphDestroy, "cuGraphDestroy", (void *))                                                          \
    F(GraphAddAlloc, "cuGraphAddMemAllocNode", (void **, void *, void *const *, size_t, memory_node *))  \
    F(GraphAddFree, "cuGraphAddMemFreeNode", (void **, void *, void *const *, size_t, address))          \
    F(GraphInstantiate, "cuGraphInstantiateWithFlags", (void **, void *, uint64_t))                      \
    F(GraphLaunch, "cuGraphLaunch", (void *, void *))                                                    \
    F(GraphExecDestroy, "cuGraphExecDestroy", (void *))                                                  \
    F(IpcGet, "cuIpcGetMemHandle", (ipc_handle *, address))                                              \
    F(IpcOpen, "cuIpcOpenMemHandle_v2", (address *, ipc_handle, unsigned))                               \
    F(IpcClose, "cuIpcCloseMemHandle", (address))                                                        \
    F(ModuleLoad, "cuModuleLoadData", (void **, const void *))                                           \
    F(ModuleUnload, "cuModuleUnload", (void *))                                                          \
    F(ModuleFunction, "cuModuleGetFunction", (void **, void *, const char *))                            \
    F(Launch, "cuLaunchKernel",                                                                          \
      (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))

#define DECLARE(name, symbol, parameters) extern result(*cu##name) parameters;
FUNCTIONS(DECLARE)
#undef DECLARE

/* Functions of the agent, and of only the simulated driver; NULL where they are absent. */
extern void (*gpumem_push)(const char *), (*gpumem_pop)(void), (*gpumem_step)(uint64_t);
extern void (*gpumem_pause)(void), (*gpumem_resume)(void);
extern void (*sim_tag)(const char *);

extern int device;      /* ordinal in use */
extern void *stream;    /* of the stream-ordered calls */

/* core.c */
int load_driver(void);
void forget_modules(void); /* table.c: their context is gone */
void load_agent(void); /* only after cuInit, which loads it */
uint64_t now_ns(void);
void reply(result r, uint64_t since, const char *format, ...) __attribute__((format(printf, 3, 4)));
void done(result r); /* a reply that is only the result */
const char *word(void);        /* next word of the command, "" at its end */
uint64_t number(void);         /* next word as bytes: 7, 4K, 2M, 1G; 0 at the end */
uint64_t number_or(uint64_t missing); /* and that at the end */
void mark(void);               /* the call begins now */
uint64_t began(void);

/* Live memory in the program's own accounts. */
enum kind { DEVICE, PITCHED, ASYNC, MANAGED, PINNED, REGISTERED, ARRAY, MIPMAP, IPC, HANDLE, MAPPING, KINDS };
typedef struct {
    enum kind kind;
    uint64_t what; /* address, handle or array */
    uint64_t bytes;
    int live;
    uint64_t span; /* of an imported handle: its bytes, which this process does not count */
} row;
int keep(enum kind kind, uint64_t what, uint64_t bytes); /* its number */
row *kept(uint64_t number);                              /* NULL: not alive */
row *rows(int *count);

typedef struct {
    const char *name;
    void (*run)(void);
    const char *arguments;
} command;
extern const command memory_commands[], space_commands[], loop_commands[], process_commands[], table_commands[],
    cupti_commands[];

#endif
