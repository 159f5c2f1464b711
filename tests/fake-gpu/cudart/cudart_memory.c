/* Allocations and frees call the driver. Copies to the device are in cudart_contents.c. */
#include "cudart.h"

#include <string.h>

static result allocate(void **out, size_t bytes) {
    uint64_t address = 0;
    result r = bytes ? driver.cuMemAlloc_v2(&address, bytes) : OK;
    *out = (void *)(uintptr_t)address;
    return r;
}
EXPORT result cudaMalloc(void **out, size_t bytes) { RUN(allocate(out, bytes)); }
EXPORT result cudaFree(void *address) { RUN(driver.cuMemFree_v2((uint64_t)(uintptr_t)address)); }
static result allocate_pitch(void **out, size_t *pitch, size_t width, size_t height) {
    uint64_t address = 0;
    result r = driver.cuMemAllocPitch_v2(&address, pitch, width, height, 4);
    *out = (void *)(uintptr_t)address;
    return r;
}
EXPORT result cudaMallocPitch(void **out, size_t *pitch, size_t width, size_t height) {
    RUN(allocate_pitch(out, pitch, width, height));
}
static result allocate_managed(void **out, size_t bytes, unsigned flags) {
    uint64_t address = 0;
    result r = driver.cuMemAllocManaged(&address, bytes, flags);
    *out = (void *)(uintptr_t)address;
    return r;
}
EXPORT result cudaMallocManaged(void **out, size_t bytes, unsigned flags) { RUN(allocate_managed(out, bytes, flags)); }

/* ---- host memory ---- */

EXPORT result cudaHostAlloc(void **out, size_t bytes, unsigned flags) { RUN(driver.cuMemHostAlloc(out, bytes, flags)); }
EXPORT result cudaMallocHost(void **out, size_t bytes) { RUN(driver.cuMemHostAlloc(out, bytes, 0)); }
EXPORT result cudaFreeHost(void *address) { RUN(address ? driver.cuMemFreeHost(address) : OK); }
EXPORT result cudaHostRegister(void *address, size_t bytes, unsigned flags) {
    RUN(driver.cuMemHostRegister_v2(address, bytes, flags));
}
EXPORT result cudaHostUnregister(void *address) { RUN(driver.cuMemHostUnregister(address)); }
EXPORT result cudaHostGetDevicePointer(void **out, void *address, unsigned flags) {
    (void)flags;
    RUN((*out = address, OK));
}

/* ---- pools ---- */

static result allocate_async(void **out, size_t bytes, void *pool, void *stream) {
    uint64_t address = 0;
    result r = pool ? driver.cuMemAllocFromPoolAsync(&address, bytes, pool, stream)
                    : driver.cuMemAllocAsync(&address, bytes, stream);
    *out = (void *)(uintptr_t)address;
    return r;
}
EXPORT result cudaMallocAsync(void **out, size_t bytes, void *stream) { RUN(allocate_async(out, bytes, NULL, stream)); }
EXPORT result cudaMallocFromPoolAsync(void **out, size_t bytes, void *pool, void *stream) {
    RUN(allocate_async(out, bytes, pool, stream));
}
EXPORT result cudaFreeAsync(void *address, void *stream) {
    RUN(driver.cuMemFreeAsync((uint64_t)(uintptr_t)address, stream));
}
EXPORT result cudaDeviceGetDefaultMemPool(void **pool, int device) { ASK(driver.cuDeviceGetDefaultMemPool(pool, device)); }
EXPORT result cudaDeviceGetMemPool(void **pool, int device) { ASK(driver.cuDeviceGetMemPool(pool, device)); }
EXPORT result cudaDeviceSetMemPool(int device, void *pool) { ASK(driver.cuDeviceSetMemPool(device, pool)); }
EXPORT result cudaMemPoolCreate(void **pool, const void *props) { ASK(driver.cuMemPoolCreate(pool, props)); }
EXPORT result cudaMemPoolDestroy(void *pool) { ASK(driver.cuMemPoolDestroy(pool)); }
EXPORT result cudaMemPoolTrimTo(void *pool, size_t keep) { ASK(driver.cuMemPoolTrimTo(pool, keep)); }
EXPORT result cudaMemPoolSetAttribute(void *pool, int attribute, void *value) {
    ASK(driver.cuMemPoolSetAttribute(pool, attribute, value));
}
EXPORT result cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
    ASK(driver.cuMemPoolGetAttribute(pool, attribute, value));
}
EXPORT result cudaMemPoolSetAccess(void *pool, const void *list, size_t count) {
    ASK(driver.cuMemPoolSetAccess(pool, list, count));
}
EXPORT result cudaDeviceGetGraphMemAttribute(int device, int attribute, void *value) {
    ASK(driver.cuDeviceGetGraphMemAttribute(device, attribute, value));
}
EXPORT result cudaDeviceGraphMemTrim(int device) { ASK(driver.cuDeviceGraphMemTrim(device)); }

