/* Commands that allocate and free memory with its own address. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

/* Maximum managed allocation: one larger than the card's free memory can hang the GPU. */
#define MANAGED_LIMIT (64ull << 20)

static void took(result r, enum kind kind, uint64_t what, uint64_t bytes) {
    uint64_t since = began();
    int id = r ? -1 : keep(kind, what, bytes);
    reply(r, since, "\"id\":%d,\"address\":%llu,\"bytes\":%llu", id, (unsigned long long)what, (unsigned long long)bytes);
}

static void alloc(void) {
    address where = 0;
    size_t bytes = number();
    mark();
    result r = cuMemAlloc(&where, bytes);
    took(r, DEVICE, where, bytes);
}

/* COUNT allocations of the same size; stops at the first that fails. */
static void many(void) {
    size_t bytes = number();
    uint64_t count = number(), done = 0;
    int first = -1;
    result r = 0;
    mark();
    for (; done < count; done++) {
        address where = 0;
        if ((r = cuMemAlloc(&where, bytes))) break;
        int id = keep(DEVICE, where, bytes);
        if (first < 0) first = id;
    }
    reply(r, began(), "\"id\":%d,\"count\":%llu", first, (unsigned long long)done);
}

/* A request that cannot be met: nothing is kept even if it is. */
static void fail(void) {
    address where = 0;
    size_t bytes = number();
    mark();
    result r = cuMemAlloc(&where, bytes);
    if (!r) cuMemFree(where);
    reply(r, began(), "\"bytes\":%zu", bytes);
}

static void pitch(void) {
    size_t width = number(), height = number(), step = 0;
    address where = 0;
    mark();
    result r = cuMemAllocPitch(&where, &step, width, height, 16);
    took(r, PITCHED, where, step * height);
}

static void managed(void) {
    address where = 0;
    size_t bytes = number(), left = 0, total = 0;
    int touch = (int)number();
    cuMemGetInfo(&left, &total);
    if (bytes > MANAGED_LIMIT || bytes > left / 4) {
        reply(-1, began(), "\"error\":\"more managed memory than these programs take\"");
        return;
    }
    mark();
    result r = cuMemAllocManaged(&where, bytes, 1);
    if (!r && touch == 1) memset((void *)where, 1, bytes); /* its pages are the host's now */
    if (!r && touch == 2) {
        r = cuMemPrefetch ? cuMemPrefetch(where, bytes, device, NULL) : NOT_FOUND;
        if (!r) r = cuCtxSynchronize();
    }
    took(r, MANAGED, where, bytes);
}

static void pinned(void) {
    void *where = NULL;
    size_t bytes = number();
    mark();
    result r = cuMemHostAlloc(&where, bytes, 0);
    took(r, PINNED, (uint64_t)where, bytes);
}

static void registered(void) {
    size_t bytes = number();
    void *where = NULL;
    if (posix_memalign(&where, 1 << 16, bytes)) abort();
    mark();
    took(cuMemHostRegister(where, bytes, 0), REGISTERED, (uint64_t)where, bytes);
}

/* Formats as the driver numbers them: 1 unsigned byte, 2 unsigned short, 0x10 half, 0x20 float. */
static uint64_t element(unsigned format, unsigned channels) {
    unsigned bytes = format == 1 || format == 8 ? 1 : format == 2 || format == 9 || format == 0x10 ? 2 : 4;
    return (uint64_t)bytes * channels;
}

static void array(void) {
    array_descriptor d = {0};
    d.width = number();
    d.height = number();
    d.format = (unsigned)number_or(0x20);
    d.channels = (unsigned)number_or(4);
    void *made = NULL;
    mark();
    result r = cuArrayCreate(&made, &d);
    took(r, ARRAY, (uint64_t)made, d.width * (d.height ? d.height : 1) * element(d.format, d.channels));
}

/* FLAGS: 1 layered, 2 surface. */
static void array3d(void) {
    array3d_descriptor d = {0};
    d.width = number();
    d.height = number();
    d.depth = number();
    d.format = (unsigned)number_or(0x20);
    d.channels = (unsigned)number_or(4);
    d.flags = (unsigned)number();
    void *made = NULL;
    mark();
    result r = cuArray3DCreate(&made, &d);
    took(r, ARRAY, (uint64_t)made, d.width * d.height * d.depth * element(d.format, d.channels));
}

