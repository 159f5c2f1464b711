/* Devices as this process sees them, contexts, limits, streams. */
#include "cuda_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

int visible_count;
visible seen[SIM_DEVICES * 8];
context *contexts;

static uint32_t context_ids;
static _Thread_local context *stack[32];
static _Thread_local int depth;

context *current(void) { return depth ? stack[depth - 1] : NULL; }
visible *see(CUdevice ordinal) { return ordinal >= 0 && ordinal < visible_count ? &seen[ordinal] : NULL; }
sim_usage *usage(int device) { return &machine->slot[slot].usage[device]; }

int ordinal_of(const context *c) {
    for (int i = 0; c && i < visible_count; i++)
        if (seen[i].device == c->device) return i;
    return -1;
}
int current_ordinal(void) { return ordinal_of(current()); }

/* ---- CUDA_VISIBLE_DEVICES ---- */

static void show_device(int device, uint32_t instance) {
    visible *v = &seen[visible_count++];
    memset(v, 0, sizeof *v);
    v->device = device;
    v->instance = instance;
    if (instance)
        sim_mig_uuid(machine, device, instance, v->uuid);
    else
        memcpy(v->uuid, machine->device[device].uuid, 16);
}

static int show_by_uuid(const char *name) {
    char text[48];
    uint8_t uuid[16];
    for (int d = 0; d < (int)machine->device_count; d++) {
        sim_uuid_text(machine->device[d].uuid, "GPU-", text);
        if (!machine->device[d].mig && !strncasecmp(text, name, strlen(name))) {
            show_device(d, 0);
            return 1;
        }
        for (uint32_t i = 1; i <= machine->device[d].mig; i++) {
            sim_mig_uuid(machine, d, i, uuid);
            sim_uuid_text(uuid, "MIG-", text);
            if (strncasecmp(text, name, strlen(name))) continue;
            show_device(d, i);
            return 1;
        }
    }
    return 0;
}