/* ---- pointers ---- */

/* cudaPointerAttributes: type (0 unregistered, 1 host, 2 device, 3 managed), device, device pointer, host pointer. */
static result attributes(char *out, const void *address) {
    struct {
        int type, device;
        const void *on_device, *on_host;
        uint64_t reserved[8];
    } all = {0, -2, NULL, address, {0}};
    unsigned type = 0, managed = 0;
    int device = 0;
    uint64_t at = (uint64_t)(uintptr_t)address;
    if (driver.cuPointerGetAttribute(&type, 2, at) == OK) {
        driver.cuPointerGetAttribute(&managed, 8, at);
        driver.cuPointerGetAttribute(&device, 9, at);
        all.type = managed ? 3 : (int)type;
        all.device = device;
        all.on_device = address;
        if (type == 2) all.on_host = NULL;
    }
    memcpy(out, &all, MAJOR >= 13 ? 88 : 24);
    return OK;
}
EXPORT result cudaPointerGetAttributes(void *out, const void *address) { ASK(attributes(out, address)); }

EXPORT result cudaIpcGetMemHandle(ipc_handle *handle, void *address) {
    RUN(driver.cuIpcGetMemHandle(handle, (uint64_t)(uintptr_t)address));
}
static result open_handle(void **out, ipc_handle handle, unsigned flags) {
    uint64_t address = 0;
    result r = driver.cuIpcOpenMemHandle_v2(&address, handle, flags);
    *out = (void *)(uintptr_t)address;
    return r;
}
EXPORT result cudaIpcOpenMemHandle(void **out, ipc_handle handle, unsigned flags) { RUN(open_handle(out, handle, flags)); }
EXPORT result cudaIpcCloseMemHandle(void *address) { RUN(driver.cuIpcCloseMemHandle((uint64_t)(uintptr_t)address)); }

/* ---- copies ---- */

enum { TO_DEVICE = 1, TO_HOST = 2, BETWEEN_DEVICES = 3, ANY = 4 };

static int is_device(const void *address) {
    unsigned type = 0, managed = 0;
    uint64_t at = (uint64_t)(uintptr_t)address;
    if (driver.cuPointerGetAttribute(&type, 2, at) != OK || type != 2) return 0;
    driver.cuPointerGetAttribute(&managed, 8, at);
    return !managed;
}

/* Kinds: 0 host to host, 1 to the device, 2 to the host, 3 between devices, 4 derived from the addresses. */
static result copy(void *to, const void *from, size_t bytes, int kind) {
    int to_device = kind == TO_DEVICE || kind == BETWEEN_DEVICES || (kind == ANY && bytes && is_device(to));
    int from_device = kind == TO_HOST || kind == BETWEEN_DEVICES || (kind == ANY && bytes && is_device(from));
    uint64_t to_at = (uint64_t)(uintptr_t)to, from_at = (uint64_t)(uintptr_t)from;
    if (to_device && from_device)
        contents_move(to_at, from_at, bytes);
    else if (to_device)
        contents_write(to_at, from, bytes);
    else if (from_device)
        contents_read(to, from_at, bytes);
    else
        memmove(to, from, bytes);
    return OK;
}
static result fill(void *to, int value, size_t bytes) {
    contents_fill((uint64_t)(uintptr_t)to, value, bytes);
    return OK;
}
EXPORT result cudaMemcpy(void *to, const void *from, size_t bytes, int kind) { RUN(copy(to, from, bytes, kind)); }
EXPORT result cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    (void)stream;
    RUN(copy(to, from, bytes, kind));
}
static result copy_rows(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height, int kind) {
    for (size_t row = 0; row < height; row++) copy(to + row * to_pitch, from + row * from_pitch, width, kind);
    return OK;
}
EXPORT result cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                size_t height, int kind, void *stream) {
    (void)stream;
    RUN(copy_rows(to, to_pitch, from, from_pitch, width, height, kind));
}
EXPORT result cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes, void *stream) {
    (void)to_device, (void)from_device, (void)stream;
    RUN(copy(to, from, bytes, BETWEEN_DEVICES));
}
EXPORT result cudaMemset(void *to, int value, size_t bytes) {
    RUN(fill(to, value, bytes));
}
EXPORT result cudaMemsetAsync(void *to, int value, size_t bytes, void *stream) {
    (void)stream;
    RUN(fill(to, value, bytes));
}
