/* What can be asked about devices; streams and events; copies that move nothing. */
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
    static const struct {
        int attribute, value;
    } known[] = {{1, 1024}, {10, 32}, {12, 65536}, {41, 1}, {75, 9}, {76, 0}, {83, 1},
                 {89, 1},   {91, 1},  {102, 1},    {115, 1}};
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

/* Of the whole device, as the real one. */
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

/* ---- streams and events ---- */

/* What the driver keeps for one of them is the context's. */
static CUresult small_new(void **out, uint64_t cost) {
    stream_state *made = calloc(1, sizeof *made);
    if (!made) return OUT_OF_MEMORY;
    made->owner = current();
    made->cost = cost;
    enter();
    CUresult result = internal_add(made->owner, (int64_t)cost);
    leave();
    if (result == OK)
        *out = made;
    else
        free(made);
    return result;
}
static CUresult small_end(void *what) {
    stream_state *s = what;
    if (!s) return INVALID_HANDLE;
    enter();
    internal_add(s->owner, -(int64_t)s->cost);
    leave();
    free(s);
    return OK;
}

static CUresult stream_new(void **stream) {
    if (!current()) return INVALID_CONTEXT;
    CUresult result = small_new(stream, machine->cost.stream);
    if (result == OK) tell_resource(STREAM_CREATED, current(), *stream, NULL);
    return result;
}
EXPORT CUresult cuStreamCreate(void **stream, unsigned flags) {
    struct {
        void **stream;
        unsigned flags;
    } params = {stream, flags};
    CALL(124, &params, stream_new(stream));
}
EXPORT CUresult cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    struct {
        void **stream;
        unsigned flags;
        int priority;
    } params = {stream, flags, priority};
    CALL(367, &params, stream_new(stream));
}
static CUresult stream_end(void *stream) {
    tell_resource(STREAM_DESTROY, current(), stream, NULL);
    return small_end(stream);
}
EXPORT CUresult cuStreamDestroy_v2(void *stream) { SILENT(stream_end(stream)); }
static CUresult settle(void) {
    enter();
    pools_synchronize();
    leave();
    return OK;
}
EXPORT CUresult cuStreamSynchronize(void *stream) {
    (void)stream;
    SILENT(settle());
}
EXPORT CUresult cuStreamQuery(void *stream) {
    (void)stream;
    SILENT(OK);
}
EXPORT CUresult cuEventCreate(void **event, unsigned flags) {
    (void)flags;
    SILENT(small_new(event, machine->cost.event));
}
EXPORT CUresult cuEventDestroy_v2(void *event) { SILENT(small_end(event)); }
EXPORT CUresult cuEventRecord(void *event, void *stream) {
    (void)event, (void)stream;
    SILENT(OK);
}
EXPORT CUresult cuEventSynchronize(void *event) {
    (void)event;
    SILENT(settle());
}

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