/* A device in MIG mode shows its first instance. The list ends at the first word that matches no device. */
void find_devices(void) {
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    visible_count = 0;
    if (!list) {
        for (int d = 0; d < (int)machine->device_count; d++) show_device(d, machine->device[d].mig ? 1 : 0);
        return;
    }
    char copy[1024], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", list);
    for (char *word = strtok_r(copy, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
        char *end;
        long index = strtol(word, &end, 10);
        if (visible_count == SIM_DEVICES) return;
        if (*word && !*end) {
            if (index < 0 || index >= (long)machine->device_count) return;
            show_device((int)index, machine->device[index].mig ? 1 : 0);
        } else if ((strncasecmp(word, "GPU-", 4) && strncasecmp(word, "MIG-", 4)) || !show_by_uuid(word)) {
            return;
        }
    }
}

/* ---- making and ending contexts ---- */

enum shape { OWN, PRIMARY, GREEN };

static CUresult make(visible *v, enum shape shape, context **out) {
    cost_before(machine->cuda_context_us);
    enter();
    sim_usage *u = usage(v->device);
    const sim_device *d = &machine->device[v->device];
    const sim_costs *cost = &machine->cost;
    uint64_t base = shape == GREEN     ? cost->green_context
                    : u->context_bytes ? d->context_next_bytes
                                       : d->context_base_bytes;
    u->instance = v->instance;
    CUresult result = sim_charge(machine, slot, v->device, base) ? OUT_OF_MEMORY : OK;
    context *c = result == OK ? calloc(1, sizeof *c) : NULL;
    if (c) {
        u->context_bytes += base;
        u->contexts++;
        *c = (context){.next = contexts, .uid = ++context_ids, .references = 1, .device = v->device,
                       .base = base, .primary = shape == PRIMARY, .stack_limit = cost->stack_default,
                       .heap_limit = cost->heap_default, .fifo_limit = cost->printf_default};
        contexts = c;
        if (shape == PRIMARY) v->primary = c;
    }
    leave();
    cost_after(machine->cuda_context_us);
    if (c) tell_resource(CONTEXT_CREATED, c, NULL, NULL);
    *out = c;
    return result;
}

/* Calls the callback first, while all memory still exists. `reset`: also frees the device's other memory in this process. */
static void end(context *c, int reset) {
    tell_resource(CONTEXT_DESTROY, c, NULL, NULL);
    enter();
    visible *v = see(ordinal_of(c));
    free_owned(c);
    small_forget(c);
    if (reset) {
        pools_forget(c->device);
        vmm_forget(c->device);
    }
    sim_usage *u = usage(c->device);
    u->context_bytes -= c->base;
    u->module_bytes -= c->module_charged;
    u->local_bytes -= c->local;
    u->heaps_bytes -= c->heaps;
    u->internal_bytes -= c->internal_charged;
    u->contexts--;
    sim_discharge(machine, slot, c->device, c->base + c->module_charged + c->local + c->heaps + c->internal_charged);
    if (c->primary && v) v->primary = NULL;
    for (context **at = &contexts; *at; at = &(*at)->next)
        if (*at == c) {
            *at = c->next;
            break;
        }
    c->dead = 1; /* kept: another thread may have it as its current one */
    leave();
}

static int alive(const context *c) {
    const context *each = contexts;
    while (each && each != c) each = each->next;
    return each != NULL;
}

static CUresult create(context **out, CUdevice dev) {
    visible *v = see(dev);
    if (!out) return INVALID_VALUE;
    if (!v) return INVALID_DEVICE;
    CUresult result = make(v, OWN, out);
    if (result == OK && depth < 32) stack[depth++] = *out;
    return result;
}

EXPORT CUresult cuCtxCreate_v2(context **pctx, unsigned flags, CUdevice dev) {
    struct {
        context **pctx;
        unsigned flags;
        CUdevice dev;
    } params = {pctx, flags, dev};
    CALL(235, &params, create(pctx, dev));
}
EXPORT CUresult cuCtxCreate(context **pctx, unsigned flags, CUdevice dev) {
    struct {
        context **pctx;
        unsigned flags;
        CUdevice dev;
    } params = {pctx, flags, dev};
    CALL(10, &params, create(pctx, dev));
}
EXPORT CUresult cuCtxCreate_v3(context **pctx, void *affinity, int count, unsigned flags, CUdevice dev) {
    struct {
        context **pctx;
        void *affinity;
        int count;
        unsigned flags;
        CUdevice dev;
    } params = {pctx, affinity, count, flags, dev};
    CALL(645, &params, create(pctx, dev));
}
EXPORT CUresult cuCtxCreate_v4(context **pctx, void *how, unsigned flags, CUdevice dev) {
    struct {
        context **pctx;
        void *how;
        unsigned flags;
        CUdevice dev;
    } params = {pctx, how, flags, dev};
    CALL(757, &params, create(pctx, dev));
}

static CUresult destroy(context *c) {
    if (!c || !alive(c)) return INVALID_CONTEXT;
    if (current() == c) depth--;
    end(c, 0);
    return OK;
}
EXPORT CUresult cuCtxDestroy_v2(context *ctx) {
    struct {
        context *ctx;
    } params = {ctx};
    CALL(322, &params, destroy(ctx));
}
EXPORT CUresult cuCtxDestroy(context *ctx) {
    struct {
        context *ctx;
    } params = {ctx};
    CALL(11, &params, destroy(ctx));
}

static CUresult retain(context **out, CUdevice dev) {
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    visible *v = see(dev);
    if (!out) return INVALID_VALUE;
    if (!v) return INVALID_DEVICE;
    CUresult result = OK;
    pthread_mutex_lock(&once);
    if (v->primary) {
        v->primary->references++;
        *out = v->primary;
    } else {
        result = make(v, PRIMARY, out);
    }
    pthread_mutex_unlock(&once);
    return result;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(context **pctx, CUdevice dev) {
    struct {
        context **pctx;
        CUdevice dev;
    } params = {pctx, dev};
    CALL(386, &params, retain(pctx, dev));
}

static CUresult give_primary(CUdevice dev, int reset) {
    visible *v = see(dev);
    if (!v) return INVALID_DEVICE;
    if (!v->primary) return reset ? OK : INVALID_CONTEXT;
    if (!reset && --v->primary->references) return OK;
    end(v->primary, reset);
    return OK;
}
typedef struct {
    CUdevice dev;
} device_params;
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
    device_params params = {dev};
    CALL(544, &params, give_primary(dev, 0));
}
EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice dev) {
    device_params params = {dev};
    CALL(387, &params, give_primary(dev, 0));
}
EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev) {
    device_params params = {dev};
    CALL(545, &params, give_primary(dev, 1));
}
EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice dev) {
    device_params params = {dev};
    CALL(389, &params, give_primary(dev, 1));
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned *flags, int *active) {
    visible *v = see(dev);
    if (!v) return INVALID_DEVICE;
    if (flags) *flags = 0;
    if (active) *active = v->primary != NULL;
    return OK;
}

