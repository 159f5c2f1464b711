/* Direct allocations: device, small ones cut from granules, pitched, managed, pinned, arrays, IPC. */
#include "cuda_internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static chunk *chunks;

static void book(row *r, uint64_t bytes, uint64_t charged) {
    sim_usage *u = usage(r->device);
    r->bytes = bytes;
    r->charged = charged;
    u->tracked_bytes += bytes;
    tag_add(r->device, r->tag, (int64_t)bytes);
}

static void unbook(row *r) {
    sim_usage *u = usage(r->device);
    u->tracked_bytes -= r->bytes;
    if (r->segment) {
        segments_cut(r->address, r->bytes);
        u->idle_bytes -= r->bytes;
    } else {
        tag_add(r->device, r->tag, -(int64_t)r->bytes);
    }
}

static row *fresh(uint64_t address, context *owner, int kind) {
    row *r = row_add(address);
    r->owner = owner;
    r->device = (uint16_t)owner->device;
    r->kind = (uint16_t)kind;
    r->tag = thread_tag;
    r->references = 1;
    return r;
}

/* Takes 512-byte units of an existing granule of the context, or else of a new one. */
static CUresult take_small(context *owner, uint64_t bytes, uint64_t *address) {
    chunk *c = chunks;
    uint64_t at = 0, piece = sim_round(bytes, machine->cost.small_unit);
    for (; c; c = c->next)
        if (c->owner == owner && (at = chunk_take(c, piece))) break;
    if (!c) {
        if (sim_charge(machine, slot, owner->device, SIM_GRANULE)) return OUT_OF_MEMORY;
        c = chunk_new(space_take(SIM_GRANULE, SIM_GRANULE), SIM_GRANULE);
        c->owner = owner;
        c->device = owner->device;
        c->next = chunks;
        chunks = c;
        usage(owner->device)->rounding_bytes += SIM_GRANULE;
        at = chunk_take(c, piece);
    }
    row *r = fresh(at, owner, SMALL);
    r->chunk = c;
    usage(owner->device)->rounding_bytes -= bytes;
    book(r, bytes, 0);
    r->charged = piece; /* of the granule's */
    *address = at;
    return OK;
}

static void drop_chunk(chunk *c) {
    for (chunk **at = &chunks; *at; at = &(*at)->next)
        if (*at == c) {
            *at = c->next;
            break;
        }
    usage(c->device)->rounding_bytes -= c->bytes;
    sim_discharge(machine, slot, c->device, c->bytes);
    space_give(c->address, c->bytes);
    free(c);
}

CUresult take_direct(context *owner, uint64_t bytes, int kind, uint64_t *address) {
    if (bytes == 0) return INVALID_VALUE;
    if (machine->cuda_fail_percent && sim_random(machine) % 100 < machine->cuda_fail_percent) return OUT_OF_MEMORY;
    if (bytes < SMALL_LIMIT && kind != ARRAY) return take_small(owner, bytes, address);
    uint64_t charged = sim_round(bytes, SIM_GRANULE);
    if (charged < bytes || sim_charge(machine, slot, owner->device, charged)) return OUT_OF_MEMORY;
    *address = space_take(charged, SIM_GRANULE);
    row *r = fresh(*address, owner, kind);
    usage(owner->device)->rounding_bytes += charged - bytes;
    book(r, bytes, charged);
    return OK;
}

CUresult free_row(row *r) {
    sim_usage *u = usage(r->device);
    uint64_t address = r->address;
    switch (r->kind) {
    case SMALL:
        unbook(r);
        u->rounding_bytes += r->bytes;
        if (chunk_give(r->chunk, address, r->charged)) drop_chunk(r->chunk);
        break;
    case POOLED:
    case GRAPH:
        pool_give(r);
        break;
    case MANAGED:
        u->managed_bytes -= r->bytes;
        u->managed_resident_bytes -= r->charged;
        sim_discharge(machine, slot, r->device, r->charged);
        munmap((void *)(uintptr_t)address, r->bytes); /* NOLINT: host memory */
        break;
    case HOST:
        u->pinned_bytes -= r->bytes;
        munmap((void *)(uintptr_t)address, r->bytes);
        break;
    case REGISTERED:
        u->pinned_bytes -= r->bytes;
        break;
    case IPC:
    case EXTERNAL:
        import_add(u, -(int64_t)r->bytes);
        space_give(address, r->charged);
        break;
    default:
        unbook(r);
        u->rounding_bytes -= r->charged - r->bytes;
        sim_discharge(machine, slot, r->device, r->charged);
        space_give(address, r->charged);
    }
    row_drop(r);
    return OK;
}

