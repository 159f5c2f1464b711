/* Stream-ordered memory: pools that reserve device memory in steps and cut allocations from it. Work on the
 * simulated streams is always done already, so a freed piece can be taken again at once; the reserved bytes go
 * down only at a synchronisation or trim, as on the real driver. */
#include "cuda_internal.h"

#include <stdlib.h>
#include <string.h>

static pool *pools;

pool *pool_make(int ordinal, int device) {
    pool *p = calloc(1, sizeof *p);
    if (!p) abort();
    p->ordinal = ordinal;
    p->device = device;
    for (int i = 1; i < 4; i++) p->flags[i] = 1;
    p->next = pools;
    pools = p;
    return p;
}

static int known(const pool *p) {
    const pool *each = pools;
    while (each && each != p) each = each->next;
    return p && each;
}

static CUresult extend(pool *p, uint64_t bytes) {
    uint64_t step = machine->cost.pool_step ? sim_round(machine->cost.pool_step, SIM_GRANULE) : SIM_GRANULE;
    uint64_t size = sim_round(bytes, step);
    if (sim_charge(machine, slot, p->device, size)) {
        size = sim_round(bytes, SIM_GRANULE);
        if (sim_charge(machine, slot, p->device, size)) return OUT_OF_MEMORY;
    }
    chunk *c = chunk_new(space_take(size, SIM_GRANULE), size);
    chunk **at = &p->chunks; /* oldest first: the pool fills from the front */
    while (*at) at = &(*at)->next;
    *at = c;
    p->reserved += size;
    if (p->reserved > p->reserved_high) p->reserved_high = p->reserved;
    usage(p->device)->tracked_bytes += size;
    usage(p->device)->idle_bytes += size;
    return OK;
}

CUresult pool_take(pool *p, uint64_t bytes, int kind, uint64_t *address) {
    if (!bytes) return INVALID_VALUE;
    if (bytes > machine->device[p->device].memory_bytes) return OUT_OF_MEMORY;
    uint64_t at = 0;
    chunk *c = p->chunks;
    while (c && !(at = chunk_take(c, bytes))) c = c->next;
    if (!c) {
        CUresult result = extend(p, bytes);
        if (result != OK) return result;
        for (c = p->chunks; c && !(at = chunk_take(c, bytes));) c = c->next;
    }
    row *r = row_add(at);
    r->chunk = c;
    r->pool = p;
    r->device = (uint16_t)p->device;
    r->kind = (uint16_t)kind;
    r->tag = thread_tag;
    r->owner = current();
    r->bytes = bytes;
    p->live++;
    p->used += sim_round(bytes, 512);
    if (p->used > p->used_high) p->used_high = p->used;
    usage(p->device)->idle_bytes -= bytes;
    tag_add(p->device, r->tag, (int64_t)bytes);
    *address = at;
    return OK;
}

/* The row itself is dropped by the caller. */
void pool_give(row *r) {
    pool *p = r->pool;
    if (r->segment)
        segments_cut(r->address, r->bytes);
    else {
        usage(p->device)->idle_bytes += r->bytes;
        tag_add(p->device, r->tag, -(int64_t)r->bytes);
    }
    chunk_give(r->chunk, r->address, r->bytes);
    p->live--;
    p->used -= sim_round(r->bytes, 512);
    if (p->dying && !p->live) pool_destroy(p);
}

void pool_trim(pool *p, uint64_t keep) {
    for (chunk **at = &p->chunks, *c; (c = *at);) {
        if (c->free_units != c->units || p->reserved < keep + c->bytes) {
            at = &c->next;
            continue;
        }
        *at = c->next;
        p->reserved -= c->bytes;
        usage(p->device)->tracked_bytes -= c->bytes;
        usage(p->device)->idle_bytes -= c->bytes;
        sim_discharge(machine, slot, p->device, c->bytes);
        space_give(c->address, c->bytes);
        free(c);
    }
}

void pools_synchronize(void) {
    for (pool *p = pools; p; p = p->next)
        if (p->reserved > p->threshold) pool_trim(p, p->threshold);
}

/* Destroys the pool for the program at once, and on the device once it has no live allocation. */
void pool_destroy(pool *p) {
    p->dying = 1;
    for (int i = 0; i < visible_count; i++)
        if (seen[i].current_pool == p) seen[i].current_pool = seen[i].default_pool;
    if (p->live) return;
    pool_trim(p, 0);
    for (pool **at = &pools; *at; at = &(*at)->next)
        if (*at == p) {
            *at = p->next;
            break;
        }
    free(p);
}