/* ---- the current context ---- */

EXPORT CUresult cuCtxSetCurrent(context *ctx) {
    CUresult result = ready();
    if (result != OK) return result;
    if (depth) depth--;
    if (ctx) stack[depth++] = ctx;
    return OK;
}
EXPORT CUresult cuCtxGetCurrent(context **pctx) {
    CUresult result = ready();
    if (result != OK) return result;
    *pctx = current();
    return OK;
}
EXPORT CUresult cuCtxPushCurrent_v2(context *ctx) {
    if (!ctx || depth == 32) return INVALID_VALUE;
    stack[depth++] = ctx;
    return OK;
}
EXPORT CUresult cuCtxPopCurrent_v2(context **pctx) {
    if (!depth) return INVALID_CONTEXT;
    depth--;
    if (pctx) *pctx = stack[depth];
    return OK;
}
EXPORT CUresult cuCtxGetDevice(CUdevice *dev) {
    CUresult result = ready();
    if (result != OK) return result;
    int ordinal = current_ordinal();
    if (ordinal < 0) return INVALID_CONTEXT;
    *dev = ordinal;
    return OK;
}
EXPORT CUresult cuCtxGetDevice_v2(CUdevice *dev, context *ctx) {
    int ordinal = ordinal_of(ctx);
    if (ordinal < 0) return INVALID_CONTEXT;
    *dev = ordinal;
    return OK;
}
EXPORT CUresult cuCtxGetId(context *ctx, unsigned long long *id) {
    const context *c = ctx ? ctx : current();
    if (!c) return INVALID_CONTEXT;
    *id = c->uid;
    return OK;
}
EXPORT CUresult cuCtxGetApiVersion(context *ctx, unsigned *version) {
    (void)ctx;
    *version = 3020;
    return OK;
}
EXPORT uint32_t gpumemSimContextUid(const context *c) { return c ? c->uid : 0; }
EXPORT uint32_t gpumemSimContextDevice(const context *c) { return (uint32_t)ordinal_of(c); }

static CUresult synchronize(void) {
    enter();
    streams_settle();
    leave();
    return OK;
}
EXPORT CUresult cuCtxSynchronize(void) { SILENT(synchronize()); }

/* Changes a context's charge for one of its parts; `booked` is the process's sum of that part. */
static CUresult recharge(context *c, uint64_t *part, uint64_t *booked, uint64_t want) {
    if (want > *part && sim_charge(machine, slot, c->device, want - *part)) return OUT_OF_MEMORY;
    if (want < *part) sim_discharge(machine, slot, c->device, *part - want);
    *booked += want - *part;
    *part = want;
    return OK;
}

static uint64_t above(uint64_t value, uint64_t with_context, uint64_t percent) {
    return value > with_context ? sim_round((value - with_context) * percent / 100, SIM_GRANULE) : 0;
}

/* Stacks: bytes of one thread x threads that an SM can hold x SMs. */
static uint64_t stacks(const context *c, uint64_t bytes) {
    const sim_device *d = &machine->device[c->device];
    uint64_t resident = d->threads * d->processors;
    return above(bytes * resident, machine->cost.stack_default * resident, machine->cost.stack_percent);
}

CUresult stack_grow(context *c, uint64_t bytes) {
    uint64_t want = stacks(c, bytes);
    return want > c->local ? recharge(c, &c->local, &usage(c->device)->local_bytes, want) : OK;
}