void free_owned(const context *owner) {
    for (row *r = row_each(NULL), *next; r; r = next) {
        next = row_each(r);
        if (r->owner == owner && r->kind != POOLED && r->kind != GRAPH) free_row(r);
    }
}

void small_forget(const context *owner) {
    for (chunk *c = chunks, *next; c; c = next) {
        next = c->next;
        if (c->owner == owner) drop_chunk(c);
    }
}

/* ---- device memory ---- */

static CUresult allocate(CUdeviceptr *dptr, uint64_t bytes, int kind) {
    context *c = current();
    if (!c || c->dead) return INVALID_CONTEXT;
    if (!dptr) return INVALID_VALUE;
    cost_before(machine->cuda_alloc_us);
    enter();
    vmm_settle();
    CUresult result = take_direct(c, bytes, kind, dptr);
    leave();
    cost_after(machine->cuda_alloc_us);
    return result;
}

static CUresult release(uint64_t address, int low, int high) {
    if (!address) return OK;
    cost_before(machine->cuda_free_us);
    enter();
    row *r = row_find(address);
    CUresult result = r && r->kind >= low && r->kind <= high ? free_row(r) : INVALID_VALUE;
    leave();
    cost_after(machine->cuda_free_us);
    return result;
}

typedef struct {
    CUdeviceptr *dptr;
    size_t bytesize;
} alloc_params;
EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize) {
    alloc_params params = {dptr, bytesize};
    CALL(243, &params, allocate(dptr, bytesize, DIRECT));
}
EXPORT CUresult cuMemFree_v2(CUdeviceptr dptr) {
    struct {
        CUdeviceptr dptr;
    } params = {dptr};
    CALL(245, &params, release(dptr, DIRECT, MANAGED));
}

static CUresult allocate_pitch(CUdeviceptr *dptr, size_t *pitch, size_t width, size_t height) {
    if (!pitch || !width || !height) return INVALID_VALUE;
    *pitch = sim_round(width, 512);
    return allocate(dptr, *pitch * height, DIRECT);
}
EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pitch, size_t width, size_t height, unsigned element) {
    struct {
        CUdeviceptr *dptr;
        size_t *pitch, width, height;
        unsigned element;
    } params = {dptr, pitch, width, height, element};
    CALL(244, &params, allocate_pitch(dptr, pitch, width, height));
}

/* Real host memory at the same address. It is resident on the device as far as that has room. */
static CUresult allocate_managed(CUdeviceptr *dptr, size_t bytes) {
    context *c = current();
    if (!c || c->dead) return INVALID_CONTEXT;
    if (!dptr || !bytes) return INVALID_VALUE;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return OUT_OF_MEMORY;
    enter();
    uint64_t resident = sim_round(bytes, SIM_GRANULE);
    if (sim_charge(machine, slot, c->device, resident)) resident = 0;
    row *r = fresh((uint64_t)(uintptr_t)memory, c, MANAGED);
    r->bytes = bytes;
    r->charged = resident;
    usage(c->device)->managed_bytes += bytes;
    usage(c->device)->managed_resident_bytes += resident;
    leave();
    *dptr = (uint64_t)(uintptr_t)memory;
    return OK;
}
EXPORT CUresult cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned flags) {
    struct {
        CUdeviceptr *dptr;
        size_t bytesize;
        unsigned flags;
    } params = {dptr, bytesize, flags};
    CALL(371, &params, allocate_managed(dptr, bytesize));
}
EXPORT CUresult cuMemAdvise(CUdeviceptr p, size_t bytes, int advice, CUdevice dev) {
    (void)p, (void)bytes, (void)advice, (void)dev;
    SILENT(OK);
}
EXPORT CUresult cuMemPrefetchAsync(CUdeviceptr p, size_t bytes, CUdevice dev, void *stream) {
    (void)p, (void)bytes, (void)dev, (void)stream;
    SILENT(OK);
}

/* ---- host memory ---- */