/* Empties all pools of a device at its reset. The default pool and its handle stay valid. */
void pools_forget(int device) {
    for (row *r = row_each(NULL), *next; r; r = next) {
        next = row_each(r);
        if (r->pool && r->device == device) free_row(r);
    }
    for (pool *p = pools; p; p = p->next)
        if (p->device == device) pool_trim(p, 0);
}

static pool *pool_of(CUdevice dev, int current) {
    visible *v = see(dev);
    if (!v) return NULL;
    if (!v->default_pool) v->default_pool = v->current_pool = pool_make(dev, v->device);
    return current ? v->current_pool : v->default_pool;
}

/* ---- entry points ---- */

static CUresult take(CUdeviceptr *dptr, size_t bytes, pool *from, int named, void *stream) {
    if (!current()) return INVALID_CONTEXT;
    if (!dptr) return INVALID_VALUE;
    if (capturing(stream)) return capture_alloc(stream, named && from ? from->ordinal : current_ordinal(), bytes, dptr);
    cost_before(machine->cuda_alloc_us);
    enter();
    pool *p = named ? from : pool_of(current_ordinal(), 1);
    CUresult result = known(p) && !p->dying ? pool_take(p, bytes, POOLED, dptr) : INVALID_VALUE;
    leave();
    cost_after(machine->cuda_alloc_us);
    return result;
}
static CUresult give(CUdeviceptr dptr, void *stream) {
    if (capturing(stream)) return capture_free(stream, dptr);
    cost_before(machine->cuda_free_us);
    enter();
    row *r = row_find(dptr);
    CUresult result = r && (r->kind <= POOLED || r->kind == IPC) ? free_row(r) : INVALID_VALUE;
    leave();
    cost_after(machine->cuda_free_us);
    return result;
}

typedef struct {
    CUdeviceptr *dptr;
    size_t bytesize;
    void *stream;
} async_params;
EXPORT CUresult cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, void *stream) {
    async_params params = {dptr, bytesize, stream};
    CALL(598, &params, take(dptr, bytesize, NULL, 0, stream));
}
EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *dptr, size_t bytesize, void *stream) {
    async_params params = {dptr, bytesize, stream};
    CALL(599, &params, take(dptr, bytesize, NULL, 0, stream));
}
typedef struct {
    CUdeviceptr *dptr;
    size_t bytesize;
    pool *from;
    void *stream;
} from_params;
EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, pool *from, void *stream) {
    from_params params = {dptr, bytesize, from, stream};
    CALL(611, &params, take(dptr, bytesize, from, 1, stream));
}
EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *dptr, size_t bytesize, pool *from, void *stream) {
    from_params params = {dptr, bytesize, from, stream};
    CALL(612, &params, take(dptr, bytesize, from, 1, stream));
}
typedef struct {
    CUdeviceptr dptr;
    void *stream;
} free_params;
EXPORT CUresult cuMemFreeAsync(CUdeviceptr dptr, void *stream) {
    free_params params = {dptr, stream};
    CALL(600, &params, give(dptr, stream));
}
EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr dptr, void *stream) {
    free_params params = {dptr, stream};
    CALL(601, &params, give(dptr, stream));
}

typedef struct {
    uint32_t type, handles;
    struct {
        uint32_t type;
        int32_t id;
    } location;
    void *security;
    size_t max_size;
    uint16_t usage;
} pool_props;

static CUresult create(pool **out, const pool_props *props) {
    const visible *v = props ? see(props->location.id) : NULL;
    if (!out || !v || props->location.type != 1) return INVALID_VALUE;
    enter();
    *out = pool_make(props->location.id, v->device);
    leave();
    return OK;
}
EXPORT CUresult cuMemPoolCreate(pool **out, const pool_props *props) {
    struct {
        pool **pool;
        const pool_props *props;
    } params = {out, props};
    CALL(607, &params, create(out, props));
}
static int is_default(const pool *p) {
    for (int i = 0; i < visible_count; i++)
        if (seen[i].default_pool == p) return 1;
    return 0;
}
static CUresult destroy(pool *p) {
    enter();
    CUresult result = known(p) && !is_default(p) && !p->dying ? (pool_destroy(p), OK) : INVALID_VALUE;
    leave();
    return result;
}
EXPORT CUresult cuMemPoolDestroy(pool *p) {
    struct {
        pool *pool;
    } params = {p};
    CALL(608, &params, destroy(p));
}
static CUresult trim(pool *p, size_t keep) {
    enter();
    CUresult result = known(p) ? (pool_trim(p, keep), OK) : INVALID_VALUE;
    leave();
    return result;
}
EXPORT CUresult cuMemPoolTrimTo(pool *p, size_t keep) {
    struct {
        pool *pool;
        size_t keep;
    } params = {p, keep};
    CALL(602, &params, trim(p, keep));
}