CUresult internal_add(context *c, int64_t change) {
    if (!c || c->dead || !change) return OK;
    uint64_t need = c->internal_need + (uint64_t)change;
    CUresult result = recharge(c, &c->internal_charged, &usage(c->device)->internal_bytes, sim_round(need, SIM_GRANULE));
    if (result == OK) c->internal_need = need;
    return result;
}

static CUresult set_limit(int limit, size_t value) {
    context *c = current();
    if (!c) return INVALID_CONTEXT;
    if (limit < 0 || limit > 7) return INVALID_VALUE;
    const sim_costs *cost = &machine->cost;
    uint64_t *limits[] = {&c->stack_limit, &c->fifo_limit, &c->heap_limit};
    CUresult result = OK;
    enter();
    sim_usage *u = usage(c->device);
    if (limit == 0) result = recharge(c, &c->local, &u->local_bytes, stacks(c, value));
    if (limit == 1 || limit == 2)
        result = recharge(c, &c->heaps, &u->heaps_bytes,
                          above(limit == 1 ? value : c->fifo_limit, cost->printf_default, cost->printf_percent) +
                              above(limit == 2 ? value : c->heap_limit, cost->heap_default, cost->heap_percent));
    if (result == OK && limit < 3) *limits[limit] = value;
    leave();
    return result;
}
EXPORT CUresult cuCtxSetLimit(int limit, size_t value) {
    struct {
        int limit;
        size_t value;
    } params = {limit, value};
    CALL(136, &params, set_limit(limit, value));
}
EXPORT CUresult cuCtxGetLimit(size_t *value, int limit) {
    const context *c = current();
    if (!c) return INVALID_CONTEXT;
    *value = limit == 0 ? c->stack_limit : limit == 1 ? c->fifo_limit : limit == 2 ? c->heap_limit : 0;
    return OK;
}
/* Peer access from the current context to another device's: an entry in its list, and the memory that it costs. */
static CUresult set_peer(context *peer, int on) {
    context *c = current();
    if (!c || !peer || !alive(peer)) return INVALID_CONTEXT;
    if (peer->device == c->device) return 217; /* unsupported */
    enter();
    context **at = c->peer, **end = c->peer + SIM_DEVICES;
    while (at < end && *at != peer) at++;
    CUresult result = (at < end) == on ? on ? 704 : 705 : OK; /* already enabled, not enabled */
    if (result == OK && on)
        for (at = c->peer; at < end && *at;) at++;
    if (result == OK && at == end) result = 711; /* too many peers */
    if (result == OK) result = internal_add(c, on ? (int64_t)machine->cost.peer : -(int64_t)machine->cost.peer);
    if (result == OK) *at = on ? peer : NULL;
    leave();
    return result;
}
EXPORT CUresult cuCtxEnablePeerAccess(context *peer, unsigned flags) {
    struct {
        context *peer;
        unsigned flags;
    } params = {peer, flags};
    CALL(313, &params, set_peer(peer, 1));
}
EXPORT CUresult cuCtxDisablePeerAccess(context *peer) { SILENT(set_peer(peer, 0)); }

/* ---- green contexts: a part of the primary one, which they keep alive ---- */

static CUresult create_green(context **out, CUdevice dev) {
    context *primary;
    if (!out) return INVALID_VALUE;
    CUresult result = retain(&primary, dev);
    return result == OK ? make(see(dev), GREEN, out) : result;
}
EXPORT CUresult cuGreenCtxCreate(context **out, void *desc, CUdevice dev, unsigned flags) {
    struct {
        context **out;
        void *desc;
        CUdevice dev;
        unsigned flags;
    } params = {out, desc, dev, flags};
    CALL(743, &params, create_green(out, dev));
}
static CUresult destroy_green(context *c) {
    if (!c || !alive(c)) return INVALID_CONTEXT;
    int dev = ordinal_of(c);
    end(c, 0);
    return give_primary(dev, 0);
}
EXPORT CUresult cuGreenCtxDestroy(context *ctx) {
    struct {
        context *ctx;
    } params = {ctx};
    CALL(744, &params, destroy_green(ctx));
}
EXPORT CUresult cuCtxFromGreenCtx(context **out, context *green) {
    struct {
        context **out;
        context *green;
    } params = {out, green};
    CALL(753, &params, out && green ? (*out = green, OK) : INVALID_VALUE);
}