static CUresult allocate_host(void **pp, size_t bytes) {
    context *c = current();
    if (!c) return INVALID_CONTEXT;
    if (!pp || !bytes) return INVALID_VALUE;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return OUT_OF_MEMORY;
    enter();
    fresh((uint64_t)(uintptr_t)memory, c, HOST)->bytes = bytes;
    usage(c->device)->pinned_bytes += bytes;
    leave();
    *pp = memory;
    return OK;
}
EXPORT CUresult cuMemAllocHost_v2(void **pp, size_t bytesize) {
    struct {
        void **pp;
        size_t bytesize;
    } params = {pp, bytesize};
    CALL(294, &params, allocate_host(pp, bytesize));
}
EXPORT CUresult cuMemHostAlloc(void **pp, size_t bytesize, unsigned flags) {
    struct {
        void **pp;
        size_t bytesize;
        unsigned flags;
    } params = {pp, bytesize, flags};
    CALL(39, &params, allocate_host(pp, bytesize));
}
EXPORT CUresult cuMemAllocHost(void **pp, unsigned bytesize) {
    struct {
        void **pp;
        unsigned bytesize;
    } params = {pp, bytesize};
    CALL(37, &params, allocate_host(pp, bytesize));
}
typedef struct {
    void *p;
} host_params;
EXPORT CUresult cuMemFreeHost(void *p) {
    host_params params = {p};
    CALL(38, &params, release((uint64_t)(uintptr_t)p, HOST, HOST));
}
static CUresult enroll(void *p, size_t bytes) {
    context *c = current();
    if (!c) return INVALID_CONTEXT;
    if (!p || !bytes) return INVALID_VALUE;
    enter();
    CUresult result = row_find((uint64_t)(uintptr_t)p) ? 712 : OK; /* already registered */
    if (result == OK) {
        fresh((uint64_t)(uintptr_t)p, c, REGISTERED)->bytes = bytes;
        usage(c->device)->pinned_bytes += bytes;
    }
    leave();
    return result;
}
EXPORT CUresult cuMemHostRegister_v2(void *p, size_t bytesize, unsigned flags) {
    struct {
        void *p;
        size_t bytesize;
        unsigned flags;
    } params = {p, bytesize, flags};
    CALL(379, &params, enroll(p, bytesize));
}
EXPORT CUresult cuMemHostRegister(void *p, size_t bytesize, unsigned flags) {
    struct {
        void *p;
        size_t bytesize;
        unsigned flags;
    } params = {p, bytesize, flags};
    CALL(301, &params, enroll(p, bytesize));
}
EXPORT CUresult cuMemHostUnregister(void *p) {
    host_params params = {p};
    CALL(302, &params, p ? release((uint64_t)(uintptr_t)p, REGISTERED, REGISTERED) : INVALID_VALUE);
}

/* ---- arrays: width x height x depth x what a pixel of the format takes, no padding beyond the granule ---- */

typedef struct {
    size_t width, height;
    uint32_t format, channels;
} array_desc;
typedef struct {
    size_t width, height, depth;
    uint32_t format, channels, flags;
} array3d_desc;

/* Formats by bits of a pixel; of block-compressed ones, bits for each pixel of whole 4 x 4 blocks. */
static uint64_t pixel_bits(uint32_t format, uint32_t channels) {
    static const struct {
        uint8_t first, last, bits;
    } formats[] = {{0x50, 0x50, 32}, {0x51, 0x51, 16}, {0x52, 0x52, 32}, {0x53, 0x53, 12}, {0x54, 0x54, 24}, {0x55, 0x55, 16},
                   {0x56, 0x56, 32}, {0x57, 0x57, 24}, {0x58, 0x58, 48}, {0x59, 0x59, 12}, {0x5a, 0x5a, 24}, {0x5b, 0x5b, 16},
                   {0x5c, 0x5c, 32}, {0x5d, 0x5d, 24}, {0x5e, 0x5e, 48}, {0x91, 0x92, 4},  {0x93, 0x96, 8},  {0x97, 0x98, 4},
                   {0x99, 0x9e, 8},  {0x9f, 0xa1, 24}, {0xa2, 0xa2, 16}, {0xa3, 0xa4, 32}, {0xa5, 0xa5, 16}, {0xa6, 0xa9, 32},
                   {0xb0, 0xb0, 12}, {0xb1, 0xb1, 64}, {0xb2, 0xb2, 24}, {0xb3, 0xb3, 48}, {0xb4, 0xb4, 24}, {0xb5, 0xb5, 48},
                   {0xc0, 0xc0, 8},  {0xc1, 0xc1, 16}, {0xc2, 0xc2, 32}, {0xc3, 0xc3, 16}, {0xc4, 0xc4, 32}, {0xc5, 0xc5, 64},
                   {0xc6, 0xc6, 8},  {0xc7, 0xc7, 16}, {0xc8, 0xc8, 32}, {0xc9, 0xc9, 16}, {0xca, 0xca, 32}, {0xcb, 0xcb, 64}};
    uint64_t each = format == 1 || format == 8 ? 8 : format == 2 || format == 9 || format == 0x10 ? 16 : 32;
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (formats[i].first <= format && format <= formats[i].last) return formats[i].bits;
    return each * (channels ? channels : 1);
}
static uint64_t array_bytes(size_t w, size_t h, size_t d, uint32_t format, uint32_t channels) {
    if (!w) w = 1;
    if (!h) h = 1;
    if (0x91 <= format && format <= 0x9e) w = (w + 3) / 4 * 4, h = (h + 3) / 4 * 4;
    return (w * h * (d ? d : 1) * pixel_bits(format, channels) + 7) / 8;
}