static CUresult attribute(pool *p, int attr, void *value, int set) {
    if (!value || attr < 1 || attr > 8) return INVALID_VALUE;
    if (!set && attr >= 4) cost_before(2 * machine->cuda_query_us);
    enter();
    CUresult result = known(p) ? OK : INVALID_VALUE;
    if (result == OK && attr < 4) {
        int *flag = value;
        if (set)
            p->flags[attr] = (uint64_t)*flag;
        else
            *flag = (int)p->flags[attr];
    } else if (result == OK) {
        uint64_t *field[] = {&p->threshold, &p->reserved, &p->reserved_high, &p->used, &p->used_high};
        uint64_t *number = value;
        if (!set)
            *number = *field[attr - 4];
        else if (attr == 4)
            p->threshold = *number;
        else if ((attr == 6 || attr == 8) && *number == 0)
            *field[attr - 4] = *field[attr - 5];
        else
            result = INVALID_VALUE;
    }
    leave();
    return result;
}
typedef struct {
    pool *pool;
    int attr;
    void *value;
} attribute_params;
EXPORT CUresult cuMemPoolSetAttribute(pool *p, int attr, void *value) {
    attribute_params params = {p, attr, value};
    CALL(603, &params, attribute(p, attr, value, 1));
}
EXPORT CUresult cuMemPoolGetAttribute(pool *p, int attr, void *value) {
    attribute_params params = {p, attr, value};
    CALL(604, &params, attribute(p, attr, value, 0));
}
EXPORT CUresult cuMemPoolSetAccess(pool *p, const void *map, size_t count) {
    (void)p, (void)map, (void)count;
    SILENT(OK);
}

static CUresult get_pool(pool **out, CUdevice dev, int current) {
    if (!out || !see(dev)) return INVALID_VALUE;
    enter();
    *out = pool_of(dev, current);
    leave();
    return OK;
}
typedef struct {
    pool **out;
    CUdevice dev;
} get_params;
EXPORT CUresult cuDeviceGetDefaultMemPool(pool **out, CUdevice dev) {
    get_params params = {out, dev};
    CALL(606, &params, get_pool(out, dev, 0));
}
EXPORT CUresult cuDeviceGetMemPool(pool **out, CUdevice dev) {
    get_params params = {out, dev};
    CALL(610, &params, get_pool(out, dev, 1));
}
static CUresult set_pool(CUdevice dev, pool *p) {
    if (!see(dev)) return INVALID_DEVICE;
    enter();
    pool_of(dev, 0);
    CUresult result = known(p) && !p->dying ? (see(dev)->current_pool = p, OK) : INVALID_VALUE;
    leave();
    return result;
}
EXPORT CUresult cuDeviceSetMemPool(CUdevice dev, pool *p) {
    struct {
        CUdevice dev;
        pool *pool;
    } params = {dev, p};
    CALL(609, &params, set_pool(dev, p));
}

/* CUDA 13: by location instead of device. */
typedef struct {
    uint32_t type;
    int32_t id;
} location;
EXPORT CUresult cuMemSetMemPool(const location *where, int type, pool *p) {
    struct {
        const location *where;
        int type;
        pool *pool;
    } params = {where, type, p};
    CALL(803, &params, where && where->type == 1 && type == 1 ? set_pool(where->id, p) : INVALID_VALUE);
}
EXPORT CUresult cuMemGetMemPool(pool **out, const location *where, int type) {
    struct {
        pool **out;
        const location *where;
        int type;
    } params = {out, where, type};
    CALL(802, &params, where && where->type == 1 ? get_pool(out, where->id, 1) : INVALID_VALUE);
}
EXPORT CUresult cuMemGetDefaultMemPool(pool **out, const location *where, int type) {
    struct {
        pool **out;
        const location *where;
        int type;
    } params = {out, where, type};
    CALL(801, &params, where && where->type == 1 ? get_pool(out, where->id, 0) : INVALID_VALUE);
}