static void mipmap(void) {
    array3d_descriptor d = {0};
    d.width = number();
    d.height = number();
    unsigned levels = (unsigned)number();
    d.format = (unsigned)number_or(0x20);
    d.channels = (unsigned)number_or(4);
    uint64_t bytes = 0;
    for (unsigned i = 0; i < levels; i++) bytes += (d.width >> i) * (d.height >> i) * element(d.format, d.channels);
    void *made = NULL;
    mark();
    result r = cuMipmapCreate(&made, &d, levels);
    took(r, MIPMAP, (uint64_t)made, bytes);
}

static void ipc_get(void) {
    row *r = kept(number());
    ipc_handle handle;
    char text[129];
    result code = r ? cuIpcGet(&handle, r->what) : -1;
    for (int i = 0; i < 64; i++) sprintf(text + 2 * i, "%02x", code ? 0 : (unsigned char)handle.bytes[i]);
    reply(code, began(), "\"handle\":\"%s\"", text);
}

static void ipc_open(void) {
    const char *text = word();
    uint64_t bytes = number();
    ipc_handle handle = {{0}};
    for (int i = 0; i < 64 && strlen(text) == 128; i++) {
        unsigned byte = 0;
        sscanf(text + 2 * i, "%2x", &byte);
        handle.bytes[i] = (char)byte;
    }
    address where = 0;
    mark();
    result r = cuIpcOpen(&where, handle, 1);
    took(r, IPC, where, bytes);
}

static result give(row *r) {
    switch (r->kind) {
    case ASYNC: return cuMemFreeAsync(r->what, stream);
    case PINNED: return cuMemFreeHost((void *)r->what);
    case REGISTERED: return cuMemHostUnregister((void *)r->what);
    case ARRAY: return cuArrayDestroy((void *)r->what);
    case MIPMAP: return cuMipmapDestroy((void *)r->what);
    case IPC: return cuIpcClose(r->what);
    case HANDLE: return cuMemRelease(r->what);
    case MAPPING: {
        result code = cuMemUnmap(r->what, r->bytes);
        return code ? code : cuMemAddressFree(r->what, r->bytes);
    }
    default: return cuMemFree(r->what);
    }
}

static void free_one(void) {
    row *r = kept(number());
    mark();
    result code = r ? give(r) : -1;
    if (r && !code) r->live = 0;
    done(code);
}

static void free_all(void) {
    int count;
    row *all = rows(&count);
    result code = 0;
    for (int i = 0; i < count; i++)
        if (all[i].live) {
            result this = give(&all[i]);
            if (this)
                code = this;
            else
                all[i].live = 0;
        }
    done(code);
}

/* A free that must fail: the address is not allocated. */
static void free_wrong(void) { done(cuMemFree(0x1234000)); }
static void free_null(void) { done(cuMemFree(0)); }

const command memory_commands[] = {
    {"alloc", alloc, "BYTES"}, {"many", many, "BYTES COUNT"}, {"fail", fail, "BYTES"}, {"pitch", pitch, "WIDTH HEIGHT"},
    {"managed", managed, "BYTES 0|1 host|2 device"}, {"pinned", pinned, "BYTES"}, {"registered", registered, "BYTES"},
    {"array", array, "WIDTH HEIGHT [FORMAT CHANNELS]"},
    {"array3d", array3d, "WIDTH HEIGHT DEPTH [FORMAT CHANNELS FLAGS]"},
    {"mipmap", mipmap, "WIDTH HEIGHT LEVELS [FORMAT CHANNELS]"}, {"ipc_get", ipc_get, "ID"},
    {"ipc_open", ipc_open, "HANDLE BYTES"},
    {"free", free_one, "ID"}, {"free_all", free_all, ""}, {"free_wrong", free_wrong, ""}, {"free_null", free_null, ""},
    {NULL, NULL, NULL},
};