static CUresult array_new(uint64_t *handle, uint64_t bytes, uint32_t flags) {
    if (!handle) return INVALID_VALUE;
    if (flags & 0xc0) return NOT_SUPPORTED; /* sparse, deferred mapping */
    return allocate(handle, bytes, ARRAY);
}
EXPORT CUresult cuArrayCreate_v2(uint64_t *handle, const array_desc *a) {
    struct {
        uint64_t *handle;
        const array_desc *desc;
    } params = {handle, a};
    CALL(272, &params,
         a ? array_new(handle, array_bytes(a->width, a->height, 0, a->format, a->channels), 0) : INVALID_VALUE);
}
EXPORT CUresult cuArray3DCreate_v2(uint64_t *handle, const array3d_desc *a) {
    struct {
        uint64_t *handle;
        const array3d_desc *desc;
    } params = {handle, a};
    CALL(274, &params,
         a ? array_new(handle, array_bytes(a->width, a->height, a->depth, a->format, a->channels), a->flags)
           : INVALID_VALUE);
}
EXPORT CUresult cuArrayDestroy(uint64_t handle) {
    struct {
        uint64_t handle;
    } params = {handle};
    CALL(89, &params, handle ? release(handle, ARRAY, ARRAY) : INVALID_HANDLE);
}
/* Each level halves every side, down to one element. */
static uint64_t mipmap_bytes(const array3d_desc *a, unsigned levels) {
    uint64_t bytes = 0;
    for (unsigned level = 0; level < levels; level++)
        bytes += array_bytes(a->width >> level ? a->width >> level : 1, a->height >> level, a->depth >> level, a->format, a->channels);
    return bytes;
}
EXPORT CUresult cuMipmappedArrayCreate(uint64_t *handle, const array3d_desc *a, unsigned levels) {
    struct {
        uint64_t *handle;
        const array3d_desc *desc;
        unsigned levels;
    } params = {handle, a, levels};
    CALL(347, &params,
         a && levels ? array_new(handle, mipmap_bytes(a, levels), a->flags) : INVALID_VALUE);
}
EXPORT CUresult cuMipmappedArrayDestroy(uint64_t handle) {
    struct {
        uint64_t handle;
    } params = {handle};
    CALL(349, &params, handle ? release(handle, ARRAY, ARRAY) : INVALID_HANDLE);
}

/* Returns the allocation around an address; under the lock. */
static const row *row_around(uint64_t address) {
    const row *r = row_find(address);
    for (const row *each = r ? NULL : row_each(NULL); each; each = row_each((row *)(uintptr_t)each))
        if (each->address <= address && address < each->address + each->bytes) return each;
    return r;
}
EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    CUresult result = ready();
    if (result != OK) return result;
    enter();
    const row *r = row_around(address);
    if (r && base) *base = r->address;
    if (r && bytes) *bytes = r->bytes;
    leave();
    return r ? OK : NOT_FOUND;
}

/* 1 context, 2 memory type (1 host, 2 device), 3 and 4 its address there and there, 8 managed, 9 ordinal, 11 and 12 range. */
static CUresult point(void *out, int attribute, uint64_t address) {
    uint64_t begin = 0, bytes = 0;
    if (!out) return INVALID_VALUE;
    enter();
    const row *r = row_around(address);
    int device = r ? r->device : vmm_find(address, &begin, &bytes), managed = r && r->kind == MANAGED;
    int is_host = r && (r->kind == HOST || r->kind == REGISTERED);
    context *owner = r ? r->owner : NULL;
    if (r) begin = r->address, bytes = r->bytes;
    leave();
    if (device < 0) return INVALID_VALUE;
    int ordinal = 0;
    while (ordinal < visible_count && seen[ordinal].device != device) ordinal++;
    switch (attribute) {
    case 1: *(context **)out = owner; return OK;
    case 2: *(unsigned *)out = is_host ? 1 : 2; return OK;
    case 3: *(uint64_t *)out = address; return OK;
    case 4: *(uint64_t *)out = address; return is_host || managed ? OK : INVALID_VALUE;
    case 8: *(unsigned *)out = (unsigned)managed; return OK;
    case 9: *(int *)out = ordinal; return OK;
    case 11: *(uint64_t *)out = begin; return OK;
    case 12: *(size_t *)out = bytes; return OK;
    default: return NOT_SUPPORTED;
    }
}
EXPORT CUresult cuPointerGetAttribute(void *out, int attribute, CUdeviceptr address) {
    SILENT(point(out, attribute, address));
}
