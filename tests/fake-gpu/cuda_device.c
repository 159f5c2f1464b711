/* Device queries, and copies that move no data. */
#include "cuda_internal.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

EXPORT CUresult cuDeviceGetCount(int *count) {
    const struct {
        int *count;
    } params = {count};
    CALL(4, &params, (__atomic_add_fetch(&machine->device_counts, 1, __ATOMIC_RELAXED), *count = visible_count, OK));
}
EXPORT CUresult cuDeviceGet(CUdevice *dev, int ordinal) {
    SILENT(see(ordinal) ? (*dev = ordinal, OK) : INVALID_DEVICE);
}
EXPORT CUresult cuDeviceGetName(char *name, int bytes, CUdevice dev) {
    const visible *v = see(dev);
    if (!v) return INVALID_DEVICE;
    snprintf(name, (size_t)bytes, "%s", machine->device[v->device].name);
    return OK;
}
static CUresult uuid_of(uint8_t *uuid, CUdevice dev, int instance) {
    const visible *v = see(dev);
    if (!v) return INVALID_DEVICE;
    memcpy(uuid, instance ? v->uuid : machine->device[v->device].uuid, 16);
    return OK;
}
EXPORT CUresult cuDeviceGetUuid(uint8_t *uuid, CUdevice dev) { SILENT(uuid_of(uuid, dev, 0)); }
EXPORT CUresult cuDeviceGetUuid_v2(uint8_t *uuid, CUdevice dev) { SILENT(uuid_of(uuid, dev, 1)); }

static uint64_t total_of(const visible *v) {
    const sim_device *d = &machine->device[v->device];
    return v->instance ? sim_instance_bytes(machine, v->device) : d->memory_bytes - d->reserved_bytes;
}
EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev) {
    const visible *v = see(dev);
    if (!v) return INVALID_DEVICE;
    *bytes = total_of(v);
    return OK;
}
EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice dev) {
    /* Attributes of an H100: threads and blocks, shared memory, registers, clocks, caches, capabilities. */
    static const struct {
        int attribute, value;
    } known[] = {{1, 1024},     {2, 1024},      {3, 1024},   {4, 64},      {5, INT32_MAX}, {6, 65535},    {7, 65535},
                 {8, 49152},    {9, 65536},     {10, 32},    {12, 65536},  {13, 1980000},  {14, 512},     {19, 1},
                 {31, 1},       {36, 2619000},  {37, 5120},  {38, 52428800}, {40, 3},      {41, 1},       {75, 9},
                 {76, 0},       {78, 1},        {81, 233472}, {82, 65536}, {83, 1},        {89, 1},       {91, 1},
                 {95, 1},       {97, 232448},   {102, 1},    {103, 1},     {106, 32},      {111, 1024},   {115, 1}};
    const visible *v = see(dev);
    if (!v) return INVALID_DEVICE;
    const sim_device *d = &machine->device[v->device];
    const int own = attribute == 16 ? (int)d->processors : attribute == 39 ? (int)d->threads : 0;
    *value = attribute == 33 ? v->device + 1 : own; /* 33: PCI bus */
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].attribute == attribute) *value = known[i].value;
    return OK;
}
EXPORT CUresult cuDeviceGetPCIBusId(char *text, int bytes, CUdevice dev) {
    const visible *v = see(dev);
    if (!v) return INVALID_DEVICE;
    snprintf(text, (size_t)bytes, "0000:%02X:00.0", v->device + 1);
    return OK;
}
EXPORT CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice dev) {
    if (!see(dev)) return INVALID_DEVICE;
    *major = 9;
    *minor = 0;
    return OK;
}
EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice dev, CUdevice peer) {
    *can = see(dev) && see(peer) && dev != peer;
    return OK;
}

/* Memory of the whole device, as in the real driver. */
static CUresult memory_info(size_t *free, size_t *total) {
    const visible *v = see(current_ordinal());
    if (!v) return INVALID_CONTEXT;
    enter();
    sim_reap(machine, slot, v->device);
    uint64_t used = v->instance ? sim_instance_used(machine, v->device, v->instance)
                                : sim_device_used(machine, v->device);
    *total = total_of(v);
    *free = used < *total ? *total - used : 0;
    leave();
    return OK;
}
EXPORT CUresult cuMemGetInfo_v2(size_t *free, size_t *total) { SILENT(memory_info(free, total)); }

/* ---- copies and sets: nothing moves, device addresses have no memory ---- */

#define NOTHING(name, ...)                  \
    EXPORT CUresult name(__VA_ARGS__) {     \
        SILENT(current() ? OK : INVALID_CONTEXT); \
    }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
NOTHING(cuMemcpy, CUdeviceptr to, CUdeviceptr from, size_t bytes)
NOTHING(cuMemcpyAsync, CUdeviceptr to, CUdeviceptr from, size_t bytes, void *stream)
NOTHING(cuMemcpyHtoD_v2, CUdeviceptr to, const void *from, size_t bytes)
NOTHING(cuMemcpyDtoH_v2, void *to, CUdeviceptr from, size_t bytes)
NOTHING(cuMemcpyDtoD_v2, CUdeviceptr to, CUdeviceptr from, size_t bytes)
NOTHING(cuMemcpyHtoDAsync_v2, CUdeviceptr to, const void *from, size_t bytes, void *stream)
NOTHING(cuMemcpyDtoHAsync_v2, void *to, CUdeviceptr from, size_t bytes, void *stream)
NOTHING(cuMemcpyDtoDAsync_v2, CUdeviceptr to, CUdeviceptr from, size_t bytes, void *stream)
NOTHING(cuMemsetD8_v2, CUdeviceptr to, unsigned char value, size_t count)
NOTHING(cuMemsetD32_v2, CUdeviceptr to, unsigned value, size_t count)
NOTHING(cuMemsetD8Async, CUdeviceptr to, unsigned char value, size_t count, void *stream)
NOTHING(cuMemsetD32Async, CUdeviceptr to, unsigned value, size_t count, void *stream)
#pragma GCC diagnostic pop
